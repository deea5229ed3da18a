"""The work of one level on a device, in fixed steps; see :mod:`.levels`.

The device estimates, climbs and factors. It decides nothing that a bound rests on: what a factor
proves follows on the host, from its scale and its shortfall.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT, cholesky_error
from lipbound.bounds.supremum.blocked import shortfall, usual_shortfall
from lipbound.bounds.supremum.eigen import top_by_products, wrapped
from lipbound.bounds.supremum.field import MOST, Field, Integers, even_slices
from lipbound.bounds.supremum.peak import Peak
from lipbound.cuda_graphs import captured, graph_pool, warn_uncaptured
from lipbound.runtime import piece, ran_out

FIRST, STEPS, MATRIX = 16, 8, 32  # sizes of Krylov spaces: at first, later, for a single matrix
ROUNDS = 2  # climbs in the first level; one in each other level
BLOCKED = 192  # rows from which factors are made of products: a guess, to be measured
CORNER = 64  # rows that a factor made of products factors itself
SMALL = 1 << 13  # lag entries of a block below which every cell gathers its own
LATTICE = {0: 1, 1: 129, 2: 33, 3: 9}  # points per axis on which a climb looks for the maximum
FINER = {0: 0, 1: 2, 2: 3, 3: 5}  # lattices, each around the best point of the one before


class Stack:
    """Symbols of one shape on a device, and the work of one level on them, in fixed steps.

    No level reads a value back, so that it can run beside those of other stacks. Tensors stay where
    they are from one level to the next, and from one network to the next, as graphs need it.

    Args:
        field: The symbols.
        owner: ``(blocks,)`` layer that each block belongs to, ascending.
        rtol: Target relative width, upper/lower − 1.

    Attributes:
        lower: ``(layers,)`` attained values of σ1, rounded down.
        block: ``(layers,)`` blocks where they are attained.
        frequency: ``(layers, D)`` frequencies where they are attained.
        left: ``(layers, n)`` left unit vectors.
        vectors: ``(cells, n)`` vectors that belong to the estimates of the last level.
    """

    def __init__(self, field: Field, owner: Integers, rtol: float):
        self.rtol = rtol
        self.layers, self.dims = int(owner[-1]) + 1, len(field.sizes)
        rows, send = field.rows, field.send
        self.factor = rows * (cholesky_error(rows) + 8 * UNIT)
        usual = usual_shortfall(rows)
        self.blocked = rows >= BLOCKED and 4 * usual < 0.5 * rtol
        if self.blocked:
            self.factor = max(self.factor, usual)
        self.positions, self.lags = send(field.positions), send(field.lags)
        self.owners, self.owner = owner, send(owner)
        self.alone = len(field.lags) == 1  # one tap: a real matrix at every frequency
        few = len(field.lags) * rows**2 <= SMALL or 2 * rows**2 < field.blocks
        self.gathers = field.blocks > 1 and few
        waves = (2 * len(field.lags) - 1) * (2 * rows**2 if self.gathers else field.blocks)
        self.chunk = max(1, min(piece(MOST), field.room // (16 * rows**2 + 8 * waves)))
        kind = torch.float64 if self.alone else torch.complex128
        width = rows**2 * (1 if self.alone else 2)
        self.matrix = self.positions.new_zeros(field.blocks, 2 * len(field.lags) - 1, width)
        self.taps = torch.empty_like(field.taps)
        self.numbers = self.positions.new_empty(4, field.blocks)
        self.lower = self.positions.new_zeros(self.layers)
        self.block = self.owner.new_zeros(self.layers)
        self.frequency = self.positions.new_zeros(self.layers, self.dims)
        self.left = torch.zeros(self.layers, rows, dtype=kind, device=field.device)
        self.vectors = self.left[:0]
        start = np.random.default_rng(0).standard_normal(rows)
        self.random = send(start / np.linalg.norm(start)).to(kind)[None]
        points = np.linspace(-1, 1, LATTICE[self.dims])
        self.lattice = send(np.stack(np.meshgrid(*[points] * self.dims), -1).reshape(-1, self.dims)
                            if self.dims else np.zeros((1, 0)))  # fmt: skip
        self.graphs: dict[tuple[int, bool], Any] = {}
        self.pool = graph_pool(field.device)
        self.load(field)

    def load(self, field: Field) -> None:
        """Take the symbols of a field of the same shape, and forget what was attained."""
        self.field = field
        self.taps.copy_(field.taps)
        self.numbers.copy_(
            field.send(np.stack([field.error, field.usual, field.size, field.image_error]))
        )
        if field.odd is None:
            self.matrix.copy_(field.even)
        else:  # cosines times even lags are the real parts, sines times odd ones the imaginary
            parts = self.matrix.unflatten(2, (-1, 2))
            parts[:, : len(field.lags), :, 0] = field.even
            parts[:, len(field.lags) :, :, 1] = field.odd
        for state in (self.lower, self.block, self.frequency, self.left):
            state.zero_()

    def level(self, packed: Tensor, first: bool) -> Tensor:
        """Enqueue one level for cells whose columns are those of :func:`_packed`.

        Returns:
            Numbers of the call, estimates, shortfalls and scales of the cells, then the lower ends
            of the layers, all in one row. The next level overwrites it.
        """
        self._make_room(len(packed))
        key = len(packed), first
        if self.pool is None or key not in self.graphs:
            self.graphs[key] = None  # this call is the warm-up of a capture
            return self._level(packed, first)
        if self.graphs[key] is None:
            cells = packed.clone()
            try:
                self.graphs[key] = cells, captured(lambda: self._level(cells, first), self.pool)
            except RuntimeError as error:
                if ran_out(error):
                    raise
                self.pool = None
                warn_uncaptured(error)
                return self._level(packed, first)
        cells, (graph, row) = self.graphs[key]
        cells.copy_(packed)
        graph.replay()
        return row

    @property
    def bytes(self) -> int:
        """About what the stack and its graphs take."""
        cells = 16 * self.chunk * self.field.rows**2
        return 16 * (self.matrix.numel() + self.taps.numel()) + 5 * cells  # the field's own too

    def _make_room(self, count: int) -> None:
        if len(self.vectors) < count:
            larger = self.left.new_zeros(2 * count, self.left.shape[1])
            larger[: len(self.vectors)] = self.vectors
            self.vectors = larger
            self.graphs.clear()  # they would use the smaller one

    def _level(self, packed: Tensor, first: bool) -> Tensor:
        frequency, others = packed[:, : self.dims], packed[:, self.dims :].T
        cosine, angle, block, parent, call = others
        block = block.long()
        start = self.random.expand(len(packed), -1) if first else self.vectors[parent.long()]
        value = self._estimate(block, frequency, start, FIRST if first else STEPS)
        self._climb(value, block, frequency, angle, ROUNDS if first else 1)
        scale = self._scales(block, cosine)
        short = self._shortfalls(block, frequency, scale)
        return torch.cat([call, value, short, scale, self.lower])

    def peak(self, evaluations: Integers) -> Peak:
        """The best values attained, read from the device."""
        peak = Peak(self.field, self.owners, self.layers, self.rtol, moves=True)
        peak.lower, peak.block = self.lower.cpu().numpy().copy(), self.block.cpu().numpy().copy()
        peak.frequency = wrapped(self.frequency.cpu().numpy())
        peak.left = self.left.to(torch.complex128).cpu().numpy().copy()
        peak.evaluations = evaluations
        return peak

    def _grams(self, block: Tensor, frequency: Tensor, scale: Tensor) -> Tensor:
        """``scale``·FF* at each cell: ``(P, n, n)``, real for a stack of matrices."""
        angles = frequency @ self.lags.T
        waves = torch.cat([torch.cos(angles), torch.sin(angles[:, 1:])], 1) * scale[:, None]
        if self.gathers:
            grams = (waves[:, None] @ self.matrix[block])[:, 0]
        elif len(self.matrix) == 1:
            grams = waves @ self.matrix[0]
        else:  # zeros for all other blocks; products with zeros are exact
            whole = waves.new_zeros(len(waves), *self.matrix.shape[:2])
            at = block[:, None, None].expand(-1, 1, waves.shape[1])
            grams = whole.scatter_(1, at, waves[:, None]).flatten(1) @ self.matrix.flatten(0, 1)
        rows = self.field.rows
        if self.alone:
            return grams.reshape(-1, rows, rows)
        return torch.view_as_complex(grams.reshape(-1, rows, rows, 2))

    def _estimate(self, block: Tensor, frequency: Tensor, start: Tensor, steps: int) -> Tensor:
        """Estimate λ1(FF*) at all cells, and keep the vectors that belong to the estimates."""
        lower = self.lower[self.owner[block]]
        usual = self.numbers[1, block]
        level = torch.where(lower > 0, lower.square(), usual).clamp_min(1e-290)
        values, vectors = [], []
        for part in even_slices(len(block), self.chunk):
            grams = self._grams(block[part], frequency[part], 1 / level[part])
            value, vector = top_by_products(grams, start[part], steps)
            values.append(value)
            vectors.append(torch.where(value.isfinite()[:, None], vector, start[part]))
        self.vectors[: len(block)] = torch.cat(vectors)
        return (torch.cat(values) * level).nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0)

    def _climb(
        self, value: Tensor, block: Tensor, frequency: Tensor, angle: Tensor, rounds: int
    ) -> None:
        """Climb from each layer's best cell, or from its best point if no cell exceeds it."""
        count, owner = len(value), self.owner[block]
        best = torch.full_like(self.lower, -1.0).scatter_reduce(0, owner, value, "amax")
        number = torch.arange(count, device=value.device)
        number = torch.where(value == best[owner], number, count)
        at = torch.full_like(self.block, count).scatter_reduce(0, owner, number, "amin")
        better = best > self.lower.square()  # never where a layer has no cell
        at = at.clamp_max(count - 1)
        here = torch.where(better, block[at], self.block)
        place = torch.where(better[:, None], frequency[at], self.frequency)
        left = torch.where(better[:, None], self.vectors[at], self.left)
        reach, steps = angle[at].clamp_min(1e-6), MATRIX if self.alone else STEPS
        rows, image = self._image(here, place, left)
        self._record(here, place, left, image)
        for turn in range(rounds):
            place = self._uphill(rows, image, place, reach / 4**turn)
            level = image.abs().square().sum(-1).clamp_min(1e-290)
            _, left = top_by_products(self._grams(here, place, 1 / level), left, steps)
            rows, image = self._image(here, place, left)
            self._record(here, place, left, image)

    def _image(self, block: Tensor, frequency: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """u*K_h for every tap, ``(Q, N, T)``, and u*F, ``(Q, N)``."""
        field = self.field
        taps = self.taps if field.blocks == self.layers else self.taps[block]
        if self.alone:
            rows = (left[:, None] @ taps.flatten(2)).reshape(len(block), field.columns, -1)
            return rows, rows.sum(-1)
        halves = torch.view_as_real(left.conj().resolve_conj()).mT @ taps.flatten(2)
        rows = torch.complex(*halves.unbind(1)).reshape(len(block), field.columns, -1)
        angles = frequency @ self.positions.T
        waves = torch.complex(torch.cos(angles), torch.sin(angles))
        return rows, (rows @ waves[..., None])[..., 0]

    def _uphill(self, rows: Tensor, image: Tensor, frequency: Tensor, reach: Tensor) -> Tensor:
        """Find the largest Re u*F(ω)v, v = F*u, near ``frequency`` on ever finer lattices."""
        if self.alone:
            return frequency
        terms = (rows.mT @ image.conj()[..., None])[..., 0]  # (Q, T)
        for _ in range(FINER[self.dims]):
            tried = frequency[:, None] + reach[:, None, None] * self.lattice
            angles = tried @ self.positions.T
            height = torch.cos(angles) @ terms.real[..., None]
            height = height - torch.sin(angles) @ terms.imag[..., None]
            at = height.argmax(1)[..., None].expand(-1, 1, self.dims)
            frequency = tried.gather(1, at)[:, 0]
            reach = reach * (2.5 / LATTICE[self.dims])
        return frequency

    def _record(self, block: Tensor, frequency: Tensor, left: Tensor, image: Tensor) -> None:
        """Keep ‖F(ω)*u‖/‖u‖, rounded down, where it is a layer's best; see :class:`.peak.Peak`."""
        norm = torch.linalg.vector_norm(left, dim=-1)
        lower = torch.linalg.vector_norm(image, dim=-1) / norm * (1 - 64 * UNIT)
        lower = lower - self.numbers[3, block]
        better = lower > self.lower  # never for NaN
        self.lower.copy_(torch.where(better, lower, self.lower))
        self.block.copy_(torch.where(better, block, self.block))
        self.frequency.copy_(torch.where(better[:, None], frequency, self.frequency))
        self.left.copy_(torch.where(better[:, None], left / norm[:, None], self.left))

    def _scales(self, block: Tensor, cosine: Tensor) -> Tensor:
        """The scale s at which a factor proves σ1(F(c)) ≤ τ·cos θ; zero where none does."""
        error, _, size, _ = self.numbers[:, block]
        owner = self.owner[block]
        lower = self.lower[owner]
        floor = error / lower.square().clamp_min(1e-300) + self.factor + 8 * UNIT
        target = lower * (1 + (4 * floor).clamp(0.98 * self.rtol, 1.0))
        limit = (target * cosine).square() - error
        hopeful = limit > 1e-12 * size.square() / len(self.positions)
        return torch.where(hopeful, 1 / (limit * (1 - self.factor)), 0.0)

    def _shortfalls(self, block: Tensor, frequency: Tensor, scale: Tensor) -> Tensor:
        """δ such that I − s·FF* ⪰ −δ·I, for s·FF* as computed; ∞ without a factor."""
        found = []
        for part in even_slices(len(block), self.chunk):
            gaps = self._grams(block[part], frequency[part], -scale[part])
            gaps.diagonal(dim1=-2, dim2=-1).add_(1)
            if self.blocked:
                short = shortfall(gaps, CORNER)  # larger ones would cost too much width
                short = torch.where(short <= max(self.factor, 0.01 * self.rtol), short, math.inf)
            else:  # δ = c·tr(I − s·FF*), at most n·c
                factor, info = torch.linalg.cholesky_ex(gaps)
                pivots = factor.diagonal(dim1=-2, dim2=-1).real
                positive = (info == 0) & (pivots > 0).all(1)  # not so for NaN
                short = torch.where(positive, self.factor, math.inf)
            found.append(short)
        return torch.cat(found)
