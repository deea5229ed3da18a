r"""The search shaped for a GPU: a level is a fixed list of kernels and one read back.

:class:`.search.Search` decides on the host after every step what to test, what to estimate and
where to climb. A GPU waits for each of these decisions. Here the steps of a level are fixed:

1. Estimate λ1(FF*) at the centres of all cells.
2. Climb from the best cell of every layer, which raises the layer's lower end and its target τ.
3. Factor I − s·FF* at all cells, each with the scale s that τ asks for.

Nothing is read before the end of a level, and the levels of all shapes run side by side.

The device only chooses. What a factor proves follows on the host from its scale s alone: if
I − s·FF*(c) has a Cholesky factor in floating point, then λ1(FF*(c)) is at most 1/s, enlarged by
the rounding errors. By the lemma of :mod:`.search` the supremum is at most the largest of
σ1(F(c))/cos θ_c over cells that cover the torus. Cells without a factor are divided. Layers that
still have some at the end are left to :class:`.search.Search`.

On CUDA a level is captured as a graph when its shape and number of cells come for the second time,
and replayed from then on. Numbers of cells are rounded up for this purpose. New weights of the same
shapes are copied into the stacks of an earlier call.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT, cholesky_error, gamma_complex, symbol_error
from lipbound.bounds.supremum.blocked import shortfall, usual_shortfall
from lipbound.bounds.supremum.cells import Cover, Diamonds
from lipbound.bounds.supremum.eigen import top_by_products
from lipbound.bounds.supremum.field import MOST as CELLS
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.bounds.supremum.peak import Peak
from lipbound.bounds.supremum.search import parts
from lipbound.cuda_graphs import captured, device_memory, graph_pool, on_streams, warn_uncaptured
from lipbound.runtime import OutOfTime, check_time, piece, ran_out

FIRST, STEPS, MATRIX = 16, 8, 32  # sizes of Krylov spaces: at first, later, for a single matrix
ROUNDS = 2  # climbs in the first level; one in each other level
BLOCKED = 192  # rows from which factors are made of products: a guess, to be measured
CORNER = 64  # rows that a factor made of products factors itself
LEVELS = 10  # at most
MOST = 5_000  # cells of a layer left open, beyond which the layer is left undone
KEPT = 0.25  # share of a GPU's memory that stacks and graphs of earlier calls may take
BLOCKS = 16  # of one stack: a product with the lags of all costs as many times that of one
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
        self.chunk = max(1, min(piece(CELLS), field.room // (16 * rows**2 + 8 * waves)))
        kind = torch.float64 if self.alone else torch.complex128
        width = rows**2 * (1 if self.alone else 2)
        self.matrix = self.positions.new_zeros(field.blocks, 2 * len(field.lags) - 1, width)
        self.taps = torch.empty_like(field.taps)
        self.numbers = self.positions.new_empty(3, field.blocks)
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
        self.numbers.copy_(field.send(np.stack([field.error, field.usual, field.size])))
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
        frequency = self.frequency.cpu().numpy()
        peak.frequency = np.remainder(frequency + math.pi, 2 * math.pi) - math.pi
        peak.left = self.left.to(torch.complex128).cpu().numpy().copy()
        peak.evaluations = evaluations
        return peak

    def _chunks(self, count: int) -> list[slice]:
        pieces = math.ceil(count / self.chunk)
        ends = [count * i // pieces for i in range(pieces + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

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
        for part in self._chunks(len(block)):
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
        field = self.field
        norm = torch.linalg.vector_norm(left, dim=-1)
        length = field.rows + len(self.positions) + field.columns + 32
        error = 2 * (symbol_error(field.sizes) + gamma_complex(length)) * self.numbers[2, block]
        lower = torch.linalg.vector_norm(image, dim=-1) / norm * (1 - 64 * UNIT) - error
        better = lower > self.lower  # never for NaN
        self.lower.copy_(torch.where(better, lower, self.lower))
        self.block.copy_(torch.where(better, block, self.block))
        self.frequency.copy_(torch.where(better[:, None], frequency, self.frequency))
        self.left.copy_(torch.where(better[:, None], left / norm[:, None], self.left))

    def _scales(self, block: Tensor, cosine: Tensor) -> Tensor:
        """The scale s at which a factor proves σ1(F(c)) ≤ τ·cos θ; zero where none does."""
        error, _, size = self.numbers[:, block]
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
        for part in self._chunks(len(block)):
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


_kept: dict[Hashable, list[Stack]] = {}  # stacks that no search uses, with their graphs
_lock = Lock()  # graphs are captured and replayed by one search at a time
_calls = count(1)


def release() -> None:
    """Free the memory of the graphs that are kept for the next call."""
    with _lock:
        _kept.clear()


def _stack(field: Field, owner: Integers, rtol: float) -> Stack:
    free = _kept.get(_kind(field, owner, rtol))
    if not free:
        return Stack(field, owner, rtol)
    stack = free.pop()
    stack.load(field)
    return stack


def _keep(stack: Stack) -> None:
    """Keep a stack on CUDA for the next network, unless too much memory is kept already."""
    if stack.pool is None:
        return
    device = stack.field.device
    share = KEPT * device_memory(device)
    if stack.bytes > share:
        return
    others = [kept for alike in _kept.values() for kept in alike if kept.field.device == device]
    if sum(other.bytes for other in [*others, stack]) > share:
        _kept.clear()
    _kept.setdefault(_kind(stack.field, stack.owners, stack.rtol), []).append(stack)


def _kind(field: Field, owner: Integers, rtol: float) -> Hashable:
    shape = field.taps.shape, tuple(field.sizes)
    inference = torch.is_inference_mode_enabled()  # its tensors cannot be changed outside of it
    return field.device, *shape, owner.tobytes(), rtol, field.room, inference


@dataclass
class Searched:
    """What :func:`search` found for a field, by layer; ``upper`` is proved where ``done``."""

    peak: Peak
    upper: Floats
    done: NDArray[np.bool_]


def search(symbols: Sequence[Tensor], owners: Sequence[Integers], rtol: float) -> list[Searched]:
    """Bracket the layers of symbols with taps on the same axes, or of one tap, level by level.

    Where the time runs out, or where too many cells would be needed, layers are not ``done``.

    Args:
        symbols: Taps ``(blocks, n, N, *m)`` for every shape, all on one device; see
            :class:`.field.Field`.
        owners: For each of them, the layer that each block belongs to, ascending from 0.
        rtol: Target relative width, upper/lower − 1.
    """
    device = symbols[0].device
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _lock, here:
        try:
            stacks = [_stack(Field(taps), owner, rtol)
                      for taps, owner in zip(symbols, owners, strict=True)]  # fmt: skip
            results = _Together(stacks, rtol).run()
        except torch.OutOfMemoryError:
            _kept.clear()
            raise
        for stack in stacks:
            _keep(stack)
    return results


class _Together:
    """The search of several stacks. Blocks and layers are counted through all of them."""

    def __init__(self, stacks: Sequence[Stack], rtol: float):
        self.stacks, self.rtol = stacks, rtol
        blocks, layers = [s.field.blocks for s in stacks], [s.layers for s in stacks]
        ends = np.cumsum(layers)
        self.layers = [slice(end - count, end) for end, count in zip(ends, layers, strict=True)]
        self.home = np.arange(len(stacks)).repeat(blocks)  # (blocks,): the stack of each
        self.number = np.concatenate([np.arange(count) for count in blocks])  # its number there
        self.owner = np.concatenate(
            [stack.owners + own.start for stack, own in zip(stacks, self.layers, strict=True)]
        )
        self.error = np.concatenate([stack.field.error for stack in stacks])
        self.cover = Cover([s.field.sizes for s in stacks for _ in range(s.field.blocks)])
        self.upper: Floats = np.zeros(ends[-1])
        self.lower: Floats = np.zeros(ends[-1])
        self.evaluations: Integers = np.zeros(ends[-1], dtype=np.int64)
        self.done = np.ones(ends[-1], dtype=bool)

    def run(self) -> list[Searched]:
        cells: Diamonds | None = self.cover.start()
        level = 0
        while cells is not None:
            try:
                check_time()
            except OutOfTime:
                self.done[self.owner[cells.block]] = False
                break
            value, proved = self._level(cells, first=level == 0)
            level += 1
            self._give_up(self.owner[cells.block], proved, level)
            left = ~proved & self.done[self.owner[cells.block]]
            cells = self._divided(cells[left], value[left]) if left.any() else None
        return [
            Searched(stack.peak(self.evaluations[own]), self.upper[own], self.done[own])
            for stack, own in zip(self.stacks, self.layers, strict=True)
        ]

    def _level(self, cells: Diamonds, first: bool) -> tuple[Floats, NDArray[np.bool_]]:
        """Run one level; return estimates of λ1(FF*), and whether each cell is proved.

        I − s·FF* ⪰ −δ·I says that λ1 ≤ (1 + δ)/s, for FF* as computed, which is off by at most
        ``error``. The subtraction from I rounds too.
        """
        home, layer = self.home[cells.block], self.owner[cells.block]
        edges = np.searchsorted(home, np.arange(len(self.stacks) + 1)).tolist()
        call = next(_calls)
        answers = self._on_device(_packed(cells, self.number[cells.block], call), edges, first)
        given, value, short, scale = np.concatenate([cut for cut, _ in answers.values()], 1)
        if (given != call).any():
            raise RuntimeError("the device answered with the results of an earlier level")
        for i, (_, lower) in answers.items():
            self.lower[self.layers[i]] = lower
        proved = np.isfinite(short) & (scale > 0)
        block = cells.block[proved]
        short = short[proved]
        square = (1 + short + 16 * UNIT) / scale[proved] + self.error[block] * (1 + 2 * short)
        bound = np.sqrt(square) / np.cos(cells.angle[proved]) * (1 + 32 * UNIT)
        np.maximum.at(self.upper, layer[proved], bound)
        self.evaluations += np.bincount(layer, minlength=len(self.done))
        # The next level finds its parents by their numbers within their stack.
        cells.left = torch.from_numpy(np.arange(len(cells)) - np.array(edges)[home])
        return value, proved

    def _on_device(
        self, packed: Floats, edges: Sequence[int], first: bool
    ) -> dict[int, tuple[Floats, Floats]]:
        """Enqueue a level of all stacks that have cells, then read everything at once.

        Returns:
            By stack, what :meth:`Stack.level` returns: ``(4, P)`` for its cells, and ``(layers,)``.
        """
        cuts = {i: range(a, b) for i, (a, b) in enumerate(pairwise(edges)) if a < b}
        graphs = any(stack.pool is not None for stack in self.stacks)
        sizes = [_rounded(len(cut)) if graphs else len(cut) for cut in cuts.values()]
        chosen = [[*cut, *[cut[-1]] * (size - len(cut))]
                  for cut, size in zip(cuts.values(), sizes, strict=True)]  # fmt: skip
        rows = packed[[at for some in chosen for at in some]]
        sent = torch.from_numpy(rows).to(self.stacks[0].field.device).split(sizes)
        results = on_streams(
            [partial(self.stacks[i].level, own, first) for i, own in zip(cuts, sent, strict=True)]
        )
        whole = torch.cat(results).cpu().numpy()
        answers = {}
        for (i, cut), size in zip(cuts.items(), sizes, strict=True):
            cells, lower, whole = np.split(whole, [4 * size, 4 * size + self.stacks[i].layers])
            answers[i] = cells.reshape(4, size)[:, : len(cut)], lower
        return answers

    def _give_up(self, layer: Integers, proved: NDArray[np.bool_], level: int) -> None:
        """Leave layers undone that have too many cells, or none proved in a late level."""
        open_, closed = (np.bincount(layer[some], minlength=len(self.done))
                         for some in (~proved, proved))  # fmt: skip
        hopeless = (level > 2) & (closed == 0) | (level == LEVELS) | (open_ > MOST)
        self.done &= ~(hopeless & (open_ > 0))

    def _divided(self, cells: Diamonds, value: Floats) -> Diamonds | None:
        axes = len(self.cover.active)
        if not axes:
            return cells  # only a better vector helps
        layer = self.owner[cells.block]
        target = self.lower[layer] * (1 + 0.98 * self.rtol)
        limit = MOST * len(np.unique(layer))
        divided = self.cover.divide(cells, parts(cells, value, target, self.rtol, axes, limit))
        if divided is None:
            self.done[layer] = False
        return divided


def _packed(cells: Diamonds, number: Integers, call: int) -> Floats:
    """Frequency, cosine of the angle, angle, and numbers: block and parent in the stack, call."""
    cosine = np.cos(cells.angle) * (1 - 8 * UNIT)
    calls = np.full(len(cells), call)
    numbers = [number, cells.left.numpy(), calls]
    return np.column_stack([cells.frequency, cosine, cells.angle, *numbers])


def _rounded(count: int) -> int:
    """Round up to one of few numbers, by a third at most (from 3 on).

    Example:
        >>> [_rounded(count) for count in (1, 5, 9, 13, 100)]
        [1, 6, 12, 16, 128]
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power
