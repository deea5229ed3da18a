"""The work of one level on a device, in fixed steps; see :mod:`.levels`.

The device estimates, climbs and factors. It decides nothing that a bound rests on: what a factor
proves follows on the host, from its scale and its shortfall.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT, cholesky_error
from lipbound.bounds.supremum.blocked import shortfall
from lipbound.bounds.supremum.eigen import top_by_products, wrapped
from lipbound.bounds.supremum.field import CHUNK_BYTES, MOST, Field, Floats, Integers, even_slices
from lipbound.bounds.supremum.peak import Peak
from lipbound.cuda_graphs import captured, device_memory, graph_pool, warn_uncaptured
from lipbound.runtime import piece, ran_out

FIRST, STEPS, MATRIX = 12, 8, 32  # sizes of Krylov spaces: at first, later, for a single matrix
BLOCKED = 128  # rows from which factors are made of products
CORNER = 32  # rows that a factor made of products factors itself
SMALL = 1 << 13  # lag entries of a block below which every cell gathers its own
LARGEST = 1 << 30  # bytes of complex matrices handled at once, at most
POOL = 64 << 20  # bytes of a pool beside its tensors: cuBLAS workspaces, and room not used
COARSE = 1e-4  # targets from which estimates in single precision and factors of products serve
LATTICE = {0: 1, 1: 129, 2: 33, 3: 9}  # points per axis on which a climb looks for the maximum
FINER = {0: 0, 1: 2, 2: 3, 3: 5}  # lattices, each around the best point of the one before


class Stack:
    """Symbols of one shape on a device, and the work of one level on them, in fixed steps.

    No level reads a value back, so that it can run beside those of other stacks. Tensors stay where
    they are from one level to the next, and from one network to the next, as graphs need it.

    Args:
        taps: Symbols ``(blocks, n, N, *m)``. Only their form counts, until they are loaded.
        owner: ``(blocks,)`` layer that each block belongs to, ascending.
        rtol: Target relative width, upper/lower − 1.
        room: Bytes that complex matrices handled at once may take.

    Attributes:
        lower: ``(layers,)`` attained values of σ1, rounded down.
        block: ``(layers,)`` blocks where they are attained.
        frequency: ``(layers, D)`` frequencies where they are attained.
        left: ``(layers, n)`` left unit vectors.
        vectors: ``(cells, n)`` vectors that belong to the estimates of the last level.
    """

    def __init__(self, taps: Tensor, owner: Integers, rtol: float, room: int):
        self.field = field = Field(taps)
        self.shape, self.rtol, self.room, self.loads = taps.shape, rtol, room, 0
        self.layers, self.dims = int(owner[-1]) + 1, len(field.sizes)
        rows, send = field.rows, field.send
        self.factor = rows * (cholesky_error(rows) + 8 * UNIT)
        coarse = rtol >= COARSE
        self.blocked = coarse and rows >= BLOCKED
        self.positions, self.lags = send(field.positions), send(field.lags)
        self.owners, self.owner = owner, send(owner)
        self.alone = len(field.lags) == 1  # one tap: a real matrix at every frequency
        few = len(field.lags) * rows**2 <= SMALL or 2 * rows**2 < field.blocks
        self.gathers = field.blocks > 1 and few
        waves = (2 * len(field.lags) - 1) * (2 * rows**2 if self.gathers else field.blocks)
        small = 128 * FIRST**2  # bytes of small eigenvalue problems
        self.each = 16 * rows**2, 8 * waves + small  # bytes for a cell: matrix, and beside it
        most = max(1, min(piece(MOST), room // sum(self.each)))
        self.chunk = 1 << round(math.log2(most))
        kind = torch.float64 if self.alone else torch.complex128
        width = rows**2 * (1 if self.alone else 2)
        self.matrix = self.positions.new_zeros(field.blocks, 2 * len(field.lags) - 1, width)
        self.rough = self.matrix.float() if coarse else self.matrix  # for estimates
        self.taps = torch.empty_like(field.taps)
        self.sums = field.sums  # a graph reads it, and cannot copy it from the host
        self.numbers = self.positions.new_empty(4, field.blocks)
        self.lower = self.positions.new_zeros(self.layers)
        self.block = self.owner.new_zeros(self.layers)
        self.frequency = self.positions.new_zeros(self.layers, self.dims)
        self.left = torch.zeros(self.layers, rows, dtype=kind, device=field.device)
        rough = {torch.float64: torch.float32, torch.complex128: torch.complex64}[kind]
        self.vectors = self.left[:0].to(rough if coarse else kind)
        start = np.random.default_rng(0).standard_normal(rows)
        self.random = send(start / np.linalg.norm(start)).to(self.vectors.dtype)[None]
        points = np.linspace(-1, 1, LATTICE[self.dims])
        self.lattice = send(np.stack(np.meshgrid(*[points] * self.dims), -1).reshape(-1, self.dims)
                            if self.dims else np.zeros((1, 0)))  # fmt: skip
        self.most = 0  # cells of a level so far
        self.graphs: dict[tuple[str, bool, bool, int], Any] = {}
        self.warm: set[tuple[str, bool, bool]] = set()  # what ran before, as a capture asks for
        self.pool = graph_pool(field.device)

    def load(self, taps: Tensor) -> None:
        """Take symbols of the same shape, and forget what was attained.

        This sets ``loaded`` to the number of the load and the ``error`` of each block.
        """
        self.field, self.loads = Field(taps), self.loads + 1
        self.taps.copy_(self.field.taps)
        number = torch.full_like(self.numbers[0, :1], self.loads)
        (self.loaded,) = self._repeated(self._prepare, False, number)

    def _prepare(self, first: bool, number: Tensor) -> tuple[Tensor]:
        """Compute the lags; return the number, and the ``error`` of each block."""
        field = Field(self.taps.reshape(self.shape))
        field.sums = self.sums
        self.numbers.copy_(field.measures())
        even, odd = field.even, field.odd
        if odd is None:
            self.matrix.copy_(even)
        else:  # cosines times even lags are the real parts, sines times odd ones the imaginary
            parts = self.matrix.unflatten(2, (-1, 2))
            parts[:, : len(field.lags), :, 0] = even
            parts[:, len(field.lags) :, :, 1] = odd
        if self.rough is not self.matrix:
            self.rough.copy_(self.matrix)
        for state in (self.lower, self.block, self.frequency, self.left):
            state.zero_()
        return (torch.cat([number, self.numbers[0]]),)

    def sizes(self, count: int) -> list[int]:
        """How many cells are handled at once, when there are so many.

        With graphs these are few different numbers, because each needs graphs of its own.
        """
        if self.pool is None:
            return [part.stop - part.start for part in even_slices(count, self.chunk)]
        full, rest = divmod(count, self.chunk)
        least = 1 if self.alone else max(self.chunk // 8 if full else 0, min(8, self.chunk))
        return [self.chunk] * full + ([_power(max(rest, least))] if rest else [])

    def level(self, packed: Tensor, first: bool) -> Tensor:
        """Enqueue one level for cells whose columns are those of :func:`.levels._packed`.

        Args:
            packed: The cells, as many as the :meth:`sizes` sum to.
            first: Whether this is the first level.

        Returns:
            Numbers of the call, estimates, shortfalls and scales of the cells, then the lower ends
            of the layers, all in one row.
        """
        self._make_room(_power(len(packed)))
        self.most = max(self.most, len(packed))
        if len(packed) <= self.chunk:
            return self._repeated(self._whole, first, packed)[0]
        parts = packed.split(self.sizes(len(packed)))
        starts = self._starts(packed, first).split([len(part) for part in parts])
        values, at = [], 0
        for part, start in zip(parts, starts, strict=True):
            value, vectors = self._repeated(self._estimate, first, part, start)
            values.append(value)
            self.vectors[at : at + len(part)] = vectors
            at += len(part)
        value = torch.cat(values)
        more = _power(at) - at if self.pool is not None else 0
        known = torch.nn.functional.pad(value, (0, more), value=-1.0)
        self._repeated(self._climb, first, known, torch.nn.functional.pad(packed, (0, 0, 0, more)))
        proofs = [self._repeated(self._factor, first, part)[0] for part in parts]
        call, short, scale = torch.cat(proofs, 1)
        return torch.cat([call, value, short, scale, self.lower])

    def _repeated(
        self, work: Callable[..., tuple[Tensor, ...]], first: bool, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Call ``work(first, *given)``, by a graph from the second time on."""
        kind = work.__name__, first, len(given[0]) > 1  # libraries treat a single matrix otherwise
        if self.pool is None or kind not in self.warm:
            self.warm.add(kind)
            return work(first, *given)
        key = *kind, len(given[0])
        if key not in self.graphs:
            kept = [tensor.clone() for tensor in given]
            try:
                self.graphs[key] = kept, captured(lambda: work(first, *kept), self.pool)
            except RuntimeError as error:
                if ran_out(error):
                    raise
                self.pool = None
                warn_uncaptured(error)
                return work(first, *given)
        kept, (graph, results) = self.graphs[key]
        for mine, tensor in zip(kept, given, strict=True):
            mine.copy_(tensor)
        graph.replay()
        return tuple(result.clone() for result in results)  # other graphs may use their memory

    @property
    def bytes(self) -> int:
        """About what the stack and its graphs take."""
        matrix, beside = self.each
        cells = min(self.chunk, self.most) * (4 * matrix + beside) + self.vectors.nbytes
        own = 16 * (self.matrix.numel() + self.taps.numel())  # with what makes the lags
        return own + cells + (POOL if self.graphs else 0)

    def _make_room(self, count: int) -> None:
        if len(self.vectors) < count:
            small = self.vectors
            more = 2 * count - len(small)
            self.vectors = torch.nn.functional.pad(small, (0, 0, 0, more))
            if len(small) and small.is_cuda:  # other streams may take the memory next
                torch.cuda.current_stream().synchronize()
            self.graphs.clear()  # they would use the smaller one
            self.pool = self.pool and graph_pool(self.field.device)  # a pool ends with its graphs

    def _whole(self, first: bool, packed: Tensor) -> tuple[Tensor]:
        """One level of few cells."""
        value, vectors = self._estimate(first, packed, self._starts(packed, first))
        self.vectors[: len(packed)] = vectors
        self._climb(first, value, packed)
        call, short, scale = self._factor(first, packed)[0]
        return (torch.cat([call, value, short, scale, self.lower]),)

    def _starts(self, packed: Tensor, first: bool) -> Tensor:
        """Vectors to start the estimates from: those of the parents."""
        if first:
            return self.random.expand(len(packed), -1)
        return self.vectors[packed[:, self.dims + 3].long()]

    def state(self) -> Tensor:
        """The best value of every layer, its block, frequency and vector: ``(layers, ...)``."""
        left = torch.view_as_real(self.left.to(torch.complex128)).flatten(1)
        numbers = torch.stack([self.lower, self.block.double()], 1)
        return torch.cat([numbers, self.frequency, left], 1)

    def peak(self, known: Floats, evaluations: Integers) -> Peak:
        """The best values attained, from :meth:`state` as read by the host."""
        peak = Peak(self.field, self.owners, self.layers, self.rtol, moves=True)
        peak.lower, peak.block = known[:, 0].copy(), known[:, 1].astype(np.int64)
        peak.frequency = wrapped(known[:, 2 : 2 + self.dims])
        # A copy, because torch fails on complex numbers at addresses that are not multiples of 16.
        peak.left = known[:, 2 + self.dims :].copy().view(np.complex128)
        peak.evaluations = evaluations
        return peak

    def _grams(self, block: Tensor, frequency: Tensor, scale: Tensor, matrix: Tensor) -> Tensor:
        """``scale``·FF* at each cell: ``(P, n, n)``, real for a stack of matrices.

        ``matrix`` is the lags in the precision of the result.
        """
        angles = frequency @ self.lags.T
        waves = torch.cat([torch.cos(angles), torch.sin(angles[:, 1:])], 1) * scale[:, None]
        waves = waves.to(matrix.dtype)
        if self.gathers:
            grams = (waves[:, None] @ matrix[block])[:, 0]
        elif len(matrix) == 1:
            grams = waves @ matrix[0]
        else:  # zeros for all other blocks; products with zeros are exact
            whole = waves.new_zeros(len(waves), *matrix.shape[:2])
            at = block[:, None, None].expand(-1, 1, waves.shape[1])
            grams = whole.scatter_(1, at, waves[:, None]).flatten(1) @ matrix.flatten(0, 1)
        rows = self.field.rows
        if self.alone:
            return grams.reshape(-1, rows, rows)
        return torch.view_as_complex(grams.reshape(-1, rows, rows, 2))

    def _estimate(self, first: bool, packed: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate λ1(FF*) at cells, with the vectors that belong to the estimates."""
        frequency, block = packed[:, : self.dims], packed[:, self.dims + 2].long()
        lower = self.lower[self.owner[block]]
        usual = self.numbers[3, block]
        level = torch.where(lower > 0, lower.square(), usual).clamp_min(1e-290)
        twice = self._grams(block, frequency, 2 / level, self.rough)
        value, vectors = top_by_products(twice, start, FIRST if first else STEPS)
        vectors = torch.where(value.isfinite()[:, None], vectors, start)
        return (value * level).nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0), vectors

    def _climb(self, first: bool, value: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        """Climb from each layer's best cell, or from its best point if no cell exceeds it."""
        frequency, block = packed[:, : self.dims], packed[:, self.dims + 2].long()
        angle = packed[:, self.dims + 1]
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
        place = self._uphill(rows, image, place, reach)
        level = image.abs().square().sum(-1).clamp_min(1e-290)
        _, left = top_by_products(self._grams(here, place, 2 / level, self.matrix), left, steps)
        self._record(here, place, left, self._image(here, place, left)[1])
        return ()

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
        lower = lower - self.numbers[1, block]
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

    def _factor(self, first: bool, packed: Tensor) -> tuple[Tensor]:
        """Numbers of the call, δ and s such that I − s·FF* ⪰ −δ·I at cells, in three rows.

        FF* is meant as computed. δ is ∞ without a factor.
        """
        frequency, (cosine, _, number, _, call) = packed[:, : self.dims], packed[:, self.dims :].T
        block = number.long()
        scale = self._scales(block, cosine)
        gaps = self._grams(block, frequency, -scale, self.matrix)
        gaps.diagonal(dim1=-2, dim2=-1).add_(1)
        if self.blocked:
            short = shortfall(gaps, CORNER)  # larger ones would cost too much width
            short = torch.where(short <= 0.01 * self.rtol, short, math.inf)
        else:  # δ = c·tr(I − s·FF*); the trace is at most n, beyond the error of FF*
            factor, info = torch.linalg.cholesky_ex(gaps)
            pivots = factor.diagonal(dim1=-2, dim2=-1).real
            positive = (info == 0) & (pivots > 0).all(1)  # not so for NaN
            short = torch.where(positive, self.factor, math.inf)
        return (torch.stack([call, short, scale]),)


def room(device: torch.device, stacks: int) -> int:
    """Bytes that a stack's complex matrices handled at once may take, beside other stacks.

    Few stacks only fill a GPU if each handles many matrices at once.
    """
    if device.type != "cuda":
        return piece(CHUNK_BYTES["cpu"])
    memory = device_memory(device)
    return piece(min(LARGEST, memory // 128, memory // (8 * stacks)))


def _power(count: int) -> int:
    """Round up to a power of two.

    Example:
        >>> [_power(count) for count in (1, 5, 8)]
        [1, 8, 8]
    """
    return 1 << (count - 1).bit_length()
