"""What several test files need: a command line, small data, networks that are not the identity."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lipbound.cli import main as cli
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.data import in_memory
from lipbound.robust.models import ShiftNetwork
from lipbound.robust.training import checkpoints
from lipbound.robust.training.settings import ARMS, settings

TINY_SHIFT = partial(
    ShiftNetwork, size=8, width=16, depth=1, kernel=3, stride=1, cells=2, dense=1, dense_width=16
)
SMALL = {"batch": 16, "attack": 2, "check": 40, "check_attack": 2, "radius": 0.1}


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lipbound", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def fresh(code: str) -> subprocess.CompletedProcess:
    """In a process of its own, which has not imported PyTorch."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def torchrun(script: Path, count: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count),
            "--master-port", str(20000 + os.getpid() % 20000), str(script)]  # fmt: skip


def blobs(count: int = 160, channels: int = 1, seed: int = 0):
    """Images of four kinds that a small network tells apart."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, count)
    images = draw.integers(0, 90, (count, 8, 8, channels), np.uint8)
    for index, label in enumerate(labels):
        images[index, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 120
    cut = 3 * count // 4
    return in_memory((images[:cut], labels[:cut]), (images[cut:], labels[cut:]), crop=1)


def chosen(arm: str = "at+lipreg", **changes):
    small = {k: v for k, v in SMALL.items() if k not in ARMS[arm]}
    return settings(arm, **{"epochs": 3, **small, **changes})


def equal(one: Path, other: Path) -> bool:
    mine, yours = (checkpoints.load(p)[0] for p in (one, other))
    return mine.keys() == yours.keys() and all(torch.equal(mine[k], yours[k]) for k in mine)


def fitted(model: nn.Module) -> nn.Module:
    """Float64, with BatchNorms and slopes that are not the identity."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.uniform_(0.2, 2)
            nn.init.normal_(module.weight)
        if isinstance(module, nn.PReLU):
            nn.init.normal_(module.weight, 0, 2)
    return model.double().eval()


def cifar_arrays(count: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(count)
    return draw.integers(0, 256, (count, 3072), np.uint8), draw.integers(0, classes, count)


def write_cifar(root, kind: str, archive: bool) -> None:
    """Files as the originals are: five batches and a test batch, or one of each."""
    ten = kind == "cifar10"
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if ten else ["train", "test"]
    python, binary = (
        ("cifar-10-batches-py", "cifar-10-batches-bin") if ten
        else ("cifar-100-python", "cifar-100-binary")
    )  # fmt: skip
    files = {}
    for index, name in enumerate(names):
        pixels, labels = cifar_arrays(4 + index, 10 if ten else 100)
        key = b"labels" if ten else b"fine_labels"
        content = {b"data": pixels, key: labels.tolist(), b"filenames": [b"x.png"] * len(labels)}
        files[f"{python}/{name}"] = pickle.dumps(content, protocol=2)
        coarse = [] if ten else [np.zeros((len(labels), 1), np.uint8)]
        rows = np.concatenate([*coarse, labels[:, None].astype(np.uint8), pixels], 1)
        files[f"{binary}/{name}.bin"] = rows.tobytes()
    if not archive:
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        return
    for label, start in (("python", python), ("binary", binary)):
        stem = "cifar-10" if ten else "cifar-100"
        with tarfile.open(root / f"{stem}-{label}.tar.gz", "w:gz") as tar:
            for path, content in files.items():
                if path.startswith(start):
                    info = tarfile.TarInfo(path)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def trained_cells():
    """Cells of three tiers with three seeds, in another order than the tiers' own."""

    def cell(tier, label, right, data, seed):
        found = {
            "clean": accuracy(torch.arange(100) < right),
            **({} if label == "at+lipreg 0.1" else {"pgd": accuracy(torch.arange(100) < 9)}),
            "log10_lipschitz": {"upper": 3.0},
            "jacobian_norms": {"quantiles": [1.0] * 7, "all": [1.0], "mean": 1.0 + (label == "at")},
        }
        epochs = [{"held_out_accuracy": 0.7, "held_out_pgd_accuracy": None, "train_accuracy": 0.5}]
        return {
            "tier": tier, "label": label, "seed": seed, "best": found, "final": found,
            "device": "cpu", "epochs": epochs, "training_seconds": 1.0,
            "training": {"final": {"test_accuracy": (right + seed) / 100}, "steps": 1661},
            "settings": {"data": f"packed-{data}", "arm": label.split()[0],
                         "penalty_weight": float(label.split()[1]) if "+" in label else 0.008,
                         "schedule": "constant", "lr": 0.1 if tier == "A" else 0.5},
        }  # fmt: skip

    wanted = [
        ("B100", "at+lipreg 0.008", 45, "cifar100"), ("B100", "at", 50, "cifar100"),
        ("A", "at decay 2e-3", 70, "cifar10"), ("A", "at+lipreg 0.008", 60, "cifar10"),
        ("A", "at+lipreg 0.1", 60, "cifar10"), ("A", "at", 50, "cifar10"),
        ("C", "ours awp 0.005", 40, "cifar10"),
    ]  # fmt: skip
    return [cell(*each, seed) for each in wanted for seed in range(3)]
