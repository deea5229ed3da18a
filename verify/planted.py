"""Plant known faults in the bounds, and count the layers until the campaign detects each of them.

    python -m verify planted --out benchmarks/records/planted.json

This shows that the campaign, which finds no violation, would find these faults.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lipbound import row_energies
from lipbound.bounds import finite, gram_iteration
from lipbound.bounds.supremum import cells
from lipbound.geometry import Convolution
from verify.campaign import LAYERS
from verify.layer_checks import claims
from verify.random_layers import random_stack

MOST = 20_000  # number of layers after which a fault counts as missed


def _undivided(conv: Convolution) -> tuple[int, ...]:
    return tuple(t // math.gcd(a, t) for a, t in zip(conv.dilation, conv.stride, strict=True))


def _one_less(least: Callable[..., int]) -> Callable[..., int]:
    return lambda conv, axis, fine, coarse: max(1, least(conv, axis, fine, coarse) - 1)


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "LipBound and Frobenius without widening": (
        row_energies, "widening", lambda _: lambda *given: 1.0,
    ),
    "Gram iteration without widening": (
        gram_iteration, "widening_factor", lambda _: lambda *given: 1.0,
    ),
    "reflect, replicate, circular: copies not counted": (
        Convolution, "padding_gain", lambda _: lambda conv: 1.0,
    ),
    "circular padding: stride taken whole where it does not divide the input": (
        Convolution, "symbol_stride", lambda _: _undivided,
    ),
    "bracket: cells said to reach half as far": (
        cells.Cover, "_angles", lambda angles: lambda *given: angles(*given) / 2,
    ),
    "sized bracket: grid one point too small": (finite, "_least", _one_less),
}  # fmt: skip
"""Fault → owner, name of its function, and how to make the wrong function from the right one."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the body with one fault in the library."""
    place, attribute, change = FAULTS[name]
    right = getattr(place, attribute)
    setattr(place, attribute, change(right))
    try:
        yield
    finally:
        setattr(place, attribute, right)


def seen_after(most: int = MOST, first: int = 0) -> tuple[int, str]:
    """Return the layers checked until a claim failed, and its name, empty if none failed."""
    layers, seed = 0, first
    while layers < most:
        stack = random_stack(seed, LAYERS)
        layers, seed = layers + len(stack.kernels), seed + 1
        for claim in claims(stack):
            if claim.wrong():
                return layers, claim.name
    return layers, ""


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found = {}
    for name in FAULTS:
        with planted(name):
            layers, claim = seen_after(first=chosen.seed)
        found[name] = {"layers": layers, "claim": claim}
        print(f"{name}: {claim or 'missed'} after {layers:,} layers", flush=True)
    return {"faults": found}, [f"missed: {n}" for n, one in found.items() if not one["claim"]]
