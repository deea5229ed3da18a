"""The command line as a user types it: right, wrong, and without its extra."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from helpers import fresh, run

import lipbound
import lipbound.robust.models
from lipbound.cli import arguments as given
from lipbound.modules import input_shapes
from lipbound.network.audits import audit_weights
from lipbound.report.terminal import Screen, audit_table
from lipbound.robust.data import data_set
from lipbound.robust.models import digits as demo


def test_version_and_help(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, f"lipbound {lipbound.__version__}\n")
    version = (0, f"lipbound {lipbound.__version__}\n")
    assert run(monkeypatch, capsys, "--version", "audit", "demo")[:2] == version
    for arguments in ([], ["--help"], ["audit", "--help"]):
        code, out, _ = run(monkeypatch, capsys, *arguments)
        assert (code, out.count("Usage:")) == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["audi"], ["audit"], ["audit", "--bogus"], ["audit", "x.pt"],
        ["bench", "--network", "resnet19"], ["bench", "--method", "guess"],
        ["bench", "--device", "abacus"],
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_2(monkeypatch, capsys, arguments):
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.startswith("lipbound: ")
    assert err.count("\n") == 1


def test_a_wrong_word_names_the_help_of_its_command(monkeypatch, capsys):
    assert "; try 'lipbound --help'\n" in run(monkeypatch, capsys, "audi")[2]
    for arguments in (["audit"], ["audit", "x", "--bogus"]):
        assert "; try 'lipbound audit --help'\n" in run(monkeypatch, capsys, *arguments)[2]


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
        monkeypatch, capsys, "audit", str(path), "--model", "test_cli:Branching", *limit
    )
    assert code == 1
    assert "there is no bound, so --fail-above 1e+09 fails" in err
    code, _, _ = run(monkeypatch, capsys, "audit", str(path), "--fail-above", "1e9")
    assert code == 0, "kernels alone: the largest counts"


def test_an_input_the_model_does_not_take(monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "audit", "demo", "--input", "3,8,8")
    assert code == 2
    assert err.startswith("lipbound: the model does not take inputs of shape (3, 8, 8): ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table4", "--weights", "x.pt"], "does not take --weights; use it with fig1, fig2"),
        (["table3", "--tier", "A"], "table3 does not take --tier; use it with table2, fig3"),
        (["fig1", "--minutes", "5"], "does not take --minutes; use it with table2, fig3, table3"),
        (["fig1", "--device", "cpu"], "does not take --device; use it with table1, table4,"),
        (["table1", "--tiny", "--device", "gpu"], "device 'gpu' is not available"),
        (["table4", "--tiny", "--device", "gpu"], "device 'gpu' is not available"),
        (["fig2", "--minutes", "x"], "'--minutes': 'x' should be a valid number"),
        (["all"], "table2 needs --folder with CIFAR-10 and CIFAR-100; or use --tiny"),
        (["all", "--tiny", "--folder", "x"], "leave out --folder x"),
        (
            ["table2", "--folder", ".", "--only", "at+lpreg"],
            "no tier has 'at+lpreg'; there are at,",
        ),
        (
            ["table2", "--folder", ".", "--tier", "O", "--only", "baseline"],
            "tier O has no 'baseline'",
        ),
    ],
)
def test_what_an_experiment_has_no_use_for(monkeypatch, capsys, tmp_path, arguments, said):
    code, _, err = run(monkeypatch, capsys, "reproduce", *arguments, "--out", str(tmp_path))
    assert code == 2
    assert said in err


def test_an_extra_is_missed_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (
        ["reproduce", "fig2", "--out", str(tmp_path)], ["bench", "--plot", str(tmp_path / "a.svg")],
        ["audit", "demo", "--html", str(tmp_path / "a.html")],
    ):  # fmt: skip
        code, out, err = run(monkeypatch, capsys, *arguments)
        assert (code, out) == (2, "")
        assert "pip install 'lipbound[report]'" in err


@pytest.mark.parametrize("name", ["fig1", "table1"])
def test_weights_without_the_kernels_that_are_wanted(monkeypatch, capsys, tmp_path, name):
    path = tmp_path / "weights.pt"
    torch.save(Branching().state_dict(), path)
    code, _, err = run(
        monkeypatch, capsys, "reproduce", name, "--tiny", "--weights", str(path), "--out",
        str(tmp_path),
    )  # fmt: skip
    assert code == 2
    assert f"{path}: " in err


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert code == 2
    assert "pip install 'lipbound[cli]'" in err


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
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["lower"] <= record["upper"] <= record["product"]
    assert len(record["layers"]) == 15
    code, _, err = run(monkeypatch, capsys, *arguments, "--fail-above", "1e-3")
    assert (code, "is above 0.001" in err) == (1, True)
    assert run(monkeypatch, capsys, *arguments, "--fail-above", "1e30")[0] == 0
    for wrong, message in (
        (["--model", "mine"], "is not of the form package.module:factory"),
        (["--model", "nowhere:build"], "No module named"),
        (["--model", "resnet20"], "they lack"),
        (["--model", "mine:build", "--input", "3,x"], "write for example 3,32,32"),
        (["--model", "mine.py:build"], "; write mine:build"),
        (["--model", "mine:leave"], "SystemExit: 5"),
        (
            ["--input", "3,32,32"],
            "--input 3,32,32 needs the network's",
        ),
        (["--effort", "hihg"], "--effort 'hihg' is not one of normal, high"),
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


def test_train_resume_and_audit_what_came_out(monkeypatch, capsys, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    out = tmp_path / "run"
    arguments = ["train", "--out", str(out), "--epochs", "1", "--device", "cpu"]
    code, _, err = run(monkeypatch, capsys, *arguments, "--time-limit", "0")
    assert (code, "with --resume to continue" in err) == (0, True)
    code, table, err = run(monkeypatch, capsys, *arguments, "--resume", "--tensorboard")
    assert code == 0
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert "at+lipreg  epoch 1  loss" in err
    assert "ms/step" in table
    code, out_again, _ = run(monkeypatch, capsys, *arguments, "--resume")
    assert (code, out_again) == (0, table), "a finished run is only told"
    code, found, _ = run(monkeypatch, capsys, "audit", str(out / "best.safetensors"), "--json")
    record = json.loads(found)
    assert (code, record["source"]) == (0, "cnn, at+lipreg, best.safetensors")
    assert record["lower"] <= record["upper"]
    for wrong, message in (
        ([], "already holds a run"),
        (["--resume", "--seed", "5"], "its seed is 0, not 5"),
        (["--arm", "att"], "did you mean 'at'"),
        (["--preset", "papers"], "unknown preset"),
        (["--data", "mnist"], "unknown data 'mnist'"),
        (["--set", "epoch=3"], "did you mean 'epochs'"),
        (["--data", "cifar10"], "needs --folder"),
        (["--folder", "images"], "not read from images"),
        (["--device", "abacus"], "device 'abacus'"),
    ):
        code, _, err = run(monkeypatch, capsys, *arguments, *wrong)
        assert (code, err.count("\n"), message in err) == (2, 1, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["audit", "demo", "--stride", "2"],
            "are for a weights file",
        ),
        (["audit", "demo", "--model", "resnet20"], "not for 'demo'"),
        (["audit", "demo", "--fail-above", "nan"], "--fail-above nan"),
        (
            ["audit", "WEIGHTS", "--effort", "high"],
            "--effort high needs the network's",
        ),
        (["train", "--out", "RUN", "--time-limit", "-1"], "--time-limit -1"),
        (["train", "--out", "RUN", "--save-every", "-1"], "--save-every -1"),
        (["train", "--out", "RUN", "--set", "foo"], "--set 'foo' is not NAME=VALUE"),
        (["train", "--out", "RUN", "--set", "foo=1"], "unknown setting 'foo'"),
        (["train", "--out", "RUN", "--model", "nope"], "unknown model 'nope'"),
        (["reproduce", "fig1", "--minutes", "-3"], "--minutes -3"),
    ],
)
def test_options_that_make_no_sense(monkeypatch, capsys, tmp_path, arguments, message):
    torch.save({"weight": torch.ones(1, 1, 3)}, tmp_path / "w.pt")
    places = {"WEIGHTS": str(tmp_path / "w.pt"), "RUN": str(tmp_path / "run")}
    code, _, err = run(monkeypatch, capsys, *(places.get(a, a) for a in arguments))
    assert (code, err.count("\n"), message in err) == (2, 1, True), err
    assert not (tmp_path / "run").exists()


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
    assert any(re.match(r"b +1→1 3 +3 +3.00\d+ +3.0\d+$", line) for line in lines)
    whole = any(line.startswith("block.with.a.long.name.and.more ") for line in lines)
    assert whole == (width != 60), "folded where that is enough"
    assert max(len(line.rstrip()) for line in lines[1:5]) <= max(width, 66)


@pytest.mark.parametrize("form", [[], ["--json"]])
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


def test_interruption_is_quiet(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lipbound.robust.models.digits.network", interrupt)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert (code, err.strip()) == (130, "lipbound: interrupted")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["audit", "--help"], ["audi"]])
def test_help_does_not_wait_for_pytorch(arguments):
    code = f"import sys; sys.argv = ['lipbound', *{arguments}]\n"
    code += "from lipbound.cli.main import main\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules, 'torch'"
    assert "torch" not in fresh(code).stderr


def test_interruption_while_pytorch_is_imported():
    """It swallows the first one and goes on with half of itself."""
    code = """
