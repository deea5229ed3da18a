r"""Bracket a flat symbol: FF* close to a multiple of the identity at every frequency.

Branch and prune cannot discard a cell of such a symbol, because all cells are as large as the
largest. But :math:`F(\omega)F(\omega)^* = \sum_k R_k e^{i k \omega}`, where R is the
autocorrelation of the taps. If :math:`d = \|R_0 - cI\| + \sum_{k \ne 0} \|R_k\|`, every squared
singular value at every frequency lies in [c − d, c + d]. For the kernels of orthogonal layers d is
the rounding error of their weights, and the bracket is far narrower than a search would make it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT, gamma
from lipbound.bounds.supremum.field import half_lags, shifted

SHARE = 0.25  # of the relative width that is asked for


def flat(taps: Tensor, rtol: float) -> tuple[float, float, int] | None:
    """Return proved bounds on both sides of sup σ1 and the largest group, or ``None`` if not flat.

    Args:
        taps: The symbols of one layer, ``(groups, n, N, *m)`` in float64, n ≤ N.
        rtol: Relative width that the interval may have.
    """
    groups, rows, _, *sizes = taps.shape
    lines = taps.reshape(groups, rows, -1)  # (groups, n, N·T)
    level = lines.square().sum(2).mean(1)  # (groups,): c, which may be any number
    gram = lines @ lines.mT
    gram.diagonal(dim1=1, dim2=2).sub_(level[:, None])
    apart = _norms(gram)
    if bool((apart > SHARE * rtol * level).any()):
        return None
    for lag in half_lags(tuple(sizes))[1:].astype(int).tolist():
        product = shifted(taps, lag).flatten(2) @ shifted(taps, [-h for h in lag]).flatten(2).mT
        apart = apart + 2 * _norms(product)
        if bool((apart > SHARE * rtol * level).any()):
            return None
    # Each entry of R is an inner product of length at most N·T, wrong by γ times the sum of the
    # absolute products. Over all lags these sums have Frobenius norms of at most (Σ‖tap‖_F)².
    size = torch.linalg.vector_norm(taps.reshape(*taps.shape[:3], -1), dim=(1, 2)).sum(1).square()
    length = lines.shape[2] + 8
    apart = apart + gamma(length) * size * (1 + 1e-6) + 4 * UNIT * math.sqrt(rows) * level + 1e-290
    if bool((apart > SHARE * rtol * level).any()):
        return None
    upper = float((level + apart).max()) * (1 + 8 * UNIT)
    lower = float((level - apart).max()) * (1 - 8 * UNIT)
    largest = int((level + apart).argmax())
    return math.sqrt(lower) * (1 - 4 * UNIT), math.sqrt(upper) * (1 + 4 * UNIT), largest


def _norms(matrices: Tensor) -> Tensor:
    """Bound ‖A‖ by the smaller of ‖A‖_F and √‖AᵀA‖_F, with the rounding of both."""
    size = matrices.shape[-1]
    plain = torch.linalg.vector_norm(matrices.flatten(1), dim=1)
    square = torch.linalg.vector_norm((matrices.mT @ matrices).flatten(1), dim=1)
    # The product is wrong by at most γ‖A‖_F² in the Frobenius norm.
    root = (square + gamma(size + 8) * plain.square()).sqrt()
    return torch.minimum(plain, root) * (1 + gamma(size**2 + 64))
