"""Upper triangles of I − s·FF* on the CPU, which is all that a Cholesky factorization reads.

They are computed in bands of rows, each from its first diagonal entry to the right. The result of a
product is then still in the cache when it is stored as real and imaginary part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.lapack import factor
from lipbound.bounds.supremum.eigen import greatest
from lipbound.bounds.supremum.field import Field, Floats, Integers
from lipbound.runtime import in_threads

BANDS = 8
LEAST = 16  # rows of a band
ROWS = 48  # below this, bands and threads are not faster

Band = tuple[int, int]


def bands(size: int) -> list[Band]:
    """First row and last row (excluded) of each band.

    Example:
        >>> bands(40)
        [(0, 20), (20, 40)]
    """
    count = max(1, min(BANDS, size // LEAST))
    return list(pairwise(size * i // count for i in range(count + 1)))


def suits(field: Field) -> bool:
    """Whether triangles are available for the field and faster."""
    return field.device.type == "cpu" and field.keeps_lags and field.rows >= ROWS


class Triangles:
    """Upper triangles of a field's lag matrices, in bands, in the precision ``real``."""

    def __init__(self, field: Field, real: type[np.floating[Any]]):
        self.field, self.real = field, real
        size = field.rows
        self.lags: list[list[list[NDArray[Any]]]] = [[] for _ in range(field.blocks)]
        for b, (first, last) in ((b, band) for b in range(field.blocks) for band in bands(size)):
            kept = np.triu(np.ones((last - first, size - first)))
            parts = []
            for lags in (field.even, field.odd):
                count = 0 if lags is None else lags.shape[1]
                part = np.empty((count, last - first, size - first), dtype=real)
                for lag in range(count):  # one at a time, to spare memory
                    matrix = lags[b, lag].numpy().reshape(size, size)  # type: ignore[index]
                    np.multiply(matrix[first:last, first:], kept, part[lag], casting="same_kind")
                parts.append(part.reshape(count, (last - first) * (size - first)))
            self.lags[b].append(parts)

    def gaps(self, block: Integers, frequency: Floats, scale: Floats) -> NDArray[Any]:
        """I − scale·FF* at each frequency: ``(P, n, n)``, undefined left of the bands."""
        size, count = self.field.rows, len(self.field.lags)
        waves = self.field.lag_waves(frequency, -scale).astype(self.real)
        gaps = np.empty((len(block), size, size), dtype=np.result_type(self.real, np.complex64))
        for start, stop in self.field.runs(block):
            lags = self.lags[int(block[start])]
            for (_, band), parts in zip(pieces(gaps[start:stop]), lags, strict=True):
                band.real = (waves[start:stop, :count] @ parts[0]).reshape(band.shape)
                band.imag = (waves[start:stop, count:] @ parts[1]).reshape(band.shape)
        gaps.reshape(len(block), -1)[:, :: size + 1] += self.real(1)
        return gaps

    def positive(self, block: Integers, frequency: Floats, scale: Floats) -> NDArray[np.bool_]:
        """Test where I − scale·FF* has a Cholesky factor in floating point."""
        found = np.empty(len(block), dtype=bool)

        def work(part: slice) -> None:
            found[part] = factor(self.gaps(block[part], frequency[part], scale[part]))

        in_threads(work, len(block))
        return found

    def bottom_eigenpairs(
        self, block: Integers, frequency: Floats, scale: Floats, start: Tensor, steps: int
    ) -> tuple[Floats, Tensor]:
        """Call :func:`lipbound.bounds.supremum.eigen.bottom_eigenpairs` for I − scale·FF*.

        Eigenvalues far below 0 may overflow, and are then returned as NaN.
        """
        least, left = np.empty(len(block)), torch.empty_like(start)
        begin, end = start.numpy(), left.numpy()

        def work(part: slice) -> None:
            gaps = self.gaps(block[part], frequency[part], scale[part])
            columns = chebyshev(gaps, begin[part, :, None].astype(gaps.dtype), steps)
            tall = np.concatenate(columns, -1).astype(complex)  # (P, n, steps + 1)
            basis = tall[..., :-1]
            images = np.concatenate([tall[..., 1:2], (tall[..., :-2] + tall[..., 2:]) / 2], -1)
            adjoint = basis.conj().swapaxes(1, 2)
            fine = np.isfinite(tall).all((1, 2))
            least[part] = np.nan
            values, chosen = greatest(
                (adjoint @ basis)[fine], (adjoint @ images)[fine],
                16 * float(np.finfo(self.real).eps),
            )  # fmt: skip
            least[part][fine] = (1 - values) / 2
            end[part][fine] = (basis[fine] @ chosen[..., None])[..., 0]

        in_threads(work, len(block))
        return least, left


def chebyshev(gaps: NDArray[Any], start: NDArray[Any], steps: int) -> list[NDArray[Any]]:
    """Compute T_k(I − 2·gap)·start for k ≤ ``steps``, ``(P, n, 1)`` each, from banded gaps."""
    size = gaps.shape[-1]
    diagonal = gaps.reshape(len(gaps), -1)[:, :: size + 1, None]

    def turned(vector: NDArray[Any]) -> NDArray[Any]:
        image = -diagonal * vector  # both halves include the diagonal
        for (first, last), band in pieces(gaps):
            image[:, first:last] += band @ vector[:, first:]
            image[:, first:] += (band.swapaxes(1, 2) @ vector[:, first:last].conj()).conj()
        return vector - 2 * image

    with np.errstate(all="ignore"):
        columns = [start, turned(start)]
        while len(columns) <= steps:
            columns.append(2 * turned(columns[-1]) - columns[-2])
    return columns


def pieces(matrices: NDArray[Any]) -> Iterator[tuple[Band, NDArray[Any]]]:
    """Yield the bands of matrices from :class:`Triangles`."""
    for first, last in bands(matrices.shape[-1]):
        yield (first, last), matrices[:, first:last, first:]
