"""What a network is worth under attack: accuracies with intervals, norms, and doubts.

``evaluate`` computes a record; it shows nothing. The doubts follow Carlini et al. (2019): signs
that an attack failed rather than that the network resisted.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.certificates import certify
from lipbound.modes import in_eval
from lipbound.network import Audit
from lipbound.robust.attacks import (
    LOSSES,
    Found,
    ascent,
    autoattack,
    cross_entropy,
    margin,
    perturbation_norms,
    pgd,
    random_search,
)
from lipbound.robust.balls import BALLS
from lipbound.robust.freeze import frozen
from lipbound.robust.smallest import carlini_wagner
from lipbound.robust.strongest import strongest_pgd

CERTIFIED_RADII = tuple(r / 255 for r in (36, 72, 108, 255))


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
        batch: Images at a time.
        seed: Of everything random.

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
    batch: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for kind, names, table in (
            ("attack", self.attacks, ATTACKS), ("ball", (self.ball,), BALLS),
            ("loss", (self.loss,), LOSSES),
        ):  # fmt: skip
            unknown = [name for name in names if name not in table]
            if unknown:
                raise ValueError(f"unknown {kind} {unknown[0]!r}; there are {', '.join(table)}")
        for name in ("iterations", "restarts", "searches", "search_steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name, radius in (("radius", self.radius), *(("radii", r) for r in self.radii)):
            if not 0 < radius < math.inf:
                raise ValueError(f"{name}={radius!r} must be positive")
        if self.ball == "linf" and self.radius > 1:
            raise ValueError(f"radius={self.radius:g} in linf exceeds all of [0, 1]; 8/255 say")
        if "autoattack" in self.attacks and importlib.util.find_spec("pyautoattack") is None:
            raise ValueError("AutoAttack comes with: pip install 'lipbound[attacks]'")
        if {"cw", "cw-projected"} & set(self.attacks) and not self.radii:
            raise ValueError("Carlini & Wagner's attack needs radii, 0.6 say")


Attack = Callable[[nn.Module, Tensor, Tensor, Plan], Found]


def _pgd(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    return strongest_pgd(
        model, images, labels, radius=plan.radius, step=plan.step * plan.radius,
        iterations=plan.iterations, restarts=plan.restarts, ball=plan.ball, seed=plan.seed,
        loss=plan.loss, decay=plan.decay,
    )  # fmt: skip


def _projected(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    """For every radius anew: the smallest ball in which an image was broken counts."""
    found: Found | None = None
    for radius in sorted(plan.radii, reverse=True):
        new = strongest_pgd(
            model, images, labels, radius=radius, step=plan.step * radius,
            iterations=plan.iterations, restarts=plan.restarts, ball="l2", loss="margin",
            seed=plan.seed,
        )  # fmt: skip
        keep = new.broken.reshape(-1, 1, 1, 1)
        found = new if found is None else Found(
            torch.where(keep, new.images, found.images),
            new.broken | found.broken,
            torch.where(new.broken, new.norms, found.norms),
            torch.where(new.broken, new.iteration, found.iteration),
        )  # fmt: skip
    assert found is not None
    return found


def _carlini_wagner(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    steps, searches = plan.search_steps, plan.searches
    return carlini_wagner(model, images, labels, steps=steps, searches=searches)


def _autoattack(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    return autoattack(
        model, images, labels, radius=plan.radius, ball=plan.ball, seed=plan.seed, batch=plan.batch
    )


ATTACKS: dict[str, Attack] = {
    "pgd": _pgd,
    "cw": _carlini_wagner,
    "cw-projected": _projected,
    "autoattack": _autoattack,
}
"""Name → attack. ``cw`` minimizes the norm, ``cw-projected`` stays in each ball in turn."""


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    Example:
        >>> [round(end, 3) for end in interval(50, 100)]
        [0.404, 0.596]
    """
    z, share = 1.959964, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    width = (
        z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    )
    return max(0.0, middle - width), min(1.0, middle + width)


