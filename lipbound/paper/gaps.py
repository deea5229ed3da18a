"""Differences between trained networks, with intervals, beside the differences in the paper.

A *cell* is one training: one arm with one seed. Differences compare cells of the same seed on the
same images.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from lipbound.report.figures import tidy
from lipbound.robust.attacks.evaluate import outcomes
from lipbound.robust.training.settings import Settings, filled, from_dict, settings

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
WEIGHT = 0.008  # the paper's λ2
JACOBIANS = {"at": 6.4, "at+lipreg": 4.15, "baseline": 45.2, "lipreg": 45.9}
"""Mean Jacobian norms of the paper's networks on CIFAR-10, from the first author's thesis."""
PUBLISHED = {
    "cifar10": ("paper-cifar", 50_000), "cifar100": ("paper-cifar", 50_000),
    "imagenette64": ("paper-imagenet", 1_281_167),
}  # fmt: skip
"""Data → the preset with the paper's settings, and the paper's number of training images."""
TEST_IMAGES = {"cifar10": 10_000, "cifar100": 10_000}

Entry = Callable[[dict[str, Any]], dict[str, Any] | None]
COLUMNS: dict[str, Entry] = {
    "clean": lambda r: r.get("clean"),
    "PGD": lambda r: r.get("pgd"),
    "C&W 0.6": lambda r: r.get("cw", {}).get("0.6"),
    "C&W 0.8": lambda r: r.get("cw", {}).get("0.8"),
    "AutoAttack": lambda r: r.get("autoattack"),
}


WHOLE = {"clean (all)": ("test_accuracy", "clean"), "PGD-10 (all)": ("test_pgd_accuracy", "PGD")}
"""Accuracies on all test images, which the training measures at its end with ten steps of PGD.

Column → its name in a training's summary, and the column with outcomes image by image that is
closest to it.
"""
SEEDS = 3  # with fewer seeds a difference gets no verdict


@dataclass(frozen=True)
class Deviation:
    """The standard deviation of a difference over seeds, and its degrees of freedom."""

    value: float
    degrees: float


def whole(cell: dict[str, Any], network: str, name: str) -> float | None:
    """Return a column of ``WHOLE`` for a cell's best or final network."""
    return cell.get("training", {}).get(network, {}).get(WHOLE[name][0])


