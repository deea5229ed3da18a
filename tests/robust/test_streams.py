"""Data that is read while training: shards and image folders, their indexes, and their workers."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers import chosen, equal, run, torchrun

from benchmarks.imagenet import write_shards
from lipbound.files import read
from lipbound.report import progress
from lipbound.robust.data import data_set, image_folder, index, shards
from lipbound.robust.training import checkpoints
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.loop import train
from lipbound.robust.training.run import Run

COUNTS = {"train": 36, "val": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of our own, and an empty memory file system."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    return tmp_path / "cache" / "lipbound"


def pictures(folder: Path) -> Path:
    """Images of two classes in folders, too large to be held in memory."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for i in range(count // 2):
                pixels = draw.integers(0, 128, (70, 90, 3), np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(folder / split / name / f"{i:03}.png")
    return folder


def as_shards(folder: Path, place: str, per_shard: int = 10) -> str:
    """Write an image folder as shards, in the order of its names."""
    for split in COUNTS:
        write_shards(place, split, (
            {"cls": str(label).encode(), "png": path.read_bytes(), "json": b"{}"}
            for label, name in enumerate(("cat", "dog"))
            for path in sorted((folder / split / name).iterdir())
        ), per_shard)  # fmt: skip
    return place


@pytest.mark.parametrize(
    "where",
    ["local", "memory://shards", "simplecache::memory://shards", "filecache::memory://shards"],
)
def test_shards_are_the_folder(tmp_path, where):
    folder = pictures(tmp_path / "folder")
    place = as_shards(folder, where.split("::")[-1] if ":" in where else str(tmp_path / "shards"))
    place = where if ":" in where else place
    one, other = data_set("folder", folder), data_set("shards", place)
    assert (one.classes, one.mean, one.std) == (other.classes, other.mean, other.std)
    batches = torch.arange(36).split(16)
    for workers, seed in ((0, 5), (0, None), (2, 5)):
        mine, yours = one.changed(40, 0), other.changed(40, workers)
        for (a, x), (b, y) in zip(
            mine.train.stream(batches, seed), yours.train.stream(batches, seed), strict=True
        ):
            assert torch.equal(a, b)
            assert torch.equal(x, y)
        assert all(map(torch.equal, mine.test_images(), yours.test_images()))
    assert mine.input_shape == (3, 40, 40)


def test_streams_that_come_between(tmp_path):
    """A check in the middle of an epoch takes the workers, and the epoch continues after it."""
    data = data_set("folder", pictures(tmp_path / "folder")).changed(24, 2)
    batches = torch.arange(36).split(12)
    whole = list(data.train.stream(batches, 3))
    processes = [w.pid for w in data.train._loader._iterator._workers]
    stream = data.train.stream(batches, 3)
    found = [next(stream)]
    data.train.load(torch.arange(33))
    found += stream
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, found, strict=True))
    assert [w.pid for w in data.train._loader._iterator._workers] == processes, "the same workers"


def test_worker_processes_end_with_their_images(tmp_path):
    """At once: later ones would inherit them by fork, and could not end them."""
    before = set(multiprocessing.active_children())
    data = data_set("folder", pictures(tmp_path)).changed(24, 2)
    for _ in data.train.stream([torch.arange(36)], 0):
        workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    del data
    assert not workers & set(multiprocessing.active_children())


