r"""PGD (Madry et al. 2018) as it is used in training, and a search without gradients.

:mod:`.pgd_restarts` and :mod:`.carlini_wagner` hold the strong attacks for an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.robust.attacks.balls import BALLS

Logits = Callable[[Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example with its class, or with probabilities of classes."""
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the largest other logit minus the label's, positive if an image is misclassified."""
    logits = logits.float()
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own[:, 0]


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "cross-entropy": (cross_entropy,),
    "margin": (margin,),
    "alternate": (cross_entropy, margin),  # where one saturates, the other does not
}
"""Name → losses that the restarts of an attack maximize in turn."""


@dataclass(frozen=True)
class Found:
    """What an attack found for each image.

    Attributes:
        images: The adversarial image: a misclassified one, or the one with the largest loss.
        broken: Whether the adversarial image is misclassified.
        norms: Norm of the perturbation; ∞ if a minimum-norm attack found none.
        iteration: Number of steps of the first restart until the image was misclassified by any
            margin, in the precision of the search; −1 if it was not.
    """

    images: Tensor
    broken: Tensor
    norms: Tensor
    iteration: Tensor


def pgd(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    step: float,
    iterations: int,
    ball: str = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """Maximize the cross-entropy inside a ball around the images and inside the pixels' range.

    Pixels, perturbations, projections and the loss are float32, whatever precision ``logits`` uses.
    The result is the last iterate, as in adversarial training.

    Args:
        logits: Network from images to logits; its parameters get no gradient.
        images: Pixels in [0, 1], ``(batch, channels, height, width)``.
        labels: True classes, ``(batch,)``.
        radius: Radius of the ball.
        step: Length of a step, in the ball's norm.
        iterations: Number of steps.
        ball: A name in ``BALLS``.
        start: First perturbation, inside the ball; zero by default.

    Returns:
        The images after the last step.

    Example:
        >>> images, labels = torch.full((1, 1, 1, 2), 0.5), torch.tensor([0])
        >>> pgd(lambda x: x.flatten(1), images, labels, radius=0.1, step=0.1, iterations=1)
        tensor([[[[0.4000, 0.6000]]]])
    """
    delta = torch.zeros_like(images) if start is None else start
    attacked = (images + delta).clamp(0, 1)
    for _ in range(iterations):
        gradient = ascent(logits, attacked, labels, cross_entropy)[2]
        attacked = stepped(attacked, gradient, images, radius, step, ball)
    return attacked.detach()


def ascent(
    logits: Logits, attacked: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, losses and the gradients of the losses with respect to the images."""
    attacked = attacked.detach().requires_grad_()
    with torch.enable_grad():
        scores = logits(attacked)
        losses = loss(scores, labels)
        (gradient,) = torch.autograd.grad(losses.sum(), attacked)
    return scores.detach(), losses.detach(), gradient.nan_to_num(0.0, 0.0, 0.0)


def stepped(
    attacked: Tensor, gradient: Tensor, images: Tensor, radius: float | Tensor,
    step: float | Tensor, ball: str,
) -> Tensor:  # fmt: skip
    """Take one ascent step, and project into the ball and the pixels' range."""
    kind = BALLS[ball]
    delta = kind.project(attacked.detach() + step * kind.ascend(gradient) - images, radius)
    return (images + delta).clamp(0, 1)


@torch.no_grad()
def random_search(
    logits: Logits, images: Tensor, labels: Tensor, *, radius: float, iterations: int = 500,
    ball: str = "linf", seed: int = 0,
) -> Found:  # fmt: skip
    """Attack without gradients: random squares of extreme colour are kept if the margin grows.

    It follows the Square attack of Andriushchenko et al. and reveals misleading gradients.
    """
    draw = torch.Generator().manual_seed(seed)
    count, channels, height, width = images.shape
    kind = BALLS[ball]

    def towards(change: Tensor) -> Tensor:
        return (images + kind.project(change, radius)).clamp(0, 1)

    stripes = torch.randint(0, 2, (count, channels, 1, width), generator=draw) * 2.0 - 1
    scale = radius if ball == "linf" else radius / (channels * height * width) ** 0.5
    best = towards(scale * stripes.to(images).expand_as(images))
    gaps = margin(logits(best), labels)
    first = torch.where(gaps > 0, 0, -1)
    for iteration in range(1, iterations + 1):
        share = 0.8 * (1 - iteration / (iterations + 1)) ** 2
        side = max(1, min(height, width, round((share * height * width) ** 0.5)))
        top = int(torch.randint(0, height - side + 1, (), generator=draw))
        left = int(torch.randint(0, width - side + 1, (), generator=draw))
        colour = torch.randint(0, 2, (count, channels, 1, 1), generator=draw).to(images) * 2 - 1
        change = best - images
        change[:, :, top : top + side, left : left + side] = 2 * scale * colour
        tried = towards(change)
        new = margin(logits(tried), labels)
        better = (new > gaps) & (gaps <= 0)
        gaps = torch.where(better, new, gaps)
        best = torch.where(better.reshape(-1, 1, 1, 1), tried, best)
        first = torch.where((gaps > 0) & (first < 0), iteration, first)
    return Found(best, gaps > 0, perturbation_norms(best, images, ball), first)


def perturbation_norms(attacked: Tensor, images: Tensor, ball: str) -> Tensor:
    """Return the norm of each perturbation in the ball's norm, ``(batch,)``."""
    change = (attacked - images).flatten(1)
    return change.abs().amax(1) if ball == "linf" else change.norm(dim=1)
