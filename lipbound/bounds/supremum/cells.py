"""Cells that cover the torus of frequencies, and how they are divided.

A cell is a diamond |δ_1|/h_1 + |δ_2|/h_2 ≤ 1 on the first two axes, times an interval |δ_3| ≤ h_3
on a third. It reaches the angle max(d_1 h_1, d_2 h_2) + d_3 h_3 from its centre. Diamonds tile the
plane as squares do, and have twice the area of the squares that reach the same angle. Turned by 45°
they are squares, so k·k of them of 1/k the size fill one, for every k.

Cells are stored on the host, in NumPy: they are a few numbers each, and a GPU would spend its time
on launches. Centres are sums of floats. A cell is centred at the computed sum, and its angle is
enlarged by more than the rounding error of such a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT
from lipbound.bounds.supremum.field import Field, Floats, Integers, indices

SMALLEST = 2.0**-28  # least size relative to the first cells; smaller ones are not divided
SLACK = 1e-13  # error of a centre's angle per degree: the rounding of 30 additions below 2π


@dataclass
class Cells:
    """Cells to be proved: ``block`` of the field, centre, and the angle the cell reaches."""

    block: Integers  # (P,), ascending
    frequency: Floats  # (P, D)
    angle: Floats  # (P,)
    left: Tensor  # (P, n): near the top left singular vectors, from the parent cell

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Self:
        if chosen.all():
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {name: value[chosen] for name, value in values.items() if name != "left"}
        return replace(self, left=pick(self.left, chosen.nonzero()[0]), **picked)

    def joined(self, other: Self, order: Integers) -> Self:
        """Concatenate with ``other`` and reorder by ``order``."""
        both: dict[str, Any] = {}
        for field in fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Tensor):
                both[field.name] = pick(torch.cat([mine, others]), order)
            else:
                both[field.name] = np.concatenate([mine, others])[order]
        return replace(self, **both)


@dataclass
class Diamonds(Cells):
    """Cells of a :class:`Cover`."""

    scale: Floats  # (P,): size relative to the first cells
    own: NDArray[np.bool_]  # (P,): whether −c is c, so that half the cell is enough


def pick(rows: Tensor, chosen: Integers) -> Tensor:
    """Select rows of a tensor on its device by indices on the host."""
    return rows[torch.from_numpy(chosen).to(rows.device)]


class Cover:
    """Cover of the frequencies of a stack of symbols.

    The first diamonds reach an angle of π/4 on two axes. A symbol of one tap is the same at all
    frequencies, so it has one cell of angle 0, which is never divided.

    Args:
        sizes: Number of taps on each axis, for every block. Blocks of several taps may differ in
            it, but not in the axes on which they have more than one.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]):
        self.sizes = [tuple(own) for own in sizes]
        spread = np.array(self.sizes, dtype=np.int64).reshape(len(self.sizes), -1) - 1
        several = spread > 0
        self.single = several.sum(1) == 0  # (blocks,): whether a block has one tap
        self.active = np.flatnonzero(several.sum(0)).tolist()
        if (several.sum(1)[~self.single] < len(self.active)).any():
            raise ValueError(f"sizes={sizes} have more than one tap on different axes")
        self.dims = spread.shape[1]
        self.half = math.pi / 2 / np.where(spread, spread, math.inf)  # (blocks, D)
        whole = (math.pi / 4) * (min(1, len(self.active)) + len(self.active[2:]))
        self.angle = np.where(self.single, 0.0, whole)  # (blocks,): of the first cells
        self.slack = SLACK * int(spread.sum(1).max())
        self.moves: dict[int, Floats] = {}

    def start(self, field: Field | None = None) -> Diamonds:
        """The first cells, one of each pair ±c, with random vectors for ``field``.

        Without a field they carry their own numbers in place of vectors.
        """
        first = {own: _first_centres(own, tuple(self.active)) for own in set(self.sizes)}
        counts = [len(first[own][0]) for own in self.sizes]
        centres, own = (np.concatenate(parts) for parts in
                        zip(*[first[own] for own in self.sizes], strict=True))  # fmt: skip
        scale = np.ones(len(centres))
        block = np.arange(len(counts)).repeat(counts)
        left = (
            torch.arange(len(block), device="cpu")
            if field is None
            else random_vectors(len(block), field)
        )
        return Diamonds(block, centres, self._angles(block, scale), left, scale, own)

    def divide(self, cells: Diamonds, parts: Integers) -> Diamonds | None:
        """Divide each cell into ``parts``^D of 1/parts the size; ``None`` if they are too small."""
        if not self.active or cells.scale.min() < SMALLEST:
            return None
        if parts.min() < 1:
            raise ValueError(f"parts={parts.min()} must be at least 1")
        parts = np.where(self.single[cells.block], 1, parts)
        parent, offset, scale, own = [], [], [], []
        for count in np.unique(parts).tolist():
            chosen = (parts == count).nonzero()[0]
            moves = self._moves(count)
            still = (moves == 0).all(1)
            kept = _first_half(moves) | ~cells.own[chosen, None]  # (cells, moves)
            at, move = kept.nonzero()
            parent.append(chosen[at])
            scale.append(cells.scale[chosen[at]] / count)
            half = self.half[cells.block[chosen[at]]]
            offset.append(cells.scale[chosen[at], None] * (moves[move] * half))
            own.append(cells.own[chosen[at]] & still[move])
        order = np.concatenate(parent).argsort(kind="stable")
        parents = np.concatenate(parent)[order]
        size = np.concatenate(scale)[order]
        return Diamonds(
            cells.block[parents],
            cells.frequency[parents] + np.concatenate(offset)[order],
            self._angles(cells.block[parents], size),
            pick(cells.left, parents),
            size,
            np.concatenate(own)[order],
        )

    def _moves(self, count: int) -> Floats:
        """Centres of the parts of a cell, in units of its half-widths: ``(count^D, D)``."""
        if count not in self.moves:
            steps = (2 * np.arange(count) + 1 - count) / count
            axes = [steps] * len(self.active)
            moves = np.zeros((count ** len(axes), self.dims))
            turned = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
            if len(axes) > 1:
                one, two = turned[:, 0].copy(), turned[:, 1].copy()
                turned[:, 0], turned[:, 1] = (one + two) / 2, (one - two) / 2
            moves[:, self.active] = turned
            self.moves[count] = moves
        return self.moves[count]

    def _angles(self, block: Integers, scale: Floats) -> Floats:
        return (self.angle[block] * scale + self.slack) * (1 + 8 * UNIT)


