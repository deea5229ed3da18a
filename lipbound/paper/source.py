"""Trained kernels for the experiments, from weights files or from the embedded network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lipbound.robust.models import digits as demo
from lipbound.weights import read_weights

Item = TypeVar("Item")


def trained_layers(weights: Sequence[Path]) -> list[tuple[str, Tensor]]:
    """Return names and float64 kernels with two spatial axes; without files the embedded ones."""
    found: list[tuple[str, Tensor]] = []
    for path in weights:
        state = read_weights(path)
        name = path.stem.removeprefix("cifar10_")
        found += [(f"{name} {k.removesuffix('.weight')}", t) for k, t in state.items()]
    if not weights:
        found = [(k.removesuffix(".weight"), t) for k, t in demo.network().state_dict().items()]
    return [(name, t.detach().double()) for name, t in found if t.ndim == 4]


def wide_layers(weights: Sequence[Path], inputs: int, wanted_by: str) -> list[tuple[str, Tensor]]:
    """Return kernels larger than 1×1 with at least ``inputs`` input channels."""
    known = trained_layers(weights)
    found = [(n, k) for n, k in known if max(k.shape[2:]) > 1 and k.shape[1] >= inputs]
    if not found:
        raise ValueError(
            f"{', '.join(str(path) for path in weights)}: no kernel with two spatial axes, larger "
            f"than 1×1, and at least {inputs} input channels; {wanted_by} needs one"
        )
    return found


def spread(items: list[Item], count: int) -> list[Item]:
    """Return ``count`` items, evenly spaced over the list."""
    if len(items) <= count:
        return items
    step = (len(items) - 1) / max(1, count - 1)
    return [items[round(i * step)] for i in range(count)]


def strongest(kernel: Tensor) -> int:
    """Return the output channel with the largest weights."""
    return int(kernel.flatten(1).norm(dim=1).argmax())


def row(kernel: Tensor, inputs: int) -> Tensor:
    """Return the kernel of that output channel and its first ``inputs`` input channels."""
    index = strongest(kernel)
    return torch.clone(kernel[index : index + 1, :inputs])
