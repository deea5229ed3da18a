r"""FF* of many symbols at many frequencies, cheaply, and the top of its spectrum.

FF* is itself a trigonometric polynomial, with matrix coefficients
:math:`R_l = \sum_{a-b=l} K_a K_b^T`. Those are made once; after that a frequency costs
(number of lags)·n² operations instead of a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.bounds.rounding import (
    UNIT,
    gamma,
    gamma_complex,
    proved_eigenvalue,
    symbol_error,
)
from lipbound.memory import piece
from lipbound.symbol import positions

LAG_BYTES = 1 << 29  # above this, lag matrices are not kept and FF* is a product each time
CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # complex matrices handled at once
MOST = 1 << 17  # matrices at once, however small: a batched solver's workspace grows with them
GATHER = 1 << 13  # lag entries below which cells of different blocks go through one product


def lag_bytes(rows: int, sizes: Sequence[int]) -> int:
    """What the lag matrices of one symbol take."""
    return 8 * math.prod([2 * m - 1 for m in sizes]) * rows**2


class Field:
    """A stack of real symbols ``(blocks, n, N, *m)``, n ≤ N, ready to be evaluated.

    Attributes:
        error: ``(blocks,)`` bounds on ‖computed FF* − FF*‖ in the spectral norm. Every entry is
            made by inner products whose absolute sum is that entry of (Σ|K|)(Σ|K|)ᵀ, of length
            N·T for the lags and twice their number for the transform (or, without lags, T for F
            and N for the product), so the error is at most :math:`\\gamma \\|\\Sigma|K|\\|_F^2`.
        size: ``(blocks,)`` the norms ‖Σ|K|‖_F.
    """

    def __init__(self, taps: Tensor):
        self.blocks, self.rows, self.columns, *self.sizes = taps.shape
        self.taps = taps.reshape(*taps.shape[:3], -1)  # (blocks, n, N, T)
        self.positions = positions(self.sizes).to(taps.device, torch.float64)  # (T, D)
        count = math.prod(self.sizes)
        self.lags = _half_lags(self.sizes).to(taps.device, torch.float64)  # (L, D), 0 first
        self.keeps_lags = self.blocks * lag_bytes(self.rows, self.sizes) <= piece(LAG_BYTES)
        if self.keeps_lags:
            self._make_lags()
        sums = self.taps.abs().sum(-1)
        self.size = torch.linalg.vector_norm(sums.flatten(1), dim=1)
        angles = symbol_error([2 * m for m in self.sizes]) * 4
        length = self.columns * count + 2 * len(self.lags) + self.columns * self.rows + 64
        self.error = (gamma_complex(length) + angles) * self.size.square()

    def _make_lags(self) -> None:
        grid = self.taps.reshape(self.blocks, self.rows, self.columns, *self.sizes)
        even: list[Tensor] = []
        odd: list[Tensor] = []
        for lag in self.lags.long().tolist():
            late, soon = _shifted(grid, lag), _shifted(grid, [-h for h in lag])
            product = late.flatten(2) @ soon.flatten(2).mT
            if even:
                even.append((product + product.mT).flatten(1))
                odd.append((product - product.mT).flatten(1))
            else:
                even.append(product.flatten(1))
        self.even = torch.stack(even, 1)  # (blocks, L, n²): the cosines' coefficients
        self.odd = torch.stack(odd, 1) if odd else None  # (blocks, L − 1, n²): the sines'

    def flat_bound(self) -> Tensor:
        r"""√(λ1(R_0) + Σ_{l≠0} ‖R_l‖_F) ≥ sup σ1(F), ``(blocks,)``: tight for flat symbols only.

        An orthogonal convolution has no other lag than 0; its symbol would need a proof on every
        cell of a fine cover. Infinite where the lags are not small.
        """
        if not self.keeps_lags:
            return torch.full_like(self.size, math.inf)
        rest = torch.zeros_like(self.size)
        if self.odd is not None:  # R = (even + odd)/2, and the two are orthogonal
            squares = self.even[:, 1:].square().sum(-1) + self.odd.square().sum(-1)
            rest = squares.sqrt().sum(-1)
        base = self.even[:, 0].reshape(-1, self.rows, self.rows)
        hopeless = rest > 0.1 * base.diagonal(dim1=-2, dim2=-1).amax(-1)
        if bool(hopeless.all()):
            return torch.full_like(self.size, math.inf)
        top = torch.linalg.eigvalsh(base)[:, -1]
        proved = proved_eigenvalue(base, top, self.columns * len(self.positions))
        slack = 1 + gamma(self.rows**2 + 2 * len(self.lags) + 32)
        bound = ((proved + rest + self.error) * slack).sqrt() * (1 + 8 * UNIT)
        return torch.where(hopeless, math.inf, bound)

    @property
    def chunk(self) -> int:
        """How many matrices to handle at once."""
        width = self.rows if self.keeps_lags else max(self.rows, self.columns)
        room = CHUNK_BYTES.get(self.taps.device.type, CHUNK_BYTES["cpu"])
        entries = len(self.lags) * self.rows**2
        gathered = entries if self.keeps_lags and entries <= GATHER else 0
        each = 16 * self.rows * width + 16 * (len(self.lags) + gathered)
        return max(1, min(piece(MOST), piece(room) // each))

    def gram(self, block: Tensor, frequencies: Tensor) -> Tensor:
        """FF* for block ``block[p]`` at ``frequencies[p]``: ``(P, n, n)`` complex128."""
        if not self.keeps_lags:
            symbols = self.symbol(block, frequencies)
            return symbols @ symbols.mH
        angles = frequencies @ self.lags.mT  # (P, L)
        real = _times_blocks(angles.cos(), self.even, block)
        if self.odd is None:
            imag = torch.zeros_like(real)
        else:
            imag = _times_blocks(angles[:, 1:].sin(), self.odd, block)
        return torch.complex(real, imag).reshape(-1, self.rows, self.rows)

    def symbol(self, block: Tensor, frequencies: Tensor) -> Tensor:
        """F itself: ``(P, n, N)`` complex128."""
        waves = self.waves(frequencies)[..., None]  # (P, T, 1)
        taps = self.taps[block].flatten(1, 2)  # (P, n·N, T)
        parts = [(taps @ wave)[..., 0] for wave in (waves.real, waves.imag)]
        return torch.complex(*parts).reshape(-1, self.rows, self.columns)

    def waves(self, frequencies: Tensor) -> Tensor:
        """e^{ih·ω} per tap: ``(P, T)``."""
        angles = frequencies @ self.positions.mT
        return torch.complex(angles.cos(), angles.sin())

    def rows_applied(self, block: Tensor, left: Tensor) -> Tensor:
        """u*K_h for every tap: ``(P, n)`` → ``(P, N, T)``."""
        taps = self.taps[block]
        flat = taps.reshape(len(block), self.rows, -1)
        parts = [(part[:, None] @ flat)[:, 0] for part in (left.real, -left.imag)]
        return torch.complex(*parts).reshape(-1, self.columns, taps.shape[-1])


def _times_blocks(factors: Tensor, blocks: Tensor, block: Tensor) -> Tensor:
    """``factors[p] @ blocks[block[p]]``: ``(P, L)``, ``(B, L, M)`` → ``(P, M)``."""
    if len(blocks) == 1:
        return factors @ blocks[0]
    if blocks[0].numel() <= GATHER:
        return (factors[:, None] @ blocks[block])[:, 0]
    used, place, counts = block.unique(return_inverse=True, return_counts=True)
    most = int(counts.max())
    if most * len(used) > 2 * len(block):  # unbalanced: one product a block
        result = factors.new_empty(len(block), blocks.shape[-1])
        for b in used.tolist():
            mine = (block == b).nonzero()[:, 0]
            result[mine] = factors[mine] @ blocks[b]
        return result
    order = place.argsort(stable=True)
    slot = torch.empty_like(place)
    first = counts.cumsum(0) - counts
    slot[order] = torch.arange(len(place), device=place.device) - first[place[order]]
    padded = factors.new_zeros(len(used), most, factors.shape[1])
    padded[place, slot] = factors
    chosen = blocks if len(used) == len(blocks) else blocks[used]
    return (padded @ chosen)[place, slot]


def _shifted(grid: Tensor, lag: list[int]) -> Tensor:
    """The taps b + lag for which b is a tap too."""
    for axis, h in enumerate(lag, start=3):
        size = grid.shape[axis]
        grid = grid.narrow(axis, max(0, h), size - abs(h))
    return grid


def _half_lags(sizes: list[int]) -> Tensor:
    """Lag 0 and one of each pair ±l: ``(L, D)`` integers."""
    full = positions([2 * m - 1 for m in sizes])
    if sizes:
        full = full - (torch.tensor(sizes) - 1)
    return full[len(full) // 2 :]


def top_eigenpairs(matrices: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Lanczos from ``start`` with full reorthogonalization: Ritz values and vectors, batched.

    Values never exceed λ1 but for rounding. Small matrices are solved outright.

    Args:
        matrices: ``(P, n, n)`` Hermitian.
        start: ``(P, n)``.
        steps: Size of the Krylov space.
    """
    size = matrices.shape[-1]
    if size == 1:
        return matrices[:, 0, 0].real, torch.ones_like(start)
    if size <= max(16, steps):
        values, vectors = torch.linalg.eigh(matrices)
        return values[:, -1], vectors[..., -1]
    basis = torch.zeros(*start.shape, steps, dtype=start.dtype, device=start.device)
    images = torch.empty_like(basis)  # (P, n, steps)
    vector = start
    scale = torch.ones(())
    for step in range(steps):
        if step:
            known = basis[..., :step]
            for _ in range(1 if steps <= 8 else 2):
                vector = vector - (known @ (known.mH @ vector[..., None]))[..., 0]
        norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        scale = norm if step < 2 else scale
        # What is left of an exhausted space is rounding: a zero column adds nothing.
        basis[..., step] = torch.where(norm > 1e-10 * scale, vector / norm.clamp_min(1e-300), 0)
        vector = (matrices @ basis[..., step : step + 1])[..., 0]
        images[..., step] = vector
    small = basis.mH @ images
    values, vectors = torch.linalg.eigh((small + small.mH) / 2)
    return values[:, -1], (basis @ vectors[..., -1:])[..., 0]
