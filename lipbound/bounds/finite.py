r"""Bracket σ1 of a layer at one input size, where it may be less than the symbol's supremum.

**A single tap.** Every output multiplies the one matrix K by one pixel or by a padded zero, so the
layer is K ⊗ S, where S has at most one 1 in each row, and σ1 is σ1(K)·‖S‖ (or the adjoint's). SᵀS
is diagonal: it counts the outputs that read each pixel. For zero padding ‖S‖ is 1, or 0 if no
output reads a pixel.

**Circular padding.** The matrix is a circulant (with stride t dividing n, a block one), so its
singular values are those of the symbol on the n/t-grid.

**Zero padding.** The matrix M is a compression of *every* circulant large enough that no tap
wraps around from one used pixel to another. The same holds for every twisted circulant, whose
wrapped entries carry a phase e^{iφ}, since M has none of those entries. The twisted circulant of
size N has the symbol's singular values at the frequencies (2πk + φ)/N, so

.. math:: \sigma_1(M) \leq \max_k \sigma_1\big(F((2\pi k + \varphi)/N)\big)
          \quad\text{for all } N \geq N_{\min} \text{ and all } \varphi.

N and φ are chosen so that the symbol's peak falls between the grid's points. The bound then shows
how the border of a small input lowers σ1: for the kernel (1, 1, 1) and φ = π it is
1 + 2cos(π/(n + 1)), the exact value. Peaks come in pairs ±ω*, and the midpoints between the grid's
images of the two are φ = 0 and φ = π, so those are the only twists to try; both keep the grid
symmetric.

**Pruning on a grid.** With U ≥ sup σ1(F) and τ ≤ U: if \|T\| ≤ U has degree d then the angle
arccos(T/U) changes by at most d per unit of ω (Bernstein and Szegő), so
σ1(F(c)) < U cos(arccos(τ/U) + θ) proves σ1(F) < τ within an angle θ of c. Blocks of grid points
are tested at their centres, and point by point where that fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipbound.bounds.rounding import UNIT, gamma
from lipbound.bounds.supremum.cells import Cells, random_vectors
from lipbound.bounds.supremum.field import Field, Integers
from lipbound.bounds.supremum.search import Search
from lipbound.geometry import Convolution
from lipbound.toeplitz import apply, leading, operator


@dataclass(frozen=True)
class Grid:
    """Frequencies scale·(2πk + φ)/N, k < N, per axis, φ given in half turns (0 or 1)."""

    sizes: tuple[int, ...]
    twist: tuple[int, ...]
    scale: tuple[int, ...]


def single_tap_gain(conv: Convolution) -> float | None:
    """‖S‖ of a layer K ⊗ S at its input size; ``None`` if it has more taps, or no input size."""
    if conv.input_size is None or math.prod(conv.kernel.shape[2:]) > 1:
        return None
    fine, coarse = _fine_and_coarse(conv, conv.input_size)
    counts = []
    for axis, (size, outputs) in enumerate(zip(fine, coarse, strict=True)):
        read = conv.pixels(axis, size)[:: conv.stride[axis]][:outputs]
        counts.append(int(np.bincount(read + 1, minlength=2)[1:].max()))  # −1 is a padded zero
    return math.sqrt(math.prod(counts))


def _fine_and_coarse(
    conv: Convolution, size: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes between which the convolution maps of which the layer may be the adjoint."""
    result = conv.output_size(size)
    return (result, size) if conv.transposed else (size, result)


