"""The paper's robustness table on CIFAR: arms of training under PGD, C&W and AutoAttack.

The paper trains WRN-28-10 for 200 epochs. Our tiers are smaller, and say so; none is presented as
the paper's. Differences are paired: the same images, the same seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from typing import Any

from lipbound.experiments import gaps
from lipbound.experiments.gaps import (
    COLUMNS,
    PAPER,
    SEEDS,
    WHOLE,
    against,
    attacked,
    grouped,
    held,
    paper_arms,
    paper_gaps,
    peak,
    plain,
    verdict,
    whole,
)
from lipbound.experiments.request import Request
from lipbound.experiments.trainings import Tier, work
from lipbound.records import table
from lipbound.robust.evaluate import outcomes
from lipbound.robust.plan import Plan
from lipbound.robust.settings import settings

ON = "CIFAR-10 and CIFAR-100"
FULL = Plan(
    ("pgd", "cw"), batch=256, searches=6, search_steps=100, constant=1.0, precision="float16",
    compile=True,
)  # fmt: skip
SWEEP = (0.008, 0.02, 0.05, 0.1)
LIPREG = {f"at+lipreg {w:g}": {"arm": "at+lipreg", "penalty_weight": w} for w in SWEEP}
SPECTRAL = {f"at+spectral {w:g}": {"arm": "at+spectral", "penalty_weight": w} for w in SWEEP}
FEW: dict[str, Any] = {
    "model": "wrn-28-4", "data": "packed-cifar10", "first": 11000, "held_out": 1 / 11,
    "epochs": 60, "milestones": (18, 36, 48), "check": 500,
}  # fmt: skip
QUICK: dict[str, Any] = {"data": "packed-cifar10", "batch": 256, "held_out": 0.02, "check": 500}
PUBLISHED = {"penalty": "polygrid", "samples": 10}
OURS = {"arm": "at+spectral", "batchnorm": "folded", "ema": 0.998, "penalty_weight": 0.001}
AWP = {f"ours awp {gamma:g}": {**OURS, "awp": gamma} for gamma in (0.005, 0.01)}
TIERS = {
    "A0": Tier(
        "As `A` with batches of 200 like the paper's, 3,000 steps: a pilot",
        FEW,
        {"at": {"arm": "at"}, "at+lipreg 0.008": {"arm": "at+lipreg"},
         "baseline": {"arm": "baseline"}},
        {"at": 2, "at+lipreg 0.008": 2, "baseline": 2},
        FULL,
        pilot=True,
    ),
    "A": Tier(
        "WRN-28-4 on 10,000 of the first 11,000 training images of CIFAR-10 (500 of the others "
        "choose `best`), 60 epochs of the paper's schedule in proportion, batches of 64",
        {**FEW, "batch": 64},
        {
            "at": {"arm": "at"},
            **LIPREG,
            "at decay 2e-3": {"arm": "at", "weight_decay": 2e-3},
            **SPECTRAL,
            "baseline": {"arm": "baseline"},
            "at+pm": {"arm": "at+pm"},
            "ours": {**OURS, "weight_decay": 2e-3},
            **AWP,
            "lipreg 0.008": {"arm": "lipreg"},
        },
        {"at": 3, "at+lipreg 0.008": 3, "at decay 2e-3": 3, "baseline": 3, "at+pm": 3, "ours": 3},
        FULL,
        tried=(*list(LIPREG)[1:], *SPECTRAL, *AWP),
    ),
    "O": Tier(
        "WRN-28-4 on 3,000 of the first 3,500 training images of CIFAR-10 (the others choose "
        "`best`), the paper's 200 epochs and schedule, batches of 64: few images many times, where "
        "robust overfitting is",
        {**FEW, "first": 3500, "held_out": 1 / 7, "epochs": 200, "milestones": (60, 120, 160),
         "batch": 64},
        {"at": {"arm": "at"}, "at+lipreg 0.008": {"arm": "at+lipreg"}},
        {"at": 3, "at+lipreg 0.008": 3},
        FULL,
    ),
    "B": Tier(
        "PreActResNet-18 on CIFAR-10, 60 epochs, one cycle",
        {**QUICK, "epochs": 60},
        {
            "at": {"arm": "at"},
            "at+lipreg 0.008": {"arm": "at+lipreg", **PUBLISHED},
            "at awp 0.005": {"arm": "at", "ema": OURS["ema"], "awp": 0.005},
            "ours awp 0.005": AWP["ours awp 0.005"],
        },
        plan=FULL,
        preset="fast",
    ),
    "B100": Tier(
        "PreActResNet-18 on CIFAR-100, 30 epochs, one cycle",
        {**QUICK, "data": "packed-cifar100"},
        {
            "at": {"arm": "at"},
            "at+lipreg 0.008": {"arm": "at+lipreg", **PUBLISHED},
            "ours awp 0.005": AWP["ours awp 0.005"],
        },
        plan=FULL,
        preset="fast",
    ),
    "C": Tier(
        "WRN-28-10 on CIFAR-10, 26 epochs, one cycle: as many as one stretch of GPU time allows",
        {"data": "packed-cifar10", "epochs": 26, "schedule": "onecycle", "lr": 0.2, "check": 500,
         "weight_decay": 5e-4},
        {"ours awp 0.005": AWP["ours awp 0.005"]},
        plan=FULL,
    ),
}  # fmt: skip
TINY = Tier(
    "a small CNN on scikit-learn's digits, one epoch: shows only that it works",
    {"epochs": 1, "check": 30},
    {"at": {"arm": "at"}, "at+lipreg 0.05": {"arm": "at+lipreg"}},
    plan=Plan(("pgd", "cw"), radius=0.1, iterations=5, restarts=1, searches=2, search_steps=10),
    images=30, autoattack=0, jacobians=10, doubts=False, preset="digits",
)  # fmt: skip
ALL = {**TIERS, "tiny": TINY}
GAPS = (*COLUMNS, *WHOLE)
SMOOTH = ("log10 bound", "Jacobian, median")
WORDS = """A *tier* is a plan: one kind of network on one kind of data, smaller than the paper's.
Its arms, and its networks:

