"""Images that are decoded when they are needed, by worker processes that stay for a whole run."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SMALL = 64  # largest side of images that are kept in memory at their own size
PIXELS = 1 << 26  # most pixels of an image; larger ones are refused before decoding
ENCODED = 1 << 26  # most bytes of an encoded image
CHUNK = 32  # images that a worker reads and decodes at once
AHEAD = 1 << 30  # most bytes of decoded images that wait for their step


class Source(Protocol):
    """Encoded images and their labels. Worker processes get a copy."""

    labels: NDArray[Any]

    def read(self, places: Sequence[int]) -> Sequence[bytes]:
        """Return the encoded images at some places, at most ``ENCODED`` bytes each."""

    def name(self, place: int) -> str:
        """Return where the image is, for an error."""


class Streamed:
    """Images of a source, decoded by worker processes as they are needed.

    Training images get a random crop (8 to 100 % of the area, aspect ratio 3:4 to 4:3) and flip,
    which depend on the seed and the image. Test images get a central crop and are resized. The
    worker processes start with the first images and are kept. They serve one stream at a time: a
    stream that was interrupted by another continues where it was.
    """

    def __init__(self, source: Source, size: int = 224, workers: int = 8):
        # Shuffled, so that the first images are of all classes.
        order = np.random.default_rng(0).permutation(len(source.labels))
        self.decoder, self.workers = Decoder(source, order, size), workers
        self._jobs: Iterator[tuple[int | None, list[int]]] = iter(())
        self._loader: Any = None

    def __len__(self) -> int:
        return len(self.decoder.order)

    def changed(self, size: int, workers: int) -> Streamed:
        """Return the same images in another size, decoded by another number of processes."""
        return Streamed(self.decoder.source, size, workers)

    def small(self) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
        """Return all images, ``(count, height, width, 3)``, and labels, if they are small.

        Images of different sizes, or with a side above ``SMALL``, give ``None``.
        """
        images: list[NDArray[np.uint8]] = []
        for part in torch.arange(len(self)).split(CHUNK):
            for opened in self.decoder.opened(part.tolist()):
                if max(opened.size) > SMALL:
                    return None
                images.append(np.asarray(opened, np.uint8))
                if images[-1].shape != images[0].shape:
                    return None
        return np.stack(images), self.decoder.source.labels[self.decoder.order]

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._filled(self._decoded(indices.split(CHUNK), None), indices)

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        jobs = None
        parts: Iterator[Tensor | str] = iter(())
        for place, batch in enumerate(batches):
            if jobs is not self._jobs:  # the first batch, or another stream has come between
                parts = self._decoded(batches[place:], seed)
                jobs = self._jobs
            yield self._filled(parts, batch)

    def _filled(self, parts: Iterator[Tensor | str], indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next decoded parts as one batch.

        Raises:
            ValueError: If an image could not be read.
        """
        side, decoder = self.decoder.size, self.decoder
        images = torch.empty(
            (len(indices), 3, side, side), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        for room in images.split(CHUNK):
            part = next(parts)
            if isinstance(part, str):
                raise ValueError(part)
            room.copy_(part)
        places = decoder.order[indices.numpy()]
        return images, torch.from_numpy(decoder.source.labels[places]).long()

    def _decoded(self, batches: Sequence[Tensor], seed: int | None) -> Iterator[Tensor | str]:
        """Yield the images of all batches in parts of ``CHUNK``, or the error of a part."""
        self._jobs = ((seed, part.tolist()) for batch in batches for part in batch.split(CHUNK))
        if not self.workers or sum(map(len, batches)) <= CHUNK:
            return map(self.decoder.__getitem__, self._jobs)
        batch = min(2 * len(batches[0]), AHEAD // (3 * self.decoder.size**2))
        ahead = max(2, math.ceil(batch / (CHUNK * self.workers)))
        if self._loader is None or self._loader.prefetch_factor < ahead:
            self._loader = torch.utils.data.DataLoader(
                self.decoder,  # type: ignore[arg-type]
                batch_size=None,
                sampler=_Now(self),
                num_workers=self.workers,
                prefetch_factor=ahead,
                persistent_workers=True,
                collate_fn=unchanged_part,
                worker_init_fn=_undisturbed,
                generator=torch.Generator().manual_seed(0),  # otherwise it uses the global one
            )
        return iter(self._loader)


class _Now:
    """The jobs of the present stream, which do not keep the images' worker processes alive."""

    def __init__(self, owner: Streamed):
        self.owner = weakref.proxy(owner)

    def __iter__(self) -> Iterator[tuple[int | None, list[int]]]:
        jobs: Iterator[tuple[int | None, list[int]]] = self.owner._jobs
        return jobs


def unchanged_part(part: Any) -> Any:
    return part


def _undisturbed(worker: int) -> None:
    """Leave Ctrl-C to the main process, and end without an error at a signal to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))


class Decoder:
    """Decodes, crops and resizes the images of a source.

    Args:
        source: The encoded images.
        order: Place in the source of every image.
        size: Side of the resized images.
    """

    def __init__(self, source: Source, order: NDArray[np.int64], size: int):
        self.source, self.order, self.size = source, order, size

    def __getitem__(self, job: tuple[int | None, list[int]]) -> Tensor | str:
        """Return images ``(count, 3, size, size)``, or what is wrong with one of them.

        Args:
            job: Seed of the augmentation, ``None`` for none, and the indices of the images.
        """
        seed, indices = job
        found = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        try:
            for row, index, image in zip(found, indices, self.opened(indices), strict=True):
                row[:] = self._cut(image, seed, index)
        except ValueError as error:  # an exception would bring the worker's traceback along
            return str(error)
        return torch.from_numpy(found)

    def opened(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield images in RGB.

        Raises:
            ValueError: If one cannot be read, or has more than ``PIXELS`` pixels.
        """
        from PIL import Image

        places = [int(self.order[index]) for index in indices]
        for place, raw in zip(places, self.source.read(places), strict=True):
            name = self.source.name(place)
            try:
                # The formats are named because Pillow would pass PostScript to an interpreter.
                with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
                    found = decoded(image, name)
            except TooLarge:
                raise
            except Exception as error:  # every format has its own errors
                said = re.sub(r" <_io.*>", "", str(error))  # the name of a buffer
                raise ValueError(f"{name!r} is not a readable image: {said}") from None
            yield found

    def _cut(self, image: Any, seed: int | None, index: int) -> NDArray[np.uint8]:
        from PIL import Image

        width, height = image.size
        box, mirrored = _middle(width, height), False
        if seed is not None:
            draw = np.random.default_rng((seed, index))
            box, mirrored = _random_box(width, height, draw), bool(draw.random() < 0.5)
        array = np.asarray(image.resize((self.size,) * 2, Image.Resampling.BILINEAR, box), np.uint8)
        return (array[:, ::-1] if mirrored else array).transpose(2, 0, 1)


class TooLarge(ValueError):
    """Raised for an image with more than ``PIXELS`` pixels."""


def decoded(image: Any, path: object) -> Any:
    """Return the image in RGB, unless its header announces more than ``PIXELS`` pixels.

    Raises:
        TooLarge: If the image is too large; it is not decoded.
    """
    width, height = image.size
    if width * height > PIXELS:
        raise TooLarge(f"{str(path)!r} has {width}×{height} pixels; at most {PIXELS:,} are read")
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
