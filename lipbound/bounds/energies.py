"""Bounds from row energies: LipBound (Theorem 5) and the Frobenius norm of the symbol."""

from __future__ import annotations

import torch
from torch import Tensor

from lipbound.bounds.rounding import Scaled
from lipbound.geometry import Layer, convolution
from lipbound.row_energies import Lags, by_columns, on_grid, phase_taps, root, row_peaks
from lipbound.symbols import samples_per_axis

SIDES = ("shorter", "both")


def lipbound(
    layer: Layer,
    samples: int | None = None,
    widening: str = "best",
    sides: str = "shorter",
    **geometry: object,
) -> Tensor:
    r"""Bound σ1 by the row maxima of the symbol (Araujo et al. 2021, Theorem 5).

    .. math:: \sigma_1(M) \leq \sqrt{\sum_i \sup_\omega \sum_j |f_{ij}(\omega)|^2}

    The adjoint has the same norm, so the sum may run over the columns instead. It does where there
    are fewer columns and this costs nothing (stride 1, one group). :class:`lipbound.Penalty` sums
    the logarithm of this bound. For a kernel with one tap it is the Frobenius norm. It equals
    sup σ1(F) if one channel side is 1, and is several times σ1 on wide layers. It is cheap and
    differentiable, so it serves as a regularizer; use ``'spectral'`` for a tight bound.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        samples: Grid points per frequency axis; ``None`` uses 32 per unit of degree.
        widening: ``'best'``, ``'cosine'`` or ``'paper'``, see :func:`lipbound.symbols.widening`.
        sides: ``'both'`` computes the sum over the rows and the sum over the columns and returns
            the smaller one. It takes about three times as long.
        geometry: Options of a bare kernel, or ``input_shape``.

    Returns:
        The bound, a scalar, at least σ1 for every input size; differentiable.

    Raises:
        ValueError: If the grid is too coarse for the kernel's degree, or ``sides`` is unknown.

    Example:
        >>> lipbound(torch.ones(1, 1, 3, 3))  # sup |f| = f(0) = 9, on a grid point, ×1.0097
        tensor(9.0873)
    """
    if sides not in SIDES:
        raise ValueError(f"sides={sides!r} is not one of {', '.join(SIDES)}")
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    conv, kernel = scaled.conv, scaled.kernel
    sizes, strides = tuple(kernel.shape[2:]), conv.symbol_stride()
    stride = tuple(min(t, m) for t, m in zip(strides, sizes, strict=True))
    kind = on_grid(sizes, stride, samples_per_axis(phase_taps(sizes, stride), samples))
    rows = kernel.reshape(*kernel.shape[:2], -1)
    across = by_columns(kernel.shape, stride, conv.groups)
    energy = _largest_sum(rows.transpose(0, 1) if across else rows, kind, conv.groups)
    if sides == "both":
        energy = torch.minimum(energy, _other_side(scaled, rows, kind, across))
    return _finish(scaled, energy, kind, widening)


def _other_side(scaled: Scaled, rows: Tensor, kind: Lags, across: bool) -> Tensor:
    """Sum over the other side: one column for every input channel and phase of the stride."""
    if across:
        return _largest_sum(rows, kind, 1)
    columns = scaled.taps().transpose(1, 2).flatten(0, 1)
    columns = columns.reshape(*columns.shape[:2], -1)
    sizes = phase_taps(kind.sizes, kind.stride)
    split = on_grid(sizes, (1,) * len(sizes), kind.samples)
    return _largest_sum(columns, split, scaled.conv.groups)


def frobenius(
    layer: Layer, samples: int | None = None, widening: str = "best", **geometry: object
) -> Tensor:
    r"""Bound σ1 by :math:`\sup_\omega \|F(\omega)\|_F`: at most LipBound, at most √rank · σ1.

    Arguments and result are those of :func:`lipbound`.

    Example:
        >>> frobenius(torch.eye(4)[..., None, None])
        tensor(2.0000)
    """
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    taps = scaled.taps()
    sizes = tuple(taps.shape[3:])
    kind = on_grid(sizes, (1,) * len(sizes), samples_per_axis(sizes, samples))
    groups, rows, columns = taps.shape[:3]
    entries = taps.reshape(groups, rows * columns, -1)
    return _finish(scaled, _largest_sum(entries, kind, groups), kind, widening)


def _largest_sum(rows: Tensor, kind: Lags, groups: int) -> Tensor:
    """Largest sum of row peaks over the groups, enlarged by its rounding error."""
    peaks, _ = row_peaks(rows, kind, locate=False, dtype=torch.float64)
    relative = kind.relative_error(rows, torch.float64)
    return peaks.reshape(groups, -1).sum(1).amax() * ((1 + relative) / (1 - relative))


def _finish(scaled: Scaled, energy: Tensor, kind: Lags, widening: str) -> Tensor:
    return scaled.finish(root(energy) * kind.widening(widening), relative=0.0)
