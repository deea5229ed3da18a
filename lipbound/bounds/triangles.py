"""I − s·FF* on the CPU, the diagonal and above it: all that a Cholesky factorization reads.

In bands of rows, each from its first diagonal entry to the right, so that what a product makes is
still in the cache when it is taken apart into real and imaginary parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipbound.bounds.field import Field, Floats, Integers
from lipbound.bounds.lapack import factor
from lipbound.threads import side_by_side

BANDS = 8
LEAST = 16  # rows of a band
ROWS = 48  # below, neither bands nor threads pay

Band = tuple[int, int]


def bands(size: int) -> list[Band]:
    """First and last row of each, the last excluded.

    Example:
        >>> bands(40)
        [(0, 20), (20, 40)]
    """
    count = max(1, min(BANDS, size // LEAST))
    return list(pairwise(size * i // count for i in range(count + 1)))


def suits(field: Field) -> bool:
    """Whether it is worth it."""
    return field.device.type == "cpu" and field.keeps_lags and field.rows >= ROWS


class Triangles:
    """Lags of a field that keeps them, as ``real`` numbers of one precision, without what no
    factor reads: zeros within the bands, nothing to the left of them.

    Attributes:
        weight: ``(blocks,)`` the largest row sum of Σ|even_l| + Σ|odd_l|, from above.
    """

    def __init__(self, field: Field, real: type[np.floating[Any]]):
        self.field, self.real = field, real
        size = field.rows
        self.bands = bands(size)
        weights = np.zeros((field.blocks, size, size))
        self.lags: list[list[list[NDArray[Any]]]] = [[] for _ in range(field.blocks)]
        for b, (first, last) in ((b, band) for b in range(field.blocks) for band in self.bands):
            kept = np.triu(np.ones((last - first, size - first)))
            parts = []
            for lags in (field.even, field.odd):
                count = 0 if lags is None else lags.shape[1]
                part = np.empty((count, last - first, size - first), dtype=real)
                for lag in range(count):  # one at a time, to spare memory
                    matrix = lags[b, lag].numpy().reshape(size, size)[first:last]  # type: ignore[index]
                    weights[b, first:last] += np.abs(matrix)
                    np.multiply(matrix[:, first:], kept, out=part[lag], casting="same_kind")
                parts.append(part.reshape(count, (last - first) * (size - first)))
            self.lags[b].append(parts)
        self.weight: Floats = weights.sum(-1).max(-1) * 1.001

    def gaps(self, block: Integers, frequency: Floats, scale: Floats) -> NDArray[Any]:
        """I − scale·FF* at each frequency: ``(P, n, n)``, nothing to the left of the bands."""
        size, count = self.field.rows, len(self.field.lags)
        waves = self.field.lag_waves(frequency, -scale).astype(self.real)
        gaps = np.empty((len(block), size, size), dtype=np.result_type(self.real, np.complex64))
        for start, stop in self.field.runs(block):
            for (first, last), parts in zip(self.bands, self.lags[int(block[start])], strict=True):
                band = gaps[start:stop, first:last, first:]
                band.real = (waves[start:stop, :count] @ parts[0]).reshape(band.shape)
                band.imag = (waves[start:stop, count:] @ parts[1]).reshape(band.shape)
        gaps.reshape(len(block), -1)[:, :: size + 1] += self.real(1)
        return gaps

    def positive(self, block: Integers, frequency: Floats, scale: Floats) -> NDArray[np.bool_]:
        """Where I − scale·FF* has a Cholesky factor in floating point."""
        found = np.empty(len(block), dtype=bool)

        def work(part: slice) -> None:
            found[part] = factor(self.gaps(block[part], frequency[part], scale[part]))

        side_by_side(work, len(block))
        return found


def pieces(matrices: NDArray[Any]) -> Iterator[tuple[Band, NDArray[Any]]]:
    """The bands of matrices of :class:`Triangles`."""
    for first, last in bands(matrices.shape[-1]):
        yield (first, last), matrices[:, first:last, first:]
