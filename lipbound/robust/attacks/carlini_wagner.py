r"""Carlini & Wagner's attack (2017): the smallest L2 perturbation that changes the prediction.

It minimizes :math:`\|\delta\|^2 + c\,\max(\text{margin}, 0)` over images in tanh coordinates, with
a binary search for each image's c. One run serves every radius: an image is broken *at radius r* if
the smallest perturbation found has norm at most r. The projected variant, PGD on the margin in the
L2 ball, is another attack that goes by the same name in the literature; here it is ``l2`` PGD with
the ``margin`` loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.cuda_graphs import Replay, chunk, run
from lipbound.robust.attacks.pgd import Found, Logits, margin
from lipbound.runtime import Progress, check_time, silent


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
    replay: Replay | None = None,
    progress: Progress = silent,
) -> Found:
    """Search for the smallest L2 perturbation that changes the prediction of each image.

    Args:
        logits: Network in eval mode, from images to logits.
        images: Pixels in [0, 1].
        labels: True classes, ``(batch,)``.
        steps: Number of Adam steps for each value of the constant c.
        searches: Number of values of c per image: tenfold until one succeeds, then binary search.
        lr: Learning rate of Adam in tanh coordinates. It falls to a hundredth in the second half of
            a search. Fewer steps need a larger value.
        constant: First value of c.
        confidence: Margin above which an image counts as broken.
        replay: Runs the steps as a CUDA graph. It must not have been used for another model.
        progress: Shows the progress.

    Returns:
        What was found: ``norms`` holds the norm of the smallest successful perturbation, or ∞ where
        none was found, and ``iteration`` counts the steps of all searches.
    """
    middle = torch.atanh((2 * images - 1) * 0.999999)
    clean = margin(logits(images), labels) > confidence
    weight = torch.full((len(images),), constant, device=images.device)
    low, high = torch.zeros_like(weight), torch.full_like(weight, torch.inf)
    norms = torch.where(clean, 0.0, high)
    kept, first = images.clone(), torch.where(clean, 0, -1)
    look = chunk(steps + 1)

    def advance(
        images: Tensor, middle: Tensor, labels: Tensor, weight: Tensor, *state: Tensor
    ) -> Descent:
        now = Descent(*state)
        for _ in range(look):
            now = _stepped(
                logits, images, middle, labels, weight, now,
                steps=steps, lr=lr, confidence=confidence,
            )  # fmt: skip
        return now

    for search in range(searches):
        still = torch.zeros_like(middle)
        now = Descent(
            still, still, still, torch.zeros((), device=images.device), norms, kept,
            torch.full_like(first, -1), clean,
        )  # fmt: skip
        for _ in progress(range(0, steps + 1, look), f"search {search + 1} of {searches}"):
            check_time()
            key = ("cw", look, steps, lr, confidence)
            now = Descent(*run(replay, key, advance, [images, middle, labels, weight, *now]))
        norms, kept = now.norms, now.kept
        first = torch.where((first < 0) & (now.first >= 0), search * steps + now.first, first)
        high = torch.where(now.success, weight, high)
        low = torch.where(now.success, low, weight)
        weight = torch.where(high < torch.inf, (low + high) / 2, 10 * weight)
    return Found(kept, norms < torch.inf, norms, first)


class Descent(NamedTuple):
    """State of Adam, and the smallest successful perturbation so far."""

    moved: Tensor  # in tanh coordinates
    slow: Tensor
    fast: Tensor
    step: Tensor
    norms: Tensor
    kept: Tensor
    first: Tensor  # the step at which this search first found a smaller one; −1 before
    success: Tensor


def _stepped(
    logits: Logits, images: Tensor, middle: Tensor, labels: Tensor, weight: Tensor, now: Descent,
    *, steps: int, lr: float, confidence: float,
) -> Descent:  # fmt: skip
    moved = now.moved.detach().requires_grad_()
    with torch.enable_grad():
        attacked = torch.tanh(middle + moved) / 2 + 0.5
        gaps = margin(logits(attacked), labels)
        sizes = (attacked - images).flatten(1).square().sum(1)
        total = sizes + weight * (confidence - gaps).clamp_min(0)
        (gradient,) = torch.autograd.grad(total.sum(), moved)
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    wrong = (gaps.detach() > confidence) & (now.step <= steps)
    lengths = sizes.detach().sqrt()
    closer = wrong & (lengths < now.norms)
    late = 3 * now.step >= 2 * steps  # an earlier success may be due to the first long steps alone
    slow = now.slow.lerp(gradient, 0.1)
    fast = now.fast.lerp(gradient.square(), 0.001)
    count = now.step + 1
    up, down = slow / (1 - 0.9**count), fast / (1 - 0.999**count)
    rate = lr * (0.01 + 2 * (1 - now.step / steps)).clamp_max(1.0)
    return Descent(
        moved=now.moved - rate * up / (down.sqrt() + 1e-8),
        slow=slow,
        fast=fast,
        step=count,
        norms=torch.where(closer, lengths, now.norms),
        kept=torch.where(closer.reshape(-1, *[1] * (images.ndim - 1)), attacked.detach(), now.kept),
        first=torch.where(closer & (now.first < 0), now.step.long(), now.first),
        success=now.success | (wrong & late),
    )
