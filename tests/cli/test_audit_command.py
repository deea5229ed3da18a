"""`lipbound audit` as a user types it: networks, weights files, hostile files and odd terminals."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import run

import lipbound
import lipbound.robust.models
from lipbound.network.audits import audit_weights
from lipbound.report.terminal import Screen, audit_table
from lipbound.robust.models import digits as demo


class Branching(torch.nn.Module):
    """Its path depends on its input's values: no graph, no bound."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x) if float(x.sum()) > 0 else -self.conv(x)


def test_no_bound_is_above_every_limit(monkeypatch, capsys, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(Branching().state_dict(), path)
    limit = ("--input", "3,8,8", "--fail-above", "1e9")
    code, _, err = run(
        monkeypatch, capsys, "audit", str(path), "--model", "test_audit_command:Branching", *limit
    )
    assert code == 1
    assert "so --fail-above 1e+09 fails" in err
    code, _, _ = run(monkeypatch, capsys, "audit", str(path), "--fail-above", "1e9")
    assert code == 0, "kernels alone: the largest counts"


def test_two_checkpoints_side_by_side(monkeypatch, capsys, tmp_path):
    torch.manual_seed(0)
    paths = [str(tmp_path / name) for name in ("new.pt", "old.pt")]
    for path in paths:
        torch.save(Branching().state_dict(), path)
    given = ("--against", paths[1], "--json", "--html", str(tmp_path / "both.html"))
    code, out, err = run(monkeypatch, capsys, "audit", paths[0], *given)
    assert (code, err.splitlines()[-1]) == (0, f"wrote {tmp_path / 'both.html'}")
    found = json.loads(out)
    assert found["names"] == ["new.pt", "old.pt"]
    (layer,) = found["layers"]
    assert layer["upper A"] == found["A"]["layers"][0]["upper"]
    assert layer["upper B"] == found["B"]["layers"][0]["upper"]
    model = ("--model", "test_audit_command:Branching", "--input", "3,8,8")
    code, out, err = run(monkeypatch, capsys, "audit", paths[0], "--against", paths[1], *model)
    assert code == 1
    assert "no bound of the whole network A, test_audit_command:Branching, new.pt" in err
    assert "A / B" in out
    limit = ("--fail-above", "1e-3")
    code, _, err = run(monkeypatch, capsys, "audit", paths[0], "--against", paths[1], *limit)
    assert code == 1
    assert "is above 0.001" in err


def kernels(folder, *scales: float) -> list[str]:
    paths = [str(folder / f"{scale:g}.pt") for scale in scales]
    for path, scale in zip(paths, scales, strict=True):
        torch.save({"conv.weight": torch.full((1, 1, 1), scale)}, path)
    return paths


def test_many_networks_get_a_row_each(monkeypatch, capsys, tmp_path):
    """Those that can be read are shown, and a file that cannot be read ends the command."""
    paths = kernels(tmp_path, 1.0, 3.0)
    code, out, _ = run(monkeypatch, capsys, "audit", "demo", *paths, "--json")
    found = json.loads(out)["audits"]
    assert (code, [one["source"] for one in found]) == (0, ["demo", *paths])
    assert [one["largest"] for one in found[1:]] == pytest.approx([1.0, 3.0])
    alone = json.loads(run(monkeypatch, capsys, "audit", "demo", "--json")[1])
    assert found[0]["audit"]["upper"] == alone["upper"] == found[0]["worst"]
    code, out, err = run(monkeypatch, capsys, "audit", *paths, "--fail-above", "2")
    assert (code, err) == (1, f"lipbound: 1 of 2 networks have no bound of at most 2: {paths[1]}\n")
    assert paths[0] in out.replace("\n", "")
    (tmp_path / "text.pt").write_text("no weights")
    wrong = [str(tmp_path / name) for name in ("text.pt", "lost.pt")]
    code, out, err = run(monkeypatch, capsys, "audit", wrong[0], *paths, wrong[1])
    assert (code, [line.split(": ")[1] for line in err.splitlines()]) == (2, wrong)
    assert paths[1] in out.replace("\n", "")
    code, _, err = run(monkeypatch, capsys, "audit", *paths, "--html", str(tmp_path / "a.html"))
    assert (code, err) == (2, "lipbound: --html works with one SOURCE, not with 2\n")


def huge() -> torch.nn.Module:
    """Its bound is above the largest float64."""
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(12)]
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 1e30)
    return torch.nn.Sequential(*layers)


