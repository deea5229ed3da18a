"""Signs that an attack failed rather than that the network resisted (Carlini et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.pgd import (
    LOSSES,
    Found,
    ascent,
    cross_entropy,
    margin,
    pgd,
    random_search,
)
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.attacks.plan import SMALLEST, Plan
from lipbound.robust.attacks.recheck import Examples, valid, verified
from lipbound.runtime import Progress, silent

Loss = Callable[[Tensor, Tensor], Tensor]


def better(one: Tensor, other: Tensor) -> bool:
    """Whether the first attack breaks significantly more of the same images (one-sided 5 %)."""
    only, others = int((one & ~other).sum()), int((other & ~one).sum())
    return only - others > max(1.0, 1.645 * math.sqrt(only + others))


@dataclass
class Case:
    """Some images of an evaluation, and the doubts that they raised.

    Attributes:
        model: The network, in eval mode.
        on: The images, labels and mistakes without attack.
        plan: Attack plan of the evaluation.
        found: Name of the attack → what it found for these images.
        surrogate: Another network for the same images, for transfer attacks.
        evidence: Name → measurement that the doubts rest on.
        said: The doubts, as sentences.
    """

    model: nn.Module
    on: Examples
    plan: Plan
    found: dict[str, Found]
    surrogate: nn.Module | None
    evidence: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    _broken: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def note(self, name: str, broken: Tensor) -> Tensor:
        """Record the remaining accuracy as evidence, and return ``broken``."""
        self.evidence[name] = share(broken)
        return broken

    def looked(self, attacked: Tensor) -> Tensor:
        """Whether each image is misclassified when it is checked again in float32."""
        return verified(self.model, attacked, self.on.labels, self.plan.batch) | self.on.mistakes

    def last(
        self, iterations: int, radius: float | None = None, network: nn.Module | None = None
    ) -> Tensor:
        """Whether the last iterate of plain PGD breaks each image; computed once."""
        radius = self.plan.radius if radius is None else radius
        network = network or self.model
        if (iterations, radius, network) not in self._broken:
            attacked = pgd(
                network, self.on.images, self.on.labels, radius=radius,
                step=self.plan.step * radius, iterations=iterations, ball=self.plan.ball,
            )  # fmt: skip
            self._broken[iterations, radius, network] = self.looked(attacked)
        return self._broken[iterations, radius, network]


def share(broken: Tensor) -> float:
    """Return the remaining accuracy."""
    return 1 - float(broken.float().mean())


def doubt(
    model: nn.Module,
    on: Examples,
    plan: Plan,
    found: dict[str, Found],
    surrogate: nn.Module | None = None,
    progress: Progress = silent,
) -> tuple[list[str], dict[str, Any]]:
    """Return the doubts about an evaluation, and their evidence, from at most 200 images."""
    few = slice(0, 200)
    kept = {
        name: Found(*(getattr(attack, f)[few] for f in vars(attack)))
        for name, attack in found.items()
    }
    case = Case(model, on[few], plan, kept, surrogate)
    case.evidence["images"] = len(case.on.images)
    case.note("clean", case.on.mistakes)
    for look in progress(LOOKS, "doubts"):
        look(case)
    return case.said, case.evidence


@torch.no_grad()
def _deterministic(case: Case) -> None:
    once, again = case.model(case.on.images), case.model(case.on.images)
    same = torch.allclose(once, again, rtol=1e-4, atol=1e-5)
    case.evidence["deterministic"] = bool(same)
    if not same:
        case.said.append(
            "the model answers the same images differently: average over its randomness"
        )


def _more_iterations(case: Case) -> None:
    short, long = case.note("pgd_10", case.last(10)), case.note("pgd_50", case.last(50))
    if better(short, long):
        case.said.append(
            f"more iterations help the defence: {share(short):.3f} after 10, "
            f"{share(long):.3f} after 50"
        )


def _rivals(case: Case) -> None:
    """Check that no other attack does better than the ones that were run."""
    plan, x, y = case.plan, case.on.images, case.on.labels
    own: dict[str, Tensor] = {
        name: valid(case.model, case.found[name], case.on, plan.ball, plan.radius, plan.batch)
        for name in ("pgd", "autoattack")
        if name in case.found
    }
    short, longer = case.last(50), case.note("pgd_250", case.last(250))
    case.note("white_box", torch.stack([short, *own.values()]).any(0))
    blind = random_search(
        case.model, x, y, radius=plan.radius, ball=plan.ball, seed=plan.seed
    ).images
    margins = strongest_pgd(
        case.model, x, y, radius=plan.radius, step=plan.step * plan.radius, iterations=50,
        ball=plan.ball, loss="margin", seed=plan.seed,
    ).images  # fmt: skip
    rivals = {
        "pgd_50": ("plain PGD with 50 iterations does better", short),
        "pgd_250": ("plain PGD with 250 iterations does better", longer),
        "random_search": ("an attack without gradients does better", case.looked(blind)),
        "margin": ("the margin's gradient does better", case.looked(margins)),
    }
    if case.surrogate is not None:
        moved = case.last(50, network=case.surrogate)
        rivals["transfer"] = ("images made for another network do better", moved)
    if "autoattack" in own:
        rivals["autoattack"] = ("AutoAttack does better", own["autoattack"])
    reached_by = own or {"pgd_50": short}
    for name, (text, broken) in rivals.items():
        case.note(name, broken)
        for mine, reached in reached_by.items():
            if better(broken, reached):
                case.said.append(f"{text} ({share(broken):.3f}) than {mine} ({share(reached):.3f})")


def _smallest(case: Case) -> None:
    """Check that no attack inside the largest L2 ball does better than another, or than PGD."""
    plan = case.plan
    asked = [name for name in SMALLEST if name in case.found]
    if not asked:
        return
    radius = max(plan.radii)
    own = {
        name: valid(case.model, case.found[name], case.on, "l2", radius, plan.batch)
        for name in asked
    }
    inside = strongest_pgd(
        case.model, case.on.images, case.on.labels, radius=radius, step=plan.step * radius,
        iterations=100, restarts=2, ball="l2", loss="alternate", seed=plan.seed,
    ).images  # fmt: skip
    for name, broken in {**own, "PGD": case.looked(inside)}.items():
        case.note(f"{name} in l2 {radius:g}", broken)
        for mine, reached in own.items():
            if mine != name and better(broken, reached):
                case.said.append(
                    f"{name} in the L2 ball of radius {radius:g} does better "
                    f"({share(broken):.3f}) than {mine} ({share(reached):.3f})"
                )


def _large_radii(case: Case) -> None:
    limit = 1.0 if case.plan.ball == "linf" else math.sqrt(case.on.images[0].numel())
    radii = (case.plan.radius, limit / 4, limit / 2, limit)
    curve = {f"{r:.4f}": share(case.last(20, r)) for r in radii}
    case.evidence["against_radius"] = curve
    least = min(curve.values())
    if least > max(0.1 * case.evidence["clean"], 1.5 / len(case.on.images)):
        case.said.append(f"accuracy stays at {least:.3f} however large the perturbation")


def _gradients(case: Case) -> None:
    """Check that each image has a gradient, of one of the losses that the attacks follow.

    The gradient of the cross-entropy is 0 in float32 where a logit is far above the others, as in
    networks with large margins. That is a doubt only if nothing followed the margin.
    """
    plan = case.plan
    losses = {cross_entropy, *LOSSES[plan.loss][: plan.restarts]}
    losses |= {margin} if case.found.keys() - {"pgd"} else set()
    both: tuple[Loss, ...] = cross_entropy, margin
    found = {loss: _gradient(case, loss) for loss in both}
    none = {loss: one.flatten(1).abs().amax(1) < 1e-10 for loss, one in found.items()}
    without = torch.stack([none[loss] for loss in losses]).all(0)
    case.evidence["images_without_gradient"] = zero = float(without.float().mean())
    if zero > 0.05:
        saturated = bool((without & ~none[margin]).any())
        case.said.append(
            f"{100 * zero:.0f} % of the images have no gradient "
            + (
                "of the cross-entropy, which the attack follows, but the margin has one: attack "
                "with --loss margin, or with --loss alternate and two restarts"
                if saturated
                else "at all: it is masked"
            )
        )
    if not all(bool(found[loss].isfinite().all()) for loss in losses):
        case.said.append("gradients are not all numbers: the attack cannot follow them")


def _gradient(case: Case, loss: Loss) -> Tensor:
    attacked = case.on.images.detach().requires_grad_()
    with torch.enable_grad():
        total = loss(case.model(attacked), case.on.labels).sum()
        (gradient,) = torch.autograd.grad(total, attacked)
    return gradient


@torch.no_grad()
def _promise(case: Case) -> None:
    """Compare the margin's change along its gradient with the prediction, as a median ratio."""
    _, before, gradient = ascent(case.model, case.on.images, case.on.labels, margin)
    change = case.plan.radius / 10 * BALLS[case.plan.ball].ascend(gradient)
    promised = (gradient * change).flatten(1).sum(1)
    ratio = (margin(case.model(case.on.images + change), case.on.labels) - before) / promised
    ratio = ratio[(promised > 0) & promised.isfinite()].nan_to_num(0.0, 0.0, 0.0)
    case.evidence["promise_kept"] = kept = float(ratio.median()) if len(ratio) else 1.0
    if kept < 0.4:
        case.said.append(
            f"over a tenth of the radius the margin changes by {100 * kept:.0f} % of what "
            f"its gradient promises: the gradient is of something finer"
        )


LOOKS: tuple[Callable[[Case], None], ...] = (
    _deterministic, _more_iterations, _large_radii, _gradients, _promise, _rivals, _smallest,
)  # fmt: skip
"""Checks, in the order in which they run."""
