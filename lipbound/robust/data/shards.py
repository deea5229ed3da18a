"""Images in tar files as WebDataset writes them, read at random by an index of their places."""

from __future__ import annotations

import os
import re
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from fsspec.core import url_to_fs
from numpy.typing import NDArray

from lipbound.robust.data.index import Arrays, joined, kept, parted
from lipbound.robust.data.streamed import ENCODED, ENDINGS, unchanged_part
from lipbound.runtime import Progress, silent

SPLITS = {"train": ("train",), "test": ("val", "validation", "test")}
MARKS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
HEADER = 1 << 20  # most bytes of a tar header
LABELS = 1_000_000  # a label must be smaller
DIGITS = 20  # most bytes of a .cls member


class Shards:
    """The samples of one split: a picture and a member ``KEY.cls`` with its label, for each key.

    Args:
        folder: A local folder, or an address that fsspec can open.
        kind: ``train`` or ``test``.
        progress: Shows how many shards are indexed.

    Raises:
        ValueError: If there are no shards, or one of them is damaged or has a sample without a
            picture or without a label.
    """

    def __init__(self, folder: str, kind: str, progress: Progress = silent):
        self.folder = folder
        filesystem, root = _opened(folder)
        names, marks, sizes = _listed(filesystem, root, folder, kind)
        self.names = names

        def make() -> Arrays:
            found = _scanned(folder, names, progress)
            return {"names": joined(names), "marks": joined(marks), **found}

        def fits(found: Arrays) -> bool:
            same = parted(found["names"]) == names and parted(found["marks"]) == marks
            return same and _sound(found, sizes)

        place = f"{root.rstrip('/')}/lipbound-index-{kind}.npz"
        index = kept(place, filesystem, make, fits)
        self.labels = index["labels"]
        self.shards, self.starts, self.sizes = index["shards"], index["starts"], index["sizes"]

    def name(self, place: int) -> str:
        shard = os.fsdecode(self.names[self.shards[place]])
        return f"{self.folder}/{shard}, byte {self.starts[place]}"

    def read(self, places: Sequence[int]) -> list[bytes]:
        """Return images by one request each, which object stores answer at the same time."""
        # Opened anew for every chunk, which costs microseconds: connections do not survive a fork.
        filesystem, root = _opened(self.folder)
        starts = [int(self.starts[place]) for place in places]
        ends = [start + int(self.sizes[place]) for start, place in zip(starts, places, strict=True)]
        paths = [f"{root.rstrip('/')}/{os.fsdecode(self.names[self.shards[p]])}" for p in places]
        try:
            found = filesystem.cat_ranges(paths, starts, ends)
        except Exception as error:  # every kind of storage has its own errors
            found = [error]
        for content, place in zip(found, places, strict=False):
            if isinstance(content, BaseException):
                raise ValueError(f"cannot read {self.name(place)!r}: {content}") from None
            if len(content) != self.sizes[place]:
                raise ValueError(f"{self.name(place)!r} is cut off; its shard has changed")
        return [bytes(content) for content in found]


def _opened(folder: str) -> tuple[Any, str]:
    try:
        filesystem, root = url_to_fs(folder)
    except (ImportError, ValueError) as error:
        raise ValueError(f"cannot open {folder!r}: {error}") from None
    return filesystem, root


