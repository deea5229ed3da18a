"""Gram iteration on a widened grid. Rounding errors are included in the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipbound.bounds.rounding import (
    UNIT,
    Scaled,
    gamma_complex,
    shorter_side_first,
    symbol_error,
)
from lipbound.geometry import Layer, convolution
from lipbound.runtime import piece
from lipbound.symbols import evaluate, grid, radians, samples_per_axis
from lipbound.symbols import widening as widening_factor

CHUNK = 1 << 23  # complex entries of a temporary, 128 MiB


def gram(
    layer: Layer,
    iterations: int = 6,
    samples: int | None = None,
    widening: str = "best",
    **geometry: object,
) -> Tensor:
    r"""Bound σ1 by Gram iteration (Delattre et al. 2023) at every frequency of a grid.

    :math:`\sigma_1(F) \leq \|G_k\|_F^{1/2^k}` with :math:`G_1 = FF^*`, :math:`G_{k+1} = G_k^2`.
    The excess is a factor of at most :math:`n^{1/2^{k+1}}`. Its logarithm halves per product.
    Rounding lowers each product by up to :math:`\gamma^c_n \|G_k\|_F^2`, which is added back.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        iterations: Number of matrix products per frequency, including the first.
        samples: Grid points per frequency axis; ``None`` uses 32 per unit of degree.
        widening: Kind of widening, see :func:`lipbound.symbols.widening`.
        geometry: Options of a bare kernel, or ``input_shape``.

    Returns:
        The bound, a scalar, at least σ1 for every input size; differentiable.

    Example:
        >>> gram(torch.ones(1, 1, 3, 3))
        tensor(9.0873)
    """
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations={iterations!r} must be a positive integer")
    scaled = Scaled(convolution(layer, **geometry))  # type: ignore[arg-type]
    taps = scaled.taps()
    counts = samples_per_axis(taps.shape[3:], samples)
    frequencies = radians(grid(counts, half=True), counts)
    with torch.no_grad():
        group, point, largest = _maximizer(taps, frequencies, iterations)
    # The gradient of the maximum is that at the maximizer, so only the latter needs a graph.
    winner = taps[group : group + 1]
    value = _iterate(evaluate(winner, frequencies[point : point + 1]), iterations).reshape(())
    value = value * (largest / value.detach())

    _, rows, columns, *sizes = taps.shape
    # σ1(F) ≤ σ1(F̂) + ε‖Σ|K|‖_F, and ‖Σ|K|‖_F ≤ √T‖K‖_F ≤ √T sup‖F‖_F ≤ √(T·n) sup σ1.
    loss = symbol_error(sizes) * math.sqrt(math.prod(sizes) * min(rows, columns))
    factor = widening_factor(counts, sizes, widening)
    return scaled.finish(value * factor, relative=2 * loss * factor)


def _maximizer(taps: Tensor, frequencies: Tensor, iterations: int) -> tuple[int, int, Tensor]:
    groups, rows, columns, *sizes = taps.shape
    step = max(1, piece(CHUNK) // max(rows * columns * groups, math.prod(sizes)))
    parts = [_iterate(evaluate(taps, part), iterations) for part in frequencies.split(step)]
    values = torch.cat(parts, dim=1)  # (groups, P)
    group, point = divmod(int(values.argmax()), values.shape[1])
    return group, point, values.amax()


def _iterate(symbols: Tensor, iterations: int) -> Tensor:
    """Bound σ1 of each matrix: ``(groups, P, rows, columns)`` → ``(groups, P)``."""
    wide = shorter_side_first(symbols)
    energy = _norm(wide).square()
    product = wide @ wide.mH
    norms = [_norm(product)]
    for _ in range(iterations - 1):
        product = product / norms[-1][..., None, None]
        product = product @ product
        norms.append(_norm(product))
    slack = 1 + (wide[0, 0].numel() + 16) * UNIT  # rounding of a Frobenius norm and a few more
    shortfall = gamma_complex(wide.shape[-2] + 4)
    return _unwind(norms, slack, shortfall, energy * gamma_complex(wide.shape[-1] + 4))


def _unwind(norms: Sequence[Tensor], slack: float, shortfall: float, first: Tensor) -> Tensor:
    """Compute the bound on σ1 of the symbol from λ1 ≤ 1 of the last normalised product."""
    level = torch.full_like(norms[-1], slack)
    for norm in reversed(norms[1:]):
        level = (norm * level * slack + shortfall).sqrt() * slack
    return (norms[0] * level * slack + first).sqrt() * slack


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix).clamp_min(1e-150)
