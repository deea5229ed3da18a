"""The paper's robustness table on CIFAR: six kinds of training under PGD, C&W and AutoAttack.

The paper trains WRN-28-10 for 200 epochs. Our tiers are smaller: none has the paper's network, data
and number of steps together. Differences are paired: they use the same images and the same seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping
from typing import Any

from lipbound.paper import gaps
from lipbound.paper.gaps import (
    COLUMNS,
    JACOBIANS,
    PAPER,
    SEEDS,
    WEIGHT,
    WHOLE,
    Deviation,
    against,
    attacked,
    data,
    dose,
    grouped,
    held,
    jacobian_ratio,
    paper_arms,
    paper_gaps,
    peak,
    plain,
    pooled,
    verdict,
    whole,
)
from lipbound.paper.request import Request
from lipbound.paper.trainings import Tier, work
from lipbound.report.markdown import table
from lipbound.robust.attacks.evaluate import outcomes
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.training.settings import settings

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
    "B": Tier(
        "PreActResNet-18 on all of CIFAR-10, 60 epochs, one-cycle learning rate",
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
        "WRN-28-10, the paper's network, on all of CIFAR-10, 26 epochs, one-cycle learning rate. "
        "There was no GPU time for more, or for another arm",
        {"data": "packed-cifar10", "epochs": 26, "schedule": "onecycle", "lr": 0.2, "check": 500,
         "weight_decay": 5e-4},
        {"ours awp 0.005": AWP["ours awp 0.005"]},
        plan=FULL,
    ),
}  # fmt: skip
TINY = Tier(
    "A small CNN on scikit-learn's digits, one epoch. This shows only that the program works",
    {"epochs": 1, "check": 30},
    {"at": {"arm": "at"}, "at+lipreg 0.05": {"arm": "at+lipreg"}},
    plan=Plan(("pgd", "cw"), radius=0.1, iterations=5, restarts=1, searches=2, search_steps=10),
    images=30, autoattack=0, jacobians=10, doubts=False, preset="digits",
)  # fmt: skip
ALL = {**TIERS, "tiny": TINY}
GAPS = (*COLUMNS, *WHOLE)
DOSED = ("clean", "PGD", "C&W 0.8")
SMOOTH = ("log10 bound", "Jacobian, median")
WORDS = """- A *tier* is a plan of trainings: one network on one data set, with one schedule.
- An *arm* is a way of training:
    - `baseline` trains without attacks.
    - `at` is adversarial training on images that ten steps of PGD have changed.
    - `at+lipreg W` adds the paper's regularizer to `at`, with weight λ2 = W. `lipreg W` adds it to
      `baseline`.
    - `at+pm` adds the power method's estimate instead, which is the paper's competitor.
    - `at decay` is `at` with a larger weight decay, as a control.
    - `at+spectral W` adds the logarithms of the tracked σ1 of all layers, with weight W.
    - `ours` is `at+spectral` with BatchNorm folded into the convolutions and averaged weights
      (`ema`).
    - `awp` marks arms with adversarial weight perturbation.
- A *cell* is one training: one arm of one tier with one seed. It leaves two networks: `final` is
  the network after the last epoch, and `best` is that of the epoch with the highest accuracy under
  PGD on held-out images.
"""
TRIED = (
    "Penalty weights that were tried with the first seed. Held-out images chose among them, so "
    "these networks were not attacked further. Accuracies are in per cent: on held-out images over "
    "the last five epochs, and in training in the last epoch.\n"
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


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    return gaps.figure(without_pilots(by_tier(record["cells"])), pyplot)


def report(record: dict[str, Any]) -> str:
    tiers = by_tier(record["cells"])
    return f"## Table 2: robustness on CIFAR\n\n{WORDS}\n{doses(tiers)}\n{details(tiers)}"


def details(tiers: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the paper's table, the method of the intervals, the figure and all tiers' tables."""
    deviations = pooled(tiers.values())
    drawn = "![Differences between the arms, with intervals](table2.svg)\n"
    parts = [f"{_paper()}\n{_intervals(deviations)}\n{drawn}"]
    for name, cells in tiers.items():
        tables = (_table(cells), _differences(cells, deviations), _fit(cells), _tried(cells))
        about = _arms(ALL[name], grouped(cells))
        body = "\n".join(part for part in tables if part)
        parts.append(f"### Tier {name}\n\n{ALL[name].says}. {about}\n\n{body}")
    return "\n".join(parts)


