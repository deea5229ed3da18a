"""The section on Table 2 of docs/results/robustness.md: all tiers, and the dose of each.

``lipbound reproduce table2`` reports the accuracies and their differences. The page adds how the
regularizer's dose compares with the paper's, how well the networks fit, and the weights tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from lipbound.paper import fig3, table2
from lipbound.paper.gaps import (
    COLUMNS,
    PAPER,
    SEEDS,
    WEIGHT,
    attacked,
    data,
    grouped,
    held,
    paper_gaps,
    peak,
)
from lipbound.paper.table2 import SMOOTH, shown, smooth
from lipbound.report.markdown import table
from lipbound.robust.training.settings import Settings, filled, from_dict, settings
from tools.pages.differences import GAPS, Deviation, against, pooled, seeds, verdict

DOSED = ("clean", "PGD", "C&W 0.8")
PUBLISHED = {
    "cifar10": ("paper-cifar", 50_000), "cifar100": ("paper-cifar", 50_000),
    "imagenette64": ("paper-imagenet", 1_281_167),
}  # fmt: skip
"""Data → the preset with the paper's settings, and the paper's number of training images."""


def details(tiers: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the paper's table, the method of the intervals, the figure and all tiers' tables."""
    deviations = pooled(tiers.values())
    drawn = "![Differences between the arms, with intervals](table2.svg)\n"
    parts = [f"{table2.paper_table()}\n{_intervals(deviations)}\n{drawn}"]
    for name, cells in tiers.items():
        parts.append(table2.section(name, cells, _differences(cells, deviations), _fit(cells)))
    return "\n".join(parts)


def rates(chosen: Settings, steps: int) -> float:
    """Return the sum of the learning rate over all steps of a training."""
    return math.fsum(chosen.learning_rate(step, steps) for step in range(steps))


def dose(cell: dict[str, Any]) -> float | None:
    """Return the sum of the learning rate over all steps, relative to the paper's.

    It measures how far a penalty could act: every step moves the weights along the penalty's
    gradient by learning rate times λ2, so two trainings with the same λ2 and different sums do not
    get the same regularization. The result is ``None`` for data that the paper does not use.
    """
    if data(cell) not in PUBLISHED:
        return None
    preset, images = PUBLISHED[data(cell)]
    paper = settings("at+lipreg", preset)
    own = rates(from_dict(filled(cell["settings"])), cell["training"]["steps"])
    return own / rates(paper, paper.epochs * (images // paper.batch))


def jacobian_ratio(group: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Return the mean Jacobian norm of one arm's final networks divided by another arm's."""
    one, two = (
        statistics.fmean(cell["final"]["jacobian_norms"]["mean"] for cell in cells)
        for cells in (group, other)
    )
    return one / two


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
        effect = table2.gap_row(found, DOSED)
        tier = f"{name} ({data(own[0])}), {seeds(len(own))}"
        rows.append((share, [tier, *dosed(own, at), *effect]))
    if not rows:
        return ""
    theirs = []
    for on, arms in PAPER.items():
        ratio = (
            f"{fig3.JACOBIANS['at+lipreg'] / fig3.JACOBIANS['at']:.2f}" if on == "cifar10" else ""
        )
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
        shown([statistics.fmean(cell["epochs"][-1]["train_accuracy"] for cell in cells)])
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
        "training, on all test images. Where its outcomes image by image were not recorded, the "
        "share of the images in its interval is estimated from the images that PGD attacked.\n"
    )


def _differences(cells: list[dict[str, Any]], deviations: Mapping[str, Deviation]) -> str:
    found, said, count = against(cells, deviations), [], 0
    for (label, other), gaps in found.items():
        first = next(cell for cell in cells if cell["label"] == label)
        theirs = paper_gaps(first) if other == "at" else {}
        settled = [name for name, gap in gaps.items() if len(gap["seeds"]) >= SEEDS]
        count += len(settled)
        told: dict[str, list[str]] = {}
        for name in settled:
            if name in theirs:
                told.setdefault(verdict(gaps[name], theirs[name]), []).append(name)
        if told:
            words = "; ".join(f"{', '.join(own)}: {word}" for word, own in told.items())
            said.append(f"- `{label}` beside the paper's, in this tier's setting. {words}.")
    if not found:
        return ""
    chance = (
        f" Chance alone makes about {0.05 * count:.1g} of {count} intervals miss zero."
        if count
        else f" No arm of this tier has {SEEDS} seeds, so there is no verdict."
    )
    return (
        f"Differences between final networks, in points.{chance}\n\n"
        + table2.difference_table(cells, found, GAPS)
        + ("\n" + "\n".join(said) + "\n" if said else "")
    )


def _fit(cells: list[dict[str, Any]]) -> str:
    """Return the table of bounds, Jacobians and fit of the final networks."""
    cells, rows = attacked(cells), []
    for label, group in grouped(cells).items():
        finals = [cell["final"] for cell in group]
        proved = [certified(final) for final in finals]
        fitted = [cell["epochs"][-1]["train_accuracy"] for cell in group]
        columns = [*smooth(finals), shown(proved), shown([peak(cell) for cell in group])]
        columns += [shown([held(cell) for cell in group]), shown(fitted)]
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
    found = {round(float(r), 4): one for r, one in (final.get("certified") or {}).items()}
    return found.get(round(36 / 255, 4), {}).get("accuracy")
