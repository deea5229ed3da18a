"""Models, balls, attacks, settings and data: what a training run is made of."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch
from helpers import cifar_arrays, write_cifar
from torch import nn

from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.pgd import pgd
from lipbound.robust.data import DATA, parsers
from lipbound.robust.data import sets as datasets
from lipbound.robust.models import MODELS, WideResNet, normalized
from lipbound.robust.training.settings import (
    PAPER_ARMS,
    PRESETS,
    Settings,
    as_dict,
    from_dict,
    parse,
    settings,
)

COUNTS = {
    "wrn-28-10": 36_479_194,
    "resnet101": 44_549_160,
    "preact-resnet18": 11_172_170,
    "resnet50": 25_557_032,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", MODELS)
def test_models_take_channels_and_classes(name):
    with torch.device("meta"):
        model = MODELS[name](classes=7, inputs=1)
        size = 8 if name.endswith("digits") else 32
        assert model(torch.zeros(2, 1, size, size)).shape == (2, 7)


def test_normalization_is_inside():
    network = WideResNet(10, 1, dropout=0.1, bias=True).eval()
    model = normalized(network, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    x = torch.rand(2, 3, 8, 8)
    scaled = (x - torch.tensor([0.1, 0.2, 0.3]).reshape(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).reshape(3, 1, 1)
    torch.testing.assert_close(model(x), network(scaled))


@pytest.mark.parametrize("ball", BALLS)
def test_balls(ball):
    torch.manual_seed(0)
    images = torch.zeros(500, 2, 3, 3)
    kind, order = BALLS[ball], {"linf": np.inf, "l2": 2}[ball]

    def size(x):
        return torch.linalg.vector_norm(x.flatten(1), ord=order, dim=1)

    delta = kind.sample(images, 0.3, torch.Generator().manual_seed(1))
    assert 0.2 < size(delta).max() <= 0.3 * (1 + 1e-6)
    assert delta.mean().abs() < 0.01
    far = torch.randn_like(images)
    near = kind.project(far, 0.3)
    assert (size(near) <= 0.3 * (1 + 1e-6)).all()
    torch.testing.assert_close(kind.project(near, 0.3), near)  # what is inside stays
    up = kind.ascend(far)
    torch.testing.assert_close(size(up), torch.ones(500))
    others = kind.sample(images, 1.0, None)
    assert ((up * far).sum((1, 2, 3)) >= (others * far).sum((1, 2, 3)) - 1e-5).all(), "steepest"


@pytest.mark.parametrize("ball", BALLS)
def test_pgd_is_optimal_on_a_linear_model(ball):
    torch.manual_seed(0)
    weight = torch.randn(12)
    images = 0.3 + 0.4 * torch.rand(6, 3, 2, 2)
    labels = torch.tensor([0, 1] * 3)
    logits = lambda x: torch.stack([x.flatten(1) @ weight, torch.zeros(len(x))], 1)  # noqa: E731
    found = pgd(logits, images, labels, radius=0.1, step=0.05, iterations=10, ball=ball)
    gap = (logits(found) - logits(images))[:, 0] * (2.0 * labels - 1)
    best = weight.abs().sum() if ball == "linf" else weight.norm()
    torch.testing.assert_close(gap, (0.1 * best).expand(6))


def test_pgd_keeps_to_the_pixels_and_spares_the_parameters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images = torch.tensor([0.0, 0.01, 0.99, 1.0]).reshape(1, 1, 2, 2)
    start = torch.full_like(images, 0.1)
    found = pgd(model, images, torch.tensor([0]), radius=0.1, step=0.1, iterations=3, start=start)
    assert found.min() >= 0
    assert found.max() <= 1
    assert model[1].weight.grad is None
    assert not found.requires_grad


def test_presets_hold_the_papers_settings():
    cifar = settings("at+lipreg", "paper-cifar")
    assert (cifar.model, cifar.epochs, cifar.batch, cifar.lr, cifar.momentum) == (
        "wrn-28-10", 200, 200, 0.1, 0.9,
    )  # fmt: skip
    assert (cifar.milestones, cifar.gamma, cifar.attack, cifar.radius) == (
        (60, 120, 160), 0.1, 10, 8 / 255,
    )  # fmt: skip
    assert (cifar.step, cifar.random_start, cifar.penalty_weight, cifar.samples) == (
        0.2, True, 0.008, 10,
    )  # fmt: skip
    imagenet = settings("at", "paper-imagenet")
    assert (imagenet.model, imagenet.epochs, imagenet.batch, imagenet.label_smoothing) == (
        "resnet101", 80, 4096, 0.1,
    )  # fmt: skip
    assert (imagenet.ema, imagenet.attack, imagenet.milestones) == (0.999, 5, (30, 60))
    code = settings("at+lipreg", "authors-code")
    assert (code.nesterov, code.weight_decay, code.dropout, code.bias, code.radius) == (
        True, 3e-4, 0.3, True, 0.031,
    )  # fmt: skip
    assert (code.normalize, code.attack_mode) == (False, "train")
    for preset in (name for name in PRESETS if not name.startswith("certified-")):
        for arm in PAPER_ARMS:
            chosen = settings(arm, preset)
            assert from_dict(as_dict(chosen)) == chosen
            assert bool(chosen.attack) == ("at" in arm)
            assert bool(chosen.penalty) == (arm not in ("baseline", "at"))


def test_learning_rates_depend_on_the_step_alone():
    steps = Settings(schedule="steps", epochs=200, milestones=(60, 120, 160), lr=0.1)
    rates = [steps.learning_rate(s, 2000) for s in (0, 599, 600, 1199, 1200, 1600, 1999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-4, 1e-4])
    cycle = Settings(schedule="onecycle", lr=0.4)
    rates = [cycle.learning_rate(s, 100) for s in range(100)]
    assert max(rates) == pytest.approx(0.4, rel=0.03)
    assert rates.index(max(rates)) in (38, 39, 40)
    assert 0 < rates[-1] < 0.02
    assert all(r > 0 for r in rates)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: settings("at+lipregg"), "did you mean 'at\\+lipreg'"),
        (lambda: settings("at", "paper"), "unknown preset 'paper'"),
        (lambda: settings("at", penalty="spectral"), "arm 'at' requires penalty='';"),
        (lambda: settings("at", epoch=3), "did you mean 'epochs'"),
        (lambda: settings("at", epochs=0), "epochs=0 must be at least 1"),
        (lambda: settings("at", lr=-1.0), "lr=-1.0 must be positive"),
        (lambda: settings("at", attack=0), "arm 'at' requires attack > 0; use 'baseline' or"),
        (lambda: settings("at+lipreg", penalty=""), r"arm 'at\+lipreg' requires a penalty"),
        (lambda: settings("at", attack=-3), "attack=-3 must be a finite number, at least 0"),
        (lambda: settings("at+lipreg", penalty_weight=float("nan")), "penalty_weight=nan"),
        (lambda: settings("at", ball="l7"), "ball='l7' is not one of"),
        (lambda: settings("at", schedule="sometimes"), "schedule='sometimes'"),
        (lambda: parse("epochs"), "NAME=VALUE"),
        (lambda: parse("epochs=x"), "'x' is not of type int"),
        (lambda: parse("compile=perhaps"), "'perhaps' is not of type bool"),
        (lambda: from_dict({"flavour": 1}), "another version"),
    ],
)
def test_wrong_settings_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_files_of_every_kind_say_the_same(tmp_path, kind, archive):
    write_cifar(tmp_path, kind, archive)
    whole = DATA[kind](tmp_path)
    for path in list(tmp_path.iterdir()):
        if "py" in path.name:
            path.rename(path.with_name("gone" + path.name))
    binary = DATA[kind](tmp_path)
    count = 4 + 5 + 6 + 7 + 8 if kind == "cifar10" else 4
    assert len(whole.train) == len(binary.train) == count
    pixels, labels = cifar_arrays(4, 10 if kind == "cifar10" else 100)
    for found in (whole, binary):
        assert torch.equal(found.train.labels[:4], torch.from_numpy(labels))
        assert torch.equal(found.train.images[:4].flatten(1), torch.from_numpy(pixels))
        assert found.input_shape == (3, 32, 32)
        every = found.train.images.double() / 255
        torch.testing.assert_close(torch.tensor(found.mean).double(), every.mean((0, 2, 3)))
        deviation = every.var((0, 2, 3), correction=0).sqrt()
        torch.testing.assert_close(torch.tensor(found.std).double(), deviation)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_foreign_and_cut_image_files(tmp_path, capsys, monkeypatch):
    write_cifar(tmp_path, "cifar10", archive=False)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    good = batch.read_bytes()
    forged = pickle.dumps({b"data": np.array([1.5]), b"labels": [0]}, protocol=2)
    objects = pickle.dumps({b"data": np.array([None]), b"labels": [0]}, protocol=2)
    for bad in (pickle.dumps({b"data": Evil()}), forged, objects, good[:100], b""):
        batch.write_bytes(bad)
        with pytest.raises(ValueError, match="nothing was run"):
            datasets.cifar10(tmp_path)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="no cifar-100 in"):
        datasets.cifar100(tmp_path)
    with pytest.raises(ValueError, match="needs --folder"):
        datasets.cifar10(None)
    with pytest.raises(ValueError, match="there is no folder"):
        datasets.cifar10(tmp_path / "nowhere")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "cifar-10-python.tar.gz").write_bytes(gzip.compress(b"x" * 600)[:-9])
    with pytest.raises(ValueError, match="is not a complete archive"):
        datasets.cifar10(tmp_path / "cut")
    (tmp_path / "bomb").mkdir()
    with tarfile.open(tmp_path / "bomb" / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
        tar.pax_headers = {}
        info = tarfile.TarInfo("y")
        info.pax_headers = {"comment": "z" * 3_000_000}
        tar.addfile(info)
    monkeypatch.setattr(parsers, "LARGEST", 1 << 20)
    with pytest.raises(ValueError, match="unpacks to more than"):
        datasets.cifar10(tmp_path / "bomb")


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.tobytes()


def test_idx_files(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for name, count in (("train", 6), ("t10k", 3)):
        images = idx(draw.integers(0, 256, (count, 4, 5), np.uint8))
        labels = idx(np.arange(count, dtype=np.uint8))
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    found = datasets.fashion_mnist(tmp_path)
    assert found.input_shape == (1, 4, 5)
    assert found.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    with monkeypatch.context() as patch:
        patch.setattr(parsers, "LARGEST", 50)
        with pytest.raises(ValueError, match="unpacks to more than"):
            datasets.fashion_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images[:9])
    with pytest.raises(ValueError, match="truncated in its header"):
        datasets.fashion_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images[:-1])
    with pytest.raises(ValueError, match="is truncated"):
        datasets.fashion_mnist(tmp_path)


def test_streamed_folders(tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (40, 80, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    found = datasets.folder(tmp_path)
    images, labels = found.train.load(torch.arange(6))
    assert images.shape == (6, 3, 224, 224)
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1]
    assert labels.tolist() != sorted(labels.tolist()), "the first ones are of all classes"
    batches = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    first, again, other = (list(found.train.stream(batches, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    plain = list(found.train.stream(batches, None))
    assert torch.equal(plain[0][0], images[:2]), "no seed, no augmentation"
    state = torch.get_rng_state()
    next(found.train.stream(batches, 1))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    with pytest.raises(ValueError, match=r"0\.png' is not a readable image: cannot identify"):
        found.train.load(torch.arange(6))
    with pytest.raises(ValueError, match="must contain the folders train and val"):
        datasets.folder(tmp_path / "train")


def test_small_images_keep_their_size(tmp_path):
    from PIL import Image

    draw = np.random.default_rng(0)
    pixels = {}
    for split, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels[split, name, i] = draw.integers(0, 256, (32, 32, 3), np.uint8)
                image = Image.fromarray(pixels[split, name, i])
                image.save(tmp_path / split / name / f"{i}.png")
    found = datasets.folder(tmp_path)
    assert (found.classes, found.crop, found.flip, found.input_shape) == (2, 4, True, (3, 32, 32))
    images, labels = found.test_images()
    for image, label in zip(images, labels, strict=True):
        stored = pixels["test", ["cat", "dog"][label], 0]
        assert np.array_equal(image.permute(1, 2, 0), stored)
    assert found.train.images.shape == (6, 3, 32, 32)
    Image.new("L", (65, 32)).save(tmp_path / "train" / "cat" / "large.png")
    assert datasets.folder(tmp_path).input_shape == (3, 224, 224), "resized, as they differ"
    (tmp_path / "test" / "cat" / "0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    with pytest.raises(ValueError, match=r"0\.png' is not a readable image: cannot identify"):
        datasets.folder(tmp_path)


def test_moves_are_windows_of_the_padded_image():
    images = torch.randint(0, 256, (50, 2, 6, 5), dtype=torch.uint8)
    shifts, mirrored = datasets.moves(50, 2, torch.Generator().manual_seed(0))
    found = datasets.moved(images, shifts, mirrored, 2)
    padded = nn.functional.pad(images, (2,) * 4)
    for i in range(50):
        top, left = shifts[:, i].tolist()
        window = padded[i, :, top : top + 6, left : left + 5]
        assert torch.equal(found[i], window.flip(2) if mirrored[i] else window)
    assert shifts.min() == 0
    assert shifts.max() == 4
    assert 10 < mirrored.sum() < 40
