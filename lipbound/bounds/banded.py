"""Proved upper bound on the norm of a sparse matrix whose Gram matrix is banded."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import LinAlgError, cholesky_banded, eigvals_banded

from lipbound.bounds.rounding import UNIT, gamma


def banded_norm_above(matrix: sparse.csr_array) -> float:
    r"""Bound σ1(A) from above by a banded Cholesky factorization of tI − AA* or tI − A*A.

    In resizing and pooling, an output depends on few neighbouring inputs, so one of the two Gram
    matrices G has few diagonals. An eigensolver suggests t; the factor L of B = tI − G proves it:
    :math:`LL^* = B + \Delta` with :math:`|\Delta| \leq \gamma_{b+2}|L||L|^*` (Higham, Theorem
    10.3; rows of L have at most b + 1 entries), and the entries of :math:`|L||L|^*` are at most
    max B_ii / (1 − γ) in size, 2b + 1 per row. G has an error of at most γ times the Gram matrix
    of |A|.

    Args:
        matrix: Real float64 matrix.

    Example:
        >>> round(banded_norm_above(sparse.csr_array(np.eye(3) + np.eye(3, k=1))), 4)
        1.8019
    """
    largest = float(abs(matrix).max()) if matrix.nnz else 0.0
    if largest == 0 or not math.isfinite(largest):
        return 0.0 if largest == 0 else math.inf
    power = 2.0 ** (math.frexp(largest)[1] - 1)
    sides = (matrix, sparse.csr_array(matrix.T))
    scaled = min(sides, key=lambda a: a.shape[0] * (_width(a) + 1) ** 2) / power  # cost of AA*
    bands, terms, size = _gram(scaled)
    width = len(bands) - 1
    product = gamma(terms + 2) * size
    factor = gamma(width + 4) * (2 * width + 1) * 2
    level = max(float(_suggestion(bands)), 0.0) + product
    growth = 4 * len(bands) * UNIT
    while True:
        level *= 1 + growth
        gap = -bands
        gap[0] += level
        try:
            cholesky_banded(gap, lower=True, overwrite_ab=False)
            break
        except LinAlgError:
            growth *= 8
    upper = (level * (1 + factor + 8 * UNIT) + product) * (1 + 8 * UNIT)
    return math.nextafter(math.sqrt(upper) * (1 + 4 * UNIT) * power, math.inf)


def _width(matrix: sparse.csr_array) -> int:
    """Number of diagonals of AA* on one side: the largest distance of rows sharing a column."""
    columns = sparse.csc_array(matrix)
    columns.sort_indices()
    starts, ends = columns.indptr[:-1], columns.indptr[1:]
    used = ends > starts
    return int((columns.indices[ends[used] - 1] - columns.indices[starts[used]]).max())


def _gram(matrix: sparse.csr_array) -> tuple[NDArray[np.float64], int, float]:
    """AA* by diagonals, the longest of its sums, and a bound on the norm of |A||A|*."""
    gram = (matrix @ matrix.T).tocoo()
    whole, rows = abs(matrix), matrix.shape[0]
    size = float((whole @ (whole.T @ np.ones(rows))).max()) * (1 + 1e-9)  # ‖·‖₂ ≤ ‖·‖_∞
    bands = np.zeros((_width(matrix) + 1, rows))
    below = gram.row >= gram.col
    bands[(gram.row - gram.col)[below], gram.col[below]] = gram.data[below]
    return bands, int(np.diff(matrix.indptr).max()), size


def _suggestion(bands: NDArray[np.float64]) -> float:
    """Approximate largest eigenvalue."""
    rows = bands.shape[1]
    if rows == 1:
        return float(bands[0, 0])
    return float(
        eigvals_banded(bands, lower=True, select="i", select_range=(rows - 1, rows - 1))[0]
    )
