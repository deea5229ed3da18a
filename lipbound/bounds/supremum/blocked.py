r"""A Cholesky factorization made of large products, whose remainder is bounded.

A GPU factors many matrices of a few hundred rows slowly, but multiplies them fast. Here only small
corners are factored, and the rest is products: a panel below a corner is multiplied by an
approximate inverse of the corner's factor. How good that inverse is, is measured.

*Proof.* Let L be the factor found for the Hermitian matrix A, in blocks, and let c bound the
relative error of inner products of length n + 4, and c' that of inner products of length w + 4, w
being the width of a corner. Before a panel's turn, the products of the earlier panels are
subtracted from it; this errs by at most :math:`c(|A| + |L||L|^*)` entry by entry. The corner's own
factor K errs by at most :math:`c|L||L|^*` (Higham, Theorem 10.3). The panel B below it becomes
:math:`X \approx BM^*`, M being the approximate inverse. Let R be the remainders :math:`B - XK^*` of
all panels. As \|A\| is at most :math:`|L||L|^* + |A - LL^*|`,

.. math:: |A - LL^*| \leq (1 + 5c)|R| + 5c|L||L|^*.

As :math:`LL^* \succeq 0`, the least eigenvalue of A is at least :math:`-\delta` with
:math:`\delta = (1 + 5c)\sqrt2\|R\|_F + 5c\|L\|_F^2`; the root of 2 counts the upper triangle.

There is no remainder on the diagonal, so a row of L has a squared norm of at most
:math:`(1 + 4c)a_{ii}`, and :math:`\|L\|_F^2 \leq t = (1 + 4c)\operatorname{tr}A`. For a panel let
:math:`E = KM - I`. Then :math:`R = -BE^* - (X - BM^*)K^*`, so :math:`\|R\|_F \leq \rho\|B\|_F` with
:math:`\rho = \|E\|_F + c'\|M\|_F\|K\|_F`. The computed E errs by at most
:math:`c'(|K||M| + I)`. If :math:`\rho \leq 1/2`, then :math:`\|B\|_F \leq 2\|X\|_F\|K\|_F`, because
:math:`B = XK^* + R`. The squares of all \|X\|_F sum to at most t, and over all panels

.. math:: \|R\|_F \leq 2\sqrt t\,\max \rho\|K\|_F.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipbound.bounds.rounding import gamma_complex


def shortfall(matrices: Tensor, width: int) -> Tensor:
    """Bound how far below zero the eigenvalues of Hermitian matrices reach: δ, or ∞ if unknown.

    Only lower triangles count. Nothing is read back from the device.

    Args:
        matrices: ``(P, n, n)`` float64 or complex128 with entries of about 1; overwritten.
        width: Rows of a corner.
    """
    size = matrices.shape[-1]
    error, inner = gamma_complex(size + 4), gamma_complex(width + 4)
    diagonal = matrices.diagonal(dim1=-2, dim2=-1).real * (1 + 4 * error)
    identity = torch.eye(width, dtype=matrices.dtype, device=matrices.device)
    below = torch.empty_like(matrices) if width < size else matrices
    pivots, refused, inverses, offs = [], [], [], []
    for start in range(0, size, width):
        stop = min(start + width, size)
        panel = matrices[:, start:, start:stop]
        if start:
            before = below[:, start:, :start]
            panel.baddbmm_(before, before[:, : stop - start].mH, alpha=-1)
        factor, info = torch.linalg.cholesky_ex(panel[:, : stop - start])
        pivots.append(factor.diagonal(dim1=-2, dim2=-1).real)
        refused.append(info)
        if stop < size:
            inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
            inverses.append(torch.linalg.matrix_norm(inverse))
            off = torch.baddbmm(identity, factor, inverse, beta=-1)
            offs.append(torch.linalg.matrix_norm(off))
            torch.bmm(panel[:, width:], inverse.mH, out=below[:, stop:, start:stop])
    positive = (torch.stack(refused) == 0).all(0) & (torch.cat(pivots, 1) > 0).all(1)  # no NaN
    total = diagonal.sum(1)
    whole = 5 * error * total
    if offs:
        own = diagonal[:, : len(offs) * width].unflatten(1, (-1, width)).sum(2).sqrt()
        share = torch.stack(offs, 1) + inner * (2 * torch.stack(inverses, 1) * own + width**0.5)
        worst = torch.where(share <= 0.5, share * own, math.inf).amax(1)  # ∞ for NaN
        whole = whole + (1 + 5 * error) * 8**0.5 * total.sqrt() * worst
    known = positive & whole.isfinite()
    return torch.where(known, whole * (1 + 1e-8) + 1e-290, math.inf)
