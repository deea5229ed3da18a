"""Write synthetic shards of the size of ImageNet's images.

    python -m benchmarks.imagenet FOLDER --samples 20000

The images have 400×500 pixels and about 100 KB: noise on a gradient whose colours are the class.
Only some of them are different, because encoding takes longer than training needs.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.core import url_to_fs


def write_shards(
    folder: str, split: str, samples: Iterable[dict[str, bytes]], per_shard: int = 1000
) -> None:
    """Write tar files as WebDataset does.

    Args:
        folder: A local folder, or an address of fsspec.
        split: First part of the files' names.
        samples: Content by the ending of the member, for example ``jpg`` and ``cls``.
        per_shard: Samples in a file.
    """
    filesystem, root = url_to_fs(folder)
    filesystem.makedirs(root, exist_ok=True)
    for number, part in enumerate(_groups(samples, per_shard)):
        with (
            filesystem.open(f"{root}/{split}-{number:06}.tar", "wb") as file,
            tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for place, sample in enumerate(part):
                for ending, content in sample.items():
                    member = tarfile.TarInfo(f"{number * per_shard + place:09}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def _groups(samples: Iterable[Any], count: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for sample in samples:
        group.append(sample)
        if len(group) == count:
            yield group
            group = []
    if group:
        yield group


def pictures(distinct: int = 200, classes: int = 1000, seed: int = 0) -> list[dict[str, bytes]]:
    """Return JPEGs of 400×500 pixels and about 100 KB, with labels."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    across = np.linspace(0, 1, 500)[None, :, None]
    found = []
    for _ in range(distinct):
        one, other = draw.integers(0, 256, (2, 1, 1, 3))
        noise = draw.normal(0, 27, (400, 500, 3))
        pixels = np.clip(one * (1 - across) + other * across + noise, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
        label = str(draw.integers(classes)).encode()
        found.append({"jpg": buffer.getvalue(), "cls": label})
    return found


def synthetic(folder: str, train: int = 20_000, test: int = 1000, distinct: int = 200) -> None:
    """Write synthetic shards for training and test."""
    made = pictures(distinct)
    for split, count in (("train", train), ("val", test)):
        write_shards(folder, split, (made[i % distinct] for i in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=20_000)
    given = parser.parse_args()
    synthetic(str(given.folder), given.samples)


if __name__ == "__main__":
    main()
