"""Records: one JSON object a line, appended as each is measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lipbound.files import append, rewrite, whole_json

__all__ = ["append", "provenance", "read", "rewrite", "table"]


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

    A last line without its end is one that a kill cut off: it was never a record.

    Raises:
        ValueError: If a line is no JSON object.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    last = whole_json(rest)
    return [*(_record(path, i, line) for i, line in enumerate(lines, 1)), *([last] if last else [])]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: {error}; remove the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: no JSON object; remove the line")
    return record


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for the pages that are made from records."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def digits(value: float) -> str:
    """Three of them, or all before the point.

    Example:
        >>> digits(0.04321), digits(1234.5)
        ('0.0432', '1234')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