def embedding(conv: Convolution, frequency: Sequence[float]) -> Grid | None:
    """Choose a grid, far from ``frequency``, whose maximum bounds σ1 at the layer's input size.

    Return ``None`` for a matrix, for reflect and replicate padding, and for circular padding with
    repeated or unaligned rows.
    """
    if not conv.input_size or conv.padding_mode in ("reflect", "replicate"):
        return None
    fine, coarse = _fine_and_coarse(conv, conv.input_size)
    scale = tuple(a // math.gcd(a, t) for a, t in zip(conv.dilation, conv.stride, strict=True))
    if conv.padding_mode == "circular":
        if any(n % t or m > n // t for n, t, m in zip(fine, conv.stride, coarse, strict=True)):
            return None
        sizes = tuple(n // t for n, t in zip(fine, conv.stride, strict=True))
        return Grid(sizes, (0,) * conv.dims, scale)
    chosen = [
        _furthest(_least(conv, axis, fine[axis], coarse[axis]), scale[axis], frequency[axis])
        for axis in range(conv.dims)
    ]
    return Grid(tuple(n for n, _ in chosen), tuple(half for _, half in chosen), scale)


def _least(conv: Convolution, axis: int, fine: int, coarse: int) -> int:
    """N_min: with the input split by the stride, pixels first…last meet outputs 0…coarse − 1."""
    stride, before = conv.stride[axis], conv.padding[axis][0]
    reach = conv.spans[axis] // stride  # tap blocks 0…reach
    first = before // stride
    last = min((fine - 1 + before) // stride, coarse + reach - 1)
    return max(coarse, coarse + reach - first, last + 1)


def _furthest(least: int, scale: int, frequency: float) -> tuple[int, int]:
    """Choose the size N and the twist whose grid is furthest from ±``frequency``."""
    options = []
    for size in range(least, least + 3):
        for half in (0, 1):
            points = scale * (2 * np.pi * np.arange(size) + half * np.pi) / size
            gap = np.abs(np.angle(np.exp(1j * (points - frequency)))).min()
            options.append((round(float(gap), 12), -size, half))
    _, size, half = max(options)
    return -size, half


def grid_maximum(field: Field, grid: Grid, above: float, rtol: float) -> tuple[float, int]:
    """Bound the largest σ1(F) over a grid from above, within rtol; also count the evaluations.

    ``above`` is an upper bound on the supremum over all frequencies.
    """
    reach = [_reach(n, m) for n, m in zip(grid.sizes, field.sizes, strict=True)]
    owner = np.zeros(field.blocks, dtype=np.int64)
    search = Search(field, owner, 1, rtol, limit=10**9, cap=above)
    angle = sum(
        math.pi * (m - 1) * r * s / n
        for r, m, s, n in zip(reach, field.sizes, grid.scale, grid.sizes, strict=True)
    )
    # Angles refer to the reduced symbol's frequencies: neighbours are `scale` steps apart.
    centres = [
        np.arange(min(r, n - 1), n + r, 2 * r + 1) % n
        for r, n in zip(reach, grid.sizes, strict=True)
    ]
    count = math.prod(len(c) for c in centres)
    index = np.tile(_product(centres), (field.blocks, 1))
    block = np.arange(field.blocks).repeat(count)
    left = random_vectors(len(block), field)
    cells = _cells(grid, block, index, angle * (1 + 8 * UNIT), left)
    near = _product([np.arange(-r, r + 1) for r in reach])

    def divide(failed: Points, _: Integers) -> Points | None:
        if not failed.angle.any():
            return None
        index = ((failed.index[:, None] + near) % np.array(grid.sizes)).reshape(-1, len(reach))
        both = np.column_stack([failed.block.repeat(len(near)), index])
        both = np.unique(both, axis=0)
        left = random_vectors(1, field).expand(len(both), -1).clone()
        return _cells(grid, both[:, 0], both[:, 1:], 0.0, left)

    upper = search.run(cells, divide)
    return float(upper[0]), int(search.peak.evaluations[0])


def _reach(size: int, taps: int) -> int:
    """Half-width, in points, of a block that spans an angle of about 1/4 per axis."""
    if taps == 1:
        return size // 2
    return max(0, min((size - 1) // 2, int(size * 0.25 / (math.pi * (taps - 1)))))


@dataclass
class Points(Cells):
    """Cells around points of a grid."""

    index: Integers  # (P, D): k


def _product(axes: Sequence[Integers]) -> Integers:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def _cells(grid: Grid, block: Integers, index: Integers, angle: float, left: Tensor) -> Points:
    turns = 2 * np.array(grid.sizes)  # in half steps, so that a twist is an integer
    steps = np.array(grid.scale) * (2 * index + np.array(grid.twist)) % turns
    steps = np.where(2 * steps > turns, steps - turns, steps)
    frequency = steps * (2 * math.pi / turns)
    return Points(block, frequency, np.full(len(block), angle), left, index)


def attained(conv: Convolution, rtol: float) -> float:
    """Compute ‖Mv‖/‖v‖ at the layer's input size, rounded down, with v from Lanczos iteration.

    An output is a sum of at most taps·channels products, so its error is at most γ times the sum of
    their absolute values. The operator with absolute values has norm at most ‖Σ|K|‖_F times the
    norm of the padding.
    """
    from scipy.sparse.linalg import ArpackError

    assert conv.input_size is not None
    linear = operator(conv, conv.input_size)
    if min(linear.shape) <= 64:
        vector = np.linalg.svd(linear @ np.eye(linear.shape[1]))[2][0]
    else:
        draw = np.random.default_rng(0)
        try:
            vector = leading(linear, draw, rtol / 10, maxiter=2000)[2][0]
        except ArpackError:  # no convergence, or no input reaches an output: any vector will do
            vector = draw.standard_normal(linear.shape[1])
    shape = (1, conv.in_channels, *conv.input_size)
    right = torch.from_numpy(np.ascontiguousarray(vector).reshape(shape)).to(conv.kernel.device)
    image = float(torch.linalg.vector_norm(apply(conv, right)))
    norm = float(torch.linalg.vector_norm(right))
    weights = conv.kernel.detach().double().abs()
    spread = float(torch.linalg.vector_norm(weights.flatten(1 + bool(conv.dims)).sum(-1)))
    length = conv.kernel[0].numel() + conv.kernel.shape[0] * conv.kernel[0, 0].numel()
    error = 2 * gamma(length + 64) * spread * conv.padding_gain() * math.sqrt(conv.groups)
    entries = right.numel() + math.prod(linear.shape[:1])
    return max(0.0, image / norm * (1 - gamma(2 * entries + 64)) - error)
