"""Differences between trained networks, with intervals, beside the differences in the paper.

A *cell* is one training: one arm with one seed. Differences compare cells of the same seed on the
same images.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from lipbound.robust.attacks.evaluate import outcomes
from lipbound.robust.training.settings import filled

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

Entry = Callable[[dict[str, Any]], dict[str, Any] | None]
COLUMNS: dict[str, Entry] = {
    "clean": lambda r: r.get("clean"),
    "PGD": lambda r: r.get("pgd"),
    "C&W 0.6": lambda r: r.get("cw", {}).get("0.6"),
    "C&W 0.8": lambda r: r.get("cw", {}).get("0.8"),
    "APGD 0.6": lambda r: r.get("apgd-l2", {}).get("0.6"),
    "APGD 0.8": lambda r: r.get("apgd-l2", {}).get("0.8"),
    "AutoAttack": lambda r: r.get("autoattack"),
}


WHOLE = {
    "clean (all)": ("test_accuracy", "clean", "clean"),
    "PGD-10 (all)": ("test_pgd_accuracy", "pgd", "PGD"),
}
"""Accuracies on all test images, which the training measures at its end with ten steps of PGD.

Column → its name in a training's summary, its name in the summary's outcomes image by image, and
the column with such outcomes that is closest to it, for records that lack them.
"""
SEEDS = 3  # with fewer seeds a difference gets no verdict


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


def whole_entry(name: str) -> Entry:
    """Return the entry of a column of ``WHOLE``, for :func:`paired`."""
    return lambda found: found.get("test", {}).get(WHOLE[name][1])


def facts(cell: dict[str, Any], network: str = "final") -> dict[str, Any]:
    """Return the attacks of a cell's network, and its outcomes on all test images (``test``)."""
    tested = cell.get("training", {}).get(network, {})
    return {"test": tested.get("test", {}), **cell.get(network, {})}


def paired(
    group: list[dict[str, Any]],
    other: list[dict[str, Any]],
    entry: Entry,
    networks: tuple[str, str] = ("final", "final"),
) -> Tensor | None:
    """Return differences of networks' outcomes, ``(seeds, images)``, for common seeds.

    Args:
        group: Cells of one arm.
        other: Cells of the other arm.
        entry: Picks the outcomes from :func:`facts` of a network.
        networks: Which network of each arm: ``final`` or ``best``.
    """
    others = {cell["seed"]: cell for cell in other}
    gaps: list[Tensor] = []
    for cell in group:
        if cell["seed"] in others:
            pair = zip((cell, others[cell["seed"]]), networks, strict=True)
            one, two = (entry(facts(each, network)) for each, network in pair)
            if one is None or two is None:
                return None
            gaps.append(outcomes(one).double() - outcomes(two).double())
    return torch.stack(gaps) if gaps else None


def difference(
    group: list[dict[str, Any]], other: list[dict[str, Any]], entry: Entry, network: str = "final"
) -> dict[str, Any] | None:
    """Return the mean paired difference over common seeds, its interval, and each seed's value."""
    table = paired(group, other, entry, (network, network))
    return None if table is None else mean(table)


def mean(table: Tensor) -> dict[str, Any]:
    """Return the mean of ``(seeds, images)``, its interval, and each seed's value.

    The 95 % interval treats images and seeds as random samples. One seed says nothing about other
    seeds: its interval includes the images alone.
    """
    return interval(float(table.mean()), _reach(table), table.mean(1).tolist())


def interval(middle: float, reach: float, seeds: list[float]) -> dict[str, Any]:
    """Return a difference with its interval and each seed's value."""
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
        return student(of_images / images, images - 1)
    rest = table - by_image - by_seed[:, None] + table.mean()
    both = (seeds - 1) * (images - 1)
    of_both, of_seeds = float(rest.square().sum()) / both, images * float(by_seed.var())
    total = max(of_images, of_both) + max(0.0, of_seeds - of_both)
    if total == 0:
        return 0.0
    doubt = of_images**2 / (images - 1) + of_seeds**2 / (seeds - 1) + of_both**2 / both
    reach = student(total / table.numel(), total**2 / doubt)
    if of_seeds > of_both:
        reach = max(reach, student(of_seeds / table.numel(), seeds - 1))
    return reach


def student(variance: float, degrees: float) -> float:
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
Gaps = dict[str, dict[str, Any]]


def against(cells: list[dict[str, Any]]) -> dict[Pair, Gaps]:
    """Return arm and reference → column → difference of their attacked final networks.

    The reference is ``at``, and every other arm of plain adversarial training whose changes to
    ``at`` (another weight decay, for example) the arm also has.

    Args:
        cells: The cells of one tier.
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
    found: dict[Pair, Gaps] = {}
    for label, other in pairs:
        if label == other or plain(groups[label][0]):
            continue
        both = groups[label], groups.get(other, [])
        gaps = {name: difference(*both, entry) for name, entry in COLUMNS.items()}
        known = {name: gap for name, gap in gaps.items() if gap is not None}
        if known:
            found[label, other] = known
    return found


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
    return {**told, **{name: told[column] for name, (*_, column) in WHOLE.items()}}
