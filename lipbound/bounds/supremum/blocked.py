r"""A Cholesky factorization made of large products, whose remainder is measured.

A GPU factors many matrices of a few hundred rows slowly, but multiplies them fast. Here only small
corners are factored, and the rest is products: a panel below a corner is multiplied by the inverse
of the corner's factor. That has no useful a-priori error bound, so its remainder is computed.

*Proof.* Let L be the factor found for the Hermitian matrix A, in blocks, and let c bound the
relative error of inner products of length n + 4. Before a panel's turn, the products of the earlier
panels are subtracted from it; this errs by at most :math:`c(|A| + |L||L|^*)` entry by entry. The
corner's own factor errs by at most :math:`c|L||L|^*` (Higham, Theorem 10.3). The remainder of the
panel below it is measured as R, with an error of at most :math:`c(|A'| + |L||L|^*)`, A' being the
panel before the remainder. Both \|A\| and \|A'\| are at most :math:`(|R| + |L||L|^*)(1 + 4c)`, so
:math:`|A - LL^*| \leq |R| + 5c(|R| + |L||L|^*)`. As :math:`LL^* \succeq 0`, the least eigenvalue
of A is at least :math:`-\delta` with :math:`\delta = (1 + 5c)\sqrt2\|R\|_F + 5c\|L\|_F^2`; the
root of 2 counts the upper triangle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipbound.bounds.rounding import gamma_complex


def usual_shortfall(size: int) -> float:
    """About the largest δ for matrices with 0 ⪯ A ⪯ I and a negligible remainder R."""
    return 5.5 * gamma_complex(size + 4) * size


def shortfall(matrices: Tensor, width: int) -> Tensor:
    """Bound how far below zero the eigenvalues of Hermitian matrices reach: δ, or ∞ if unknown.

    Only lower triangles count. Nothing is read back from the device.

    Args:
        matrices: ``(P, n, n)`` float64 or complex128 with entries of about 1; overwritten.
        width: Rows of a corner.
    """
    count, size, _ = matrices.shape
    identity = torch.eye(width, dtype=matrices.dtype, device=matrices.device)
    rest = torch.zeros(count, dtype=torch.float64, device=matrices.device)
    norm = torch.zeros_like(rest)
    for start in range(0, size, width):
        stop = min(start + width, size)
        panel, before = matrices[:, start:, start:stop], matrices[:, start:, :start]
        if start:
            panel.baddbmm_(before, before[:, : stop - start].mH, alpha=-1)
        factor, info = torch.linalg.cholesky_ex(panel[:, : stop - start])
        norm += factor.abs().square().sum((1, 2))
        rest = torch.where(info == 0, rest, math.inf)
        if stop < size:
            inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
            lower = panel[:, width:]
            found = lower @ inverse.mH
            lower.baddbmm_(found, factor.mH, alpha=-1)
            rest += lower.abs().square().sum((1, 2))
            lower.copy_(found)
            norm += found.abs().square().sum((1, 2))
    error = 5 * gamma_complex(size + 4)
    whole = (1 + error) * (2 * rest).sqrt() + error * norm
    return torch.where(whole.isfinite(), whole * (1 + 1e-8) + 1e-290, math.inf)
