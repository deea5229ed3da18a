"""Image sets packed as lossless WebP sprites in ``.npz`` files."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipbound.robust.data import sets
from lipbound.robust.data.parsers import LARGEST
from lipbound.robust.data.sets import Data, in_memory
from lipbound.robust.data.streamed import FORMATS, decoded
from lipbound.weights import check_file


def read(path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Read images ``(count, height, width, 3)`` and labels of one file, and check their digest.

    Raises:
        ValueError: If the file is damaged, or unpacks to more than ``LARGEST`` bytes.
    """
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST:
            raise ValueError(f"it unpacks to more than {LARGEST >> 20} MiB")
        return _read(path)
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{str(path)!r} is not a packed data set: {error}") from None


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    from PIL import Image

    def decode(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(decoded(Image.open(io.BytesIO(raw.tobytes()), formats=FORMATS), path))

    with np.load(path, allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
        labels = stored["labels"]
        if "offset" in stored.files:  # the encoded images one after another
            data, ends = stored["data"], stored["offset"]
            heads = [stored[f"header_{i}"] for i in range(meta["headers"])]
            which = stored["header_id"] if heads else None
            parts = []
            for i, (a, b) in enumerate(pairwise(ends)):
                body = data[a:b]
                parts.append(decode(body if which is None else np.r_[heads[which[i]], body]))
            return np.stack(parts), labels
        side, columns = meta["side"], meta["cols"]
        sheets = []
        for key in sorted(k for k in stored.files if k.startswith("chunk_")):
            sheet = decode(stored[key])
            rows = sheet.shape[0] // side
            tiles = sheet.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
            sheets.append(tiles.reshape(rows * columns, side, side, 3))
    images = np.concatenate(sheets)[: meta["n"]] * np.uint8(max(1, meta["step"]))
    if hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest() != meta["sha256_pixels"]:
        raise ValueError(f"{str(path)!r} is damaged: the digest of its pixels does not match")
    return images, labels


def packed(folder: Path | None, train: list[str], test: str, crop: int) -> Data:
    if folder is None:
        raise ValueError(f"packed data needs --folder, the folder that contains {test}")
    parts = [read(folder / name) for name in train]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return in_memory((images, labels), read(folder / test), crop=crop, flip=True)


def cifar10(folder: Path | None = None) -> Data:
    """Read CIFAR-10 from packed files, or from the original files if there are no packed ones."""
    return _cifar("cifar10", folder, sets.cifar10)


def cifar100(folder: Path | None = None) -> Data:
    """Read CIFAR-100 from packed files, or from the original files if there are no packed ones."""
    return _cifar("cifar100", folder, sets.cifar100)


def imagenette64(folder: Path | None = None) -> Data:
    """Read Imagenette at 64×64 pixels from packed files."""
    return packed(folder, ["imagenette64_train.imgs.npz"], "imagenette64_val.imgs.npz", 8)


def _cifar(name: str, folder: Path | None, usual: Callable[[Path | None], Data]) -> Data:
    test = f"{name}_test.webp.npz"
    if folder is not None and not (folder / test).is_file():
        return usual(folder)
    return packed(folder, [f"{name}_train_{part}.webp.npz" for part in "ab"], test, 4)
