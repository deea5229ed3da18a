"""Adversarial weight perturbation: a gradient taken where the weights are worst nearby.

Wu, Xia & Wang 2020. A step then lowers the loss around the weights rather than at them, and
adversarial training overfits later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def perturbed(parameters: Iterable[Tensor], gamma: float) -> Iterator[None]:
    """Weights moved uphill along their ``.grad``, each by ``gamma`` times its norm; then put back.

    Vectors (biases, BatchNorm) stay where they are, and what has no gradient.
    """
    weights = [p for p in parameters if p.ndim > 1 and p.grad is not None]
    slopes = [p.grad for p in weights if p.grad is not None]
    kept = [p.detach().clone() for p in weights]
    with torch.no_grad():
        lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(slopes), strict=True)
        scales = [gamma * weight / slope.clamp_min(1e-30) for weight, slope in lengths]
        torch._foreach_add_(weights, torch._foreach_mul(slopes, scales))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
