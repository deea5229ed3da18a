"""Data sets of labelled images, by name in ``DATA``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lipbound.registry import unknown
from lipbound.robust.data import packed, sets
from lipbound.robust.data.sets import Data, in_memory

__all__ = ["DATA", "Data", "data_set", "in_memory"]

DATA: dict[str, Callable[[Path | None], Data]] = {
    "digits": sets.digits,
    "cifar10": sets.cifar10,
    "cifar100": sets.cifar100,
    "fashion-mnist": sets.fashion_mnist,
    "folder": sets.folder,
    "packed-cifar10": packed.cifar10,
    "packed-cifar100": packed.cifar100,
    "packed-imagenette64": packed.imagenette64,
}
"""Name → function that reads the data set from a folder. You may add your own."""


def data_set(name: str, folder: Path | None = None) -> Data:
    """Read the data set called ``name`` from ``folder``.

    Raises:
        ValueError: If the name is unknown, or the files are missing or damaged.
    """
    if name not in DATA:
        raise unknown("data", name, DATA)
    return DATA[name](folder)
