"""A few of what ``python -m verify`` hunts for, and that it would find it."""

from __future__ import annotations

import importlib
import json
import random

import pytest
import torch

from lipbound.network.rules import RULES, elementwise
from lipbound.weights import read_weights
from verify import checkpoints, damaged, neighbours
from verify.__main__ import HUNTS, main

REDUCTIONS = {  # of SLOPES: these mix entries
    "logsumexp", "softmax", "_softmax", "sort", "topk", "median", "kthvalue", "tril", "triu",
    "log_sigmoid_forward",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softplus 1.0 20.0", "hardswish", "gelu", "elu 1.1", "celu 0.3"])
def test_no_elementwise_rule_is_broken_by_neighbours(name, dtype):
    found = neighbours.check(neighbours.CASES[name], dtype)
    assert found["violations"] == 0
    assert found["pairs"] > 100_000


def test_every_elementwise_slope_has_a_case():
    names = {name.split()[0] for name in neighbours.CASES}
    wanted = {name.rstrip("_") for name in elementwise.SLOPES} - REDUCTIONS
    assert wanted <= names


def test_neighbours_find_a_jump_that_is_not_counted(monkeypatch):
    monkeypatch.setitem(RULES, "aten.softplus", lambda step: 1.0)
    found = neighbours.check(neighbours.CASES["softplus 1.0 20.0"], torch.float64)
    assert found["violations"] > 0


def test_stepping_from_float_to_float():
    points = torch.tensor([-1.0, -0.0, 0.0, 1.0, 2.0])
    up = torch.nextafter(points, torch.full_like(points, 9.0))
    assert torch.equal(neighbours.stepped(points, 1), up)
    assert torch.equal(neighbours.stepped(neighbours.stepped(points, 5), -5), points)


@pytest.mark.parametrize("name", [k for k in damaged.KINDS if "run" not in k])
def test_damaged_files_are_read_or_refused(name):
    pytest.importorskip("safetensors", reason="writes the files")
    found = damaged.mutate(name, 12, seed=1)
    assert found["wrong"] == []
    assert sum(found["outcomes"].values()) == 12


def test_a_traceback_would_be_seen(monkeypatch, tmp_path):
    def broken(folder):
        raise KeyError("a\nb")

    kind = damaged.Kind(damaged.zipped, broken)
    assert damaged.outcome(kind, tmp_path)[0] == "traceback"
    content = bytes(range(256))
    draw = random.Random(0)
    assert sum(damaged.mutated(content, draw) != content for _ in range(50)) > 45


FEW = (
    "a.pt, state_dict, module.", "a.safetensors, bare, model.", "a.pth, before PyTorch 1.6, "
    "state_dict, net.", "code beside the weights", "code in place of one weight",
    "tied weights, saved once", "only an optimizer", "8-bit integers", "no --model, .pt",
    "the first half of a .pt", "a web page", "a tensor in two parts", "tied weights that differ",
    "a tensor beside 'model'", "two keys of the same name",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
     for name in (*FEW[:3], *checkpoints.special())],
)  # fmt: skip
def test_checkpoints_are_right_or_refused(name):
    found = checkpoints.audited(name)
    assert found["as_expected"], found


def test_a_wrong_checkpoint_would_be_seen(monkeypatch):
    def rounded(*given):
        return {name: tensor.float().half() for name, tensor in read_weights(*given).items()}

    monkeypatch.setattr("lipbound.cli.models.read_weights", rounded)
    assert checkpoints.audited(FEW[0])["outcome"] == "other numbers than in memory"
    monkeypatch.undo()
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **b: load(*a, **b | {"weights_only": False}))
    assert checkpoints.audited("code beside the weights")["outcome"] == "code was executed"


def test_hunts_are_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["verify", "nothing"])
    assert main() == 2
    said = capsys.readouterr().err
    assert all(name in said for name in HUNTS)


def test_wrong_options_are_refused_in_one_line(tmp_path, capsys):
    for words in (
        ["campaign", "--device", "gpu"], ["trained", str(tmp_path / "missing.safetensors")],
        ["damaged", "--count", "-1"], ["planted", "--out", "/proc/x/y"],
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", HUNTS)
def test_every_hunt_has_the_same_door(name, monkeypatch, tmp_path, capsys):
    """A record with provenance, violations printed, an exit code, and an interruption."""
    hunt = importlib.import_module(f"verify.{name}")
    monkeypatch.setattr(hunt, "check_options", lambda chosen: None, raising=False)
    words = [
        name,
        "--out",
        str(tmp_path / "record.json"),
        *(["w"] if name in ("flips", "trained") else []),
    ]
    monkeypatch.setattr(hunt, "hunt", lambda chosen: ({"seen": 1}, ["one", "two"]))
    assert main(words) == 1
    assert capsys.readouterr().out == "VIOLATION one\nVIOLATION two\n2 violations\n"
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["experiment"], record["seen"], record["seed"]) == (name, 1, 0)

    def interrupted(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr(hunt, "hunt", interrupted)
    assert main(words) == 130