def doses(tiers: Mapping[str, list[dict[str, Any]]], more: list[list[str]] | None = None) -> str:
    """Return the effect of the paper's regularizer and its dose, one line for each tier.

    Args:
        tiers: Result of :func:`by_tier`.
        more: Further rows of the table.
    """
    deviations, rows = pooled(tiers.values()), []
    for name, cells in tiers.items():
        groups = grouped(attacked(cells))
        own, at = groups.get(f"at+lipreg {WEIGHT:g}"), groups.get("at")
        if own is None or at is None or (share := dose(own[0])) is None:
            continue
        found = against(cells, deviations)[own[0]["label"], "at"]
        shown = [gap(found[column]) if column in found else "" for column in DOSED]
        tier = f"{name} ({data(own[0])}), {gaps.seeds(len(own))}"
        rows.append((share, [tier, *dosed(own, at), *shown]))
    if not rows:
        return ""
    theirs = []
    for on, arms in PAPER.items():
        ratio = f"{JACOBIANS['at+lipreg'] / JACOBIANS['at']:.2f}" if on == "cifar10" else ""
        pairs = zip(COLUMNS, arms["at+lipreg"], arms["at"], strict=False)
        told = {column: f"{100 * (one - two):+.1f}" for column, one, two in pairs}
        theirs.append([f"the paper ({on})", "1", ratio, "", *(told[name] for name in DOSED)])
    lines = [*(more or []), *(row for _, row in sorted(rows)), *theirs]
    heads = ["tier", "dose", "Jacobian ratio", "accuracy in training", *DOSED]
    return (
        "The *dose* is the sum of the learning rate over all steps, relative to the paper's. It "
        "says how far a penalty of the same weight could move the network. The *Jacobian ratio* is "
        f"the mean norm of the Jacobians of `at+lipreg {WEIGHT:g}` at test images, over that of "
        "`at`. The accuracy in training is that of `at` and of `at+lipreg`, in per cent, on "
        "attacked training images in the last epoch. The other columns are the differences in "
        "accuracy between the two, in points.\n\n"
        f"{table(heads, lines)}\n"
    )


def dosed(own: list[dict[str, Any]], at: list[dict[str, Any]]) -> list[str]:
    """Return dose, Jacobian ratio, and the accuracies in training of ``at`` and of the arm."""
    fitted = [
        _shown([statistics.fmean(cell["epochs"][-1]["train_accuracy"] for cell in cells)])
        for cells in (at, own)
    ]
    return [f"{dose(own[0]):.3f}", f"{jacobian_ratio(own, at):.2f}", " and ".join(fitted)]


def _intervals(deviations: Mapping[str, Deviation]) -> str:
    """Describe how the intervals are computed."""
    known = ", ".join(f"{100 * one.value:.1f} for {name}" for name, one in deviations.items())
    one = (
        "One seed says nothing about other seeds. Its interval is therefore widened by the "
        f"deviation over seeds, pooled over arms with {SEEDS} seeds or more (in points: {known}). "
        "This assumes that seeds matter as much in one tier as in another."
        if known
        else "The interval of one seed counts the images alone."
    )
    return (
        "All intervals are 95 % intervals of differences between final networks of the same seed "
        f"on the same images. They count images and seeds. {one} Differences are **bold** where at "
        f"least {SEEDS} seeds give an interval without zero; fewer seeds get no verdict. PGD is "
        "the strong attack on the first test images. PGD-10 is the weak attack that is used in "
        "training, on all test images. Its outcomes image by image were not recorded, so the share "
        "of the images in its interval is estimated from the images that PGD attacked.\n"
    )


def _arms(tier: Tier, named: Collection[str]) -> str:
    """Describe the labels of the arms and the budgets of the attacks."""
    told = {"arm", "penalty_weight"}  # the label says these
    meant = [
        f"- `{label}` is `{arm['arm']}` with "
        + ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in arm.items() if name != "arm")
        for label, arm in tier.arms.items()
        if label in named and arm.keys() - told
    ]  # fmt: skip
    decay = settings(preset=tier.preset, **tier.common).weight_decay
    plan = tier.plan
    return (
        f"PGD has {plan.restarts} restarts of {plan.iterations} iterations at radius "
        f"{plan.radius * 255:.3g}/255. Carlini & Wagner's attack (C&W) has {plan.searches} "
        f"searches of {plan.search_steps} steps. The weight decay is {decay:g} unless an arm "
        "changes it." + ("\n\nSettings of the arms:\n\n" + "\n".join(meant) if meant else "")
    )


def _paper() -> str:
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


def _shown(found: list[float | None], scale: float = 100, digits: int = 1) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return ""
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.fmean(values):.{digits}f}{spread}"


def smooth(networks: list[dict[str, Any]]) -> list[str]:
    """Return the certified bound and the median norm of the Jacobians."""
    bounds = [network["log10_lipschitz"]["upper"] for network in networks]
    norms = [network["jacobian_norms"]["quantiles"][3] for network in networks]
    return [_shown(bounds, 1), _shown(norms, 1, 2)]


