"""Time certified brackets of a whole network, compared with Gram iteration without a certificate.

    python benchmarks/brackets.py --network resnet18 --out benchmarks/records/brackets-cpu.jsonl
    python benchmarks/brackets.py --network resnet18 --weights FILE   # trained weights
    python benchmarks/brackets.py --run RUN/final.safetensors   # from `lipbound train`
    python benchmarks/brackets.py --network resnet18 resnet50 --search levels plain --sound

Every call gets new weights: a He network with another seed, or the given weights with 1 % of noise.
So graphs may be kept from one call to the next, and answers may not. ``--search levels`` searches
level by level, as written for a GPU, and ``--search plain`` cell by cell, as on a processor. There
is a record for every network and search.

Gram iteration runs as published: float32, 5 products, the symbol on a 10×10 grid (60 points by
conjugate symmetry), strides ignored, one layer after another. ``--sound`` adds Gram iteration with
the same guarantee as a bracket's upper end: float64, a grid and a number of products that are fine
enough for ``rtol``, and a factor for what lies between the points of the grid.

Times are medians of ``--repeats`` calls after ``--warm`` calls, in which libraries choose
algorithms and graphs are captured. A later call with new weights may still capture a graph, because
numbers of cells differ; ``bracket_range`` shows it.

``dispatched`` counts the tensor operations of one call without views and allocations. This is
about the number of kernels that a GPU launches.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipbound
from lipbound.bounds import certified
from lipbound.bounds.gram_iteration import gram
from lipbound.bounds.supremum import levels
from lipbound.files import append
from lipbound.paper.networks import NAMES, Layers
from lipbound.paper.speed import gram_iteration
from lipbound.robust.training.trained import load_trained
from lipbound.symbols import taps

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
# Default numbers of warm-up runs and of timed runs; levels capture graphs in many warm-up runs.
RUNS = {"cpu": (1, 2), "cuda": (3, 7), "levels": (16, 15)}


def seconds(run, chosen, calls, renew=lambda: None) -> tuple[list[float], object]:
    """Return the times of synchronized runs after warm-ups, and the last result.

    ``calls`` are the numbers of both. ``renew`` runs before every run and is not counted.
    """
    times, device, clock = [], chosen.device, CLOCKS[chosen.clock]
    warm, repeats = calls
    for attempt in range(warm + repeats):
        renew()
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        result = run()
        if device == "cuda":
            torch.cuda.synchronize()
        if attempt >= warm:
            times.append(clock() - start)
    return times, result


def numbers(chosen, search: str = "") -> tuple[int, int]:
    """Return how many calls warm up and how many are timed."""
    graphs = chosen.device == "cuda" and search == "levels"
    warm, repeats = RUNS["levels"] if graphs else RUNS.get(chosen.device, RUNS["cpu"])
    return (warm if chosen.warm is None else chosen.warm), chosen.repeats or repeats


def renewal(layers, known: bool):
    """Return a function that gives the layers new weights, and their values now to start from."""
    draw = torch.Generator(next(iter(layers.values())).weight.device).manual_seed(1)
    kept = [layer.weight.detach().clone() for layer in layers.values()]

    @torch.no_grad()
    def renew() -> None:
        for layer, old in zip(layers.values(), kept, strict=True):
            noise = torch.randn(old.shape, generator=draw, device=old.device)
            spread = old.square().mean().sqrt()
            layer.weight.copy_(old + 0.01 * spread * noise if known else spread * noise)

    return renew


def sound_gram(layer, rtol: float) -> torch.Tensor:
    """Gram iteration whose grid, and whose products, each cost half of ``rtol``."""
    conv = lipbound.convolution(layer)
    rows = min(taps(conv).shape[1:3])
    products = math.ceil(math.log2(math.log(max(rows, 2)) / math.log1p(rtol / 2)) - 1)
    spreads = [m - 1 for m in taps(conv).shape[3:] if m > 1]
    widest, share = max(spreads, default=1), math.log1p(rtol / 2) / max(1, len(spreads))
    samples = math.ceil(math.pi * widest / 2 / math.acos(math.exp(-share)))
    return gram(layer, iterations=max(1, products), samples=samples)


class Dispatched(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.count += not (function.is_view or "view" in name or "empty" in name)
        return function(*args, **kwargs or {})


def dispatched(run) -> int:
    with Dispatched() as counter:
        run()
    return counter.count


def busy(run) -> float:
    """Return the seconds of one call in which the GPU computes rather than waits for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages()) / 1e6


def kernels_table(run) -> str:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        run()
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=60)


def layers_of(name: str, weights: str | None, device: str) -> dict[str, nn.Conv2d]:
    network = Layers(name).requires_grad_(False)
    layers = dict(zip(network.names, network.convolutions, strict=True))
    if weights is not None:
        from safetensors.torch import load_file

        stored = load_file(weights)
        found = {}
        for name, layer in layers.items():
            key = f"{name}.weight"
            if key in stored and stored[key].shape == layer.weight.shape:
                layer.weight.copy_(stored[key])
                found[name] = layer
        layers = found
    return {name: layer.to(device) for name, layer in layers.items()}


