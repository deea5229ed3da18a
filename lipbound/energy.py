r"""Row energies of a symbol on a grid, without the symbol.

:math:`\sum_j |F_{ij}(\omega)|^2` is itself a real trigonometric polynomial, whose coefficients
are the autocorrelation of the kernel's row i. One small Gram matrix of the taps per row and one
cosine transform replace cout × cin polynomials on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.memory import piece

CHUNK = 1 << 24  # elements of a temporary


def energy_maxima(taps: Tensor, samples: Sequence[int]) -> Tensor:
    r"""Grid maxima of :math:`p_i(\omega) = \sum_j |F_{ij}(\omega)|^2`: ``(groups, rows)``."""
    groups, rows, _, *sizes = taps.shape
    flat = taps.reshape(groups * rows, taps.shape[2], -1)
    waves = [
        _waves(m, count, half=axis == 0).to(taps.device)
        for axis, (m, count) in enumerate(zip(sizes, samples, strict=True))
    ]
    largest = max(math.prod(sizes) ** 2, 2 * math.prod([wave.shape[1] for wave in waves]))
    parts = [_maxima(part, sizes, waves) for part in flat.split(max(1, piece(CHUNK) // largest))]
    return torch.cat(parts).reshape(groups, rows)


def _maxima(flat: Tensor, sizes: Sequence[int], waves: Sequence[Tensor]) -> Tensor:
    """One chunk of rows, ``(rows, columns, taps)`` → ``(rows,)``, transforming axis by axis."""
    energies = _lag_sums(flat, sizes)  # (rows, *lags)
    for axis, wave in enumerate(waves):
        complex_ = wave.to(torch.promote_types(energies.dtype, torch.complex64))
        energies = torch.tensordot(energies.to(complex_.dtype), complex_, dims=([1], [0]))
        if axis == len(waves) - 1:
            energies = energies.real  # p(ω) is real
    return energies.reshape(len(energies), -1).amax(1)


def _waves(size: int, samples: int, half: bool) -> Tensor:
    """e^{iωl} for the lags −(m−1)…m−1 at ω = 2πk/S: ``(2m − 1, S)``, or k ≤ S/2 only.

    p(ω) = p(−ω), so half of one axis is enough. The angle is reduced in integers, exactly.
    """
    lags = torch.arange(1 - size, size)
    points = torch.arange(samples // 2 + 1 if half else samples)
    turns = (lags[:, None] * points[None, :]) % samples
    angles = 2 * math.pi * turns.double() / samples
    return torch.complex(angles.cos(), angles.sin())


def _lag_sums(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum K_aᵀK_b over equal a − b: ``(rows, columns, taps)`` → ``(rows, *lags)``."""
    gram = flat.mT @ flat.flip(-1)  # entry (a, b) is K_aᵀK_{last − b}: equal a + b, equal lag
    dims = len(sizes)
    gram = gram.reshape(len(gram), *sizes, *sizes)
    for axis, m in enumerate(sizes):
        # The axis's two indices stand at 1 + axis and, the earlier pairs being summed, 1 + dims.
        pair = gram.movedim((1 + axis, 1 + dims), (-2, -1))
        gram = _antidiagonal_sums(pair, m).movedim(-1, 1 + axis)
    return gram


def _antidiagonal_sums(square: Tensor, size: int) -> Tensor:
    """``(..., m, m)`` → ``(..., 2m − 1)``, by shifting row a to the right by a."""
    lead = square.shape[:-2]
    padded = functional.pad(square, (0, size)).flatten(-2)[..., : 2 * size * size - size]
    return padded.reshape(*lead, size, 2 * size - 1).sum(-2)
