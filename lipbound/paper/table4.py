"""The paper's efficiency table: the times of LipBound and the power method on 17 networks.

``lipbound bench`` measures more; this table compares two of its columns with the paper's.
"""

from __future__ import annotations

import math
from typing import Any

from lipbound.paper.request import Request
from lipbound.paper.speed import NAMES, speed
from lipbound.report.markdown import digits, table

ON = "He-initialised networks"  # the time does not depend on the weights
PAPER = {
    "alexnet": (4.75, 38.75), "resnet18": (29.88, 148.35), "resnet34": (54.73, 266.85),
    "resnet50": (60.77, 467.61), "resnet101": (102.72, 817.06), "resnet152": (158.8, 1373.57),
    "densenet121": (125.55, 937.35), "densenet161": (176.11, 1292.61),
    "densenet169": (188.03, 1372.62), "densenet201": (281.13, 1930.19), "vgg11": (13.73, 81.78),
    "vgg13": (14.96, 102.04), "vgg16": (21.92, 132.29), "vgg19": (29.05, 162.28),
    "wide_resnet50_2": (113.28, 468.74), "squeezenet1_0": (18.44, 222.4),
    "squeezenet1_1": (18.26, 209.8),
}  # fmt: skip
"""The paper's milliseconds of LipBound and of ten power iterations on a Tesla V100."""


def compute(request: Request) -> dict[str, Any]:
    names = ("squeezenet1_1",) if request.tiny else NAMES
    records = []
    for record in speed(names, request.device, ("lipbound", "power")):
        request.say(record["network"])
        records.append(record)
    return from_bench(records)


def from_bench(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same record from the records of ``lipbound bench``."""
    return {
        "networks": {
            r["network"]: {k: r["milliseconds"][k] for k in ("lipbound", "power")} for r in records
        },
        "measured_on": records[0]["device"],
    }


def report(record: dict[str, Any]) -> str:
    rows, ours, theirs = [], [], []
    for name, found in record["networks"].items():
        paper = PAPER[name]
        ours.append(found["power"] / found["lipbound"])
        theirs.append(paper[1] / paper[0])
        measured = [digits(found["lipbound"]), digits(found["power"]), f"{ours[-1]:.0f}"]
        told = [f"{paper[0]:g}", f"{paper[1]:g}", f"{theirs[-1]:.2f}"]
        rows.append([name, *measured, *told])
    heads = ["LipBound", "power", "ratio"]
    mean, paper_mean = (math.exp(sum(map(math.log, r)) / len(r)) for r in (ours, theirs))
    return f"""## Table 4: the penalty's time

Milliseconds for a whole network on {record["measured_on"]}, and the paper's on a Tesla V100. The
power method makes ten iterations. Here LipBound uses our fused kernels, and the power method uses
plain PyTorch operations. In the paper both use plain PyTorch operations.

{table(["network", *heads, f"the paper: {heads[0]}", *heads[1:]], rows)}

The geometric mean of the ratios is {mean:.0f}, and {paper_mean:.1f} in the paper.
"""
