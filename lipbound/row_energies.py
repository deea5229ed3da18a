r"""Row energies of a symbol and their maxima on a grid, which LipBound sums.

A row of a convolution, one output channel's weights ``(channels, taps)``, has the energy
:math:`p(\omega) = \sum_j |F_j(\omega)|^2`, summed over the phases of a stride. It is a real
trigonometric polynomial: taps a and b meet in it only if the stride divides their distance, and
then at the lag (a − b)/t,

.. math:: p(\omega) = \sum_{a, b} \Big(\sum_j K_{ja} K_{jb}\Big) \cos(\mathrm{lag}_{ab}\cdot\omega).

A row is thus read once to compute its few lag sums, and the grid costs one small cosine transform.
The gradient at the maximizer ω* is :math:`2 K\,C` with :math:`C_{ab} = \cos(\mathrm{lag}_{ab}\cdot
\omega^*)`, which takes a second pass over the weights and no autograd graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lipbound.runtime import piece
from lipbound.symbols import grid, positions, widening

POINTS = 1 << 14  # grid points of a penalty; 3d kernels get a coarser grid and more widening
CHUNK = 1 << 23  # elements of a temporary tensor
TABLE = 1 << 27  # entries of a table of cosines; beyond it the transform goes axis by axis


@dataclass(frozen=True)
class Lags:
    """Lags at which pairs of taps of a kernel meet, and the frequency grid.

    Attributes:
        sizes: Taps per axis of the weight.
        stride: Stride per axis, after dilation is taken out.
        samples: Grid points per axis.
    """

    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    samples: tuple[int, ...]
    # Constants per device and dtype. They depend on the fields alone, so they are never stale.
    _placed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> int:
        return math.prod(self.sizes)

    @property
    def vectors(self) -> list[tuple[int, ...]]:
        """The lags: zero first, then one of each pair ±l, as the upper half of a box row by row."""
        reach = [range(1 - m, m) for m in phase_taps(self.sizes, self.stride)]
        box = list(itertools.product(*reach))
        return box[len(box) // 2 :]

    def meeting(self) -> Tensor:
        """Index of the lag of each pair of taps, flat (taps × taps), or −1 if they never meet.

        p is even, so the lags l and −l count as one.
        """
        taps = positions(self.sizes)
        distance = taps[None] - taps[:, None]  # (taps, taps, axes)
        stride = torch.tensor(self.stride, dtype=torch.int64)
        whole = [2 * m - 1 for m in phase_taps(self.sizes, self.stride)]
        steps = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
        index = ((distance // stride) * torch.tensor(steps, dtype=torch.int64)).sum(-1).abs()
        return torch.where((distance % stride == 0).all(-1), index, -1).flatten()

    @property
    def by_axes(self) -> bool:
        """Whether the grid is so large that it is transformed axis by axis, without a table."""
        lags = math.prod([2 * m - 1 for m in phase_taps(self.sizes, self.stride)]) // 2 + 1
        return lags * math.prod(self.samples) > 2 * TABLE

    @property
    def points(self) -> Tensor:
        """Indices of the grid points, ``(points, axes)``: at least one of each pair ±ω."""
        if not self.by_axes:
            return grid(self.samples, half=True)
        return positions([self.samples[0] // 2 + 1, *self.samples[1:]])

    def cosines(self, points: Tensor) -> Tensor:
        """cos(l·ω) at grid points, ``(lags, points)`` float64; angles are reduced in integers."""
        sizes = torch.tensor(self.samples, dtype=torch.int64)
        whole = math.lcm(*self.samples) if self.samples else 1
        lags = torch.tensor(self.vectors, dtype=torch.int64)
        turns = (lags * (whole // sizes)) @ points.cpu().mT
        return (2 * math.pi * (turns % whole).double() / whole).cos()

    def on(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Table ``(lags, points)``, selector ``(taps², lags)`` and ``meeting`` on the device.

        Lag sums count each pair of taps in both orders, so the selector already has the factor two
        of l and −l. A tensor that would be too large is ``None``: for 31×31 taps the selector would
        take 7 GB.
        """
        if (device, dtype) not in self._placed:
            with torch.inference_mode(False):  # a gradient may need them later
                table = None if self.by_axes else self.cosines(self.points).to(device, dtype)
                meeting = self.meeting().to(device)
                lags = torch.arange(len(self.vectors), device=device)
                small = len(meeting) * len(lags) <= CHUNK
                selector = (meeting[:, None] == lags).to(dtype) if small else None
            if type(meeting) is not Tensor:  # a tracer's tensor without values: never keep it
                return table, selector, meeting
            self._placed[device, dtype] = (table, selector, meeting)
        return self._placed[device, dtype]

    def widening(self, kind: str = "best") -> float:
        """Factor from the maximum on the grid to the supremum, for the root of an energy."""
        return widening(self.samples, phase_taps(self.sizes, self.stride), kind)

    def relative_error(self, rows: Tensor, dtype: torch.dtype | None = None) -> float:
        r"""A bound on the relative rounding error of a sum of peaks of these rows.

        A lag sum is an inner product of at most channels·taps terms and the transform one of
        ``lags`` terms (complex, axis by axis, where there is no table), so p is off by at most
        :math:`\gamma_k \sum_{ab}\sum_j |K_{ja}||K_{jb}| \leq \gamma_k T \sum_{ja} K_{ja}^2`
        with T taps. That last sum is p's mean over the grid, hence at most its maximum. The sum
        over the rows' peaks is included. Products that underflow are not.
        """
        count, channels, taps = rows.shape
        reach = phase_taps(self.sizes, self.stride)
        transform = sum(8 * m + 32 for m in reach) if self.by_axes else len(self.vectors)
        length = (channels + 2) * taps + transform + count + 16
        unit = torch.finfo(dtype or rows.dtype).eps / 2
        return taps * length * unit / (1 - length * unit)


