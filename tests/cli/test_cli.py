"""The command line as a user types it: right, wrong, interrupted, and without its extra."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from helpers import fresh, run

import lipbound
import lipbound.robust.models
from lipbound.modules import input_shapes
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
            "no tier has 'at+lpreg'; choose one of: at,",
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
    torch.save(torch.nn.Conv2d(3, 4, 3).state_dict(), path)
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
