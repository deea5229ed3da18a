"""The paper's robustness table on CIFAR: six kinds of training under PGD, C&W and AutoAttack.

The paper trains WRN-28-10 for 200 epochs. Our tiers are smaller: none has the paper's network, data
and number of steps together. Differences are paired: they use the same images and the same seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from lipbound.paper.gaps import (
    COLUMNS,
    PAPER,
    SEEDS,
    WHOLE,
    Gaps,
    Pair,
    against,
    attacked,
    grouped,
    held,
    paper_arms,
    paper_gaps,
    peak,
    plain,
    whole,
)
from lipbound.paper.request import Request
from lipbound.paper.trainings import Tier, work
from lipbound.registry import unknown
from lipbound.report.markdown import filled_table, table
from lipbound.robust.attacks.evaluate import outcomes
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.training.settings import filled, settings

ON = "CIFAR-10 and CIFAR-100"
FULL = Plan(
    ("pgd", "cw", "apgd-l2"), batch=256, searches=6, search_steps=100, constant=1.0,
    precision="float16", compile=True,
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
TUNED = {
    f"at tuned {decay:g}": {"arm": "at", "ema": OURS["ema"], "weight_decay": decay}
    for decay in (5e-4, 1e-3, 2e-3)
}
MATCHED = "at decay matched"
TIERS = {
    "A0": Tier(
        "A pilot with tier A's network and data, and batches of 200 as in the paper: 3,000 steps",
        FEW,
        {"at": {"arm": "at"}, "at+lipreg 0.008": {"arm": "at+lipreg"},
         "baseline": {"arm": "baseline"}},
        {"at": 2, "at+lipreg 0.008": 2, "baseline": 2},
        FULL,
        pilot=True,
    ),
    "A": Tier(
        "WRN-28-4 on 10,000 training images of CIFAR-10 (500 held-out images choose the `best` "
        "epoch), 60 epochs with the paper's schedule scaled to them, batches of 64",
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
        "WRN-28-4 on 3,000 training images of CIFAR-10 (500 held-out images choose the `best` "
        "epoch), the paper's 200 epochs and schedule, batches of 64. So few images are "
        "overfitted on purpose",
        {**FEW, "first": 3500, "held_out": 1 / 7, "epochs": 200, "milestones": (60, 120, 160),
         "batch": 64},
        {"at": {"arm": "at"}, "at+lipreg 0.008": {"arm": "at+lipreg"}},
        {"at": 3, "at+lipreg 0.008": 3},
        FULL,
    ),
    "P": Tier(
        "WRN-28-4 on 10,000 training images of CIFAR-10 (500 held-out images choose the `best` "
        "epoch), batches of 40: the paper's 200 epochs, schedule, rates and 50,000 steps, and so "
        "its full dose, on so few images that adversarial training overfits",
        {**FEW, "batch": 40, "epochs": 200, "milestones": (60, 120, 160)},
        {"at": {"arm": "at"}, "at+lipreg 0.008": {"arm": "at+lipreg"}, MATCHED: {"arm": "at"}},
        {"at": 3, "at+lipreg 0.008": 3, MATCHED: 3},
        FULL,
        autoattack=1000,
        autoattack_best=True,
        matched={MATCHED: "at+lipreg 0.008"},
    ),
    "B": Tier(
        "PreActResNet-18 on all of CIFAR-10, 60 epochs, one-cycle learning rate",
        {**QUICK, "epochs": 60},
        {
            "at": {"arm": "at"},
            "at+lipreg 0.008": {"arm": "at+lipreg", **PUBLISHED},
            "at awp 0.005": {"arm": "at", "ema": OURS["ema"], "awp": 0.005},
            "ours awp 0.005": AWP["ours awp 0.005"],
            **TUNED,
        },
        {"at": 3, "at+lipreg 0.008": 3},
        FULL,
        autoattack_best=True,
        preset="fast",
        rivals=(*TUNED,),
    ),
    "B100": Tier(
        "PreActResNet-18 on all of CIFAR-100, 30 epochs, one-cycle learning rate",
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
        "WRN-28-10, the paper's network, on all of CIFAR-10, 26 epochs, one-cycle learning rate",
        {"data": "packed-cifar10", "epochs": 26, "schedule": "onecycle", "lr": 0.2, "check": 500,
         "weight_decay": 5e-4},
        {"at": {"arm": "at"}, "ours awp 0.005": AWP["ours awp 0.005"]},
        plan=FULL,
    ),
}  # fmt: skip
TINY = Tier(
    "A small CNN on scikit-learn's digits, one epoch. This shows only that the program works",
    {"epochs": 1, "check": 30},
    {"at": {"arm": "at"}, "at+lipreg 0.05": {"arm": "at+lipreg"}, MATCHED: {"arm": "at"}},
    plan=Plan(("pgd", "cw"), radius=0.1, iterations=5, restarts=1, searches=2, search_steps=10),
    images=30, autoattack=0, jacobians=10, doubts=False, preset="digits",
    matched={MATCHED: "at+lipreg 0.05"},
)  # fmt: skip
ALL = {**TIERS, "tiny": TINY}
SMOOTH = ("log10 bound", "Jacobian, median")
WORDS = """- A *tier* is a plan of trainings: one network on one data set, with one schedule.
- An *arm* is a way of training:
    - `baseline` trains without attacks.
    - `at` is adversarial training on images that ten steps of PGD have changed.
    - `at+lipreg W` adds the paper's regularizer to `at`, with weight λ2 = W. `lipreg W` adds it to
      `baseline`.
    - `at+pm` adds the power method's estimate instead, which is the paper's competitor.
    - `at decay` is `at` with a larger weight decay, as a control. `at decay matched` has the decay
      that shrinks the layers as much as the regularizer of the tier's `at+lipreg` does.
    - `at tuned D` is `at` with averaged weights and weight decay D. Held-out images choose D, and
      the epoch of its `best` network: it is the plain adversarial training that `ours` must beat.
    - `at+spectral W` adds the logarithms of the tracked σ1 of all layers, with weight W.
    - `ours` is `at+spectral` with BatchNorm folded into the convolutions and averaged weights
      (`ema`).
    - `awp` marks arms with adversarial weight perturbation.
