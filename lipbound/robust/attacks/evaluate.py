"""Evaluate a network under attack: accuracies with intervals, norms, and doubts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.modules import in_eval
from lipbound.network.accuracy import certified_accuracy
from lipbound.network.findings import Audit
from lipbound.network.jacobian import norms_by_rows
from lipbound.results import digits, finite, key
from lipbound.robust.attacks.doubts import doubt
from lipbound.robust.attacks.evaluation import Evaluation, in_balls
from lipbound.robust.attacks.pgd import Found, ascent, margin, perturbation_norms
from lipbound.robust.attacks.plan import ATTACKS, SMALLEST, Engine, Plan, engine, strongest
from lipbound.robust.attacks.recheck import Examples, check, tf32, valid
from lipbound.runtime import Progress, silent

CERTIFIED_RADII = tuple(r / 255 for r in (36, 72, 108, 255))


def interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a proportion.

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
    """Return an accuracy with its interval, and each image's outcome as bits in hexadecimal."""
    count, good = len(right), int(right.sum())
    bits = "".join("1" if one else "0" for one in right.tolist())
    return {
        "accuracy": good / count,
        "interval": list(interval(good, count)),
        "images": count,
        "right": f"{int(bits, 2):0{-(-count // 4)}x}",
    }


def outcomes(found: dict[str, Any]) -> Tensor:
    """Return the outcome of each image from a record of :func:`accuracy`.

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
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> Evaluation:
    """Attack a classifier and return a record of its accuracies.

    Args:
        model: Network in eval mode, from pixels in [0, 1] to logits.
        images: ``(count, channels, height, width)`` on the model's device.
        labels: True classes, ``(count,)``.
        plan: An attack plan: which attacks to run, and with which budget.
        audit: Audit of the model, to prove a certified accuracy below that of each attack.
        jacobians: Number of images at which to measure the norm of the Jacobian.
        curves: Whether to run PGD at further radii and Carlini & Wagner's attack with fewer steps,
            if they are in the plan.
        doubts: Whether to look for signs of a weak attack.
        surrogate: Another network for the same images. Its adversarial images should not break the
            model more often than the model's own do.
        say: Called with the name of each stage when it begins.
        progress: Shows the progress, see :class:`lipbound.runtime.Progress`.

    Returns:
        A dictionary that prints as a table: the ``plan``, the ``precision`` of the searches,
        ``clean``, the ``accuracy`` and ``interval`` of each attack (for PGD also by number of
        iterations, for Carlini & Wagner by that of steps), ``certified`` and ``contradictions``
        between attacks and certificates (an empty list is good), ``jacobian_norms``, ``doubts``
        (sentences; an empty list is good) and the evidence for the doubts.

    Raises:
        ValueError: If the inputs cannot be attacked: pixels outside [0, 1], labels out of range,
            logits that are not finite, or a model in training mode.
    """
    plan = plan or Plan()
    with engine(model, images, plan, progress) as ready:
        record = Evaluation(plan=vars(plan), precision=ready.plan.precision)
        if ready.plan.precision != plan.precision:
            say(
                f"{plan.precision} loses this network's gradients, so the attacks search in "
                f"{ready.plan.precision}"
            )
        right = check(model, images, labels, plan.batch).argmax(1) == labels
        examples = Examples(images, labels, ~right)
        record["clean"] = accuracy(right)
        found: dict[str, Found] = {}
        for name in dict.fromkeys(plan.attacks):
            say(name)
            if name == "cw" and not images.is_cuda:
                minutes = cw_minutes(model, images, labels, plan)
                say(
                    f"cw takes {math.ceil(minutes)} to {math.ceil(3 * minutes)} minutes for "
                    f"{len(images)} images on this processor; fewer images take less"
                )
            found[name] = ATTACKS[name](ready, images, labels)
            record[name] = _reported(name, found[name], ready, examples)
        if "pgd" in found and curves:
            say("radii")
            record["against_radius"] = _against_radius(ready, examples)
        if "cw" in found and curves:
            say("steps")
            record["against_steps"] = _against_steps(ready, examples, record["cw"])
        if audit is not None:
            say("certificates")
            record |= _certified(record, model, examples, audit, plan)
        if jacobians:
            say("jacobians")
            record["jacobian_norms"] = _quantiles(
                jacobian_norms(model, images[:jacobians], progress=progress)
            )
        if doubts:
            say("doubts")
            with tf32(plan.precision != "float32"):
                said, record["evidence"] = doubt(model, examples, plan, found, surrogate, progress)
            record["doubts"] = [*said, *_losses(found, record)]
        return record


def _certified(
    record: dict[str, Any], model: nn.Module, on: Examples, audit: Audit, plan: Plan
) -> dict[str, Any]:
    """Certify the images, also in the ball of every attack, and compare with what it found.

    A ball in L∞ lies in the L2 ball whose radius is √d times as large, where d counts the pixels.
    """
    batches = zip(on.images.split(plan.batch), on.labels.split(plan.batch), strict=True)
    found = certified_accuracy(model, audit, batches, CERTIFIED_RADII)
    widest = {"linf": math.sqrt(on.images[0].numel()), "l2": 1.0}
    contradictions = []
    least = min(found.radii)
    wrong = int(((found.certified > least) & ~outcomes(record["clean"])).sum())
    if wrong:
        contradictions.append(
            f"{wrong} images are certified with an L2 radius above {digits(least, 4, 'down')}, but "
            f"the network misclassifies them without any attack. The certificates speak of real "
            f"arithmetic, so rounding in the network's own arithmetic can be the reason; "
            f"certify(..., arithmetic='float32') and lipbound certify --arithmetic float32 include "
            f"it"
        )
    for name, ball, radius, attacked in in_balls(record):
        # an attack may leave its ball by this much, see lipbound.robust.attacks.recheck.valid
        kept = found.certified > widest[ball] * (radius * (1 + 1e-5) + 1e-7)
        attacked["certified"] = float(kept.double().mean())
        count = int((kept & ~outcomes(attacked)).sum())
        if count:
            contradictions.append(
                f"{name} broke {count} images in the {ball} ball of radius "
                f"{digits(radius, 4, 'down')} that are certified there, so the bound or the attack "
                f"is wrong, or the rounding of float32 misclassified them"
            )
    return {
        "certified": {key(r): accuracy(found.certified > r) for r in found.radii},
        "certified_curve": {
            ball: [[radius / wide, share] for radius, share in found.curve()]
            for ball, wide in widest.items()
        },
        "median_certified_radius": finite(found.median_radius),
        "contradictions": contradictions,
    }


def _quantiles(norms: Tensor) -> dict[str, Any]:
    return {
        "mean": float(norms.mean()),
        "quantiles": [float(q) for q in norms.quantile(norms.new_tensor(QUANTILES))],
        "levels": QUANTILES,
        "all": [round(float(n), 4) for n in norms],
    }


def _losses(found: dict[str, Found], record: dict[str, Any]) -> Iterator[str]:
    """Yield doubts that the attacks' own results raise."""
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


SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # multiples of the radius, for the curve


def _against_radius(on: Engine, examples: Examples) -> dict[str, Any]:
    """Return radius → accuracy for PGD with one restart and at most 50 iterations."""
    few = {"iterations": min(on.plan.iterations, 50), "restarts": 1, "loss": "cross-entropy"}
    curve = {}
    for radius in on.progress([share * on.plan.radius for share in SHARES], "radii"):
        if on.plan.ball == "linf" and radius > 1:
            continue
        found = strongest(on, examples.images, examples.labels, radius, **few)
        broken = valid(on.model, found, examples, on.plan.ball, radius, on.plan.batch)
        curve[key(radius)] = accuracy(~broken)
    return curve


def cw_minutes(model: nn.Module, images: Tensor, labels: Tensor, plan: Plan) -> float:
    """Estimate the minutes of Carlini & Wagner's attack with its curve, by timing one gradient."""
    few = images[:50], labels[:50]
    ascent(model, *few, margin)  # the first one is slow
    began = time.perf_counter()
    ascent(model, *few, margin)
    each = (time.perf_counter() - began) / len(few[0])
    steps = plan.search_steps + sum(few for few in STEPS if few < plan.search_steps)
    return each * len(images) * plan.searches * steps / 60


STEPS = (3, 10, 30)  # steps per search of Carlini & Wagner's attack, for the curve


