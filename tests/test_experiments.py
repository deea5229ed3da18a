"""Experiments in small: what they write, and that a second run adds nothing."""

from __future__ import annotations

import sys

import pytest
from safetensors.torch import save_file

from lipbound.experiments import audits
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