- A *cell* is one training: one arm of one tier with one seed. It leaves two networks: `final` is
  the network after the last epoch, and `best` is that of the epoch with the highest accuracy under
  PGD on held-out images.
"""
TRIED = (
    "Settings that were tried with the first seed. Held-out images chose among them, so networks "
    "that were not chosen were not attacked further. Accuracies are in per cent: on held-out "
    "images over the last five epochs and at the peak, and in training in the last epoch.\n"
)
INTERVALS = (
    "Differences between final networks of the same seed on the same images, in points. The 95 % "
    "intervals count images and seeds; that of one seed counts the images alone. Differences are "
    f"**bold** where at least {SEEDS} seeds give an interval without zero.\n"
)


def compute(request: Request) -> dict[str, Any]:
    chosen = {"tiny": TINY} if request.tiny else TIERS
    if request.tier and request.tier not in chosen:
        raise unknown("tier", request.tier, chosen)
    names = [request.tier] if request.tier else [n for n, tier in chosen.items() if not tier.pilot]
    absent = [label for label in request.only if not any(label in chosen[n].arms for n in names)]
    if absent:
        there = dict.fromkeys(label for name in names for label in chosen[name].arms)
        where = f"tier {request.tier} has no" if request.tier else "no tier has"
        raise ValueError(f"{where} {absent[0]!r}; choose one of: {', '.join(there)}")
    end = None if request.minutes is None else time.monotonic() + 60 * request.minutes
    cells = []
    for name in names:
        only = tuple(label for label in request.only if label in chosen[name].arms)
        left = None if end is None else (end - time.monotonic()) / 60
        if only or not request.only:
            own = replace(request, out=request.out / "table2", minutes=left, only=only)
            cells += work(name, chosen[name], own)
    return {"cells": cells}


def by_tier(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return tier → cells in the tier's order of arms and seeds; pilots come last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, tier in sorted(ALL.items(), key=lambda item: item[1].pilot):
        places = {label: place for place, label in enumerate(tier.arms)}
        own = [cell for cell in cells if cell["tier"] == name]
        if own:
            found[name] = sorted(own, key=lambda cell: (places[cell["label"]], cell["seed"]))
    return found


def without_pilots(tiers: dict[str, Any]) -> dict[str, Any]:
    """Return the tiers that figures show; pilots are included only if there are no others."""
    return {name: tiers[name] for name in tiers if not ALL[name].pilot} or tiers


def report(record: dict[str, Any]) -> str:
    parts = [f"## Table 2: robustness on CIFAR\n\n{WORDS}\n{paper_table()}"]
    for name, cells in by_tier(record["cells"]).items():
        differences = difference_table(cells, against(cells), COLUMNS)
        parts.append(section(name, cells, f"{INTERVALS}\n{differences}" if differences else ""))
    return "\n".join(parts)


def section(name: str, cells: list[dict[str, Any]], *tables: str) -> str:
    """Return a tier's section: its plan and accuracies, the given tables, and what was tried."""
    about = _arms(ALL[name], grouped(cells), any(COLUMNS["APGD 0.6"](c["final"]) for c in cells))
    body = "\n".join(part for part in (_accuracies(cells), *tables, _tried(cells)) if part)
    return f"### Tier {name}\n\n{ALL[name].says}. {about}\n\n{body}"