def _listed(
    filesystem: Any, root: str, folder: str, kind: str
) -> tuple[list[bytes], list[bytes], NDArray[np.int64]]:
    """Return names, marks and sizes of the shards of a split; a mark changes with the content."""
    try:
        entries = filesystem.ls(root, detail=True)
    except FileNotFoundError:
        raise ValueError(f"there is no folder {folder!r}") from None
    except Exception as error:  # every kind of storage has its own errors
        raise ValueError(f"cannot list {folder!r}: {error}") from None
    files = {PurePosixPath(e["name"]).name: e for e in entries if e["type"] != "directory"}
    for word in SPLITS[kind]:
        pattern = re.compile(rf"(.*[-_.])?{word}([-_.].*)?\.tar", re.IGNORECASE)
        names = sorted(name for name in files if pattern.fullmatch(name))
        for name in names:
            if files[name].get("islink"):  # type, size and time are otherwise those of the link
                target = os.path.realpath(files[name]["name"])
                files[name] = filesystem.info(target) if filesystem.exists(target) else {"type": ""}
            if files[name]["type"] != "file":
                raise ValueError(f"{folder}/{name} is not a file; is it a broken link?")
        if names:
            sizes = np.array([files[name]["size"] for name in names], np.int64)
            marks = [str([files[name].get(mark) for mark in ("size", *MARKS)]) for name in names]
            return [os.fsencode(n) for n in names], [m.encode() for m in marks], sizes
    words = " or ".join(f"{word}-000000.tar" for word in SPLITS[kind])
    raise ValueError(
        f"no {kind} shards in {folder!r}: it must hold tar files such as {words}, for training and "
        f"for test; for images in train/CLASS/ use --data folder"
    )


def _sound(index: Arrays, sizes: NDArray[np.int64]) -> bool:
    """Whether the arrays of an index fit together and stay inside the shards."""
    shards, starts, lengths, labels = (index[k] for k in ("shards", "starts", "sizes", "labels"))
    kinds = [array.dtype for array in (shards, starts, lengths, labels)]
    if kinds != [np.int32, np.int64, np.int32, np.int32]:
        return False
    if not len(shards) == len(starts) == len(lengths) == len(labels) > 0:
        return False
    if min(a.min() for a in (shards, starts, lengths, labels)) < 0 or shards.max() >= len(sizes):
        return False
    inside = starts <= sizes[shards] - lengths
    return bool(inside.all() and lengths.max() <= ENCODED and labels.max() < LABELS)


def _scanned(folder: str, names: list[bytes], progress: Progress) -> Arrays:
    """Read the headers of all shards, in several processes."""
    loader: Any = torch.utils.data.DataLoader(
        _Scans(folder, names),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=min(len(names), os.cpu_count() or 1, 16) if len(names) > 1 else 0,
        collate_fn=unchanged_part,
        generator=torch.Generator().manual_seed(0),  # otherwise it uses the global one
    )
    parts: list[NDArray[np.int64]] = []
    left_out: list[str] = []
    # The workers start before the bar, because a thread that draws it must not be forked.
    for _, found in zip(progress(names, "shards indexed"), iter(loader), strict=True):
        if isinstance(found, str):
            raise ValueError(found)
        parts.append(found[0])
        left_out += found[1]
    if not any(len(part) for part in parts):
        raise ValueError(
            f"there is no sample in {folder}/{os.fsdecode(names[0])} or the shards like it: a "
            "picture and its label have the same name up to its first dot, such as a.jpg and a.cls"
        )
    if left_out:
        name = PurePosixPath(left_out[0]).name
        stem, _, ending = name.rpartition(".")
        better = f"{stem.replace('.', '_')}.{ending}"
        warnings.warn(
            f"left out {len(left_out):,} picture(s) of {folder!r}, such as {name!r}, because "
            f"WebDataset takes what follows the first dot of a name as its ending; write the "
            f"shards with one dot in the names of pictures and labels, as in {better!r}",
            stacklevel=2,
        )
    shards = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    columns = np.concatenate(parts).T
    kinds = (np.int64, np.int32, np.int32)
    starts, sizes, labels = (c.astype(k) for c, k in zip(columns, kinds, strict=True))
    return {"shards": shards.astype(np.int32), "starts": starts, "sizes": sizes, "labels": labels}


class _Scans:
    """The pictures in each shard and the names of those left out, or what is wrong with it."""

    def __init__(self, folder: str, names: list[bytes]):
        self.folder, self.names = folder, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[NDArray[np.int64], list[str]] | str:
        filesystem, root = _opened(self.folder)
        name = os.fsdecode(self.names[number])
        try:
            with filesystem.open(f"{root.rstrip('/')}/{name}", "rb") as file:
                left_out: list[str] = []
                found = np.array(list(samples(file, left_out)), np.int64)
                return found.reshape(-1, 3), left_out
        except Exception as error:  # every kind of storage has its own errors
            return f"{self.folder}/{name}: {error}"


