"""Figure 2: the gap Γ(n) between a bound for all input sizes and σ1 at size n.

The kernels have size c×s×s, with c input channels and one output: random ones with entries as
PyTorch initialises 1 → c layers, as in the paper, and rows of trained layers. A whole trained layer
is added. ARPACK computes σ1 of the layer at n×n inputs. The bounds are LipBound on a fine grid
(1024 points per axis, certified), the upper end of our bracket, and PolyGrid as published, whose
unwidened grid of 10 points per axis can fall below σ1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lipbound import bound, bracket, estimate, exact
from lipbound.paper.request import Request
from lipbound.paper.source import row, spread, wide_layers
from lipbound.report.figures import tidy
from lipbound.report.markdown import table

SIZES = (4, 6, 8, 12, 16, 24, 32, 50, 80, 112, 160, 224)
SHAPES = ((1, 3), (6, 3), (6, 5), (16, 3))
RANDOM = "random"
ROW = 6  # number of input channels of a trained row
PAPER = {"6×3×3": {"50": 0.012, "224": 4e-4}}
METHODS = {"bracket": "ours (bracket)", "lipbound": "LipBound, S = 1024", "polygrid": "PolyGrid"}
STYLES = {"bracket": "-", "lipbound": ":"}


def compute(request: Request) -> dict[str, Any]:
    lines = []
    for of, kernel in _kernels(request):
        name = "×".join(str(n) for n in kernel.shape[kernel.shape[0] == 1 :])
        values = {
            "bracket": bracket(kernel, 1e-6).upper,
            "lipbound": float(bound(kernel, "lipbound", samples=1024, sides="both")),
            "polygrid": float(estimate(kernel, "polygrid")),
        }
        truth = {}
        for n in SIZES:
            if n >= max(kernel.shape[2:]) and (n <= 16 or not request.tiny):
                request.say(f"{name}, {of}: σ1 at {n}×{n}")
                truth[str(n)] = exact(kernel, (n, n))
        lines.append({"kernel": name, "of": of, "values": values, "truth": truth})
    return {"lines": lines}


def _kernels(request: Request) -> Iterator[tuple[str, Tensor]]:
    """Yield origin and float64 kernel: random rows, trained rows, and a trained layer."""
    layers = wide_layers(request.weights, ROW, "fig2")
    for channels, side in SHAPES[:2] if request.tiny else SHAPES:
        torch.manual_seed(0)
        stacked = torch.nn.Conv2d(1, channels, side).weight.detach().double()
        yield RANDOM, stacked.transpose(0, 1)  # LipBound takes rows; σ1 is the same
    for name, kernel in spread(layers, 2):
        yield name, row(kernel, ROW)
    yield min(layers, key=lambda layer: layer[1].numel())  # a larger one takes long at n = 224


def report(record: dict[str, Any]) -> str:
    rows, sizes = [], ("8", "16", "50", "224")
    for line in record["lines"]:
        for method, label in METHODS.items():
            gaps = {n: line["values"][method] - t for n, t in line["truth"].items()}
            told = PAPER.get(line["kernel"], {}) if _random(line) and method == "lipbound" else {}
            rows.append([
                line["kernel"],
                line["of"],
                label,
                f"{line['values'][method]:.5g}",
                *(f"{gaps[n]:.2e}" if n in gaps else "" for n in sizes),
                "; ".join(f"Γ({n}) {g:g}" for n, g in told.items()),
            ])  # fmt: skip
    heads = ["kernel", "of", "bound", "its value", *(f"Γ({n})" for n in sizes), "the paper"]
    return f"""## Figure 2: the gap Γ(n)

Γ(n) is the difference between a bound for all input sizes and the largest singular value at n×n
inputs. LipBound has S = 1024 frequencies per axis here. PolyGrid is LipBound as published, on a
coarse grid without a proof.

![The gap between bounds and σ1 against the input size](fig2.svg)

{table(heads, rows)}

The random kernels have the paper's distribution, but are other samples of it. A kernel with four
sizes is a whole layer, output channels first. A negative gap means that the estimate is below σ1.
With one output channel LipBound equals sup σ1(F), and both certified bounds differ only by their
grids. With several channels LipBound is a sum over them, and only the bracket's gap goes to zero.
"""


def _random(line: dict[str, Any]) -> bool:
    return line["of"] == RANDOM


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    made, panels = pyplot.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained", sharey=True)
    for panel, trained in zip(panels, (False, True), strict=True):
        own = [line for line in record["lines"] if _random(line) != trained]
        for index, line in enumerate(own):
            sizes = [int(n) for n in line["truth"]]
            name = line["kernel"] if _random(line) else f"{line['kernel']}, {line['of']}"
            for method, style in STYLES.items():
                gaps = [line["values"][method] - t for t in line["truth"].values()]
                label = name if method == "bracket" else None  # one legend entry per kernel
                panel.plot(sizes, gaps, style, marker="o", ms=3, color=f"C{index}", label=label)
        panel.set_title("trained" if trained else RANDOM, fontsize=9, loc="left")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("input size n")
        tidy(panel)
    for method, style in STYLES.items():
        panels[0].plot([], [], style, color="gray", label=METHODS[method])
    panels[0].set_ylabel("Γ(n)")
    for panel in panels:
        panel.legend(frameon=False, fontsize=7)
    return made
