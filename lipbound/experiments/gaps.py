"""Differences between arms of training: image by image, seed by seed, and beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from lipbound.figures import tidy
from lipbound.robust.evaluate import outcomes
from lipbound.robust.settings import filled

PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "cifar10": {
        "baseline": (0.953, 0.0, 0.002, 0.0), "at": (0.864, 0.426, 0.477, 0.334),
        "at+pm": (0.788, 0.434, 0.521, 0.419), "at+lipreg": (0.808, 0.457, 0.547, 0.438),
    },
    "cifar100": {
        "baseline": (0.792, 0.0, 0.001, 0.0), "at": (0.591, 0.199, 0.263, 0.183),
        "at+lipreg": (0.552, 0.215, 0.294, 0.226),
    },
}  # fmt: skip
"""Accuracies of the paper's networks: clean, PGD, C&W at 0.6 and at 0.8."""
WEIGHT = 0.008  # their λ2


Entry = Callable[[dict[str, Any]], dict[str, Any] | None]
COLUMNS: dict[str, Entry] = {
    "clean": lambda r: r["clean"],
    "PGD": lambda r: r.get("pgd"),
    "C&W 0.6": lambda r: r.get("cw", {}).get("0.6"),
    "C&W 0.8": lambda r: r.get("cw", {}).get("0.8"),
    "AutoAttack": lambda r: r.get("autoattack"),
}


WHOLE = {"clean (all)": ("test_accuracy", "clean"), "PGD-10 (all)": ("test_pgd_accuracy", "PGD")}
"""On all test images, as the training measured it at its end (ten steps of PGD): where it is in a
summary, and the column of the paper's that it stands beside."""
SEEDS = 3  # as few are worth a verdict


def whole(cell: dict[str, Any], kind: str, name: str) -> float | None:
    """A column of ``WHOLE`` of a cell's best or final network."""
    return cell.get("training", {}).get(kind, {}).get(WHOLE[name][0])


