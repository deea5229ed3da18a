"""What to try against a network, and how to compute it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.cuda_graphs import Replay
from lipbound.modules import frozen
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.half_precision import Rough, faithful
from lipbound.robust.attacks.pgd import LOSSES, Found, Logits, perturbation_norms
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.attacks.recheck import tf32, verified

SLACK = {"float32": 0.0, "tf32": 0.0, "float16": 0.02, "bfloat16": 0.1}
"""Precision of the search → by how much a margin must exceed 0 to count as broken there.

Whatever the search computes in, what it found is looked at once more in float32.
"""
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LOOKED_AT = 64  # images by which half precision is judged


@dataclass(frozen=True)
class Plan:
    """What to try.

    Attributes:
        attacks: Names in ``ATTACKS``.
        ball: Of PGD, AutoAttack and the doubts.
        radius: Of that ball.
        step: Of PGD, as part of the radius.
        iterations: Of PGD.
        restarts: Of PGD.
        loss: Of PGD, a name in ``LOSSES``.
        decay: Whether PGD's steps shrink.
        radii: L2 radii at which Carlini & Wagner's perturbations count.
        searches: Of Carlini & Wagner's constant.
        search_steps: Steps for each.
        constant: Of Carlini & Wagner, to begin with; near 1 it needs fewer searches.
        batch: Images at a time.
        seed: Of everything random.
        precision: Of the searches: float32, tf32, float16 (as fine as tf32, and quicker) or
            bfloat16, which is too coarse for all but PGD: the others get tf32.
        compile: ``torch.compile`` the network for the searches.
        graphs: Replay the searches as CUDA graphs, on a GPU.

    Raises:
        ValueError: Naming what makes no sense.
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
            unknown = [name for name in names if name not in table]
            if unknown:
                raise ValueError(f"unknown {kind} {unknown[0]!r}; there are {', '.join(table)}")
        for name in ("iterations", "restarts", "searches", "search_steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name, radius in (
            ("radius", self.radius), ("step", self.step), ("constant", self.constant),
            *(("radii", r) for r in self.radii),
        ):  # fmt: skip
            if not 0 < radius < math.inf:
                raise ValueError(f"{name}={radius!r} must be positive")
        if self.ball == "linf" and self.radius > 1:
            raise ValueError(f"radius={self.radius:g} in linf exceeds all of [0, 1]; 0.0314 say")
        if "autoattack" in self.attacks and importlib.util.find_spec("pyautoattack") is None:
            raise ValueError("AutoAttack comes with: pip install 'lipbound[attacks]'")
        if {"cw", "cw-projected"} & set(self.attacks) and not self.radii:
            raise ValueError("Carlini & Wagner's attack needs radii, 0.6 say")

    @property
    def fine(self) -> str:
        """The precision of searches that look closely."""
        return "tf32" if self.precision == "bfloat16" else self.precision


@dataclass(frozen=True)
class Engine:
    """A network as the searches compute it.

    Attributes:
        model: In eval mode, its parameters without gradients.
        logits: The same, compiled if that is wanted.
        replay: For graphs, where there are any.
        plan: What to try.
    """

    model: nn.Module
    logits: Logits
    replay: Replay | None
    plan: Plan

    @contextmanager
    def at(self, precision: str) -> Iterator[Logits]:
        """The logits in a precision."""
        half = HALVES.get(precision)
        with tf32(precision == "tf32"):
            yield self.logits if half is None else Rough(self.logits, half)


@contextmanager
def engine(model: nn.Module, images: Tensor, plan: Plan) -> Iterator[Engine]:
    """The network made ready for a plan's searches on these images.

    Half precision is given up for tf32 where its gradients are not the network's.
    """
    logits: Logits = torch.compile(model, dynamic=False) if plan.compile else model
    replay = Replay() if plan.graphs and images.is_cuda else None
    before = torch.backends.cudnn.benchmark
    half = HALVES.get(plan.precision)
    with frozen(model):
        if half is not None and not faithful(model, images[:LOOKED_AT], half):
            plan = replace(plan, precision="tf32")
        with tuned(before or replay is not None):  # one shape, many times
            yield Engine(model, logits, replay, plan)


@contextmanager
def tuned(wanted: bool) -> Iterator[None]:
    """Whether cuDNN measures which of its algorithms is best for every new shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def strongest(on: Engine, images: Tensor, labels: Tensor, radius: float, **options: Any) -> Found:
    """The plan's PGD, at a radius, with some options changed."""
    plan = on.plan
    chosen: dict[str, Any] = {
        "ball": plan.ball,
        "loss": plan.loss,
        "decay": plan.decay,
        "seed": plan.seed,
    }
    chosen |= {"iterations": plan.iterations, "restarts": plan.restarts, **options}
    with on.at(plan.precision) as logits:
        return strongest_pgd(
            logits, images, labels, radius=radius, step=plan.step * radius,
            confidence=SLACK[plan.precision], width=plan.batch, replay=on.replay, **chosen,
        )  # fmt: skip


