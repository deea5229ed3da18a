"""Attack plans: which attacks to run against a network, and how to compute them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.cuda_graphs import Replay
from lipbound.modules import frozen
from lipbound.registry import unknown
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.half_precision import Rough, faithful, lost
from lipbound.robust.attacks.pgd import LOSSES, Found, Logits, perturbation_norms
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.attacks.recheck import tf32, verified
from lipbound.runtime import Progress, silent

SLACK = {"float32": 0.0, "tf32": 0.0, "float16": 0.02, "bfloat16": 0.1}
"""Precision of the search → margin above which an image counts as broken in that precision.

All adversarial images are checked again in float32, whatever the precision of the search.
"""
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LOOKED_AT = 64  # number of images on which half precision is tested


@dataclass(frozen=True)
class Plan:
    """An attack plan: which attacks to run, and with which budget.

    Attributes:
        attacks: Names of attacks in ``ATTACKS``.
        ball: Norm ball of PGD, AutoAttack and the doubts, a name in ``BALLS``.
        radius: Radius of that ball.
        step: Step length of PGD, as a fraction of the radius.
        iterations: Number of PGD iterations.
        restarts: Number of PGD restarts.
        loss: Loss that PGD maximizes, a name in ``LOSSES``.
        decay: Whether the steps of PGD shrink.
        radii: L2 radii at which to report the accuracy under the attacks in ``SMALLEST``.
        searches: Number of values of Carlini & Wagner's constant to try.
        search_steps: Number of steps for each value of the constant.
        constant: First value of Carlini & Wagner's constant. A value near 1 needs fewer searches.
        batch: Number of images attacked at a time.
        seed: Seed for all random numbers.
        precision: Precision of the searches: float32, tf32, float16 (as accurate as tf32, and
            faster) or bfloat16, which only PGD uses; the other attacks then use tf32.
        compile: Whether to ``torch.compile`` the network for the searches.
        graphs: Whether to replay the searches as CUDA graphs on a GPU.

        Raises:
            ValueError: If a value is out of range or a name is unknown.
    """

    attacks: tuple[str, ...] = ("pgd",)
    ball: str = "linf"
    radius: float = 8 / 255
    step: float = 0.2
    iterations: int = 200
    restarts: int = 10
    loss: str = "alternate"
    decay: bool = False
    radii: tuple[float, ...] = (0.6, 0.8)
    searches: int = 9
    search_steps: int = 200
    constant: float = 1e-3
    batch: int = 500
    seed: int = 0
    precision: str = "float32"
    compile: bool = False
    graphs: bool = True

    def __post_init__(self) -> None:
        for kind, names, table in (
            ("attack", self.attacks, ATTACKS), ("ball", (self.ball,), BALLS),
            ("loss", (self.loss,), LOSSES), ("precision", (self.precision,), SLACK),
        ):  # fmt: skip
            for name in names:
                if name not in table:
                    raise unknown(kind, name, table)
        for name in ("iterations", "restarts", "searches", "search_steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name, radius in (
            ("radius", self.radius), ("step", self.step), ("constant", self.constant),
            *(("radii", r) for r in self.radii),
        ):  # fmt: skip
            if not 0 < radius < math.inf:
                raise ValueError(f"{name}={radius!r} must be positive and finite")
        if self.ball == "linf" and self.radius > 1:
            raise ValueError(f"radius={self.radius:g} in linf exceeds the range [0, 1]; try 0.0314")
        outside = [name for name in self.attacks if name in NEEDS_PACKAGE]
        if outside and importlib.util.find_spec("pyautoattack") is None:
            raise ValueError(f"attack {outside[0]!r} requires: pip install 'lipbound[attacks]'")
        smallest = [name for name in self.attacks if name in SMALLEST]
        if smallest and not self.radii:
            raise ValueError(f"radii=() is empty; attack {smallest[0]!r} needs one, such as 0.6")

    @property
    def fine(self) -> str:
        """The precision of attacks that need more digits than bfloat16 has."""
        return "tf32" if self.precision == "bfloat16" else self.precision


@dataclass(frozen=True)
class Engine:
    """A network prepared for the searches.

    Attributes:
        model: The network, in eval mode and with frozen parameters.
        logits: The same network, compiled if the plan says so.
        replay: Replays CUDA graphs; ``None`` without graphs.
        plan: The attack plan.
        progress: Shows the progress.
    """

    model: nn.Module
    logits: Logits
    replay: Replay | None
    plan: Plan
    progress: Progress = silent

    @contextmanager
    def at(self, precision: str) -> Iterator[Logits]:
        """Yield the network in the given precision."""
        half = HALVES.get(precision)
        with tf32(precision == "tf32"):
            yield self.logits if half is None else Rough(self.logits, half)


@contextmanager
def engine(
    model: nn.Module, images: Tensor, plan: Plan, progress: Progress = silent
) -> Iterator[Engine]:
    """Prepare the network for a plan's searches on these images.

    tf32 replaces half precision if the network's gradients are wrong in half precision.
    """
    logits: Logits = torch.compile(model, dynamic=False) if plan.compile else model
    replay = Replay() if plan.graphs and images.is_cuda else None
    before = torch.backends.cudnn.benchmark
    half = HALVES.get(plan.precision)
    with frozen(model):
        if half is not None and not faithful(model, images[:LOOKED_AT], half):
            plan = replace(plan, precision="tf32")
        with tuned(before or replay is not None):  # the same shape many times
            yield Engine(model, logits, replay, plan, progress)


@contextmanager
def tuned(wanted: bool) -> Iterator[None]:
    """Set whether cuDNN measures which of its algorithms is fastest for every new shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def strongest(on: Engine, images: Tensor, labels: Tensor, radius: float, **options: Any) -> Found:
    """Run the plan's PGD at the given radius, with some options changed.

    It is repeated in float32 on the images that :func:`_undecided` returns.
    """
    plan = on.plan
    chosen: dict[str, Any] = {
        "radius": radius, "step": plan.step * radius, "ball": plan.ball, "loss": plan.loss,
        "decay": plan.decay, "seed": plan.seed, "iterations": plan.iterations,
        "restarts": plan.restarts, "progress": on.progress, **options,
    }  # fmt: skip
    with on.at(plan.precision) as logits:
        found = strongest_pgd(
            logits, images, labels, confidence=SLACK[plan.precision], width=plan.batch,
            replay=on.replay, **chosen,
        )  # fmt: skip
    who = _undecided(on, found, images, labels, plan.precision)
    if len(who):
        again = strongest_pgd(on.model, images[who], labels[who], width=plan.batch, **chosen)
        _put(found, who, again)
    return found