def _arms(tier: Tier, groups: dict[str, list[dict[str, Any]]], balls: bool) -> str:
    """Describe the labels of the arms and the budgets of the attacks (``balls``: APGD too)."""
    told = {"arm", "penalty_weight"}  # the label says these
    arms = {label: tier.arms[label] for label in tier.arms if label in groups}
    for label in tier.matched.keys() & arms.keys():
        decay = filled(groups[label][0]["settings"])["weight_decay"]
        arms[label] = {**arms[label], "weight_decay": decay}
    meant = [
        f"- `{label}` is `{arm['arm']}` with "
        + ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in arm.items() if name != "arm")
        for label, arm in arms.items()
        if arm.keys() - told
    ]  # fmt: skip
    decay = settings(preset=tier.preset, **tier.common).weight_decay
    plan = tier.plan
    return (
        f"PGD has {plan.restarts} restarts of {plan.iterations} iterations at radius "
        f"{plan.radius * 255:.3g}/255. Carlini & Wagner's attack (C&W) has {plan.searches} "
        f"searches of {plan.search_steps} steps. "
        + "APGD attacks on the cross-entropy and on each target inside the L2 balls of the same "
        "radii. "
        * balls
        + f"The weight decay is {decay:g} unless an arm changes it."
        + ("\n\nSettings of the arms:\n\n" + "\n".join(meant) if meant else "")
    )


def paper_table() -> str:
    """Return the table of the paper's accuracies."""
    rows = [
        [data, arm, *(f"{100 * value:.1f}" for value in values)]
        for data, arms in PAPER.items()
        for arm, values in arms.items()
    ]
    heads = ["data", "arm", *list(COLUMNS)[:4]]
    return (
        "Accuracies of the paper's networks in per cent (WRN-28-10, 200 epochs; the paper does not "
        "say which checkpoint it attacks):\n\n"
        f"{table(heads, rows)}\n"
    )


def shown(found: list[float | None], scale: float = 100, digits: int = 1) -> str:
    """Return the mean of the values that are known, with their deviation if there are several."""
    values = [value for value in found if value is not None]
    if not values:
        return ""
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.fmean(values):.{digits}f}{spread}"


def smooth(networks: list[dict[str, Any]]) -> list[str]:
    """Return the certified bound and the median norm of the Jacobians."""
    bounds = [network["log10_lipschitz"]["upper"] for network in networks]
    norms = [network["jacobian_norms"]["quantiles"][3] for network in networks]
    return [shown(bounds, 1), shown(norms, 1, 2)]


