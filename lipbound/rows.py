r"""Peaks of row energies and their gradient: the plain twin that defines the fused kernels.

A row of a convolution, one output channel's weights ``(channels, taps)``, has the energy
:math:`p(\omega) = \sum_j |F_j(\omega)|^2`, summed over the phases of a stride. It is a real
trigonometric polynomial: taps a and b meet in it only if the stride divides their distance, and
then at the lag (a − b)/t,

.. math:: p(\omega) = \sum_{a, b} \Big(\sum_j K_{ja} K_{jb}\Big) \cos(\mathrm{lag}_{ab}\cdot\omega).

So a row is read once, for its few lag sums, and the grid costs one small cosine transform. Its
gradient at the maximizer ω* is :math:`2 K\,C` with :math:`C_{ab} = \cos(\mathrm{lag}_{ab}\cdot
\omega^*)`: a second pass over the weights, no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from lipbound.symbols import grid, positions, radians, widening

POINTS = 1 << 14  # of a default grid; 3d kernels get a coarser one, and a larger widening
CHUNK = 1 << 23  # elements of a temporary


@dataclass(frozen=True)
class Lags:
    """Which taps of a kernel meet at which lag, and the grid they are summed on.

    Attributes:
        sizes: Taps per axis, as the weight has them.
        stride: Per axis, dilation already taken out.
        samples: Grid points per axis.
    """

    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    samples: tuple[int, ...]
    _placed: dict[Any, tuple[Tensor, Tensor | None, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def taps(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def vectors(self) -> tuple[tuple[int, ...], ...]:
        """The lags, zero first, then one of each pair ±l."""
        reach = [range(1 - m, m) for m in phase_taps(self.sizes, self.stride)]
        shifted = positions([len(r) for r in reach]).tolist()
        lags = [
            tuple(r[i] for r, i in zip(reach, index, strict=True)) for index in map(tuple, shifted)
        ]
        return tuple(lag for lag in lags[len(lags) // 2 :])  # row by row: the upper half is l ≥ 0

    @cached_property
    def meeting(self) -> tuple[int, ...]:
        """For each pair of taps, (taps × taps) flat: the index of their lag, −1 if they never meet.

        p is even, so the lags l and −l count as one.
        """
        taps = positions(self.sizes)
        distance = taps[None] - taps[:, None]  # (taps, taps, axes)
        stride = torch.tensor(self.stride, dtype=torch.int64)
        reach = torch.tensor(phase_taps(self.sizes, self.stride), dtype=torch.int64)
        whole = (2 * reach - 1).tolist()
        steps = torch.tensor([math.prod(whole[axis + 1 :]) for axis in range(len(whole))])
        index = ((distance // stride) * steps.long()).sum(-1).abs()  # row by row from lag zero
        meet = (distance % stride == 0).all(-1)
        return tuple(torch.where(meet, index, -1).flatten().tolist())

    @cached_property
    def points(self) -> Tensor:
        """One of each pair ±ω of the grid, in radians, ``(points, axes)``."""
        return radians(grid(self.samples, half=True), self.samples)

    @cached_property
    def cosines(self) -> Tensor:
        """cos(l·ω), ``(lags, points)`` float64; the angle is reduced in integers, exactly."""
        sizes = torch.tensor(self.samples, dtype=torch.int64)
        whole = math.lcm(*self.samples) if self.samples else 1
        lags = torch.tensor(self.vectors, dtype=torch.int64)
        turns = (lags * (whole // sizes)) @ grid(self.samples, half=True).mT
        return (2 * math.pi * (turns % whole).double() / whole).cos()

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """The table ``(lags, points)``, the selector ``(taps², lags)`` and ``meeting``, there.

        Lag sums count each pair of taps once in either order, so the selector already has the
        factor two of l and −l. ``None`` for large kernels: of 31×31 taps it would take 7 GB.
        """
        if (device, dtype) not in self._placed:
            meeting = torch.tensor(self.meeting, device=device)
            lags = torch.arange(len(self.vectors), device=device)
            small = len(meeting) * len(lags) <= CHUNK
            selector = (meeting[:, None] == lags).to(dtype) if small else None
            self._placed[device, dtype] = (self.cosines.to(device, dtype), selector, meeting)
        return self._placed[device, dtype]

    def widening(self, kind: str = "best") -> float:
        """The factor from the grid's maximum to the supremum, for the root of an energy."""
        return widening(self.samples, phase_taps(self.sizes, self.stride), kind)