Attack = Callable[[Engine, Tensor, Tensor], Found]
InBall = Callable[[Engine, Tensor, Tensor, float], Found]


def _mistakes(on: Engine, images: Tensor, labels: Tensor) -> Found:
    """Return the images as they are; those that are misclassified need no perturbation."""
    wrong = verified(on.model, images, labels, on.plan.batch)
    return Found(images.clone(), wrong, torch.zeros(wrong.shape).to(images), 0 * labels)


def _smallest_ball(on: Engine, images: Tensor, labels: Tensor, attack: InBall) -> Found:
    """Attack at every radius, from the smallest up, what no smaller ball broke."""
    found = _mistakes(on, images, labels)
    for radius in sorted(on.plan.radii):
        left = (~found.broken).nonzero()[:, 0]
        if not len(left):
            break
        new = attack(on, images[left], labels[left], radius)
        broken = verified(on.model, new.images, labels[left], on.plan.batch)
        _put(found, left, replace(new, broken=broken))
    return found


def _projected(on: Engine, images: Tensor, labels: Tensor, radius: float) -> Found:
    return strongest(on, images, labels, radius, ball="l2", loss="margin", decay=False)


def _apgd(on: Engine, images: Tensor, labels: Tensor, radius: float) -> Found:
    return _autoattack(on, images, labels, radius=radius, ball="l2", attacks=["apgd-ce", "apgd-t"])


