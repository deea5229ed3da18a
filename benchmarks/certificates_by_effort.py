"""What LipSDP buys: certified accuracies of digits networks with effort='normal' and 'high'.

    python -m benchmarks.certificates_by_effort --out FILE

Each network is trained on the 8×8 digits on a CPU, without attacks, and certified on the test set
with both efforts. Ordinary networks are trained with the penalty at several weights, and with the
norm of every layer constrained; a shift network is trained for certificates.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lipbound import audit, constrain, unconstrain
from lipbound.files import append, provenance
from lipbound.network.accuracy import certified_accuracy
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.data import data_set
from lipbound.robust.data.sets import Data
from lipbound.robust.models.digits import SmallCNN
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import settings
from lipbound.robust.training.trained import load_trained

RADIUS = 36 / 255
WEIGHTS = (0.05, 0.2, 0.5)  # of the penalty
SCALE = 20.0  # of the logits of constrained networks, in the loss


def constrained(data: Data, seed: int, epochs: int = 40) -> nn.Module:
    """Train a network whose convolutions and Linear layers have norm at most 1."""
    torch.manual_seed(seed)
    model = constrain(SmallCNN(10, 1, batchnorm=False), norm=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    pixels, labels = data.train.load(torch.arange(len(data.train)))
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for part in torch.randperm(len(labels)).split(64):
            loss = functional.cross_entropy(SCALE * model(pixels[part].float() / 255), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rates.step()
    model.eval()
    unconstrain(model)
    return model


def trained(data: Data, arm: str, seed: int, **changes: Any) -> nn.Module:
    """Train one arm with its settings for the digits."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings(arm, "digits", seed=seed, **changes)
        train(chosen, data, Path(folder) / "run", device="cpu")
        return load_trained(Path(folder) / "run" / "final.safetensors").model.eval()


def networks(data: Data, seed: int) -> Iterator[tuple[str, nn.Module]]:
    for weight in WEIGHTS:
        yield f"penalty, weight {weight:g}", trained(data, "lipreg", seed, penalty_weight=weight)
    yield "constrained, norm 1", constrained(data, seed)
    yield "certified training", trained(data, "certified", seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    given = parser.parse_args()
    data = data_set("digits")
    pixels, labels = data.test.load(torch.arange(len(data.test)))
    images = pixels.float() / 255
    for name, model in networks(data, given.seed):
        for effort in ("normal", "high"):
            start = time.perf_counter()
            found = audit(model, tuple(images.shape[1:]), search=0, effort=effort)
            seconds = time.perf_counter() - start
            result = certified_accuracy(model, found, [(images, labels)], [RADIUS])
            right = result.predictions == result.labels
            record = {
                "experiment": "certificates by effort",
                "network": name,
                "effort": effort,
                "upper": found.upper,
                "floor": found.floor,
                "clean": accuracy(right),
                "certified": accuracy(right & (result.certified > RADIUS)),
                "median_radius": float(result.certified.median()),
                "seconds": round(seconds, 1),
                **provenance("cpu", given.seed),
            }
            append(given.out, record)
            shares = record["clean"]["accuracy"], record["certified"]["accuracy"]
            print(name, effort, found.upper, found.floor, *shares, record["median_radius"])


if __name__ == "__main__":
    main()