def _against_steps(
    on: Engine, examples: Examples, whole: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Return steps per search → radius → accuracy for Carlini & Wagner's attack."""
    curve = {}
    for steps in on.progress([few for few in STEPS if few < on.plan.search_steps], "steps"):
        fewer = replace(on, plan=replace(on.plan, search_steps=steps))
        found = ATTACKS["cw"](fewer, examples.images, examples.labels)
        curve[steps] = _reported("cw", found, fewer, examples)
    curve[on.plan.search_steps] = whole
    radii = list(map(key, sorted(on.plan.radii)))
    return {str(m): {r: found[r]["accuracy"] for r in radii} for m, found in curve.items()}


QUANTILES = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]


def _reported(name: str, found: Found, on: Engine, examples: Examples) -> dict[str, Any]:
    """Return accuracies after the adversarial images were checked again in float32."""
    plan, mistakes = on.plan, examples.mistakes
    bounded = name not in SMALLEST
    ball, radius = (plan.ball, plan.radius) if bounded else ("l2", math.inf)
    broken = valid(on.model, found, examples, ball, radius, plan.batch)
    result: dict[str, Any] = {"not_reproduced": int((found.broken & ~broken).sum())}
    if not bounded:
        sizes = torch.where(mistakes, 0.0, perturbation_norms(found.images, examples.images, "l2"))
        sizes = torch.where(broken, sizes, math.inf)
        for radius in sorted(plan.radii):
            result[key(radius)] = accuracy(sizes > radius * (1 + 1e-5))
        middle = float(sizes.median())
        result["median_norm"] = middle if name == "cw" and math.isfinite(middle) else None
        return result
    result |= {**accuracy(~broken), "radius": plan.radius, "ball": plan.ball}
    result["largest_perturbation"] = float(
        perturbation_norms(found.images, examples.images, ball).max()
    )
    if name == "pgd":  # the first restart
        marks = [m for m in (0, 1, 2, 5, 10, 20, 50, 100, 200) if m < plan.iterations]
        for m in (*marks, plan.iterations):
            standing = ~mistakes & ((found.iteration < 0) | (found.iteration > m))
            share = int(standing.sum()) / len(standing)
            result.setdefault("against_iterations", {})[str(m)] = share
    return result


def jacobian_norms(
    model: nn.Module, images: Tensor, batch: int = 50, progress: Progress = silent
) -> Tensor:
    """Return the exact spectral norm of the logits' Jacobian at every image."""
    with in_eval(model):
        parts = progress(images.split(batch), "batches of Jacobians")
        return torch.cat([norms_by_rows(model, part) for part in parts])


def paired(one: Sequence[bool] | Tensor, other: Sequence[bool] | Tensor) -> dict[str, float]:
    """Return the difference of two accuracies on the same images, with its 95 % interval.

    Example:
        >>> paired([True, True, False, True], [True, False, False, True])["difference"]
        0.25
    """
    gap = torch.as_tensor(one).double() - torch.as_tensor(other).double()
    error = float(gap.std(correction=1)) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
    middle = float(gap.mean())
    return {"difference": middle, "low": middle - 1.96 * error, "high": middle + 1.96 * error}
