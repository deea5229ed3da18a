"""Draw docs/picture.svg, which shows the embedded network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lipbound import audit, bracket, symbol
from lipbound import exact as true_norm
from lipbound.modules import input_shapes
from lipbound.network.findings import geometry
from lipbound.report.figures import canvas, save
from lipbound.robust.models import digits as demo
from tools.pages import DOCS

INK, MUTED, WARM, COOL = "#1c2733", "#7b8794", "#d1495b", "#00798c"


def main(folder: Path = DOCS) -> None:
    plt = canvas()
    plt.rcParams.update({
        "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
        "xtick.color": MUTED, "ytick.color": INK,
    })  # fmt: skip
    model = demo.network()
    found_all = audit(model, demo.INPUT_SHAPE, search=0)
    rows = [row for row in found_all.layers if row.lipbound is not None]
    sizes = input_shapes(model, demo.INPUT_SHAPE)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.9), width_ratios=(1, 1.35))

    layer = model.down
    found = bracket(layer)
    axis = np.linspace(-np.pi / 2, 3 * np.pi / 2, 161)  # peaks lie at 0 or π as often as not
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    with torch.no_grad():
        symbols = symbol(layer, torch.from_numpy(points)).to(torch.complex128)
        heights = torch.linalg.matrix_norm(symbols, 2).reshape(161, 161)
    filled = left.contourf(axis, axis, heights.T, levels=24, cmap="BuPu")
    figure.colorbar(filled, ax=left, shrink=0.9, pad=0.02, format="%.2f").outline.set_visible(False)
    filled.set_rasterized(True)
    for sign in (1, -1):
        peak = (sign * np.array(found.frequency) + np.pi / 2) % (2 * np.pi) - np.pi / 2
        left.plot(*peak, "o", ms=8, mfc="none", mec=WARM, mew=2)
    left.set_title(f"σ₁ of the symbol of '{geometry(layer)}'", loc="left", fontsize=11)
    left.set_xlabel(
        f"peak in [{found.lower:.4f}, {found.upper:.4f}], proved: {found.evaluations} evaluations"
    )
    ticks = ([0, np.pi], ["0", "π"])
    left.set_xticks(*ticks)
    left.set_yticks(*ticks)
    left.set_aspect("equal")

    places = np.arange(len(rows))[::-1]
    exact = np.array([true_norm(row.layer, sizes[row.name]) for row in rows])
    ours = np.array([row.bracket.upper for row in rows])
    paper = np.array([row.lipbound for row in rows])
    right.barh(places + 0.18, paper, 0.3, color="#e3e8ee", label="LipBound (Araujo et al. 2021)")
    right.barh(places - 0.18, ours, 0.3, color=COOL, label="certified upper end, any input size")
    right.plot(
        exact, places - 0.18, "|", ms=13, mew=2.2, color=WARM, label="true σ₁ at the layer's input"
    )
    for place, row in zip(places, rows, strict=True):
        right.text(
            row.bracket.upper + 0.08,
            place - 0.18,
            f"{row.bracket.upper:.3f}",
            va="center",
            fontsize=8.5,
            color=COOL,
        )
        right.text(
            row.lipbound + 0.08,
            place + 0.18,
            f"{row.lipbound:.2f}",
            va="center",
            fontsize=8.5,
            color=MUTED,
        )
    right.set_yticks(places, [f"{row.name}\n{geometry(row.layer)}" for row in rows], fontsize=9)
    right.set_title("Gain of every convolution of a small trained CNN", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=8.5, loc="center right")
    right.set_xlim(0, paper.max() * 1.1)
    for spine in ("top", "right", "left"):
        right.spines[spine].set_visible(False)
    right.tick_params(left=False)
    figure.tight_layout()
    path = folder / "picture.svg"
    save(figure, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
