"""Figure 2: Γ(n), what a bound that holds for every size exceeds σ1 at size n by.

Kernels c×s×s, c input channels and one output, entries as PyTorch initialises 1 → c layers; σ1 of
the layer at n×n inputs by ARPACK. Beside LipBound on a fine grid (1024 points an axis, certified)
the upper end of our bracket, and PolyGrid as published, whose unwidened grid of 10 points an axis
can fall below σ1.
"""

from __future__ import annotations

from typing import Any

import torch

from lipbound import bound, bracket, estimate, exact
from lipbound.experiments.request import Request
from lipbound.figures import tidy
from lipbound.records import table

SIZES = (4, 6, 8, 12, 16, 24, 32, 50, 80, 112, 160, 224)
SHAPES = ((1, 3), (6, 3), (6, 5), (16, 3))
ON = "random kernels"
PAPER = {"6×3×3": {"50": 0.012, "224": 4e-4}}
METHODS = {"bracket": "ours (bracket)", "lipbound": "LipBound, S = 1024", "polygrid": "PolyGrid"}


def compute(request: Request) -> dict[str, Any]:
    lines = []
    for channels, side in SHAPES[:2] if request.tiny else SHAPES:
        request.say(f"{channels}×{side}×{side}: σ1 at growing sizes")
        torch.manual_seed(0)
        stacked = torch.nn.Conv2d(1, channels, side).weight.detach().double()
        kernel = stacked.transpose(0, 1)  # one row, as LipBound reads it; σ1 is the same
        values = {
            "bracket": bracket(kernel, 1e-6).upper,
            "lipbound": float(bound(kernel, "lipbound", samples=1024)),
            "polygrid": float(estimate(kernel, "polygrid")),
        }
        sizes = [n for n in SIZES if n >= side and (n <= 16 or not request.tiny)]
        truth = {str(n): exact(kernel, (n, n)) for n in sizes}
        lines.append({"kernel": f"{channels}×{side}×{side}", "values": values, "truth": truth})
    return {"lines": lines}


def report(record: dict[str, Any]) -> str:
    rows, sizes = [], ("8", "16", "50", "224")
    for line in record["lines"]:
        for method, label in METHODS.items():
            gaps = {n: line["values"][method] - t for n, t in line["truth"].items()}
            paper = PAPER.get(line["kernel"], {}) if method == "lipbound" else {}
            shown = [f"{gaps[n]:.2e}" if n in gaps else "" for n in sizes]
            told = "; ".join(f"Γ({n}) {g:g}" for n, g in paper.items())
            rows.append([line["kernel"], label, *shown, told])
    return f"""## Figure 2: the gap Γ(n)

![The gap between bounds and σ1 against the input size](fig2.svg)

{table(["kernel", "bound", *(f"Γ({n})" for n in sizes), "the paper"], rows)}

The kernels are random like the paper's, but not the paper's. A negative gap is an estimate below
σ1. With one output channel LipBound equals sup σ1(F), and both certified bounds differ by their
grids only.
"""


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    made, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for index, line in enumerate(record["lines"]):
        sizes = [int(n) for n in line["truth"]]
        for method, style in (("bracket", "-"), ("lipbound", ":")):
            gaps = [line["values"][method] - t for t in line["truth"].values()]
            label = f"{line['kernel']}, {METHODS[method]}"
            axes.plot(sizes, gaps, style, marker="o", ms=3, color=f"C{index}", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("input size n")
    axes.set_ylabel("Γ(n)")
    tidy(axes)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return made
