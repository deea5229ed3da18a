"""Nothing from a file is executed, unpacked, believed in its size, or let speak to the terminal."""

from __future__ import annotations

import argparse
import ast
import io
import json
import pickle
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import blobs, chosen, run, write_cifar

import lipbound
from lipbound.files import printable
from lipbound.network.audits import audit_weights
from lipbound.report.page import page
from lipbound.report.terminal import audit_table, speed_table
from lipbound.robust.data import packed, streamed
from lipbound.robust.data import sets as datasets
from lipbound.robust.training import checkpoints
from lipbound.robust.training.loop import train
from lipbound.robust.training.run_folder import RunFolder
from lipbound.robust.training.trained import load_trained
from lipbound.weights import Foreign, read_weights

SOURCES = sorted(Path(lipbound.__file__).parent.rglob("*.py"))
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load",
    "pickle.loads", "yaml.load", "shelve.open", "marshal.loads", "tempfile.mktemp",
}  # fmt: skip
REQUIRED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "Image.open": ("formats", "FORMATS"),  # or Pillow would call an interpreter for PostScript
}


def calls(path: Path) -> list[tuple[str, dict[str, object]]]:
    """Every call as (dotted name, keywords) with constants and names as their values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            words = {k.arg: getattr(k.value, "value", getattr(k.value, "id", None))
                     for k in node.keywords}  # fmt: skip
            found.append((ast.unparse(node.func), words))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_call_that_executes_or_unpacks(path):
    for name, words in calls(path):
        assert name not in FORBIDDEN, name
        assert not name.endswith((".extract", ".extractall")), name
        assert words.get("shell") is not True
        if name in REQUIRED and path.name != "figures.py":  # which opens its own picture
            keyword, value = REQUIRED[name]
            assert words.get(keyword) == value, name


def test_no_part_of_the_package_reaches_for_the_network():
    modules = {"socket", "http", "urllib", "requests", "ftplib", "ssl", "httpx", "aiohttp"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & modules, path


EVIL = "conv\x1b]0;pwned\x07\x1b[2J\x9b31m\x08next\u202e[red]<script>"


def test_names_do_not_speak_to_the_terminal(monkeypatch, capsys, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({EVIL: torch.ones(1, 1, 3, 3)}, path)
    code, out, err = run(monkeypatch, capsys, "audit", str(path))
    assert code == 0
    torch.save({EVIL: torch.full((1, 1, 3, 3), torch.nan)}, path)
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n")) == (2, 1)
    from lipbound.report.terminal import Screen

    screen = io.StringIO()
    found = audit_weights({EVIL: torch.ones(1, 1, 3, 3)})
    audit_table(found, EVIL, Screen(file=screen, force_terminal=True, width=300, no_color=True))
    with speed_table(["sgd"]) as show:
        show({"network": EVIL, "milliseconds": {}})
    for text in (out, err, capsys.readouterr().out, screen.getvalue()):
        assert printable(EVIL) in text.replace("\n", "")
        own = re.sub(r"\x1b\[[0-9;]*m", "", text)  # rich's own bold
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", own)


def test_printable_keeps_what_can_be_seen():
    assert printable("σ1(ω) ×2 layer.0 ü 🙂") == "σ1(ω) ×2 layer.0 ü 🙂"
    assert printable("a\tb\x00\ud800") == r"a\tb\x00\ud800"


def test_the_page_runs_its_own_script_and_fetches_nothing():
    pytest.importorskip("matplotlib", reason="its pictures")
    text = page(audit_weights({EVIL: torch.randn(2, 2, 3, 3)}), EVIL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'", "img-src": "data:", "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    outside = text.replace(script, "")
    assert not re.search(r"\son\w+=|https?:|url\(|@import|<(?:iframe|object|embed|link)", outside)
    assert not re.search(r"fetch|XMLHttp|WebSocket|import\(|innerHTML|eval|document\.write", script)


def bomb(path: Path, size: int) -> None:
    """A file of PyTorch's whose storage is compressed zeros."""
    torch.save({"a": torch.zeros(4, 3, 3, 3)}, path)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members.items():
            target.writestr(name, bytes(size) if name.endswith("data/0") else content)


def test_a_damaged_archive_is_refused_by_one_line(monkeypatch, capsys, tmp_path):
    """``zipfile`` takes it for an archive, and then finds that it is none."""
    path = tmp_path / "w.pt"
    torch.save({"a": torch.zeros(4, 3, 3, 3)}, path)
    content = path.read_bytes()
    place = content.rfind(b"PK\x01\x02")  # an entry of the directory at the end
    path.write_bytes(content[:place] + b"PKxx" + content[place + 4 :])
    assert zipfile.is_zipfile(path)
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n")) == (2, 1)
    assert "is damaged, or no file of weights (BadZipFile" in err


def test_weights_that_grow(monkeypatch, capsys, tmp_path):
    path = tmp_path / "bomb.pt"
    bomb(path, 10_000_000)
    assert path.stat().st_size < 100_000
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n"), "unpacks to 10,0" in err) == (2, 1, True)
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6, 3)}, path)
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n"), "claim 12,000,000,000,000" in err) == (2, 1, True)
    good = {"a": torch.randn(4, 3, 3, 3), "tied": torch.ones(1, 1, 1).expand(4, 4, 3)}
    torch.save(good, path)
    assert read_weights(path).keys() == good.keys()