def _carlini_wagner(on: Engine, images: Tensor, labels: Tensor) -> Found:
    """Attack the correctly classified images; the others need no perturbation."""
    plan = on.plan
    found = _mistakes(on, images, labels)

    def search(logits: Logits, who: Tensor, width: int = 0, replay: Replay | None = None) -> None:
        for part in on.progress(who.split(plan.batch) if len(who) else (), "C&W batches"):
            some = part[torch.arange(max(width, len(part)), device=part.device) % len(part)]
            nearest = carlini_wagner(
                logits, images[some], labels[some], steps=plan.search_steps,
                searches=plan.searches, constant=plan.constant, replay=replay,
                progress=on.progress,
            )  # fmt: skip
            _put(found, part, nearest)

    # CUDA graphs and compiled networks need batches of one shape.
    width = plan.batch if on.replay else min(plan.batch, len(images)) * plan.compile
    with on.at(plan.fine) as logits:
        search(logits, (~found.broken).nonzero()[:, 0], width, on.replay)
    found = pushed(on.model, images, labels, found, plan.batch)
    who = _undecided(on, found, images, labels, plan.fine)
    if not len(who):
        return found
    search(on.model, who)
    return pushed(on.model, images, labels, found, plan.batch)


def _put(found: Found, who: Tensor, part: Found) -> None:
    """Write the results of some images; rows that only fill up the graph's width are dropped."""
    for whole, piece in zip(vars(found).values(), vars(part).values(), strict=True):
        whole[who] = piece[: len(who)]


def _undecided(on: Engine, found: Found, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    """Return the images that stand in float32, but of which the search in ``precision`` failed.

    It claimed to have broken them, or its logits or gradients were not finite numbers.
    """
    if precision == "float32":
        return labels.new_zeros(0)
    stands, half = ~verified(on.model, found.images, labels, on.plan.batch), HALVES.get(precision)
    failed = stands & found.broken
    if half is not None:
        for pixels in (images, found.images):
            who = (stands & ~failed).nonzero()[:, 0]
            if len(who):
                failed[who] = lost(on.model, pixels[who], labels[who], half, on.plan.batch)
    return failed.nonzero()[:, 0]


def pushed(model: nn.Module, images: Tensor, labels: Tensor, found: Found, batch: int) -> Found:
    """Lengthen perturbations slightly where the image is not broken in float32.

    The smallest perturbations end at the decision boundary, which moves with the precision.
    """
    kept = found.images
    for factor in (1.002, 1.005, 1.01, 1.02, 1.05):
        short = found.broken & ~verified(model, kept, labels, batch)
        if not bool(short.any()):
            break
        longer = (images + factor * (found.images - images)).clamp(0, 1)
        kept = torch.where(short.reshape(-1, 1, 1, 1), longer, kept)
    norms = torch.where(found.broken, perturbation_norms(kept, images, "l2"), torch.inf)
    return replace(found, images=kept, norms=norms)


def _autoattack(on: Engine, images: Tensor, labels: Tensor, **changes: Any) -> Found:
    """Run AutoAttack, and repeat it in float32 on the images that are :func:`_undecided`."""
    plan, half = on.plan, HALVES.get(on.plan.fine)
    options: dict[str, Any] = {
        "radius": plan.radius, "ball": plan.ball, "seed": plan.seed, "batch": plan.batch, **changes,
    }  # fmt: skip
    with tuned(False):  # its batches differ in size
        with tf32(plan.fine == "tf32"):
            model = on.model if half is None else Rough(on.model, half)
            for _ in on.progress([None], "AutoAttack"):
                found = autoattack(model, images, labels, **options)
        who = _undecided(on, found, images, labels, plan.fine)
        if len(who):
            _put(found, who, autoattack(on.model, images[who], labels[who], **options))
    return found


ATTACKS: dict[str, Attack] = {
    "pgd": lambda on, images, labels: strongest(on, images, labels, on.plan.radius),
    "autoattack": _autoattack,
    "cw": _carlini_wagner,
    "cw-projected": partial(_smallest_ball, attack=_projected),
    "apgd-l2": partial(_smallest_ball, attack=_apgd),
}
"""Name → attack. ``cw`` minimizes the norm; ``cw-projected`` runs PGD in each L2 ball of the plan's
``radii``, and ``apgd-l2`` runs APGD there, on the cross-entropy and on each target."""
NEEDS_PACKAGE = ("autoattack", "apgd-l2")
SMALLEST = ("cw", "cw-projected", "apgd-l2")  # report the accuracy at each L2 radius
