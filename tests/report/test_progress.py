"""Progress without a terminal, with a clock that the tests set."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch import nn

from lipbound.report import progress, terminal
from lipbound.report.progress import Shown
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.pgd_restarts import strongest_pgd


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown():
    lines: list[str] = []
    clock = Clock()
    made = Shown(clock, lines.append, watched=False)
    return made, clock, lines


def test_lines_come_at_most_every_thirty_seconds(shown):
    made, clock, lines = shown
    for item in made(range(100), "layers"):
        clock.now = 10.0 * item
    times = [10.0 * (1 + int(line.split()[2])) - 10 for line in lines]  # items done, plus this one
    assert len(lines) == 33
    assert all(after - before >= 30 for before, after in pairwise(times))
    assert lines[0] == "lipbound: layers: 4 of 100 after 30 s"
    assert lines[-1] == "lipbound: layers: 100 of 100 after 16 min 30 s"


def test_a_line_names_all_stages_and_their_times(shown):
    made, clock, lines = shown
    for _ in made(["a"], "networks"):
        clock.now = 4000.0
        training = made.begin("steps of at")
        clock.now = 4020.0
        made.move(training, 1200, 9000, "loss 0.5")
        made.look()  # too early for another line
        clock.now = 4055.0
        made.look()
        made.end(training)
    assert lines == [
        "lipbound: networks: 0 of 1 after 1 h 07 min; steps of at: 1,200 of 9,000 after 20 s "
        "(loss 0.5)",
        "lipbound: networks: 0 of 1 after 1 h 07 min; steps of at: 1,200 of 9,000 after 55 s "
        "(loss 0.5)",
    ]
    assert not made.stages


def test_short_stages_one_after_the_other_are_shown_too(shown):
    made, clock, lines = shown
    for number in range(8):
        for _ in made([number], f"part {number}"):
            clock.now += 9.0
    assert [line.split(":")[1] for line in lines] == [" part 3", " part 7"]


def test_a_long_item_is_seen_by_the_second_thread(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 1e-3)
    monkeypatch.setattr(progress, "LOOK", 1e-3)
    made, said = Shown(), ""
    for item in made([1, 2], "layers"):
        while item == 2 and "layers: 1 of 2 after 0 s\n" not in said:
            said += capsys.readouterr().err
    assert said.startswith("lipbound: layers: ")


def test_an_error_ends_the_stages(shown):
    made, clock, lines = shown
    items = iter(made([1, 2], "layers"))
    next(items)
    made.close()
    clock.now = 100.0
    made.look()
    assert not lines
    assert list(items) == [2]  # the generator of a stage that was ended goes on quietly


def test_bars_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    made = Shown(watched=False)
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=open("/dev/null", "w")))  # noqa: SIM115
    for _ in made([1, 2], "layers"):
        assert made.bars.tasks[0].total == 2
        for _ in made([3], "[parts]"):
            assert made.bars.tasks[1].description == "[parts]"
    assert made.bars is None


def test_a_training_without_epochs_is_shown(shown, monkeypatch):
    made, clock, lines = shown
    monkeypatch.setattr(terminal, "bar", made)
    with terminal.TrainingView("at") as view:
        for step in range(4):
            clock.now = 15.0 * step
            view.step(step, 50, 2.0)
        view.epoch({"epoch": 1, "loss": 1.5, "held_out_accuracy": 0.5,
                    "held_out_pgd_accuracy": None, "log10_product": 2.0})  # fmt: skip
    assert lines[0] == "lipbound: steps of at: 2 of 50 after 30 s (loss 2.000)"
    assert lines[1] == "at  epoch 1  loss 1.500  clean 0.500  product 10^2.00"


class Counting:
    """Keeps what each stage counted."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}

    def __call__(self, items, what):
        seen = self.found.setdefault(what, [len(items), 0])
        for item in items:
            yield item
            seen[1] += 1


def test_attacks_count_what_is_done():
    torch.manual_seed(0)
    network, images = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.rand(6, 1, 2, 2)
    labels = network(images).argmax(1)
    labels[0] = 1 - labels[0]  # broken at once, in the first of its restarts
    counts = Counting()
    strongest_pgd(network, images, labels, radius=1e-4, step=1e-4, iterations=3, restarts=4,
                  width=4, progress=counts)  # fmt: skip
    assert counts.found == {"restarts of images": [24, 24]}
    carlini_wagner(network, images, labels, steps=5, searches=2, progress=counts)
    assert all(total == done for total, done in counts.found.values())
    assert {"search 1 of 2", "search 2 of 2"} <= counts.found.keys()
