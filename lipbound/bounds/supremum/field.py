r"""Evaluate FF* of many symbols at many frequencies at low cost.

FF* is itself a trigonometric polynomial, with matrix coefficients
:math:`R_l = \sum_{a-b=l} K_a K_b^T`. They are computed once; after that each frequency
costs (number of lags)·n² operations instead of a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.rounding import (
    UNIT,
    gamma,
    gamma_complex,
    proved_eigenvalue,
    symbol_error,
)
from lipbound.runtime import check_time, piece

LAG_BYTES = 1 << 29  # above this, lag matrices are not kept and FF* is a product each time
CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}  # complex matrices handled at once
MOST = 1 << 17  # matrices at once
# Lag entries below which one product handles cells of different blocks.
GATHER = {"cpu": 1 << 13, "cuda": 1 << 18}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def indices(sizes: Sequence[int]) -> Integers:
    """All index vectors below ``sizes``, row by row: ``(prod(sizes), D)``, on the host."""
    return np.indices(tuple(sizes)).reshape(len(sizes), -1).T if sizes else np.zeros((1, 0), int)


def lag_bytes(rows: int, sizes: Sequence[int]) -> int:
    """Bytes that the lag matrices of one symbol take."""
    return 8 * math.prod([2 * m - 1 for m in sizes]) * rows**2


class Field:
    """A stack of real symbols ``(blocks, n, N, *m)``, n ≤ N, ready to be evaluated.

    Attributes:
        error: ``(blocks,)`` bounds on ‖computed FF* − FF*‖ in the spectral norm. Every entry is
            made by inner products whose absolute sum is that entry of (Σ|K|)(Σ|K|)ᵀ, of length
            N·T for the lags and twice their number for the transform (or, without lags, T for F
            and N for the product), so the error is at most :math:`\\gamma \\|\\Sigma|K|\\|_F^2`.
            Frequencies may be as large as 2π.
        image_error: ``(blocks,)`` bounds on the error of a computed ‖F*u‖ for a unit vector u: that
            of the symbol, and that of inner products over rows and taps.
        size: ``(blocks,)`` the norms ‖Σ|K|‖_F.
        usual: ``(blocks,)`` a typical value of λ1(FF*), not a bound.
    """

    def __init__(self, taps: Tensor):
        self.blocks, self.rows, self.columns, *self.sizes = taps.shape
        self.device = taps.device
        self.taps = taps.reshape(*taps.shape[:3], -1)  # (blocks, n, N, T)
        self.positions = indices(self.sizes).astype(float)  # (T, D)
        self.lags = half_lags(tuple(self.sizes))  # (L, D), 0 first
        self.keeps_lags = self.blocks * lag_bytes(self.rows, self.sizes) <= piece(LAG_BYTES)

    def measures(self) -> Tensor:
        """``(4, blocks)``: error, image_error, size and usual, on the device."""
        length = self.columns * len(self.positions) + 2 * len(self.lags)
        length += self.columns * self.rows + 64
        error = gamma_complex(length) + symbol_error([2 * m for m in self.sizes]) * 4
        inner = gamma_complex(self.rows + len(self.positions) + self.columns + 32)
        image_error = 2 * (symbol_error(self.sizes) + inner)
        size = torch.linalg.vector_norm(self.taps.abs().sum(-1).flatten(1), dim=1)
        # λ1 of a random symbol with this energy (Marchenko and Pastur): the scale to begin with.
        edge = (1 + math.sqrt(self.rows / self.columns)) ** 2 / self.rows
        usual = edge * torch.linalg.vector_norm(self.taps.flatten(1), dim=1).square()
        usual = torch.where(usual > 1e-290, usual, 1.0)  # its reciprocal is finite
        return torch.stack([error * size.square(), image_error * size, size, usual])

    @cached_property
    def _read(self) -> Floats:
        return self.measures().cpu().numpy()

    @property
    def error(self) -> Floats:
        return self._read[0]

    @property
    def image_error(self) -> Floats:
        return self._read[1]

    @property
    def size(self) -> Floats:
        return self._read[2]

    @cached_property
    def usual(self) -> Floats:
        return self._read[3]

    @property
    def even(self) -> Tensor:
        """``(blocks, L, n²)``: the lag matrices that belong to cosines."""
        return self._lag_matrices[0]

    @property
    def odd(self) -> Tensor | None:
        """``(blocks, L − 1, n²)``: those that belong to sines; ``None`` for a single lag."""
        return self._lag_matrices[1]

    @property
    def room(self) -> int:
        """Bytes that complex matrices handled at once may take."""
        return piece(CHUNK_BYTES.get(self.device.type, CHUNK_BYTES["cpu"]))

    @cached_property
    def sums(self) -> Tensor | None:
        """The matrix that makes lags of all products of taps; ``None`` if these are too many."""
        products = len(self.positions) ** 2 * max(self.blocks * self.rows**2, len(self.lags))
        fits = 16 * products <= self.room
        return _equal_lags(tuple(self.sizes), self.device) if fits else None

    @cached_property
    def _lag_matrices(self) -> tuple[Tensor, Tensor | None]:
        if self.sums is not None:
            return self._lags_at_once(self.sums)
        grid = self.taps.reshape(self.blocks, self.rows, self.columns, *self.sizes)
        even: list[Tensor] = []
        odd: list[Tensor] = []
        for lag in self.lags.astype(int).tolist():
            check_time()
            late, soon = shifted(grid, lag), shifted(grid, [-h for h in lag])
            product = late.flatten(2) @ soon.flatten(2).mT
            if even:
                even.append((product + product.mT).flatten(1))
                odd.append((product - product.mT).flatten(1))
            else:
                even.append(product.flatten(1))
        return torch.stack(even, 1), torch.stack(odd, 1) if odd else None

    def _lags_at_once(self, sums: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute all tap products at once, then sum equal lags by a matrix of 0, 1 and −1."""
        count = len(self.positions)
        taps = self.taps.permute(0, 3, 1, 2).flatten(1, 2)  # (blocks, T·n, N)
        products = (taps @ taps.mT).reshape(self.blocks, count, self.rows, count, self.rows)
        products = products.transpose(2, 3).reshape(self.blocks, count**2, self.rows**2)
        even, odd = (sums @ products).tensor_split([len(self.lags)], 1)
        return even, odd if len(self.lags) > 1 else None

    def flat_bound(self) -> Floats:
        r"""√(λ1(R_0) + Σ_{l≠0} ‖R_l‖_F) ≥ sup σ1(F), ``(blocks,)``: tight for flat symbols only.

        An orthogonal convolution has only lag 0; without this bound its symbol would need a proof
        on every cell of a fine cover. The bound is infinite where other lags are not small.
        """
        if not self.keeps_lags:
            return np.full(self.blocks, math.inf)
        rest = np.zeros(self.blocks)
        if self.odd is not None:  # R = (even + odd)/2, and the two are orthogonal
            squares = self.even[:, 1:].square().sum(-1) + self.odd.square().sum(-1)
            rest = squares.sqrt().sum(-1).cpu().numpy()
        base = self.even[:, 0].reshape(-1, self.rows, self.rows)
        hopeless = rest > 0.1 * base.diagonal(dim1=-2, dim2=-1).amax(-1).cpu().numpy()
        if hopeless.all():
            return np.full(self.blocks, math.inf)
        top = torch.linalg.eigvalsh(base)[:, -1]
        proved = proved_eigenvalue(base, top, self.columns * len(self.positions)).cpu().numpy()
        slack = 1 + gamma(self.rows**2 + 2 * len(self.lags) + 32)
        bound = np.sqrt((proved + rest + self.error) * slack) * (1 + 8 * UNIT)
        return np.where(hopeless, math.inf, bound)

    @property
    def chunk(self) -> int:
        """Number of complex128 matrices to handle at once."""
        width = self.rows if self.keeps_lags else max(self.rows, self.columns)
        gathered = len(self.lags) * self.rows**2 if self._gathers() else 0
        each = 16 * self.rows * width + 16 * (len(self.lags) + gathered)
        return max(1, min(piece(MOST), self.room // each))

    def _gathers(self) -> bool:
        entries = len(self.lags) * self.rows**2
        most = GATHER.get(self.device.type, GATHER["cpu"])
        return self.keeps_lags and self.blocks > 1 and entries <= most

    def chunks(self, count: int, entry: int = 16) -> Iterator[slice]:
        """Yield even slices of at most ``chunk`` cells, or more cells if entries are smaller."""
        for part in even_slices(count, self.chunk * 16 // entry):
            check_time()
            yield part

    def gap(self, block: Integers, frequency: Floats, scale: Floats) -> Tensor:
        """I − scale·FF* for block ``block[p]`` at ``frequency[p]``: ``(P, n, n)`` complex128."""
        if self.keeps_lags:
            factors = self.send(self.lag_waves(frequency, -scale))
            real = self._times_blocks(factors[:, : len(self.lags)], self.even, block)
            if self.odd is None:
                imag = torch.zeros_like(real)
            else:
                imag = self._times_blocks(factors[:, len(self.lags) :], self.odd, block)
            real = real.reshape(-1, self.rows, self.rows)
            real.diagonal(dim1=-2, dim2=-1).add_(1)
            return torch.complex(real, imag.reshape(real.shape))
        symbols = self.symbol(block, frequency)
        product = (symbols * self.send(-scale)[:, None, None]) @ symbols.mH
        product.diagonal(dim1=-2, dim2=-1).add_(1)
        return product

    def lag_waves(self, frequency: Floats, scale: Floats) -> Floats:
        """Scaled cosines of all lags, sines of all but the first: ``(P, 2L − 1)``."""
        angles = frequency @ self.lags.T
        return np.concatenate([np.cos(angles), np.sin(angles[:, 1:])], 1) * scale[:, None]

    def gram(self, block: Integers, frequency: Floats) -> Tensor:
        """Compute FF*."""
        identity = torch.eye(self.rows, dtype=torch.complex128, device=self.device)
        return identity - self.gap(block, frequency, np.ones(len(block)))

    def _times_blocks(self, factors: Tensor, blocks: Tensor, block: Integers) -> Tensor:
        """``factors[p] @ blocks[block[p]]``: ``(P, L)``, ``(B, L, M)`` → ``(P, M)``."""
        if len(blocks) == 1:
            return factors @ blocks[0]
        if self._gathers():
            return (factors[:, None] @ blocks[self.send(block)])[:, 0]
        result = factors.new_empty(len(factors), blocks.shape[-1])
        for first, last in self.runs(block):
            torch.mm(factors[first:last], blocks[int(block[first])], out=result[first:last])
        return result

    @staticmethod
    def runs(block: Integers) -> Iterator[tuple[int, int]]:
        """Start and end of each run of equal blocks."""
        return pairwise([0, *((block[1:] != block[:-1]).nonzero()[0] + 1).tolist(), len(block)])

    def symbol(self, block: Integers, frequency: Floats) -> Tensor:
        """Compute F: ``(P, n, N)`` complex128."""
        waves = self.waves(frequency)
        parts = self.send(np.stack([waves.real, waves.imag], -1))  # (P, T, 2)
        values = self._taps(block).flatten(1, 2) @ parts  # (P, n·N, 2)
        return torch.view_as_complex(values).reshape(-1, self.rows, self.columns)

    def waves(self, frequency: Floats) -> NDArray[np.complex128]:
        """e^{ih·ω} per tap: ``(P, T)``."""
        angles = frequency @ self.positions.T
        return np.cos(angles) + 1j * np.sin(angles)

    def rows_applied(self, block: Integers, left: Tensor) -> NDArray[np.complex128]:
        """u*K_h for every tap: ``(P, n)`` → ``(P, N, T)``."""
        parts = torch.view_as_real(left.conj().resolve_conj()).mT  # (P, 2, n)
        taps = self._taps(block).flatten(2)
        real, imag = (parts @ taps).cpu().numpy().swapaxes(0, 1)
        return (real + 1j * imag).reshape(len(block), self.columns, -1)

    def _taps(self, block: Integers) -> Tensor:
        if len(block) == self.blocks and (block == np.arange(self.blocks)).all():
            return self.taps
        return self.taps[self.send(block)]

    def send(self, values: NDArray[Any]) -> Tensor:
        """Copy values to the field's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def even_slices(count: int, most: int) -> list[slice]:
    """Slices of almost equal length, at most ``most``, that make up ``count`` entries.

    Example:
        >>> even_slices(5, 3)
        [slice(0, 2, None), slice(2, 5, None)]
    """
    parts = math.ceil(count / most)
    ends = [count * i // parts for i in range(parts + 1)] if parts else []
    return [slice(first, last) for first, last in pairwise(ends)]


def shifted(grid: Tensor, lag: list[int]) -> Tensor:
    """The taps b + lag for which b is a tap too."""
    for axis, h in enumerate(lag, start=3):
        size = grid.shape[axis]
        grid = grid.narrow(axis, max(0, h), size - abs(h))
    return grid


@lru_cache(maxsize=256)
def _equal_lags(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The matrix of 0, 1 and −1 that sums products of taps of equal lags: ``(2L − 1, T²)``.

    It stays on the device, because a graph cannot copy it there.
    """
    positions, lags = indices(sizes), half_lags(sizes)
    apart = (positions[:, None] - positions).reshape(len(positions) ** 2, 1, len(sizes))
    plus, minus = ((apart == sign * lags).all(-1).T for sign in (1, -1))  # (L, T²)
    sums = np.concatenate([plus | minus, plus[1:].astype(float) - minus[1:]])
    return torch.from_numpy(sums).to(device)


@lru_cache(maxsize=256)
def half_lags(sizes: tuple[int, ...]) -> Floats:
    """Lag 0 and one of each pair ±l: ``(L, D)``."""
    full = indices([2 * m - 1 for m in sizes]).astype(float)
    full = full - (np.array(sizes) - 1)
    return full[len(full) // 2 :]
