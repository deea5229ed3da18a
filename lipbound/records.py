"""Records: one JSON object a line, appended as each is measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def provenance(device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """What every record says of where it was made."""
    import torch

    from lipbound import __version__

    cuda = device.startswith("cuda")
    return {
        "seed": seed,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lipbound": __version__,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; none if it does not exist yet.

    Raises:
        ValueError: If a line is no JSON object.
    """
    return parse(path, path.read_text().splitlines()) if path.exists() else []


def parse(path: Path, lines: Sequence[str]) -> list[dict[str, Any]]:
    """The records of a file's lines."""
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; remove the line") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: no JSON object; remove the line")
        records.append(record)
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """Write one record at the end; what was there stays, so a long run can be interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for the pages that are made from records."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
