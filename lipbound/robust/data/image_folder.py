"""Image files in one folder per class, found through an index instead of a walk at every start."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from lipbound.robust.data.index import Arrays, joined, kept, parted
from lipbound.robust.data.streamed import ENCODED, ENDINGS
from lipbound.runtime import Progress, silent

SUFFIXES = {ending.encode() for ending in ENDINGS}


class ImageFiles:
    """The image files of one split, with the number of their class.

    Args:
        root: Folder of the split, with one folder per class.
        classes: Names of the folders.
        progress: Shows how many classes are indexed.

    Raises:
        ValueError: If there are no images.
    """

    def __init__(self, root: Path, classes: Sequence[str], progress: Progress = silent):
        wanted = joined([os.fsencode(name) for name in classes])
        index = kept(
            str(root.absolute().with_name(f"lipbound-index-{root.name}.npz")),
            LocalFileSystem(),
            lambda: walked(root, classes, progress) | {"classes": wanted},
            lambda found: np.array_equal(found["classes"], wanted) and unchanged(root, found),
        )
        self.root, self.names, self.labels = os.fsencode(root), index["names"], index["labels"]
        self.ends = np.flatnonzero(self.names == 0)
        if not len(self.labels):
            raise ValueError(f"no images in {str(root)!r}; it must hold one folder per class")

    def name(self, place: int) -> str:
        start = self.ends[place - 1] + 1 if place else 0
        return os.fsdecode(self.root + b"/" + self.names[start : self.ends[place]].tobytes())

    def read(self, places: Sequence[int]) -> list[bytes]:
        return [_content(self.name(place)) for place in places]


def _content(path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block for ever
            raise ValueError(f"{path!r} is not a file")
        with open(path, "rb") as file:
            content = file.read(ENCODED + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path!r}: {error.strerror}") from None
    if len(content) > ENCODED:
        raise ValueError(f"{path!r} has more than {ENCODED >> 20} MiB")
    return content


def walked(root: Path, classes: Sequence[str], progress: Progress) -> Arrays:
    """Return the names of all images, their labels, and the times of all folders.

    The names are in the order of the classes, and inside a class in the order of paths.
    """
    names, labels, folders = bytearray(), [np.empty(0, np.int32)], {b"": _time(os.fsencode(root))}
    for label, name in enumerate(progress(classes, f"classes of {root.name} indexed")):
        found = list(_images(os.fsencode(root), os.fsencode(name), folders))
        found.sort(key=lambda path: path.replace(b"/", b"\0"))
        for path in found:
            names += path
            names += b"\0"
        labels.append(np.full(len(found), label, np.int32))
    return {
        "names": np.frombuffer(names, np.uint8),
        "labels": np.concatenate(labels),
        "folders": joined(list(folders)),
        "times": np.array(list(folders.values()), np.int64),
    }


def _images(root: bytes, inside: bytes, folders: dict[bytes, int]) -> Iterator[bytes]:
    """Yield the paths of a folder's images, and note the time of every folder."""
    try:
        folders[inside] = _time(root + b"/" + inside)  # before its names are read
        with os.scandir(root + b"/" + inside) as entries:
            deeper = []
            for entry in entries:
                name = entry.name
                dot = name.rfind(b".")
                if dot > 0 and name[dot:].lower() in SUFFIXES:
                    yield inside + b"/" + name
                elif entry.is_dir(follow_symlinks=False):
                    deeper.append(inside + b"/" + name)
    except FileNotFoundError:  # the test images need not be of all classes
        folders.pop(inside, None)
        return
    for folder in deeper:
        yield from _images(root, folder, folders)


def unchanged(root: Path, index: Arrays) -> bool:
    """Whether an index is well formed, and no folder has changed since it was made."""
    names, labels = index["names"], index["labels"]
    content = b"\0" + names.tobytes()
    return (
        (names.dtype, labels.dtype) == (np.uint8, np.int32)
        and len(labels) == content.count(0) - 1
        and content.endswith(b"\0")
        and (not len(labels) or 0 <= labels.min() <= labels.max() < np.sum(index["classes"] == 0))
        and not any(up in content for up in (b"\0/", b"\0../", b"/../"))
        and index["times"].tolist()
        == [_time(os.path.join(os.fsencode(root), name)) for name in parted(index["folders"])]
    )


def _time(folder: bytes) -> int:
    return os.stat(folder).st_mtime_ns
