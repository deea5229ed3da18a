r"""The same proof in single precision, on the CPU, for cells with a large enough margin.

A cell far from the peak leaves a margin of one per cent. Float32 needs a twentieth of that, and
half the time. Let :math:`v = 2^{-24}` and :math:`\gamma_k = kv/(1 - kv)`, G = FF* and s a scale.

* *The matrix.* Lags and cosines are rounded to float32 and summed there, so an entry of the
  computed :math:`\hat B \approx I - sG` is off by at most :math:`\gamma_{L+4}\,s\,W_{ij}`, with
  W = Σ|even_l| + Σ|odd_l| over the L lags, and on the diagonal by 2v more. W is symmetric and not
  negative, so its norm is at most its largest row sum w.
* *The factor.* If a Cholesky factor exists, :math:`LL^* = \hat B + \Delta`, and the entry i, j
  of Δ comes from inner products of length min(i, j), one rounding for the pivot and one for its
  reciprocal: it is at most :math:`\sqrt2\,\gamma_{2k}(|L||L|^T)_{ij}`, k = min(i, j) + 2, which
  :math:`\sqrt{(i + 2)(j + 2)}` bounds. So :math:`\|\Delta\| \leq c\,q` with
  :math:`c = \sqrt2\cdot 2v/(1 - 2(n + 2)v)` and q the norm of AᵀA, where A is \|L\|ᵀ with
  column i multiplied by :math:`\sqrt{i + 2}`. AᵀA is not negative, so its norm is at most
  :math:`\max_i (A^TAx)_i/x_i` for every positive x (Collatz and Wielandt). With x = AᵀA·1 this
  takes three products with a vector. The trace, which is enough in float64, is a hundred times
  larger.

Hence λ1(sG) ≤ 1 + δ with :math:`\delta = c\,q + \gamma_{L+4}\,s\,w + 4v` and 1e-30
added for underflow. s is chosen for a guessed δ. If δ turns out larger, nothing is proved and the
cell is left to float64, as is a cell that fails while δ takes much of its margin. All arithmetic is
done by NumPy and LAPACK, which never reduce the precision (torch's float32 products may).
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lipbound.bounds.lapack import factor
from lipbound.bounds.rounding import gamma
from lipbound.bounds.supremum import triangles
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.bounds.supremum.triangles import Triangles, pieces
from lipbound.runtime import in_threads

UNIT32 = 2.0**-24
SHARE, MOST = 0.4, 1.0  # share of θ² that δ may take: for a failure to count, and for a test
YES, NO, UNDECIDED = 1, 0, -1


class Single:
    """Single-precision proofs for the cells of one field."""

    def __init__(self, field: Field):
        self.field = field
        # Typical q of random symbols; replaced by the measured q after the first factor.
        self.spread = np.full(field.blocks, 0.7 * field.rows**1.5)

    def suits(self, block: Integers, angle: Floats, limit: Floats) -> NDArray[np.bool_]:
        """Which cells have enough margin: ``(P,)``."""
        if not triangles.suits(self.field):  # otherwise float64 is as fast
            return np.zeros(len(block), dtype=bool)
        return self._guess(block, limit) <= MOST * np.square(angle)

    @cached_property
    def triangles(self) -> Triangles:
        return Triangles(self.field, np.float32)

    @cached_property
    def weight(self) -> Floats:
        """Upper bound on w for every block."""
        field = self.field
        sums = field.even[:, 0].abs()
        for lags in (field.even[:, 1:], field.odd):
            for lag in () if lags is None else lags.unbind(1):  # one at a time, to spare memory
                sums += lag.abs()
        rows = sums.reshape(-1, field.rows, field.rows).sum(-1)
        return rows.amax(-1).numpy() * 1.001

    def _guess(self, block: Integers, limit: Floats) -> Floats:
        return self._delta(self.spread[block], self.weight[block] / limit)

    def _delta(self, spread: Floats, weight: Floats) -> Floats:
        """δ for q = ``spread`` and s·w = ``weight``."""
        size, lags = self.field.rows, len(self.field.lags)
        factor = math.sqrt(2) * 2 * UNIT32 / (1 - 2 * (size + 2) * UNIT32)
        return factor * spread + gamma(lags + 4, UNIT32) * weight + 4 * UNIT32 + 1e-30

    def prove(self, block: Integers, frequency: Floats, limit: Floats, angle: Floats) -> Integers:
        """Test λ1(FF*) ≤ limit at each cell's centre: YES, NO or UNDECIDED."""
        answer = np.empty(len(block), dtype=np.int64)
        for part in self.field.chunks(len(block), entry=8):
            answer[part] = self._prove(block[part], frequency[part], limit[part], angle[part])
        return answer

    def _prove(self, block: Integers, frequency: Floats, limit: Floats, angle: Floats) -> Integers:
        lags = self.triangles
        # Enlarge the guess a little, so that it covers s·w, which grows with it.
        guess = self._guess(block, limit) * 1.01
        scale = (1 + guess) / limit * (1 + 1e-14)
        found, spread = np.empty(len(block), dtype=bool), np.empty(len(block))

        def work(part: slice) -> None:
            gaps = lags.gaps(block[part], frequency[part], scale[part])
            found[part] = factor(gaps)
            spread[part] = np.where(found[part], _spread(gaps), 0.0)

        in_threads(work, len(block))
        for b in np.unique(block):
            largest = spread[block == b].max()
            if largest:
                self.spread[b] = 1.05 * largest
        enough = self._delta(spread, scale * self.weight[block]) <= guess
        refused = np.where(guess <= SHARE * np.square(angle), NO, UNDECIDED)
        return np.where(found, np.where(enough, YES, UNDECIDED), refused)


def _spread(factors: NDArray[np.complex64]) -> Floats:
    """Upper bound on q for transposed factors: ``(P,)``."""
    count, size, _ = factors.shape
    weights = np.sqrt(np.arange(3, size + 3, dtype=np.float32))[:, None]
    bands = [(first, np.abs(band)) for (first, _), band in pieces(factors)]
    vector = np.ones((count, size, 1), dtype=np.float32)
    before = vector
    for _ in range(2):
        before, vector = vector, np.zeros_like(vector)
        for first, rows in bands:
            image = rows @ (weights[first:] * before[:, first:])
            vector[:, first:] += rows.swapaxes(1, 2) @ image
        vector *= weights
    ratio = vector / np.maximum(before, np.float32(1e-30))
    return ratio.max((1, 2)).astype(np.float64) * (1 + 8 * (size + 8) * UNIT32)
