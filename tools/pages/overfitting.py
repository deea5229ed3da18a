"""A section of docs/results/robustness.md: does the penalty's full dose stop robust overfitting?

What is measured was fixed before any network of the tier was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lipbound.paper import gaps, table2
from lipbound.paper.fig3 import colors_of
from lipbound.paper.gaps import COLUMNS, SEEDS, WEIGHT, Entry
from lipbound.report.figures import tidy
from lipbound.report.markdown import filled_table
from tools.pages import differences, fits
from tools.pages.differences import GAPS

Cells = list[dict[str, Any]]

TIER, LIPREG = "P", f"at+lipreg {WEIGHT:g}"
JUDGED = "PGD-10 (all)"  # the attack that chooses `best`, and the one with the most images
SHARE = 0.5  # of AT's fall, which an arm must remove; an interval can lie on either side of it
ENTRIES: dict[str, Entry] = {
    name: COLUMNS.get(name) or gaps.whole_entry(name)
    for name in (JUDGED, "PGD", "AutoAttack", "C&W 0.8", "clean (all)")
}


def fall(own: Cells, name: str = JUDGED) -> dict[str, Any] | None:
    """Return the accuracy of the best networks minus that of the final ones."""
    table = gaps.paired(own, own, ENTRIES[name], ("best", "final"))
    return None if table is None else gaps.mean(table)


def excess(own: Cells, at: Cells, share: float = SHARE) -> dict[str, Any] | None:
    """Return a share of the fall of ``at`` minus the fall of an arm, over common seeds."""
    seeds = {cell["seed"] for cell in own} & {cell["seed"] for cell in at}
    pair = [
        sorted((cell for cell in cells if cell["seed"] in seeds), key=lambda cell: cell["seed"])
        for cells in (own, at)
    ]
    tables = [gaps.paired(cells, cells, ENTRIES[JUDGED], ("best", "final")) for cells in pair]
    own_falls, at_falls = tables
    if own_falls is None or at_falls is None:
        return None
    return gaps.mean(share * at_falls - own_falls)


def verdict(own: Cells, at: Cells) -> str:
    """Return whether an arm stops overfitting: ``yes``, ``no``, ``undecided``, or "" if unknown."""
    removed, of_at = excess(own, at), fall(at)
    if removed is None or of_at is None or len(removed["seeds"]) < SEEDS:
        return ""
    if of_at["low"] > 0 and removed["low"] > 0:
        return "yes"
    return "no" if of_at["low"] > 0 > removed["high"] else "undecided"


def section(tiers: Mapping[str, Cells]) -> str:
    """Return the section; empty before the tier has networks that were attacked."""
    groups = gaps.grouped(gaps.attacked(tiers.get(TIER, [])))
    if not groups:
        return ""
    at, own = groups.get("at", []), groups.get(LIPREG, [])
    matched = groups.get(table2.MATCHED, [])
    parts = [f"## Does a full dose stop overfitting?\n\n{_answer(own, at)}\n\n{MEASURE}"]
    if matched:
        parts.append(_control(own, at, matched))
    parts += [_falls(groups), _differences(own, at, matched)]
    parts.append(
        "![Accuracy against the epoch](overfitting.svg)\n\nThe lines are the accuracies under PGD with ten steps: solid on held-out images, dashed on training images in training. Every line is one seed.\n"
    )
    return "\n".join(part for part in parts if part) + "\n"


def claims(tiers: Mapping[str, Cells]) -> list[list[str]]:
    """A line for the index of the results: a claim, a number, a link."""
    groups = gaps.grouped(gaps.attacked(tiers.get(TIER, [])))
    at, own = groups.get("at", []), groups.get(LIPREG, [])
    answer = verdict(own, at)
    if not answer:
        return []
    said = {
        "yes": "The paper's full dose stops robust overfitting.",
        "no": "The paper's full dose does not stop robust overfitting.",
        "undecided": "Whether the paper's full dose stops robust overfitting is undecided.",
    }[answer]
    number = f"AT falls by {_told(fall(at))} points from its best epoch to its last, with the regularizer by {_told(fall(own))} ({differences.seeds(len(own))})"
    return [[said, number, "[robustness](robustness.md#does-a-full-dose-stop-overfitting)"]]


MEASURE = f"""What is measured was fixed before the trainings. The *fall* of an arm is the accuracy of its best networks minus that of its final ones, under PGD with ten steps on all test images. Held-out images choose the best epoch. An arm *stops overfitting* if it removes more than half of the fall of AT: {SHARE:g} times the fall of AT, minus its own fall, paired over seeds and images. The answer is yes if the 95 % interval lies above zero, no if it lies below, and undecided if it contains zero or if AT does not fall. Fewer than {SEEDS} seeds get no answer.
"""


def _answer(own: Cells, at: Cells) -> str:
    removed, of_at, of_own = excess(own, at), fall(at), fall(own)
    if removed is None or of_at is None or len(removed["seeds"]) < SEEDS:
        counts = [
            f"`{label}` has {differences.seeds(len(cells)) if cells else 'none'}"
            for label, cells in (("at", at), (LIPREG, own))
        ]
        return f"**There is no answer yet**, because it needs {SEEDS} seeds of both arms in tier {TIER}: {' and '.join(counts)}."
    answer = {
        "yes": "Yes: the regularizer removes more than half of it.",
        "no": "No: the regularizer removes less than half of it.",
        "undecided": "Undecided.",
    }[verdict(own, at)]
    doubt = (
        ""
        if of_at["low"] > 0
        else " The fall of AT cannot be told from zero, so there is nothing to stop."
    )
    return f"**{answer}** In tier {TIER}, at {fits.dose(own[0]):.2f} of the paper's dose, AT falls by {_told(of_at)} points and AT with the regularizer by {_told(of_own)}. Half of the first minus the second is {_told(removed)} ({differences.seeds(len(removed['seeds']))}).{doubt}"


def _control(own: Cells, at: Cells, matched: Cells) -> str:
    decay = matched[0]["settings"]["weight_decay"]
    said = f"The arm `{table2.MATCHED}` has no penalty. Its weight decay of {decay:g} shrinks the layers as much as the regularizer does, so it tells shrinking from the rest of what the regularizer does."
    removed, beyond = excess(matched, at), excess(own, matched, 1.0)
    if removed is not None:
        answer = {
            "yes": "It stops overfitting too",
            "no": "It does not stop overfitting",
            "undecided": "Whether it stops overfitting is undecided",
            "": f"It has {differences.seeds(len(removed['seeds']))} beside AT and so no answer",
        }[verdict(matched, at)]
        said += f" {answer}: half of the fall of AT minus its own fall is {_told(removed)}."
    if beyond is not None:
        said += f" Its fall minus that of `{LIPREG}` is {_told(beyond)}."
    return f"{said}\n"


def _falls(groups: Mapping[str, Cells]) -> str:
    rows = []
    for label, own in groups.items():
        found = {name: fall(own, name) for name in ENTRIES}
        rows.append(
            [label, str(len(own)), *(table2.gap(one) if one else "" for one in found.values())]
        )
    return f"The falls from the best epoch to the last, in points, **bold** where at least {SEEDS} seeds give an interval without zero (the interval of one seed counts the images alone):\n\n{filled_table(['arm', 'seeds', *ENTRIES], rows)}\n"


def _differences(own: Cells, at: Cells, matched: Cells) -> str:
    rows = []
    for one, other in ((own, at), (matched, at), (own, matched)):
        for network in ("final", "best") if one and other else ():
            entries = {name: COLUMNS.get(name) or gaps.whole_entry(name) for name in GAPS}
            found = {
                name: gaps.difference(one, other, entry, network) for name, entry in entries.items()
            }
            cells = [table2.gap(gap) if gap else "" for gap in found.values()]
            if any(cells):
                rows.append([f"{one[0]['label']} − {other[0]['label']}, {network}", *cells])
        if rows and other is at and one is own:
            theirs = gaps.paper_gaps(own[0])
            rows.append(
                [
                    "*the paper's*",
                    *(f"{100 * theirs[name]:+.1f}" if name in theirs else "" for name in GAPS),
                ]
            )
    return (
        f"Differences in accuracy beside the paper's, which does not say which network it attacks:\n\n{filled_table(['', *GAPS], rows)}\n"
        if rows
        else ""
    )


def _told(gap: dict[str, Any] | None) -> str:
    return table2.gap(gap).strip("*").replace("+", "") if gap else "unknown"


def figure(cells: Cells, pyplot: Any) -> Any:
    """Draw the accuracy under PGD on held-out and on training images against the epoch."""
    made, axis = pyplot.subplots(figsize=(7.4, 3.6), layout="constrained")
    groups = gaps.grouped(cells)
    colors = colors_of(groups)
    for label, own in groups.items():
        for name, style in (("held_out_pgd_accuracy", "-"), ("train_accuracy", "--")):
            for order, cell in enumerate(own):
                values = [100 * epoch[name] for epoch in cell["epochs"] if epoch[name] is not None]
                first = order == 0 and style == "-"
                axis.plot(
                    range(1, len(values) + 1), values, style, lw=0.8, color=colors[label],
                    label=f"{label}, {differences.seeds(len(own))}" if first else None,
                )  # fmt: skip
    axis.set_xlabel("epoch")
    axis.set_ylabel("accuracy under PGD, %")
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)
    return made
