"""What a network is worth under attack: accuracies with intervals, norms, and doubts.

``evaluate`` computes a record; it shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.modules import in_eval
from lipbound.network.certificates import certify
from lipbound.network.findings import Audit
from lipbound.network.jacobian import norms_by_rows
from lipbound.robust.attacks.doubts import doubt
from lipbound.robust.attacks.pgd import Found, perturbation_norms
from lipbound.robust.attacks.plan import ATTACKS, Engine, Plan, engine, strongest
from lipbound.robust.attacks.recheck import Examples, check, tf32, valid

CERTIFIED_RADII = tuple(r / 255 for r in (36, 72, 108, 255))


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
    """A share of images with its interval; which ones they are, in hexadecimal."""
    count, good = len(right), int(right.sum())
    bits = "".join("1" if one else "0" for one in right.tolist())
    return {
        "accuracy": good / count,
        "interval": interval(good, count),
        "images": count,
        "right": f"{int(bits, 2):0{-(-count // 4)}x}",
    }


def outcomes(found: dict[str, Any]) -> Tensor:
    """Image by image what :func:`accuracy` counted.

    Example:
        >>> outcomes(accuracy(torch.tensor([False, True, True])))
        tensor([False,  True,  True])
    """
    bits = f"{int(found['right'], 16):0{found['images']}b}"
    return torch.tensor([bit == "1" for bit in bits])


@tf32(False)
def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    plan: Plan | None = None,
    *,
    audit: Audit | None = None,
    jacobians: int = 0,
    curves: bool = True,
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
        curves: Whether to attack at other radii too, if PGD is in the plan, and with fewer steps,
            if Carlini & Wagner's attack is.
        doubts: Whether to look for signs of a weak attack.
        surrogate: Another network for the same images; its adversarial images should not break
            this one better than its own do.
        progress: Is told what is being done.

    Returns:
        A record: the ``precision`` that was searched in, ``clean``, every attack's ``accuracy`` and
        ``interval`` (PGD's also against the number of iterations, Carlini & Wagner's against
        that of steps), ``certified``,
        ``jacobian_norms``, ``doubts`` (sentences; empty is good) and what the doubts rest on.

    Raises:
        ValueError: If the inputs cannot be attacked: pixels outside [0, 1], labels out of range,
            logits that are no numbers, a model in training mode.
    """
    plan = plan or Plan()
    with engine(model, images, plan) as ready:
        record: dict[str, Any] = {"precision": ready.plan.precision}
        if ready.plan.precision != plan.precision:
            progress(
                f"{plan.precision} loses this network's gradients, so the attacks search in "
                f"{ready.plan.precision}"
            )
        logits = check(model, images, labels, plan.batch)
        right = logits.argmax(1) == labels
        examples = Examples(images, labels, ~right)
        record["clean"] = accuracy(right)
        found: dict[str, Found] = {}
        for name in dict.fromkeys(plan.attacks):
            progress(name)
            found[name] = ATTACKS[name](ready, images, labels)
            record[name] = _reported(name, found[name], ready, examples)
        if "pgd" in found and curves:
            progress("radii")
            record["against_radius"] = _against_radius(ready, examples)
        if "cw" in found and curves:
            progress("steps")
            record["against_steps"] = _against_steps(ready, examples, record["cw"])
        if audit is not None:
            record |= _certified(logits, right, audit, plan.batch)
        if jacobians:
            progress("jacobians")
            record["jacobian_norms"] = _quantiles(jacobian_norms(model, images[:jacobians]))
        if doubts:
            progress("doubts")
            with tf32(plan.precision != "float32"):
                said, record["evidence"] = doubt(model, examples, plan, found, surrogate)
            record["doubts"] = [*said, *_losses(found, record)]
        return record


def _certified(logits: Tensor, right: Tensor, audit: Audit, batch: int) -> dict[str, Any]:
    radii = torch.cat([certify(part, audit) for part in logits.split(batch)])
    shares = {f"{r:.4f}": accuracy(right & (radii > r)) for r in CERTIFIED_RADII}
    median = float(radii[right].median()) if right.any() else 0.0
    return {"certified": shares, "median_certified_radius": median}