def samples(file: Any, left_out: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield place, size and label of the pictures of a tar file, in the order of the file.

    Members of other kinds are not read. A sample of which only pictures with two dots in the name
    are known has no picture by WebDataset's rule; the names of these go to ``left_out``.

    Raises:
        ValueError: If the file is damaged, or a sample has not one picture and one label.
    """
    sample = _Sample("", left_out)
    for member in _members(file):
        folder, _, name = member.name.rpartition("/")
        stem, dot, ending = name.partition(".")
        wanted = ending == "cls" or f".{ending.lower()}" in ENDINGS
        if wanted and stem and (member.islnk() or member.issym()):
            raise ValueError(
                f"{member.name!r} is a link; write the file with tar --dereference "
                "--hard-dereference"
            )
        if not (stem and dot and member.isreg()):
            continue
        key = f"{folder}/{stem}"
        if key != sample.key:
            yield from sample.whole()
            sample = _Sample(key, left_out)
        if f".{ending.lower()}" in ENDINGS:
            sample.add_picture(member)
        elif ending == "cls":
            sample.add_label(member, file)
        elif f".{ending.rpartition('.')[2].lower()}" in ENDINGS:
            sample.others.append(member.name)
    yield from sample.whole()


def _members(file: Any) -> Iterator[tarfile.TarInfo]:
    end = -1
    headers: Any = _Headers(file)
    try:
        with tarfile.open(fileobj=headers, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # millions of members
                if member.offset < end or member.size < 0:
                    raise ValueError("it has a member of negative size")
                end = member.offset_data
                yield member
            # A damaged header ends a tar file for tarfile, and what follows would be lost.
            file.seek(tar.offset)
            rest = file.read(HEADER + 1)
            if not rest or len(rest) > HEADER or rest.strip(b"\0"):
                raise ValueError(
                    f"it is not a complete tar file: byte {tar.offset:,} "
                    "begins neither a member nor the end"
                )
    except (tarfile.TarError, EOFError, OSError, RecursionError) as error:
        raise ValueError(f"it is not a complete tar file: {error}") from None


class _Headers:
    """A file of which only headers are read, so that a header that lies cannot fill the memory."""

    def __init__(self, file: Any):
        self.file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= HEADER:
            raise ValueError(f"it has a header of {size:,} bytes")
        content: bytes = self.file.read(size)
        return content

    def seek(self, place: int, whence: int = 0) -> int:
        moved: int = self.file.seek(place, whence)
        return moved

    def tell(self) -> int:
        place: int = self.file.tell()
        return place


@dataclass
class _Sample:
    """What was found of a sample."""

    key: str
    left_out: list[str]
    picture: tuple[int, int] | None = None
    label: int | None = None
    others: list[str] = field(default_factory=list)

    def add_picture(self, member: tarfile.TarInfo) -> None:
        if self.picture is not None:
            raise ValueError(f"sample {self.key.lstrip('/')!r} has two pictures")
        if member.size > ENCODED or member.issparse():
            raise ValueError(f"{member.name!r} has more than {ENCODED >> 20} MiB, or is sparse")
        self.picture = member.offset_data, member.size

    def add_label(self, member: tarfile.TarInfo, file: Any) -> None:
        if self.label is not None:
            raise ValueError(f"sample {self.key.lstrip('/')!r} has two labels")
        text = b""
        if member.size <= DIGITS and not member.issparse():
            file.seek(member.offset_data)
            text = file.read(member.size).strip()
        if not text.isdigit() or int(text) >= LABELS:
            raise ValueError(f"{member.name!r} is not a label between 0 and {LABELS - 1:,}")
        self.label = int(text)

    def whole(self) -> Iterator[tuple[int, int, int]]:
        if (self.picture is None) != (self.label is None):
            kinds = ", ".join(sorted(ENDINGS))
            lacks = f"picture ({kinds})" if self.picture is None else "label (.cls)"
            raise ValueError(f"sample {self.key.lstrip('/')!r} has no {lacks} next to it")
        if self.picture is not None and self.label is not None:
            yield *self.picture, self.label
        else:
            self.left_out += self.others
