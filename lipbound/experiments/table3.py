"""The paper's ImageNet recipe on Imagenette at 64×64: the same code path, another data set.

The paper trains ResNet-101 on ImageNet in batches of 4,096. Imagenette has ten of its classes and
5,000 training images here: batches are of 128, the average of the weights is shorter, and the rate
is a tenth of the paper's, at which the network stayed where guessing is.
"""

from __future__ import annotations

from typing import Any

from lipbound.experiments.gaps import Entry, against
from lipbound.experiments.request import Request
from lipbound.experiments.table2 import SMOOTH, gap, smooth
from lipbound.experiments.trainings import Tier, work
from lipbound.records import table
from lipbound.robust.plan import Plan

ON = "Imagenette at 64×64"
TIER = Tier(
    "ResNet-101 on Imagenette at 64×64, 80 epochs of the paper's schedule in batches of 128, from "
    "a rate of 0.01 (the paper: 4,096, 0.1; at 0.1 this network did not learn), one seed",
    {
        "data": "packed-imagenette64", "batch": 128, "lr": 0.01, "ema": 0.99, "held_out": 0.04,
        "check": 200, "milestones": (30, 60),
    },
    {
        "baseline": {"arm": "baseline"},
        "at": {"arm": "at"},
        "at+lipreg 0.0006": {"arm": "at+lipreg", "penalty_weight": 0.0006},
        "at+lipreg 0.001": {"arm": "at+lipreg", "penalty_weight": 0.001},
    },
    plan=Plan(
        ("pgd", "cw"), radius=0.031, iterations=30, restarts=5, radii=(1, 2, 3), batch=250,
        searches=6, search_steps=100, constant=1.0, precision="float16", compile=True,
    ),
    images=1000, autoattack=0, jacobians=200, preset="paper-imagenet", also=(0.02,),
)  # fmt: skip
TINY = Tier(
    "a small CNN on scikit-learn's digits, one epoch: shows only that it works",
    {"epochs": 1, "check": 30, "ema": 0.9},
    {"at+lipreg 0.05": {"arm": "at+lipreg"}},
    plan=Plan(
        ("pgd", "cw"), radius=0.031, iterations=5, restarts=1, radii=(1, 2, 3), searches=2,
        search_steps=10,
    ),
    images=30, autoattack=0, jacobians=10, doubts=False, preset="digits", also=(0.02,),
)  # fmt: skip
PAPER = {
    "baseline": (0.782, 0, 0, 0, 0, 0), "at": (0.509, 0.251, 0.118, 0.307, 0.168, 0.099),
    "at+lipreg 0.0006": (0.515, 0.255, 0.121, 0.316, 0.177, 0.105),
    "at+lipreg 0.001": (0.519, 0.259, 0.123, 0.338, 0.204, 0.129),
}  # fmt: skip
"""Of ResNet-101 on ImageNet: clean, PGD at 0.02 and 0.031, C&W at 1, 2, 3."""
COLUMNS: dict[str, Entry] = {
    "clean": lambda r: r["clean"],
    "PGD 0.02": lambda r: r["also"]["0.02"],
    "PGD 0.031": lambda r: r["pgd"],
    "C&W 1": lambda r: r["cw"]["1"],
    "C&W 2": lambda r: r["cw"]["2"],
    "C&W 3": lambda r: r["cw"]["3"],
}


def compute(request: Request) -> dict[str, Any]:
    cells = work(
        "tiny" if request.tiny else "imagenette", TINY if request.tiny else TIER,
        request.out / "table3", folder=request.folder, device=request.device,
        minutes=request.minutes, only=request.only, say=request.say, watch=request.watch,
    )  # fmt: skip
    return {"cells": cells}


def paper_gaps(label: str) -> dict[str, float]:
    """Column → the paper's difference from its AT."""
    pairs = zip(COLUMNS, PAPER.get(label, ()), PAPER["at"], strict=False)
    return {name: ours - theirs for name, ours, theirs in pairs}


def report(record: dict[str, Any]) -> str:
    tier, rows = TINY if record["tiny"] else TIER, []
    plan = tier.plan
    cells = sorted(record["cells"], key=lambda cell: list(tier.arms).index(cell["label"]))
    for kind in ("final", "best"):
        for cell in cells:
            found = [entry(cell[kind]) for entry in COLUMNS.values()]
            shown = [f"{100 * one['accuracy']:.1f}" for one in found if one]
            rows.append([cell["label"], kind, *shown, *smooth([cell[kind]])])
    for label, paper in PAPER.items():
        rows.append([label, "the paper's, ImageNet", *(f"{100 * v:.1f}" for v in paper), "", ""])
    return f"""## Table 3: the ImageNet recipe on Imagenette

{tier.says}. The paper's rows are of another data set and cannot be compared in size, only in order.

{table(["arm", "network", *COLUMNS, *SMOOTH], rows)}

Accuracies in per cent, on {tier.images} test images. PGD: {plan.restarts} × {plan.iterations}
iterations; Carlini & Wagner: {plan.searches} × {plan.search_steps}.
{_differences(cells)}"""


def _differences(cells: list[dict[str, Any]]) -> str:
    rows = []
    for (label, other), found in against(cells, COLUMNS).items():
        rows.append([f"{label} − {other}", *(gap(found[name]) for name in COLUMNS)])
        theirs = paper_gaps(label)
        if theirs:
            rows.append(["*the paper's*", *(f"{100 * told:+.1f}" for told in theirs.values())])
    if not rows:
        return ""
    return (
        "\nDifferences between final networks, in points, with 95 % intervals over images:\n\n"
        f"{table(['', *COLUMNS], rows)}\n"
    )
