"""The command line as a user types it: right, wrong, and without its extra."""

from __future__ import annotations

import sys

import pytest
import torch

import lipbound
from lipbound import cli, demo
from lipbound.survey import survey


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lipbound", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def test_version_and_help(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, f"lipbound {lipbound.__version__}\n")
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


def test_interruption_is_quiet(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lipbound.demo.network", interrupt)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert (code, err.strip()) == (130, "lipbound: interrupted")


def test_embedded_network_is_trained_and_its_rows_are_sound():
    model = demo.network()
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    images, labels = demo._digits()
    with torch.no_grad():
        assert (model(images).argmax(1) == labels).float().mean() > 0.98
    for row in survey(model, demo.INPUT_SHAPE):
        assert row.bracket.upper >= row.exact * (1 - 1e-12)
        assert row.lipbound is None or row.lipbound >= row.exact


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
