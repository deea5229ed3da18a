"""Adversarial weight perturbation (Wu, Xia & Wang 2020).

The gradient is taken at nearby weights with a larger loss. A step then lowers the loss around the
weights rather than at them, and adversarial training overfits later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def uphill(parameters: Iterable[Tensor], gamma: float) -> list[tuple[Tensor, Tensor]]:
    """Return the weights to perturb, and moves along ``.grad`` of ``gamma`` times their norms.

    Vectors (biases, BatchNorm) and weights without gradient do not move.
    """
    pairs = [(p, p.grad) for p in parameters if p.ndim > 1 and p.grad is not None]
    if not pairs:
        return []
    weights, given = [weight for weight, _ in pairs], [slope for _, slope in pairs]
    # Scaled to about 1 first: squares of small gradients would underflow.
    peaks = torch._foreach_norm(given, math.inf)
    slopes = torch._foreach_div(given, [p.clamp_min(torch.finfo(p.dtype).tiny) for p in peaks])
    lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(slopes), strict=True)
    scales = [gamma * weight / slope.clamp_min(1.0) for weight, slope in lengths]
    return list(zip(weights, torch._foreach_mul(slopes, scales), strict=True))


@contextlib.contextmanager
def moved(moves: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Add a move to each weight, and restore the weights at the end."""
    if not moves:
        yield
        return
    weights, steps = (list(part) for part in zip(*moves, strict=True))
    kept = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        torch._foreach_add_(weights, steps)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
