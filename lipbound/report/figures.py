"""Draw figures from records of results."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lipbound.files import write
from lipbound.network.portraits import Portrait

STYLES = {
    "power": ("ten power iterations", "#b0b0b0", "s"),
    "gram": ("Gram iteration", "#8c6bb1", "D"),
    "direct": ("direct PolyGrid", "#e08214", "^"),
    "sgd": ("one fused SGD step", "#4d4d4d", "_"),
    "lipbound_gradient": ("LipBound, value + gradient", "#2166ac", "o"),
    "lipbound": ("LipBound, value", "#1b9e77", "o"),
    "floor": ("reading the weights once", "#d0d0d0", "|"),
}
"""Method → label, colour and marker, from slow to fast."""


def tidy(axes: Any, grid: str = "both") -> None:
    """Draw a light grid in the background and remove the top and right frame lines."""
    axes.grid(axis=grid, color="#e8e8e8")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def portrait_png(portrait: Portrait) -> bytes:
    """Draw σ1 over all frequencies with its maximizer, and the histogram of all singular values.

    A page holds dozens of these, so 96 colours keep the file at a third of the size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(5.0, 2.3), dpi=120, facecolor="none")
    picture = FigureCanvasAgg(figure)
    grey, warm, cool = "#808890", "#d1495b", "#3a7ca5"
    axis, heights = portrait.axis, portrait.heights
    place = (0.07, 0.12, 0.36, 0.78) if heights.ndim == 2 else (0.11, 0.12, 0.43, 0.78)
    left = figure.add_axes(place, facecolor="none")
    right = figure.add_axes((0.62, 0.12, 0.36, 0.78), facecolor="none")
    if heights.ndim == 2:
        filled = left.contourf(axis, axis, heights.T, levels=14, cmap="BuPu")
        bar = figure.colorbar(filled, cax=figure.add_axes((0.46, 0.16, 0.02, 0.7)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=grey, labelsize=7)
        for sign in (1, -1) if portrait.peak else ():
            left.plot(*[sign * w for w in portrait.peak], "o", ms=7, mfc="none", mec=warm, mew=1.6)
        left.set_aspect("equal")
        left.set_yticks([-np.pi, 0, np.pi], ["−π", "0", "π"])
    else:
        left.plot(axis, heights, color=cool)
        for sign in (1, -1) if portrait.peak else ():
            left.axvline(sign * portrait.peak[0], color=warm, lw=1)
    left.set_xticks([-np.pi, 0, np.pi], ["−π", "0", "π"])
    left.set_title("σ₁ over all frequencies", fontsize=8, color=grey)
    found = portrait.spectrum
    shares, edges = np.histogram(found.values, bins=40, weights=found.weights)
    right.stairs(shares, edges, fill=True, color=cool)
    right.set_yticks([])
    right.set_title("all singular values", fontsize=8, color=grey)
    for axes in (left, right):
        axes.tick_params(colors=grey, labelsize=7)
        axes.spines[:].set_visible(False)
    picture.draw()
    image = Image.fromarray(np.asarray(picture.buffer_rgba()))
    buffer = io.BytesIO()
    image.quantize(96, Image.Quantize.FASTOCTREE).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def canvas() -> Any:
    """Return pyplot set up to work without a screen and to write reproducible files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "lipbound"
    return pyplot


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a figure to a file and close it."""
    write(path, encoded(figure, path.suffix.removeprefix("."), dpi))


def encoded(figure: Any, kind: str, dpi: int = 100) -> bytes:
    """Return a figure as ``svg`` or ``png``, without the date, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=dpi)
    canvas().close(figure)
    return numbered(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def numbered(svg: bytes) -> bytes:
    """Replace the names of clip paths and markers in Matplotlib's SVG by numbers.

    Matplotlib hashes coordinates into names, and their last bits differ between processors.

    Example:
        >>> numbered(b'<path id="m0123456789"/><use href="#m0123456789"/>')
        b'<path id="m1"/><use href="#m1"/>'
    """
    names = dict.fromkeys(re.findall(rb'id="([mp])([0-9a-f]{10})"', svg))
    for number, (kind, digest) in enumerate(names, 1):
        svg = svg.replace(kind + digest, b"%s%d" % (kind, number))
    return svg


def speed_figure(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the time of every method on a logarithmic axis, one line per network."""
    pyplot = canvas()
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
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def attack_figure(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the figure of :func:`attack_axes` to a file."""
    save(attack_axes(records), path)


def attack_axes(records: Sequence[dict[str, Any]]) -> Any:
    """Draw accuracy over the iterations and the radius, and a histogram of Jacobian norms.

    Only what the records hold gets a panel. Dashed lines are the certified accuracies, which no
    attack can lower.
    """
    panels = [
        draw
        for draw, wanted in (
            (_iterations, lambda record: "against_iterations" in record.get("pgd", {})),
            (_radii, lambda record: "against_radius" in record),
            (_l2_radii, _smallest),
            (_jacobians, lambda record: "jacobian_norms" in record),
        )
        if any(map(wanted, records))
    ]
    panels = panels or [_radii]
    figure, places = canvas().subplots(
        1, len(panels), figsize=(3.47 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for draw, axes in zip(panels, places[0], strict=True):
        for index, record in enumerate(records):
            names = filter(None, (record.get("arm"), Path(record.get("checkpoint", "")).stem))
            draw(axes, record, f"C{index}", ", ".join(names))
        tidy(axes)
    return figure


def _iterations(axes: Any, record: dict[str, Any], colour: str, name: str) -> None:
    pgd = record.get("pgd", {})
    curve = pgd.get("against_iterations", {})
    axes.plot([int(k) for k in curve], list(curve.values()), "o-", ms=3, color=colour)
    if "certified" in pgd:
        axes.axhline(pgd["certified"], color=colour, ls="--", lw=1.2)
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="iterations of PGD", ylabel="accuracy", ylim=(0, 1), xlim=(0, None))


def _radii(axes: Any, record: dict[str, Any], colour: str, name: str) -> None:
    ball = record["plan"]["ball"]
    _over_radius(axes, record, record.get("against_radius", {}), ball, colour, "-", name or "PGD")
    axes.set_xlabel(f"radius, {ball} (PGD, one restart)")


def _smallest(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the accuracies by L2 radius, for each attack that has them."""
    found = {name: record[name] for name in record["plan"]["attacks"]}
    return {
        name: {radius: f for radius, f in one.items() if isinstance(f, dict)}
        for name, one in found.items()
        if "accuracy" not in one
    }


def _l2_radii(axes: Any, record: dict[str, Any], colour: str, name: str) -> None:
    for style, (attack, found) in zip(("-", ":", "-."), _smallest(record).items(), strict=False):
        _over_radius(axes, record, found, "l2", colour, style, f"{attack} {name}".strip())
    axes.set_xlabel("radius, l2 (other attacks)")


def _over_radius(
    axes: Any, record: dict[str, Any], attacked: dict[str, Any], ball: str, colour: str, style: str,
    label: str,
) -> None:  # fmt: skip
    curve = {"0": record["clean"], **attacked}
    radii, found = [float(k) for k in curve], list(curve.values())
    line = {"ls": style, "color": colour, "label": label}
    axes.plot(radii, [f["accuracy"] for f in found], marker="o", ms=3, **line)
    ends = zip(*(f["interval"] for f in found), strict=True)
    axes.fill_between(radii, *ends, color=colour, alpha=0.15, lw=0)
    right = max(axes.get_xlim()[1] if len(axes.lines) > 1 else 0.0, 1.05 * max(radii))
    if "certified_curve" in record:
        proved = record["certified_curve"][ball]
        proved = [*proved, [max(right, proved[-1][0]), proved[-1][1]]]  # beyond the last one
        label = "" if "proved" in axes.get_legend_handles_labels()[1] else "proved"
        axes.plot(*zip(*proved, strict=True), "--", color=colour, lw=1.2, label=label)
    axes.set(ylabel="accuracy", ylim=(0, 1), xlim=(0, right or None))
    axes.legend(frameon=False, fontsize=8)


def _jacobians(axes: Any, record: dict[str, Any], colour: str, name: str) -> None:
    norms = record.get("jacobian_norms", {}).get("all", [])
    axes.hist(norms, bins=30, color=colour, alpha=0.5)
    axes.set(xlabel="norm of the Jacobian", ylabel="images")


def radii_axes(record: dict[str, Any]) -> Any:
    """Return the histogram of the certified radii of all images."""
    edges, counts = record["histogram"]["edges"], np.asarray(record["histogram"]["by_class"])
    figure, axes = canvas().subplots(figsize=(6.2, 3.6), layout="constrained")
    axes.stairs(counts.sum(0), edges, fill=True, color="C0", alpha=0.7)
    axes.set_xlabel("certified L2 radius, pixels in [0, 1]")
    axes.set_ylabel("images")
    axes.set_xlim(left=0)
    tidy(axes)
    return figure


def class_radii_axes(record: dict[str, Any]) -> Any:
    """Return a histogram of the certified radii for each class, on a common axis."""
    edges, counts = record["histogram"]["edges"], np.asarray(record["histogram"]["by_class"])
    size = (6.2, 0.9 + 0.42 * len(counts))
    figure, rows = canvas().subplots(
        len(counts), 1, figsize=size, sharex=True, sharey=True, squeeze=False
    )
    figure.subplots_adjust(0.14, 0.62 / size[1], 0.98, 1 - 0.08 / size[1], hspace=0.12)
    for label, (axes, part) in enumerate(zip(rows[:, 0], counts, strict=True)):
        axes.stairs(part, edges, fill=True, color="C0", alpha=0.7)
        axes.set_yticks([])
        axes.set_ylabel(f"class {label}", rotation=0, ha="right", va="center", fontsize=8)
        tidy(axes, grid="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", length=0)
    rows[-1, 0].set_xlabel("certified L2 radius, pixels in [0, 1]")
    rows[-1, 0].set_xlim(left=0)
    return figure


def certificate_figure(record: dict[str, Any], path: Path) -> None:
    """Draw certified accuracy over the radius, below the accuracy under attack."""
    save(certificate_axes(record), path)


def certificate_axes(record: dict[str, Any]) -> Any:
    """Return the figure of a certification: the proved curve, and the attacked accuracies."""
    figure, axes = canvas().subplots(figsize=(6.2, 3.6), layout="constrained")
    radii, shares = zip(*record["curve"], strict=True)
    axes.plot(radii, shares, color="C0", label="proved")
    axes.fill_between(radii, shares, color="C0", alpha=0.12, lw=0)
    points = record.get("attacked", {})
    if points:
        places, found = [float(radius) for radius in points], list(points.values())
        kept = [one["accuracy"] for one in found]
        below = [one["accuracy"] - one["interval"][0] for one in found]
        above = [one["interval"][1] - one["accuracy"] for one in found]
        label = f"attacked ({found[0]['images']} images)"
        axes.errorbar(
            places, kept, [below, above], fmt="o", ms=4, capsize=3, color="C3", label=label
        )
    axes.set_xlabel("L2 radius, pixels in [0, 1]")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper right")
    tidy(axes)
    return figure
