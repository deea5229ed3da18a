"""Time limits and Ctrl-C: commands end soon, with a sound result or with how to continue."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import run
from torch import nn

from lipbound import audit, runtime
from lipbound.network.lipsdp import gains, multipliers
from lipbound.paper import reproduce, trainings
from lipbound.paper.request import Request
from lipbound.report.page import page
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.runtime import OutOfTime, time_is_up, within


class Clock:
    """The clock of time limits, which the tests set."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=found.monotonic))
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3)
    )


def test_no_multipliers_are_fixed_after_the_time_limit(clock, monkeypatch):
    """The time passes while the multipliers are chosen; fixing those of a deep network is slow."""
    chosen = gains.optimised

    def late(*given, **options):
        result = chosen(*given, steps=1)
        clock.now = 61.0
        return result

    monkeypatch.setattr(gains, "optimised", late)
    monkeypatch.setattr(gains, "fixed", lambda *_: pytest.fail("fixed after the time limit"))
    model = network()
    found = audit(model, (1, 8, 8), effort="high", search=0, minutes=1.0)
    assert "the time limit passed before the proof was complete" in found.note
    assert "the time limit passed before the audit was complete" in found.note
    monkeypatch.undo()
    assert found.upper == pytest.approx(audit(model, (1, 8, 8), search=0).upper, rel=1e-12)


def test_an_elimination_ends_at_the_time_limit(clock, monkeypatch):
    """The time passes in the middle of fixing the multipliers."""
    symbols = []
    times = multipliers._times

    def slow(*given):
        symbols.append(1)
        clock.now = 61.0 if clock.now else 0.0
        return times(*given)

    chosen = gains.optimised

    def few(*given, **options):
        result = chosen(*given, steps=1)
        clock.now = 1.0
        symbols.clear()
        return result

    monkeypatch.setattr(gains, "optimised", few)
    monkeypatch.setattr(multipliers, "_times", slow)
    found = audit(network(), (1, 8, 8), effort="high", search=0, minutes=1.0)
    assert "the time limit passed before the proof was complete" in found.note
    assert len(symbols) < 10


def test_no_pictures_are_drawn_after_the_time_limit(clock):
    found = audit(network(), (1, 8, 8), search=0)
    assert "data:image/png" in page(found, "a network")
    with within(1.0):
        clock.now = 61.0
        assert "data:image/png" not in page(found, "a network")


@pytest.mark.parametrize("attack", ["pgd", "cw"])
def test_attacks_end_at_the_time_limit(clock, attack):
    calls = []

    def logits(x):
        calls.append(1)
        clock.now += 61.0
        return x.flatten(1)

    images, labels = torch.tensor([[[[0.1, 0.9]]]]), torch.tensor([1])
    attacks = {
        "pgd": partial(strongest_pgd, radius=0.1, step=0.1, iterations=500),
        "cw": partial(carlini_wagner, steps=500),
    }
    with within(1.0), pytest.raises(OutOfTime):
        attacks[attack](logits, images, labels)
    assert len(calls) < 200


def test_no_result_that_the_time_limit_cut_short_is_recorded(clock, monkeypatch, tmp_path):
    weights = tmp_path / "w"
    weights.write_bytes(b"weights")
    network = SimpleNamespace(path=weights)
    found: list[bool] = []

    def assess(*given, **options):
        found.append(time_is_up())
        clock.now = 61.0
        return {"upper": 7.0}

    monkeypatch.setattr(trainings, "assess", assess)
    images = torch.zeros(1, 1, 2, 2), torch.zeros(1)
    path = tmp_path / "assessed.jsonl"
    with within(1.0), pytest.raises(OutOfTime):
        trainings._looked_at(
            network, path, torch.device("cpu"), print, runtime.silent, images, trainings.Plan()
        )
    assert found == [False]
    assert not path.exists()


def test_a_reproduction_says_that_the_time_was_up(monkeypatch, tmp_path):
    def late(*given, **options):
        raise OutOfTime

    said: list[str] = []
    monkeypatch.setattr(trainings, "cell", late)
    request = Request(tiny=True, out=tmp_path, minutes=1.0, say=said.append)
    assert reproduce.run("table3", request)["cells"] == []
    assert said[-1] == "stopped (time limit); run the same command again to continue"


@pytest.mark.parametrize(
    ("arguments", "place", "also"),
    [
        (("reproduce", "table3", "--tiny"), "lipbound.paper.trainings.cell", True),
        (("reproduce", "fig1", "--tiny"), "lipbound.paper.fig1.compute", False),
        (("bench", "--network", "resnet18", "--out", "b.jsonl"),
         "lipbound.paper.speed.measure", True),
        (("bench", "--network", "resnet18"), "lipbound.paper.speed.measure", False),
        (("audit", "demo"), "lipbound.network.audits.layer_reports", False),
    ],
)  # fmt: skip
def test_ctrl_c_is_one_line_and_says_how_to_continue(
    arguments, place, also, monkeypatch, capsys, tmp_path
):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, interrupted)
    monkeypatch.setattr("lipbound.paper.speed.bandwidth", lambda device: 1.0)
    code, _, err = run(monkeypatch, capsys, *arguments)
    lines = [line for line in err.splitlines() if "interrupted" in line]
    rest = "; repeat the command to continue" if also else ""
    assert (code, lines) == (130, [f"lipbound: interrupted{rest}"])
    assert err.endswith(f"{lines[0]}\n")
    assert "Traceback" not in err
