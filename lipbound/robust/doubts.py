"""Signs that an attack failed rather than that the network resisted (Carlini et al. 2019)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.robust.attacks import Found, ascent, cross_entropy, margin, pgd, random_search
from lipbound.robust.balls import BALLS
from lipbound.robust.plan import Plan
from lipbound.robust.strongest import strongest_pgd
from lipbound.robust.verify import valid, verified


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
            white = white | valid(kept, x, y, clean, model, plan.ball, plan.radius, plan.batch)
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
    """The margin's change along its gradient, as part of what the gradient says; the median.

    Of images that have a gradient; 1 if none has.
    """
    _, before, gradient = ascent(model, images, labels, margin)
    change = plan.radius / 10 * BALLS[plan.ball].ascend(gradient)
    promised = (gradient * change).flatten(1).sum(1)
    kept = (margin(model(images + change), labels) - before) / promised
    kept = kept[(promised > 0) & promised.isfinite()].nan_to_num(0.0, 0.0, 0.0)
    return float(kept.median()) if len(kept) else 1.0