def _pgd(on: Engine, images: Tensor, labels: Tensor) -> Found:
    return strongest(on, images, labels, on.plan.radius)


def _projected(on: Engine, images: Tensor, labels: Tensor) -> Found:
    """For every radius anew: the smallest ball in which an image was broken counts."""
    found: Found | None = None
    for radius in sorted(on.plan.radii, reverse=True):
        new = strongest(on, images, labels, radius, ball="l2", loss="margin", decay=False)
        broken = verified(on.model, new.images, labels, on.plan.batch)
        found = new if found is None else Found(
            torch.where(broken.reshape(-1, 1, 1, 1), new.images, found.images),
            broken | found.broken,
            torch.where(broken, new.norms, found.norms),
            torch.where(broken, new.iteration, found.iteration),
        )  # fmt: skip
    assert found is not None
    return found


def _carlini_wagner(on: Engine, images: Tensor, labels: Tensor) -> Found:
    """Only of images that are classified rightly; the others' smallest perturbation is none."""
    plan = on.plan
    mistakes = verified(on.model, images, labels, plan.batch)
    none = torch.zeros(mistakes.shape).to(images)
    found = Found(images.clone(), mistakes, none, 0 * labels)

    def search(logits: Logits, who: Tensor, width: int = 0, replay: Replay | None = None) -> None:
        for part in who.split(plan.batch) if len(who) else ():
            some = part[torch.arange(max(width, len(part)), device=part.device) % len(part)]
            nearest = carlini_wagner(
                logits, images[some], labels[some], steps=plan.search_steps,
                searches=plan.searches, constant=plan.constant, replay=replay,
            )  # fmt: skip
            _put(found, part, nearest)

    # A graph has one shape, and what is compiled for one is not compiled for others.
    width = plan.batch if on.replay else min(plan.batch, len(images)) * plan.compile
    with on.at(plan.fine) as logits:
        search(logits, (~mistakes).nonzero()[:, 0], width, on.replay)
    found = pushed(on.model, images, labels, found, plan.batch)
    lost = _unconfirmed(on, found, labels)
    if not len(lost):
        return found
    search(on.model, lost)  # mistakes in the search's precision alone: the least robust of all
    return pushed(on.model, images, labels, found, plan.batch)


def _put(found: Found, who: Tensor, part: Found) -> None:
    """Write what was found for some images; more of it, a graph's width, is left out."""
    for whole, piece in zip(vars(found).values(), vars(part).values(), strict=True):
        whole[who] = piece[: len(who)]


def _unconfirmed(on: Engine, found: Found, labels: Tensor) -> Tensor:
    """Images that a search coarser than float32 took for broken, and float32 does not."""
    if on.plan.fine == "float32":
        return labels.new_zeros(0)
    again = found.broken & ~verified(on.model, found.images, labels, on.plan.batch)
    return again.nonzero()[:, 0]


def pushed(model: nn.Module, images: Tensor, labels: Tensor, found: Found, batch: int) -> Found:
    """Perturbations a little longer where float32 does not agree that they are long enough.

    The smallest ones end at the boundary itself, which another precision sees elsewhere.
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


def _autoattack(on: Engine, images: Tensor, labels: Tensor) -> Found:
    """It takes what is broken in its own precision for broken; float32 tries the others again.

    Its batches have every size: nothing is compiled or tuned for them.
    """
    plan, half = on.plan, HALVES.get(on.plan.fine)
    options: dict[str, Any] = {
        "radius": plan.radius, "ball": plan.ball, "seed": plan.seed, "batch": plan.batch,
    }  # fmt: skip
    with tuned(False):
        with tf32(plan.fine == "tf32"):
            model = on.model if half is None else Rough(on.model, half)
            found = autoattack(model, images, labels, **options)
        who = _unconfirmed(on, found, labels)
        if len(who):
            _put(found, who, autoattack(on.model, images[who], labels[who], **options))
    return found


Attack = Callable[[Engine, Tensor, Tensor], Found]

ATTACKS: dict[str, Attack] = {
    "pgd": _pgd,
    "cw": _carlini_wagner,
    "cw-projected": _projected,
    "autoattack": _autoattack,
}
"""Name → attack. ``cw`` minimizes the norm, ``cw-projected`` stays in each ball in turn."""
