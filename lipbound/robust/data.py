"""Labelled images by name: small sets as bytes in memory (on the device), large ones streamed.

Files are parsed, never executed: the pickles CIFAR comes in may only name numpy arrays.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
LARGEST = 1 << 30  # bytes of one file, uncompressed: more is refused before it is read


class Split(Protocol):
    """Images of one kind; indices choose among them."""

    def __len__(self) -> int: ...

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images as uint8 ``(batch, channels, height, width)``, and labels; no augmentation."""

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pair for each tensor of indices; a streamed split augments by itself, by the seed."""


@dataclass(frozen=True)
class Memory:
    """Images held as bytes.

    Attributes:
        images: uint8, ``(count, channels, height, width)``.
        labels: int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        indices = indices.to(self.labels.device)
        return self.images[indices], self.labels[indices]

    def stream(
        self, batches: Sequence[Tensor], seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.load(indices) for indices in batches)

    def to(self, device: torch.device) -> Memory:
        return Memory(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        train: Its training images.
        test: Its test images.
        classes: How many there are.
        mean: Of the training pixels in [0, 1], per channel.
        std: Their deviation.
        crop: Pixels of padding for random crops; 0 for none.
        flip: Whether mirror images mean the same.
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


def in_memory(
    train: tuple[Bytes, NDArray[Any]], test: tuple[Bytes, NDArray[Any]], **options: Any
) -> Data:
    """From arrays ``(count, height, width, channels)`` and labels."""
    splits: list[Memory] = []
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels; the files disagree")
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
    """How to move each of ``count`` images: shifts ``(2, count)``, and which to mirror."""
    shifts = torch.randint(0, 2 * crop + 1, (2, count), generator=generator)
    return shifts, torch.rand(count, generator=generator) < 0.5


def moved(images: Tensor, shifts: Tensor, mirrored: Tensor | None, crop: int) -> Tensor:
    """Cut a window out of each image, padded by ``crop`` zeros; mirror the marked ones."""
    count, channels, height, width = images.shape
    device = images.device
    if crop:
        padded = torch.nn.functional.pad(images, (crop,) * 4)
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
    """Scikit-learn's 1,797 digits of 8×8 pixels; every fifth is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with: pip install 'lipbound[digits]'") from None
    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[..., None]
    test = np.arange(len(images)) % 5 == 4
    labels = found.target
    return in_memory((images[~test], labels[~test]), (images[test], labels[test]))


def cifar10(folder: Path | None = None) -> Data:
    """CIFAR-10 from the files torchvision unpacks, the binary ones, or either archive."""
    train = [f"data_batch_{i}" for i in range(1, 6)]
    return _cifar(folder, "cifar-10", "batches-py", "batches-bin", train, ["test_batch"])


def cifar100(folder: Path | None = None) -> Data:
    """CIFAR-100 with its fine labels, from the same kinds of files."""
    return _cifar(folder, "cifar-100", "python", "binary", ["train"], ["test"])


def _cifar(
    folder: Path | None, name: str, python: str, binary: str, train: list[str], test: list[str]
) -> Data:
    root = _folder(folder, f"{name}-python.tar.gz or the folder it unpacks to")
    skip = 1 if name == "cifar-10" else 2  # label bytes of a binary record; the last is the label
    kinds: list[tuple[str, str, str, Callable[[bytes], tuple[Bytes, NDArray[Any]]]]] = [
        (f"{name}-{python}", f"{name}-python.tar.gz", "", _pickled),
        (f"{name}-{binary}", f"{name}-binary.tar.gz", ".bin", lambda raw: _records(raw, skip)),
    ]
    for inside, archive, ending, parse in kinds:
        names = [f"{n}{ending}" for n in (*train, *test)]
        found = _files(root, inside, archive, names)
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
        f"no {name} in {str(root)!r}: it should hold {name}-{python}, {name}-{binary} or one of "
        f"the archives {name}-python.tar.gz, {name}-binary.tar.gz"
    )


def _files(root: Path, inside: str, archive: str, names: list[str]) -> dict[str, bytes] | None:
    """The named files from a folder or an archive, by whole names only; nothing is unpacked."""
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
        raise ValueError(f"{str(path)!r} is no complete archive: {error}") from None
    missing = [n for n in names if n not in found]
    if missing:
        raise ValueError(f"{str(path)!r} lacks {', '.join(missing)}")
    return found


def _stream(file: Any) -> tarfile.TarFile:
    limited: Any = _Limited(file)
    return tarfile.open(mode="r|", fileobj=limited)


class _Limited:
    """A file that refuses to give more than ``LARGEST`` bytes, at once or in all."""

    def __init__(self, file: Any):
        self.file, self.left = file, LARGEST

    def read(self, size: int = -1) -> bytes:
        self.left -= size
        if size < 0 or self.left < 0:
            raise ValueError(f"the archive unpacks to more than {LARGEST >> 20} MiB")
        return self.file.read(size)


class _Bytes:
    """Stands for numpy's dtype: of bytes, whatever state the file would give it."""

    def __init__(self, name: str, *flags: Any):
        if str(name).lstrip("|") != "u1":
            raise ValueError(f"it holds an array of {name!r}, not of bytes")

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for numpy's ndarray while a file is read."""

    array: Bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Bytes) or not isinstance(raw, bytes) or fortran:
            raise ValueError("it holds no plain array of bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape([int(n) for n in shape])


class _ArraysOnly(pickle.Unpickler):
    """Builds dictionaries, lists and arrays of bytes from stand-ins; all else is refused."""

    KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Bytes,
        # How Python 3 writes the bytes of an array.
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise ValueError(f"it names {module}.{name}, which no image file needs")
        return self.KNOWN[module, name]


def _pickled(raw: bytes) -> tuple[Bytes, NDArray[Any]]:
    try:
        content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        images = content[b"data"].array
        labels = np.asarray(content[b"labels" if b"labels" in content else b"fine_labels"])
        return images.reshape(-1, 3072), labels
    except Exception as error:
        raise ValueError(f"a CIFAR file is damaged or foreign, nothing was run: {error}") from None


def _records(raw: bytes, labels: int) -> tuple[Bytes, NDArray[Any]]:
    size = labels + 3072
    if len(raw) % size or not raw:
        raise ValueError(f"a CIFAR file has {len(raw)} bytes, no multiple of {size}; it is cut")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return rows[:, labels:], rows[:, labels - 1].copy()


def fashion_mnist(folder: Path | None = None) -> Data:
    """Fashion-MNIST (or MNIST) from idx files, compressed or not; Debian's package by default."""
    debian = Path("/usr/share/datasets/fashion-mnist")
    root = _folder(folder or (debian if debian.is_dir() else None), "train-images-idx3-ubyte.gz")
    for inside in ("", "FashionMNIST/raw", "raw"):  # where torchvision puts them
        if list((root / inside).glob("train-images-idx3-ubyte*")):
            root = root / inside
    parts = [
        _idx(root / f"{kind}-{what}")
        for kind in ("train", "t10k")
        for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    train, test = (parts[0][..., None], parts[1]), (parts[2][..., None], parts[3])
    return in_memory(train, test, crop=2, flip=True)


def _idx(path: Path) -> Bytes:
    packed = path.with_name(path.name + ".gz")
    if not path.is_file() and not packed.is_file():
        raise ValueError(f"there is no {str(path)!r} (nor .gz)")
    raw = _whole(path if path.is_file() else packed)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{str(path)!r} is no idx file of bytes")
    axes = raw[3]
    if len(raw) < 4 + 4 * axes:
        raise ValueError(f"{str(path)!r} is cut in its header")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    body = raw[4 + 4 * axes :]
    if len(body) != math.prod(shape):
        raise ValueError(f"{str(path)!r} is cut: {len(body)} bytes of {math.prod(shape)}")
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


def _folder(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise ValueError(f"this data needs --folder, where {what} lies")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    return folder


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
PIXELS = 1 << 26  # of one picture: more is refused before it is decoded


class Streamed:
    """Images in one folder per class, decoded by worker processes as they are needed.

    Training images are cut at random (8 to 100 % of the area, sides 3:4 to 4:3) and mirrored,
    test images resized and cut in the middle. What is cut depends on the seed and the image.
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
            raise ValueError(f"no images in {str(root)!r}; it should hold one folder per class")
        # Mixed, so that the first so many are of all classes.
        order = np.random.default_rng(0).permutation(len(self.paths))
        self.paths = [self.paths[i] for i in order]
        self.labels = [self.labels[i] for i in order]
        self._seed: int | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        # By name, not by content: Pillow would hand PostScript to an interpreter.
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
            generator=torch.Generator().manual_seed(0),  # else it would draw from the global one
        )
        return iter(loader)


def decoded(image: Any, path: Path) -> Any:
    """The picture in RGB, if its header does not announce more pixels than a photograph has.

    Raises:
        ValueError: If it does; nothing is decoded.
    """
    width, height = image.size
    if width * height > PIXELS:
        raise ValueError(f"{str(path)!r} holds a picture of {width}×{height}; {PIXELS:,} is a lot")
    return image.convert("RGB")


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """The central square, 7/8 of the shorter side, as 224 of 256 is."""
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


def folder(folder: Path | None = None) -> Data:
    """ImageNet, Imagenette: ``train`` and ``val`` (or ``test``) with one folder per class."""
    root = _folder(folder, "train/CLASS/*.jpg and val/CLASS/*.jpg")
    test = next((root / n for n in ("val", "test") if (root / n).is_dir()), None)
    if test is None or not (root / "train").is_dir():
        raise ValueError(f"{str(root)!r} has no train and val folders")
    classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
    train = Streamed(root / "train", classes)
    return Data(train, Streamed(test, classes), len(classes), IMAGENET_MEAN, IMAGENET_STD)


DATA: dict[str, Callable[[Path | None], Data]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion-mnist": fashion_mnist,
    "folder": folder,
}
"""Name → what reads it from a folder."""
