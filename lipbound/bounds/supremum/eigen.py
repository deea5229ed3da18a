"""Approximate eigenpairs and local maxima that guide the search; no proof relies on them."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.runtime import check_time, piece

SMALL = 16  # size up to which a full eigensolver is used
# Share of a basis vector below which a new direction of it does not count, by its precision.
NEARLY = {torch.complex128: 1e-10, torch.float64: 1e-10, torch.complex64: 1e-6, torch.float32: 1e-6}
MATRICES = 1 << 10  # solved at once: a GPU's solver may take 1 MiB for each
POWER = 128  # of the small matrix, twice: its eigenvalues are told apart from 1e-4 on


def top_eigenpairs(matrices: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Compute top Ritz values and vectors by batched Lanczos with full reorthogonalization.

    Up to rounding, values never exceed λ1. Small matrices use a full eigensolver.

    Args:
        matrices: ``(P, n, n)`` Hermitian.
        start: Start vectors, ``(P, n)``.
        steps: Size of the Krylov space.
    """
    size = matrices.shape[-1]
    if size == 1:
        return matrices[:, 0, 0].real, torch.ones_like(start)
    if size <= max(SMALL, steps):
        values, vectors = _eigh(matrices)
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
        # In an exhausted space only rounding errors remain; a zero column adds nothing.
        basis[..., step] = torch.where(norm > 1e-10 * scale, vector / norm.clamp_min(1e-300), 0)
        vector = (matrices @ basis[..., step : step + 1])[..., 0]
        images[..., step] = vector
    small = basis.mH @ images
    values, vectors = _eigh((small + small.mH) / 2)
    return values[:, -1], (basis @ vectors[..., -1:])[..., 0]


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    most = piece(MATRICES)
    if len(matrices) <= most:
        return torch.linalg.eigh(matrices)
    found = [torch.linalg.eigh(part) for part in matrices.split(most)]
    values, vectors = zip(*found, strict=True)
    return torch.cat(values), torch.cat(vectors)


def bottom_eigenpairs(
    gaps: Tensor, start: Tensor, steps: int
) -> tuple[NDArray[np.float64], Tensor]:
    """Approximate the least eigenvalues of matrices with eigenvalues near [0, 1].

    The Krylov space is spanned by Chebyshev polynomials of I − 2·gap, one product each. This
    basis is not orthogonal, but good enough for a search. The small eigenvalue problems are solved
    on the host.

    Args:
        gaps: ``(P, n, n)`` Hermitian; overwritten.
        start: ``(P, n)`` unit vectors.
        steps: Size of the Krylov space.

    Returns:
        Ritz values, which up to rounding are at least the eigenvalue, and unit vectors.
    """
    if gaps.shape[-1] <= max(SMALL, steps):
        eigenvalues, vectors = _eigh(gaps)
        return eigenvalues[:, 0].cpu().numpy(), vectors[..., 0]
    turned = gaps.mul_(-2)
    turned.diagonal(dim1=-2, dim2=-1).add_(1)
    basis = torch.cat(_chebyshev(turned, start, steps - 1), -1)  # (P, n, steps)
    both = basis.mH @ torch.cat([basis, turned @ basis], -1)
    small = both.cpu().numpy()
    fine = np.isfinite(small).all((1, 2))
    overlap, action = np.split(np.where(fine[:, None, None], small, 0), 2, axis=-1)
    values, chosen = greatest(overlap, action)
    vectors = (basis @ torch.from_numpy(chosen).to(gaps.device)[..., None])[..., 0]
    if not fine.all():  # far from [0, 1] the polynomials overflow; Lanczos vectors do not
        others = torch.from_numpy((~fine).nonzero()[0]).to(gaps.device)
        top, vectors[others] = top_eigenpairs(turned[others], start[others], steps)
        values[~fine] = top.cpu().numpy()
    return (1 - values) / 2, vectors


def _chebyshev(turned: Tensor, start: Tensor, degree: int) -> list[Tensor]:
    """T_k(turned)·start for k ≤ ``degree``, ``(P, n, 1)`` each."""
    columns = [start[..., None], turned @ start[..., None]]
    while len(columns) <= degree:
        columns.append(torch.baddbmm(columns[-2], turned, columns[-1], beta=-1, alpha=2))
    return columns