def test_objects_beside_the_weights_are_placeholders(tmp_path, capsys):
    path, said = tmp_path / "w.pt", []
    good = {"0.weight": torch.randn(2, 2, 3, 3), "1.weight": torch.randn(2, 2, 3, 3)}
    for beside in (Evil(), [Evil()], {"a": Evil()}, argparse.Namespace(inner=Evil())):
        torch.save({"model": good, "other": beside}, path)
        found = read_weights(path, said.append)
        assert found.keys() == good.keys()
        assert all(torch.equal(found[name], good[name]) for name in good)
        assert "none of their code was run" in said.pop()
    for content in (Evil(), good | {"1.weight": Evil()}, {"model": good | {"1.weight": Evil()}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"objects other than weights .*builtins\.print"):
            read_weights(path)
    standing = torch.serialization.get_safe_globals()
    assert not any(Foreign in one for one in standing if isinstance(one, tuple))
    assert "executed" not in capsys.readouterr().out


def test_archives_are_read_by_whole_names_and_never_unpacked(tmp_path):
    write_cifar(tmp_path, "cifar10", archive=True)
    path, absolute = next(tmp_path.glob("*.tar.gz")), tmp_path.parent / "evil-lipbound"
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar if m.isfile()]
    with tarfile.open(path, "w:gz") as tar:
        for name in ("../../evil", str(absolute), "cifar-10-batches-py/../../evil"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    before = sorted(p.name for p in tmp_path.parent.rglob("*"))
    assert len(datasets.cifar10(tmp_path).train) > 0
    assert sorted(p.name for p in tmp_path.parent.rglob("*")) == before
    assert not absolute.exists()


def test_pictures_that_grow(tmp_path, monkeypatch):
    from PIL import Image

    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("1", (4000, 4000)).save(tmp_path / split / "cat" / "0.png")
    assert (tmp_path / "train" / "cat" / "0.png").stat().st_size < 5000
    found = datasets.folder(tmp_path)
    monkeypatch.setattr(streamed, "PIXELS", 4000 * 4000 - 1)
    with pytest.raises(ValueError, match=r"0\.png' has 4000×4000 pixels"):
        found.train.load(torch.arange(1))


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_packed_files_that_grow_execute_or_break(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.npz"
    meta = json.dumps({"side": 8, "cols": 2, "n": 4, "step": 1, "sha256_pixels": ""})
    good = {"meta": np.array(meta), "labels": np.zeros(4)}
    np.savez_compressed(path, **good, chunk_0=np.zeros(3_000_000, np.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(packed, "LARGEST", 1 << 20)
        with pytest.raises(ValueError, match=r"x\.npz' is not a packed data set: it unpacks"):
            packed.read(path)
    objects = np.empty(1, object)
    objects[0] = Evil()
    for content in (
        {"meta": objects, "labels": np.zeros(1)},
        {"labels": np.zeros(1)},
        {**good, "meta": np.array("{")},
        {**good, "meta": np.array("{}")},
        {**good, "chunk_0": np.zeros(9, np.uint8)},
        {**good, "chunk_0": np.frombuffer(b"%!PS-Adobe-3.0 EPSF-3.0\n", np.uint8)},
    ):
        np.savez(path, **content, allow_pickle=True)
        with pytest.raises(ValueError, match=r"x\.npz' is not a packed data set"):
            packed.read(path)
    for content in (b"", b"PK\x03\x04broken", pickle.dumps(Evil())):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz' is not a packed data set"):
            packed.read(path)
    assert "executed" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    train(chosen("baseline", epochs=1), blobs(), out, device="cpu")
    return checkpoints.load(out / "best.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"model": "os.system"}}, {"settings": {"model": ["cnn"]}},
        {"settings": {"unknown": 1}}, {"settings": {"epochs": "1"}}, {"settings": None},
        {"classes": 10**12}, {"classes": "4"}, {"classes": None}, {"input_shape": []},
        {"input_shape": "../../x"}, {"mean": ["x"]}, {"mean": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_checkpoint_says_of_itself_is_checked(tmp_path, network, change):
    """Its checksum is right: somebody made it so."""
    weights, about = network
    settings = about["settings"]
    if isinstance(change.get("settings"), dict):
        change = {"settings": {**settings, **change["settings"]}}
    path = tmp_path / "best.safetensors"
    checkpoints.save(path, weights, {**about, **change})
    if change == {"classes": "4"}:
        assert load_trained(path).model is not None  # a number all the same
        return
    with pytest.raises(ValueError, match=r"best\.safetensors' is not a network written by"):
        load_trained(path)


def test_a_folder_name_does_not_leave_the_folder(tmp_path):
    """Files of a run have names of their own; nothing in a record names another."""
    with RunFolder(tmp_path / "run") as folder:
        folder.record({"step": 1, "path": "../../evil"})
        folder.weights("best", {"../../evil": torch.ones(1)}, {"path": "/evil"})
        folder.save(1, {"../../evil": torch.ones(1)}, {"checkpoint": "../../evil"})
    names = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {".lock", "records.jsonl", "best.safetensors", "step-00000001.safetensors"}


def test_every_promise_on_the_page_has_its_test():
    from tools.pages import trust_chapters as chapters

    assert all(callable(globals().get(name)) for name in chapters.PROMISES.values())
    for chapter in chapters.CHAPTERS:
        assert chapter().startswith("## ")
