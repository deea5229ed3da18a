"""Data sets of labelled images: small sets are held in memory, large ones are streamed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.robust.data.image_folder import ImageFiles
from lipbound.robust.data.parsers import Bytes, files, idx, pickled, rows
from lipbound.robust.data.shards import Shards
from lipbound.robust.data.streamed import Source, Streamed
from lipbound.runtime import Progress, silent

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Split(Protocol):
    """The training or the test images of a data set; indices select among them."""

    def __len__(self) -> int: ...

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return uint8 images ``(batch, channels, height, width)`` and labels, not augmented."""

    def changed(self, size: int, workers: int) -> Split:
        """Return the images in another size; images that are held in memory keep theirs.

        Args:
            size: Side of the images.
            workers: Number of processes that decode them; 0 for this process.
        """

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels per tensor of indices; the seed augments streamed images."""


@dataclass(frozen=True)
class Memory:
    """Images held in memory as bytes.

    Attributes:
        images: uint8 pixels, ``(count, channels, height, width)``.
        labels: Classes, int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        indices = indices.to(self.labels.device)
        return self.images[indices], self.labels[indices]

    def changed(self, size: int, workers: int) -> Memory:
        return self

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.load(indices) for indices in batches)

    def to(self, device: torch.device) -> Memory:
        return Memory(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A data set of training and test images.

    Attributes:
        train: The training images.
        test: The test images.
        classes: Number of classes.
        mean: Mean of the training pixels in [0, 1], per channel.
        std: Standard deviation of the training pixels, per channel.
        crop: Pixels of padding for random crops; 0 for no crops.
        flip: Whether random horizontal flips keep the class.
    """

    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0
    flip: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.test.load(torch.zeros(1, dtype=torch.int64))[0].shape[1:])

    def changed(self, size: int, workers: int) -> Data:
        """Return the data with streamed images of another size, see ``Split.changed``."""
        splits = {name: getattr(self, name).changed(size, workers) for name in ("train", "test")}
        return replace(self, **splits)

    def fingerprint(self) -> str:
        """Return a text that differs for other data sets: sizes, and a checksum of some images."""
        total = 0
        for split in (self.train, self.test):
            some = torch.linspace(0, len(split) - 1, min(16, len(split))).long()
            for part in split.load(some):
                total = zlib.crc32(part.cpu().contiguous().numpy().tobytes(), total)
        shape = "x".join(map(str, self.input_shape))
        return f"{len(self.train)}+{len(self.test)} {shape} {self.classes} {total:08x}"

    def test_images(self, count: int = 0) -> tuple[Tensor, Tensor]:
        """Return the first ``count`` test images and their labels; 0 returns all."""
        return self.test.load(torch.arange(min(count or len(self.test), len(self.test))))


def in_memory(
    train: tuple[Bytes, NDArray[Any]], test: tuple[Bytes, NDArray[Any]], **options: Any
) -> Data:
    """Make a data set from arrays ``(count, height, width, channels)`` and labels."""
    splits: list[Memory] = []
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels; check the files")
        pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        splits.append(Memory(pixels, torch.from_numpy(labels.astype(np.int64))))
    counts = np.stack([np.bincount(c.ravel(), minlength=256) for c in np.moveaxis(train[0], 3, 0)])
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    deviation = np.sqrt(np.maximum(counts @ levels**2 / counts.sum(1) - mean**2, 1e-12))
    classes = int(max(train[1].max(), test[1].max())) + 1
    statistics = tuple(mean.tolist()), tuple(deviation.tolist())
    return Data(splits[0], splits[1], classes, *statistics, **options)


def moves(count: int, crop: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random shifts ``(2, count)`` and flips for ``count`` images."""
    shifts = torch.randint(0, 2 * crop + 1, (2, count), generator=generator)
    return shifts, torch.rand(count, generator=generator) < 0.5


def moved(
    images: Tensor, shifts: Tensor, mirrored: Tensor | None, crop: int, border: str = "constant"
) -> Tensor:
    """Pad each image by ``crop`` pixels, crop it at its shift, and flip the marked ones.

    Args:
        images: Bytes, ``(count, channels, height, width)``.
        shifts: Row and column of each crop, ``(2, count)``.
        mirrored: Images to flip; ``None`` for none.
        crop: Width of the padding.
        border: Mode of ``torch.nn.functional.pad``; ``'constant'`` pads with zeros.
    """
    count, channels, height, width = images.shape
    device = images.device
    if crop:
        given = images if border == "constant" else images.float()  # reflection needs floats
        padded = torch.nn.functional.pad(given, (crop,) * 4, mode=border).to(images.dtype)
        shifts = shifts.to(device, non_blocking=True)
        rows = shifts[0][:, None] + torch.arange(height, device=device)  # (count, height)
        columns = shifts[1][:, None] + torch.arange(width, device=device)
        which = torch.arange(count, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[:, None, None]
        images = padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
    if mirrored is not None:
        chosen = mirrored.to(device, non_blocking=True)[:, None, None, None]
        images = torch.where(chosen, images.flip(3), images)
    return images


def digits(folder: Path | None = None) -> Data:
    """Read scikit-learn's 1,797 digits of 8×8 pixels; every fifth is a test image."""
    if folder is not None:
        raise ValueError(
            f"data 'digits' comes with scikit-learn and is not read from {folder}; leave out the "
            f"folder, or name the data set in that folder"
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("data 'digits' requires: pip install 'lipbound[digits]'") from None
    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[..., None]
    test = np.arange(len(images)) % 5 == 4
    labels = found.target
    return in_memory((images[~test], labels[~test]), (images[test], labels[test]))


def cifar10(folder: Path | None = None) -> Data:
    """Read CIFAR-10 from its Python files, its binary files, or the archive of either."""
    train = [f"data_batch_{i}" for i in range(1, 6)]
    return _cifar(folder, "cifar-10", "batches-py", "batches-bin", train, ["test_batch"])


def cifar100(folder: Path | None = None) -> Data:
    """Read CIFAR-100 with its fine labels, from the same kinds of files."""
    return _cifar(folder, "cifar-100", "python", "binary", ["train"], ["test"])


def _cifar(
    folder: Path | None, name: str, python: str, binary: str, train: list[str], test: list[str]
) -> Data:
    root = _folder(folder, f"{name}-python.tar.gz or the folder it unpacks to")
    skip = 1 if name == "cifar-10" else 2  # label bytes of a binary record; the last one is used
    kinds: list[tuple[str, str, str, Callable[[bytes], tuple[Bytes, NDArray[Any]]]]] = [
        (f"{name}-{python}", f"{name}-python.tar.gz", "", pickled),
        (f"{name}-{binary}", f"{name}-binary.tar.gz", ".bin", lambda raw: rows(raw, skip)),
    ]
    for inside, archive, ending, parse in kinds:
        names = [f"{n}{ending}" for n in (*train, *test)]
        found = files(root, inside, archive, names)
        if found is not None:
            parts = [parse(found[n]) for n in names]
            images = [p[0].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for p in parts]
            labels = [p[1] for p in parts]
            cut = len(train)
            return in_memory(
                (np.concatenate(images[:cut]), np.concatenate(labels[:cut])),
                (np.concatenate(images[cut:]), np.concatenate(labels[cut:])),
                crop=4, flip=True,
            )  # fmt: skip
    raise ValueError(
        f"no {name} in {str(root)!r}: it must hold {name}-{python}, {name}-{binary} or one of "
        f"the archives {name}-python.tar.gz, {name}-binary.tar.gz"
    )


def fashion_mnist(folder: Path | None = None) -> Data:
    """Read Fashion-MNIST or MNIST from idx files; Debian's package is the default folder."""
    debian = Path("/usr/share/datasets/fashion-mnist")
    root = _folder(folder or (debian if debian.is_dir() else None), "train-images-idx3-ubyte.gz")
    for inside in ("", "FashionMNIST/raw", "raw"):  # where torchvision puts them
        if list((root / inside).glob("train-images-idx3-ubyte*")):
            root = root / inside
    parts = [
        idx(root / f"{kind}-{what}")
        for kind in ("train", "t10k")
        for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    train, test = (parts[0][..., None], parts[1]), (parts[2][..., None], parts[3])
    return in_memory(train, test, crop=2, flip=True)


def _folder(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise ValueError(f"this data needs --folder, the folder that contains {what}")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    return folder


def folder(folder: Path | None = None, progress: Progress = silent) -> Data:
    """Read a folder such as ImageNet's: ``train`` and ``val`` (or ``test``) hold class folders.

    Images that all have one size of at most 64×64 pixels are held in memory at that size. Others
    are decoded when they are needed, and resized.
    """
    root = _folder(folder, "train/CLASS/ and val/CLASS/ or test/CLASS/ with images")
    place = next((root / n for n in ("val", "test") if (root / n).is_dir()), None)
    if place is None or not (root / "train").is_dir():
        raise ValueError(f"{str(root)!r} must contain the folders train and val (or test)")
    classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
    named = {p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")}
    if more := named - set(classes):
        raise ValueError(
            f"{str(place)!r} has the class {min(more)!r}, but {root / 'train'} has not"
        )
    train, test = (ImageFiles(path, classes, progress) for path in (root / "train", place))
    return _encoded(train, test, len(classes))


def shards(folder: Path | str | None = None, progress: Progress = silent) -> Data:
    """Read shards as WebDataset writes them: ``train-000000.tar``… and ``val-000000.tar``….

    Args:
        folder: A local folder or an address such as ``s3://bucket/imagenet``.
        progress: Shows how many shards are indexed.
    """
    if folder is None:
        raise ValueError(
            "data 'shards' needs --folder, the folder or address of train-000000.tar, ..."
        )
    train, test = (Shards(str(folder), kind, progress) for kind in ("train", "test"))
    classes = int(train.labels.max()) + 1
    if test.labels.max() >= classes:
        raise ValueError(
            f"the test shards in {str(folder)!r} have the label {test.labels.max()}, but the "
            f"labels of the training shards end at {classes - 1}"
        )
    return _encoded(train, test, classes)


def _encoded(train: Source, test: Source, classes: int) -> Data:
    """Return encoded images, held in memory if all are small and of one size."""
    splits = Streamed(train), Streamed(test)
    held = splits[1].small()
    trained = None if held is None else splits[0].small()
    if held is not None and trained is not None and held[0].shape[1:] == trained[0].shape[1:]:
        crop = min(held[0].shape[1:3]) // 8
        return in_memory(trained, held, crop=crop, flip=True)
    return Data(*splits, classes, IMAGENET_MEAN, IMAGENET_STD)
