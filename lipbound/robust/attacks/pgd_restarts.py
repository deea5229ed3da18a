"""PGD with restarts, which keeps the worst image of all iterations and restarts.

Images are attacked in a fixed number of slots. An image that is broken, or whose restart has ended,
leaves its slot to the next one. So no gradient is computed for a broken image, and the batch keeps
its shape, so that a GPU can replay one graph throughout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.cuda_graphs import Replay, chunk, run
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.pgd import (
    LOSSES,
    Found,
    Logits,
    ascent,
    margin,
    perturbation_norms,
    stepped,
)
from lipbound.runtime import Progress, check_time, silent


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
    confidence: float = 0.0,
    seed: int = 0,
    width: int = 0,
    replay: Replay | None = None,
    progress: Progress = silent,
) -> Found:
    """Attack every image until it is misclassified or the budget is spent.

    The result for an image depends on the image, the seed and the budget, not on the other images.

    Args:
        logits: Network in eval mode, from images to logits.
        images: Pixels in [0, 1].
        labels: True classes, ``(batch,)``.
        radius: Radius of the ball.
        step: Length of a step, in the ball's norm.
        iterations: Number of gradients per restart.
        restarts: Number of random starts.
        ball: A name in ``BALLS``.
        loss: A name in ``LOSSES``.
        decay: Whether the steps shrink to a fiftieth during a restart. With ``step`` equal to the
            radius and several restarts, this is as strong as APGD at the same budget.
        confidence: Margin above which an image counts as broken.
        seed: Seed for the random starts.
        width: Number of images attacked at a time; all by default.
        replay: Runs the iterations as a CUDA graph. It must not have been used for another model.
        progress: Shows the progress.

    Returns:
        What was found; for an image that was not broken, the attempt with the largest margin.

    Example:
        >>> images, labels = torch.tensor([[[[0.4, 0.6]]]]), torch.tensor([1])
        >>> [bool(strongest_pgd(lambda x: x.flatten(1), images, labels, radius=radius,
        ...                     step=radius, iterations=2).broken) for radius in (0.09, 0.11)]
        [False, True]
    """
    look = chunk(iterations + 1)
    lengths = images.new_tensor([radius, step, iterations, confidence])

    def advance(lengths: Tensor, *state: Tensor) -> Slots:
        slots = Slots(*state)
        for _ in range(look):
            slots = _iterated(logits, slots, lengths, ball, loss, decay)
        return slots

    width = width or len(images)
    pool = _Pool(images, labels, width if replay else min(width, len(images)), restarts)

    @lru_cache(3)  # images rarely lag further behind
    def starts(restart: int) -> Tensor:
        """Draw the starts of all images of a restart together, whether needed or not."""
        draw = torch.Generator(images.device)
        draw.manual_seed((seed * 1_000_003 + restart) % (1 << 62))
        return BALLS[ball].sample(images, radius, draw)

    shown, done = iter(progress(range(len(images) * restarts), "restarts of images")), -1
    while pool.seat(starts):
        check_time()
        key = ("pgd", ball, loss, decay, look)
        pool.slots = Slots(*run(replay, key, advance, [lengths, *pool.slots]))
        pool.collect(iterations)
        while done < int(pool.done):
            next(shown, None)
            done += 1
    return Found(pool.kept, pool.broken, perturbation_norms(pool.kept, images, ball), pool.first)


class Slots(NamedTuple):
    """The images under attack, one row per slot."""

    attacked: Tensor
    centre: Tensor
    target: Tensor
    restart: Tensor
    at: Tensor  # iterations of this restart so far
    best: Tensor  # the largest margin over all restarts, and its image
    kept: Tensor
    broken_at: Tensor  # iteration at which the image was broken; −1 before
    wrong_at: Tensor  # the same for any positive margin


def _iterated(
    logits: Logits, slots: Slots, lengths: Tensor, ball: str, loss: str, decay: bool
) -> Slots:
    """Evaluate the attacked images, then move them; finished slots do not change the result."""
    radius, step, iterations, confidence = lengths.unbind()
    wide = (-1, *[1] * (slots.attacked.ndim - 1))

    def losses(scores: Tensor, target: Tensor) -> Tensor:
        values = torch.stack([part(scores, target) for part in LOSSES[loss]])
        return values.gather(0, (slots.restart % len(values))[None])[0]

    scores, _, gradient = ascent(logits, slots.attacked, slots.target, losses)
    gaps = margin(scores, slots.target)
    mistaken = (scores.argmax(1) != slots.target) & scores.isfinite().all(1)
    wrong = mistaken & (gaps >= confidence)
    going = (slots.broken_at < 0) & (slots.at <= iterations)
    better = going & (wrong | (gaps > slots.best))
    length = step * (1 - 0.98 * slots.at / iterations).reshape(wide) if decay else step
    return slots._replace(
        attacked=stepped(slots.attacked, gradient, slots.centre, radius, length, ball),
        at=slots.at + 1,
        best=torch.where(better, gaps, slots.best),
        kept=torch.where(better.reshape(wide), slots.attacked, slots.kept),
        broken_at=torch.where(going & wrong, slots.at, slots.broken_at),
        wrong_at=torch.where(going & mistaken & (slots.wrong_at < 0), slots.at, slots.wrong_at),
    )


class _Pool:
    """The images, and the slots that they take in turn."""

    def __init__(self, images: Tensor, labels: Tensor, width: int, restarts: int):
        self.images, self.labels, self.restarts = images, labels, restarts
        everyone = {"size": (len(images),), "device": images.device}
        self.best = torch.full(fill_value=-torch.inf, **everyone)  # type: ignore[call-overload]
        self.first = torch.full(fill_value=-1, **everyone)  # type: ignore[call-overload]
        self.broken = torch.zeros(dtype=torch.bool, **everyone)  # type: ignore[call-overload]
        self.kept = images.clone()
        self.ended, self.done = 0, 0.0  # restarts, also with shares of those under way
        self.waiting = deque((image, 0) for image in range(len(images)))
        self.seats: list[tuple[int, int] | None] = [None] * width
        nobody = torch.zeros(width, dtype=torch.long, device=images.device)
        self.slots = Slots(
            images[nobody], images[nobody], labels[nobody], nobody.clone(), nobody.clone(),
            self.best[nobody], images[nobody], nobody.clone(), nobody.clone(),
        )  # fmt: skip

    def seat(self, starts: Callable[[int], Tensor]) -> bool:
        """Fill the free slots, and return whether any slot is in use."""
        free = [place for place, seat in enumerate(self.seats) if seat is None]
        taken = free[: len(self.waiting)]
        for place in taken:
            self.seats[place] = self.waiting.popleft()
        if taken:
            pairs = [seat for seat in (self.seats[p] for p in taken) if seat is not None]
            places, who, restarts = self._tensors(taken, *zip(*pairs, strict=True))
            start = torch.stack([starts(restart)[image] for image, restart in pairs])
            fresh = Slots(
                (self.images[who] + start).clamp(0, 1), self.images[who], self.labels[who],
                restarts, torch.zeros_like(restarts), self.best[who], self.kept[who],
                torch.full_like(restarts, -1), torch.full_like(restarts, -1),
            )  # fmt: skip
            for mine, new in zip(self.slots, fresh, strict=True):
                mine[places] = new
        return any(seat is not None for seat in self.seats)

    def collect(self, iterations: int) -> None:
        """Store the results of finished slots; unbroken images wait for their next restart."""
        broken_at, at = torch.stack([self.slots.broken_at, self.slots.at]).tolist()
        over: list[int] = []
        under_way = 0
        who: list[int] = []
        for place, seat in enumerate(self.seats):
            if seat is None or (broken_at[place] < 0 and at[place] <= iterations):
                under_way += at[place] if seat is not None else 0
                continue
            over.append(place)
            who.append(seat[0])
            if broken_at[place] < 0 and seat[1] + 1 < self.restarts:
                self.waiting.append((seat[0], seat[1] + 1))
                self.ended += 1
            else:
                self.ended += self.restarts - seat[1]
            self.seats[place] = None
        self.done = self.ended + under_way / (iterations + 1)
        if over:
            places, found = self._tensors(over, who)
            self.best[found] = self.slots.best[places]
            self.kept[found] = self.slots.kept[places]
            at_first = self.slots.restart[places] == 0
            broken = self.slots.broken_at[places]
            wrong = self.slots.wrong_at[places]
            self.first[found] = torch.where(at_first, wrong, self.first[found])
            self.broken[found] = broken >= 0

    def _tensors(self, *lists: object) -> list[Tensor]:
        return [torch.tensor(x, dtype=torch.long, device=self.images.device) for x in lists]
