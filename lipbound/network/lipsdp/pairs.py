r"""Prove constants of the differences of two outputs, with the multipliers of the last stage.

Let N be the form z₀*Pz₀ − Σmᵢ of the last stage, without its result y = Hz, where H is a matrix
that does not depend on the frequency. If :math:`\gamma^2 N - v v^* > 0` at all frequencies, where
v = H*(eᵢ − eⱼ), then |yᵢ − yⱼ|² ≤ γ²·z₀*Pz₀ on all differences. One factorization of N at the
centre of a cell serves all pairs.

*Rounding.* Let A = N − c(1 − cos θ)I − room be the matrix that is factored (see :mod:`cover`), with
the factor L, and W the computed solution of LW = H*. The room is so large that N − c(1 − cos θ)I ≥
LL* + τI =: B. The residual R = H* − LW and the error of H together have the norm r on a pair. Then
v = LWd + e with ‖e‖ ≤ r, so ‖B^(−1/2)v‖ ≤ ‖Wd‖ + r/√τ =: γ, and vv* ≤ γ²B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT, gamma_complex
from lipbound.network.lipsdp.cover import TAU, Form, NotPositive, form_of, linear_result, prove
from lipbound.network.lipsdp.multipliers import Fixed, frequencies
from lipbound.network.lipsdp.stages import Stage
from lipbound.runtime import Progress, silent

MOST = 10  # classes for which all pairs are proved
ROOMS = (1.01, 1.03, 1.1)
"""How far the constants are above those of a grid; tried in this order."""
DENSE = (1 + 1e-6, *ROOMS)
"""The same without frequencies."""
LEAST = 1e-200  # of γ²: squares that underflow would be far smaller


@dataclass(eq=False)
class Pairs:
    """The matrix H with scaled columns, and the squares γ² to prove.

    Attributes:
        head: H, ``(classes, n)`` complex128.
        error: Bound on the norm of the error of a row of ``head``.
        first: Number i of each pair.
        second: Number j of each pair.
        squares: γ² of each pair.
    """

    head: Tensor
    error: float
    first: Tensor
    second: Tensor
    squares: Tensor

    def values(self, factor: Tensor, tau: Tensor) -> Tensor:
        """Return the γ² that are proved at some centres, ``(centres, pairs)``.

        Args:
            factor: The factors L, ``(centres, n, n)``.
            tau: τ of each centre.
        """
        count = factor.shape[-1]
        right = self.head.mH.expand(len(factor), -1, -1)
        solved = torch.linalg.solve_triangular(factor, right, upper=False)
        size = torch.linalg.matrix_norm(factor)
        lengths = torch.linalg.vector_norm(solved, dim=1)
        rests = torch.linalg.vector_norm(right - factor @ solved, dim=1)
        tall = torch.linalg.vector_norm(right, dim=1)
        unsure = gamma_complex(count + 8) * (tall + size[:, None] * lengths)
        rests = (rests * (1 + gamma_complex(count + 8)) + unsure + self.error) * (1 + 1e-12)
        apart = solved[:, :, self.first] - solved[:, :, self.second]
        length = torch.linalg.vector_norm(apart, dim=1) * (1 + gamma_complex(count + 16))
        rest = rests[:, self.first] + rests[:, self.second]
        return (length + rest / tau[:, None].sqrt()) ** 2 * (1 + 1e-9)

    def hold(self, factor: Tensor, tau: Tensor) -> Tensor:
        """Tell at which centres all γ² are proved."""
        return (self.values(factor, tau) <= self.squares).all(1)


@torch.no_grad()
def pair_constants(stage: Stage, fixed: Fixed, progress: Progress = silent) -> Tensor:
    """Return numbers γ with |yᵢ − yⱼ|² ≤ γᵢⱼ²·z₀*Pz₀, for the P of the fixed multipliers.

    Where the slopes lie in a very small interval, as those of ``LeakyReLU(0.999)``, N is positive
    definite by less than the room that its rounding needs, so nothing is proved and the audit has
    no ``pairs``. With a slope of 0.99 it still has them.

    Raises:
        NotPositive: If nothing was proved, or the result is not a matrix times the variables.
    """
    classes = stage.sizes[-1]
    if not 1 < classes <= MOST:
        raise NotPositive(f"there are {classes} outputs")
    none = replace(fixed, weights=torch.zeros_like(fixed.weights))
    form, parts = form_of(stage, none), linear_result(stage, fixed)
    if not all(op.at_one_place for op in parts.values()):
        raise NotPositive("the last layer is not a matrix")
    blocks = [
        parts[i].taps.flatten(1) if i in parts else form.taps.new_zeros(classes, stage.sizes[i])
        for i in (0, *stage.activations)
    ]
    error = sum(op.roundings * UNIT * op.norm() + op.slack for op in parts.values())
    pairs = torch.combinations(torch.arange(classes, device=stage.device))
    head = torch.cat(blocks, 1).to(torch.complex128)
    first, second = pairs.T
    wanted = Pairs(head, error * (1 + 1e-12), first, second, torch.zeros(()))
    nearly = _nearly(form, wanted, frequencies(stage, 7))
    if not bool((nearly > LEAST).all()):
        raise NotPositive("the differences of the outputs are too small for float64")
    for room in ROOMS if stage.dims else DENSE:
        wanted.squares = nearly * room**2
        try:
            prove(form, progress=progress, wanted=wanted)
        except NotPositive as wrong:
            failed = wrong
            continue
        found = torch.zeros(classes, classes, dtype=torch.float64)
        roots = wanted.squares.sqrt().cpu() * (1 + 4 * UNIT)
        found[pairs[:, 0].cpu(), pairs[:, 1].cpu()] = roots
        return found + found.T
    raise failed


def _nearly(form: Form, wanted: Pairs, points: Tensor) -> Tensor:
    """Return the γ² of some frequencies, without a proof."""
    best = torch.zeros(len(wanted.first), dtype=torch.float64, device=wanted.head.device)
    for some in points.split(16):
        factor, failed = torch.linalg.cholesky_ex(form.at(some))
        if bool(failed.any()):
            raise NotPositive("the form without its result is not positive definite")
        tau = torch.full_like(best[:1], TAU / 4).expand(len(some))
        best = torch.maximum(best, wanted.values(factor, tau).amax(0))
    return best