- `baseline`: plain training; `lipreg W`: with the paper's regularizer, λ2 = W
- `at`: adversarial training (PGD, ten steps)
- `at+lipreg W`: with the regularizer as well
- `at+pm`: with its rival, the power method on the layers
- `at decay`: with a larger weight decay, a control
- `at+spectral W`: with the logarithms of the symbols' σ1, weight W
- `ours`: `at+spectral` with BatchNorm folded in and averaged weights (`ema`)
- `awp`: adversarial weight perturbation
- `final`: of the last epoch; `best`: of the epoch that was best on images held out of training
"""
TRIED = (
    "Weights that were tried, first seed; images held out choose among them, so they are not "
    "attacked. Accuracies in per cent; on images held out of the last five epochs, in training "
    "of the last.\n"
)


def compute(request: Request) -> dict[str, Any]:
    chosen = {"tiny": TINY} if request.tiny else TIERS
    if request.tier and request.tier not in chosen:
        raise ValueError(f"unknown tier {request.tier!r}; there are {', '.join(chosen)}")
    names = [request.tier] if request.tier else [n for n, tier in chosen.items() if not tier.pilot]
    unknown = [label for label in request.only if not any(label in chosen[n].arms for n in names)]
    if unknown:
        there = dict.fromkeys(label for name in names for label in chosen[name].arms)
        where = f"tier {request.tier} has no" if request.tier else "no tier has"
        raise ValueError(f"{where} {unknown[0]!r}; there are {', '.join(there)}")
    end = None if request.minutes is None else time.monotonic() + 60 * request.minutes
    cells = []
    for name in names:
        only = tuple(label for label in request.only if label in chosen[name].arms)
        left = None if end is None else (end - time.monotonic()) / 60
        if only or not request.only:
            cells += work(
                name, chosen[name], request.out / "table2", folder=request.folder,
                device=request.device, minutes=left, only=only, say=request.say,
                watch=request.watch,
            )  # fmt: skip
    return {"cells": cells}


def by_tier(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Tier → its cells, arms and seeds in the tier's order whenever they were done; pilots last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, tier in sorted(ALL.items(), key=lambda item: item[1].pilot):
        places = {label: place for place, label in enumerate(tier.arms)}
        own = [cell for cell in cells if cell["tier"] == name]
        if own:
            found[name] = sorted(own, key=lambda cell: (places[cell["label"]], cell["seed"]))
    return found


def without_pilots(tiers: dict[str, Any]) -> dict[str, Any]:
    """For figures; where there is nothing else, pilots are drawn too."""
    return {name: tiers[name] for name in tiers if not ALL[name].pilot} or tiers


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    return gaps.figure(without_pilots(by_tier(record["cells"])), pyplot)


def report(record: dict[str, Any]) -> str:
    drawn = "![Differences between the arms, with intervals](table2.svg)\n"
    parts = [f"## Table 2: robustness\n\n{WORDS}\n{_paper()}\n{drawn}"]
    for name, cells in by_tier(record["cells"]).items():
        tables = (_table(cells), _differences(cells), _fit(cells), _tried(cells))
        about = _arms(ALL[name], grouped(cells))
        body = "\n".join(part for part in tables if part)
        parts.append(f"### Tier {name}\n\n{ALL[name].says}. {about}\n\n{body}")
    return "\n".join(parts)


def _arms(tier: Tier, named: Collection[str]) -> str:
    """What the labels stand for, and how much the attacks may do."""
    told = {"arm", "penalty_weight"}  # by the label
    meant = [
        f"- `{label}`: `{arm['arm']}` with "
        + ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in arm.items() if name != "arm")
        for label, arm in tier.arms.items()
        if label in named and arm.keys() - told
    ]  # fmt: skip
    decay = settings(preset=tier.preset, **tier.common).weight_decay
    plan = tier.plan
    return (
        f"PGD: {plan.restarts} × {plan.iterations} iterations at {plan.radius * 255:.3g}/255; "
        f"Carlini & Wagner: {plan.searches} × {plan.search_steps}. Weight decay {decay:g} where "
        "nothing else is said" + "".join(["; settings of the arms:\n", *("\n" + m for m in meant)]
                                         if meant else ["."])
    )  # fmt: skip


def _paper() -> str:
    rows = [
        [data, arm, *(f"{100 * value:.1f}" for value in values)]
        for data, arms in PAPER.items()
        for arm, values in arms.items()
    ]
    heads = ["data", "arm", *list(COLUMNS)[:4]]
    return (
        "The paper's networks (WRN-28-10, 200 epochs; which checkpoint, it does not say), "
        "accuracies in per cent:\n\n"
        f"{table(heads, rows)}\n"
    )


def _shown(found: list[float | None], scale: float = 100, digits: int = 1) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return ""
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.fmean(values):.{digits}f}{spread}"


def smooth(networks: list[dict[str, Any]]) -> list[str]:
    """The certified bound and the Jacobians' norms."""
    bounds = [network["log10_lipschitz"]["upper"] for network in networks]
    norms = [network["jacobian_norms"]["quantiles"][3] for network in networks]
    return [_shown(bounds, 1), _shown(norms, 1, 2)]


