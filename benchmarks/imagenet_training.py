"""Train by the paper's ImageNet recipe on synthetic shards, and on the same network from memory.

    python -m benchmarks.imagenet_training --folder FOLDER --batch 256 --steps 300 --out FILE

One GPU takes the part of a batch of 4,096 that it would have among 4,096 / BATCH GPUs, for a few
hundred steps of adversarial training (ResNet-101, 224 pixels, PGD-5, penalty, averaged weights).
Blocks of steps from shards and from memory alternate, so a clock drift affects both. Memory is
measured without CUDA graphs first, and then with them.

If the folder holds no shards, synthetic ones are written there (2 GB), see benchmarks/imagenet.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.imagenet import synthetic
from lipbound.files import append, provenance
from lipbound.robust.data import data_set
from lipbound.robust.data.sets import Memory
from lipbound.robust.training.batches import Feed
from lipbound.robust.training.distributed import Team, team
from lipbound.robust.training.run import Run
from lipbound.robust.training.settings import settings

WARM = 6  # steps before a measurement, in which code is compiled and captured
HELD = 2048  # images in memory


class Counted(Feed):
    """A feed that counts its own steps, because each of the two must be asked in order."""

    step = 0


def timed(run: Run, feed: Counted, steps: int, who: Team) -> dict[str, float]:
    """Take steps with the images of a feed; return seconds in all, and seconds spent waiting."""
    wait = torch.cuda.synchronize if who.device.type == "cuda" else lambda: None
    run.feed, feed.waited, run.step = feed, 0.0, feed.step
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        run.advance()
    wait()
    feed.step = run.step
    return {"seconds": time.perf_counter() - start, "waited": feed.waited}


def memory(who: Team) -> float:
    """Return the most memory that was allocated since the last call, in GiB."""
    if who.device.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return found


def measured(given: argparse.Namespace, who: Team) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "data": "shards", "batch": given.batch, "size": given.size, "workers": given.workers,
        "compile": not given.no_compile, "accumulate": given.accumulate,
    }  # fmt: skip
    changes |= {"model": given.model} if given.model else {}
    chosen = settings("at+lipreg", "paper-imagenet", **changes)
    data = data_set("shards", given.folder)
    start = time.perf_counter()
    run = Run(chosen, data, who)
    images = run.data.train
    count = min(HELD, len(images))
    parts = torch.arange(count).split(given.batch)
    held = [torch.cat(part) for part in zip(*images.stream(parts, None), strict=True)]
    within = Memory(held[0].repeat(-(-given.batch * 8 // count), 1, 1, 1),
                    held[1].repeat(-(-given.batch * 8 // count)))  # fmt: skip
    fixed = type(data)(within, data.test, data.classes, data.mean, data.std)
    ready, shards = Counted(chosen, fixed, who), Counted(chosen, run.data, who)
    replay, run.networks.replay = run.networks.replay, None
    timed(run, ready, WARM, who)
    memory(who)
    plain = timed(run, ready, given.steps // 10, who)
    found: dict[str, Any] = {"without_graphs": {
        "images_per_second": round(given.batch * (given.steps // 10) / plain["seconds"], 1),
        "memory_gib": round(memory(who), 2),
    }}  # fmt: skip
    run.networks.replay = replay
    timed(run, ready, WARM, who)
    timed(run, shards, WARM, who)
    found["warm_seconds"] = round(time.perf_counter() - start, 1)
    memory(who)
    block = max(1, given.steps // 10)
    times: dict[str, list[dict[str, float]]] = {"memory": [], "shards": []}
    for _ in range(5):
        for name, feed in (("memory", ready), ("shards", shards)):
            times[name].append(timed(run, feed, block, who))
            rate = given.batch * block / times[name][-1]["seconds"]
            print(f"{name} {rate:.1f} images/s, {times[name][-1]}", flush=True)
    for name, some in times.items():
        seconds = sum(one["seconds"] for one in some)
        found[name] = {
            "images_per_second": round(given.batch * block * len(some) / seconds, 1),
            "waited": round(sum(one["waited"] for one in some) / seconds, 5),
        }
    pairs = zip(times["shards"], times["memory"], strict=True)
    found["ratio"] = round(statistics.median(b["seconds"] / a["seconds"] for a, b in pairs), 4)
    found["with_graphs"] = {"memory_gib": round(memory(who), 2)}
    run.feed = shards
    if not given.no_check:
        start = time.perf_counter()
        found["check"] = {k: v for k, v in run.check()[0].items() if "accuracy" in k}
        found["check_seconds"] = round(time.perf_counter() - start, 1)
    return {"model": chosen.model, "pgd_iterations": chosen.attack, "steps": run.step, **found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="folder of the shards")
    parser.add_argument("--samples", type=int, default=20_000, help="synthetic images to write")
    parser.add_argument("--model", help="another network than the recipe's ResNet-101")
    parser.add_argument("--batch", type=int, default=256, help="images of a step on this GPU")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="leave out the check at the end")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    given = parser.parse_args()
    if not list(Path(given.folder).glob("train-*.tar")):
        start = time.perf_counter()
        synthetic(given.folder, given.samples)
        print(f"wrote {given.samples:,} samples in {time.perf_counter() - start:.1f} s", flush=True)
    torch.manual_seed(0)
    with team(given.device) as who:
        record = measured(given, who)
        about = {name: getattr(given, name) for name in ("batch", "accumulate", "size", "workers")}
        append(given.out, {
            "benchmark": "imagenet_training", **about, "compiled": not given.no_compile,
            "exchange": who.overlaps, **record, **provenance(given.device),
        })  # fmt: skip


if __name__ == "__main__":
    main()
