"""Write an audit as one self-contained HTML file, which needs no server and no internet."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from lipbound import __version__
from lipbound.files import printable
from lipbound.network.advice import advice, blocks, contributions
from lipbound.network.findings import Audit, LayerReport, audit_json, geometry, log10
from lipbound.network.portraits import portrait
from lipbound.report.figures import portrait_png
from lipbound.results import digits
from lipbound.runtime import Progress, silent

if TYPE_CHECKING:
    from markupsafe import Markup

DRAWN = 64  # only the layers with the largest gains get a picture, to keep the page below 2 MB
LISTED = 1000  # only the layers with the largest gains are listed


def page(audit: Audit, title: str, progress: Progress = silent) -> str:
    """Return the HTML page of an audit.

    Args:
        audit: The audit to show.
        title: Name of what was audited, the heading of the page.
        progress: Shows how many pictures are drawn, see :class:`lipbound.runtime.Progress`.
    """
    from jinja2 import Environment

    data = resources.files("lipbound") / "data"
    template, script = (data.joinpath(n).read_text("utf-8") for n in ("page.html", "page.js"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "power": power, "parts": parts}
    ranked = contributions(audit)
    convolutions = [row for row, _ in ranked if row.lipbound is not None][:DRAWN]
    pictures = {row.name: _picture(row) for row in progress(convolutions, "pictures")}
    return environment.from_string(template).render(
        title=printable(title),
        audit=audit,
        summary=audit.summary(),
        within=audit.within,
        rows=_rows(audit, ranked, pictures),
        advice=advice(audit),
        blocks=blocks(audit)[:LISTED],
        files=_files(audit, title),
        left_out=max(0, len(ranked) - LISTED),
        steps=_steps(audit)[:LISTED],
        bounded=math.isfinite(audit.upper) and bool(audit.steps),
        upper_power=log10(audit.upper),
        lower_power=log10(audit.lower) if audit.lower > 0 else None,
        product_power=log10(audit.product),
        version=__version__,
        torch=torch.__version__,
        script=script,
        # The browser runs only this script, even if a layer's name contains HTML.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def number(value: float | None, rounding: str = "nearest") -> str:
    """Format a number with four digits; ``None`` becomes an empty string.

    Example:
        >>> number(10.7003), number(10.7003, "up"), number(0.02), number(1.5e7)
        ('10.70', '10.71', '0.02000', '1.500e+07')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "∞"
    return f"{float(digits(value, 4, rounding)):#.4g}".rstrip(".") if value else "0"


def power(value: float) -> Markup:
    """Format a large or small number as a·10^b, rounded up."""
    from markupsafe import Markup

    if not math.isfinite(value) or 1e-3 <= abs(value) < 1e5 or value == 0:
        return Markup(number(value, "up"))
    shown, exponent = f"{float(digits(value, 3, 'up')):.2e}".split("e")
    return Markup(f"{shown} · 10<sup>{int(exponent)}</sup>")


def parts(name: str) -> Markup:
    """Let a long name wrap at its dots, and nowhere else."""
    from markupsafe import Markup, escape

    return Markup(".<wbr>").join(escape(part) for part in printable(name).split("."))


def _files(audit: Audit, title: str) -> dict[str, str]:
    """Return the audit as JSON and its layers as CSV, each as the address of a download."""
    table = io.StringIO()
    names = ["layer", "geometry", "lower", "upper", "LipBound"]
    writer = csv.DictWriter(table, names)
    writer.writeheader()
    writer.writerows({k: _cell(v) for k, v in row.items()} for row in audit.rows())
    found = {"audit.json": audit_json(audit, title), "layers.csv": table.getvalue()}
    return {
        name: "data:application/octet-stream;base64," + base64.b64encode(text.encode()).decode()
        for name, text in found.items()
    }


def _cell(value: Any) -> Any:
    """Return a cell of a CSV file; a spreadsheet would compute a text that begins like a formula.

    Example:
        >>> _cell("=1+1"), _cell("conv1"), _cell(-1.5)
        ("'=1+1", 'conv1', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _rows(
    audit: Audit, ranked: list[tuple[LayerReport, float]], pictures: dict[str, str | None]
) -> list[dict[str, Any]]:
    """Return the layers that are listed, the largest contribution first."""
    places = {id(row): place for place, row in enumerate(audit.layers)}
    listed = ranked[:LISTED]
    largest = max([row.lipbound or row.bracket.upper for row, _ in listed], default=1.0) or 1.0
    whole = sum(max(0.0, power) for _, power in ranked) or 1.0

    def share(value: float | None) -> float:
        return 0.0 if not value else max(0.4, 100 * math.log1p(value) / math.log1p(largest))

    return [
        {
            "place": places[id(row)],
            "part": 100 * max(0.0, power) / whole,
            "name": row.name,
            "geometry": geometry(row.layer),
            "lower": row.bracket.lower,
            "upper": row.bracket.upper,
            "lipbound": row.lipbound,
            "upper_share": share(row.bracket.upper),
            "lipbound_share": share(row.lipbound),
            "frequency": ", ".join(f"{w:.3f}" for w in row.bracket.frequency),
            "evaluations": row.bracket.evaluations,
            "picture": pictures.get(row.name),
        }
        for row, power in listed
    ]


def _steps(audit: Audit) -> list[dict[str, Any]]:
    powers = [log10(s.lipschitz) for s in audit.steps if math.isfinite(s.lipschitz)]
    top = max([1.0, *powers])
    return [
        {
            "name": step.name,
            "op": step.op.removeprefix("aten.").lstrip("_"),
            "module": step.module,
            "shape": "×".join(map(str, step.shape)),
            "gain": step.gain,
            "power": log10(step.lipschitz) if math.isfinite(step.lipschitz) else None,
            "share": max(0.0, 100 * log10(step.lipschitz) / top)
            if math.isfinite(step.lipschitz)
            else 100.0,
            "reason": step.reason,
            "first": step.reason not in [s.reason for s in audit.steps[:index]],
        }
        for index, step in enumerate(audit.steps)
    ]


def _picture(row: LayerReport) -> str | None:
    shown = portrait(row.layer, row.bracket)
    return None if shown is None else base64.b64encode(portrait_png(shown)).decode()
