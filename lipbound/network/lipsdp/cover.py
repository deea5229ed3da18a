r"""Prove that a Hermitian trigonometric polynomial is positive definite, by cells.

Let M be a Hermitian symbol of degree :math:`d_a` on axis a, and E = cI − M. Let cells cover the
torus, and let each reach the angle θ < π/2 from its centre: :math:`\sum_a d_a|\delta_a| \leq
\theta` for all points ω + δ of the cell. If ‖E‖ < c·cos θ at the centre of every cell, then M is
positive definite everywhere.

*Proof.* Let ‖E‖ be largest at ω, with unit vector v and :math:`v^*E(\omega)v = \pm\|E(\omega)\|`.
On the line from ω to the centre of its cell, v*Ev is a real function of exponential type θ that is
nowhere larger than at ω. By a lemma of M. Riesz, it is at the centre at least cos θ times as large.
So ‖E(ω)‖ cos θ < c cos θ, hence ‖E‖ < c everywhere.

A centre needs two Cholesky factorizations: of M − c(1 − cos θ)I and of c(1 + cos θ)I − M. What
rounding can change in the coefficients, in the sum over them and in the factorization is taken off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lipbound.bounds.rounding import (
    UNIT,
    cholesky_error,
    gamma_complex,
    positive,
    symbol_error,
)
from lipbound.bounds.supremum.cells import Cover, Diamonds
from lipbound.bounds.supremum.eigen import top_eigenpairs
from lipbound.network.lipsdp.laurent import Laurent
from lipbound.network.lipsdp.multipliers import Fixed
from lipbound.network.lipsdp.stages import Stage
from lipbound.runtime import Progress, check_time, in_pieces, piece, silent
from lipbound.symbols import positions

MEMORY = 1 << 28  # bytes of matrices at once
TAU = 1e-6  # relative to c: how far a form stays above LL*, where its factor L is used
SMALLEST = 2.0**-7  # relative size of cells at which to give up


@dataclass(eq=False)
class Form:
    """A Hermitian symbol M, scaled so that its diagonal is near 1.

    Attributes:
        taps: Coefficients M_k, ``(K, n, n)``, of the positions k ≥ 0 in the lexicographic order.
        places: The positions, ``(K, D)``.
        degrees: Largest |k| on each axis.
        error: Bound on the norm of the rounding errors of the coefficients and of a computed M(ω).
    """

    taps: Tensor
    places: Tensor
    degrees: list[int]
    error: float

    def at(self, frequencies: Tensor) -> Tensor:
        """Evaluate at frequencies ``(P, D)``: ``(P, n, n)`` complex128, Hermitian."""
        angles = frequencies.to(self.taps) @ self.places.to(self.taps).mT
        count = self.taps.shape[-1]
        flat = self.taps.reshape(len(self.taps), -1)
        even = (angles.cos() @ flat).reshape(-1, count, count)
        odd = (angles.sin() @ flat).reshape(-1, count, count)
        return torch.complex(even + even.mT, odd - odd.mT)


def form_of(stage: Stage, fixed: Fixed) -> Form:
    """Return z₀*Pz₀ − y*Xy − Σmᵢ as a symbol, in variables in which P and Tᵢ are near 1.

    A form that is positive definite in such variables is positive definite: an invertible matrix
    does not change that, and with another one the form would have the eigenvalue 0.
    """
    variables = [0, *stage.activations]
    starts = dict(
        zip(variables, np.cumsum([0, *[stage.sizes[i] for i in variables]]), strict=False)
    )
    linear = _expanded(stage)
    blocks: dict[tuple[int, int], Laurent] = {}

    def put(row: int, column: int, operator: Laurent) -> None:
        """Add the operator to a block on or below the diagonal."""
        if starts[row] < starts[column]:
            row, column, operator = column, row, operator.adjoint
        known = blocks.get((row, column))
        blocks[row, column] = operator if known is None else known + operator

    def form(parts: dict[int, Laurent], weights: Tensor) -> None:
        """Add Σ Aᵢ* W Aⱼ of the scaled operators."""
        scaled = {i: fixed.scaled(op, i) for i, op in parts.items()}
        middle = Laurent.pointwise(weights, stage.dims)
        for j, other in scaled.items():
            weighted = middle @ other
            for i, one in scaled.items():
                if starts[i] >= starts[j]:
                    put(i, j, one.adjoint @ weighted)

    form(linear[0], fixed.source)
    for i in stage.activations:
        form(linear[i], torch.diag(2 * fixed.inner[i]))
    form(linear[len(stage.sizes) - 1], -fixed.weights)
    for i in stage.activations:
        slopes = stage.slopes[i]
        assert slopes is not None
        low, high = slopes
        before = linear[stage.inputs[i]]
        for j, op in before.items():
            middle = (low + high) * fixed.inner[i] * fixed.inner[i].rsqrt()
            put(i, j, fixed.scaled(op, j).scaled(left=-middle))
        if bool((low * high != 0).any()):
            form(before, torch.diag(2 * low * high * fixed.inner[i]))
    return _gathered(blocks, starts, stage)


def linear_result(stage: Stage, fixed: Fixed) -> dict[int, Laurent]:
    """Return the result as a sum of operators on the variables, which are scaled as in the form."""
    return {i: fixed.scaled(op, i) for i, op in _expanded(stage)[-1].items()}


def _expanded(stage: Stage) -> list[dict[int, Laurent]]:
    """Return every node as a sum of operators on the source and the activations."""
    result: list[dict[int, Laurent]] = []
    for node, size in enumerate(stage.sizes):
        if not stage.terms[node]:
            eye = torch.eye(size, dtype=torch.float64, device=stage.device)
            result.append({node: Laurent.pointwise(eye, stage.dims)})
            continue
        parts: dict[int, Laurent] = {}
        for j, op in stage.terms[node]:
            for variable, inner in result[j].items():
                new = op if stage.terms[j] == [] else op @ inner
                parts[variable] = parts[variable] + new if variable in parts else new
        result.append(parts)
    return result


def _gathered(blocks: dict[tuple[int, int], Laurent], starts: dict[int, int], stage: Stage) -> Form:
    dims = stage.dims
    degrees = [
        max(max(abs(op.first[a]), abs(op.last[a])) for op in blocks.values()) for a in range(dims)
    ]
    count = stage.rows
    span = [2 * d + 1 for d in degrees]
    whole = torch.zeros(*span, count, count, dtype=torch.float64, device=stage.device)
    sizes = torch.zeros(count, count, dtype=torch.float64, device=stage.device)
    worst, slack = 0.0, 0.0
    for (i, j), op in blocks.items():
        rows = slice(starts[i], starts[i] + op.rows)
        columns = slice(starts[j], starts[j] + op.columns)
        for index in positions(op.taps.shape[2:]).tolist():
            place = [d + a + k for d, a, k in zip(degrees, op.first, index, strict=True)]
            part = op.taps[:, :, *index]
            mirrored = [2 * d - p for d, p in zip(degrees, place, strict=True)]
            if i == j:  # both triangles are here
                whole[*place, rows, columns] += part / 2
                whole[*mirrored, columns, rows] += part.mT / 2
            else:
                whole[*place, rows, columns] += part
                whole[*mirrored, columns, rows] += part.mT
        sizes[rows, columns] += op.size
        if i != j:
            sizes[columns, rows] += op.size.mT
        worst = max(worst, op.roundings)
        slack += op.slack * (1.0 if i == j else 2.0)
    flat = whole.reshape(-1, count, count)
    middle = len(flat) // 2
    taps = flat[middle:].clone()  # k and −k are each other's transposes
    taps[0] /= 2  # counted twice by Form.at
    places = positions(span)[middle:] - torch.tensor(degrees, dtype=torch.int64)
    largest = float(torch.linalg.matrix_norm(sizes)) * (1 + gamma_complex(count * count + 8))
    relative = gamma_complex(worst + 8) + symbol_error(span) + 8 * UNIT
    return Form(taps, places.to(stage.device), degrees, largest * relative + slack * (1 + 1e-12))


class NotPositive(ArithmeticError):
    """The cells became too small, or there were too many."""


class Wanted(Protocol):
    """Something to prove besides, from the factors of the form; see :mod:`.pairs`."""

    def hold(self, factor: Tensor, tau: Tensor) -> Tensor:
        """Tell at which centres it holds, given LL* + τI ≤ M − c(1 − cos θ)I."""


@torch.no_grad()
def prove(
    form: Form,
    most: int = 20_000,
    progress: Progress = silent,
    wanted: Wanted | None = None,
) -> int:
    """Prove that a form is positive definite at all frequencies; return the number of centres.

    Args:
        form: The form.
        most: Largest number of centres.
        progress: Shows how far the proof is.
        wanted: What must hold at every centre besides.

    Raises:
        NotPositive: If no proof was found.
    """
    size = form.taps.shape[-1]
    if not bool(torch.isfinite(form.taps).all()) or not form.error < 0.1:
        raise NotPositive(f"the rounding errors are {form.error:.1e}")
    cover = Cover([[2 * d + 1 for d in form.degrees]])  # degree d as with 2d + 1 taps
    cells = cover.start()
    if cover.active:
        cells = _divided(cover, cells, 4)
    step = max(1, piece(MEMORY) // (16 * size * size * 2))
    level = max(
        _level(form, cells.frequency[start : start + step]) for start in range(0, len(cells), step)
    ) / math.cos(float(cells.angle.max()))
    chol = cholesky_error(size) + 4 * UNIT
    proved = 0
    while True:
        proved += len(cells)
        if proved > most:
            raise NotPositive(f"more than {most:,} cells are needed")
        good = np.zeros(len(cells), dtype=bool)
        for start in progress(range(0, len(cells), step), "cells"):
            check_time()
            some = slice(start, start + step)
            place, angle = cells.frequency[some], cells.angle[some]
            good[some] = _definite(form, place, angle, level, chol, wanted)
        if good.all():
            return proved
        if not cover.active:
            raise NotPositive("the matrix is not positive definite")
        cells = _divided(cover, cells[~good], 2)


def _divided(cover: Cover, cells: Diamonds, parts: int) -> Diamonds:
    found = cover.divide(cells, np.full(len(cells), parts))
    if found is None or float(found.scale.min()) < SMALLEST:
        raise NotPositive("a cell of the smallest size could not be proved")
    return found


def _level(form: Form, frequencies: np.ndarray) -> float:
    """Return c: a little more than half of the largest eigenvalue found."""
    matrices = form.at(torch.from_numpy(frequencies).to(form.taps.device))
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(matrices.shape[:2], generator=draw, dtype=torch.float64).to(matrices)
    start = start / start.norm(dim=1, keepdim=True)
    return 0.51 * float(top_eigenpairs(matrices, start, 12)[0].max())


def _definite(
    form: Form,
    frequencies: np.ndarray,
    angles: np.ndarray,
    level: float,
    chol: float,
    wanted: Wanted | None,
) -> np.ndarray:
    """Test both inequalities at some centres."""

    def run() -> np.ndarray:
        matrices = form.at(torch.from_numpy(frequencies).to(form.taps.device))
        cosine = torch.from_numpy(np.cos(np.minimum(angles, 1.5)) * (1 - 4 * UNIT))
        cosine = torch.where(torch.from_numpy(angles) < 1.5, cosine, -1.0).to(matrices.device)
        eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
        trace = matrices.diagonal(dim1=-2, dim2=-1).real.sum(-1).abs()
        count = matrices.shape[-1]
        room = form.error + chol * (trace + count * 3 * level) * (1 + 1e-12) + 1e-13 * level
        low = level * (1 - cosine) + room
        high = level * (1 + cosine) - room
        other = positive((high[:, None, None] * eye - matrices).contiguous())
        if wanted is None:
            return other & positive((matrices - low[:, None, None] * eye).contiguous())
        tau = torch.full_like(low, TAU * level)
        factor, failed = torch.linalg.cholesky_ex(matrices - (low + 2 * tau)[:, None, None] * eye)
        return other & (wanted.hold(factor, tau) & (failed == 0)).cpu().numpy()

    return in_pieces(run)
