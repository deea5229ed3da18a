"""Write an audit as one self-contained HTML file, which needs no server and no internet."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from lipbound.network.advice import advice, blocks, contributions
from lipbound.network.comparison import Comparison
from lipbound.network.findings import Audit, LayerReport, audit_json, geometry, log10
from lipbound.network.portraits import portrait
from lipbound.report.figures import portrait_png
from lipbound.report.html import render, table
from lipbound.runtime import Progress, silent, time_is_up

DRAWN = 64  # only the layers with the largest gains get a picture, to keep the page below 2 MB
LISTED = 1000  # only the layers with the largest gains are listed


def page(audit: Audit, title: str, progress: Progress = silent) -> str:
    """Return the HTML page of an audit.

    Args:
        audit: The audit to show.
        title: Name of what was audited, the heading of the page.
        progress: Shows how many pictures are drawn, see :class:`lipbound.runtime.Progress`. After
            the end of a time limit none are drawn.
    """
    ranked = contributions(audit)
    convolutions = [row for row, _ in ranked if row.lipbound is not None][:DRAWN]
    pictures = {
        row.name: None if time_is_up() else _picture(row)
        for row in progress(convolutions, "pictures")
    }
    return render(
        "audit",
        title,
        {"audit.json": audit_json(audit, title), "layers.csv": table(audit.rows())},
        audit=audit,
        summary=audit.summary(),
        within=audit.within,
        rows=_rows(audit, ranked, pictures),
        advice=advice(audit),
        blocks=blocks(audit)[:LISTED],
        left_out=max(0, len(ranked) - LISTED),
        steps=_steps(audit)[:LISTED],
        bounded=math.isfinite(audit.upper) and bool(audit.steps),
        upper_power=log10(audit.upper),
        lower_power=log10(audit.lower) if audit.lower > 0 else None,
        product_power=log10(audit.product),
    )


def comparison_page(found: Comparison) -> str:
    """Return the HTML page of two audits side by side."""
    changed = {row["layer"] for row in found.changed()}
    rows = found.rows()
    places = {row["layer"]: place for place, row in enumerate(rows)}
    ends = [row[end] or 0.0 for row in rows for end in ("upper A", "upper B")]
    listed = [
        {
            **row,
            "place": places[row["layer"]],
            "change": _change(row["A / B"], row["layer"] in changed),
            "size": abs(log10(row["A / B"])) if row["A / B"] else -1.0,
            "share_a": _share(row["upper A"], max(ends)),
            "share_b": _share(row["upper B"], max(ends)),
        }
        for row in rows
    ]
    listed.sort(key=lambda row: -row["size"])
    return render(
        "comparison",
        found.title(),
        {"comparison.json": json.dumps(found.to_dict(), indent=1), "layers.csv": table(rows)},
        sides=[
            {
                "letter": letter,
                "name": name,
                "audit": audit,
                "bounded": math.isfinite(audit.upper) and bool(audit.steps),
            }
            for letter, name, audit in zip("AB", found.names, (found.a, found.b), strict=True)
        ],
        summary=found.summary(),
        rows=listed[:LISTED],
        blocks=found.blocks()[:LISTED],
        left_out=max(0, len(rows) - LISTED),
    )


def _change(ratio: float | None, certain: bool) -> str:
    if ratio is None:
        return ""
    return f"{'' if certain else '≈ '}{100 * (ratio - 1):+.1f} %"


def _share(value: float | None, largest: float) -> float:
    """Return the length of a logarithmic bar in percent."""
    if not value or not largest:
        return 0.0
    return max(0.4, 100 * math.log1p(value) / math.log1p(largest))


def _rows(
    audit: Audit,
    ranked: list[tuple[LayerReport, float]],
    pictures: dict[str, dict[str, Any] | None],
) -> list[dict[str, Any]]:
    """Return the layers that are listed, the largest contribution first."""
    places = {id(row): place for place, row in enumerate(audit.layers)}
    listed = ranked[:LISTED]
    largest = max([row.lipbound or row.bracket.upper for row, _ in listed], default=1.0) or 1.0
    whole = sum(max(0.0, power) for _, power in ranked) or 1.0

    return [
        {
            "place": places[id(row)],
            "part": 100 * max(0.0, power) / whole,
            "name": row.name,
            "geometry": geometry(row.layer),
            "lower": row.bracket.lower,
            "upper": row.bracket.upper,
            "lipbound": row.lipbound,
            "upper_share": _share(row.bracket.upper, largest),
            "lipbound_share": _share(row.lipbound, largest),
            "frequency": ", ".join(f"{w:.3f}" for w in row.bracket.frequency),
            "evaluations": row.bracket.evaluations,
            **(pictures.get(row.name) or {"picture": None}),
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
            "lipschitz": step.lipschitz if math.isfinite(step.lipschitz) else None,
            "share": max(0.0, 100 * log10(step.lipschitz) / top)
            if math.isfinite(step.lipschitz)
            else 100.0,
            "reason": step.reason,
            "first": step.reason not in [s.reason for s in audit.steps[:index]],
        }
        for index, step in enumerate(audit.steps)
    ]


def _picture(row: LayerReport) -> dict[str, Any] | None:
    """Return the picture of a layer's symbol, and the numbers of its spectrum."""
    shown = portrait(row.layer, row.bracket)
    if shown is None:
        return None
    found = shown.spectrum
    return {
        "picture": base64.b64encode(portrait_png(shown)).decode(),
        "median": found.quantile(0.5),
        "condition": found.condition,
        "samples": " × ".join(map(str, found.samples)),
        "effective_rank": found.effective_rank,
        "above": found.share_above(1.0),
    }