def tar(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> None:
    with tarfile.open(path, "w") as file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                file.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                file.addfile(info, io.BytesIO(member[1]))


@pytest.fixture
def png() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (80, 80)).save(file, "PNG")
    return file.getvalue()


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def test_members_that_are_not_read(tmp_path, png, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link = tarfile.TarInfo("../b.pkl")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    before = {p for p in tmp_path.rglob("*") if p.suffix != ".tar"}
    for split in ("train", "val"):
        tar(tmp_path / f"{split}-0.tar", ("README", b"x"), (".jpg", b"x"), ("c.pkl", b"x"),
            ("../../a.png", png), ("../../a.pkl", pickle.dumps(Evil())), ("../../a.pyd", b"x"),
            ("../../a.cls", b"1\n"), ("../../a.seg.png", b"x"), link, ("d/a.CLS", b"x"),
            ("/etc/a.cls", b"0"), ("/etc/a.png", png))  # fmt: skip
    data = data_set("shards", tmp_path)
    assert sorted(data.train.load(torch.arange(2))[1].tolist()) == [0, 1]
    made = {p.name for p in tmp_path.rglob("*") if p.suffix != ".tar"} - {p.name for p in before}
    assert made <= {"lipbound-index-train.npz", "lipbound-index-test.npz", "cache", "lipbound"} | {
        p.name for p in (tmp_path / "cache").rglob("*")
    }


def test_pictures_with_two_dots_in_the_name_are_counted_once(tmp_path, png):
    """Those beside a picture and a label are masks and the like, which no one misses."""
    whole = [("a.png", png), ("a.cls", b"0"), ("a.mask.png", png), ("b.v1.json", b"{}")]
    odd = [("img_0.5.png", png), ("img_0.5.cls", b"1"), ("d.1/img_1.5.PNG", png)]
    for shard in ("train-0", "train-1", "val-0"):
        tar(tmp_path / f"{shard}.tar", *whole, *(odd if shard != "val-0" else ()))
    said = r"^left out 4 picture\(s\) of .*, such as 'img_0\.5\.png', .* as in 'img_0_5\.png'$"
    with pytest.warns(UserWarning, match=said) as warned:
        data = data_set("shards", tmp_path)
    assert len(warned) == 1
    assert (len(data.train), len(data.test)) == (2, 1)


def header(size: int, kind: bytes = b"0") -> bytes:
    """A tar header whose size is not what follows."""
    info = tarfile.TarInfo("a.png")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def shard(*members: tuple[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def linked(kind: bytes) -> bytes:
    """A sample whose picture is a link to another picture."""
    info = tarfile.TarInfo("b.png")
    info.type, info.linkname = kind, "a.png"
    return shard(("a.png", b""), ("a.cls", b"1"))[:1536] + info.tobuf() + bytes(1024)


GOOD = shard(*[(f"{i}.{ending}", b"1") for i in range(3) for ending in ("png", "cls")])
THIRD = "it is not a complete tar file: byte 2,048 begins neither a member nor the end"

BROKEN = {
    "two labels": ([("a.cls", b"1"), ("a.png", b""), ("a.cls", b"2")], "sample 'a' has two labels"),
    "hard link": (linked(tarfile.LNKTYPE), "'b.png' is a link; write the file with tar --deref"),
    "link": (linked(tarfile.SYMTYPE), "'b.png' is a link; write the file with tar --deref"),
    "damaged header": (GOOD[:2050] + b"x" + GOOD[2051:], THIRD),
    "wiped header": (GOOD[:2048] + bytes(512) + GOOD[2560:], THIRD),
    "wiped rest": (GOOD[:2048] + bytes(2 << 20), THIRD),
    "cut in a header": (GOOD[:2148], THIRD),
    "cut before a header": (GOOD[:2048], THIRD),
    "joined by cat": (GOOD + GOOD, "it is not a complete tar file: byte 6,144 begins neither"),
    "no label": ([("a.png", b"")], "sample 'a' has no label (.cls) next to it"),
    "no picture": ([("a.cls", b"1")], "sample 'a' has no picture (.bmp, .jpeg, "),
    "apart": ([("a.cls", b"1"), ("b.png", b"")], "sample 'a' has no picture"),
    "two pictures": ([("a.png", b""), ("a.jpg", b"")], "sample 'a' has two pictures"),
    "a word": ([("a.png", b""), ("a.cls", b"cat")], "'a.cls' is not a label between 0 and"),
    "negative": ([("a.png", b""), ("a.cls", b"-1")], "'a.cls' is not a label"),
    "large label": ([("a.png", b""), ("a.cls", b"1000000")], "'a.cls' is not a label"),
    "long label": ([("a.png", b""), ("a.cls", b"0" * 21)], "'a.cls' is not a label"),
    "no tar": (b"x" * 2000, "it is not a complete tar file"),
    "empty": (b"", "it is not a complete tar file"),
    "huge member": (header(1 << 27) + bytes(1 << 27), "'a.png' has more than 64 MiB"),
    "lying size": (header(1 << 20) + bytes(1024), "it is not a complete tar file"),
    "huge header": (header(1 << 33, b"x") + bytes(1024), "it has a header of 8,589,934,592 bytes"),
    "negative size": (header(-1024) + bytes(1024), "it has a member of negative size"),
    "negative header": (header(-1024, b"x") + bytes(1024), "it has a header of -1,024 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_shards(tmp_path, monkeypatch, capsys, name):
    content, said = BROKEN[name]
    path = tmp_path / "train-000000.tar"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        tar(path, *content)
    shutil.copy(path, tmp_path / "train-000001.tar")  # in a worker process
    shutil.copy(path, tmp_path / "val-000000.tar")
    code, _, err = run(monkeypatch, capsys, "train", "--data", "shards", "--folder", str(tmp_path),
                       "--out", str(tmp_path / "run"))  # fmt: skip
    assert (code, err.count("\n")) == (2, 1), err
    assert f"train-000000.tar: {said}" in err


def test_shards_that_are_not_there(tmp_path, png):
    with pytest.raises(ValueError, match=r"no train shards in '.*': .* such as train-000000\.tar"):
        data_set("shards", tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        data_set("shards", tmp_path / "none")
    with pytest.raises(ValueError, match="cannot open 'nothing://x': Protocol not known"):
        data_set("shards", "nothing://x")
    tar(tmp_path / "train-0.tar", ("README", b""), ("a.v1.png", png), ("a.v1.cls", b"0"))
    with pytest.raises(ValueError, match=r"no sample in .*train-0\.tar .* up to its first dot"):
        data_set("shards", tmp_path)
    (tmp_path / "train-1.tar").symlink_to(tmp_path / "none")
    with pytest.raises(ValueError, match=r"train-1\.tar is not a file; is it a broken link"):
        data_set("shards", tmp_path)
    (tmp_path / "train-0.tar").unlink()
    (tmp_path / "train-1.tar").unlink()
    with pytest.raises(ValueError, match="needs --folder"):
        data_set("shards")
    with pytest.raises(ValueError, match="data 'folder' is read from a local folder, not from"):
        data_set("folder", "s3://bucket")
    tar(tmp_path / "set-train-0.tar", ("a.png", png), ("a.cls", b"3"))
    tar(tmp_path / "set-validation-0.tar", ("a.png", png), ("a.cls", b"4"))
    with pytest.raises(ValueError, match="have the label 4, but the labels of the training shards"):
        data_set("shards", tmp_path)
    tar(tmp_path / "set-validation-0.tar", ("a.png", b"GIF89a"), ("a.cls", b"3"))
    with pytest.raises(ValueError, match=r"set-validation-0\.tar, byte 512' is not a readable"):
        data_set("shards", tmp_path)


def test_shards_that_are_links(tmp_path, png):
    store, folder = tmp_path / "store", tmp_path / "data"
    store.mkdir()
    folder.mkdir()
    for name, label in (("train-0", b"0"), ("train-1", b"1"), ("val-0", b"1")):
        tar(store / name, ("a.png", png), ("a.cls", label))
        (folder / f"{name}.tar").symlink_to(store / name)
    (folder / "lipbound-index-train.npz").symlink_to("/dev/zero")  # is not read to its end
    data = data_set("shards", folder)
    assert sorted(data.train.load(torch.arange(2))[1].tolist()) == [0, 1]
    tar(store / "train-0", ("a.cls", b"2"), ("a.png", png))  # of the same size
    os.utime(store / "train-0", (1, 1))
    assert sorted(data_set("shards", folder).train.load(torch.arange(2))[1].tolist()) == [1, 2]


def test_a_class_of_the_test_images_alone(tmp_path):
    folder = pictures(tmp_path / "images")
    (folder / "val" / ".hidden").mkdir()
    data_set("folder", folder)
    (folder / "val" / "Cat").mkdir()
    with pytest.raises(ValueError, match=r"val' has the class 'Cat', but .*train has not"):
        data_set("folder", folder)


def counted(monkeypatch, module, name: str) -> list[object]:
    calls: list[object] = []
    whole = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a: calls.append(a) or whole(*a))
    return calls


def test_the_index_of_shards(tmp_path, monkeypatch, cache):
    place = as_shards(pictures(tmp_path / "folder"), str(tmp_path / "shards"))
    made = counted(monkeypatch, shards, "_scanned")
    first = data_set("shards", place).train
    assert len(made) == 2
    again = data_set("shards", place).train
    assert len(made) == 2
    assert np.array_equal(first.decoder.source.starts, again.decoder.source.starts)
    path = Path(place) / "lipbound-index-train.npz"
    whole = path.read_bytes()
    with np.load(path) as stored:
        good = dict(stored)
    for change in (
        {"starts": good["starts"] + (1 << 40)}, {"starts": -good["starts"]},
        {"sizes": good["sizes"] * 10_000}, {"shards": good["shards"] + 9},
        {"labels": good["labels"][1:]}, {"labels": good["labels"].astype(float)},
        {"labels": np.array([Evil()])}, {"marks": good["marks"][::-1]},
    ):  # fmt: skip
        np.savez(path, **{**good, **change}, allow_pickle=True)
        count = len(made)
        assert np.array_equal(data_set("shards", place).train.decoder.source.starts, good["starts"])
        assert len(made) == count + 1
    for content in (b"", whole[:1000], pickle.dumps(Evil())):
        path.write_bytes(content)
        data_set("shards", place)
        assert path.read_bytes()[:2] == b"PK"
    count = len(made)
    shard = Path(place) / "train-000000.tar"
    shard.write_bytes((Path(place) / "train-000001.tar").read_bytes())
    changed = data_set("shards", place).train
    assert len(made) == count + 1
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ValueError, match="is cut off; its shard has changed"):
        changed.load(torch.arange(36))


@pytest.mark.parametrize("command", ["train", "certify"])
@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_the_first_index_shows_its_progress(tmp_path, monkeypatch, capsys, command, kind):
    """The command ends after it, because the network takes images of another shape."""
    place = pictures(tmp_path / "folder")
    place = as_shards(place, str(tmp_path / "shards")) if kind == "shards" else str(place)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    model = {"train": ["--out", str(tmp_path / "run"), "--model", "shift-digits"],
             "certify": ["helpers:TINY_SHIFT"]}[command]  # fmt: skip
    said = {"folder": ["classes of train indexed: 2 of 2", "classes of val indexed: 2 of 2"],
            "shards": ["shards indexed: 4 of 4", "shards indexed: 1 of 1"]}[kind]  # fmt: skip
    for shown in (said, []):
        _, _, err = run(monkeypatch, capsys, command, *model, "--data", kind, "--folder", place)
        lines = [line for line in err.splitlines() if "indexed" in line]
        assert [end for end in said if any(end in line for line in lines)] == shown, err


def test_an_index_where_the_folder_is_read_only(tmp_path, monkeypatch, cache):
    folder = pictures(tmp_path / "folder")
    made = counted(monkeypatch, image_folder, "walked")
    whole = index.files.write

    def refuse(path, content):
        if path.is_relative_to(folder) or refused:
            raise OSError("cannot write it")
        whole(path, content)

    refused = False
    monkeypatch.setattr(index.files, "write", refuse)
    data_set("folder", folder)
    data_set("folder", folder)
    assert len(made) == 2
    assert len(list(cache.glob("*.npz"))) == 2
    shutil.rmtree(cache)
    refused = True
    with pytest.warns(UserWarning, match="made again at the next start, because lipbound cannot"):
        data_set("folder", folder)
    assert len(made) == 4


def test_the_index_of_a_folder(tmp_path, monkeypatch):
    folder = pictures(tmp_path / "folder")
    (folder / "train" / "cat" / "deep").mkdir()
    shutil.copy(folder / "train" / "cat" / "000.png", folder / "train" / "cat" / "deep" / "a.png")
    (folder / "train" / "cat" / "deep.x.PNG").write_bytes(b"")
    (folder / "train" / "cat" / ".png").write_bytes(b"")
    made = counted(monkeypatch, image_folder, "walked")
    files = data_set("folder", folder).train.decoder.source
    names = [Path(files.name(i)) for i in range(len(files.labels))]
    classes = [folder / "train" / name for name in ("cat", "dog")]
    ordered = [sorted(p for p in c.rglob("*") if p.suffix.lower() == ".png") for c in classes]
    assert names == ordered[0] + ordered[1], "the order of versions without index"
    assert files.labels.tolist() == [0] * 20 + [1] * 18
    data_set("folder", folder)
    assert len(made) == 2
    path = folder / "lipbound-index-train.npz"
    with np.load(path) as stored:
        good = dict(stored)
    evil = np.frombuffer(b"cat/../../../x.png\0", np.uint8)
    for change in (
        {"names": evil, "labels": np.zeros(1, np.int32)}, {"labels": good["labels"] + 1},
        {"labels": good["labels"][1:]}, {"names": good["names"][:-1]},
    ):  # fmt: skip
        np.savez(path, **{**good, **change})
        count = len(made)
        assert len(data_set("folder", folder).train) == 38
        assert len(made) == count + 1
    (folder / "train" / "cat" / "deep" / "a.png").unlink()
    assert len(data_set("folder", folder).train) == 37
    (folder / "train" / "emu").mkdir()
    assert data_set("folder", folder).classes == 3


SMALL = {"model": "cnn-plain", "data": "shards", "size": 16, "batch": 8, "check": 6, "workers": 2,
         "held_out": 0.2, "epochs": 2}  # fmt: skip


def test_a_run_on_shards_stopped_in_an_epoch(tmp_path):
    place = as_shards(pictures(tmp_path / "folder"), str(tmp_path / "shards"))
    wanted = chosen("at", **SMALL)
    whole = train(wanted, data_set("shards", place), tmp_path / "whole", device="cpu")
    assert whole["waited"] > 0
    assert 0 < whole["held_out_accuracy"] <= 1
    train(wanted, data_set("shards", place), tmp_path / "part", device="cpu", time_limit=0)
    part = Run(wanted, data_set("shards", place), Team(torch.device("cpu")))
    for _ in range(part.feed.per_epoch + 1):  # into the second epoch
        part.advance()
    folder = checkpoints.Folder(tmp_path / "part" / "checkpoints")
    folder.save(part.step, *part.state())
    fewer = chosen("at", **{**SMALL, "workers": 0})
    again = train(fewer, data_set("shards", place), tmp_path / "part", device="cpu", resume=True)
    assert equal(*(tmp_path / d / "final.safetensors" for d in ("whole", "part")))
    assert again["final"] == whole["final"]
    other = chosen("at", **{**SMALL, "size": 20})
    with pytest.raises(ValueError, match="its size is 16, not 20"):
        train(other, data_set("shards", place), tmp_path / "part", device="cpu", resume=True)


def test_commands_use_the_size_of_the_run(tmp_path, monkeypatch, capsys):
    place = as_shards(pictures(tmp_path / "folder"), "memory://shards")
    sets = [f"--set={k}={v}" for k, v in SMALL.items() if k not in ("model", "data", "epochs")]
    options = ["--data", "shards", "--folder", place, "--device", "cpu"]
    code, _, err = run(monkeypatch, capsys, "train", "--arm", "baseline", "--model", "cnn-plain",
                       "--epochs", "1", "--out", str(tmp_path / "run"), *options,
                       *sets)  # fmt: skip
    assert code == 0, err
    path = tmp_path / "run" / "final.safetensors"
    assert checkpoints.load(path)[1]["input_shape"] == [3, 16, 16]
    code, _, err = run(monkeypatch, capsys, "attack", str(path), "--folder", place, "--device",
                       "cpu", "--attack", "pgd", "--iterations", "2", "--out",
                       str(tmp_path / "attack.jsonl"))  # fmt: skip
    assert code == 0, err
    assert read(tmp_path / "attack.jsonl")[0]["data"] == "shards"


FEED = """
import os, sys
from pathlib import Path
import torch
from helpers import chosen
from lipbound.robust.data import data_set, shards
from lipbound.robust.training.batches import Feed
from lipbound.robust.training.distributed import team
place, out = Path({place!r}), Path({out!r})
scanned = shards._scanned
def counted(*given):
    (out / f"scanned-{{os.getpid()}}-{{os.urandom(4).hex()}}").touch()
    return scanned(*given)
shards._scanned = counted
with team("cpu") as who:
    wanted = chosen("at", data="shards", batch=8, workers=1, size=16)
    feed = Feed(wanted, data_set("shards", place).changed(16, 1), who)
    torch.save([feed.batch(step) for step in range(2 * feed.per_epoch)], out / f"{{who.rank}}.pt")
"""


@pytest.mark.slow
def test_two_processes_share_an_index_and_an_order(tmp_path, monkeypatch):
    place = as_shards(pictures(tmp_path / "folder"), str(tmp_path / "shards"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = {}
    for count in (1, 2):
        for path in Path(place).glob("*.npz"):
            path.unlink()
        out = tmp_path / str(count)
        out.mkdir()
        script = out / "feed.py"
        script.write_text(FEED.format(place=place, out=str(out)))
        run = torchrun(script, count) if count > 1 else [sys.executable, str(script)]
        subprocess.run(run, check=True, timeout=240)
        assert len(list(out.glob("scanned-*"))) == 2, "once for training, once for test"
        parts = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(count)]
        found[count] = [
            [torch.cat(tensors) for tensors in zip(*step, strict=True)]
            for step in zip(*parts, strict=True)
        ]
    for one, two in zip(found[1], found[2], strict=True):
        assert all(map(torch.equal, one, two))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_stops_the_run_once(tmp_path, kind):
    """As Ctrl-C in a terminal sends it, to the run and its workers."""
    place = as_shards(pictures(tmp_path / "folder"), str(tmp_path / "shards"))
    options = {**SMALL, "epochs": 10_000, "attack": 0}
    sets = [f"--set={k}={v}" for k, v in options.items() if k not in ("model", "data", "epochs")]
    process = subprocess.Popen(
        [sys.executable, "-m", "lipbound", "train", "--arm", "baseline", "--model", "cnn-plain",
         "--data", "shards", "--folder", place, "--device", "cpu", "--epochs", "10000", *sets,
         "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "run" / "records.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, kind)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if kind == signal.SIGINT else 0), err
    assert err.count("Stopping after this step") == 1, err
    assert "Traceback" not in err


def test_a_pipe_among_the_images_is_named(tmp_path, png):
    """Reading it would block for ever."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "0.png").write_bytes(png)
    os.mkfifo(tmp_path / "val" / "a" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png' is not a file"):
        data_set("folder", tmp_path)