def measure(chosen, name: str) -> Iterator[dict]:
    """Yield the record of each search on one network."""
    network, weights = name, "he-normal, seed 0"
    if chosen.run:
        trained = load_trained(chosen.run)
        network, weights = trained.settings.model, f"trained, {trained.settings.arm}"
        parts = trained.model.to(chosen.device).requires_grad_(False).named_modules()
        layers = {name: part for name, part in parts if isinstance(part, nn.Conv2d)}
    else:
        layers = layers_of(name, chosen.weights, chosen.device)
        weights = Path(chosen.weights).name if chosen.weights else weights
    kernels = [layer.weight for layer in layers.values()]
    renew = renewal(layers, known=bool(chosen.run or chosen.weights))

    clock = CLOCKS[chosen.clock]
    gram_times, _ = seconds(lambda: [gram_iteration(k) for k in kernels], chosen, numbers(chosen))
    gram_seconds = statistics.median(gram_times)
    common = {
        "benchmark": "brackets",
        "network": network,
        "weights": weights,
        "layers": len(layers),
        "rtol": chosen.rtol,
        "gram_seconds": round(gram_seconds, 4),
        "clock": chosen.clock,
        "device": torch.cuda.get_device_name()
        if chosen.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads, {platform.machine()}",
        "torch": torch.__version__,
        "lipbound": lipbound.__version__,
    }
    if chosen.sound:
        start = clock()
        values = [float(sound_gram(layer, chosen.rtol)) for layer in layers.values()]
        common["sound_gram_seconds"] = round(clock() - start, 4)
        found = lipbound.brackets(layers, chosen.rtol).values()
        excess = [value / b.lower - 1 for value, b in zip(values, found, strict=True)]
        common["sound_gram_worst_excess"] = max(excess)

    def run() -> dict[str, lipbound.Bracket]:
        return lipbound.brackets(layers, chosen.rtol)

    usual = "levels" if chosen.device in certified.BY_LEVELS else "plain"
    for search in chosen.search or [usual]:
        with patch.object(certified, "BY_LEVELS", {chosen.device} if search == "levels" else set()):
            start = clock()
            run()
            first = clock() - start
            calls = numbers(chosen, search)
            times, found = seconds(run, chosen, calls, renew)
            evaluations = sorted(b.evaluations for b in found.values())
            median = statistics.median(times)
            record = {
                **common,
                "search": search,
                "calls": calls,
                "worst_width": max(b.width for b in found.values()),
                "median_evaluations": evaluations[len(evaluations) // 2],
                "bracket_seconds": round(median, 4),
                "bracket_range": [round(min(times), 4), round(max(times), 4)],
                "first_bracket_seconds": round(first, 4),
                "gram_over_bracket": round(gram_seconds / median, 3),
                "dispatched": dispatched(run),
            }
            if chosen.device == "cuda":
                record["busy_seconds"] = round(busy(run), 4)
                if chosen.profile:
                    chosen.profile.mkdir(parents=True, exist_ok=True)
                    file = f"{network}-{Path(weights).stem}-{search}.txt".replace(", ", "-")
                    (chosen.profile / file).write_text(kernels_table(run))
        levels.release_memory()
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--network", default=["resnet18"], nargs="+", choices=NAMES, metavar="NAME",
                        help=f"one or more of {', '.join(NAMES)}")  # fmt: skip
    parser.add_argument("--rtol", type=float, default=1e-3,
                        help="relative width of the brackets (default 1e-3)")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda (default: a GPU if there is one)")  # fmt: skip
    parser.add_argument(
        "--weights", help="safetensors with torchvision's names; missing layers are left out"
    )
    parser.add_argument(
        "--run",
        type=Path,
        help="use the weights of a network of `lipbound train` instead, whatever its architecture",
    )
    parser.add_argument(
        "--warm",
        type=int,
        help="number of calls before those that are timed (CPU 1, GPU 3, by levels 16)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="number of calls that are timed (CPU 2, GPU 7, by levels 15)",
    )
    parser.add_argument(
        "--search", nargs="+", choices=("levels", "plain"),
        help="search level by level, or cell by cell (default: as `lipbound.brackets` does there)",
    )  # fmt: skip
    parser.add_argument(
        "--sound",
        action="store_true",
        help="also time, once, Gram iteration with the guarantee of a bracket",
    )
    parser.add_argument(
        "--profile", type=Path, help="write tables of the GPU's kernels into this folder"
    )
    parser.add_argument(
        "--clock",
        default="wall",
        choices=[*CLOCKS],
        help="process: CPU seconds, for a shared machine",
    )
    parser.add_argument("--out", type=Path, help="append the records to this JSON-lines file")
    chosen = parser.parse_args()
    for name in chosen.network:
        for record in measure(chosen, name):
            print(json.dumps(record, indent=1), flush=True)
            if chosen.out:
                append(chosen.out, record)


if __name__ == "__main__":
    main()
