"""What each kind of checkpoint gives: the right bound, or one line that names the fix."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import run
from safetensors.torch import save_file
from torch import nn

import lipbound
from lipbound.cli.arguments import input_shape_of
from lipbound.network.audits import audit
from lipbound.robust.models import MODELS
from lipbound.weights import read_weights
from verify.checkpoints import FACTORIES, factories


def build() -> nn.Module:
    torch.manual_seed(0)
    return factories().build().eval()


def prefixed(*prefixes: str) -> dict[str, torch.Tensor]:
    state = build().state_dict()
    return {prefix + name: tensor.clone() for prefix in prefixes for name, tensor in state.items()}


def weights(folder=None):
    return build().state_dict()


def parts(folder):
    """Two safetensors files and their index."""
    names = list(weights())
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        state = weights()
        save_file({n: state[n] for n in names if places[n] == place}, folder / place)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def saved(content):
    def write(folder, name):
        (save_file if name.endswith(".safetensors") else torch.save)(content, folder / name)
        return folder / name

    return write


def averaged():
    return torch.optim.swa_utils.AveragedModel(build()).state_dict()


# name → what is saved, the file's name, the line that it says
RIGHT = {
    "safetensors": (weights(), "a.safetensors", ""),
    "pt": (weights(), "a.pt", ""),
    "pth": (weights(), "a.pth", ""),
    "th": (weights(), "a.th", ""),
    "bin": (weights(), "pytorch_model.bin", ""),
    "PyTorch's ImageNet example": (
        {"epoch": 3, "state_dict": prefixed("module."), "optimizer": {"state": {}}},
        "checkpoint.pth.tar", "removed 'module.' from the names",
    ),
    "Lightning": (
        {"state_dict": prefixed("model.") | {"loss.weight": torch.ones(3)}, "epoch": 1},
        "last.ckpt", "removed 'model.' from the names of the weights, and left out 1 other",
    ),
    "DataParallel": (prefixed("module."), "a.pt", "removed 'module.' from the names"),
    "compiled": (prefixed("_orig_mod."), "a.safetensors", "removed '_orig_mod.' from"),
    "compiled and parallel": (
        prefixed("module._orig_mod."), "a.pt", "removed '_orig_mod.', 'module.' from",
    ),
    "net": (prefixed("net."), "a.pt", "removed 'net.' from the names"),
    "some backbone": (prefixed("my.backbone."), "a.pt", "removed 'my.backbone.' from the names"),
    "averaged": (averaged(), "a.pt", "removed 'module.' from the names"),
    "model": ({"model": weights(), "step": 7}, "a.pt", ""),
    "model and ema": (
        {"model": weights(), "ema": weights()}, "a.pt", "took the weights under 'model', not",
    ),
    "no counters": (
        {n: t for n, t in weights().items() if "num_batches" not in n}, "a.safetensors", "",
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    for name in ("factories", "odd"):  # of other tests
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("kind", RIGHT)
def test_right(kind, place, monkeypatch, capsys):
    content, name, said = RIGHT[kind]
    path = saved(content)(place, name)
    code, out, err = run(
        monkeypatch, capsys, "audit", str(path), "--model", "./factories.py:build", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["upper"] == pytest.approx(audit(build(), (3, 32, 32)).upper, rel=1e-9)
    assert "assumed --input 3,32,32" in err
    assert said in err
    assert err.count("removed") == said.count("removed")


@pytest.mark.parametrize("model", ["factories:build", "factories.py:build", "factories.py:Inside"])
def test_factories(model, place, monkeypatch, capsys):
    path = saved(weights())(place, "a.safetensors")
    code, out, err = run(monkeypatch, capsys, "audit", str(path), "--model", model, "--json")
    assert code == 0, err
    assert ("added 'net.' to the names" in err) == ("Inside" in model)
    assert json.loads(out)["upper"] == pytest.approx(audit(build(), (3, 32, 32)).upper, rel=1e-9)


def test_a_model_without_weights(place, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "audit", "factories.py:build", "--input", "3,32,32")
    assert code == 0, err
    assert "factories.py:build, weights as initialised" in out


def test_parts(place, monkeypatch, capsys):
    index = parts(place)
    code, out, _ = run(
        monkeypatch, capsys, "audit", str(index), "--model", "factories:build", "--json"
    )
    assert code == 0
    assert json.loads(out)["upper"] == pytest.approx(audit(build(), (3, 32, 32)).upper, rel=1e-9)
    assert run(monkeypatch, capsys, "audit", str(index))[0] == 0, "layers alone"


@pytest.mark.slow
def test_parts_of_the_size_of_a_resnet(place, monkeypatch, capsys):
    torch.manual_seed(0)
    wanted = MODELS["preact-resnet18"]().state_dict()
    names = list(wanted)
    places = {n: f"model-0000{1 + 4 * i // len(names)}-of-00004.safetensors" for i, n in
              enumerate(names)}  # fmt: skip
    for part in set(places.values()):
        save_file({n: wanted[n] for n in names if places[n] == part}, place / part)
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert sum(path.stat().st_size for path in place.glob("*.safetensors")) > 4e7
    found = read_weights(index)
    assert list(found) == names
    assert all(torch.equal(found[name], wanted[name]) for name in names)
    code, out, err = run(
        monkeypatch, capsys, "audit", str(index), "--model", "preact-resnet18", "--minutes", "0.2",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["upper"] > 0


def script(folder):
    torch.jit.script(build()).save(folder / "a.pt")
    return "a.pt", "is a TorchScript program"


def exported(folder):
    torch.export.save(torch.export.export(build(), (torch.zeros(1, 3, 32, 32),)), folder / "a.pt2")
    return "a.pt2", "is an exported program"


def renamed(folder):
    torch.export.save(torch.export.export(build(), (torch.zeros(1, 3, 32, 32),)), folder / "a.pt2")
    (folder / "a.pt2").rename(folder / "a.pt")
    return "a.pt", "is an exported program"


def whole(folder):
    torch.save(build(), folder / "a.pt")
    return "a.pt", "holds objects other than weights"


def one_part(folder):
    parts(folder)
    return "model-00002-of-00002.safetensors", "is part 2 of 2 of a model; name the index"


def lost_part(folder):
    parts(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    return "model.safetensors.index.json", "there is no file"


def escaping(folder):
    index = {"weight_map": {"weight": "../secret.safetensors"}}
    (folder / "a.index.json").write_text(json.dumps(index))
    return "a.index.json", "names the file '../secret.safetensors', which is not beside it"


def constrained(folder):
    torch.save(lipbound.constrain(build()).state_dict(), folder / "a.pt")
    return "a.pt", "from which the model computes a weight"


def normed(folder):
    model = build()
    nn.utils.parametrizations.weight_norm(model[0])
    torch.save(model.state_dict(), folder / "a.pt")
    return "a.pt", "from which the model computes a weight"


def old_norm(folder):
    model = build()
    nn.utils.spectral_norm(model[0])
    torch.save(model.state_dict(), folder / "a.pt")
    return "a.pt", "'0.weight_orig', from which the model computes a weight"


WRONG = (script, exported, renamed, whole, one_part, lost_part, escaping, constrained,
         normed, old_norm)  # fmt: skip


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_refused(make, place, monkeypatch, capsys):
    name, said = make(place)
    code, _, err = run(monkeypatch, capsys, "audit", name)
    assert (code, err.count("\n")) == (2, 1), err
    assert said in err


MISMATCHED = {
    "another network": (
        prefixed("") | {"9.weight": torch.ones(2)},
        "the model has all it needs; the file has '9.weight' instead",
    ),
    "a part of it": (
        {"0.weight": torch.ones(4, 3, 3, 3)},
        "the model needs '0.bias', '1.weight' and 7 more; the file has nothing else",
    ),
    "another shape": (
        prefixed("") | {"0.bias": torch.ones(5)}, "'0.bias' has the shape (4,) in the model and (5,"
    ),
    "two networks": (prefixed("a.", "b."), "several networks that fit, under 'a.', 'b.'"),
    "constrained": (
        lipbound.constrain(build()).state_dict(), "for example lipbound.constrain(model)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISMATCHED)
def test_mismatched(kind, place, monkeypatch, capsys):
    content, said = MISMATCHED[kind]
    torch.save(content, place / "a.pt")
    code, _, err = run(monkeypatch, capsys, "audit", "a.pt", "--model", "factories:build")
    assert code == 2
    assert said in err, err
    assert err.splitlines()[-1].startswith("lipbound: ")


def test_a_constrained_checkpoint_with_its_factory(place, monkeypatch, capsys):
    model = lipbound.constrain(build())
    torch.save(model.state_dict(), place / "a.pt")
    code, out, err = run(
        monkeypatch, capsys, "audit", "a.pt", "--model", "factories:constrained", "--json"
    )
    assert code == 0, err
    wanted = audit(model.eval(), (3, 32, 32)).upper
    assert json.loads(out)["upper"] == pytest.approx(wanted, rel=1e-6)


def test_an_input_that_cannot_be_guessed(place, monkeypatch, capsys):
    (place / "odd.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 1, 50, 9),"
        " nn.Flatten(), nn.Linear(7, 1))\n"
    )
    code, _, err = run(monkeypatch, capsys, "audit", "odd.py:build")
    assert code == 2
    assert "the shape of one input is needed, for example --input 3,32,32" in err
    assert "does not take 3x32x32, 3x224x224" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("factories.py",), "is code; name a function in it: factories.py:FUNCTION"),
        (("factories.py:build", "--input", "2,3,32,32"), "without the batch axis"),
        (("factories.py:build", "--input", "image.pt"), "write for example 3,32,32"),
    ],
)
def test_first_tries(words, said, place, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "audit", *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert said in err


def test_an_input_as_python_writes_it():
    assert input_shape_of("(3, 32, 32)") == input_shape_of("[3,32,32]") == input_shape_of("3x32x32")


def test_no_bound_is_no_success(place, monkeypatch, capsys):
    (place / "odd.py").write_text(
        "from torch import nn\nclass Odd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(3, 3)\n"
        "    def forward(self, x):\n        return self.a(x) * x\n"
    )
    code, out, err = run(monkeypatch, capsys, "audit", "odd.py:Odd")
    assert code == 1
    assert "there is no bound of the whole network" in err
    assert "domain" in out, "the reason names the fix"
    assert run(monkeypatch, capsys, "audit", "odd.py:Odd", "--domain", "0,1")[0] == 0
