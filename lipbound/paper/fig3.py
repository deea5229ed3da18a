"""Figure 3: Jacobian norms of the trained networks, and accuracy against the length of an attack.

It uses the records of ``table2`` and computes nothing itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from lipbound.paper import table2
from lipbound.paper.gaps import plain
from lipbound.paper.request import Request
from lipbound.report.figures import tidy
from lipbound.report.markdown import table

ON, TINY = table2.ON, table2.TINY
MEANS, STEPS = "Jacobian norm, mean", "C&W 0.8 after 20 and 200 iterations"
JACOBIANS = {"at": 6.4, "at+lipreg": 4.15, "baseline": 45.2, "lipreg": 45.9}
PAPER: dict[str, dict[str, Any]] = {
    MEANS: JACOBIANS,
    STEPS: {"at": (0.464, 0.334), "at+pm": (0.476, 0.419), "at+lipreg": (0.499, 0.438)},
}
"""The paper's networks on CIFAR-10, from its first author's thesis."""

Arms = dict[str, dict[str, Any]]


def compute(request: Request) -> dict[str, Any]:
    return from_cells(table2.compute(request)["cells"])


def from_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the final networks of the first seed, by tier."""
    tiers: dict[str, dict[str, Any]] = {}
    for cell in (cell for own in table2.by_tier(cells).values() for cell in own):
        found = cell["final"]
        if cell["seed"] == 0 and "pgd" in found:
            tiers.setdefault(cell["tier"], {})[cell["label"]] = {
                "clean": found["clean"]["accuracy"],
                "norms": found["jacobian_norms"]["all"],
                "against_iterations": found["pgd"]["against_iterations"],
                "against_steps": found.get("against_steps"),
                "plain": plain(cell),
            }
    return {"tiers": tiers}


def report(record: dict[str, Any], note: str = "") -> str:
    """Return the report; ``note`` follows what it says of the curves."""
    rows = []
    for tier, arms in record["tiers"].items():
        for label, found in arms.items():
            norms, curve = sorted(found["norms"]), found["against_iterations"]
            size = (
                statistics.fmean(norms),
                statistics.median(norms),
                norms[int(0.95 * len(norms))],
            )
            ten, last = f"{100 * curve['10']:.1f}" if "10" in curve else "", list(curve)[-1]
            end = f"{100 * curve[last]:.1f} (after {last})"
            rows.append([tier, label, *(f"{norm:.2f}" for norm in size), ten, end])
    for label, mean in PAPER[MEANS].items():
        rows.append(["the paper", label, f"{mean:g}", "", "", "", ""])
    heads = ["tier", "arm", MEANS, "median", "95 %", "accuracy after 10 iterations"]
    known = [
        f"{', '.join(own)} of tier {tier}"
        for tier, arms in record["tiers"].items()
        if (own := _stepped(arms))
    ]
    drawn = (
        "The accuracy against the number of steps of Carlini & Wagner's attack was recorded for "
        f"{'; '.join(known)}."
        if known
        else "The accuracy against the number of steps of Carlini & Wagner's attack, the paper's "
        "other panel, was not recorded for any network here."
    )
    return f"""## Figure 3: Jacobian norms, and accuracy against iterations

![Jacobian norms and accuracy against PGD iterations](fig3.svg)

The figure shows the final networks of the first seed. PGD has one restart. Networks trained
without attacks lie below the range of the curves. {drawn} The paper's numbers are from its first
author's thesis. The curves are counted during the search, before its images are checked again in
float32.{note}

{table([*heads, "at the end"], rows)}
{_steps(record["tiers"])}"""


def _steps(tiers: dict[str, Arms]) -> str:
    """Describe the accuracy lost to ten times as many steps of Carlini & Wagner's attack."""
    rows = []
    for tier, arms in tiers.items():
        for label, found in _stepped(arms).items():
            steps = found["against_steps"]
            most = max(map(int, steps))
            few = min(int(n) for n in steps if 10 * int(n) >= most)
            radius, last = list(steps[str(most)].items())[-1]
            first = steps[str(few)][radius]
            rows.append([tier, label, radius, *_fell(first, last), f"{few}, {most}"])
    if not rows:
        return ""
    for label, both in PAPER[STEPS].items():
        rows.append(["the paper", label, "0.8", *_fell(*both), "20, 200"])
    heads = ["tier", "arm", "C&W radius", "few steps", "ten times as many", "lost", "steps"]
    return f"\n{table(heads, rows)}\n"