@lru_cache(maxsize=256)
def lags(sizes: tuple[int, ...], stride: tuple[int, ...], samples: int | None = None) -> Lags:
    """The lags of a kernel, with ``samples`` grid points per axis.

    ``None`` takes 32 per unit of degree, fewer where the grid would grow past ``POINTS``.
    """
    left = phase_taps(sizes, stride)
    if samples is not None and (not isinstance(samples, int) or samples < max([*left, 1])):
        raise ValueError(
            f"samples={samples!r} must be an integer of at least {max([*left, 1])} for a kernel "
            f"of {'×'.join(map(str, sizes))} taps, or None to choose"
        )
    density = 16.0
    while True:
        counts = tuple(
            1 if m == 1 else samples or max(round(2 * density), round(density * (m - 1)))
            for m in left
        )
        if samples or math.prod(counts) <= 2 * POINTS or density <= 2:
            return Lags(sizes, stride, counts)
        density /= 1.25


def phase_taps(sizes: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Taps that one phase of the stride has, per axis."""
    return tuple(-(-s // t) for s, t in zip(sizes, stride, strict=True))


def row_peaks(rows: Tensor, kind: Lags, locate: bool = True) -> tuple[Tensor, Tensor | None]:
    """Each row's largest energy on the grid, and the index of the point where it is.

    Differentiable in ``rows``.

    Args:
        rows: ``(rows, channels, taps)``.
        kind: Of these taps.
        locate: ``False`` leaves the points out, which a value alone does not need.

    Returns:
        ``(rows,)`` energies and ``(rows,)`` integers.

    Example:
        >>> row_peaks(torch.ones(1, 1, 9), lags((3, 3), (1, 1)))  # 9² at ω = 0
        (tensor([81.]), tensor([0]))
    """
    if kind.taps == 1:
        energies = torch.linalg.vector_norm(rows.flatten(1), dim=1).square()
        return energies, torch.zeros_like(energies, dtype=torch.int64) if locate else None
    table, selector, meeting = kind.on(rows.device, rows.dtype)
    step = max(1, CHUNK // max(table.shape[1], kind.taps**2))
    peaks, points = [], []
    for part in rows.split(step):
        products = (part.mT @ part).flatten(1)  # (rows, taps²)
        if selector is not None:
            sums = products @ selector
        else:  # what never meets goes to one more place at the end
            sums = products.new_zeros(len(part), len(table) + 1)
            sums = sums.index_add(1, meeting % (len(table) + 1), products)[:, :-1]
        energies = sums @ table  # (rows, points)
        if locate:
            peak, point = energies.max(1)
            points.append(point)
        else:
            peak = energies.amax(1)
        peaks.append(peak)
    return torch.cat(peaks), torch.cat(points) if locate else None


def add_row_gradient_(
    into: Tensor, rows: Tensor, points: Tensor, weights: Tensor, kind: Lags
) -> None:
    """Add weights_i · ∂p_i/∂K_i = weights_i · 2 K_i C(ω_i) to ``into``, laid out as ``rows``."""
    weights = 2 * weights[:, None, None]
    if kind.taps == 1:
        into.addcmul_(rows, weights)
        return
    table, _, meeting = kind.on(rows.device, rows.dtype)
    step = max(1, CHUNK // kind.taps**2)
    pieces = [tensor.split(step) for tensor in (into, rows, points, weights)]
    for target, part, where, weight in zip(*pieces, strict=True):
        cosines = torch.where(meeting < 0, 0.0, table[:, where].mT[:, meeting])
        target.baddbmm_(part, weight * cosines.reshape(-1, kind.taps, kind.taps))
