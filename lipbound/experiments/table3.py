"""The paper's ImageNet recipe on Imagenette at 64×64: the same code path, another data set.

The paper trains ResNet-101 on ImageNet with batches of 4,096. Imagenette has ten of its classes and
5,000 training images here, so batch and averaging are in proportion.
"""

from __future__ import annotations

from typing import Any

from lipbound.experiments.request import Request
from lipbound.experiments.table2 import SMOOTH, smooth
from lipbound.experiments.trainings import Tier, work
from lipbound.records import table
from lipbound.robust.plan import Plan

ON = "Imagenette at 64×64"
RADII = (0.02, 0.031)
TIER = Tier(
    "ResNet-101 on Imagenette at 64×64, 80 epochs",
    {
        "data": "packed-imagenette64", "batch": 128, "ema": 0.99, "held_out": 0.04, "check": 200,
        "milestones": (30, 60),
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
HEADS = ("clean", "PGD 0.02", "PGD 0.031", "C&W 1", "C&W 2", "C&W 3")


def compute(request: Request) -> dict[str, Any]:
    cells = work(
        "tiny" if request.tiny else "imagenette", TINY if request.tiny else TIER,
        request.out / "table3", folder=request.folder, device=request.device,
        minutes=request.minutes, only=request.only, say=request.say,
    )  # fmt: skip
    return {"cells": cells}


def report(record: dict[str, Any]) -> str:
    rows = []
    for cell in record["cells"]:
        for kind in ("best", "final"):
            found = cell[kind]
            values = [found["clean"], found["also"]["0.02"], found["pgd"]]
            values += [found["cw"][r] for r in ("1", "2", "3")]
            shown = [f"{100 * v['accuracy']:.1f}" for v in values]
            rows.append([cell["label"], kind, *shown, *smooth([found])])
    for label, paper in PAPER.items():
        rows.append([label, "the paper's, ImageNet", *(f"{100 * v:.1f}" for v in paper), "", ""])
    says = TINY.says if record["tiny"] else TIER.says
    return f"""## Table 3: the ImageNet recipe on Imagenette

{says}. The paper's rows are of another data set and cannot be compared in size, only in order.

{table(["arm", "network", *HEADS, *SMOOTH], rows)}
"""