def _table(cells: list[dict[str, Any]]) -> str:
    """Accuracies of the final networks and of those that images held out chose."""
    cells, rows = attacked(cells), []
    for kind in ("final", "best"):
        for label, group in grouped(cells).items():
            entries = [[entry(cell[kind]) for cell in group] for entry in COLUMNS.values()]
            columns = [_shown([e["accuracy"] for e in found if e]) for found in entries]
            columns += [_shown([whole(cell, kind, name) for cell in group]) for name in WHOLE]
            rows.append([label, kind, str(len(group)), *columns])
    if "at" not in grouped(cells):  # the paper's stand in for what there is no difference from
        for arm, values in paper_arms(cells[0]).items():
            shown = [f"{100 * value:.1f}" for value in values]
            rows.append([f"*the paper's {arm}*", "", "", *shown, *[""] * (len(GAPS) - len(shown))])
    images = {cell["final"]["clean"]["images"] for cell in cells}
    return (
        f"{table(['arm', 'network', 'seeds', *COLUMNS, *WHOLE], rows)}\n\n"
        "Accuracies in per cent, mean ± deviation over seeds, on the first "
        f"{'/'.join(map(str, sorted(images)))} test images{_automatic(cells)}. (all): on all test "
        "images, ten steps of PGD.\n"
    )


def _automatic(cells: list[dict[str, Any]]) -> str:
    """On how many images AutoAttack was run, and what PGD leaves of these."""
    few = {e["images"] for cell in cells if (e := COLUMNS["AutoAttack"](cell["final"]))}
    if len(few) != 1:
        return ""
    (count,) = few
    left = []
    for label, group in grouped(cells).items():
        if not plain(group[0]):
            same = [outcomes(cell["final"]["pgd"])[:count] for cell in group]
            left.append(f"{label} {_shown([float(right.double().mean()) for right in same])}")
    return f" (AutoAttack {count}, of which PGD leaves: {', '.join(left)})"