@lru_cache(maxsize=256)
def _first_centres(
    sizes: tuple[int, ...], active: tuple[int, ...]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Centres of the first cells, and which of them equal their negatives."""
    samples = np.array([4 * (m - 1) or 1 for m in sizes], dtype=np.int64)
    index = indices(samples.tolist())
    for axes in (active[:2], *[(axis,) for axis in active[2:]]):
        if axes:
            index = index[index[:, list(axes)].sum(1) % 2 == 0]
    mirrored = -index % samples
    weights = np.array([math.prod(samples[a + 1 :].tolist()) for a in range(len(samples))], int)
    kept = (index @ weights) <= (mirrored @ weights)
    centred = np.where(2 * index > samples, index - samples, index)[kept]  # |ω| ≤ π
    return centred * (2 * math.pi / samples), (index == mirrored).all(1)[kept]


def random_vectors(count: int, field: Field) -> Tensor:
    """Seeded unit vectors to start the eigenvalue iteration from: ``(count, n)``."""
    start = np.random.default_rng(0).standard_normal((count, field.rows))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    return field.send(start.astype(np.complex128))


def _first_half(moves: Floats) -> NDArray[np.bool_]:
    """Mask that keeps 0 and one of each pair ±move: ``(P,)``."""
    first = (moves != 0).argmax(1)
    return moves[np.arange(len(moves)), first] >= 0