def _quantiles(norms: Tensor) -> dict[str, Any]:
    return {
        "mean": float(norms.mean()),
        "quantiles": [float(q) for q in norms.quantile(norms.new_tensor(QUANTILES))],
        "levels": QUANTILES,
        "all": [round(float(n), 4) for n in norms],
    }


def _losses(found: dict[str, Found], record: dict[str, Any]) -> Iterator[str]:
    """Doubts about what the attacks themselves said."""
    for name, attack in found.items():
        lost = record[name]["not_reproduced"]
        if lost:
            yield (
                f"{lost} images broken by {name} were classified correctly when re-checked in "
                f"float32"
            )
        if name == "cw" and not bool(attack.broken.all()):
            yield (
                f"Carlini & Wagner found no perturbation at all for "
                f"{int((~attack.broken).sum())} images: give it more search_steps or searches"
            )


SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the radius, for a curve


def _against_radius(on: Engine, examples: Examples) -> dict[str, Any]:
    """PGD with one restart and at most 50 iterations: radius → accuracy."""
    few = {"iterations": min(on.plan.iterations, 50), "restarts": 1, "loss": "cross-entropy"}
    curve = {}
    for radius in (share * on.plan.radius for share in SHARES):
        if on.plan.ball == "linf" and radius > 1:
            continue
        found = strongest(on, examples.images, examples.labels, radius, **few)
        broken = valid(on.model, found, examples, on.plan.ball, radius, on.plan.batch)
        curve[f"{radius:.6g}"] = accuracy(~broken)
    return curve


STEPS = (3, 10, 30)  # of Carlini & Wagner's searches, for a curve


def _against_steps(
    on: Engine, examples: Examples, whole: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Carlini & Wagner's attack: steps of a search → radius → accuracy."""
    curve = {}
    for steps in (few for few in STEPS if few < on.plan.search_steps):
        fewer = replace(on, plan=replace(on.plan, search_steps=steps))
        found = ATTACKS["cw"](fewer, examples.images, examples.labels)
        curve[steps] = _reported("cw", found, fewer, examples)
    curve[on.plan.search_steps] = whole
    radii = [f"{radius:g}" for radius in sorted(on.plan.radii)]
    return {str(m): {r: found[r]["accuracy"] for r in radii} for m, found in curve.items()}


QUANTILES = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]


def _reported(name: str, found: Found, on: Engine, examples: Examples) -> dict[str, Any]:
    """Accuracies after the adversarial images were looked at once more."""
    plan, mistakes = on.plan, examples.mistakes
    bounded = name not in ("cw", "cw-projected")
    ball, radius = (plan.ball, plan.radius) if bounded else ("l2", math.inf)
    broken = valid(on.model, found, examples, ball, radius, plan.batch)
    result: dict[str, Any] = {"not_reproduced": int((found.broken & ~broken).sum())}
    if not bounded:
        sizes = torch.where(mistakes, 0.0, perturbation_norms(found.images, examples.images, "l2"))
        sizes = torch.where(broken, sizes, math.inf)
        for radius in sorted(plan.radii):
            result[f"{radius:g}"] = accuracy(sizes > radius * (1 + 1e-5))
        middle = float(sizes.median())
        result["median_norm"] = middle if name == "cw" and math.isfinite(middle) else None
        return result
    result |= {**accuracy(~broken), "radius": plan.radius, "ball": plan.ball}
    result["largest_perturbation"] = float(
        perturbation_norms(found.images, examples.images, ball).max()
    )
    if name == "pgd":  # of the first restart
        marks = [m for m in (0, 1, 2, 5, 10, 20, 50, 100, 200) if m < plan.iterations]
        for m in (*marks, plan.iterations):
            standing = ~mistakes & ((found.iteration < 0) | (found.iteration > m))
            share = int(standing.sum()) / len(standing)
            result.setdefault("against_iterations", {})[str(m)] = share
    return result


def jacobian_norms(model: nn.Module, images: Tensor, batch: int = 50) -> Tensor:
    """The spectral norm of the logits' Jacobian at every image, exactly: one row per class."""
    with in_eval(model):
        return torch.cat([norms_by_rows(model, part) for part in images.split(batch)])


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
