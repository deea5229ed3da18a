"""Differences between trained networks as the results pages show them.

The package gives the differences on the attacked images. The pages add those on all test images,
let arms with one seed borrow the deviation over seeds of the others, compare the differences with
the paper's, and draw them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lipbound.paper import gaps
from lipbound.paper.fig3 import colors_of
from lipbound.paper.gaps import (
    COLUMNS,
    SEEDS,
    WEIGHT,
    WHOLE,
    Gaps,
    Pair,
    attacked,
    data,
    grouped,
    paper_arms,
    paper_gaps,
    plain,
    student,
    whole,
)
from lipbound.report.figures import tidy

TEST_IMAGES = {"cifar10": 10_000, "cifar100": 10_000}
GAPS = (*COLUMNS, *WHOLE)


@dataclass(frozen=True)
class Deviation:
    """The standard deviation of a difference over seeds, and its degrees of freedom."""

    value: float
    degrees: float


def seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def widened(gap: dict[str, Any], deviation: Deviation | None) -> dict[str, Any]:
    """Return the difference of one seed with an interval that also counts the other seeds.

    One seed says nothing about other seeds, so their deviation must be known. Several seeds have a
    deviation of their own, and their difference is returned as it is.
    """
    if len(gap["seeds"]) > 1 or deviation is None:
        return gap
    by_seeds = student(deviation.value**2, deviation.degrees)
    reach = math.hypot(gap["high"] - gap["difference"], by_seeds)
    return gaps.interval(gap["difference"], reach, gap["seeds"])


def whole_difference(
    group: list[dict[str, Any]],
    other: list[dict[str, Any]],
    name: str,
    deviation: Deviation | None = None,
) -> dict[str, Any] | None:
    """Return the difference on all test images.

    Older records hold only the accuracy. How much the images contribute to the interval is then
    estimated from those that were attacked one by one. The contributions of seeds and images are
    added as squares, each with its own Student's t: with three seeds, Satterthwaite's formula would
    hide how little is known about the seeds.
    """
    exact = gaps.difference(group, other, gaps.whole_entry(name))
    if exact is not None:
        return widened(exact, deviation)
    others = {cell["seed"]: whole(cell, "final", name) for cell in other}
    pairs = [(whole(cell, "final", name), others.get(cell["seed"])) for cell in group]
    own = [one - two for one, two in pairs if one is not None and two is not None]
    if not own:
        return None
    by_seeds = math.inf
    if len(own) > 1:
        by_seeds = student(statistics.variance(own) / len(own), len(own) - 1)
    elif deviation is not None:
        by_seeds = student(deviation.value**2, deviation.degrees)
    by_images = math.inf
    table = gaps.paired(group, other, COLUMNS[WHOLE[name][2]])
    if table is not None and table.shape[1] > 1:
        images = TEST_IMAGES.get(data(group[0]), table.shape[1])
        by_images = student(float(table.mean(0).var()) / images, table.shape[1] - 1)
    return gaps.interval(statistics.fmean(own), math.hypot(by_seeds, by_images), own)


def against(
    cells: list[dict[str, Any]], deviations: Mapping[str, Deviation] | None = None
) -> dict[Pair, Gaps]:
    """Return arm and reference → column of ``GAPS`` → difference of their final networks.

    Args:
        cells: The cells of one tier.
        deviations: Result of :func:`pooled`, for arms with one seed.
    """
    deviations, groups = deviations or {}, grouped(attacked(cells))
    found: dict[Pair, Gaps] = {}
    for (label, other), known in gaps.against(cells).items():
        own = {name: widened(gap, deviations.get(name)) for name, gap in known.items()}
        for name in WHOLE:
            gap = whole_difference(groups[label], groups[other], name, deviations.get(name))
            if gap is not None:
                own[name] = gap
        found[label, other] = own
    return found


def pooled(tiers: Iterable[list[dict[str, Any]]]) -> dict[str, Deviation]:
    """Return column → deviation over seeds of differences from ``at``, pooled over all tiers.

    Only arms with at least ``SEEDS`` seeds count. All arms of a tier are compared with the same
    ``at``. Their differences have a correlation of about a half, so k arms together have the
    degrees of freedom of k / (1 + (k − 1) / 4) independent ones.
    """
    spread: dict[str, float] = {}
    degrees: dict[str, float] = {}
    squares: dict[str, float] = {}
    for cells in tiers:
        own: dict[str, list[list[float]]] = {}
        for (_, other), known in against(cells).items():
            for name, gap in known.items():
                if other == "at" and len(gap["seeds"]) >= SEEDS:
                    own.setdefault(name, []).append(gap["seeds"])
        for name, arms in own.items():
            free = sum(len(seeds) - 1 for seeds in arms)
            around = sum((len(seeds) - 1) * statistics.variance(seeds) for seeds in arms)
            spread[name] = spread.get(name, 0.0) + around
            degrees[name] = degrees.get(name, 0) + free
            squares[name] = squares.get(name, 0.0) + free * (1 + (len(arms) - 1) / 4)
    return {
        name: Deviation(math.sqrt(spread[name] / free), free**2 / squares[name])
        for name, free in degrees.items()
    }


def verdict(gap: dict[str, Any], paper: float) -> str:
    """Describe how a measured difference compares with the paper's.

    Example:
        >>> verdict({"low": 0.01, "high": 0.03, "seeds": [0.01, 0.02, 0.03]}, 0.1)
        "same direction as the paper's, smaller"
    """
    low, high = gap["low"], gap["high"]
    if len(gap["seeds"]) < SEEDS:
        return f"fewer than {SEEDS} seeds, so no verdict"
    within = low <= paper <= high
    if low <= 0 <= high:
        return f"the interval contains zero, and {'also' if within else 'not'} the paper's value"
    if low * paper < 0:
        return "opposite to the paper's direction"
    size = "smaller" if abs(low + high) < 2 * abs(paper) else "larger"
    return f"same direction as the paper's, {'similar size' if within else size}"


def figure(tiers: dict[str, list[dict[str, Any]]], pyplot: Any) -> Any:
    """Draw the differences of every tier with intervals, and its accuracies against its bounds.

    Hollow markers are the paper's. A tier without AT shows accuracies instead of differences.
    """
    tiers = {name: attacked(cells) for name, cells in tiers.items() if attacked(cells)}
    count = max(1, len(tiers))
    made, axes = pyplot.subplots(
        count, 2, figsize=(9.8, 3.4 * count), layout="constrained", squeeze=False,
        width_ratios=(3, 2),
    )  # fmt: skip
    colors = colors_of(cell["label"] for cells in tiers.values() for cell in cells)
    deviations = pooled(tiers.values())
    first = None
    for (left, right), (tier, cells) in zip(axes, tiers.items(), strict=False):
        title = f"tier {tier}: final networks, "
        if "at" in grouped(cells):
            title += "difference from at"
            _draw_differences(left, cells, colors, deviations)
            first = first or left
            left.sharex(first)
        else:
            title += "accuracy"
            _draw_accuracies(left, cells, colors)
        left.set_title(title, loc="left", fontsize=10)
        right.set_title("every seed: bound and accuracy", loc="left", fontsize=10)
        right.sharex(axes[0, 1])
        _draw_bounds(right, cells, colors)
        for axis in (left, right):
            tidy(axis, grid="x")
        handles, names = right.get_legend_handles_labels()
        hollow, theirs = left.get_legend_handles_labels()
        right.legend(
            handles + hollow,
            names + theirs,
            frameon=False,
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
    if first is not None:
        first.autoscale(axis="x")  # to the intervals of all tiers
    return made


def _draw_differences(
    axis: Any,
    cells: list[dict[str, Any]],
    colors: dict[str, str],
    deviations: Mapping[str, Deviation],
) -> None:
    found = {label: own for (label, to), own in against(cells, deviations).items() if to == "at"}
    measured = [name for name in GAPS if any(name in own for own in found.values())]
    places = {name: place for place, name in enumerate(measured)}
    axis.axvline(0, color="#888888", lw=0.8)
    for order, (label, own) in enumerate(found.items()):
        shift = 0.7 * ((order + 0.5) / len(found) - 0.5)
        for name, gap in own.items():
            reach = 100 * (gap["high"] - gap["difference"])
            _, _, (line,) = axis.errorbar(
                100 * gap["difference"], places[name] + shift, fmt="o", ms=4, color=colors[label],
                xerr=reach if math.isfinite(reach) else 0.0,
            )  # fmt: skip
            line.set_linestyle("-" if len(gap["seeds"]) > 1 else ":")
        theirs = paper_gaps(next(cell for cell in cells if cell["label"] == label))
        theirs = {name: gap for name, gap in theirs.items() if name in places}
        axis.plot(
            [100 * gap for gap in theirs.values()], [places[name] + shift for name in theirs], "D",
            ms=5, mfc="none", color=colors[label],
            label=f"{label}, the paper's" if theirs else None,
        )  # fmt: skip
    _name_rows(axis, [*places])
    single = any(len(gap["seeds"]) == 1 for own in found.values() for gap in own.values())
    axis.set_xlabel(f"difference in accuracy, points{'; dotted: one seed' if single else ''}")


def _draw_accuracies(axis: Any, cells: list[dict[str, Any]], colors: dict[str, str]) -> None:
    finals = [cell["final"] for cell in cells]
    measured = {name: entry for name, entry in COLUMNS.items() if any(map(entry, finals))}
    for label, group in grouped(cells).items():
        for place, entry in enumerate(measured.values()):
            values = [100 * found["accuracy"] for cell in group if (found := entry(cell["final"]))]
            axis.plot(values, [place] * len(values), "o", ms=5, color=colors[label])
    for arm, values in paper_arms(cells[0]).items():
        theirs = dict(zip(COLUMNS, values, strict=False))
        places = [place for place, name in enumerate(measured) if name in theirs]
        if arm != "baseline":
            axis.plot(
                [100 * theirs[name] for name in measured if name in theirs], places, "D", ms=5, mfc="none",
                color=colors.get(f"{arm} {WEIGHT:g}", colors.get(arm)), label=f"{arm}, the paper's",
            )  # fmt: skip
    _name_rows(axis, [*measured])
    axis.set_xlabel("accuracy, %")


def _name_rows(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), labels=names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_ylabel("attack")


def _draw_bounds(axis: Any, cells: list[dict[str, Any]], colors: dict[str, str]) -> None:
    for label, group in grouped(cells).items():
        finals = [cell["final"] for cell in group]
        bounds = [final["log10_lipschitz"]["upper"] for final in finals]
        if not plain(group[0]) and None not in bounds:
            accuracies = [100 * final["pgd"]["accuracy"] for final in finals]
            axis.plot(
                bounds, accuracies, "o", ms=6, mew=0, alpha=0.6, color=colors[label],
                label=f"{label}, {seeds(len(group))}",
            )  # fmt: skip
    axis.set_xlabel("log10 of the certified Lipschitz bound")
    axis.set_ylabel("accuracy under PGD, %")
