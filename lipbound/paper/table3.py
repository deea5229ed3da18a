"""The paper's ImageNet recipe, with the same program, on Imagenette at 64×64.

The paper trains ResNet-101 on ImageNet in batches of 4,096. Imagenette has ten of its classes and
5,000 training images here. Batches have 128 images, the weights are averaged over fewer steps, and
the learning rate is a tenth of the paper's, because the network did not learn at the paper's.

The dose of the penalty is about a hundredth of the paper's, so this says nothing about the
regularizer: the report compares no arms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lipbound.paper.gaps import Entry
from lipbound.paper.request import Request
from lipbound.paper.table2 import SMOOTH, smooth
from lipbound.paper.trainings import Tier, work
from lipbound.report.markdown import table
from lipbound.robust.attacks.plan import Plan

ON = "Imagenette at 64×64"
TIER = Tier(
    "This table says nothing about the regularizer: its dose is 0.012 of the paper's. It shows "
    "that the paper's recipe for large images runs from end to end. "
    "ResNet-101 on Imagenette at 64×64, 80 epochs with the paper's schedule, one seed. Batches "
    "have 128 images (the paper: 4,096) and the learning rate starts at 0.01 (the paper: 0.1, at "
    "which this network did not learn)",
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
    "A small CNN on scikit-learn's digits, one epoch. This shows only that the program works",
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
"""The paper's ResNet-101 on ImageNet: clean, PGD at 0.02 and 0.031, C&W at 1, 2, 3."""
COLUMNS: dict[str, Entry] = {
    "clean": lambda r: r["clean"],
    "PGD 0.02": lambda r: r["also"]["0.02"],
    "PGD 0.031": lambda r: r["pgd"],
    "C&W 1": lambda r: r["cw"]["1"],
    "C&W 2": lambda r: r["cw"]["2"],
    "C&W 3": lambda r: r["cw"]["3"],
}


def compute(request: Request) -> dict[str, Any]:
    name, tier = ("tiny", TINY) if request.tiny else ("imagenette", TIER)
    return {"cells": work(name, tier, replace(request, out=request.out / "table3"))}


def report(record: dict[str, Any]) -> str:
    tier, rows = TINY if record["tiny"] else TIER, []
    plan = tier.plan
    cells = sorted(record["cells"], key=lambda cell: list(tier.arms).index(cell["label"]))
    for network in ("final", "best"):
        for cell in cells:
            measured = [entry(cell[network]) for entry in COLUMNS.values()]
            shown = [f"{100 * one['accuracy']:.1f}" for one in measured if one]
            rows.append([cell["label"], network, *shown, *smooth([cell[network]])])
    theirs = [[label, *(f"{100 * v:.1f}" for v in paper)] for label, paper in PAPER.items()]
    return f"""## Table 3: the ImageNet recipe on Imagenette

{tier.says}.

Accuracies in per cent on {tier.images} test images. PGD has {plan.restarts} restarts of
{plan.iterations} iterations, and Carlini & Wagner's attack (C&W) {plan.searches} searches of
{plan.search_steps} steps.

{table(["arm", "network", *COLUMNS, *SMOOTH], rows)}

The paper's accuracies are those of another data set, ImageNet:

{table(["arm", *COLUMNS], theirs)}
"""