@lru_cache(maxsize=256)
def on_grid(sizes: tuple[int, ...], stride: tuple[int, ...], samples: tuple[int, ...]) -> Lags:
    """Return :class:`Lags` of a kernel on a grid from a cache, so that tables are reused."""
    return Lags(sizes, stride, samples)


def lags(sizes: tuple[int, ...], stride: tuple[int, ...], samples: int | None = None) -> Lags:
    """Return the lags of a kernel for ``samples`` grid points per axis.

    ``None`` uses 32 points per unit of degree, and fewer if the grid would exceed ``POINTS``.
    """
    left = phase_taps(sizes, stride)
    if samples is not None and (not isinstance(samples, int) or samples < max([*left, 1])):
        raise ValueError(
            f"samples={samples!r} must be an integer of at least {max([*left, 1])} for a kernel "
            f"of {'×'.join(map(str, sizes))} taps, or None for the default"
        )
    density = 16.0
    while True:
        counts = tuple(
            1 if m == 1 else samples or max(round(2 * density), round(density * (m - 1)))
            for m in left
        )
        if samples or math.prod(counts) <= 2 * POINTS or density <= 2:
            return on_grid(sizes, stride, counts)
        density /= 1.25


def phase_taps(sizes: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Number of taps per axis in one phase of the stride."""
    return tuple(-(-s // t) for s, t in zip(sizes, stride, strict=True))


def by_columns(
    shape: Sequence[int], stride: Sequence[int], groups: int = 1, folded: bool = False
) -> bool:
    """Whether LipBound sums over a kernel's input channels instead of its output channels.

    The adjoint has the same norm, so either sum is a bound, and the one of fewer terms is usually
    smaller: with one input channel it is sup σ1(F) itself. It is used only where it costs nothing
    extra: with stride 1, one group and nothing folded into the rows.

    Args:
        shape: Shape of the kernel, ``(cout, cin, *spatial)``.
        stride: Stride of the symbol, after dilation is taken out.
        groups: Number of groups of the layer.
        folded: Whether the rows are multiplied by a BatchNorm's gains.
    """
    plain = groups == 1 and not folded and all(t == 1 for t in stride)
    return plain and math.prod(shape[2:]) > 1 and shape[1] < shape[0]


def row_peaks(
    rows: Tensor, kind: Lags, locate: bool = True, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute each row's largest energy on the grid, and the index of that grid point.

    Differentiable in ``rows``.

    Args:
        rows: ``(rows, channels, taps)``.
        kind: Lags of these taps.
        locate: ``False`` omits the indices, which the value alone does not need.
        dtype: Precision to compute in; that of the rows by default.

    Returns:
        ``(rows,)`` energies and ``(rows,)`` integers.

    Example:
        >>> row_peaks(torch.ones(1, 1, 9), lags((3, 3), (1, 1)))  # 9² at ω = 0
        (tensor([81.]), tensor([0]))
    """
    dtype = dtype or rows.dtype
    if kind.taps == 1:
        energies = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=dtype).square()
        return energies, torch.zeros_like(energies, dtype=torch.int64) if locate else None
    peaks, points = [], []
    for part in rows.split(max(1, piece(CHUNK) // max(math.prod(kind.samples), kind.taps**2))):
        energies = _energies(part.to(dtype), kind)
        if locate:
            peak, point = energies.max(1)
            points.append(point)
        else:
            peak = energies.amax(1)
        peaks.append(peak)
    return torch.cat(peaks), torch.cat(points) if locate else None


def _energies(rows: Tensor, kind: Lags) -> Tensor:
    """Compute the energies p at every grid point, ``(rows, points)``."""
    table, selector, meeting = kind.on(rows.device, rows.dtype)
    products = (rows.mT @ rows).flatten(1)  # (rows, taps²)
    if selector is not None:
        sums = products @ selector
    else:  # pairs that never meet go to an extra last entry
        count = len(kind.vectors)
        sums = products.new_zeros(len(rows), count + 1)
        sums = sums.index_add(1, meeting % (count + 1), products)[:, :-1]
    return _by_axes(sums, kind) if table is None else sums @ table


def _by_axes(sums: Tensor, kind: Lags) -> Tensor:
    """Compute Re Σ s_l e^{il·ω} axis by axis; lags below zero are filled with zeros."""
    box = [2 * m - 1 for m in phase_taps(kind.sizes, kind.stride)]
    below = sums.new_zeros(len(sums), math.prod(box) // 2)
    values = torch.cat([below, sums], 1).reshape(-1, *box)
    values = values.to(torch.promote_types(sums.dtype, torch.complex64))
    for axis, (count, samples) in enumerate(zip(box, kind.samples, strict=True)):
        lags = torch.arange(count) - count // 2
        turns = lags[:, None] * torch.arange(samples if axis else samples // 2 + 1) % samples
        angles = 2 * math.pi * turns.double() / samples
        waves = torch.complex(angles.cos(), angles.sin()).to(values)
        values = torch.tensordot(values, waves, dims=([1], [0]))
    return values.real.flatten(1)


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
        at = table[:, where] if table is not None else kind.cosines(kind.points[where.cpu()])
        cosines = torch.where(meeting < 0, 0.0, at.to(rows).mT[:, meeting])
        target.baddbmm_(part, weight * cosines.reshape(-1, kind.taps, kind.taps))


def root(energy: Tensor) -> Tensor:
    """Square root with a zero gradient at zero."""
    positive = energy > 0
    return torch.where(positive, torch.where(positive, energy, 1.0).sqrt(), energy)
