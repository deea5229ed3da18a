"""Figure 1: contours of trigonometric polynomials with their maxima marked.

The kernels are random ones of size c×3×3 and c×5×5 with one output, as in the paper, and rows of
trained layers. The figure shows |f| for one input channel and √Σ|f_j|² for several. It shows what
the paper calls low convexity, and that the certified maximizer is the highest point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound import bracket, symbol
from lipbound.paper.request import Request
from lipbound.paper.source import spread, strongest, wide_layers

FORMAT = "png"  # filled contours make large vector files
SAMPLES = 65
SHAPES = ((1, 3), (9, 3), (1, 5), (9, 5))


def compute(request: Request) -> dict[str, Any]:
    samples = 9 if request.tiny else SAMPLES
    draw = torch.Generator().manual_seed(0)
    kernels: dict[str, Tensor] = {
        f"random {c}×{s}×{s}": torch.randn(1, c, s, s, generator=draw) / (c * s * s) ** 0.5
        for c, s in SHAPES
    }
    layers = wide_layers(request.weights, 9, "fig1")
    for name, kernel in spread(layers, 2 if request.tiny else 4):
        row = strongest(kernel)
        kernels[f"{name}, row {row}"] = kernel[row : row + 1]
    axis = torch.linspace(-torch.pi, torch.pi, samples, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    panels = []
    for name, kernel in kernels.items():
        heights = torch.linalg.matrix_norm(symbol(kernel.double(), points), 2).flatten()
        found = bracket(kernel.double(), 1e-6)
        panels.append({
            "name": name,
            "shape": list(kernel.shape),
            "heights": heights.reshape(samples, -1).to(torch.float16).tolist(),
            "peak": [(w + np.pi) % (2 * np.pi) - np.pi for w in found.frequency],
            "lower": found.lower,
            "upper": found.upper,
            "highest_sample": float(heights.max()),
        })  # fmt: skip
    return {"samples": samples, "panels": panels}


def report(record: dict[str, Any]) -> str:
    inside = all(p["highest_sample"] <= p["upper"] * (1 + 1e-9) for p in record["panels"])
    verdict = "No sample lies above its certified maximum." if inside else "A SAMPLE LIES HIGHER."
    return f"""## Figure 1: trigonometric polynomials of kernels

![Contours of eight polynomials with their maxima](fig1.png)

The rings mark the certified maximizer and its mirror image. {verdict}
"""


def figure(record: dict[str, Any], pyplot: Any) -> Any:
    panels = record["panels"]
    columns = 4
    rows = -(-len(panels) // columns)
    made, axes = pyplot.subplots(
        rows, columns, figsize=(8.4, 2.3 * rows), layout="constrained", squeeze=False
    )
    axis = np.linspace(-np.pi, np.pi, record["samples"])
    for panel, place in zip(panels, axes.flat, strict=False):
        place.contourf(axis, axis, np.array(panel["heights"]).T, levels=12, cmap="BuPu")
        for sign in (1, -1):
            at = [sign * w for w in panel["peak"]]
            place.plot(*at, "o", ms=6, mfc="none", mec="#d1495b", mew=1.5)
        place.set_title(panel["name"], fontsize=7)
        place.set_aspect("equal")
        place.set_xticks([-np.pi, 0, np.pi], ["−π", "0", "π"], fontsize=7)
        place.set_yticks([-np.pi, 0, np.pi], ["−π", "0", "π"], fontsize=7)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    return made
