"""Adversarial weight perturbation: a gradient taken where the weights are worst nearby.

Wu, Xia & Wang 2020. A step then lowers the loss around the weights rather than at them, and
adversarial training overfits later.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def perturbed(parameters: Iterable[Tensor], gamma: float) -> Iterator[None]:
    """Weights moved uphill along their ``.grad``, each by ``gamma`` times its norm; then put back.

    Vectors (biases, BatchNorm) stay where they are, and what has no gradient.
    """
    pairs = [(p, p.grad) for p in parameters if p.ndim > 1 and p.grad is not None]
    if not pairs:
        yield
        return
    weights, given = [weight for weight, _ in pairs], [slope for _, slope in pairs]
    kept = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        # Near 1 first: squares of a well-fitted batch's slopes would vanish.
        peaks = torch._foreach_norm(given, math.inf)
        slopes = torch._foreach_div(given, [p.clamp_min(torch.finfo(p.dtype).tiny) for p in peaks])
        lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(slopes), strict=True)
        scales = [gamma * weight / slope.clamp_min(1.0) for weight, slope in lengths]
        torch._foreach_add_(weights, torch._foreach_mul(slopes, scales))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
