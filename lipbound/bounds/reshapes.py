"""Singla & Feizi's bound from reshaped kernels."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lipbound.bounds.rounding import Scaled, spectral_norm_above
from lipbound.geometry import Layer, convolution


def fantastic_four(layer: Layer, **geometry: object) -> Tensor:
    r"""Bound σ1 by :math:`\sqrt{T}` times σ1 of the best reshape of the kernel into a matrix.

    Singla & Feizi (2021), for any number of axes: give each spatial axis either to the rows or to
    the columns; in 2d that makes four matrices R. Then F(ω) = (I ⊗ a)* R (I ⊗ b) with a and b
    vectors of unit phases, of squared lengths whose product is the number of taps T, so
    σ1(F(ω)) ≤ √T σ1(R) at every ω. σ1(R) is computed from above
    (:func:`lipbound.bounds.rounding.spectral_norm_above`).

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        geometry: Options of a bare kernel, or ``input_shape``.

    Returns:
        The bound, a scalar, at least σ1 for every input size; differentiable.

    Example:
        >>> fantastic_four(torch.ones(1, 1, 3, 3))  # √9 times the norm of nine ones
        tensor(9.0000)
    """
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    taps = scaled.taps()
    groups, rows, _, *sizes = taps.shape
    axes = range(3, taps.ndim)
    norms = []
    for count in range(len(sizes) + 1):
        for with_rows in itertools.combinations(axes, count):
            with_columns = [axis for axis in axes if axis not in with_rows]
            height = rows * math.prod(taps.shape[axis] for axis in with_rows)
            matrix = taps.permute(0, 1, *with_rows, 2, *with_columns).reshape(groups, height, -1)
            norms.append(spectral_norm_above(matrix))
    best = torch.stack(norms).amin(0).amax()
    return scaled.finish(best * math.sqrt(math.prod(sizes)), relative=0.0)
