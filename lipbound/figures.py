"""Figures from records; they compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "power": ("ten power iterations", "#b0b0b0", "s"),
    "gram": ("Gram iteration", "#8c6bb1", "D"),
    "direct": ("direct PolyGrid", "#e08214", "^"),
    "sgd": ("one fused SGD step", "#4d4d4d", "_"),
    "lipbound_gradient": ("LipBound, value + gradient", "#2166ac", "o"),
    "lipbound": ("LipBound, value", "#1b9e77", "o"),
    "floor": ("reading the weights once", "#d0d0d0", "|"),
}
"""Contender → label, colour, marker; from slow to fast."""


def speed_figure(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds of every contender, one line per network, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lipbound"  # the same figure, the same file
    from matplotlib import pyplot

    names = [record["network"] for record in records]
    figure, axes = pyplot.subplots(figsize=(8.2, 1.6 + 0.25 * len(names)), layout="constrained")
    for method, (label, colour, marker) in STYLES.items():
        points = [
            (record["milliseconds"][method], index)
            for index, record in enumerate(records)
            if method in record["milliseconds"]
        ]
        if points:
            times, lines = zip(*points, strict=True)
            axes.scatter(times, lines, color=colour, marker=marker, s=34, label=label, zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds for the whole network ({records[0]['device']})")
    axes.grid(axis="x", color="#e8e8e8", zorder=0)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
