r"""Choose the multipliers of one dense stage by Newton's method: the optimum of LipSDP.

Without frequencies the inequality of a stage is one matrix. With all variables in one vector, the
source first, and the rows r of a linear value in them, the form is

.. math:: M(\gamma, t) = \gamma E - R^TR + \sum_i t_i (u_iv_i^T + v_iu_i^T),
          \quad u_i = e_i - l_ir_i, \quad v_i = e_i - h_ir_i,

where E is the identity of the source, R the rows of the result, and [l, h] the slopes of activation
i. The smallest γ with M ≥ 0 and t ≥ 0 is found along the central path: the minimizers of
:math:`\gamma/\mu - \log\det M - \sum\log t_i` for falling μ. Because the terms have rank 2, the
Hessian takes a few matrix products. All of this only chooses numbers: the proof is that of
:mod:`lipbound.network.lipsdp.cover`, as for all multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.network.lipsdp.multipliers import Fixed, Multipliers, fixed
from lipbound.network.lipsdp.stages import Stage
from lipbound.runtime import Progress, silent, time_is_up

ROWS = 2100  # of the largest stage that is solved; a step takes about a second then
FALL = 0.3  # factor by which μ falls
CLOSE = 1e-7  # relative distance from the optimum at which the path ends
POINTS = 60  # values of μ, at most
INNER = 60  # Newton steps for one μ, at most
RIDGES = (0.0, 1e-13, 1e-11, 1e-9, 1e-7)  # added to the Hessian's diagonal, relative to it
START = 0.1  # room of the first point


def suits(stages: Sequence[Stage]) -> bool:
    """Tell whether these are a single dense stage of moderate size."""
    only = stages[0]
    return len(stages) == 1 and not only.dims and bool(only.activations) and only.rows <= ROWS


@dataclass
class Problem:
    """The matrices of the inequality. Variables are the source and then the activations."""

    source: int  # number of entries of the source
    low: Tensor  # u_i as rows, (activations, n)
    high: Tensor  # v_i as rows
    result: Tensor  # R, (results, n)

    @staticmethod
    def of(stage: Stage) -> Problem:
        starts, count = {0: 0}, stage.sizes[0]
        for node in stage.activations:
            starts[node] = count
            count += stage.sizes[node]
        rows: list[Tensor] = []
        low, high = [], []
        whole = torch.eye(count, dtype=torch.float64, device=stage.device)
        for node, size in enumerate(stage.sizes):
            if node in starts:
                rows.append(whole[starts[node] : starts[node] + size])
            else:
                terms = [op.taps.reshape(op.rows, -1) @ rows[j] for j, op in stage.terms[node]]
                rows.append(torch.stack(terms).sum(0))
            slopes = stage.slopes[node]
            if slopes is not None:
                before = rows[stage.inputs[node]]
                low.append(rows[node] - slopes[0][:, None] * before)
                high.append(rows[node] - slopes[1][:, None] * before)
        return Problem(stage.sizes[0], torch.cat(low), torch.cat(high), rows[-1])

    def scaled(self, gamma: Tensor, numbers: Tensor) -> Problem:
        """Return the problem in variables in which M has a diagonal near 1."""
        each = torch.cat([gamma.expand(self.source), numbers]).rsqrt()
        return Problem(self.source, self.low * each, self.high * each, self.result * each)

    def form(self, gamma: Tensor, numbers: Tensor) -> Tensor:
        """Compute M; γ and the numbers are those of this problem's variables."""
        both = self.low.mT @ (numbers[:, None] * self.high)
        form = both + both.mT - self.result.mT @ self.result
        form.diagonal()[: self.source].add_(gamma)
        return form


