"""Parse the files of data sets without executing them, up to ``LARGEST`` bytes each.

CIFAR's pickles may contain only dictionaries, lists and numpy arrays.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LARGEST = 1 << 30  # most bytes of a file, uncompressed; more is refused


def files(root: Path, inside: str, archive: str, names: list[str]) -> dict[str, bytes] | None:
    """Read the named files from a folder or an archive, without unpacking it to disk."""
    for place in (root / inside, root):
        if all((place / n).is_file() for n in names):
            return {n: _whole(place / n) for n in names}
    path = root / archive
    if not path.is_file():
        return None
    wanted = {f"{inside}/{n}": n for n in names}
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as file, _stream(file) as tar:
            for member in tar:
                if member.isfile() and member.name in wanted:
                    content = tar.extractfile(member)
                    assert content is not None
                    found[wanted[member.name]] = content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{str(path)!r} is not a complete archive: {error}") from None
    missing = [n for n in names if n not in found]
    if missing:
        raise ValueError(f"{str(path)!r} lacks {', '.join(missing)}")
    return found


def _stream(file: Any) -> tarfile.TarFile:
    limited: Any = _Limited(file)
    return tarfile.open(mode="r|", fileobj=limited)


class _Limited:
    """A file that refuses to return more than ``LARGEST`` bytes in total."""

    def __init__(self, file: Any):
        self.file, self.left = file, LARGEST

    def read(self, size: int = -1) -> bytes:
        self.left -= size
        if size < 0 or self.left < 0:
            raise ValueError(f"the archive unpacks to more than {LARGEST >> 20} MiB")
        return self.file.read(size)


class _Bytes:
    """Stand-in for numpy's dtype; it is always uint8, whatever state the file contains."""

    def __init__(self, name: str, *flags: Any):
        if str(name).lstrip("|") != "u1":
            raise ValueError(f"it holds an array of dtype {name!r}; only bytes ('u1') are read")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stand-in for numpy's ndarray while a file is read."""

    array: Bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Bytes) or not isinstance(raw, bytes) or fortran:
            raise ValueError("it holds an array that is not a plain array of bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape([int(n) for n in shape])


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dictionaries, lists and arrays of bytes, and refuses everything else."""

    KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Bytes,
        # Python 3 writes the bytes of an array with this function.
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise ValueError(f"it refers to {module}.{name}, which an image file does not need")
        return self.KNOWN[module, name]


def pickled(raw: bytes) -> tuple[Bytes, NDArray[Any]]:
    """Read rows of pixels and labels from a pickled CIFAR file."""
    try:
        content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        images = content[b"data"].array
        labels = np.asarray(content[b"labels" if b"labels" in content else b"fine_labels"])
        return images.reshape(-1, 3072), labels
    except Exception as error:
        raise ValueError(f"a CIFAR file is damaged or unsafe; nothing was run: {error}") from None


def rows(raw: bytes, labels: int) -> tuple[Bytes, NDArray[Any]]:
    """Read rows of pixels and labels from a binary CIFAR file, ``labels`` bytes before each row."""
    size = labels + 3072
    if len(raw) % size or not raw:
        raise ValueError(f"a CIFAR file is truncated: {len(raw)} bytes are no multiple of {size}")
    found = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return found[:, labels:], found[:, labels - 1].copy()


def idx(path: Path) -> Bytes:
    """Read the array of bytes of an idx file, compressed or not."""
    packed = path.with_name(path.name + ".gz")
    if not path.is_file() and not packed.is_file():
        raise ValueError(f"there is no file {str(path)!r} or {packed.name!r}")
    raw = _whole(path if path.is_file() else packed)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{str(path)!r} is not an idx file of bytes")
    axes = raw[3]
    if len(raw) < 4 + 4 * axes:
        raise ValueError(f"{str(path)!r} is truncated in its header")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    body = raw[4 + 4 * axes :]
    if len(body) != math.prod(shape):
        raise ValueError(f"{str(path)!r} is truncated: {len(body)} bytes of {math.prod(shape)}")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def _whole(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    if len(raw) > LARGEST:
        raise ValueError(f"{str(path)!r} unpacks to more than {LARGEST >> 20} MiB")
    return raw