def attacked(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells whose networks were attacked after training."""
    return [cell for cell in cells if "pgd" in cell["final"]]


def plain(cell: dict[str, Any]) -> bool:
    """Whether the network was trained without attacks; its accuracy under attack is then zero."""
    return filled(cell["settings"])["attack"] == 0


def data(cell: dict[str, Any]) -> str:
    """Return the name of a cell's data set."""
    return str(cell.get("settings", {}).get("data", "")).removeprefix("packed-")


def grouped(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell["label"], []).append(cell)
    return groups


def seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


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


def _paired(
    group: list[dict[str, Any]], other: list[dict[str, Any]], network: str, entry: Entry
) -> Tensor | None:
    """Return differences of outcomes, ``(seeds, images)``, for the seeds that both arms have."""
    others = {cell["seed"]: cell for cell in other}
    gaps: list[Tensor] = []
    for cell in group:
        if cell["seed"] in others:
            one, two = entry(cell.get(network, {})), entry(others[cell["seed"]].get(network, {}))
            if one is None or two is None:
                return None
            gaps.append(outcomes(one).double() - outcomes(two).double())
    return torch.stack(gaps) if gaps else None


def difference(
    group: list[dict[str, Any]],
    other: list[dict[str, Any]],
    network: str,
    entry: Entry,
    deviation: Deviation | None = None,
) -> dict[str, Any] | None:
    """Return the mean paired difference over common seeds, its interval, and each seed's value.

    The 95 % interval treats images and seeds as random samples. One seed says nothing about other
    seeds: its interval includes the images, and the seeds by ``deviation`` if that is known.
    """
    table = _paired(group, other, network, entry)
    if table is None:
        return None
    reach = _reach(table)
    if len(table) == 1 and deviation is not None:
        reach = math.hypot(reach, _student(deviation.value**2, deviation.degrees))
    return _gap(float(table.mean()), reach, table.mean(1).tolist())


def whole_difference(
    group: list[dict[str, Any]],
    other: list[dict[str, Any]],
    network: str,
    name: str,
    deviation: Deviation | None = None,
) -> dict[str, Any] | None:
    """Return the same for all test images, of which only the accuracy is recorded.

    How much the images contribute to the interval is therefore estimated from those that were
    attacked one by one. The contributions of seeds and images are added as squares, each with its
    own Student's t: with three seeds, Satterthwaite's formula would hide how little is known about
    the seeds.
    """
    others = {cell["seed"]: whole(cell, network, name) for cell in other}
    pairs = [(whole(cell, network, name), others.get(cell["seed"])) for cell in group]
    gaps = [one - two for one, two in pairs if one is not None and two is not None]
    if not gaps:
        return None
    by_seeds = math.inf
    if len(gaps) > 1:
        by_seeds = _student(statistics.variance(gaps) / len(gaps), len(gaps) - 1)
    elif deviation is not None:
        by_seeds = _student(deviation.value**2, deviation.degrees)
    by_images = math.inf
    table = _paired(group, other, network, COLUMNS[WHOLE[name][1]])
    if table is not None and table.shape[1] > 1:
        images = TEST_IMAGES.get(data(group[0]), table.shape[1])
        by_images = _student(float(table.mean(0).var()) / images, table.shape[1] - 1)
    return _gap(statistics.fmean(gaps), math.hypot(by_seeds, by_images), gaps)


def _gap(middle: float, reach: float, seeds: list[float]) -> dict[str, Any]:
    return {"difference": middle, "low": middle - reach, "high": middle + reach, "seeds": seeds}


def _reach(table: Tensor) -> float:
    """Return half the interval of the mean of ``(seeds, images)``, two crossed random effects.

    The variance is the mean squares of seeds and images minus that of their interaction, and the
    degrees of freedom are Satterthwaite's. If the seeds differ by more than the images explain, the
    interval is at least as wide as that of the seeds' means alone.
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
    """Return half the width of the 95 % interval of a mean with this variance."""
    return float(stdtrit(degrees, 0.975)) * math.sqrt(variance)


def held(cell: dict[str, Any], clean: bool = False) -> float | None:
    """Return the accuracy on held-out images, under PGD or clean, over the last five epochs.

    Every seed holds out other images, so only networks of the same seed can be compared.
    """
    name = "held_out_accuracy" if clean else "held_out_pgd_accuracy"
    values = [epoch[name] for epoch in cell["epochs"][-5:]]
    return statistics.fmean(values) if None not in values else None


def peak(cell: dict[str, Any]) -> float | None:
    """Return the highest accuracy of all epochs under PGD on held-out images."""
    values = [epoch["held_out_pgd_accuracy"] for epoch in cell["epochs"]]
    return max(values) if None not in values else None


Pair = tuple[str, str]


def against(
    cells: list[dict[str, Any]], deviations: Mapping[str, Deviation] | None = None
) -> dict[Pair, dict[str, dict[str, Any]]]:
    """Return arm and reference → column → difference of their attacked final networks.

    The reference is ``at``, and every other arm of plain adversarial training whose changes to
    ``at`` (another weight decay, for example) the arm also has.

    Args:
        cells: The cells of one tier.
        deviations: Result of :func:`pooled`, for arms with one seed.
    """
    deviations = deviations or {}
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
        gaps = {
            name: difference(*both, entry, deviations.get(name)) for name, entry in COLUMNS.items()
        }
        gaps |= {name: whole_difference(*both, name, deviations.get(name)) for name in WHOLE}
        known = {name: gap for name, gap in gaps.items() if gap is not None}
        if known:
            found[label, other] = known
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
        for (_, other), gaps in against(cells).items():
            for name, gap in gaps.items():
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


def paper_arms(cell: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return arm → accuracies of the paper's network on this cell's data."""
    return PAPER.get(data(cell), {})


def paper_gaps(cell: dict[str, Any]) -> dict[str, float]:
    """Return column → the paper's difference from its AT, for this cell's arm, λ2 and data."""
    rows = paper_arms(cell)
    arm, weight = cell["settings"]["arm"], cell["settings"]["penalty_weight"]
    if arm not in rows or arm == "at" or weight != WEIGHT:
        return {}
    pairs = zip(rows[arm], rows["at"], strict=True)
    told = {name: ours - theirs for name, (ours, theirs) in zip(COLUMNS, pairs, strict=False)}
    return {**told, **{name: told[column] for name, (_, column) in WHOLE.items()}}


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


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """Return arm → colour, the same in every figure; ``at`` and ``baseline`` are grey."""
    grey = {"at": "#333333", "baseline": "#aaaaaa"}
    others = [label for label in dict.fromkeys(labels) if label not in grey]
    return {**grey, **{label: f"C{i % 10}" for i, label in enumerate(others)}}


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
    axes[-1, 1].set_xlabel("log10 of the certified Lipschitz bound")
    return made


def _draw_differences(
    axis: Any,
    cells: list[dict[str, Any]],
    colors: dict[str, str],
    deviations: Mapping[str, Deviation],
) -> None:
    found = {label: gaps for (label, to), gaps in against(cells, deviations).items() if to == "at"}
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
    axis.set_xlabel("difference in accuracy, points; dotted: one seed")


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
