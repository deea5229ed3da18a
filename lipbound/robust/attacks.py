r"""Adversarial examples: to train on, and the strongest that can be found.

*PGD* (Madry et al. 2018) ascends a loss inside a norm ball. *Carlini & Wagner* (2017) minimizes
:math:`\|\delta\|^2 + c\,\max(\text{margin}, 0)` over images in tanh coordinates, with a binary
search for each image's c; one run serves every radius: an image is broken *at radius r* if the
smallest perturbation found has norm at most r. The projected variant, PGD on the margin in the
L2 ball, is another attack that goes by the same name in the literature; here it is ``l2`` PGD with
the ``margin`` loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lipbound.robust.balls import BALLS

Logits = Callable[[Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per example."""
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The best other logit less the label's: positive where the image is misclassified."""
    logits = logits.float()
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(1) - own[:, 0]


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "cross-entropy": (cross_entropy,),
    "margin": (margin,),
    "alternate": (cross_entropy, margin),  # where the one saturates, the other does not
}
"""Name → what an attack ascends, restart by restart."""


@dataclass(frozen=True)
class Found:
    """What an attack found for each image.

    Attributes:
        images: The adversarial image: a misclassified one, or that of the largest loss.
        broken: Whether it is misclassified.
        norms: Norm of its perturbation; of a minimum-norm attack ∞ where none was found.
        iteration: After how many steps of its first restart it was broken; −1 if not by then.
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
    """Ascend the cross-entropy inside a ball around the images and inside the pixels' range.

    Pixels, perturbations, projections and the loss are float32 whatever ``logits`` computes in.
    The last image counts: the attack to train with.

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
    delta = torch.zeros_like(images) if start is None else start
    attacked = (images + delta).clamp(0, 1)
    for _ in range(iterations):
        gradient = _ascent(logits, attacked, labels, cross_entropy)[2]
        attacked = _stepped(attacked, gradient, images, radius, step, ball)
    return attacked.detach()


