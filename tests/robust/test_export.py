"""Export in the form of RobustBench: a definition that builds the same network, and a card."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from functools import partial

import pytest
import torch
from helpers import blobs, chosen, run

from lipbound.robust.data import DATA
from lipbound.robust.export import _fraction, export
from lipbound.robust.models import MODELS, SmallCNN
from lipbound.robust.training.loop import train
from lipbound.robust.training.trained import load_trained

BUILT = """
import sys
sys.path.insert(0, {folder!r})
{hide}
import torch
from Ours2026 import build
model = build()
model.load_state_dict(torch.load({weights!r}, weights_only=True))
torch.save(model.eval()(torch.load({images!r}, weights_only=True)), {out!r})
"""
HIDE = "sys.modules['lipbound'] = None"  # an import of it would fail


@pytest.mark.parametrize(
    ("model", "alone", "changes"),
    [
        ("wrn-10-1", True, {"dropout": 0.3, "bias": True}),
        ("preact-resnet18", True, {}),
        ("resnet20", True, {"normalize": False}),
        ("cnn", False, {}),
        ("cnn", False, {"precision": "float64"}),
    ],
)
def test_the_definition_builds_the_same_network(tmp_path, model, alone, changes):
    """The networks of the papers need no lipbound."""
    wanted = chosen("lipreg", model=model, epochs=1, check_attack=0, **changes)
    train(wanted, blobs(channels=3), tmp_path / "run", device="cpu")
    trained = load_trained(tmp_path / "run" / "final.safetensors")
    weights, source, card = export(trained, tmp_path / "out", "Ours2026")
    images = torch.rand(4, 3, 8, 8)
    torch.save(images, tmp_path / "images.pt")
    script = BUILT.format(
        folder=str(source.parent), hide=HIDE if alone else "", weights=str(weights),
        images=str(tmp_path / "images.pt"), out=str(tmp_path / "logits.pt"),
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = trained.model.float()(images)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), expected)
    assert card == tmp_path / "out" / "model_info" / "digits" / "Linf" / "Ours2026.json"
    assert "clean_acc" not in json.loads(card.read_text())


def local(**options):
    return SmallCNN(**options)


MAKERS = {
    "lambda": lambda **options: SmallCNN(**options),
    "partial of a lambda": partial(lambda **options: SmallCNN(**options)),
    "object": type("Maker", (), {"__call__": staticmethod(local)})(),
    "in the script": type("Net", (SmallCNN,), {"__module__": "__main__"}),
    "not a literal": partial(local, batchnorm=Fraction(0)),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_model_that_cannot_be_written_as_code_is_named(monkeypatch, capsys, tmp_path, maker):
    monkeypatch.setitem(MODELS, "mine", maker)
    monkeypatch.setattr(sys.modules["__main__"], "Net", maker, raising=False)
    wanted = chosen("lipreg", model="mine", epochs=1, check_attack=0)
    train(wanted, blobs(), tmp_path / "run", device="cpu")
    given = ("--out", str(tmp_path / "out"), "--name", "Ours2026")
    code, _, err = run(monkeypatch, capsys, "export", str(tmp_path / "run"), *given)
    assert (code, err.count("\n")) == (2, 1)
    assert "model 'mine' is made by" in err
    assert "set MODELS['mine'] to a named class or function" in err
    assert not (tmp_path / "out").exists()


def test_the_card_states_a_record_of_this_network(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(DATA, "blobs", lambda folder=None: blobs())
    wanted = chosen("at", data="blobs", epochs=1)
    train(wanted, blobs(), tmp_path / "run", device="cpu")
    record = {
        "checkpoint": "final.safetensors", "model": "cnn", "arm": "at",
        "plan": {"ball": "l2", "radius": 0.5}, "clean": {"accuracy": 0.9, "images": 40},
        "autoattack": {"accuracy": 0.625},
    }  # fmt: skip
    other = {**record, "checkpoint": "best.safetensors"}
    place = tmp_path / "record.jsonl"
    place.write_text("\n".join(map(json.dumps, (record, other))) + "\n")
    given = ("--out", str(tmp_path / "out"), "--name", "Ours2026", "--record", str(place))
    code, out, _ = run(monkeypatch, capsys, "export", str(tmp_path / "run"), *given)
    assert (code, out.count("wrote")) == (0, 3)
    card = json.loads((tmp_path / "out/model_info/blobs/L2/Ours2026.json").read_text())
    assert (card["clean_acc"], card["autoattack_acc"], card["eps"]) == ("90.00", "62.50", "0.5")
    assert "40 test images" in card["footnote"]
    place.write_text(json.dumps({**record, "arm": "trades"}) + "\n")
    code, _, err = run(monkeypatch, capsys, "export", str(tmp_path / "run"), *given)
    assert (code, err) == (2, "lipbound: the record is of the arm 'trades', not of 'at'\n")
    place.write_text(json.dumps(other) + "\n")
    code, _, err = run(monkeypatch, capsys, "export", str(tmp_path / "run"), *given)
    assert code == 2
    assert "has no record of final.safetensors under AutoAttack" in err
    code, _, err = run(monkeypatch, capsys, "export", str(tmp_path / "run"), *given[:3], "a-b")
    assert (code, err.count("\n")) == (2, 1)
    assert "name 'a-b' must consist of" in err


def test_radii_are_written_as_in_robustbench():
    for radius, text in ((8 / 255, "8/255"), (0.5, "0.5"), (128 / 255, "128/255"), (0.1, "0.1")):
        assert _fraction(radius) == text
