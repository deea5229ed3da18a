"""Cells that cover the torus of frequencies, and how they are divided.

Diamonds |δ_1|/h_1 + |δ_2|/h_2 ≤ 1 on the first two axes, times an interval |δ_3| ≤ h_3 on a third:
a cell reaches the angle max(d_1 h_1, d_2 h_2) + d_3 h_3 from its centre. Diamonds tile the plane
as squares do, and have twice the area of the squares that reach the same angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.bounds.field import Field
from lipbound.bounds.rounding import UNIT
from lipbound.symbol import positions

LEVELS = 30


@dataclass
class Cells:
    """Frequencies to be proved: ``block`` of the field, centre, and the angle the cell reaches."""

    block: Tensor  # (P,)
    index: Tensor  # (P, D) integers, ω = 2π·index/samples
    samples: Tensor  # (D,)
    angle: float
    left: Tensor  # (P, n): near the top left singular vectors, from the parent cell
    scale: Tensor | None = None  # (D,) integers: ω = 2π·scale·index/samples

    @property
    def frequencies(self) -> Tensor:
        index = self.index if self.scale is None else (self.index * self.scale) % self.samples
        return index * (2 * math.pi / self.samples.double())

    def __getitem__(self, chosen: Tensor) -> Cells:
        return replace(
            self, block=self.block[chosen], index=self.index[chosen], left=self.left[chosen]
        )


def start_cells(field: Field) -> Cells:
    """The coarsest cover of half the torus: cells reach π/4 on the pair of axes, and on a third."""
    device = field.taps.device
    spread = [m - 1 for m in field.sizes]
    samples = [4 * w if w else 1 for w in spread]
    index = positions(samples)
    active = [axis for axis, w in enumerate(spread) if w]
    for axes in (active[:2], *[[axis] for axis in active[2:]]):
        if axes:
            index = index[index[:, axes].sum(1) % 2 == 0]
    index = _one_of_each_pair(index, samples)
    blocks = torch.arange(field.blocks).repeat_interleave(len(index))
    index = index.repeat(field.blocks, 1)
    return Cells(
        blocks.to(device),
        index.to(device),
        torch.tensor(samples, device=device),
        _angle(field, samples),
        random_vectors(len(blocks), field),
    )


def random_vectors(count: int, field: Field) -> Tensor:
    """Seeded starts for the eigenvalue iteration: ``(count, n)``."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(count, field.rows, generator=draw, dtype=torch.float64)
    return start.to(field.taps.device).to(torch.complex128)


def quarter(field: Field) -> Callable[[Cells], Cells | None]:
    """How a field's cells are divided: into cells of half the reach."""
    active = [axis for axis, m in enumerate(field.sizes) if m > 1]
    dims = len(field.sizes)
    moves = [
        [sign if a == axis else 0 for a in range(dims)] for axis in active[:2] for sign in (1, -1)
    ]
    for axis in active[2:]:
        moves = [[*m[:axis], sign, *m[axis + 1 :]] for m in moves for sign in (1, -1)]

    def divide(cells: Cells) -> Cells | None:
        samples = torch.where(cells.samples > 1, cells.samples * 2, 1)
        if not active or int(samples.max()) >> LEVELS:
            return None
        steps = torch.tensor(moves, device=cells.index.device)
        index = (cells.index[:, None] * 2 + steps).flatten(0, 1) % samples
        block = cells.block.repeat_interleave(len(moves))
        left = cells.left.repeat_interleave(len(moves), 0)
        # At −ω the vectors are the conjugates.
        kept, mirrored = _canonical(index, samples)
        left = torch.where(mirrored[:, None], left.conj(), left)
        both, inverse = torch.cat([block[:, None], kept], 1).unique(dim=0, return_inverse=True)
        first = torch.zeros(len(both), dtype=torch.int64, device=both.device)
        first[inverse] = torch.arange(len(inverse), device=both.device)
        angle = _angle(field, samples.tolist())
        return Cells(both[:, 0], both[:, 1:], samples, angle, left[first])

    return divide


def _angle(field: Field, samples: list[int]) -> float:
    reach = [
        math.pi * (m - 1) / s for m, s in zip(field.sizes, samples, strict=True) if m > 1
    ]  # d·h, h = 2π/S
    return (max(reach[:2], default=0.0) + sum(reach[2:])) * (1 + 8 * UNIT)


def _canonical(index: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller, in row order, of k and −k, and whether that is −k."""
    mirrored = (-index) % samples
    differs = index != mirrored
    first = differs & (differs.long().cumsum(1) == 1)
    swap = ((mirrored - index) * first).sum(1) < 0
    return torch.where(swap[:, None], mirrored, index), swap


def _one_of_each_pair(index: Tensor, samples: list[int]) -> Tensor:
    if not samples:
        return index
    return _canonical(index, torch.tensor(samples))[0].unique(dim=0)