def path(stage: Stage, progress: Progress = silent) -> tuple[list[Fixed], bool]:
    """Return multipliers on the central path, the best ones first, and whether it was complete.

    Any of them may be proved. The path ends early where Newton's method does not reach it, as with
    very many activations in a deep network.
    """
    ones = torch.eye(stage.sizes[-1], dtype=torch.float64, device=stage.device)
    start = fixed(Multipliers([stage]), 0, ones, START)
    found = [start]
    problem = Problem.of(stage)
    numbers = torch.cat([start.inner[i] for i in stage.activations])
    gamma = start.source.max() * (1 + START)
    terms = len(numbers) + problem.low.shape[1]
    barrier = gamma / terms  # μ
    for _ in progress(range(POINTS), "multipliers"):
        if time_is_up() or bool(barrier * terms < CLOSE * gamma):
            return found, True
        moved = _centred(problem, gamma, numbers, barrier)
        if moved is None:
            return found, False
        gamma, numbers = moved
        split = numbers.split([stage.sizes[i] for i in stage.activations])
        inner = dict(zip(stage.activations, split, strict=True))
        whole = torch.eye(stage.sizes[0], dtype=torch.float64, device=stage.device)
        found.insert(0, Fixed(ones, inner, gamma * whole, gamma.rsqrt() * whole))
        barrier = barrier * FALL
    return found, True


def _centred(
    problem: Problem, gamma: Tensor, numbers: Tensor, barrier: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Minimize the barrier function for one μ; ``None`` if rounding or slowness prevents it."""
    weight = 1 / barrier
    for _ in range(INNER):
        # In the scaled problem γ and all numbers are factors, which begin with 1.
        small = problem.scaled(gamma, numbers)
        low, high = small.low * numbers.sqrt()[:, None], small.high * numbers.sqrt()[:, None]
        small = Problem(problem.source, low, high, small.result)
        one, each = torch.ones_like(gamma), torch.ones_like(numbers)
        factor, failed = torch.linalg.cholesky_ex(small.form(one, each))
        if bool(failed):
            return None
        step = _step(small, factor, weight * gamma)
        if step is None:
            return None
        change, decrement = step
        # The best step along the line: one that is only good enough may end near the boundary,
        # from which Newton's method returns slowly.
        best, size = _barrier(small, one, each, weight * gamma), 0.0
        for power in range(40):
            tried = 0.7**power
            found = _barrier(small, 1 + tried * change[-1], 1 + tried * change[:-1], weight * gamma)
            if found < best:
                best, size = found, tried
            elif size:
                break
        if not size:
            break  # only rounding is left
        gamma, numbers = gamma * (1 + size * change[-1]), numbers * (1 + size * change[:-1])
        if decrement < 1e-2:
            break
    else:
        return None
    return gamma, numbers


def _barrier(problem: Problem, gamma: Tensor, numbers: Tensor, weight: Tensor) -> float:
    """Compute the barrier function; infinite outside of the cone."""
    if not bool(gamma > 0) or not bool((numbers > 0).all()):
        return math.inf
    factor, failed = torch.linalg.cholesky_ex(problem.form(gamma, numbers))
    if bool(failed):
        return math.inf
    return float(weight * gamma - 2 * factor.diagonal().log().sum() - numbers.log().sum())


def _step(problem: Problem, factor: Tensor, weight: Tensor) -> tuple[Tensor, float] | None:
    """Return Newton's step for the numbers and for γ, and the square of its decrement."""
    left = torch.linalg.solve_triangular(factor, problem.low.mT, upper=False)  # L⁻¹Uᵀ
    right = torch.linalg.solve_triangular(factor, problem.high.mT, upper=False)
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    source = torch.linalg.solve_triangular(factor, identity[:, : problem.source], upper=False)
    across = left.mT @ right
    hessian = 2 * ((left.mT @ left) * (right.mT @ right) + across * across.mT)
    hessian.diagonal().add_(1)
    with_source = 2 * ((left.mT @ source) * (right.mT @ source)).sum(1)
    own = (source.mT @ source).square().sum()
    slope = torch.cat([-2 * across.diagonal() - 1, (weight - source.square().sum())[None]])
    whole = torch.cat([torch.cat([hessian, with_source[:, None]], 1),
                       torch.cat([with_source, own[None]])[None]])  # fmt: skip
    size = whole.diagonal().clone()
    for ridge in RIDGES:  # rounding may make the Hessian indefinite
        root, failed = torch.linalg.cholesky_ex(whole + torch.diag(ridge * size))
        if not bool(failed):
            change = -torch.cholesky_solve(slope[:, None], root)[:, 0]
            decrement = float(-slope @ change)
            return (change, decrement) if math.isfinite(decrement) else None
    return None
