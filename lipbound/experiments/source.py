"""Trained kernels for the experiments: from weights files, or the embedded network's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lipbound import demo
from lipbound.sources import read_weights


def trained_layers(weights: Sequence[Path]) -> list[tuple[str, Tensor]]:
    """Kernels of two spatial axes by name, float64; the embedded network's without files."""
    found: list[tuple[str, Tensor]] = []
    for path in weights:
        state = read_weights(path)
        name = path.stem.removeprefix("cifar10_")
        found += [(f"{name} {k.removesuffix('.weight')}", t) for k, t in state.items()]
    if not weights:
        found = [(k.removesuffix(".weight"), t) for k, t in demo.network().state_dict().items()]
    return [(name, t.detach().double()) for name, t in found if t.ndim == 4]
