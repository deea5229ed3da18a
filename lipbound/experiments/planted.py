"""Plant known faults in the bounds, one at a time, and count the layers until the campaign sees it.

    python -m lipbound.experiments.planted --out benchmarks/records/planted.json

A check that finds nothing is worth what it would have found.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lipbound.bounds import cells, energies, finite, gram_iteration
from lipbound.experiments.campaign import LAYERS
from lipbound.experiments.layer_checks import claims
from lipbound.experiments.random_layers import random_stack
from lipbound.files import write
from lipbound.geometry import Convolution
from lipbound.records import provenance

MOST = 20_000  # layers, then the fault counts as missed


def _undivided(conv: Convolution) -> tuple[int, ...]:
    return tuple(t // math.gcd(a, t) for a, t in zip(conv.dilation, conv.stride, strict=True))


def _half(angles: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cover, scale: angles(cover, scale) / 2


def _one_less(least: Callable[..., int]) -> Callable[..., int]:
    return lambda conv, axis, fine, coarse: max(1, least(conv, axis, fine, coarse) - 1)


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "LipBound and Frobenius without widening": (
        energies, "widening_factor", lambda _: lambda *given: 1.0,
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
    "bracket: cells said to reach half as far": (cells.Cover, "_angles", _half),
    "sized bracket: grid one point too small": (finite, "_least", _one_less),
}  # fmt: skip
"""What is wrong → where, its name there, and from the right function to the wrong one."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The library with one fault."""
    place, attribute, change = FAULTS[name]
    right = getattr(place, attribute)
    setattr(place, attribute, change(right))
    try:
        yield
    finally:
        setattr(place, attribute, right)


def seen_after(most: int = MOST, first: int = 0) -> tuple[int, str]:
    """Layers until a claim was wrong, and which; all of them and nothing if none was."""
    layers, seed = 0, first
    while layers < most:
        stack = random_stack(seed, LAYERS)
        layers, seed = layers + len(stack.kernels), seed + 1
        for claim in claims(stack):
            if claim.wrong():
                return layers, claim.name
    return layers, ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the record here")
    chosen = parser.parse_args()
    found = {}
    for name in FAULTS:
        with planted(name):
            layers, claim = seen_after()
        found[name] = {"layers": layers, "claim": claim}
        print(f"{name}: {claim or 'missed'} after {layers:,} layers", flush=True)
    record = {"experiment": "planted", "faults": found, **provenance()}
    if chosen.out:
        write(chosen.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
