"""Reproduce a table or figure of the paper in three steps: compute → record → report.

The record holds the measurements, the seed and the machine. The module of the experiment holds the
paper's numbers. The report and the figure are made from these two alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lipbound.files import provenance, write
from lipbound.paper import fig1, fig2, fig3, table1, table2, table3, table4
from lipbound.paper.request import Request

EXPERIMENTS: dict[str, Any] = {
    "fig1": fig1, "fig2": fig2, "table1": table1, "table4": table4, "table2": table2, "fig3": fig3,
    "table3": table3,
}  # fmt: skip
"""Name of the experiment → its module.

``compute(request)`` returns the record and ``report(record)`` Markdown. A module may also have
``figure(record, pyplot)``.
"""
TRAININGS = ("table2", "fig3", "table3")
TAKES = {
    "weights": ("fig1", "fig2", "table1"), "tier": ("table2", "fig3"),
    "device": ("table1", "table4", *TRAININGS),
    **dict.fromkeys(("folder", "only", "minutes"), TRAININGS),
}  # fmt: skip
"""Option of a request → experiments that use it."""


def run(name: str, request: Request) -> dict[str, Any]:
    """Compute one experiment's record."""
    start = time.perf_counter()
    module = EXPERIMENTS[name]
    measured = module.compute(request)
    files = [path.name for path in request.weights] or ["the embedded digits CNN"]
    on = ["scikit-learn's digits"] if request.tiny and hasattr(module, "TINY") else None
    return {
        "experiment": name,
        "tiny": request.tiny,
        "weights": on or ([module.ON] if hasattr(module, "ON") else files),
        **measured,
        **({"paper": module.PAPER} if hasattr(module, "PAPER") else {}),
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(),
    }


def write_figure(record: dict[str, Any], folder: Path) -> Path | None:
    """Draw the record's figure, if the experiment has one."""
    from lipbound.report.figures import canvas
    from lipbound.report.figures import save as save_figure

    module = EXPERIMENTS[record["experiment"]]
    if not hasattr(module, "figure"):
        return None
    path = folder / f"{record['experiment']}.{getattr(module, 'FORMAT', 'svg')}"
    save_figure(module.figure(record, canvas()), path, dpi=130)
    return path


def report(record: dict[str, Any]) -> str:
    """Return the experiment's report as Markdown, with its provenance."""
    text = EXPERIMENTS[record["experiment"]].report(record)
    tiny = " --tiny" if record["tiny"] else ""
    origin = f"`lipbound reproduce {record['experiment']}{tiny}` on {', '.join(record['weights'])}"
    return (
        f"{text}\n({origin}; {record['device']}, torch {record['torch']}, seed {record['seed']}.)\n"
    )


def save(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as JSON, and its report in the same folder."""
    path = folder / f"{record['experiment']}.json"
    write(path, (json.dumps(record) + "\n").encode())
    write(path.with_suffix(".md"), report(record).encode())
    return path
