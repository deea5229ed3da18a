"""Time and memory of the index of 1.28 million images, in folders and in shards.

    python -m benchmarks.index --out benchmarks/records/index.json

The folder is a real tree of empty files, 1,000 classes of 1,281, with names as long as ImageNet's.
The shards hold as many samples, whose images are some bytes long: the index reads headers only.
Each row is a process of its own; its memory is the peak above that after the imports. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.imagenet import write_shards
from lipbound.files import provenance, write
from lipbound.robust.data.image_folder import ImageFiles
from lipbound.robust.data.shards import Shards

CLASSES, EACH = 1000, 1281


def tree(root: Path, classes: int, each: int) -> None:
    for label in range(classes):
        folder = root / "train" / f"n{label:08}"
        folder.mkdir(parents=True)
        for number in range(each):
            os.close(os.open(folder / f"{folder.name}_{number}.JPEG", os.O_CREAT | os.O_WRONLY))


def tars(root: Path, classes: int, each: int) -> None:
    """Write the same shard of 1,000 samples many times, as only its headers count."""
    write_shards(str(root), "train", ({"jpg": b"x", "cls": b"1"} for _ in range(1000)))
    for number in range(1, classes * each // 1000):
        shutil.copy(root / "train-000000.tar", root / f"train-{number:06}.tar")


def read_folder(root: Path) -> int:
    names = sorted(path.name for path in (root / "train").iterdir())
    return len(ImageFiles(root / "train", names).labels)


def read_shards(root: Path) -> int:
    return len(Shards(str(root), "train").labels)


def measured(read: Callable[[Path], int], root: Path) -> dict[str, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, read, root).result()


def _measured(read: Callable[[Path], int], root: Path) -> dict[str, float]:
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before, start, busy = _peak(), time.perf_counter(), time.process_time()
    count = read(root)
    return {
        "images": count,
        "seconds": round(time.perf_counter() - start, 2),
        "of this process's processor": round(time.process_time() - busy, 2),
        "mebibytes": round(_peak() - before, 1),
    }


def _peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--each", type=int, default=EACH)
    parser.add_argument("--place", type=Path, help="where to write, default: the temporary folder")
    given = parser.parse_args()
    record: dict[str, Any] = {}
    for name, read, make in (("folder", read_folder, tree), ("shards", read_shards, tars)):
        with tempfile.TemporaryDirectory(dir=given.place) as place:
            root = Path(place)
            make(root, given.classes, given.each)
            record[name] = {when: measured(read, root) for when in ("first start", "next start")}
            size = (root / "lipbound-index-train.npz").stat().st_size
            record[name]["mebibytes on disk"] = round(size / 2**20, 1)
            print(json.dumps({name: record[name]}), flush=True)
    record |= {"processors": len(os.sched_getaffinity(0)), **provenance()}
    if given.out:
        write(given.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
