"""Time certified brackets of a whole ResNet, compared with Gram iteration without a certificate.

    python benchmarks/brackets.py --depth 18 --out benchmarks/records/brackets-cpu.jsonl
    python benchmarks/brackets.py --depth 18 --weights WEIGHTS.safetensors   # trained weights
    python benchmarks/brackets.py --run RUN/final.safetensors   # from `lipbound train`

Gram iteration runs as published: float32, 5 products, the symbol on a 10×10 grid (60 points by
conjugate symmetry), strides ignored, one layer after another.

``dispatched`` counts the tensor operations of one call without views and allocations. This is
about the number of kernels that a GPU launches.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipbound
from lipbound.files import append
from lipbound.paper.networks import Layers
from lipbound.paper.speed import gram_iteration
from lipbound.robust.training.trained import load_trained


def seconds(run, repeats: int, device: str, clock) -> tuple[float, object]:
    """Return the shortest time of a few synchronized runs after a warm-up, and the result."""
    result = run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        result = run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times), result


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


def layers_of(depth: int, weights: str | None, device: str) -> dict[str, nn.Conv2d]:
    network = Layers(f"resnet{depth}").requires_grad_(False)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=18, choices=(18, 34, 50, 101, 152))
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--weights", help="safetensors with torchvision's names; missing layers are left out"
    )
    parser.add_argument("--run", type=Path, help="use a network of `lipbound train` instead")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=("wall", "process"),
        help="process: CPU seconds, for a shared machine",
    )
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    network, weights = f"resnet{chosen.depth}", "he-normal, seed 0"
    if chosen.run:
        trained = load_trained(chosen.run)
        network, weights = trained.settings.model, f"trained, {trained.settings.arm}"
        parts = trained.model.to(chosen.device).requires_grad_(False).named_modules()
        layers = {name: part for name, part in parts if isinstance(part, nn.Conv2d)}
    else:
        layers = layers_of(chosen.depth, chosen.weights, chosen.device)
        weights = Path(chosen.weights).name if chosen.weights else weights
    kernels = [layer.weight for layer in layers.values()]

    clock = time.perf_counter if chosen.clock == "wall" else time.process_time
    gram_seconds, _ = seconds(
        lambda: [gram_iteration(k) for k in kernels], chosen.repeats, chosen.device, clock
    )
    ours_seconds, found = seconds(
        lambda: lipbound.brackets(layers, chosen.rtol), chosen.repeats, chosen.device, clock
    )
    evaluations = sorted(b.evaluations for b in found.values())
    record = {
        "benchmark": "brackets",
        "network": network,
        "weights": weights,
        "layers": len(layers),
        "rtol": chosen.rtol,
        "worst_width": max(b.width for b in found.values()),
        "median_evaluations": evaluations[len(evaluations) // 2],
        "bracket_seconds": round(ours_seconds, 4),
        "gram_seconds": round(gram_seconds, 4),
        "gram_over_bracket": round(gram_seconds / ours_seconds, 3),
        "dispatched": dispatched(lambda: lipbound.brackets(layers, chosen.rtol)),
        "clock": chosen.clock,
        "device": torch.cuda.get_device_name()
        if chosen.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads, {platform.machine()}",
        "torch": torch.__version__,
        "lipbound": lipbound.__version__,
    }
    if chosen.device == "cuda":
        record["busy_seconds"] = round(busy(lambda: lipbound.brackets(layers, chosen.rtol)), 4)
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
