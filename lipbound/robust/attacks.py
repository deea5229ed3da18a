"""Adversarial examples by projected gradient ascent (Madry et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.robust.balls import BALLS


def pgd(
    logits: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    step: float,
    iterations: int,
    ball: str = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """Ascend the cross-entropy inside a ball around the images and inside the pixels' range.

    Pixels, perturbations, projections and the loss are float32 whatever ``logits`` computes in.

    Args:
        logits: From images to logits; the parameters behind it get no gradient.
        images: Pixels in [0, 1], ``(batch, channels, height, width)``.
        labels: ``(batch,)``.
        radius: Of the ball.
        step: Length of a step, in the ball's norm.
        iterations: Number of steps.
        ball: A name in ``BALLS``.
        start: Where to begin, a perturbation inside the ball; zero without it.

    Returns:
        The images after the last step.

    Example:
        >>> images, labels = torch.full((1, 1, 1, 2), 0.5), torch.tensor([0])
        >>> pgd(lambda x: x.flatten(1), images, labels, radius=0.1, step=0.1, iterations=1)
        tensor([[[[0.4000, 0.6000]]]])
    """
    kind = BALLS[ball]
    delta = torch.zeros_like(images) if start is None else start
    attacked = (images + delta).clamp(0, 1)
    for _ in range(iterations):
        attacked = attacked.detach().requires_grad_()
        with torch.enable_grad():
            loss = functional.cross_entropy(logits(attacked).float(), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, attacked)
        delta = kind.project(attacked.detach() + step * kind.ascend(gradient) - images, radius)
        attacked = (images + delta).clamp(0, 1)
    return attacked.detach()
