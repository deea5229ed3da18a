"""Time a step of each training arm, relative to plain adversarial training.

    python benchmarks/training_step.py --model wrn-28-10 --batch 200 --out FILE
    python benchmarks/training_step.py --model wrn-16-4 --batch 512 --out FILE

All arms share one network, one optimizer and the trainer's step (PGD-10, bfloat16, compiled). The
penalties alternate, so a clock drift affects all of them. Images are random bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from lipbound.files import append, provenance
from lipbound.robust.data.sets import in_memory
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.run import Run, penalty_of
from lipbound.robust.training.settings import settings

ARMS = ("at", "at+pm", "at+lipreg", "at+spectral")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="wrn-28-10")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="append the record to this JSON-lines file")
    chosen = parser.parse_args()
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (4 * chosen.batch, 32, 32, 3), np.uint8)
    labels = draw.integers(0, 10, len(images))
    data = in_memory((images, labels), (images[:10], labels[:10]), crop=4, flip=True)
    changes = {"model": chosen.model, "batch": chosen.batch, "compile": not chosen.no_compile}
    wanted = {arm: settings(arm, "paper-cifar", **changes) for arm in ARMS}
    run = Run(wanted["at"], data, Team(torch.device(chosen.device)))
    penalties = {arm: penalty_of(wanted[arm], run.model, data) for arm in ARMS}
    wait = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
    start = time.perf_counter()
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for round_ in range(chosen.rounds + 3):
        for arm in ARMS:
            run.descent.penalty = penalties[arm]
            wait()
            began = time.perf_counter()
            run.advance()
            wait()
            if round_ >= 3:
                times[arm].append(time.perf_counter() - began)
        if round_ == 2:
            warm = time.perf_counter() - start
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    ratios = {
        arm: statistics.median(a / b for a, b in zip(times[arm], times["at"], strict=True))
        for arm in ARMS
    }
    record = {
        "benchmark": "training_step",
        "network": chosen.model,
        "batch": chosen.batch,
        "compiled": not chosen.no_compile,
        "pgd_iterations": wanted["at"].attack,
        "rounds": chosen.rounds,
        "milliseconds": {arm: round(1e3 * value, 3) for arm, value in medians.items()},
        "ratio_to_at": {arm: round(value, 4) for arm, value in ratios.items()},
        "epoch_seconds": round(medians["at"] * 50_000 / chosen.batch, 2),
        "warmup_seconds": round(warm, 1),
        **provenance(chosen.device),
    }
    print(json.dumps(record, indent=1))
    if chosen.out:
        append(chosen.out, record)


if __name__ == "__main__":
    main()
