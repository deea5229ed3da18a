"""The pages of the documentation that are made from records: ``make pages``.

Nothing is measured here. Every number comes from ``benchmarks/records``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lipbound.files import read
from lipbound.paper.trainings import latest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RECORDS = ROOT / "benchmarks" / "records"


def record(name: str) -> dict[str, Any]:
    """A record that is one JSON object."""
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return found


def lines(name: str) -> list[dict[str, Any]]:
    """A record that is one JSON object a line."""
    return read(RECORDS / f"{name}.jsonl")


def cells(name: str) -> list[dict[str, Any]]:
    """The trainings of a table, the latest record of each."""
    return [*latest(lines(name)).values()]


def write(path: Path, text: str) -> None:
    """Write a page and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path}")
