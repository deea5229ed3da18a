r"""The search shaped for a GPU: a level is a fixed list of kernels and one read back.

:class:`.search.Search` decides on the host after every step what to test, what to estimate and
where to climb. A GPU waits for each of these decisions. Here the steps of a level are fixed:

1. Estimate λ1(FF*) at the centres of all cells.
2. Climb from the best cell of every layer, which raises the layer's lower end and its target τ.
3. Factor I − s·FF* at all cells, each with the scale s that τ asks for.

Nothing is read before the end of a level, and the levels of all shapes run side by side.

The device chooses (:mod:`.stack`). What a factor proves follows on the host, from its scale s and
its shortfall δ alone: if I − s·FF*(c) ⪰ −δ·I, then λ1(FF*(c)) is at most (1 + δ)/s, enlarged by the
rounding errors. By the lemma of :mod:`.search` the supremum is at most the largest of
σ1(F(c))/cos θ_c over cells that cover the torus. Cells without a factor are divided. Layers that
still have some at the end are left to :class:`.search.Search`.

On CUDA the work of a level is captured as graphs, which are replayed from then on. Numbers of cells
are rounded up to a few, see :meth:`.stack.Stack.sizes`, so that few graphs serve all levels. New
weights of the same shapes are copied into the stacks of an earlier call.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from threading import RLock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import UNIT
from lipbound.bounds.supremum.cells import Cover, Diamonds
from lipbound.bounds.supremum.field import Floats, Integers
from lipbound.bounds.supremum.peak import Peak
from lipbound.bounds.supremum.search import parts
from lipbound.bounds.supremum.stack import Stack, room
from lipbound.cuda_graphs import device_memory, on_streams
from lipbound.runtime import OutOfTime, check_time, read_together

LEVELS = 10  # at most
MOST = 5_000  # cells of a layer left open, beyond which the layer is left undone
KEPT = 0.3  # share of a GPU's memory that stacks and graphs of earlier calls may take
BLOCKS = 8  # of one stack: a product with the lags of all costs as many times that of one

_kept: dict[Hashable, list[Stack]] = {}  # stacks that no search uses, with their graphs
_lock = RLock()  # graphs are captured and replayed by one search at a time
_calls = count(1)


def release_memory() -> None:
    """Free the GPU memory that ``brackets`` keeps to make later calls faster.

    It keeps CUDA graphs and their tensors, about 30 % of a GPU's memory at most. ``bracket``,
    ``audit`` and ``constrain`` keep the same ones. The next call captures its graphs anew.

    Example:
        >>> release_memory()
    """
    with _lock:
        _kept.clear()


def _stack(taps: Tensor, owner: Integers, rtol: float, room: int) -> Stack:
    free = _kept.get(_kind(taps.device, taps.shape, owner, rtol, room))
    return free.pop() if free else Stack(taps, owner, rtol, room)


def _keep(stacks: Sequence[Stack]) -> None:
    """Keep stacks on CUDA for the next network, as many as their share of memory allows.

    Older ones are dropped if there is no room for both.
    """
    if not stacks:
        return
    device = stacks[0].field.device
    taken, share = 0, KEPT * device_memory(device)
    chosen = []
    for stack in stacks:
        if taken + stack.bytes <= share:
            chosen.append(stack)
            taken += stack.bytes
    others = [kept for alike in _kept.values() for kept in alike if kept.field.device == device]
    if chosen and taken + sum(other.bytes for other in others) > share:
        _kept.clear()
    for stack in chosen:
        kind = _kind(device, stack.shape, stack.owners, stack.rtol, stack.room)
        _kept.setdefault(kind, []).append(stack)


def _kind(
    device: torch.device, shape: torch.Size, owner: Integers, rtol: float, room: int
) -> Hashable:
    return device, shape, owner.tobytes(), rtol, room


@dataclass
class Searched:
    """What :func:`search` found for a field, by layer; ``upper`` is proved where ``done``."""

    peak: Peak
    upper: Floats
    done: NDArray[np.bool_]


@torch.inference_mode(False)  # kept tensors that are made in this mode cannot be changed outside
@torch.no_grad()
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
    with _lock, here, torch.autocast(device.type, enabled=False):
        share = room(device, len(symbols))
        stacks = [_stack(taps, owner, rtol, share)
                  for taps, owner in zip(symbols, owners, strict=True)]  # fmt: skip
        on_streams([partial(stack.load, taps)
                    for stack, taps in zip(stacks, symbols, strict=True)])  # fmt: skip
        results = _Together(stacks, rtol).run()
        _keep([stack for stack in stacks if stack.pool is not None])
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
        states = read_together([stack.state() for stack in self.stacks])
        return [
            Searched(stack.peak(state, self.evaluations[own]), self.upper[own], self.done[own])
            for stack, state, own in zip(self.stacks, states, self.layers, strict=True)
        ]

    @cached_property
    def error(self) -> Floats:
        """``(blocks,)`` the ``error`` of each; the first level is enqueued before it is read."""
        loaded = read_together([stack.loaded for stack in self.stacks])
        for (number, *_), stack in zip(loaded, self.stacks, strict=True):
            _check_new(number, stack.loads)
        return np.concatenate([errors for _, *errors in loaded])

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
        _check_new(given, call)
        for i, (_, lower) in answers.items():
            self.lower[self.layers[i]] = lower
        proved = np.isfinite(short) & (scale > 0) & (cells.angle < math.pi / 2)
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
        sizes = [sum(self.stacks[i].sizes(len(cut))) for i, cut in cuts.items()]
        chosen = [np.minimum(np.arange(cut.start, cut.start + size), cut[-1])
                  for cut, size in zip(cuts.values(), sizes, strict=True)]  # fmt: skip
        rows = packed[np.concatenate(chosen)]
        sent = torch.from_numpy(rows).to(self.stacks[0].field.device).split(sizes)
        results = on_streams(
            [partial(self.stacks[i].level, own, first) for i, own in zip(cuts, sent, strict=True)]
        )
        answers = {}
        for (i, cut), size, row in zip(cuts.items(), sizes, read_together(results), strict=True):
            cells, lower = np.split(row, [4 * size])
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


def _check_new(given: Floats, number: int) -> None:
    """Check that the device answered with the number of the work that it was given.

    Raises:
        RuntimeError: If it did not.
    """
    if (given != number).any():
        raise RuntimeError(
            "the device answered with the results of earlier work, which prove nothing; please "
            "report this with the versions of PyTorch and CUDA"
        )


def _packed(cells: Diamonds, number: Integers, call: int) -> Floats:
    """Frequency, cosine of the angle, angle, and numbers: block and parent in the stack, call."""
    cosine = np.cos(cells.angle) * (1 - 8 * UNIT)
    calls = np.full(len(cells), call)
    numbers = [number, cells.left.numpy(), calls]
    return np.column_stack([cells.frequency, cosine, cells.angle, *numbers])
