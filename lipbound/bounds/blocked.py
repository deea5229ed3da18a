r"""Cholesky factorizations of many large matrices by matrix products, for GPUs.

Their batched routines do one small step after the other; products are what a GPU is made for. One
block column J of width w at a time: what the earlier ones leave of it, S, a factor D of its top
block, and the rest times the inverse of D*. That inverse is not trusted: what it leaves over is
measured.

**What is proved.** Let B be Hermitian, and look at the diagonal and below.

* :math:`\hat S_J` is computed with inner products of length n + 1 at most, so it is off by
  :math:`\gamma^c_{n+1}(|B| + |L||L|^*)_J`.
* :math:`\hat E_J = \hat S_J - L_JD^*` as computed is off by
  :math:`\gamma^c_{w+1}(|\hat S_J| + |L_J||D|^*)`, and :math:`|L_J||D|^* \leq (|L||L|^*)_J`.

Together :math:`|B - LL^*| \leq |\hat E| + 3\gamma^c_{n+2}(|B| + |L||L|^*)`, however L was found.
The second matrix is symmetric, its norm at most :math:`\|B\|_F + \|L\|_F^2`; in the Frobenius norm
a Hermitian matrix is at most √2 times its lower triangle. Hence

.. math:: \lambda_{min}(B) \geq -\delta, \qquad
          \delta = \sqrt2\,\|\hat E\|_F + 3\gamma^c_{n+2}(\|B\|_F + \|L\|_F^2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipbound.bounds.field import Field
from lipbound.bounds.rounding import gamma_complex

WIDTH = 64
ROWS = 128  # below, the library's routine does
ROOM = 4  # times what the library's factor needs: for δ, where ‖L‖² ≤ tr B ≤ n


def suits(field: Field) -> bool:
    """Whether this is the quicker way for a field's matrices."""
    return field.device.type == "cuda" and field.rows >= ROWS


def least_above(matrices: Tensor, slack: float) -> Tensor:
    """Which matrices are proved to have no eigenvalue below −slack: ``(P,)`` on their device.

    Args:
        matrices: ``(P, n, n)`` complex128, Hermitian up to rounding; the diagonal and what is
            below it counts.
        slack: Not negative.
    """
    size = matrices.shape[-1]
    found = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    factors = torch.zeros_like(matrices)
    over = torch.zeros(len(matrices), dtype=torch.float64, device=matrices.device)
    for first in range(0, size, WIDTH):
        last = min(first + WIDTH, size)
        column = matrices[:, first:, first:last]
        if first:
            done = factors[:, first:, :first]
            column = torch.baddbmm(column, done, done[:, : last - first].mH, alpha=-1)
        top, info = torch.linalg.cholesky_ex(column[:, : last - first])
        found &= info == 0
        factors[:, first:last, first:last] = top
        if last < size:
            identity = torch.eye(last - first, dtype=top.dtype, device=top.device)
            inverse = torch.linalg.solve_triangular(top, identity.expand_as(top), upper=False)
            factors[:, last:, first:last] = column[:, last - first :] @ inverse.mH
        left = torch.baddbmm(column, factors[:, first:, first:last], top.mH, alpha=-1)
        over += left.flatten(1).abs().square().sum(1)
    sizes = [torch.linalg.vector_norm(m.flatten(1), dim=1) for m in (matrices, factors)]
    delta = math.sqrt(2) * over.sqrt() + 3 * gamma_complex(size + 2) * (sizes[0] + sizes[1] ** 2)
    return found & (delta * (1 + 1e-6) <= slack)  # NaN is not