def test_a_bound_above_the_largest_number_is_a_bound(monkeypatch, capsys, tmp_path):
    """It fails the limit, alone and among several networks. A bound of 0 is below every limit."""
    zero, source = *kernels(tmp_path, 0.0), "test_audit_command:huge"
    shape = ("--input", "1")
    for given in ((source,), (source, source)):
        assert run(monkeypatch, capsys, "audit", *given, *shape)[0] == 0
        assert run(monkeypatch, capsys, "audit", *given, *shape, "--fail-above", "9")[0] == 1
    assert run(monkeypatch, capsys, "audit", zero, zero, "--fail-above", "0.5")[0] == 0


def interrupt():
    raise KeyboardInterrupt


def test_ctrl_c_shows_the_networks_that_are_finished(monkeypatch, capsys, tmp_path):
    first, last = kernels(tmp_path, 2.0, 3.0)
    sources = (first, str(tmp_path / "lost.pt"), "test_audit_command:interrupt", last)
    said = f"lipbound: {sources[1]}: "
    ends = ["lipbound: 2 of 4 networks were finished", "lipbound: interrupted"]
    for form in ((), ("--json",)):
        code, out, err = run(monkeypatch, capsys, "audit", *sources, *form)
        lines = err.splitlines()
        assert (code, lines[-2:], len(lines), lines[0][: len(said)]) == (130, ends, 3, said)
        assert first in out.replace("\n", "")
        assert last not in out.replace("\n", "")
    found = json.loads(out)
    assert [one["source"] for one in found["audits"]] == [first]
    assert [one["source"] for one in found["failed"]] == [sources[1]]


