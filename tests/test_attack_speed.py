"""The speed of the attack beside other libraries: the benchmark's record and the page's table."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import attack_speed
from lipbound.files import read
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.data import DATA
from lipbound.robust.models import MODELS
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import settings
from tools.pages import results

OLD = {
    "network": "wrn", "images": 10, "iterations": 2, "restarts": 1, "radius": 8 / 255,
    "precision": "tf32", "compiled": True, "seconds": {"lipbound": 1.0, "foolbox": 4.0},
    "images_per_second": {"lipbound": 10.0, "foolbox": 2.5},
    "accuracy": {"lipbound": 0.5, "foolbox": 0.5}, "device": "GPU", "torch": "2",
}  # fmt: skip


def timed(attack, compiled, benchmark, seconds):
    return {"attack": attack, "compiled": compiled, "cudnn_benchmark": benchmark,
            "seconds": seconds, "images_per_second": 10 / seconds, "accuracy": 0.5}  # fmt: skip


NEW = {
    **{name: value for name, value in OLD.items() if name not in ("compiled", "seconds")},
    "rows": [
        timed("lipbound", True, True, 1.0), timed("lipbound", False, True, 2.0),
        timed("foolbox", True, True, 3.0), timed("foolbox", False, True, 6.0),
        timed("pyautoattack", False, True, 9.0), timed("pyautoattack", False, False, 5.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", attack_speed.ATTACKS)
def test_a_row_names_its_flags_and_restores_them(name):
    pytest.importorskip(name)
    torch.manual_seed(0)
    model = MODELS["cnn"](inputs=1).eval()
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5)
    plan = Plan(radius=0.1, iterations=2, restarts=2, batch=3)
    before = torch.backends.cudnn.benchmark
    seen = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    for benchmark in (True, False):
        seen.clear()
        found = attack_speed.row(name, model, images, labels, plan, benchmark)
        assert (found["attack"], found["compiled"], found["cudnn_benchmark"]) == (
            name, False, benchmark,
        )  # fmt: skip
        assert seen.count(benchmark) > 4
        assert 0 <= found["accuracy"] <= 1 < found["images_per_second"] * 1e6
    handle.remove()
    assert torch.backends.cudnn.benchmark == before


def test_other_libraries_get_a_compiled_network(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled.append(model) or model)
    model, plan = MODELS["cnn"](inputs=1), Plan(precision="float16")
    assert attack_speed.rough(model, replace(plan, compile=True)).logits is model
    assert compiled == [model]
    assert attack_speed.rough(model, replace(plan, precision="tf32")) is model
    assert compiled == [model]


def test_the_benchmark_appends_a_record(monkeypatch, tmp_path):
    chosen = settings("at", "digits", epochs=1, attack=1, check_attack=1, certify=0.0)
    train(chosen, DATA["digits"](None), tmp_path / "run", device="cpu")
    out = tmp_path / "record.jsonl"
    arguments = ["--images", "4", "--iterations", "2", "--restarts", "1", "--batch", "2",
                 "--device", "cpu", "--only", "lipbound", "--compile", "no"]  # fmt: skip
    weights = str(tmp_path / "run" / "final.safetensors")
    monkeypatch.setattr(sys, "argv", ["attack_speed", weights, *arguments, "--out", str(out)])
    attack_speed.main()
    (record,) = read(out)
    flags = [(row["compiled"], row["cudnn_benchmark"]) for row in record["rows"]]
    assert flags == [(False, False), (False, True)]
    assert "| lipbound | no | yes |" in results.attack_table(record)


def test_the_page_reads_old_and_new_records():
    old, new = results.attack_table(OLD), results.attack_table(NEW)
    assert "| lipbound | yes | yes | 1.0 | 10.0 | 50.0 % |" in old
    assert "| foolbox | no | no | 4.0 | 2.5 | 50.0 % |" in old
    assert "lipbound is 4.0 times as fast as foolbox, the next one." in old
    assert "Only lipbound was compiled" in old
    assert "Only lipbound was compiled" not in new
    assert "Without compilation" not in old, "lipbound has no such row"
    assert "lipbound is 3.0 times as fast as foolbox, the next one." in new
    assert "Without compilation it is 2.5 times as fast as pyautoattack." in new
    assert "| pyautoattack | no | no | 5.0 |" in new
    assert results.attack_ratio(results.attack_rows(OLD)) == ("foolbox", 4.0)
