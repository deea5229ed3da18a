"""Data sets of labelled images, by name in ``DATA``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path

from lipbound.registry import unknown
from lipbound.robust.data import packed, sets
from lipbound.robust.data.sets import Data, in_memory
from lipbound.runtime import Progress, silent

__all__ = ["DATA", "Data", "data_set", "in_memory"]

DATA: dict[str, Callable[..., Data]] = {
    "digits": sets.digits,
    "cifar10": sets.cifar10,
    "cifar100": sets.cifar100,
    "fashion-mnist": sets.fashion_mnist,
    "folder": sets.folder,
    "shards": sets.shards,
    "packed-cifar10": packed.cifar10,
    "packed-cifar100": packed.cifar100,
    "packed-imagenette64": packed.imagenette64,
}
"""Name → function that reads the data set from a folder. You may add your own.

A function that has a parameter ``progress`` gets the one of :func:`data_set`.
"""


def data_set(name: str, folder: Path | str | None = None, *, progress: Progress = silent) -> Data:
    """Read the data set called ``name`` from ``folder``.

    Args:
        name: A name in ``DATA``.
        folder: A local folder, or for ``shards`` also an address such as ``s3://bucket/imagenet``.
        progress: Shows how far the first index of a large data set is.

    Raises:
        ValueError: If the name is unknown, or the files are missing or damaged.
    """
    if name not in DATA:
        raise unknown("data", name, DATA)
    address = isinstance(folder, str) and "://" in folder
    if address and name != "shards":
        raise ValueError(f"data {name!r} is read from a local folder, not from {folder!r}")
    place = folder if address or folder is None else Path(folder)
    shown = {"progress": progress} if "progress" in signature(DATA[name]).parameters else {}
    return DATA[name](place, **shown)