def top_by_products(doubled: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Approximate the largest eigenvalues by a fixed number of products, reading nothing back.

    The Krylov space is that of :func:`bottom_eigenpairs`. Its small eigenvalue problem is solved on
    the device in double precision: by a Cholesky factor of the overlaps and by powers of the small
    matrix.

    Args:
        doubled: ``(P, n, n)``, twice Hermitian matrices with eigenvalues near [0, 1]; overwritten.
        start: ``(P, n)`` unit vectors.
        steps: Size of the Krylov space.

    Returns:
        Ritz values in double precision, and unit vectors in that of the matrices. Both may be NaN
        if the eigenvalues are far larger than 1.
    """
    turned = doubled  # 2M − I, whose eigenvalues are in [−1, 1]
    turned.diagonal(dim1=-2, dim2=-1).sub_(1)
    basis = torch.cat(_chebyshev(turned, start, steps), -1)  # (P, n, steps + 1)
    wide = basis.to(torch.complex128 if basis.is_complex() else torch.float64)
    overlap = wide.mH @ wide
    # turned·T_k = (T_{k+1} + T_{k−1})/2, and turned·T_0 = T_1
    action = overlap[:, :-1, 1:].clone()
    action[..., 1:] += overlap[:, :-1, :-2]
    action[..., 1:] *= 0.5
    overlap = overlap[:, :-1, :-1]
    size = overlap.diagonal(dim1=-2, dim2=-1).real.clamp_min(1e-300).rsqrt()
    scales = size[..., :, None] * size[..., None, :]
    overlap = overlap * scales
    # The eigenvalues of turned + I are at least 0, which is also what spurious directions get.
    action = action * scales + overlap
    factor = overlap.clone()
    factor.diagonal(dim1=-2, dim2=-1).add_(NEARLY[basis.dtype])
    factor = torch.linalg.cholesky_ex(factor).L
    half = torch.linalg.solve_triangular(factor, action, upper=False)
    small = torch.linalg.solve_triangular(factor, half.mH, upper=False)
    power = small + small.mH
    for _ in range(2):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        power = torch.linalg.matrix_power(power / trace[..., None, None], POWER)
    column = power.diagonal(dim1=-2, dim2=-1).real.argmax(-1)[:, None, None]
    chosen = power.gather(-1, column.expand(-1, steps, 1))
    weights = torch.linalg.solve_triangular(factor.mH, chosen, upper=True)
    both = weights.mH @ torch.cat([action @ weights, overlap @ weights], -1)
    value = (both[:, 0, 0] / both[:, 0, 1]).real
    vector = (wide[..., :-1] @ (weights * size[..., None]))[..., 0]
    vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return value / 2, vector.to(basis.dtype)


def greatest(
    overlap: NDArray[np.complex128], action: NDArray[np.complex128], rounding: float = 1e-11
) -> tuple[NDArray[np.float64], NDArray[np.complex128]]:
    """Solve action·c = x·overlap·c for the greatest x and its c; overlap may be singular."""
    size = np.sqrt(np.maximum(np.diagonal(overlap, axis1=1, axis2=2).real, 1e-300))  # (P, k)
    scales = size[:, :, None] * size[:, None]
    weights, directions = np.linalg.eigh(overlap / scales)
    kept = weights > rounding * weights[:, -1:]
    directions = directions * np.where(kept, weights, np.inf)[:, None] ** -0.5
    small = directions.conj().swapaxes(1, 2) @ (action / scales) @ directions
    small = (small + small.conj().swapaxes(1, 2)) / 2
    lost = np.where(kept, 0.0, -1e6)
    small[:, np.arange(size.shape[1]), np.arange(size.shape[1])] += lost
    values, vectors = np.linalg.eigh(small)
    chosen = (directions @ vectors[..., -1:])[..., 0]
    return values[:, -1], chosen / size


def uphill(
    coefficients: NDArray[np.complex128],
    positions: NDArray[np.float64],
    frequency: NDArray[np.float64],
    reach: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Find a local maximum of Re Σ t_h e^{ih·ω} near ``frequency`` on ever finer lattices."""
    dims = positions.shape[1]
    lattice = np.stack(np.meshgrid(*[np.arange(-2, 3) / 2] * dims), -1).reshape(-1, dims)
    for _ in range(8):
        check_time()
        tried = frequency[:, None] + reach[:, None, None] * lattice  # (Q, 5^D, D)
        angles = tried @ positions.T
        even = coefficients.real[:, None] * np.cos(angles)
        best = (even - coefficients.imag[:, None] * np.sin(angles)).sum(-1).argmax(1)
        frequency = tried[np.arange(len(tried)), best]
        reach = reach * 0.55
    return wrapped(frequency)


def wrapped(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same frequencies between −π and π."""
    return np.remainder(frequency + math.pi, 2 * math.pi) - math.pi
