"""What a network is worth under attack: accuracies with intervals, norms, and doubts.

``evaluate`` computes a record; it shows nothing. The doubts follow Carlini et al. (2019): signs
that an attack failed rather than that the network resisted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.certificates import certify
from lipbound.modes import in_eval
from lipbound.network import Audit
from lipbound.robust.attacks import (
    Found,
    autoattack,
    carlini_wagner,
    cross_entropy,
    perturbation_norms,
    pgd,
    random_search,
    strongest_pgd,
)

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
        radii: L2 radii at which Carlini & Wagner's perturbations count.
        searches: Of Carlini & Wagner's constant.
        search_steps: Steps for each.
        batch: Images at a time.
        seed: Of everything random.
    """

    attacks: tuple[str, ...] = ("pgd",)
    ball: str = "linf"
    radius: float = 8 / 255
    step: float = 0.2
    iterations: int = 200
    restarts: int = 10
    radii: tuple[float, ...] = (0.6, 0.8)
    searches: int = 9
    search_steps: int = 200
    batch: int = 500
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


Attack = Callable[[nn.Module, Tensor, Tensor, Plan], Found]


def _pgd(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> Found:
    return strongest_pgd(
        model, images, labels, radius=plan.radius, step=plan.step * plan.radius,
        iterations=plan.iterations, restarts=plan.restarts, ball=plan.ball, seed=plan.seed,
        **plan.options,
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
    unknown = [name for name in plan.attacks if name not in ATTACKS]
    if unknown:
        raise ValueError(f"unknown attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    logits = check(model, images, labels, plan.batch)
    right = logits.argmax(1) == labels
    record: dict[str, Any] = {"clean": accuracy(right)}
    found: dict[str, Found] = {}
    for name in plan.attacks:
        progress(name)
        found[name] = _batched(ATTACKS[name], model, images, labels, plan)
        record[name] = _reported(name, found[name], images, labels, model, plan)
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
            model, images, labels, plan, found.get("pgd"), logits, surrogate
        )
    return record


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
    name: str, found: Found, images: Tensor, labels: Tensor, model: nn.Module, plan: Plan
) -> dict[str, Any]:
    """Accuracies after the adversarial images were looked at once more, as float32."""
    broken = verified(model, found.images, labels, plan.batch)
    if name in ("cw", "cw-projected"):
        sizes = perturbation_norms(found.images, images, "l2")
        small = torch.where(broken, sizes, math.inf)
        result: dict[str, Any] = {
            f"{radius:g}": accuracy(small > radius * (1 + 1e-5)) for radius in sorted(plan.radii)
        }
        result["median_norm"] = float(small.median()) if name == "cw" else None
        return result
    sizes = perturbation_norms(found.images, images, plan.ball)
    inside = sizes <= plan.radius * (1 + 1e-5) + 1e-7
    in_range = ((found.images >= 0) & (found.images <= 1)).flatten(1).all(1)
    result = {**accuracy(~(broken & inside & in_range)), "radius": plan.radius, "ball": plan.ball}
    result["largest_perturbation"] = float(sizes.max())
    result["not_reproduced"] = int((found.broken & ~broken).sum())
    if name == "pgd":
        marks = sorted({0, *(m for m in (1, 2, 5, 10, 20, 50, 100, 200) if m <= plan.iterations)})
        result["against_iterations"] = {
            str(m): float(((found.iteration < 0) | (found.iteration > m)).float().mean())
            for m in marks
        }
    return result


@torch.no_grad()
def verified(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Whether images are misclassified in float32, without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        wrong = [model(x.float()).argmax(1) for x in images.split(batch)]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return torch.cat(wrong) != labels


def doubt(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    plan: Plan,
    found: Found | None,
    logits: Tensor,
    surrogate: nn.Module | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Signs that the attack failed rather than that the network resisted, on at most 200 images."""
    few = slice(0, 200)
    x, y = images[few], labels[few]
    said: list[str] = []
    step = plan.step * plan.radius

    def standing(attacked: Tensor) -> float:
        return 1 - float(verified(model, attacked, y, plan.batch).float().mean())

    def last(iterations: int, radius: float = plan.radius) -> float:
        options = {"radius": radius, "step": step * radius / plan.radius, "ball": plan.ball}
        return standing(pgd(model, x, y, iterations=iterations, **options))  # type: ignore[arg-type]

    clean = float((logits[few].argmax(1) == y).float().mean())
    error = math.sqrt(max(clean * (1 - clean), 0.25 / len(x)) / len(x))
    evidence: dict[str, Any] = {"images": len(x), "clean": clean}
    with torch.no_grad():
        again = model(x)
    same = torch.allclose(again.float(), logits[few], rtol=1e-3, atol=1e-4)
    evidence["deterministic"] = bool(same)
    if not same:
        said.append("the model answers the same images differently: average over its randomness")

    short, long = last(10), last(50)
    evidence["pgd_10"], evidence["pgd_50"] = short, long
    if long > short + error:
        said.append(f"more iterations help the defence: {short:.3f} after 10, {long:.3f} after 50")

    radii = [plan.radius * 2**k for k in range(0, 8)]
    curve = {f"{r:.4f}": last(20, r) for r in radii if r <= (1.0 if plan.ball == "linf" else 1e3)}
    evidence["against_radius"] = curve
    if min(curve.values()) > 0.1 * clean:
        said.append(f"accuracy stays at {min(curve.values()):.3f} however large the perturbation")

    attacked = x.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(cross_entropy(model(attacked), y).sum(), attacked)
    zero = float((gradient.flatten(1).abs().amax(1) == 0).float().mean())
    evidence["images_without_gradient"] = zero
    if zero > 0.05:
        said.append(f"{100 * zero:.0f} % of the images have no gradient at all: it is masked")

    options = {"radius": plan.radius, "ball": plan.ball, "seed": plan.seed}
    blind = standing(random_search(model, x, y, **options).images)  # type: ignore[arg-type]
    white = 1 - float(found.broken[few].float().mean()) if found is not None else min(short, long)
    evidence["random_search"], evidence["white_box"] = blind, white
    if blind < white - error:
        said.append(
            f"an attack without gradients does better ({blind:.3f}) than the one with ({white:.3f})"
        )
    if surrogate is not None:
        others = {"radius": plan.radius, "step": step, "iterations": 50, "ball": plan.ball}
        moved = standing(pgd(surrogate, x, y, **others))  # type: ignore[arg-type]
        evidence["transfer"] = moved
        if moved < white - error:
            said.append(
                f"images made for another network do better ({moved:.3f}) than those made "
                f"for this one ({white:.3f})"
            )
    return said, evidence


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
