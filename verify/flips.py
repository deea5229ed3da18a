"""Search for float32 predictions that change inside a radius that float32 logits seem to certify.

    python -m verify flips benchmarks/weights/shift-256x8.safetensors --out FILE

A radius from logits alone leaves out how float32 rounds them. Near the boundary between two classes
rounding can move the logits by more than their gap. The search goes there along lines between
random images, and moves some pixels to the neighbouring floats. A flip is no violation of a
promise, since the certificate of the network as it runs in float32 must be 0 there; if it is not,
that is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound import Audit, audit, certify
from lipbound.modules import in_float64
from lipbound.network.kernels import ordinary_kernels
from lipbound.robust.training.trained import load_trained

TRIES = 64  # points around a candidate
PIXELS = 8  # that are moved to a neighbouring float


def on_the_boundary(exact: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    """Return a point between two images of different classes where the class changes."""
    low, high = 0.0, 1.0
    kind = int(exact(one.double()).argmax())
    for _ in range(40):
        middle = (low + high) / 2
        same = int(exact((one + middle * (other - one)).double()).argmax()) == kind
        low, high = (middle, high) if same else (low, middle)
    return one + low * (other - one)


def neighbours(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return copies of an image in which a few pixels are moved to the next float."""
    moved = x.repeat(TRIES, *[1] * (x.ndim - 1))
    flat = moved.flatten(1)
    for row in flat:
        places = torch.randint(flat.shape[1], (PIXELS,), generator=draw)
        goals = torch.randint(2, (PIXELS,), generator=draw).to(row.dtype) * 2
        row[places] = torch.nextafter(row[places], goals)
    return moved


def flip(model: nn.Module, found: Audit, x: Tensor, draw: torch.Generator) -> dict[str, Any] | None:
    """Return a flip within the radius that float32 logits give, if one is found around x."""
    points = neighbours(x, draw)
    logits = model(points)
    radii, kinds = certify(logits, found), logits.argmax(1)
    for place in (radii > 0).nonzero()[:, 0].tolist():
        away = (points - points[place]).double().flatten(1).norm(dim=1)
        inside = (away < radii[place]) & (kinds != kinds[place])
        if bool(inside.any()):
            other = int(inside.nonzero()[0, 0])
            return {
                "point": points[place : place + 1],
                "radius_of_logits": float(radii[place]),
                "distance_of_flip": float(away[other]),
                "classes": [int(kinds[place]), int(kinds[other])],
            }
    return None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=Path, help="a network of lipbound train")
    parser.add_argument("--count", type=int, default=20, help="lines to search (default 20)")


@torch.no_grad()
def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    network = load_trained(chosen.weights)
    model, exact = network.model, in_float64(network.model)
    found = audit(model, network.input_shape, search=0)
    draw = torch.Generator().manual_seed(chosen.seed)
    flips: list[dict[str, Any]] = []
    wrong = []
    with ordinary_kernels():
        for line in range(chosen.count):
            coarse = torch.rand(2, network.input_shape[0], 4, 4, generator=draw)
            one, other = functional.interpolate(coarse, network.input_shape[1:])[:, None]
            if int(model(one).argmax()) == int(model(other).argmax()):
                continue
            seen = flip(model, found, on_the_boundary(exact, one, other), draw)
            if seen is None:
                continue
            radii = {
                kind: float(certify(model, found, seen["point"], kind))
                for kind in ("real", "float64", "float32")
            }
            if radii["float32"] > 0:
                wrong.append(f"line {line}: a flip at {seen} though float32 is certified")
            flips.append({**{k: v for k, v in seen.items() if k != "point"}, "radii": radii})
            print(flips[-1], flush=True)
    return {"network": chosen.weights.name, "lines": chosen.count, "flips": flips}, wrong
