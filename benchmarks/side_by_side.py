"""Attack and certify trained networks with the same attacks, side by side.

    lipbound train --arm at+lipreg --preset fast --data cifar10 --folder DATA --out runs/robust
    python -m benchmarks.side_by_side runs/robust/final.safetensors \\
        benchmarks/weights/shift-256x8.safetensors --data cifar10 --folder DATA --out FILE

Each network gets a record: its accuracy on the first test images as they are, under PGD in L∞ and
in L2, and the share that is proved to stay correct in L2. All attacks have the same budget.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.files import append, provenance
from lipbound.network.accuracy import certified_accuracy
from lipbound.network.audits import audit
from lipbound.robust.attacks.evaluate import accuracy, evaluate
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.data import data_set
from lipbound.robust.training import checkpoints
from lipbound.robust.training.settings import as_dict
from lipbound.robust.training.trained import load_trained
from lipbound.runtime import pick_device

BALLS = {"linf": (2 / 255, 8 / 255), "l2": (36 / 255, 128 / 255)}
PROVED = (36 / 255, 72 / 255, 108 / 255)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="append the records to this JSON-lines file")
    given = parser.parse_args()
    device, split = pick_device(given.device), data_set(given.data, given.folder).test
    pixels, labels = split.load(torch.arange(min(given.images, len(split))))
    images = pixels.to(device).float() / 255, labels.to(device)
    for path in given.networks:
        record = {
            "experiment": "side_by_side",
            **measured(path, *images, given.restarts),
            **provenance(str(device)),
        }
        shown = {name: part["accuracy"] for name, part in record["accuracies"].items()}
        print(path, record["settings"]["arm"], shown, flush=True)
        if given.out is not None:
            append(given.out, record)


def measured(path: Path, images: Tensor, labels: Tensor, restarts: int) -> dict[str, Any]:
    """Return the accuracies of a network, clean, attacked and proved."""
    start = time.perf_counter()
    trained = load_trained(path)
    model = trained.model.to(images.device)
    found: dict[str, Any] = {}
    for ball, radii in BALLS.items():
        for radius in radii:
            plan = Plan(ball=ball, radius=radius, step=0.1, iterations=50, restarts=restarts)
            record = evaluate(model, images, labels, plan, curves=False, doubts=False)
            found["clean"] = record["clean"]
            found[f"{ball} {radius * 255:.0f}/255"] = record["pgd"]
    bound = audit(model, trained.input_shape, search=0)
    parts = zip(images.split(500), labels.split(500), strict=True)
    proved = certified_accuracy(model, bound, parts, PROVED)
    right = proved.predictions == proved.labels
    for radius in PROVED:
        found[f"proved {radius * 255:.0f}/255"] = accuracy(right & (proved.certified > radius))
    return {
        "settings": as_dict(trained.settings),
        "training_seconds": checkpoints.load(path)[1]["record"]["seconds"],
        "weights": sum(p.numel() for p in model.parameters()),
        "log10_lipschitz": math.log10(bound.upper),
        "restarts": restarts,
        "accuracies": found,
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    main()
