r"""The same proof in single precision, on the CPU, where the room it takes is there.

A cell far from the peak leaves a gap of a per cent; float32 needs a twentieth of that, in half the
time. Let :math:`v = 2^{-24}` and :math:`\gamma_k = kv/(1 - kv)`, G = FF* and s a scale.

* *The matrix.* Lags and cosines are rounded to float32 and summed there, so an entry of the
  computed :math:`\hat B \approx I - sG` is off by at most :math:`\gamma_{L+4}\,s\,W_{ij}`, with
  W = Σ|even_l| + Σ|odd_l| over the L lags, and on the diagonal by 2v more. W is symmetric and not
  negative: its norm is at most its largest row sum w.
* *The factor.* If a Cholesky factor exists, :math:`LL^* = \hat B + \Delta`, and the entry i, j
  of Δ comes from inner products of length min(i, j), one rounding for the pivot and one for its
  reciprocal: it is at most :math:`\sqrt2\,\gamma_{2k}(|L||L|^T)_{ij}`, k = min(i, j) + 2, which
  :math:`\sqrt{(i + 2)(j + 2)}` bounds. So :math:`\|\Delta\| \leq c\,q` with
  :math:`c = \sqrt2\cdot 2v/(1 - 2(n + 2)v)` and q the norm of AᵀA, where A is \|L\|ᵀ with
  column i multiplied by :math:`\sqrt{i + 2}`. AᵀA is not negative, so its norm is at most
  :math:`\max_i (A^TAx)_i/x_i` for every positive x (Collatz and Wielandt). With x = AᵀA·1 that
  is three products with a vector, and a hundredth of what the trace, which float64 makes do with,
  would say.

Hence λ1(sG) ≤ 1 + δ with :math:`\delta = c\,q + \gamma_{L+4}\,s\,w + 4v` and, for what
underflows, 1e-30. s is chosen for a guessed δ; a larger one in the end proves nothing, and
the cell is left to float64. All arithmetic is numpy's and LAPACK's, which know no reduced
precision (torch's float32 products may be told to use one).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lipbound.bounds.field import Field, Floats, Integers
from lipbound.bounds.lapack import factor

UNIT32 = 2.0**-24
ROWS = 48  # below, float64 is as fast
SHARE = 0.4  # of a cell's gap θ² that δ may take
YES, NO, UNDECIDED = 1, 0, -1

Singles = NDArray[np.float32]


def _gamma(count: float) -> float:
    return count * UNIT32 / (1 - count * UNIT32)


class Single:
    """Proofs for the cells of one field."""

    def __init__(self, field: Field):
        self.field = field
        # What q is like for random symbols; from the first factor on, what it was.
        self.spread = np.full(field.blocks, 0.7 * field.rows**1.5)
        self.parts: tuple[Singles, Singles] | None = None
        self.weight = np.zeros(field.blocks)

    def suits(self, block: Integers, angle: Floats, limit: Floats) -> NDArray[np.bool_]:
        """Which cells leave room enough: ``(P,)``."""
        field = self.field
        if field.device.type != "cpu" or not field.keeps_lags or field.rows < ROWS:
            return np.zeros(len(block), dtype=bool)
        if self.parts is None:
            self._convert()
        guess = self._delta(self.spread[block], self.weight[block] / limit)
        return guess <= SHARE * np.square(angle)

    def _convert(self) -> None:
        """Lags to float32, without the entries below the diagonal, which no factor reads."""
        field, size = self.field, self.field.rows
        upper = np.triu(np.ones((size, size))).reshape(-1)
        weights = np.zeros((field.blocks, size * size))
        parts = []
        for lags in (field.even, field.odd):
            count = 0 if lags is None else lags.shape[1]
            parts.append(np.empty((field.blocks, count, size * size), dtype=np.float32))
            for b, lag in np.ndindex(field.blocks, count):  # one at a time, to spare memory
                matrix = lags[b, lag].numpy()  # type: ignore[index]
                weights[b] += np.abs(matrix)
                parts[-1][b, lag] = matrix * upper
        self.weight = weights.reshape(-1, size, size).sum(-1).max(-1) * 1.001
        self.parts = (parts[0], parts[1])

    def _delta(self, spread: Floats, weight: Floats) -> Floats:
        """δ for q = ``spread`` and s·w = ``weight``."""
        size, lags = self.field.rows, len(self.field.lags)
        factor = math.sqrt(2) * 2 * UNIT32 / (1 - 2 * (size + 2) * UNIT32)
        return factor * spread + _gamma(lags + 4) * weight + 4 * UNIT32 + 1e-30

    def prove(self, block: Integers, frequency: Floats, limit: Floats) -> Integers:
        """Whether λ1(FF*) ≤ limit at each frequency: YES, or NO, or UNDECIDED."""
        answer = np.empty(len(block), dtype=np.int64)
        for part in self.field.chunks(len(block), entry=8):
            answer[part] = self._prove(block[part], frequency[part], limit[part])
        return answer

    def _prove(self, block: Integers, frequency: Floats, limit: Floats) -> Integers:
        # The guess is made a little larger, so that s·w, which grows with it, stays within.
        guess = self._delta(self.spread[block], self.weight[block] / limit) * 1.01
        scale = (1 + guess) / limit * (1 + 1e-14)
        gaps = self._gaps(block, frequency, scale)
        found = factor(gaps)
        spread = np.where(found, _spread(gaps), 0.0)
        for b in np.unique(block):
            largest = spread[block == b].max()
            if largest:
                self.spread[b] = 1.05 * largest
        enough = self._delta(spread, scale * self.weight[block]) <= guess
        return np.where(found, np.where(enough, YES, UNDECIDED), NO)

    def _gaps(self, block: Integers, frequency: Floats, scale: Floats) -> NDArray[np.complex64]:
        """I − scale·FF*, the diagonal and above: ``(P, n, n)``."""
        assert self.parts is not None
        size, waves = self.field.rows, self.field.lag_waves(frequency, -scale).astype(np.float32)
        count = len(self.field.lags)
        gaps = np.empty((len(block), size, size), dtype=np.complex64)
        for first, last in self.field.runs(block):
            b = int(block[first])
            for target, factors, lags in (
                (gaps.real, waves[first:last, :count], self.parts[0][b]),
                (gaps.imag, waves[first:last, count:], self.parts[1][b]),
            ):
                target[first:last] = (factors @ lags).reshape(-1, size, size)
        gaps.reshape(len(block), -1)[:, :: size + 1] += np.float32(1)
        return gaps


def _spread(factors: NDArray[np.complex64]) -> Floats:
    """The bound on q for transposed factors, zeros below the diagonal: ``(P,)``."""
    size = factors.shape[-1]
    rows = np.abs(factors)
    rows *= np.sqrt(np.arange(3, size + 3, dtype=np.float32))
    ones = np.ones((len(rows), size, 1), dtype=np.float32)
    once = rows.swapaxes(1, 2) @ (rows @ ones)
    twice = rows.swapaxes(1, 2) @ (rows @ once)
    ratio = twice / np.maximum(once, np.float32(1e-30))
    return ratio.max((1, 2)).astype(np.float64) * (1 + 8 * (size + 8) * UNIT32)