import contextlib, signal
from lipbound.cli import app, main as cli
def run(arguments):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return 0
app.run = run
cli.main()
"""
    ended = fresh(code)
    assert (ended.returncode, ended.stderr) == (130, "lipbound: interrupted\n")
    later = fresh("import torch\n" + code.replace("KeyboardInterrupt", "ValueError"))
    assert (later.returncode, later.stderr) == (130, "lipbound: interrupted\n")


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


def test_long_work_says_how_far_it_is_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(given, "EVERY", 1e-3)
    said = ""
    for item in given.bar([1, 2], "layers"):
        while item == 2 and "layers: 1 of 2 after 0 s" not in said:  # written by another thread
            said += capsys.readouterr().err
    assert "lipbound: layers: 1 of 2 after 0 s\n" in said


def test_a_bug_has_an_exit_code_of_its_own(monkeypatch, capsys):
    def broken(*_):
        raise KeyError("somewhere")

    monkeypatch.setattr("lipbound.robust.models.digits.network", broken)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert code == 3
    assert err.endswith(
        "lipbound: this is a bug in lipbound; please report it with the traceback above\n"
    )
    assert "KeyError: 'somewhere'" in err


def test_many_layers_are_cut_to_the_largest(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lipbound.report.terminal.ROWS", 3)
    torch.save({f"k{i}": torch.full((1, 1, 3), float(i)) for i in range(5)}, tmp_path / "w.pt")
    _, out, _ = run(monkeypatch, capsys, "audit", str(tmp_path / "w.pt"))
    assert "2 layers with smaller upper bounds are not shown" in out
    assert "k1 " not in out
    assert "k4 " in out


def test_interruption_when_all_is_done():
    code = """