def _fit(cells: list[dict[str, Any]]) -> str:
    """How smooth the final networks are, and how they fit what they were trained on."""
    cells, rows = attacked(cells), []
    for label, group in grouped(cells).items():
        finals = [cell["final"] for cell in group]
        proved = [certified(final) for final in finals]
        fitted = [cell["epochs"][-1]["train_accuracy"] for cell in group]
        columns = [*smooth(finals), _shown(proved), _shown([peak(cell) for cell in group])]
        columns += [_shown([held(cell) for cell in group]), _shown(fitted)]
        rows.append([label, *columns])
    seconds = statistics.fmean(cell["training_seconds"] for cell in cells)
    heads = ["arm", *SMOOTH, "certified at 36/255", "held out, its peak", "held out, at the end"]
    return (
        "Final networks: certified Lipschitz bound, spectral norms of Jacobians at test images, "
        "share of images that the bound certifies in L2; PGD on images held out of training, its "
        "highest epoch and the mean of the last five (a fall between the two is overfitting; every "
        "seed holds out others); accuracy in the last epoch, on images as it was trained on.\n\n"
        f"{table([*heads, 'in training'], rows)}\n\n"
        f"{seconds:.0f} s a training on average on {cells[0]['device']}; it may have been shared "
        "with others, so times do not compare arms.\n"
    )


def certified(final: dict[str, Any]) -> float | None:
    """The share of images whose L2 ball of 36/255 the bound certifies."""
    return (final.get("certified") or {}).get("0.1412", {}).get("accuracy")


def _tried(cells: list[dict[str, Any]]) -> str:
    """What images held out say of the weights, beside networks of the same seed."""
    arms = {cell["settings"]["arm"] for cell in cells if "pgd" not in cell["final"]}
    rows = []
    for cell in cells:
        if arms and cell["seed"] == 0 and cell["settings"]["arm"] in {*arms, "at"}:
            accuracies = [held(cell, clean=True), held(cell), cell["epochs"][-1]["train_accuracy"]]
            shown = [_shown([accuracy]) for accuracy in accuracies]
            rows.append([cell["label"], *shown, *smooth([cell["final"]])])
    heads = ["arm", "held out, clean", "held out, PGD", "in training", *SMOOTH]
    return f"{TRIED}\n{table(heads, rows)}\n" if rows else ""


def _differences(cells: list[dict[str, Any]]) -> str:
    rows, said, count = [], [], 0
    for (label, other), found in against(cells).items():
        first = next(cell for cell in cells if cell["label"] == label)
        theirs = paper_gaps(first) if other == "at" else {}
        rows.append([f"{label} − {other}", *gap_row(found)])
        count += sum(len(one["seeds"]) >= SEEDS for one in found.values())
        if theirs:
            rows.append(["*the paper's*", *paper_row(theirs)])
        told: dict[str, list[str]] = {}
        for name in found:
            if name in theirs:
                told.setdefault(verdict(found[name], theirs[name]), []).append(name)
        if told:
            words = "; ".join(f"{', '.join(own)}: {word}" for word, own in told.items())
            said.append(f"- `{label}` beside the paper's. {words}.")
    if not rows:
        return ""
    return (
        "Differences between final networks of the same seeds, in points, with 95 % intervals "
        "over images and seeds (of one seed: over images alone), on all images over seeds. "
        f"**Bold** where {SEEDS} seeds or more leave zero outside"
        + (f"; of {count} intervals chance alone does that to {0.05 * count:.1g} or so" if count
           else "")
        + ".\n\n" + table(["", *GAPS], rows) + "\n"
        + ("\n" + "\n".join(said) + "\n" if said else "")
    )  # fmt: skip


def gap_row(found: dict[str, dict[str, Any]]) -> list[str]:
    """Measured differences, column by column of ``GAPS``."""
    return [gap(found[name]) if name in found else "" for name in GAPS]


def paper_row(theirs: dict[str, float]) -> list[str]:
    """The paper's, beside them."""
    return [f"{100 * theirs[name]:+.1f}" if name in theirs else "" for name in GAPS]


def gap(found: dict[str, Any]) -> str:
    """A difference and its interval in points, bold where enough seeds leave zero outside."""
    text = f"{100 * found['difference']:+.1f}"
    if math.isfinite(found["high"]):
        text += f" [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    settled = len(found["seeds"]) >= SEEDS and not found["low"] <= 0 <= found["high"]
    return f"**{text}**" if settled else text