def attacked(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were not only tried."""
    return [cell for cell in cells if "pgd" in cell["final"]]


def plain(cell: dict[str, Any]) -> bool:
    """Whether it was trained on images as they are: attacks leave nothing of it."""
    return filled(cell["settings"])["attack"] == 0


def grouped(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell["label"], []).append(cell)
    return groups


def seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def difference(
    group: list[dict[str, Any]], other: list[dict[str, Any]], kind: str, entry: Entry
) -> dict[str, Any] | None:
    """Image by image over the seeds both have: the mean, its interval, and seed by seed.

    The interval (95 %, Student's t) takes images and seeds as drawn at random. Of one seed it
    counts the images alone.
    """
    others = {cell["seed"]: cell for cell in other}
    gaps: list[Tensor] = []
    for cell in group:
        if cell["seed"] in others:
            one, two = entry(cell[kind]), entry(others[cell["seed"]][kind])
            if one is None or two is None:
                return None
            gaps.append(outcomes(one).double() - outcomes(two).double())
    if not gaps:
        return None
    table = torch.stack(gaps)
    middle, reach = float(table.mean()), _reach(table)
    return {
        "difference": middle, "low": middle - reach, "high": middle + reach,
        "seeds": table.mean(1).tolist(),
    }  # fmt: skip


def whole_difference(
    group: list[dict[str, Any]], other: list[dict[str, Any]], kind: str, name: str
) -> dict[str, Any] | None:
    """The same on all test images: an interval over the seeds alone, none of one seed."""
    others = {cell["seed"]: whole(cell, kind, name) for cell in other}
    pairs = [(whole(cell, kind, name), others.get(cell["seed"])) for cell in group]
    gaps = [one - two for one, two in pairs if one is not None and two is not None]
    if not gaps:
        return None
    middle, reach = statistics.fmean(gaps), math.inf
    if len(gaps) > 1:
        reach = _student(statistics.variance(gaps) / len(gaps), len(gaps) - 1)
    return {"difference": middle, "low": middle - reach, "high": middle + reach, "seeds": gaps}


def _reach(table: Tensor) -> float:
    """How far the mean of ``(seeds, images)`` may be off: two crossed random effects.

    Mean squares of seeds and images less what is in both; degrees of freedom by Satterthwaite. Few
    seeds that differ have few, and a wide interval: where they differ by more than the images
    explain, no narrower than that of their own means.
    """
    seeds, images = table.shape
    if images < 2:
        return math.inf
    by_image, by_seed = table.mean(0), table.mean(1)
    of_images = seeds * float(by_image.var())
    if seeds < 2:
        return _student(of_images / images, images - 1)
    rest = table - by_image - by_seed[:, None] + table.mean()
    both = (seeds - 1) * (images - 1)
    of_both, of_seeds = float(rest.square().sum()) / both, images * float(by_seed.var())
    total = max(of_images, of_both) + max(0.0, of_seeds - of_both)
    if total == 0:
        return 0.0
    doubt = of_images**2 / (images - 1) + of_seeds**2 / (seeds - 1) + of_both**2 / both
    reach = _student(total / table.numel(), total**2 / doubt)
    if of_seeds > of_both:
        reach = max(reach, _student(of_seeds / table.numel(), seeds - 1))
    return reach


def _student(variance: float, degrees: float) -> float:
    """Half of a 95 % interval."""
    return float(stdtrit(degrees, 0.975)) * math.sqrt(variance)


def held(cell: dict[str, Any], clean: bool = False) -> float | None:
    """Accuracy on images kept aside, under PGD or clean, over the last five epochs.

    Which images these are depends on the seed: to be compared seed by seed.
    """
    name = "held_out_accuracy" if clean else "held_out_pgd_accuracy"
    values = [epoch[name] for epoch in cell["epochs"][-5:]]
    return statistics.fmean(values) if None not in values else None


def peak(cell: dict[str, Any]) -> float | None:
    """The highest accuracy under PGD on images kept aside, of all epochs."""
    values = [epoch["held_out_pgd_accuracy"] for epoch in cell["epochs"]]
    return max(values) if None not in values else None


Pair = tuple[str, str]


def against(
    cells: list[dict[str, Any]], columns: dict[str, Entry] = COLUMNS
) -> dict[Pair, dict[str, dict[str, Any]]]:
    """Arm and reference → column → difference of their final networks, where both were attacked.

    The reference is ``at``, and every other arm of plain adversarial training whose own changes
    to ``at``, another weight decay say, the arm has made as well.
    """
    groups = grouped(attacked(cells))
    made = {label: filled(group[0]["settings"]) for label, group in groups.items()}
    own = {
        label: {n: v for n, v in chosen.items() if n != "seed" and v != made["at"][n]}
        for label, chosen in made.items()
        if "at" in made and chosen["arm"] == "at" and label != "at"
    }
    pairs = [(label, "at") for label in groups]
    pairs += [
        (label, other)
        for label, chosen in made.items()
        for other, changes in own.items()
        if changes and changes.items() <= chosen.items()
    ]
    found: dict[Pair, dict[str, dict[str, Any]]] = {}
    for label, other in pairs:
        if label == other or plain(groups[label][0]):
            continue
        both = groups[label], groups.get(other, []), "final"
        gaps = {name: difference(*both, entry) for name, entry in columns.items()}
        gaps |= {name: whole_difference(*both, name) for name in WHOLE}
        known = {name: gap for name, gap in gaps.items() if gap is not None}
        if known:
            found[label, other] = known
    return found


def paper_arms(cell: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Arm → accuracies of the paper's network on this cell's data."""
    return PAPER.get(cell["settings"]["data"].removeprefix("packed-"), {})


def paper_gaps(cell: dict[str, Any]) -> dict[str, float]:
    """Column → the paper's difference from its AT, of this cell's arm, λ2 and data."""
    rows = paper_arms(cell)
    arm, weight = cell["settings"]["arm"], cell["settings"]["penalty_weight"]
    if arm not in rows or arm == "at" or weight != WEIGHT:
        return {}
    pairs = zip(rows[arm], rows["at"], strict=True)
    told = {name: ours - theirs for name, (ours, theirs) in zip(COLUMNS, pairs, strict=False)}
    return {**told, **{name: told[column] for name, (_, column) in WHOLE.items()}}


def verdict(gap: dict[str, Any], paper: float) -> str:
    """What a measured difference says of the paper's.

    Example:
        >>> verdict({"low": 0.01, "high": 0.03, "seeds": [0.01, 0.02, 0.03]}, 0.1)
        "the paper's direction, less than its size"
    """
    low, high = gap["low"], gap["high"]
    if len(gap["seeds"]) < SEEDS:
        return f"fewer than {SEEDS} seeds, no verdict"
    within = low <= paper <= high
    if low <= 0 <= high:
        known = "cannot be excluded" if within else "lies outside the interval"
        return f"no difference seen; the paper's {known}"
    if low * paper < 0:
        return "the opposite of the paper's direction"
    size = "less than" if abs(low + high) < 2 * abs(paper) else "more than"
    return f"the paper's direction, {'and' if within else size} its size"


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """Of the arms, the same in every figure: plain ones grey, the others in the order they come."""
    grey = {"at": "#333333", "baseline": "#aaaaaa"}
    others = [label for label in dict.fromkeys(labels) if label not in grey]
    return {**grey, **{label: f"C{i % 10}" for i, label in enumerate(others)}}


def figure(tiers: dict[str, list[dict[str, Any]]], pyplot: Any) -> Any:
    """Tier by tier: differences with intervals, the paper's hollow; accuracies beside bounds.

    A tier without AT has no differences: its accuracies are drawn, beside the paper's.
    """
    tiers = {name: attacked(cells) for name, cells in tiers.items() if attacked(cells)}
    count = max(1, len(tiers))
    made, axes = pyplot.subplots(
        count, 2, figsize=(9.8, 3.4 * count), layout="constrained", squeeze=False,
        width_ratios=(3, 2),
    )  # fmt: skip
    colors = colors_of(cell["label"] for cells in tiers.values() for cell in cells)
    first = None
    for (left, right), (tier, cells) in zip(axes, tiers.items(), strict=False):
        title = f"tier {tier}: final networks, "
        if "at" in grouped(cells):
            title += "difference from at"
            _draw_differences(left, cells, colors)
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
    axes[-1, 1].set_xlabel("log10 of the certified Lipschitz bound")
    return made


def _draw_differences(axis: Any, cells: list[dict[str, Any]], colors: dict[str, str]) -> None:
    found = {label: gaps for (label, to), gaps in against(cells).items() if to == "at"}
    places = {name: place for place, name in enumerate([*COLUMNS, *WHOLE])}
    axis.axvline(0, color="#888888", lw=0.8)
    for order, (label, gaps) in enumerate(found.items()):
        shift = 0.7 * ((order + 0.5) / len(found) - 0.5)
        for name, gap in gaps.items():
            reach = 100 * (gap["high"] - gap["difference"])
            _, _, (line,) = axis.errorbar(
                100 * gap["difference"], places[name] + shift, fmt="o", ms=4, color=colors[label],
                xerr=reach if math.isfinite(reach) else 0.0,
            )  # fmt: skip
            line.set_linestyle("-" if len(gap["seeds"]) > 1 else ":")
        theirs = paper_gaps(next(cell for cell in cells if cell["label"] == label))
        axis.plot(
            [100 * gap for gap in theirs.values()], [places[name] + shift for name in theirs], "D",
            ms=5, mfc="none", color=colors[label],
            label=f"{label}, the paper's" if theirs else None,
        )  # fmt: skip
    _name_rows(axis, [*places])
    axis.set_xlabel("accuracy, points; dotted: one seed, images alone")


def _draw_accuracies(axis: Any, cells: list[dict[str, Any]], colors: dict[str, str]) -> None:
    for label, group in grouped(cells).items():
        for place, entry in enumerate(COLUMNS.values()):
            values = [100 * found["accuracy"] for cell in group if (found := entry(cell["final"]))]
            axis.plot(values, [place] * len(values), "o", ms=5, color=colors[label])
    for arm, theirs in paper_arms(cells[0]).items():
        if arm != "baseline":
            axis.plot(
                [100 * value for value in theirs], range(len(theirs)), "D", ms=5, mfc="none",
                color=colors.get(f"{arm} {WEIGHT:g}", colors.get(arm)), label=f"{arm}, the paper's",
            )  # fmt: skip
    _name_rows(axis, [*COLUMNS])
    axis.set_xlabel("accuracy, %")


def _name_rows(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), labels=names)
    axis.set_ylim(len(names) - 0.5, -0.5)


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
    axis.set_ylabel("accuracy under PGD, %")