import atexit, signal, sys
from lipbound.cli import main as cli
atexit.register(signal.raise_signal, signal.SIGINT)
sys.argv = ["lipbound", "--help"]
cli.main()
"""
    ended = fresh(code)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_interruption_that_nobody_can_read():
    code = "import os; os.close(2); import signal; from lipbound.cli import app, main as cli\n"
    code += "app.run = lambda arguments: signal.raise_signal(signal.SIGINT)\ncli.main()"
    assert fresh(code).returncode == 130


def test_modules_are_found_without_being_imported():
    code = "import lipbound; print(lipbound.bounds.__name__, lipbound.symbols.__name__)"
    assert fresh(code).stdout == "lipbound.bounds lipbound.symbols\n"


def test_what_is_exported_is_found_when_it_is_wanted():
    assert {name for names in lipbound._HOMES.values() for name in names} == {*lipbound.__all__}
    for name in lipbound.__all__:
        assert name in dir(lipbound)
        assert not isinstance(getattr(lipbound, name), ModuleType), name
    with pytest.raises(AttributeError, match="'lipbound' has no attribute 'bounce'"):
        _ = lipbound.bounce


def test_embedded_network_is_trained_and_its_rows_are_sound():
    model = demo.network()
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    data = data_set("digits").train
    images, labels = data.images / 255, data.labels
    with torch.no_grad():
        assert (model(images).argmax(1) == labels).float().mean() > 0.98
    sizes = input_shapes(model, demo.INPUT_SHAPE)
    for row in lipbound.audit(model, demo.INPUT_SHAPE).layers:
        truth = lipbound.exact(row.layer, sizes[row.name]) if row.lipbound else row.bracket.lower
        assert row.bracket.upper >= truth * (1 - 1e-12)
        assert row.lipbound is None or row.lipbound >= truth


def test_bench_measures_once_and_draws(monkeypatch, capsys, tmp_path):
    record, figure = tmp_path / "speed.jsonl", tmp_path / "speed.svg"
    arguments = ["bench", "--network", "squeezenet1_1", "--out", str(record), "--device", "cpu"]
    methods = ["--method", "lipbound", "--method", "lipbound_gradient", "--method", "sgd"]
    code, out, err = run(monkeypatch, capsys, *arguments, *methods)
    assert (code, err) == (0, "")
    assert "squeezenet1_1" in out
    assert "SGD / LB+grad: geometric mean" in out
    before = record.read_text()
    assert before.count("\n") == 1
    code, again, _ = run(monkeypatch, capsys, *arguments, *methods, "--plot", str(figure))
    assert (code, record.read_text()) == (0, before), "an interrupted run goes on where it stopped"
    assert again.startswith(out)
    assert figure.read_text().count("squeezenet1_1") >= 1
    record.write_text("not json\n")
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "speed.jsonl, line 1" in err
