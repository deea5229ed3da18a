"""Checkpoints: one safetensors file each with a JSON record inside, written atomically.

A file is written under another name, flushed to the disk and then renamed, so a run that is killed
leaves the previous checkpoint intact. A checksum detects damaged files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.files import clean, write
from lipbound.robust.training.settings import decisive, filled

KEY = "lipbound"
FORMAT = 1
KEEP = 2  # number of checkpoints in a folder


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON record atomically.

    Raises:
        OSError: If the file cannot be written; no partial file remains.
    """
    from safetensors.torch import save as encode

    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    record = {**about, "format": FORMAT}
    record["checksum"] = _checksum(ready, record)
    write(path, encode(ready, {KEY: json.dumps(record)}))


def about(path: Path) -> dict[str, Any] | None:
    """Return the record of a file that this package wrote, and ``None`` for any other file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})[KEY])
    except Exception:
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the record of a checkpoint.

    Raises:
        ValueError: If the file is truncated, damaged or not written by lipbound.
    """
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a complete safetensors file: {error}") from None
    record = about(path)
    if record is None:
        raise ValueError(
            f"{str(path)!r} holds weights, but not the settings with which this version of "
            f"lipbound trained them"
        )
    if _checksum(tensors, record) != record.get("checksum"):
        raise ValueError(f"{str(path)!r} is damaged: its checksum does not match")
    return tensors, record


def _checksum(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> int:
    said = json.dumps({k: v for k, v in record.items() if k != "checksum"}, sort_keys=True)
    total = zlib.crc32(said.encode())
    for name in sorted(tensors):
        shape = f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}"
        total = zlib.crc32(shape.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


class Folder:
    """The last ``KEEP`` checkpoints of one run, named like ``step-00000123.safetensors``."""

    def __init__(self, root: Path):
        self.root = root

    def all(self) -> list[Path]:
        """Return the paths of all checkpoints, oldest first."""
        return sorted(self.root.glob("step-*.safetensors"))

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        save(self.root / f"step-{step:08}.safetensors", tensors, {**record, "step": step})
        for old in self.all()[:-KEEP]:
            old.unlink(missing_ok=True)
        clean(self.root)

    def newest(
        self, settings: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """Read the newest valid checkpoint, and list what is wrong with newer ones.

        Args:
            settings: Settings of the run; a checkpoint with other settings is not valid.

        Raises:
            ValueError: If there are checkpoints, but none is valid.
        """
        wrong: list[str] = []
        for path in reversed(self.all()):
            try:
                tensors, record = load(path)
                stored = record.get("settings")
                same = isinstance(stored, dict) and decisive(filled(stored)) == decisive(
                    dict(settings or {})
                )
                if settings is not None and not same:
                    raise ValueError(f"{str(path)!r} belongs to another run")
                return tensors, record, wrong
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError(f"no valid checkpoint: {'; '.join(wrong)}. Use another folder")
        return None
