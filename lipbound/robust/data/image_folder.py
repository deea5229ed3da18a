"""Images in folders, decoded when they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SMALL = 64  # largest side of images that are kept in memory at their own size
PIXELS = 1 << 26  # most pixels of an image; larger ones are refused before decoding


class Streamed:
    """Images in one folder per class, decoded by worker processes as they are needed.

    Training images get a random crop (8 to 100 % of the area, aspect ratio 3:4 to 4:3) and flip,
    which depend on the seed and the image. Test images get a central crop and are resized.
    """

    def __init__(self, root: Path, classes: Sequence[str], size: int = 224, workers: int = 8):
        self.size, self.workers = size, workers
        self.paths: list[Path] = []
        self.labels: list[int] = []
        for label, name in enumerate(classes):
            found = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in ENDINGS)
            self.paths += found
            self.labels += [label] * len(found)
        if not self.paths:
            raise ValueError(f"no images in {str(root)!r}; it must hold one folder per class")
        # Shuffled, so that the first images are of all classes.
        order = np.random.default_rng(0).permutation(len(self.paths))
        self.paths = [self.paths[i] for i in order]
        self.labels = [self.labels[i] for i in order]
        self._seed: int | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        # The formats are named because Pillow would pass PostScript to an interpreter.
        with Image.open(self.paths[index], formats=FORMATS) as opened:
            image = decoded(opened, self.paths[index])
        size = self.size
        width, height = image.size
        box, mirrored = _middle(width, height), False
        if self._seed is not None:
            draw = np.random.default_rng((self._seed, index))
            box, mirrored = _random_box(width, height, draw), bool(draw.random() < 0.5)
        cut = image.resize((size, size), Image.Resampling.BILINEAR, box)
        array = np.asarray(cut, np.uint8)
        array = array[:, ::-1] if mirrored else array
        return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))), self.labels[index]

    def small(self) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
        """Return all images, ``(count, height, width, 3)``, and labels, if they are small.

        Images of different sizes, or with a side above ``SMALL``, give ``None``.
        """
        from PIL import Image

        images: list[NDArray[np.uint8]] = []
        for path in self.paths:
            try:
                with Image.open(path, formats=FORMATS) as opened:
                    if max(opened.size) > SMALL:
                        return None
                    images.append(np.asarray(decoded(opened, path), np.uint8))
            except (OSError, SyntaxError) as error:
                raise ValueError(f"{str(path)!r} is not a readable image: {error}") from None
            if images[-1].shape != images[0].shape:
                return None
        return np.stack(images), np.array(self.labels)

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self._seed = None
        return next(self._loader([indices]))

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self._seed = seed
        return self._loader(batches)

    def _loader(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        loader: Any = torch.utils.data.DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=[b.tolist() for b in batches],
            num_workers=self.workers if len(batches) > 1 else 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),  # otherwise it would use the global one
        )
        return iter(loader)


def decoded(image: Any, path: Path) -> Any:
    """Return the image in RGB, unless its header announces more than ``PIXELS`` pixels.

    Raises:
        ValueError: If the image is too large; it is not decoded.
    """
    width, height = image.size
    if width * height > PIXELS:
        raise ValueError(f"{str(path)!r} has {width}×{height} pixels; at most {PIXELS:,} are read")
    return image.convert("RGB")


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the central square with 7/8 of the shorter side, as in a 224 of 256 crop."""
    side = min(width, height) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(
    width: int, height: int, draw: np.random.Generator
) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        shape = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        if w <= width and h <= height:
            left, top = draw.uniform(0, width - w), draw.uniform(0, height - h)
            return left, top, left + w, top + h
    return _middle(width, height)
