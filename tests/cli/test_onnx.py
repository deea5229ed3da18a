"""ONNX programs: the audit of the network that they hold, or one line that names the fix."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch
from helpers import run
from torch import nn

from lipbound.cli.models import guessed_shape
from lipbound.network.audits import audit
from lipbound.robust.models import MODELS

SHAPE = (3, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 5),
    )  # fmt: skip
    return nn.Sequential(*layers).eval()


@pytest.fixture
def onnx():
    return pytest.importorskip("onnx", reason="needs pip install 'lipbound[onnx]'")


def exported(path, model=None, shape=SHAPE):
    """Write a network as an ONNX program, and return what was written."""
    import onnx

    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(model or network(), (torch.zeros(1, *shape),), str(path), dynamo=False)
    return onnx.load(path)


def audited(monkeypatch, capsys, path, *options):
    code, out, err = run(monkeypatch, capsys, "audit", str(path), "--json", *options)
    assert code == 0, err
    return json.loads(out)


def check_right(found):
    wanted = audit(network(), SHAPE)
    assert found["input_shape"] == list(SHAPE)
    assert found["upper"] == pytest.approx(wanted.upper, rel=1e-9)
    assert [row["upper"] for row in found["layers"]] == [r.bracket.upper for r in wanted.layers]
    assert [row["lower"] for row in found["layers"]] == [r.bracket.lower for r in wanted.layers]


def constants(program):
    """Weights as operations, as some programs have them."""
    import onnx

    for tensor in list(program.graph.initializer):
        node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        program.graph.node.insert(0, node)
    del program.graph.initializer[:]
    return {}


def copies(program):
    """Weights that reach their operation by way of others."""
    import onnx

    for i, tensor in enumerate(program.graph.initializer):
        node = onnx.helper.make_node("Identity", [tensor.name], [f"copy{i}"])
        for user in program.graph.node:
            user.input[:] = [f"copy{i}" if name == tensor.name else name for name in user.input]
        program.graph.node.insert(0, node)
    return {}


def newest(program):
    program.opset_import[0].version = 22
    return {}


def outside(program):
    """Weights in another file."""
    return {"save_as_external_data": True, "location": "weights.data", "size_threshold": 0}


def unnamed(program):
    for node in program.graph.node:
        node.name = ""
    return {}


def hostile(program):
    """Names that torch.fx would write into the code that it makes and runs."""
    for node in program.graph.node:
        node.name = 'training"), open("executed", "w"), getattr(self, "training'
    return {}


def reserved(program):
    for node, name in zip(program.graph.node, ("forward", "initializers", "ä", "1"), strict=False):
        node.name = name
    return {}


CHANGES = (constants, copies, newest, outside, unnamed, hostile, reserved)


@pytest.mark.parametrize("change", [None, *CHANGES], ids=lambda c: c.__name__ if c else "plain")
def test_right(change, onnx, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = exported("a.onnx")
    if change:
        onnx.save(program, "a.onnx", **change(program))
    check_right(audited(monkeypatch, capsys, "a.onnx"))
    assert not (tmp_path / "executed").exists()


def test_a_network_of_any_batch_and_size(onnx, tmp_path, monkeypatch, capsys):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    program = exported(tmp_path / "a.onnx", model.eval())
    for axis in (0, 2, 3):
        program.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"n{axis}"
    onnx.save(program, tmp_path / "a.onnx")
    found = audited(monkeypatch, capsys, tmp_path / "a.onnx")
    assert found["input_shape"] == list(guessed_shape(model))
    smaller = audited(monkeypatch, capsys, tmp_path / "a.onnx", "--input", "3,9,9")
    assert smaller["input_shape"] == [3, 9, 9]


def test_certify_reads_it_too(onnx, tmp_path, monkeypatch, capsys):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    exported(tmp_path / "a.onnx", model, (1, 8, 8))
    words = ("certify", str(tmp_path / "a.onnx"), "--data", "digits", "--count", "5", "--json")
    code, out, err = run(monkeypatch, capsys, *words, "--attacked", "0")
    assert code == 0, err
    assert json.loads(out)["clean"]["images"] == 5


def cut(path, program):
    path.write_bytes(path.read_bytes()[:100])


def two_inputs(path, program):
    import onnx

    program.graph.input.add().CopyFrom(program.graph.input[0])
    program.graph.input[1].name = "state"
    onnx.save(program, path)


def unknown(path, program):
    import onnx

    program.graph.node[1].op_type = "Strange"
    onnx.save(program, path)


def foreign(path, program):
    import onnx

    program.graph.node[1].domain = "com.example"
    onnx.save(program, path)


def elsewhere(path, program):
    import onnx

    onnx.save(program, path, **outside(program))
    text = path.read_bytes().replace(b"weights.data", b"../other.dat")
    path.write_bytes(text)


def lost(path, program):
    import onnx

    onnx.save(program, path, **outside(program))
    path.with_name("weights.data").unlink()


REFUSED = {
    cut: "download or copy it again",
    two_inputs: "has 2 inputs (input.1, state)",
    unknown: "cannot be converted by onnx2torch",
    foreign: "cannot be converted by onnx2torch",
    elsewhere: "names the file '../other.dat', which is not beside it",
    lost: "there is no file",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_refused(change, onnx, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.onnx"
    change(path, exported(path))
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n")) == (2, 1), err
    assert REFUSED[change] in err


def test_without_the_extra(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.onnx").write_bytes(b"\x08\x07")
    for name in ("onnx", "onnx2torch"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run(monkeypatch, capsys, "audit", str(tmp_path / "a.onnx"))
    assert (code, err.count("\n")) == (2, 1), err
    assert "pip install 'lipbound[onnx]'" in err


def test_its_architecture_is_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.onnx").write_bytes(b"\x08\x07")
    words = ("audit", str(tmp_path / "a.onnx"), "--model", "resnet20")
    code, _, err = run(monkeypatch, capsys, *words)
    assert (code, "leave out --model" in err) == (2, True)


@pytest.mark.slow
def test_a_program_of_the_size_of_a_resnet(onnx, tmp_path):
    from onnx.reference import ReferenceEvaluator

    from lipbound.cli.onnx_programs import onnx_network

    torch.manual_seed(0)
    model = MODELS["preact-resnet18"]().eval()
    exported(tmp_path / "a.onnx", model, (3, 32, 32))
    assert (tmp_path / "a.onnx").stat().st_size > 4e7
    converted, shape = onnx_network(tmp_path / "a.onnx")
    assert shape == (3, 32, 32)
    image = torch.randn(1, *shape)
    with torch.no_grad():
        wanted, found = model(image), converted(image)
    (reference,) = ReferenceEvaluator(str(tmp_path / "a.onnx")).run(
        None, {"input.1": image.numpy()}
    )
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(torch.from_numpy(reference), wanted, rtol=1e-4, atol=1e-5)
    brackets = audit(converted, shape, minutes=0.2, search=0)
    assert brackets.upper < float("inf")
    assert len(brackets.layers) >= 21