def accuracy(right: Tensor) -> dict[str, Any]:
    """A share of images with its interval."""
    count, good = len(right), int(right.sum())
    return {"accuracy": good / count, "interval": interval(good, count), "images": count}


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Without TF32: what breaks an image only in its rounding would not be reproduced."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@_exact_float32()
def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    plan: Plan | None = None,
    *,
    audit: Audit | None = None,
    jacobians: int = 0,
    doubts: bool = True,
    surrogate: nn.Module | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack a classifier.

    Args:
        model: In eval mode; pixels in [0, 1] to logits.
        images: ``(count, channels, height, width)`` on the model's device.
        labels: ``(count,)``.
        plan: What to try.
        audit: Of the model, for certified accuracies.
        jacobians: At how many images to measure the Jacobian's norm.
        doubts: Whether to look for signs of a weak attack.
        surrogate: Another network for the same images; its adversarial images should not break
            this one better than its own do.
        progress: Is told what is being done.

    Returns:
        A record: ``clean``, every attack's ``accuracy`` and ``interval`` (PGD also against the
        number of iterations), ``certified``, ``jacobian_norms``, ``doubts`` (sentences; empty is
        good) and what the doubts rest on.

    Raises:
        ValueError: If the inputs cannot be attacked: pixels outside [0, 1], labels out of range,
            logits that are no numbers, a model in training mode.
    """
    plan = plan or Plan()
    with frozen(model):
        logits = check(model, images, labels, plan.batch)
        right = logits.argmax(1) == labels
        record: dict[str, Any] = {"clean": accuracy(right)}
        found: dict[str, Found] = {}
        for name in dict.fromkeys(plan.attacks):
            progress(name)
            found[name] = _batched(ATTACKS[name], model, images, labels, plan)
            record[name] = _reported(name, found[name], images, labels, ~right, model, plan)
        if "pgd" in found:
            progress("radii")
            record["against_radius"] = {
                f"{r:.6g}": accuracy(~_broken_at(model, images, labels, ~right, plan, r))
                for r in (share * plan.radius for share in SHARES)
                if plan.ball != "linf" or r <= 1
            }
        if audit is not None:
            radii = torch.cat([certify(part, audit) for part in logits.split(plan.batch)])
            record["certified"] = {
                f"{radius:.4f}": accuracy(right & (radii > radius)) for radius in CERTIFIED_RADII
            }
            record["median_certified_radius"] = float(radii[right].median()) if right.any() else 0.0
        if jacobians:
            progress("jacobians")
            norms = jacobian_norms(model, images[:jacobians])
            record["jacobian_norms"] = {
                "mean": float(norms.mean()),
                "quantiles": [float(q) for q in norms.quantile(norms.new_tensor(QUANTILES))],
                "levels": QUANTILES,
                "all": [round(float(n), 4) for n in norms],
            }
        if doubts:
            progress("doubts")
            record["doubts"], record["evidence"] = doubt(
                model, images, labels, ~right, plan, found, surrogate
            )
            for name, attack in found.items():
                lost = record[name]["not_reproduced"]
                if lost:
                    record["doubts"].append(f"{lost} images {name} broke stand on a second look")
                if name == "cw" and not bool(attack.broken.all()):
                    record["doubts"].append(
                        f"Carlini & Wagner found nothing at all for {int((~attack.broken).sum())} "
                        f"images: give it more search_steps or searches"
                    )
        return record


SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the radius, for a curve


def _broken_at(
    model: nn.Module, images: Tensor, labels: Tensor, mistakes: Tensor, plan: Plan, radius: float
) -> Tensor:
    """By PGD with one restart and at most 50 iterations, at another radius."""
    few = replace(
        plan, radius=radius, iterations=min(plan.iterations, 50), restarts=1, loss="cross-entropy"
    )
    found = _batched(_pgd, model, images, labels, few)
    return _valid(found, images, labels, mistakes, model, few.ball, radius, plan.batch)


def _valid(
    found: Found, images: Tensor, labels: Tensor, mistakes: Tensor, model: nn.Module, ball: str,
    radius: float, batch: int,
) -> Tensor:  # fmt: skip
    """Whether each image is broken: a mistake as it is, or by a valid perturbation, again."""
    sizes = perturbation_norms(found.images, images, ball)
    inside = sizes <= radius * (1 + 1e-5) + 1e-7
    in_range = ((found.images >= 0) & (found.images <= 1)).flatten(1).all(1)
    broken = verified(model, found.images, labels, batch) & inside & in_range
    return broken | mistakes


QUANTILES = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]


def check(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> Tensor:
    """The logits, or what is wrong with the inputs."""
    if any(m.training for m in model.modules()):
        raise ValueError("the model is in training mode; call model.eval() first")
    if images.ndim != 4 or len(images) != len(labels) or len(images) == 0:
        raise ValueError(
            f"images {tuple(images.shape)} and labels {tuple(labels.shape)} do not fit; pass "
            f"(count, channels, height, width) and (count,)"
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"pixels lie in [{low:.3g}, {high:.3g}], not in [0, 1]; put the normalization inside "
            f"the model"
        )
    with torch.no_grad():
        logits = torch.cat([model(part).float() for part in images.split(batch)])
    if logits.ndim != 2:
        raise ValueError(f"the model gives {tuple(logits.shape)}, not (count, classes)")
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the logits are not all finite numbers")
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise ValueError(
            f"labels lie in [{int(labels.min())}, {int(labels.max())}], but there are "
            f"{logits.shape[1]} classes"
        )
    return logits


def _batched(attack: Attack, model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    parts = [
        attack(model, images[i : i + plan.batch], labels[i : i + plan.batch], plan)
        for i in range(0, len(images), plan.batch)
    ]
    return Found(*(torch.cat([getattr(p, name) for p in parts]) for name in vars(parts[0])))


def _reported(
    name: str, found: Found, images: Tensor, labels: Tensor, mistakes: Tensor, model: nn.Module,
    plan: Plan,
) -> dict[str, Any]:  # fmt: skip
    """Accuracies after the adversarial images were looked at once more."""
    bounded = name not in ("cw", "cw-projected")
    ball, radius = (plan.ball, plan.radius) if bounded else ("l2", math.inf)
    broken = _valid(found, images, labels, mistakes, model, ball, radius, plan.batch)
    result: dict[str, Any] = {"not_reproduced": int((found.broken & ~broken).sum())}
    if not bounded:
        sizes = torch.where(mistakes, 0.0, perturbation_norms(found.images, images, "l2"))
        sizes = torch.where(broken, sizes, math.inf)
        for radius in sorted(plan.radii):
            result[f"{radius:g}"] = accuracy(sizes > radius * (1 + 1e-5))
        middle = float(sizes.median())
        result["median_norm"] = middle if name == "cw" and math.isfinite(middle) else None
        return result
    result |= {**accuracy(~broken), "radius": plan.radius, "ball": plan.ball}
    result["largest_perturbation"] = float(perturbation_norms(found.images, images, ball).max())
    if name == "pgd":  # of the first restart
        marks = [m for m in (0, 1, 2, 5, 10, 20, 50, 100, 200) if m < plan.iterations]
        result["against_iterations"] = {
            str(m): float(((found.iteration < 0) | (found.iteration > m)).float().mean())
            for m in (*marks, plan.iterations)
        }
    return result


@_exact_float32()
@torch.no_grad()
def verified(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Whether images are misclassified, in float32 without TF32; NaN is no answer."""
    logits = torch.cat([model(x.float()).float() for x in images.split(batch)])
    return (logits.argmax(1) != labels) & logits.isfinite().all(1)


