"""Checkpoints: one safetensors file each, its JSON inside, whole or not there at all.

A file is written under another name, flushed to the disk and then renamed, so a run that is killed
leaves the one before. Tensors carry a checksum; what does not match is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipbound.files import write
from lipbound.robust.training.settings import filled

KEY = "lipbound"
FORMAT = 1


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON record atomically.

    Raises:
        OSError: As the system gives it, naming the file; nothing half-written stays behind.
    """
    from safetensors.torch import save as encode

    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    record = {**about, "format": FORMAT}
    record["checksum"] = _checksum(ready, record)
    write(path, encode(ready, {KEY: json.dumps(record)}))


def about(path: Path) -> dict[str, Any] | None:
    """The record of a file this package wrote; ``None`` of any other."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})[KEY])
    except Exception:
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record.

    Raises:
        ValueError: If the file is cut, damaged or not from here.
    """
    from safetensors.torch import load_file

    record = about(path)
    if record is None:
        raise ValueError(f"{str(path)!r} is no whole checkpoint of lipbound")
    try:
        tensors = load_file(path)
    except Exception as error:
        raise ValueError(f"{str(path)!r} is no whole checkpoint: {error}") from None
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
    """The checkpoints of one run, ``step-00000123.safetensors``, the last few of them.

    Args:
        root: Where they lie.
        keep: How many to keep.
    """

    def __init__(self, root: Path, keep: int = 2):
        self.root, self.keep = root, keep

    def all(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.root.glob("step-*.safetensors"))

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        save(self.root / f"step-{step:08}.safetensors", tensors, {**record, "step": step})
        for old in self.all()[: -self.keep]:
            old.unlink(missing_ok=True)

    def newest(
        self, settings: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """The newest good one, and what was wrong with newer ones.

        Args:
            settings: Of the run; another run's checkpoint is not good.

        Raises:
            ValueError: If there are some, but none is good.
        """
        wrong: list[str] = []
        for path in reversed(self.all()):
            try:
                tensors, record = load(path)
                stored = record.get("settings")
                same = isinstance(stored, dict) and filled(stored) == settings
                if settings is not None and not same:
                    raise ValueError(f"{str(path)!r} belongs to another run")
                return tensors, record, wrong
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError(f"no good checkpoint: {'; '.join(wrong)}. Start again elsewhere")
        return None
