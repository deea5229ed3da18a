"""Read damaged files of every kind with the command line.

    python -m verify damaged --count 500 --out benchmarks/records/damaged.json

A valid file of each kind is made once and then mutated: bytes are changed, truncated, doubled,
removed or overwritten with zeros, mostly in the header. A reader may succeed (if only a number
changed) or refuse the file with one line; any other outcome is a violation. Times are per file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verify.command import run

SLOW = 10.0  # seconds


@dataclass(frozen=True)
class Kind:
    """A kind of file: how to make a valid one in a folder, and how to read it."""

    make: Callable[[Path], str]
    read: Callable[[Path], list[str] | None]


def command(*words: str) -> Callable[[Path], list[str]]:
    """Return a function that makes a command line, with the folder in place of ``{}``."""
    return lambda folder: [word.format(folder) for word in words]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"conv.weight": torch.randn(4, 3, 3, 3), "fc.weight": torch.randn(5, 4),
            "norm.running_var": torch.ones(4), "half": torch.randn(2, 2, 3).bfloat16()}  # fmt: skip


def zipped(folder: Path) -> str:
    torch.save({"state_dict": weights()}, folder / "w.pt")
    return "w.pt"


def legacy(folder: Path) -> str:
    torch.save(weights(), folder / "w.pth", _use_new_zipfile_serialization=False)
    return "w.pth"


def safetensors(folder: Path) -> str:
    from safetensors.torch import save_file

    save_file(weights(), folder / "w.safetensors")
    return "w.safetensors"


def training_run(name: str) -> Callable[[Path], str]:
    """Return a function that makes a finished run, and names the file of it to damage."""

    def make(folder: Path) -> str:
        from lipbound.robust.data import DATA
        from lipbound.robust.training.loop import train
        from lipbound.robust.training.settings import settings

        made = folder.parent / ".run"
        if not made.exists():  # made only once
            chosen = settings("baseline", "digits", epochs=1, held_out=0.5)
            train(chosen, DATA["digits"](None), made, device="cpu")
        shutil.copytree(made, folder / "run", dirs_exist_ok=True)
        found = sorted((folder / "run").rglob(name))[0]
        return str(found.relative_to(folder))

    return make


def idx(folder: Path) -> str:
    draw = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 10)):
        shape = (count, 28, 28)
        images = draw.integers(0, 256, shape, dtype=np.uint8)
        header = b"\0\0\x08\x03" + struct.pack(">3I", *shape)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + struct.pack(">I", count) + labels.tobytes()
        )
    return "train-images-idx3-ubyte"


def cifar(folder: Path) -> str:
    inside = folder / "cifar-10-batches-py"
    inside.mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = draw.integers(0, 256, (4, 3072), dtype=np.uint8)
        content = {b"data": images, b"labels": draw.integers(0, 10, 4).tolist()}
        (inside / name).write_bytes(pickle.dumps(content, protocol=2))
    return "cifar-10-batches-py/data_batch_2"


def packed(folder: Path) -> str:
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in ("train", "val"):
        data, ends = [], [0]
        for _ in range(3):
            file = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "WEBP")
            data.append(np.frombuffer(file.getvalue(), np.uint8))
            ends.append(ends[-1] + len(data[-1]))
        meta = np.array(json.dumps({"headers": 0}))
        np.savez(folder / f"imagenette64_{name}.imgs.npz", meta=meta, labels=np.arange(3),
                 data=np.concatenate(data), offset=np.array(ends))  # fmt: skip
    return "imagenette64_train.imgs.npz"


def pictures(folder: Path) -> str:
    from PIL import Image

    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            place = folder / split / label
            place.mkdir(parents=True)
            for i in range(2):
                image = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
                image.save(place / f"{i}.png")
    return "train/a/0.png"


def shards(folder: Path) -> str:
    from benchmarks.imagenet import write_shards

    pictures(folder / "pictures")
    for split in ("train", "val"):
        found = sorted((folder / "pictures" / split).rglob("*.png"))
        samples = [
            {"png": p.read_bytes(), "cls": str(i // 2).encode()} for i, p in enumerate(found)
        ]
        write_shards(str(folder), split, samples)
    return "train-000000.tar"


def loads(name: str) -> Callable[[Path], None]:
    """Return a reader of a data set and of two of its images."""

    def read(folder: Path) -> None:
        from lipbound.robust.data import data_set

        data_set(name, folder).train.load(torch.arange(2))

    return read


AUDIT = ("--minutes", "0.05")
RESUME = command(
    "train", "--arm", "baseline", "--epochs", "1", "--set", "held_out=0.5", "--device", "cpu",
    "--resume", "--out", "{}/run",
)  # fmt: skip
KINDS: dict[str, Kind] = {
    ".pt": Kind(zipped, command("audit", "{}/w.pt", *AUDIT)),
    ".pth of before PyTorch 1.6": Kind(legacy, command("audit", "{}/w.pth", *AUDIT)),
    ".safetensors": Kind(safetensors, command("audit", "{}/w.safetensors", *AUDIT)),
    "best.safetensors of a run": Kind(
        training_run("best.safetensors"), command("audit", "{}/run/best.safetensors", *AUDIT)
    ),
    "settings.json of a run": Kind(training_run("settings.json"), RESUME),
    "checkpoint of a run": Kind(training_run("step-*.safetensors"), RESUME),
    "records.jsonl of a run": Kind(training_run("records.jsonl"), RESUME),
    "idx": Kind(idx, loads("fashion-mnist")),
    "CIFAR's pickles": Kind(cifar, loads("cifar10")),
    "packed images": Kind(packed, loads("packed-imagenette64")),
    "pictures": Kind(pictures, loads("folder")),
    "shards": Kind(shards, loads("shards")),
}  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Apply one to three mutations, half of them in the first or last 200 bytes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        size = len(data)
        edge = draw.random()
        place = draw.randrange(max(1, min(size, 200) if edge < 0.35 else size))
        place = max(0, size - 1 - place) if 0.35 <= edge < 0.5 and size > 200 else place
        length = draw.choice((1, 1, 2, 4, 8, 64))
        kind = draw.choice(("bit", "byte", "bytes", "cut", "remove", "double", "zero", "ones"))
        part = slice(place, min(size, place + length))
        if kind == "bit" and size:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == "byte" and size:
            data[place] = draw.randrange(256)
        elif kind == "bytes":
            data[part] = draw.randbytes(part.stop - part.start)
        elif kind == "cut":
            del data[place:]
        elif kind == "remove":
            del data[part]
        elif kind == "double":
            data[place:place] = data[part]
        else:
            data[part] = (b"\0" if kind == "zero" else b"\xff") * (part.stop - part.start)
    return bytes(data)


def outcome(kind: Kind, folder: Path) -> tuple[str, str]:
    """Return ``read``, ``refused`` or ``traceback``, and the message."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            words = kind.read(folder)
        if words is None:
            return "read", ""
        code, _, said = run(words)
    except (ValueError, OSError) as error:
        return ("refused" if "\n" not in str(error) else "two lines"), str(error)
    except Exception as error:
        return "traceback", repr(error)
    if code == 0:
        return "read", ""
    lines = [line for line in said.splitlines() if line.startswith("lipbound: ")]
    return ("refused" if code == 2 and len(lines) == 1 else f"exit code {code}"), said


