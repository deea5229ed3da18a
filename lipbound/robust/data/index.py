"""Indexes of large data sets, made once and kept beside the data or in a cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from lipbound import files
from lipbound.robust.data.parsers import LARGEST

Arrays = dict[str, NDArray[Any]]


def kept(
    place: str, filesystem: Any, make: Callable[[], Arrays], fits: Callable[[Arrays], bool]
) -> Arrays:
    """Read an index, or make it and write it for the next start.

    It is written beside the data, or, where that is read-only, to ``~/.cache/lipbound`` (or
    ``$XDG_CACHE_HOME/lipbound``). Of several processes on one machine one makes it, and the others
    wait and read it.

    Args:
        place: Path of the index beside the data.
        filesystem: The fsspec file system of ``place``.
        make: Makes the index.
        fits: Whether an index that was read is well formed and describes the present data. It may
            raise a ``ValueError``, ``KeyError`` or ``IndexError`` instead.
    """
    name = hashlib.sha256(f"{filesystem.protocol} {place}".encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lipbound"
    spare = cache / f"{name}.npz"

    def found() -> Arrays | None:
        for read in (lambda: _beside(filesystem, place), lambda: _limited(spare.open("rb"))):
            with contextlib.suppress(Exception):  # there is none, or it is damaged
                arrays = _arrays(read())
                if fits(arrays):
                    return arrays
        return None

    arrays = found()
    if arrays is None:
        with _locked(cache / f"{name}.lock"):
            arrays = found()
            if arrays is None:
                arrays = make()
                _write(place, filesystem, spare, arrays)
    return arrays


def joined(names: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return names as one array, with a zero after each."""
    return np.frombuffer(b"".join(name + b"\0" for name in names), np.uint8)


def parted(names: NDArray[np.uint8]) -> list[bytes]:
    """Return the names of such an array."""
    return names.tobytes().split(b"\0")[:-1]


def _beside(filesystem: Any, place: str) -> bytes:
    if not filesystem.isfile(place) or filesystem.size(place) > LARGEST:
        raise ValueError("it is too large, or a device that does not end")
    content: bytes = filesystem.cat_file(place)
    return content


def _limited(file: Any) -> bytes:
    with file:
        content: bytes = file.read(LARGEST + 1)
    return content


def _arrays(content: bytes) -> Arrays:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if max(len(content), sum(member.file_size for member in archive.infolist())) > LARGEST:
            raise ValueError("it is too large")
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _write(place: str, filesystem: Any, spare: Path, arrays: Arrays) -> None:
    """Write an index beside the data, or to the cache, or warn that it is kept in memory."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    try:
        if isinstance(filesystem, LocalFileSystem):
            files.write(Path(place), buffer.getvalue())
        else:
            filesystem.pipe_file(place, buffer.getvalue())
    except Exception:  # every kind of storage has its own errors
        try:
            files.write(spare, buffer.getvalue())
        except OSError as error:
            warnings.warn(
                f"the index of the data is made again at the next start, because lipbound {error}",
                stacklevel=2,
            )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for a lock; without one where none can be made."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