def better(one: Tensor, other: Tensor) -> bool:
    """Whether the first attack breaks more of the same images, beyond chance (one-sided 5 %)."""
    only, others = int((one & ~other).sum()), int((other & ~one).sum())
    return only - others > max(1.0, 1.645 * math.sqrt(only + others))


def doubt(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    mistakes: Tensor,
    plan: Plan,
    found: dict[str, Found],
    surrogate: nn.Module | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Signs that the attack failed rather than that the network resisted, on at most 200 images."""
    few = slice(0, 200)
    x, y = images[few], labels[few]
    said: list[str] = []
    clean = mistakes[few]

    def share(broken: Tensor) -> float:
        return 1 - float(broken.float().mean())

    def last(iterations: int, radius: float = plan.radius, network: nn.Module = model) -> Tensor:
        attacked = pgd(
            network, x, y, radius=radius, step=plan.step * radius, iterations=iterations,
            ball=plan.ball,
        )  # fmt: skip
        return verified(model, attacked, y, plan.batch) | clean

    evidence: dict[str, Any] = {"images": len(x), "clean": share(clean)}
    with torch.no_grad():
        same = torch.allclose(model(x), model(x), rtol=1e-4, atol=1e-5)
    evidence["deterministic"] = bool(same)
    if not same:
        said.append("the model answers the same images differently: average over its randomness")

    short, long = last(10), last(50)
    evidence["pgd_10"], evidence["pgd_50"] = share(short), share(long)
    if better(short, long):
        said.append(
            f"more iterations help the defence: {share(short):.3f} after 10, "
            f"{share(long):.3f} after 50"
        )

    white = long
    for name in ("pgd", "autoattack"):
        if name in found:
            kept = Found(*(getattr(found[name], f)[few] for f in vars(found[name])))
            white = white | _valid(kept, x, y, clean, model, plan.ball, plan.radius, plan.batch)
    evidence["white_box"] = share(white)
    longer = last(250)
    evidence["pgd_250"] = share(longer)
    if better(longer, white):
        said.append(f"the attack had not converged: {share(longer):.3f} after 250 iterations")

    limit = 1.0 if plan.ball == "linf" else math.sqrt(x[0].numel())
    curve = {f"{r:.4f}": share(last(20, r)) for r in (plan.radius, limit / 4, limit / 2, limit)}
    evidence["against_radius"] = curve
    if min(curve.values()) > max(0.1 * evidence["clean"], 1.5 / len(x)):
        said.append(f"accuracy stays at {min(curve.values()):.3f} however large the perturbation")

    attacked = x.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(cross_entropy(model(attacked), y).sum(), attacked)
    sizes = gradient.flatten(1).abs().amax(1)
    evidence["images_without_gradient"] = zero = float((sizes < 1e-10).float().mean())
    if zero > 0.05:
        said.append(f"{100 * zero:.0f} % of the images have no gradient at all: it is masked")
    if not bool(gradient.isfinite().all()):
        said.append("gradients are not all numbers: the attack cannot follow them")

    evidence["promise_kept"] = kept_promise = _promise(model, x, y, plan)
    if kept_promise < 0.4:
        said.append(
            f"over a tenth of the radius the margin changes by {100 * kept_promise:.0f} % of what "
            f"its gradient promises: the gradient is of something finer"
        )

    budget = {"radius": plan.radius, "ball": plan.ball, "seed": plan.seed}
    blind = random_search(model, x, y, **budget)  # type: ignore[arg-type]
    margins = strongest_pgd(
        model, x, y, step=plan.step * plan.radius, iterations=50, loss="margin", **budget,  # type: ignore[arg-type]
    )  # fmt: skip
    rivals = {
        name: (text, verified(model, attempt.images, y, plan.batch) | clean)
        for name, text, attempt in (
            ("random_search", "an attack without gradients does better", blind),
            ("margin", "the margin's gradient does better", margins),
        )
    }
    if surrogate is not None:
        moved = last(50, network=surrogate)
        rivals["transfer"] = ("images made for another network do better", moved)
    for name, (text, broken) in rivals.items():
        evidence[name] = share(broken)
        if better(broken, white):
            said.append(f"{text} ({share(broken):.3f}) than the attack itself ({share(white):.3f})")
    return said, evidence


@torch.no_grad()
def _promise(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> float:
    """The margin's change along its gradient, as part of what the gradient says; the median."""
    _, before, gradient = ascent(model, images, labels, margin)
    change = plan.radius / 10 * BALLS[plan.ball].ascend(gradient)
    promised = (gradient * change).flatten(1).sum(1)
    kept = (margin(model(images + change), labels) - before) / promised
    return float(kept.nan_to_num(0.0, 0.0, 0.0).median())


def jacobian_norms(model: nn.Module, images: Tensor, batch: int = 50) -> Tensor:
    """The spectral norm of the logits' Jacobian at every image, exactly: one row per class."""
    norms = []
    with in_eval(model):
        for part in images.split(batch):
            x = part.detach().requires_grad_()
            with torch.enable_grad():
                logits = model(x)
                rows = [
                    torch.autograd.grad(logits[:, k].sum(), x, retain_graph=True)[0].flatten(1)
                    for k in range(logits.shape[1])
                ]
            norms.append(torch.linalg.matrix_norm(torch.stack(rows, 1).double(), 2))
    return torch.cat(norms)


def paired(one: Sequence[bool] | Tensor, other: Sequence[bool] | Tensor) -> dict[str, float]:
    """The difference of two accuracies on the same images, with its 95 % interval.

    Example:
        >>> paired([True, True, False, True], [True, False, False, True])["difference"]
        0.25
    """
    gap = torch.as_tensor(one).double() - torch.as_tensor(other).double()
    error = float(gap.std(correction=1)) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
    middle = float(gap.mean())
    return {"difference": middle, "low": middle - 1.96 * error, "high": middle + 1.96 * error}