def _accuracies(cells: list[dict[str, Any]]) -> str:
    """Return the table of accuracies of the final and the best networks."""
    cells, rows = attacked(cells), []
    if not cells:
        return ""
    for kind in ("final", "best"):
        for label, group in grouped(cells).items():
            entries = [[entry(cell[kind]) for cell in group] for entry in COLUMNS.values()]
            columns = [shown([e["accuracy"] for e in found if e]) for found in entries]
            columns += [shown([whole(cell, kind, name) for cell in group]) for name in WHOLE]
            rows.append([label, kind, str(len(group)), *columns])
    if "at" not in grouped(cells):  # compare with the paper's arms instead
        for arm, values in paper_arms(cells[0]).items():
            theirs = [f"{100 * value:.1f}" for value in values]
            unknown = [""] * (len(COLUMNS) + len(WHOLE) - len(theirs))
            rows.append([f"*the paper's {arm}*", "", "", *theirs, *unknown])
    images = {cell["final"]["clean"]["images"] for cell in cells}
    heads = ["arm", "network", "seeds", *COLUMNS, *WHOLE]
    return (
        "Accuracies in per cent, mean ± standard deviation over seeds, on the first "
        f"{' or '.join(map(str, sorted(images)))} test images. Columns with (all) are on all test "
        f"images.\n\n{filled_table(heads, rows)}\n{_automatic(cells)}"
    )


def _automatic(cells: list[dict[str, Any]]) -> str:
    """Return the number of images of AutoAttack, and PGD's accuracy on these."""
    few = {e["images"] for cell in cells if (e := COLUMNS["AutoAttack"](cell["final"]))}
    if len(few) != 1:
        return ""
    (count,) = few
    left = []
    for label, group in grouped(cells).items():
        if not plain(group[0]):
            same = [outcomes(cell["final"]["pgd"])[:count] for cell in group]
            left.append(f"{label} {shown([float(right.double().mean()) for right in same])}")
    return (
        f"\nAutoAttack was run on the first {count} of these images. PGD's accuracies on the same "
        f"{count} are: {', '.join(left)}.\n"
    )


def _tried(cells: list[dict[str, Any]]) -> str:
    """Return the table of accuracies on held-out images for the penalty weights tried."""
    arms = {cell["settings"]["arm"] for cell in cells if "pgd" not in cell["final"]}
    rows = []
    for cell in cells:
        if arms and cell["seed"] == 0 and cell["settings"]["arm"] in {*arms, "at"}:
            accuracies = [held(cell, clean=True), held(cell), peak(cell)]
            accuracies.append(cell["epochs"][-1]["train_accuracy"])
            values = [shown([accuracy]) for accuracy in accuracies]
            rows.append([cell["label"], *values, *smooth([cell["final"]])])
    heads = ["arm", "held out, clean", "held out, PGD", "its peak", "in training", *SMOOTH]
    return f"{TRIED}\n{table(heads, rows)}\n" if rows else ""


def difference_table(
    cells: list[dict[str, Any]], found: dict[Pair, Gaps], columns: Collection[str]
) -> str:
    """Return the table of differences, each with the paper's below it; empty if there are none."""
    rows = []
    for (label, other), gaps in found.items():
        rows.append([f"{label} − {other}", *gap_row(gaps, columns)])
        first = next(cell for cell in cells if cell["label"] == label)
        if other == "at" and (theirs := paper_gaps(first)):
            told = [f"{100 * theirs[name]:+.1f}" if name in theirs else "" for name in columns]
            rows.append(["*the paper's*", *told])
    return f"{filled_table(['', *columns], rows)}\n" if rows else ""


def gap_row(gaps: Gaps, columns: Iterable[str]) -> list[str]:
    """Return the measured differences in these columns."""
    return [gap(gaps[name]) if name in gaps else "" for name in columns]


def gap(found: dict[str, Any]) -> str:
    """Return a difference and its interval in points, bold if enough seeds exclude zero."""
    text = f"{100 * found['difference']:+.1f}"
    if math.isfinite(found["high"]):
        text += f" [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    settled = len(found["seeds"]) >= SEEDS and not found["low"] <= 0 <= found["high"]
    return f"**{text}**" if settled else text