def _ascent(
    logits: Logits, attacked: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, losses and the losses' gradients at some images."""
    attacked = attacked.detach().requires_grad_()
    with torch.enable_grad():
        scores = logits(attacked)
        losses = loss(scores, labels)
        (gradient,) = torch.autograd.grad(losses.sum(), attacked)
    return scores.detach(), losses.detach(), gradient.nan_to_num(0.0, 0.0, 0.0)


def _stepped(
    attacked: Tensor, gradient: Tensor, images: Tensor, radius: float, step: float, ball: str
) -> Tensor:
    kind = BALLS[ball]
    delta = kind.project(attacked.detach() + step * kind.ascend(gradient) - images, radius)
    return (images + delta).clamp(0, 1)


@torch.no_grad()
def strongest_pgd(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    step: float,
    iterations: int,
    restarts: int = 1,
    ball: str = "linf",
    loss: str = "cross-entropy",
    decay: bool = False,
    seed: int = 0,
    compact: int = 10,
) -> Found:
    """PGD that keeps, for every image, the worst of all iterations and restarts.

    Images that are misclassified somewhere on the way are done: they leave the batch.

    Args:
        logits: From images to logits, in eval mode.
        images: Pixels in [0, 1].
        labels: ``(batch,)``.
        radius: Of the ball.
        step: Length of a step, in the ball's norm.
        iterations: Gradients per restart.
        restarts: Random starts.
        ball: A name in ``BALLS``.
        loss: A name in ``LOSSES``.
        decay: Let the steps shrink to a fiftieth in the course of a restart. With ``step`` equal
            to the radius and several restarts this comes up to APGD at the same budget.
        seed: Of the starts.
        compact: Iterations between looks at which images are done.

    Example:
        >>> images, labels = torch.tensor([[[[0.4, 0.6]]]]), torch.tensor([1])
        >>> [bool(strongest_pgd(lambda x: x.flatten(1), images, labels, radius=radius,
        ...                     step=radius, iterations=2).broken) for radius in (0.09, 0.11)]
        [False, True]
    """
    kind = BALLS[ball]
    draw = torch.Generator(images.device).manual_seed(seed)
    result = images.clone()
    best = torch.full((len(images),), -torch.inf, device=images.device)
    first = torch.full((len(images),), -1, device=images.device)  # the iteration that broke it
    early = first
    for restart in range(restarts):
        ascended = LOSSES[loss][restart % len(LOSSES[loss])]
        best = torch.full_like(best, -torch.inf) if restart and loss == "alternate" else best
        left = (first < 0).nonzero().flatten()
        if len(left) == 0:
            break
        centre, target = images[left], labels[left]
        start = kind.sample(centre, radius, draw)  # of the images that are left
        attacked = (centre + start).clamp(0, 1)
        for iteration in range(iterations + 1):
            if iteration < iterations:
                scores, losses, gradient = _ascent(logits, attacked, target, ascended)
            else:  # the last image is looked at too
                scores = logits(attacked)
                losses = ascended(scores, target)
            wrong = (scores.argmax(1) != target) & scores.isfinite().all(1)
            going = first[left] < 0
            better = going & (wrong | (losses > best[left]))
            best[left] = torch.where(better, losses, best[left])
            chosen = better.reshape(-1, *[1] * (images.ndim - 1))
            result[left] = torch.where(chosen, attacked, result[left])
            first[left] = torch.where(going & wrong, iteration, first[left])
            if iteration == iterations:
                break
            length = step * (1 - 0.98 * iteration / iterations) if decay else step
            attacked = _stepped(attacked, gradient, centre, radius, length, ball)
            if iteration % compact == compact - 1:
                going = first[left] < 0
                if not bool(going.all()):
                    left, centre, target, attacked = (
                        t[going] for t in (left, centre, target, attacked)
                    )
                if len(left) == 0:
                    break
        early = first.clone() if restart == 0 else early
    return Found(result, first >= 0, perturbation_norms(result, images, ball), early)


@torch.no_grad()
def carlini_wagner(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int = 1000,
    searches: int = 9,
    lr: float = 0.1,
    constant: float = 1e-3,
    confidence: float = 0.0,
) -> Found:
    """The smallest L2 perturbation that changes the prediction, by Carlini & Wagner's method.

    Args:
        logits: From images to logits, in eval mode.
        images: Pixels in [0, 1].
        labels: ``(batch,)``.
        steps: Of Adam, for each value of the constant.
        searches: Values of the constant tried per image: tenfold until it works, then halving.
        lr: Of Adam, in tanh coordinates; in the second half of a search it falls to a hundredth.
            More for fewer steps.
        constant: The first value.
        confidence: Margin that counts as broken.

    Returns:
        ``norms`` are those of the smallest successful perturbations; ∞ where none was.
    """
    middle = torch.atanh((2 * images - 1) * 0.999999)
    low = torch.zeros(len(images), device=images.device)
    high = torch.full_like(low, torch.inf)
    weight = torch.full_like(low, constant)
    result, norms = images.clone(), torch.full_like(low, torch.inf)
    clean = margin(logits(images), labels) > confidence
    norms = torch.where(clean, 0.0, norms)
    first = torch.where(clean, 0, -1)
    for search in range(searches):
        moved = torch.zeros_like(middle)
        slow, fast = torch.zeros_like(middle), torch.zeros_like(middle)
        success = clean.clone()
        for step in range(steps + 1):
            moved = moved.detach().requires_grad_()
            with torch.enable_grad():
                attacked = torch.tanh(middle + moved) / 2 + 0.5
                gaps = margin(logits(attacked), labels)
                sizes = (attacked - images).flatten(1).square().sum(1)
                total = sizes + weight * (confidence - gaps).clamp_min(0)
                gradient = torch.autograd.grad(total.sum(), moved)[0] if step < steps else None
            gradient = None if gradient is None else gradient.nan_to_num(0.0, 0.0, 0.0)
            wrong = gaps.detach() > confidence
            lengths = sizes.detach().sqrt()
            closer = wrong & (lengths < norms)
            norms = torch.where(closer, lengths, norms)
            keep = closer.reshape(-1, *[1] * (images.ndim - 1))
            result = torch.where(keep, attacked.detach(), result)
            first = torch.where(closer & (first < 0), search * steps + step, first)
            if 3 * step >= 2 * steps:  # earlier it may be the first long steps that broke it
                success |= wrong
            if gradient is None:
                break
            slow = slow.lerp(gradient, 0.1)
            fast = fast.lerp(gradient.square(), 0.001)
            up, down = slow / (1 - 0.9 ** (step + 1)), fast / (1 - 0.999 ** (step + 1))
            rate = lr * min(1.0, 0.01 + 2 * (1 - step / steps))
            moved = moved.detach() - rate * up / (down.sqrt() + 1e-8)
        high = torch.where(success, weight, high)
        low = torch.where(success, low, weight)
        weight = torch.where(high < torch.inf, (low + high) / 2, 10 * weight)
    return Found(result, norms < torch.inf, norms, first)


def autoattack(
    model: torch.nn.Module, images: Tensor, labels: Tensor, *, radius: float, ball: str = "linf",
    seed: int = 0, batch: int = 250, attacks: list[str] | None = None,
) -> Found:  # fmt: skip
    """Croce & Hein's standard AutoAttack: APGD-CE, APGD-T, FAB-T and Square.

    With fewer than four classes the targeted parts, which rank four logits, are left out.

    Args:
        model: In eval mode.
        images: Pixels in [0, 1].
        labels: ``(batch,)``.
        radius: Of the ball.
        ball: ``'linf'`` or ``'l2'``.
        seed: Of its random starts.
        batch: Images at a time.
        attacks: Some of its parts instead, ``['apgd-ce']`` say, with one restart each.

    Raises:
        ValueError: If the package is missing.
    """
    try:
        from pyautoattack import AutoAttack
    except ImportError:
        raise ValueError("AutoAttack comes with: pip install 'lipbound[attacks]'") from None
    with torch.no_grad():
        classes = model(images[:1]).shape[1]
    if attacks is None and classes < 4:
        attacks = ["apgd-ce", "fab", "square"]
    version = "standard" if attacks is None else "custom"
    norm = {"linf": "Linf", "l2": "L2"}[ball]
    attack = AutoAttack(
        model, norm=norm, eps=radius, seed=seed, version=version, attacks=attacks,
        device=images.device,
    )  # fmt: skip
    attack.apgd.n_restarts = attack.fab.n_restarts = 1  # its custom version would take five
    attack.apgd_targeted.n_target_classes = min(9, classes - 1)
    attack.fab.n_target_classes = min(9, classes - 1)
    found = attack.run_standard_evaluation(images, labels, batch_size=batch)
    found = (found[0] if isinstance(found, tuple) else found).to(images)
    with torch.no_grad():
        broken = torch.cat([model(part).argmax(1) for part in found.split(batch)]) != labels
    first = torch.where(broken, 0, -1)
    return Found(found, broken, perturbation_norms(found, images, ball), first)


@torch.no_grad()
def random_search(
    logits: Logits, images: Tensor, labels: Tensor, *, radius: float, iterations: int = 500,
    ball: str = "linf", seed: int = 0,
) -> Found:  # fmt: skip
    """An attack without gradients: random squares of extreme colour, kept if the margin grows.

    After Andriushchenko et al.'s Square attack, to find out whether gradients mislead.
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
    """In the ball's norm, ``(batch,)``."""
    change = (attacked - images).flatten(1)
    return change.abs().amax(1) if ball == "linf" else change.norm(dim=1)