def _fell(first: float, last: float) -> list[str]:
    return [f"{100 * first:.1f}", f"{100 * last:.1f}", f"{100 * (first - last):.1f}"]


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """Return arm → colour, the same in every figure; ``at`` and ``baseline`` are grey."""
    grey = {"at": "#333333", "baseline": "#aaaaaa"}
    others = [label for label in dict.fromkeys(labels) if label not in grey]
    return {**grey, **{label: f"C{i % 10}" for i, label in enumerate(others)}}


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    tiers = table2.without_pilots(record["tiers"])
    rows, columns = max(1, len(tiers)), 3 if any(map(_stepped, tiers.values())) else 2
    made, axes = pyplot.subplots(
        rows, columns, figsize=(4.9 * columns, 3.2 * rows), layout="constrained", squeeze=False
    )
    colors = colors_of(label for arms in tiers.values() for label in arms)
    for (left, right, *third), (tier, arms) in zip(axes, tiers.items(), strict=False):
        left.set_title(f"tier {tier}, first seed", loc="left")
        _draw_norms(left, arms, colors)
        _draw_iterations(right, arms, colors)
        for axis in third:
            if _stepped(arms):
                _draw_steps(axis, _stepped(arms), colors)
            else:
                axis.axis("off")
        last = (right, *third)[-1]
        last.legend(
            *left.get_legend_handles_labels(), frameon=False, fontsize=8, loc="center left",
            bbox_to_anchor=(1 if last.axison else 0, 0.5),
        )  # fmt: skip
        for axis in (left, right, *third):
            tidy(axis)
    return made


def _stepped(arms: Arms) -> Arms:
    """Return the arms that were also attacked with fewer steps of Carlini & Wagner's attack."""
    return {
        label: found
        for label, found in arms.items()
        if found.get("against_steps") and not found["plain"]
    }


def _draw_norms(axis: Any, arms: Arms, colors: dict[str, str]) -> None:
    for label, found in arms.items():
        norms = sorted(found["norms"])
        share = [(i + 1) / len(norms) for i in range(len(norms))]
        axis.step(norms, share, color=colors[label], label=label)
    axis.set_xscale("log")
    axis.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlabel("Jacobian norm")
    axis.set_ylabel("share of images below")


def _draw_iterations(axis: Any, arms: Arms, colors: dict[str, str]) -> None:
    shown: list[float] = []
    for label, found in arms.items():
        curve = {int(n): 100 * share for n, share in found["against_iterations"].items()}
        axis.plot([*curve], [*curve.values()], marker="o", ms=3, color=colors[label])
        shown += [] if found.get("plain") else curve.values()
    axis.set_xscale("symlog")
    axis.set_xticks([0, 1, 10, 100], labels=["0", "1", "10", "100"])
    if shown:
        axis.set_ylim(min(shown) - 3, max(shown) + 3)
    axis.set_xlabel("PGD iterations")
    axis.set_ylabel("accuracy, %")


def _draw_steps(axis: Any, arms: Arms, colors: dict[str, str]) -> None:
    first = next(iter(arms.values()))["against_steps"]
    radii = [*first[min(first)]]
    for label, found in arms.items():
        for radius, style in zip(radii, ("-", "--", ":"), strict=False):
            curve = {int(n): 100 * at[radius] for n, at in found["against_steps"].items()}
            axis.plot([*curve], [*curve.values()], style, marker="o", ms=3, color=colors[label])
    axis.set_xscale("log")
    axis.set_xticks([int(n) for n in first], labels=[*first])
    axis.xaxis.set_minor_formatter("")
    dashed = "".join(f", dashed {radius}" for radius in radii[1:2])
    axis.set_xlabel(f"Carlini & Wagner: steps a search; radius {radii[0]}{dashed}")
    axis.set_ylabel("accuracy, %")
