"""Run the Triton kernels over a network, with tables of addresses and replayed graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton import next_power_of_2

from lipbound.cuda_graphs import Repeated, on_streams
from lipbound.penalty import layout, triton_gradients, triton_values
from lipbound.penalty.factors import Factor
from lipbound.row_energies import Lags
from lipbound.symbols import positions

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
VIRTUAL = 4096  # elements per row of layers with one tap, whose rows may be split anywhere
UNROLLED = 50  # pairs of meeting taps up to which a kernel is unrolled: 3×3 has 45
LARGEST = 1 << 13  # most lags × pairs of a kernel that reads tables


@dataclass(eq=False)
class Launch:
    """Layers with the same pairs of meeting taps, handled by one launch of each kernel.

    Attributes:
        kind: Lags of the layers.
        dtype: Precision of the weights.
        style: ``'flat'`` for contiguous rows, ``'tile'`` for any strides, ``'any'`` for many taps.
        programs: Factor and row of every program.
    """

    kind: Lags
    dtype: torch.dtype
    style: str
    programs: list[tuple[int, int]] = field(default_factory=list)

    def place(self, device: torch.device) -> None:
        """Put the tables on the device; constants of the unrolled kernels are tuples."""
        kind = self.kind
        self.points = len(kind.points)
        self.table = torch.tensor(self.programs, dtype=torch.int32, device=device)
        self.cosines = kind.cosines(kind.points).to(device, torch.float32).contiguous()
        self.type = DTYPES[self.dtype]
        pairs, meetings = _pairs(kind), _meetings(kind)
        if self.style == "any":
            self.left, self.right = (_padded(pairs, side, device) for side in (0, 1))
            self.other, self.lags = (_padded(meetings, side, device) for side in (0, 1))
            warps = 8 if len(pairs) * max(map(len, pairs)) > 2048 else 4
            self.values = {
                "LAG_PAD": next_power_of_2(len(pairs)),
                "PAIR_PAD": self.left.shape[1],
                "SPAN": 128,
                "num_warps": warps,
            }
            self.gradients = {
                "TAP_PAD": next_power_of_2(kind.taps),
                "MEET_PAD": self.other.shape[1],
                "num_warps": warps,
            }
            return
        shape: dict[str, Any] = {"TAPS": kind.taps, "LAGS": len(pairs)}
        if self.style == "flat":
            period = math.lcm(kind.taps, 4)
            shape |= {
                "SHIFT": tuple(b - a for (a, b), *_ in pairs),
                "MASK": tuple(sum(1 << a for a, _ in part) for part in pairs),
                "LANES": 64,
                "STEP": 256 // period * period,
            }
            self.values = {**shape, "SPAN": 128, "num_warps": 2}
            self.gradients = {**shape, "num_warps": 2}
            return
        block, warps = (1024, 4) if kind.taps == 1 else (64, 1)
        shape |= {"BLOCK": block, "ROWS": 1, "num_warps": warps}
        self.values = {**shape, **_flat(pairs, "LEFT", "RIGHT"), "SPAN": 128}
        self.gradients = {**shape, **_flat(meetings, "OTHER", "LAG")}


def served(factor: Factor) -> bool:
    """Whether the kernels support this layer: its weight is a parameter of a known precision."""
    if factor.norm is not None and any(t.dtype != torch.float32 for t in _norm(factor)):
        return False
    if factor.kind is None:
        return True
    weight = factor.layer._parameters.get("weight")  # a parametrized one is new at each call
    if weight is None or weight.dtype not in DTYPES or factor.least(weight) == torch.float64:
        return False
    pairs = _pairs(factor.kind)
    return next_power_of_2(len(pairs)) * next_power_of_2(max(map(len, pairs))) <= LARGEST


class Fused:
    """Evaluate all factors of a network on one device.

    The tables hold the addresses, shapes and strides of the weights, and ε; nothing here checks
    that they still fit. Their owner, ``RowTerms``, makes a new object if they do not. The addresses
    of the gradients may change at every step; :meth:`aim` then uploads them again.

    Args:
        factors: Factors that :func:`served` accepts, in any order.
    """

    def __init__(self, factors: Sequence[Factor]):
        self.factors = factors
        self.device = factors[0].weight().device
        self.fields = np.zeros((len(factors), layout.FIELDS.value), dtype=np.int64)
        floats = np.zeros((len(factors), layout.FLOATS.value), dtype=np.float32)
        self._offsets: list[int] = []
        self._rows = 0
        self._launches: dict[tuple[object, ...], Launch] = {}
        seen: dict[int, int] = {}  # repeated weights: their gradients must not race
        for index, factor in enumerate(factors):
            floats[index, layout.COUNT.value] = factor.count
            if factor.norm is not None:
                self._add_norm(factor, self.fields[index], floats[index])
            if factor.kind is not None:
                address = factor.weight().data_ptr()
                seen[address] = seen.get(address, -1) + 1
                self._add_rows(index, factor, floats[index], seen[address])
        launches = self._launches.values()
        self.launches = sorted(launches, key=lambda launch: -len(launch.programs))
        self.again = [launch for (*_, wave), launch in self._launches.items() if wave]
        for launch in self.launches:
            launch.place(self.device)
        self.norm_waves = self._norm_programs()
        self.floats = torch.from_numpy(floats).to(self.device)
        self.table = torch.from_numpy(self.fields).to(self.device)
        self.offsets = torch.tensor(self._offsets or [0], dtype=torch.int64, device=self.device)
        self._make_buffers()
        self._uploads: list[Tensor] = []
        self._value, self._gradients = Repeated[None](self.device), Repeated[None](self.device)
        self.stamp = 0
        self.aimed: list[object] | None = None  # whose gradients the table points to, if known

    def _make_buffers(self) -> None:
        """Allocate the outputs of the kernels and the two numbers they read."""
        empty: dict[str, Any] = {"device": self.device, "dtype": torch.float32}
        count, rows = len(self.factors), self._rows + 1
        self.peaks = torch.zeros(rows, **empty)
        self.points = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.logs, self.coefficients, self.tops = torch.zeros(3, count, **empty)
        self.total = torch.zeros((), **empty)
        self.winners = torch.zeros(count, dtype=torch.int32, device=self.device)
        self.floor = torch.full((1,), -math.inf, **empty)
        self.scale = torch.ones(1, **empty)
        self._scale, self._floor = 1.0, -math.inf

    def _add_norm(self, factor: Factor, line: NDArray[Any], constants: NDArray[Any]) -> None:
        """Add a BatchNorm, or the one folded into a convolution, to the tables."""
        assert factor.norm is not None
        *gamma, variance = _norm(factor)
        line[layout.GAMMA.value] = gamma[0].data_ptr() if gamma else 0
        line[layout.VARIANCE.value] = variance.data_ptr()
        line[layout.ROW_COUNT.value] = len(variance)
        constants[layout.EPSILON.value] = factor.norm.eps
        constants[layout.TINY.value] = torch.finfo(torch.float32).tiny

    def _add_rows(self, index: int, factor: Factor, constants: NDArray[Any], wave: int) -> None:
        """Add a convolution or Linear layer; ``wave`` counts earlier uses of its weight."""
        assert factor.kind is not None
        weight = factor.weight().detach()
        rows = factor.rows(weight)
        count, channels, taps = rows.shape
        scale, constants[layout.TINY.value] = factor.constant(rows.float())
        constants[layout.LOG_CONSTANT.value] = math.log(scale)
        limit = count * channels
        row_stride, channel_stride = rows.stride()[:2]
        free = taps == 1 and factor.groups == 1 and factor.norm is None
        if free and weight.is_contiguous():  # rows may be split anywhere
            count, channels = -(-limit // VIRTUAL), VIRTUAL
            row_stride, channel_stride = VIRTUAL, 1
        self.fields[index, : layout.GROUPS.value + 1] = [
            weight.data_ptr(), 0, row_stride, channel_stride, channels, limit,
            self._rows, len(self._offsets), count, factor.groups,
        ]  # fmt: skip
        self._offsets += _tap_offsets(weight)
        self._rows += count
        style = _style(factor, weight)
        launch = self._launches.setdefault(
            (factor.kind, weight.dtype, style, wave), Launch(factor.kind, weight.dtype, style)
        )
        launch.programs += [(index, row) for row in range(count)]

    def _norm_programs(self) -> list[Tensor]:
        waves: list[list[int]] = []
        met: dict[int, int] = {}
        for index, factor in enumerate(self.factors):
            if factor.norm is None or factor.norm.weight is None:
                continue
            wave = met[id(factor.norm.weight)] = met.get(id(factor.norm.weight), -1) + 1
            waves += [[]] * 0 if wave < len(waves) else [[]]
            waves[wave].append(index)
        return [torch.tensor(wave, dtype=torch.int32, device=self.device) for wave in waves]

    def value(self, log_floor: float = -math.inf) -> Tensor:
        """Compute Σ count · log max(bound, floor) in a buffer that the next call overwrites."""
        if log_floor != self._floor:
            self.floor.fill_(log_floor)
            self._floor = log_floor
        self.stamp += 1
        self._value(self._launch_value)
        return self.total

    def firsts(self) -> list[tuple[Factor, int]]:
        """List factors with rows and the index of their first row in ``peaks`` and ``points``."""
        lines = zip(self.factors, self.fields[:, layout.FIRST.value].tolist(), strict=True)
        return [(factor, first) for factor, first in lines if factor.kind is not None]

    def aim(self, grads: Sequence[Tensor | None], gammas: Sequence[Tensor | None]) -> None:
        """Set the tensors to which the gradients are added.

        Args:
            grads: Gradient of each factor's weight, with its strides; ``None`` skips the factor.
            gammas: Gradient of each factor's γ, likewise.
        """
        self.aimed = None
        for column, tensors in ((layout.GRAD.value, grads), (layout.GAMMA_GRAD.value, gammas)):
            self.fields[:, column] = [0 if t is None else t.data_ptr() for t in tensors]
        source = torch.from_numpy(self.fields)
        if self.device.type == "cuda":
            source = source.pin_memory()  # a copy, as the next call may come before it is read
            if torch.cuda.is_current_stream_capturing():
                self._uploads.append(source)  # the captured copy reads it at every replay
        self.table.copy_(source, non_blocking=True)

    def add_gradient(self, scale: float | Tensor) -> None:
        """Add ``scale`` times the gradient to the tensors of :meth:`aim`, after :meth:`value`.

        Args:
            scale: Number, or one-element tensor on the device.
        """
        if isinstance(scale, Tensor):
            self.scale.copy_(scale.reshape(1))
            self._scale = math.nan
        elif scale != self._scale:
            self.scale.fill_(scale)
            self._scale = scale
        self._gradients(self._launch_gradient)

    def _launch_value(self) -> None:
        self._together([partial(self._peaks, launch) for launch in self.launches])
        triton_values.totals_kernel[(len(self.factors),)](
            self.table, self.floats, self.peaks, self.logs, self.coefficients, self.winners,
            self.tops, self.floor, BLOCK=1024, TILE=32,
        )  # fmt: skip
        triton_values.sum_kernel[(1,)](self.logs, self.total, len(self.logs), BLOCK=512)

    def _peaks(self, launch: Launch) -> None:
        out: tuple[Any, ...] = (self.peaks, self.points, launch.points)
        read: tuple[Tensor, ...]
        options = {"DTYPE": launch.type, **launch.values}
        if launch.style == "flat":
            kernel, read = triton_values.flat_peaks_kernel, (launch.cosines,)
        elif launch.style == "tile":
            kernel, read = triton_values.peaks_kernel, (self.offsets, launch.cosines)
        else:
            kernel = triton_values.any_peaks_kernel
            read = (self.offsets, launch.cosines, launch.left, launch.right)
            out = (*out, launch.cosines.shape[0])
        kernel[(len(launch.table),)](launch.table, self.table, *read, *out, **options)

    def _launch_gradient(self) -> None:
        norms = [partial(self._norm_gradient, wave) for wave in self.norm_waves[:1]]
        first = [launch for launch in self.launches if launch not in self.again]
        self._together([*(partial(self._gradient, launch) for launch in first), *norms])
        for launch in self.again:  # repeated weights: their gradients must not race
            self._gradient(launch)
        for wave in self.norm_waves[1:]:
            self._norm_gradient(wave)

    def _gradient(self, launch: Launch) -> None:
        read = (launch.table, self.table, self.floats)
        at = (self.points, self.coefficients, self.winners, self.scale, launch.points)
        options = {"DTYPE": launch.type, **launch.gradients}
        grid = (len(launch.table),)
        if launch.style == "flat":
            triton_gradients.flat_gradient_kernel[grid](*read, launch.cosines, *at, **options)
        elif launch.style == "tile":
            triton_gradients.gradient_kernel[grid](
                *read, self.offsets, launch.cosines, *at, **options
            )
        else:
            tables = (self.offsets, launch.cosines, launch.other, launch.lags)
            triton_gradients.any_gradient_kernel[grid](
                *read, *tables, *at, launch.kind.taps, **options
            )

    def _norm_gradient(self, wave: Tensor) -> None:
        triton_gradients.norm_gradient_kernel[(len(wave),)](
            wave, self.table, self.floats, self.peaks, self.coefficients, self.winners,
            self.tops, self.scale, BLOCK=512,
        )  # fmt: skip

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run independent launches: in parallel during a capture, otherwise in sequence."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            on_streams(calls)
            return
        for call in calls:
            call()


def _norm(factor: Factor) -> list[Tensor]:
    """γ, if there is one, and the running variance."""
    assert factor.norm is not None
    return [t for t in (factor.norm.weight, factor.norm.running_var) if t is not None]


def _style(factor: Factor, weight: Tensor) -> str:
    kind = factor.kind
    assert kind is not None
    if sum(map(len, _pairs(kind))) > UNROLLED:
        return "any"
    row = weight[0].numel() * weight.element_size()
    aligned = row % 16 == 0 and weight.data_ptr() % 16 == 0
    flat = kind.taps > 1 and aligned and weight.is_contiguous() and not factor.across
    return "flat" if flat else "tile"


def _tap_offsets(weight: Tensor) -> list[int]:
    strides = torch.tensor(weight.stride()[2:], dtype=torch.int64)
    return (positions(weight.shape[2:]) @ strides).tolist() if weight.ndim > 2 else [0]


Pairs = list[list[tuple[int, int]]]


@lru_cache
def _pairs(kind: Lags) -> Pairs:
    """For each lag, list the pairs of taps a ≤ b that meet there."""
    taps = kind.taps
    found: Pairs = [[] for _ in kind.vectors]
    meeting = kind.meeting().tolist()
    for a in range(taps):
        for b in range(a, taps):
            if meeting[a * taps + b] >= 0:
                found[meeting[a * taps + b]].append((a, b))
    return found


@lru_cache
def _meetings(kind: Lags) -> Pairs:
    """For each tap, list the taps it meets, with their lag."""
    taps, meeting = kind.taps, kind.meeting().tolist()
    lines = [meeting[a * taps : (a + 1) * taps] for a in range(taps)]
    return [[(b, lag) for b, lag in enumerate(line) if lag >= 0] for line in lines]


def _flat(pairs: Pairs, first: str, second: str) -> dict[str, tuple[int, ...]]:
    """Flatten the lists: their starts, all first entries, all second entries."""
    starts = np.cumsum([0, *map(len, pairs)]).tolist()
    together = [pair for part in pairs for pair in part]
    return {
        "STARTS": tuple(starts),
        first: tuple(a for a, _ in together),
        second: tuple(b for _, b in together),
    }


def _padded(pairs: Pairs, side: int, device: torch.device) -> Tensor:
    """One side of the pairs as a tensor, one line per list, padded with −1."""
    width = next_power_of_2(max(map(len, pairs)))
    lines = [[p[side] for p in part] + [-1] * (width - len(part)) for part in pairs]
    return torch.tensor(lines, dtype=torch.int32, device=device)
