r"""Toeplitz matrices of generating functions, as in the paper, to test its theorems.

A generating function :math:`f(\omega) = \sum_h a_h e^{ih\cdot\omega}` gives the matrix with entry
:math:`a_{j-i}` at (i, j): T(f) in one variable, block T(F) when the coefficients are matrices,
and the doubly-block Toeplitz D(f) in two variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def coefficients(
    generator: Callable[..., NDArray[Any]], degree: int | Sequence[int]
) -> NDArray[np.complex128]:
    r"""Fourier coefficients :math:`a_h = (2\pi)^{-D}\int e^{-ih\cdot\omega} f(\omega)\,d\omega`.

    The integral over a trigonometric polynomial is a finite sum, so this is exact.

    Args:
        generator: Function f, called with one array of frequencies per variable. It returns the
            values; trailing axes hold the blocks of a matrix-valued f.
        degree: Degree per variable (one int: one variable).

    Returns:
        ``(2d_1 + 1, ..., 2d_D + 1, *block)``, index 0 for h = −d.

    Example:
        >>> coefficients(lambda w: 2 * np.cos(w), 1).real.round(12) + 0.0
        array([1., 0., 1.])
    """
    degrees = (degree,) if isinstance(degree, int) else tuple(degree)
    axes = [2 * np.pi * np.arange(2 * d + 1) / (2 * d + 1) for d in degrees]
    values = np.asarray(generator(*np.meshgrid(*axes, indexing="ij")), dtype=complex)
    spectrum = np.fft.fftn(values, axes=range(len(degrees)))
    spectrum = spectrum / math.prod(2 * d + 1 for d in degrees)
    return np.fft.fftshift(spectrum, axes=range(len(degrees)))


def toeplitz(coefs: NDArray[Any], sizes: int | Sequence[int]) -> NDArray[Any]:
    r"""The Toeplitz matrix with entry :math:`a_{j-i}` at (i, j), D-fold, with matrix blocks.

    ``toeplitz(a, n)`` is T(f); ``toeplitz(A, n)`` with ``A`` of shape ``(2d+1, p, q)`` is block
    T(F); ``toeplitz(a, (n, m))`` is D(f).

    Args:
        coefs: ``(2d_1 + 1, ..., 2d_D + 1)`` or ``(2d_1 + 1, ..., 2d_D + 1, p, q)``.
        sizes: Size n per variable.

    Returns:
        A dense matrix, ``(prod(n)·p, prod(n)·q)``.

    Example:
        >>> toeplitz(np.array([3, 1, 2]), 3)  # a_-1, a_0, a_1
        array([[1, 2, 0],
               [3, 1, 2],
               [0, 3, 1]])
    """
    return _lattice(coefs, sizes, lambda i, j: j - i)


def hankel(
    coefs: NDArray[Any],
    sizes: Sequence[int],
    index: Sequence[Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]],
) -> NDArray[Any]:
    r"""The matrices H^α of the paper's generalized Widom identity: entry :math:`a_{\alpha(i, j)}`.

    Args:
        coefs: ``(2d_1 + 1, ..., 2d_D + 1)``.
        sizes: Size n per variable.
        index: Function of row and column per variable, for example ``i + j + 1``.
    """
    return _lattice(coefs, sizes, *index)


def _lattice(
    coefs: NDArray[Any],
    sizes: int | Sequence[int],
    *index: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
) -> NDArray[Any]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    index = index if len(index) == len(sizes) else index * len(sizes)
    dims = len(sizes)
    blocks = coefs.reshape(*coefs.shape, 1, 1) if coefs.ndim == dims else coefs
    reach = [
        rule(*np.ix_(np.arange(n), np.arange(n))) for rule, n in zip(index, sizes, strict=True)
    ]
    taken = blocks
    for axis, wanted in enumerate(reach):
        degree = blocks.shape[axis] // 2
        inside = np.abs(wanted) <= degree
        taken = np.take(taken, np.where(inside, wanted + degree, 0), axis=2 * axis)
        mask = inside.reshape((1,) * (2 * axis) + inside.shape + (1,) * (taken.ndim - 2 * axis - 2))
        taken = taken * mask
    # axes are now (i1, j1, i2, j2, ..., p, q)
    order = [*range(0, 2 * dims, 2), 2 * dims, *range(1, 2 * dims, 2), 2 * dims + 1]
    rows = math.prod(sizes) * taken.shape[-2]
    return taken.transpose(order).reshape(rows, -1)