def mutate(name: str, count: int, seed: int) -> dict[str, Any]:
    """Mutate a file of one kind ``count`` times, and return the outcomes."""
    draw = random.Random(f"{name} {seed}")
    kind, outcomes, wrong, longest = KINDS[name], Counter[str](), [], 0.0
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        whole = root / "whole"
        whole.mkdir()
        file = kind.make(whole)
        content = (whole / file).read_bytes()
        shutil.copytree(whole, root / "copy")
        first = outcome(kind, root / "copy")
        assert first[0] == "read", f"{name}: the valid file is not read: {first}"
        for number in range(count):
            folder = root / "mutated"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            (folder / file).write_bytes(mutated(content, draw))
            start = time.perf_counter()
            found, said = outcome(kind, folder)
            spent = time.perf_counter() - start
            longest = max(longest, spent)
            outcomes[found] += 1
            if found not in ("read", "refused") or spent > SLOW:
                wrong.append({"number": number, "outcome": found, "said": said[:300]})
    return {"count": count, "outcomes": outcomes, "longest": round(longest, 2), "wrong": wrong}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=500, help="number of files of each kind")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; repeatable")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    os.environ["COLUMNS"] = "100"
    found = {}
    for name in chosen.kind or KINDS:
        found[name] = mutate(name, chosen.count, chosen.seed)
        print(name, {k: v for k, v in found[name].items() if k != "wrong"}, flush=True)
    wrong = [f"{name}: {case}" for name, one in found.items() for case in one["wrong"]]
    return {"kinds": found}, wrong