def _table(cells: list[dict[str, Any]]) -> str:
    """Return the table of accuracies of the final and the best networks."""
    cells, rows = attacked(cells), []
    for kind in ("final", "best"):
        for label, group in grouped(cells).items():
            entries = [[entry(cell[kind]) for cell in group] for entry in COLUMNS.values()]
            columns = [_shown([e["accuracy"] for e in found if e]) for found in entries]
            columns += [_shown([whole(cell, kind, name) for cell in group]) for name in WHOLE]
            rows.append([label, kind, str(len(group)), *columns])
    if "at" not in grouped(cells):  # compare with the paper's arms instead
        for arm, values in paper_arms(cells[0]).items():
            shown = [f"{100 * value:.1f}" for value in values]
            rows.append([f"*the paper's {arm}*", "", "", *shown, *[""] * (len(GAPS) - len(shown))])
    images = {cell["final"]["clean"]["images"] for cell in cells}
    return (
        "Accuracies in per cent, mean ± standard deviation over seeds, on the first "
        f"{' or '.join(map(str, sorted(images)))} test images. Columns with (all) are on all test "
        f"images.\n\n{table(['arm', 'network', 'seeds', *COLUMNS, *WHOLE], rows)}\n"
        f"{_automatic(cells)}"
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
            left.append(f"{label} {_shown([float(right.double().mean()) for right in same])}")
    return (
        f"\nAutoAttack was run on the first {count} of these images. PGD's accuracies on the same "
        f"{count} are: {', '.join(left)}.\n"
    )


def _fit(cells: list[dict[str, Any]]) -> str:
    """Return the table of bounds, Jacobians and fit of the final networks."""
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
        "The final networks: their certified Lipschitz bound, the median spectral norm of their "
        "Jacobians at test images, and the share of images that the bound certifies in L2. Then "
        "the accuracy under PGD on held-out images, in the best epoch and over the last five; a "
        "fall between the two is overfitting, and every seed holds out other images. Last, "
        "the accuracy in the last epoch on the (attacked) training images.\n\n"
        f"{table([*heads, 'in training'], rows)}\n\n"
        f"A training took {seconds:.0f} s on average on {cells[0]['device']}. Other trainings may "
        "have shared the device, so these times do not compare arms.\n"
    )


def certified(final: dict[str, Any]) -> float | None:
    """Return the share of images whose L2 ball of radius 36/255 the bound certifies."""
    return (final.get("certified") or {}).get("0.1412", {}).get("accuracy")


def _tried(cells: list[dict[str, Any]]) -> str:
    """Return the table of accuracies on held-out images for the penalty weights tried."""
    arms = {cell["settings"]["arm"] for cell in cells if "pgd" not in cell["final"]}
    rows = []
    for cell in cells:
        if arms and cell["seed"] == 0 and cell["settings"]["arm"] in {*arms, "at"}:
            accuracies = [held(cell, clean=True), held(cell), cell["epochs"][-1]["train_accuracy"]]
            shown = [_shown([accuracy]) for accuracy in accuracies]
            rows.append([cell["label"], *shown, *smooth([cell["final"]])])
    heads = ["arm", "held out, clean", "held out, PGD", "in training", *SMOOTH]
    return f"{TRIED}\n{table(heads, rows)}\n" if rows else ""


def _differences(cells: list[dict[str, Any]], deviations: Mapping[str, Deviation]) -> str:
    rows, said, count = [], [], 0
    for (label, other), found in against(cells, deviations).items():
        first = next(cell for cell in cells if cell["label"] == label)
        theirs = paper_gaps(first) if other == "at" else {}
        rows.append([f"{label} − {other}", *gap_row(found)])
        count += sum(len(one["seeds"]) >= SEEDS for one in found.values())
        if theirs:
            rows.append(["*the paper's*", *paper_row(theirs)])
        told: dict[str, list[str]] = {}
        for name in found:
            if name in theirs and len(found[name]["seeds"]) >= SEEDS:
                told.setdefault(verdict(found[name], theirs[name]), []).append(name)
        if told:
            words = "; ".join(f"{', '.join(own)}: {word}" for word, own in told.items())
            said.append(f"- `{label}` beside the paper's, in this tier's setting. {words}.")
    if not rows:
        return ""
    chance = (
        f" Chance alone makes about {0.05 * count:.1g} of {count} intervals miss zero."
        if count
        else f" No arm of this tier has {SEEDS} seeds, so there is no verdict."
    )
    return (
        f"Differences between final networks, in points.{chance}\n\n"
        + table(["", *GAPS], rows)
        + "\n"
        + ("\n" + "\n".join(said) + "\n" if said else "")
    )


def gap_row(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the measured differences in the columns ``GAPS``."""
    return [gap(found[name]) if name in found else "" for name in GAPS]


def paper_row(theirs: dict[str, float]) -> list[str]:
    """Return the paper's differences in the same columns."""
    return [f"{100 * theirs[name]:+.1f}" if name in theirs else "" for name in GAPS]


def gap(found: dict[str, Any]) -> str:
    """Return a difference and its interval in points, bold if enough seeds exclude zero."""
    text = f"{100 * found['difference']:+.1f}"
    if math.isfinite(found["high"]):
        text += f" [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    settled = len(found["seeds"]) >= SEEDS and not found["low"] <= 0 <= found["high"]
    return f"**{text}**" if settled else text
