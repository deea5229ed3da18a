"""``attack`` and ``certify`` of networks that lipbound did not train."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import run

from lipbound.cli.models import factory

MINE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*layers)

def double():
    return build().double()

def flat():
    return nn.Linear(3, 10)
"""
COMMANDS = {
    "certify": ["--attacked", "10", "--json"],
    "attack": ["--iterations", "2", "--restarts", "1", "--jacobians", "0", "--json"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_network.py").write_text(MINE)
    weights = factory("./own_network.py:build").state_dict()
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, "own_network.pt")
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "own_network.pt --model own_network.py:build",
        "./own_network.py:build",
        "./own_network.py:double",
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_network_of_another_training(command, source, place, monkeypatch, capsys):
    given = [*source.split(), "--data", "digits", "--count", "20", *COMMANDS[command]]
    code, out, err = run(monkeypatch, capsys, command, *given)
    assert code == 0, err
    found = json.loads(out)
    assert (found["checkpoint"], found["arm"], found["data"]) == (
        source.split()[0].removeprefix("./"), "", "digits"
    )  # fmt: skip
    assert found["clean"]["images"] == 20
    double = command == "attack" and "double" in source
    assert ("converted the network to float32, in which attacks run" in err) == double


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("own_network.pt", "give its architecture with --model"),
        (
            "own_network.pt --model own_network.py:build",
            "--data is needed, because lipbound did not train",
        ),
        (
            "own_network.py:flat --data digits",
            "does not take the images of digits, whose shape is (1, 8, 8)",
        ),
        ("own_network.pt --model other.py:build --data digits", "there is no file 'other.py'"),
        (
            "own_network.py:double --data digits --arithmetic float32",
            "arithmetic 'float32' does not fit the network's weights, which are torch.float64; use",
        ),
        ("own_network.pt --model resnet99 --data digits", "there is no such model"),
        ("nothing --data digits", "there is no file 'nothing'"),
    ],
)
def test_what_does_not_fit(given, message, place, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "certify", *given.split(), "--attacked", "0")
    assert code == 2
    assert message in err.splitlines()[-1]