@pytest.mark.slow
def test_processes_share_many_networks(monkeypatch, capsys, tmp_path):
    paths = kernels(tmp_path, 1.0, 2.0, 3.0, 4.0, 5.0)
    alone = run(monkeypatch, capsys, "audit", *paths, "--json")[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "lipbound", "audit", *paths, "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, json.loads(done.stdout)) == (0, json.loads(alone))


def test_a_model_to_compare_with_that_is_not_used(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "audit", "demo", "--against-model", "resnet20")
    assert (code, err) == (2, "lipbound: --against-model resnet20 needs --against CHECKPOINT\n")


def test_an_input_the_model_does_not_take(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "audit", "demo", "--input", "3,8,8")
    assert code == 2
    assert err.startswith("lipbound: the model does not take inputs of shape (3, 8, 8): ")
    assert err.count("\n") == 1


def test_audit_prints_every_layer(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "audit", "demo")
    assert code == 0
    for name, layer in demo.network().named_modules():
        if hasattr(layer, "weight"):
            assert name in out


class Boom:
    """Unpickling this would leave a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_hostile_and_broken_files(monkeypatch, capsys, tmp_path):
    from safetensors.torch import save_file

    trace = tmp_path / "executed"
    files = {name: tmp_path / name for name in (
        "evil.pt", "empty.pt", "empty.safetensors", "cut.safetensors", "nan.safetensors",
        "text.pt", "none.safetensors", "notes.txt",
    )}  # fmt: skip
    torch.save({"weight": Boom(str(trace))}, files["evil.pt"])
    for name in ("empty.pt", "empty.safetensors"):
        files[name].touch()
    save_file({"conv.weight": torch.randn(4, 3, 3, 3)}, files["cut.safetensors"])
    files["cut.safetensors"].write_bytes(files["cut.safetensors"].read_bytes()[:60])
    save_file({"conv.weight": torch.full((4, 3, 3, 3), torch.nan)}, files["nan.safetensors"])
    files["text.pt"].write_text("hello")
    files["notes.txt"].write_text("hello")
    save_file({"bias": torch.zeros(3)}, files["none.safetensors"])
    for path in [*files.values(), tmp_path / "missing.pt"]:
        code, _, err = run(monkeypatch, capsys, "audit", str(path))
        assert (code, err.count("\n")) == (2, 1), path.name
        assert "Traceback" not in err
    assert not trace.exists(), "nothing from a file is executed"
    for path, said in (
        (files["nan.safetensors"], "conv.weight: the kernel"),
        (tmp_path, "is a folder; name a weights file in it: cut.safetensors, empty.pt, "),
        (tmp_path / "missing.pt", "there is no file"),
    ):
        assert said in run(monkeypatch, capsys, "audit", str(path))[2]


def test_audit_of_weights_with_and_without_an_architecture(monkeypatch, capsys, tmp_path):
    from safetensors.torch import save_file

    model = lipbound.robust.models.ResNet(8)
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    code, out, _ = run(monkeypatch, capsys, "audit", str(path), "--stride", "2")
    assert code == 0
    assert "layer3.0.conv2.weight" in out
    assert "without an architecture, so there is no network" in out
    assert "\nassumed for every kernel: stride 2, dilation 1, groups 1\n" in out
    (tmp_path / "mine.py").write_text(
        "from lipbound.robust.models import ResNet\ndef build():\n    return ResNet(8)\n"
        "def leave():\n    raise SystemExit(5)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["audit", str(path), "--model", "mine:build", "--input", "3,16,16"]
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json", "--fail-above", "1e30")
    record = json.loads(out)
    assert code == 0
    assert record["lower"] <= record["upper"] <= record["product"]
    assert len(record["layers"]) == 15
    code, _, err = run(monkeypatch, capsys, *arguments, "--fail-above", "1e-3")
    assert (code, "is above 0.001" in err) == (1, True)
    for wrong, message in (
        (["--model", "mine"], "--model 'mine': there is no such model; give torchvision:NAME, "),
        (["--model", "resnet2O"], "or one of cnn, cnn-plain, resnet20"),
        (["--model", ":build"], "is not of the form package.module:FACTORY"),
        (["--model", "nowhere:build"], "No module named"),
        (["--model", "resnet20"], "the model needs 'layer1.1.conv1.weight', "),
        (["--model", "elsewhere.py:build"], "there is no file 'elsewhere.py'"),
        (["--model", "mine:build", "--input", "3,x"], "write for example 3,32,32"),
        (["--model", "mine:leave"], "SystemExit: 5"),
        (
            ["--input", "3,32,32"],
            "--input 3,32,32 needs the network's",
        ),
        (["--domain", "0,1"], "--domain 0,1 needs the network's"),
        (["--domain", "1,0"], "--domain '1,0' is not a smaller and a larger number"),
        (["--effort", "hihg"], "--effort 'hihg' is not one of low, normal, high"),
        (["--html", str(path)], "would overwrite the weights"),
    ):
        code, _, err = run(monkeypatch, capsys, "audit", str(path), *wrong)
        assert (code, message in err) == (2, True), err


@pytest.mark.slow
def test_another_bound_for_every_layer(monkeypatch, capsys):
    records = {}
    for method in ("spectral", "lipbound", "gram"):
        code, out, _ = run(monkeypatch, capsys, "audit", "demo", "--method", method, "--json")
        assert code == 0
        records[method] = json.loads(out)
    for method in ("lipbound", "gram"):
        loose, tight = records[method], records["spectral"]
        assert loose["upper"] > tight["lower"]
        for mine, best in zip(loose["layers"], tight["layers"], strict=True):
            assert mine["upper"] >= best["lower"]
            assert mine["upper"] == mine["lipbound"] or method == "gram" or not mine["lipbound"]
    for wrong in (["--method", "guess"], ["--method", "lipbound", "--effort", "high"]):
        code, _, err = run(monkeypatch, capsys, "audit", "demo", *wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert wrong[1] in err


def test_thousands_of_tensors(monkeypatch, capsys, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "many.safetensors"
    save_file({f"l{i:05}": torch.full((1, 1, 3), 1.0 + i) for i in range(3_000)}, path)
    code, out, _ = run(monkeypatch, capsys, "audit", str(path), "--json")
    assert code == 0
    assert [row["upper"] >= 3 * (1 + i) for i, row in enumerate(json.loads(out)["layers"])] == [
        True
    ] * 3_000


def test_what_weights_alone_leave_out_is_said(monkeypatch, capsys, tmp_path):
    one = torch.ones(1, 1, 3)
    torch.save({"a": one, "fc.weight": one[0], "b.running_var": one[0, 0]}, tmp_path / "w.pt")
    _, out, _ = run(monkeypatch, capsys, "audit", str(tmp_path / "w.pt"), "--json")
    assert "assumed for every kernel: stride 1, dilation 1, groups 1; " in json.loads(out)["note"]
    assert re.search(r"1 left out \(matrices.*fc\.weight; 1 left out \(BatchNorm.*: b$",
                     json.loads(out)["note"])  # fmt: skip


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_no_column_is_lost_on_a_narrow_terminal(width):
    screen = io.StringIO()
    kernels = {"block.with.a.long.name.and.more": torch.ones(1, 1, 3), "b": torch.ones(1, 1, 3)}
    found = audit_weights(kernels)
    audit_table(found, "x", Screen(file=screen, force_terminal=True, width=width, no_color=True))
    lines = "".join(re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())).split("\n")
    assert any(re.match(r"b +1→1 3 +2.9999 +3.00\d+ +3.0\d+$", line) for line in lines)
    whole = any(line.startswith("block.with.a.long.name.and.more ") for line in lines)
    assert whole == (width != 60), "folded where that is enough"
    assert max(len(line.rstrip()) for line in lines[1:5]) <= max(width, 66)


@pytest.mark.parametrize("form", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
def test_a_pipe_that_ends_ends_nothing_else(tmp_path, form):
    """The page is written and the verdict given, whether or not somebody reads the table."""
    path = tmp_path / "w.pt"
    torch.save({"weight": torch.ones(1, 1, 3)}, path)
    command = [sys.executable, "-m", "lipbound", "audit", str(path), *form]
    process = subprocess.Popen(
        [*command, "--fail-above", "1", "--html", str(tmp_path / "page.html")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    said = process.stderr.read().decode()
    assert (process.wait(), "is above 1" in said, "Error" in said) == (1, True, False), said
    assert (tmp_path / "page.html").exists()


def test_odd_names_are_printed_as_they_are(monkeypatch, capsys, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "odd.safetensors"
    save_file({"<script>[red]x[/red]": torch.ones(1, 1, 3, 3)}, path)
    code, out, _ = run(monkeypatch, capsys, "audit", str(path))
    assert (code, "<script>[red]x[/red]" in out) == (0, True)


def test_an_audit_stops_after_its_minutes(monkeypatch, capsys, tmp_path):
    torch.save({"a": torch.randn(4, 3, 3, 3), "b": torch.randn(2, 3, 5)}, tmp_path / "w.pt")
    code, out, _ = run(monkeypatch, capsys, "audit", str(tmp_path / "w.pt"), "--minutes", "0")
    assert code == 0
    assert "stopped after 0 minutes: 2 of 2 layers have an upper bound from a cheaper" in out
    code, out, _ = run(monkeypatch, capsys, "audit", "demo", "--minutes", "0", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["upper"] > lipbound.audit(demo.network(), demo.INPUT_SHAPE).upper
    code, out, err = run(monkeypatch, capsys, "audit", "demo", "--minutes", "-1")
    assert (code, err.count("\n")) == (2, 1)


def test_many_layers_are_cut_to_the_largest(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lipbound.report.terminal.ROWS", 3)
    torch.save({f"k{i}": torch.full((1, 1, 3), float(i)) for i in range(5)}, tmp_path / "w.pt")
    _, out, _ = run(monkeypatch, capsys, "audit", str(tmp_path / "w.pt"))
    assert "2 layers with smaller upper bounds are not shown" in out
    assert "k1 " not in out
    assert "k4 " in out
