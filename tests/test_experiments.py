"""Experiments in small: what they write, and that a second run adds nothing."""

from __future__ import annotations

import json
import sys

import pytest
from safetensors.torch import save_file
from test_cli import run

from lipbound.experiments import audits
from lipbound.experiments.reproduce import EXPERIMENTS, report, write_figure
from lipbound.records import read
from lipbound.robust.models import MODELS, ResNet


def test_audits_are_recorded_once(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "tiny", lambda: ResNet(8))
    weights, out = tmp_path / "tiny.safetensors", tmp_path / "audits.jsonl"
    save_file(ResNet(8).state_dict(), weights)
    monkeypatch.setattr(sys, "argv", ["audits", f"tiny={weights}", "--out", str(out)])
    for _ in range(2):
        audits.main()
    (record,) = read(out)
    assert (record["network"], record["weights"], record["effort"]) == (
        "tiny", "tiny.safetensors", "normal",
    )  # fmt: skip
    order = [record[f"log10_{key}"] for key in ("lower", "upper", "product", "paper")]
    assert order == sorted(order)


def test_an_unknown_network_is_named():
    with pytest.raises(ValueError, match="'resnet19' is no model"):
        audits.load("resnet19")


def test_reproductions_in_small(monkeypatch, capsys, tmp_path):
    code, out, _ = run(monkeypatch, capsys, "reproduce", "all", "--tiny", "--out", str(tmp_path))
    assert code == 0
    for name, module in EXPERIMENTS.items():
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert report(record) in out, "the report is made from the record alone"
        if hasattr(module, "figure"):
            first = next(tmp_path.glob(f"{name}.[sp][vn]g")).read_bytes()
            assert write_figure(record, tmp_path).read_bytes() == first
    for line in json.loads((tmp_path / "fig2.json").read_text())["lines"]:
        for truth in line["truth"].values():
            assert min(line["values"]["bracket"], line["values"]["lipbound"]) >= truth
    groups = json.loads((tmp_path / "table1.json").read_text())["groups"]
    for group in groups.values():
        for method in ("lipbound", "bracket", "singla"):
            assert group["methods"][method]["least"] >= 1
        assert group["methods"]["farnia_10"]["most"] <= 1 + 1e-9
    for panel in json.loads((tmp_path / "fig1.json").read_text())["panels"]:
        assert panel["highest_sample"] <= panel["upper"]
    code, _, err = run(monkeypatch, capsys, "reproduce", "table9")
    assert (code, "unknown 'table9'" in err) == (2, True)
