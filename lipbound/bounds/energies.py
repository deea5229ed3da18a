"""Bounds from row energies: LipBound (Theorem 5) and the Frobenius norm of the symbol."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.bounds.rounding import Scaled, gamma
from lipbound.energy import energy_maxima
from lipbound.geometry import Layer, convolution
from lipbound.symbols import samples_per_axis
from lipbound.symbols import widening as widening_factor


def lipbound(
    layer: Layer, samples: int | None = None, widening: str = "best", **geometry: object
) -> Tensor:
    r"""Bound σ1 by the row maxima of the symbol (Araujo et al. 2021, Theorem 5).

    .. math:: \sigma_1(M) \leq \sqrt{\sum_i \sup_\omega \sum_j |f_{ij}(\omega)|^2}

    Rows and columns may trade places (the adjoint has the same norm); the smaller sum is
    returned. On a 1×1 kernel, as on any with one tap, this is the Frobenius norm. It equals
    sup σ1(F) when one channel side is 1, and is a multiple of σ1 on wide layers: cheap and
    differentiable, a regularizer rather than an answer.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        samples: Grid points per frequency axis; ``None`` takes 32 per unit of degree.
        widening: ``'best'``, ``'cosine'`` or ``'paper'``, see :func:`lipbound.symbols.widening`.
        geometry: Options of a bare kernel; ``input_shape``.

    Returns:
        The bound, a scalar, at least σ1 for every input size; differentiable.

    Raises:
        ValueError: If the grid is too coarse for the kernel's degree.

    Example:
        >>> lipbound(torch.ones(1, 1, 3, 3))  # sup |f| = f(0) = 9, on a grid point, ×1.0097
        tensor(9.0873)
    """
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    counts = samples_per_axis(scaled.taps, samples)
    groupings = (scaled.taps, scaled.taps.transpose(1, 2))
    sums = [energy_maxima(taps, counts).sum(-1).amax() for taps in groupings]
    return _finish(scaled, torch.minimum(*sums), counts, widening)


def frobenius(
    layer: Layer, samples: int | None = None, widening: str = "best", **geometry: object
) -> Tensor:
    r"""Bound σ1 by :math:`\sup_\omega \|F(\omega)\|_F`: at most LipBound, at most √rank · σ1.

    Args and returns as :func:`lipbound`.

    Example:
        >>> frobenius(torch.eye(4)[..., None, None])
        tensor(2.0000)
    """
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    counts = samples_per_axis(scaled.taps, samples)
    taps = scaled.taps.flatten(1, 2).unsqueeze(1)  # (groups, 1, rows·columns, *m)
    return _finish(scaled, energy_maxima(taps, counts).amax(), counts, widening)


def _finish(scaled: Scaled, square: Tensor, samples: Sequence[int], kind: str) -> Tensor:
    r"""Root, widening, rounding.

    p_i is computed from products of taps by inner products: the error is at most
    :math:`\gamma_k \sum_j (\sum_a |K_{ija}|)^2 \leq \gamma_k T \sum_{ja} K_{ija}^2` with T taps,
    and that last sum is p_i's mean over the grid, hence at most its maximum. k counts the
    channels, the lag sums, the transform (complex, axis by axis) with its table, and the sum
    over rows.
    """
    _, rows, columns, *sizes = scaled.taps.shape
    count = math.prod(sizes)
    length = rows * columns + rows + columns + count + 4 * sum(2 * m + 8 for m in sizes) + 32
    factor = widening_factor(samples, sizes, kind)
    return scaled.finish(square.sqrt() * factor, relative=2 * count * gamma(length))
