"""Experiments in small: what they write, and that a second run adds nothing."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import run, trained_cells
from safetensors.torch import save_file
from scipy.stats import t as student
from torch._dynamo.utils import counters

from benchmarks import audits
from lipbound.files import read, rewrite
from lipbound.paper import fig3, gaps, table1, table2, table3, table4, trainings
from lipbound.paper.gaps import difference
from lipbound.paper.reproduce import EXPERIMENTS, report, write_figure
from lipbound.paper.request import Request
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.data import DATA
from lipbound.robust.models import MODELS, ResNet
from lipbound.robust.training.assess import networks
from lipbound.robust.training.descent import Descent
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.networks import Networks
from lipbound.robust.training.run import penalty_of
from lipbound.robust.training.run_folder import lock
from lipbound.robust.training.settings import as_dict, settings


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
    with pytest.raises(ValueError, match="unknown model 'resnet19'"):
        audits.load("resnet19")


@pytest.mark.slow
def test_reproductions_in_small(monkeypatch, capsys, tmp_path):
    code, out, err = run(monkeypatch, capsys, "reproduce", "all", "--tiny", "--out", str(tmp_path))
    assert code == 0
    for label in table2.TINY.arms:
        assert f"\n{label}  epoch 1  loss " in err, "a training is seen"
    for name, module in EXPERIMENTS.items():
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert report(record) in out, "the report is made from the record alone"
        assert name == "fig1" or record["paper"], "what the paper has is beside it"
        if hasattr(module, "figure"):
            first = next(tmp_path.glob(f"{name}.[sp][vn]g")).read_bytes()
            assert write_figure(record, tmp_path).read_bytes() == first
    lines = json.loads((tmp_path / "fig2.json").read_text())["lines"]
    for line in lines:
        for truth in line["truth"].values():
            assert min(line["values"]["bracket"], line["values"]["lipbound"]) >= truth
    trained = [line["kernel"] for line in lines if line["of"] != "random"]
    assert trained == ["6×3×3", "6×3×3", "32×16×3×3"]
    groups = json.loads((tmp_path / "table1.json").read_text())["groups"]
    for group in groups.values():
        assert all(found["ms"] > 0 for found in group["methods"].values())
        for method in ("lipbound", "bracket", "singla"):
            assert group["methods"][method]["least"] >= 1
        assert group["methods"]["farnia_10"]["most"] <= 1 + 1e-9
    for panel in json.loads((tmp_path / "fig1.json").read_text())["panels"]:
        assert panel["highest_sample"] <= panel["upper"]
    code, _, err = run(monkeypatch, capsys, "reproduce", "table9")
    assert (code, "unknown 'table9'" in err) == (2, True)


@pytest.mark.parametrize("name", ["fig1", "fig2", "table1"])
def test_weights_without_a_kernel_to_show(monkeypatch, capsys, tmp_path, name):
    save_file({"head.weight": torch.ones(4, 4, 1, 1)}, tmp_path / "points.safetensors")
    arguments = ["--weights", str(tmp_path / "points.safetensors"), "--out", str(tmp_path)]
    code, out, err = run(monkeypatch, capsys, "reproduce", name, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "points.safetensors: " in err
    assert f"{name} needs " in err


def test_the_numbers_called_the_papers(shared):
    paper = json.loads((shared / "paper" / "tables.json").read_text())
    thesis = paper["figure3_jacobian_and_iterations"]["from the first author's thesis"]
    names = {
        "polygrid": "lipbound", "at+pm": "at_pm", "at+lipreg": "at_lipreg",
        "lipreg": "lipreg_without_at", "at+lipreg 0.0006": "at_lipreg_0.0006",
        "at+lipreg 0.001": "at_lipreg_0.0010",
    }  # fmt: skip

    kernels, cifar = paper["table1_kernels"], paper["table2_cifar"]
    for ours, theirs, entry in (
        *((rows, kernels[g.replace("×", "x")], lambda row: tuple(row[:3]))
          for g, rows in table1.PAPER.items()),
        *((arms, cifar[data], lambda row: tuple(mean for mean, _ in row))
          for data, arms in table2.PAPER.items()),
        (table3.PAPER, paper["table3_imagenet"], tuple),
        (table4.PAPER, paper["table4_networks"], lambda row: (row[0], row[2])),
        (fig3.PAPER[fig3.MEANS], thesis["mean_jacobian_norm"], float),
        (fig3.PAPER[fig3.STEPS], thesis["cw_0.8_accuracy_20_to_200_iterations"], tuple),
    ):  # fmt: skip
        assert ours == {name: entry(theirs[names.get(name, name)]) for name in ours}


def work(name, tier, out, **options):
    return trainings.work(name, tier, Request(out=out, **options))


TINY = replace(
    table2.TINY, common={"epochs": 1, "check": 20, "batch": 256}, images=8, jacobians=2,
    arms={"at": {"arm": "at"}, "at+lipreg 0.05": {"arm": "at+lipreg"}}, matched={},
)  # fmt: skip


@pytest.mark.slow
def test_cells_share_what_was_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tier = replace(TINY, common={**TINY.common, "compile": True}, arms={"at": {"arm": "at"}},
                   seeds={"at": 2}, plan=replace(TINY.plan, compile=True))  # fmt: skip
    graphs = []
    work("tiny", tier, tmp_path, device="cpu",
         say=lambda _: graphs.append(counters["stats"]["unique_graphs"]))  # fmt: skip
    second = graphs.index(graphs[-1])
    assert graphs[-1] > 2
    assert second < len(graphs) // 2, "the second cell was compiled anew"


@pytest.mark.slow
def test_cells_are_done_once_and_one_after_the_other(tmp_path):
    assert work("tiny", TINY, tmp_path, device="cpu", minutes=0) == []
    said = []
    claim = lock(tmp_path / "tiny" / "at-0.claim")
    (second,) = work("tiny", TINY, tmp_path, device="cpu", say=said.append)
    assert (second["label"], "another process runs this cell" in said) == (
        "at+lipreg 0.05",
        True,
    )
    claim.close()
    assert {r["label"] for r in work("tiny", TINY, tmp_path, device="cpu")} == set(TINY.arms)
    before = (tmp_path / "cells.jsonl").read_bytes()
    work("tiny", TINY, tmp_path, device="cpu")
    assert (tmp_path / "cells.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="no 'lipreg 1'; choose one of: at, at"):
        work("tiny", TINY, tmp_path, only=("lipreg 1",))


@pytest.mark.slow
def test_what_is_only_tried_is_not_attacked(tmp_path):
    tier = replace(TINY, tried=("at+lipreg 0.05",))
    cells = work("tiny", tier, tmp_path, device="cpu")
    assert ["pgd" in cell["final"] for cell in cells] == [True, False]
    assert cells[1]["final"]["log10_lipschitz"]["upper"] > 0
    assert cells[1]["epochs"][-1]["held_out_pgd_accuracy"] is not None
    assert {"pgd", "audit"} <= cells[0]["stages"].keys()
    assert sum(cells[0]["stages"].values()) <= cells[0]["seconds"]
    shown = table2.report({"cells": cells})
    assert table2.TRIED in shown
    assert fig3.from_cells(cells)["tiers"]["tiny"].keys() == {"at"}
    attacked = work("tiny", TINY, tmp_path, device="cpu")  # chosen, it is no longer only tried
    assert ["pgd" in cell["final"] for cell in attacked] == [True, True]


@pytest.mark.slow
def test_a_last_network_that_is_the_best_is_attacked_once(monkeypatch, tmp_path):
    def assess(network, *given, **options):
        done.append(network.path.stem)
        return real(network, *given, **options)

    done, real = [], trainings.assess
    monkeypatch.setattr(trainings, "assess", assess)
    (cell,) = work("tiny", TINY, tmp_path, device="cpu", only=("at",))  # one epoch
    assert done == ["final"]
    assert cell["best"] == {**cell["final"], "checkpoint": "best.safetensors"}
    best, final = networks(tmp_path / "tiny" / "at-0")
    assert trainings._same(best, final)
    [*best.model.buffers()][-2].add_(1e-3)
    assert not trainings._same(best, final)
    monkeypatch.setattr(trainings, "_same", lambda *networks: False)
    (tmp_path / "cells.jsonl").unlink()
    work("tiny", TINY, tmp_path, device="cpu", only=("at",))
    assert done == ["final", "best"], "and what was attacked before is not attacked again"


@pytest.mark.slow
def test_attacks_that_are_over_are_not_done_again(monkeypatch, tmp_path):
    done, tier = [], replace(TINY, also=(0.05,))

    def assess(network, *given, **options):
        if len(done) == 1 and not again:
            raise KeyboardInterrupt
        done.append(network.path.stem)
        return real(network, *given, **options)

    real, again = trainings.assess, False
    monkeypatch.setattr(trainings, "assess", assess)
    with pytest.raises(KeyboardInterrupt):
        work("tiny", tier, tmp_path, device="cpu", only=("at",))
    again = True
    (cell,) = work("tiny", tier, tmp_path, device="cpu", only=("at",))
    assert done == ["final", "final"]
    assert all("pgd" in cell[kind] for kind in ("best", "final"))
    assert cell["training_seconds"] > 0


@pytest.mark.parametrize("batchnorm", ["apart", "folded"])
@pytest.mark.parametrize("method", ["polygrid", "lipbound"])
def test_an_equal_decay_pulls_each_layer_as_much_as_the_penalty(method, batchnorm):
    """The step of at+lipreg, and that of at with the decay of one layer, along that layer."""
    data = DATA["digits"](None)
    at = settings("at", "digits", attack=1, batch=8, lr=0.1,
                  momentum=0.0, precision="float64", weight_decay=0.01)  # fmt: skip
    changes = {"arm": "at+lipreg", "penalty": method, "penalty_weight": 0.5, "batchnorm": batchnorm}
    penalized = replace(at, **changes)
    images, labels = torch.rand(8, *data.input_shape).double(), torch.arange(8)

    def stepped(chosen):
        torch.manual_seed(0)
        made = Networks(chosen, data, Team(torch.device("cpu")))
        before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
        penalty = penalty_of(chosen, made.model, data)
        pulls = trainings.equal_decays(penalty) if penalty else {}
        Descent(made, penalty).take([(images, labels)], chosen.lr, 0.0)
        after = dict(made.model.named_parameters())
        return (
            {n: float((p * (after[n].detach() - p)).sum()) for n, p in before.items()},
            pulls,
            before,
        )

    moved, pulls, before = stepped(penalized)
    assert len(pulls) > 3
    for name in pulls:
        decayed, *_ = stepped(replace(at, weight_decay=at.weight_decay + pulls[name]))
        assert moved[name] == pytest.approx(decayed[name], rel=1e-5, abs=1e-7)
        size = float(before[name].square().sum())
        assert pulls[name] == pytest.approx(0.5 / size, rel=1e-4), "homogeneous of degree 1"


def matched_cells(monkeypatch):
    """Stand in for the trainings; return their settings and a tier whose last arm is matched."""
    seen = []

    def cell(tier, chosen, data, where, **options):
        seen.append((chosen.arm, chosen.seed, chosen.weight_decay))
        pulls = {"equal_decay": {"mean": 0.00123456}} if chosen.penalty else {}
        return {"settings": as_dict(chosen), "final": {"pgd": {}}, **pulls}

    monkeypatch.setattr(trainings, "cell", cell)
    label, source = next(iter(table2.TINY.matched.items()))
    return seen, replace(table2.TINY, seeds={label: 2}), label, source


def test_a_matched_arm_takes_its_decay_from_a_record(monkeypatch, tmp_path):
    seen, tier, label, source = matched_cells(monkeypatch)
    with pytest.raises(ValueError, match=f"run it first, with --only '{re.escape(source)}'$"):
        work("tiny", tier, tmp_path, device="cpu", only=(label,))
    own = tier.settings(label, 0).weight_decay
    work("tiny", tier, tmp_path, device="cpu")
    assert seen[2:] == [("at", seed, pytest.approx(own + 0.00123, abs=5e-6)) for seed in (0, 1)]
    assert seen[2][2] == float(f"{seen[2][2]:.3g}")
    found = work("tiny", tier, tmp_path, device="cpu")
    assert len(seen) == len(found) == 4, "nothing is trained again"
    assert f"`{label}` is `at` with weight_decay {seen[2][2]:g}" in table2._arms(
        tier, {label: [cell for cell in found if cell["label"] == label]}, balls=False
    )
    rewrite(tmp_path / "cells.jsonl", [{**cell, "equal_decay": {"mean": 1.0}} for cell in found])
    with pytest.raises(ValueError, match=f"{label}, seed 0 with other settings"):
        work("tiny", tier, tmp_path, device="cpu")


def test_a_matched_arm_waits_for_the_process_that_trains_its_source(monkeypatch, tmp_path):
    seen, tier, label, source = matched_cells(monkeypatch)
    said = []
    with lock(tmp_path / "tiny" / f"{source.replace(' ', '-')}-0.claim"):
        work("tiny", tier, tmp_path, device="cpu", say=said.append)
    assert [arm for arm, *_ in seen] == ["at"]
    assert f"tier tiny, {label}, seed 1 waits for {source}, seed 0" in said
    work("tiny", tier, tmp_path, device="cpu")
    assert [arm for arm, *_ in seen] == ["at", "at+lipreg", "at", "at"]


def test_of_rivals_the_best_on_held_out_images_is_attacked(monkeypatch, tmp_path):
    """Not before all are trained; and a rival that was attacked is not trained again."""
    seen, peaks = [], {5e-4: 0.3, 1e-3: 0.5, 2e-3: 0.4}

    def cell(tier, chosen, data, where, *, attacked, **options):
        seen.append((chosen.weight_decay, attacked))
        epochs = [{"held_out_pgd_accuracy": peaks[chosen.weight_decay]}]
        return {"settings": as_dict(chosen), "final": {"pgd": {}} if attacked else {},
                "epochs": epochs}  # fmt: skip

    monkeypatch.setattr(trainings, "cell", cell)
    tier = replace(TINY, arms=table2.TUNED, seeds={}, rivals=(*table2.TUNED,))
    last = [*table2.TUNED][-1]
    with lock(tmp_path / "tiny" / f"{last.replace(' ', '-')}-0.claim"):
        work("tiny", tier, tmp_path, device="cpu")
    assert seen == [(5e-4, False), (1e-3, False)]
    for _ in range(2):
        found = work("tiny", tier, tmp_path, device="cpu")
    assert seen[2:] == [(2e-3, False), (1e-3, True)]
    assert [cell["label"] for cell in found if "pgd" in cell["final"]] == ["at tuned 0.001"]


@pytest.mark.parametrize("reason", ["time limit", "interrupted"])
def test_a_training_that_was_stopped_is_no_cell(monkeypatch, tmp_path, reason):
    monkeypatch.setattr(trainings, "train", lambda *given, **options: {"stopped": reason})
    said = []
    ends = pytest.raises(KeyboardInterrupt) if reason == "interrupted" else nullcontext()
    with ends:
        assert work("tiny", TINY, tmp_path, device="cpu", say=said.append) == []
    stopped = "stopped (time limit); run the same command again to continue"
    assert (said[-1] == stopped) == (reason == "time limit")  # after Ctrl-C the command says it
    assert not (tmp_path / "cells.jsonl").exists()


def test_intervals_count_seeds_that_disagree():
    def cells(*shares):
        return [
            {"seed": seed, "final": {"clean": accuracy(torch.arange(1000) % 1000 < right)}}
            for seed, right in enumerate(shares)
        ]

    column, none = gaps.COLUMNS["clean"], cells(500, 500, 500)
    agree = difference(cells(550, 550, 550), none, column)
    differ = difference(cells(450, 550, 650), none, column)
    one = difference(cells(550), none, column)
    assert agree["difference"] == pytest.approx(differ["difference"]) == pytest.approx(0.05)
    assert differ["high"] - differ["low"] == pytest.approx(2 * 4.3 * 0.1 / 3**0.5, rel=0.1)
    # 5 % of 1,000 images: √(0.05 · 0.95 / 1000) = 0.0069
    assert agree["high"] - agree["low"] == pytest.approx(2 * 1.96 * 0.0069, rel=0.01)
    assert one["high"] == pytest.approx(agree["high"])


@pytest.mark.parametrize(
    ("table", "variance", "degrees"),
    [
        # Mean squares of images, seeds and both: 64.5, 25/6, 1/6.
        ([[0, 10, 1], [1, 12, 3]], 68.5 / 6, 68.5**2 / (64.5**2 / 2 + (25 / 6) ** 2 + 1 / 72)),
        # 13/6, 0, 1/2: what is in the seeds is no more than what is in both.
        ([[0, 3, 1], [1, 2, 1]], 13 / 36, (13 / 6) ** 2 / ((13 / 6) ** 2 / 2 + 1 / 8)),
        # 7/6, 32/3, 1/6: no narrower than the seeds' means 1/3 and 3 alone.
        ([[0, 0, 1], [3, 2, 4]], 16 / 9, 1),
        # 0, 0, 4: images that the seeds disagree on.
        ([[1, -1], [-1, 1]], 1, 1),
        ([[0, 1, 2]], 1 / 3, 2),
    ],
)
def test_intervals_by_hand(table, variance, degrees):
    expected = student.ppf(0.975, degrees) * variance**0.5
    assert gaps._reach(torch.tensor(table).double()) == pytest.approx(expected)


def test_intervals_of_too_little():
    assert gaps._reach(torch.ones(3, 1).double()) == math.inf
    assert gaps._reach(torch.ones(3, 5).double()) == 0


def test_a_record_of_other_settings_is_not_taken_for_the_tiers(tmp_path):
    tier = replace(TINY, arms={"at": {"arm": "at"}})
    work("tiny", tier, tmp_path, device="cpu")
    assert len(work("tiny", tier, tmp_path, device="cpu")) == 1
    with pytest.raises(ValueError, match="with other settings"):
        work("tiny", replace(tier, arms={"at": {"arm": "at", "lr": 0.01}}), tmp_path, device="cpu")


def test_differences_are_of_the_same_images_and_seeds():
    def cell(label, seed, *right):
        return {"label": label, "seed": seed, "final": {"clean": accuracy(torch.tensor(right))}}

    at = [cell("at", 0, True, False, False, True), cell("at", 1, True, True, False, False)]
    other = [cell("x", 1, True, True, True, False), cell("x", 2, False, False, False, False)]
    gap = difference(other, at, gaps.COLUMNS["clean"])
    assert (gap["difference"], gap["seeds"]) == (0.25, [0.25])
    assert gap["low"] < 0.25 < gap["high"]
    assert difference(other[1:], at, gaps.COLUMNS["clean"]) is None


def test_only_enough_seeds_make_a_difference_bold():
    found = {"difference": 0.02, "low": 0.01, "high": 0.03}
    assert table2.gap({**found, "seeds": [0.02] * 3}) == "**+2.0 [+1.0, +3.0]**"
    assert table2.gap({**found, "seeds": [0.02] * 2}) == "+2.0 [+1.0, +3.0]"


def test_a_control_is_of_arms_that_share_its_changes():
    found = {"clean": accuracy(torch.arange(10) < 5), "pgd": accuracy(torch.arange(10) < 3)}
    arms = {
        "at": {"arm": "at"},
        "at ema": {"arm": "at", "ema": 0.9, "penalty": ""},
        "at decay": {"arm": "at", "weight_decay": 0.1},
        "at+lipreg": {"arm": "at+lipreg", "milestones": [1]},
        "ours": {"arm": "at+spectral", "ema": 0.9, "penalty": ""},
        "both": {"arm": "at+spectral", "ema": 0.9, "penalty": "", "weight_decay": 0.1},
    }
    cells = [
        {"label": label, "seed": 0, "settings": {**chosen, "seed": 0}, "final": found}
        for label, chosen in arms.items()
    ]
    pairs = [pair for pair in gaps.against(cells) if pair[1] != "at"]
    assert sorted(pairs) == [("both", "at decay"), ("both", "at ema"), ("ours", "at ema")]


def test_a_report_has_its_arms_in_order_and_the_papers_numbers_of_its_data():
    shown = table2.report({"cells": trained_cells()})
    top, few, full, alone = shown.split("### Tier ")
    assert "| cifar10 | at+lipreg | 80.8 | 45.7 | 54.7 | 43.8 |" in top
    assert few.startswith("A\n")
    assert "| at+lipreg 0.008 − at | **+10.0 [" in few
    assert "| *the paper's* | -5.6 | +3.1 | +7.0 | +10.4 |\n" in few
    assert "| *the paper's* | -3.9 | +1.6 | +3.1 | +4.3 |\n" in full
    assert few.count("*the paper's*") == 1, "the paper has no such arm, nor such a weight"
    assert few.index("| at | final") < few.index("| at+lipreg 0.008 | final")
    table, tried = few.split(table2.TRIED)
    assert "| at+lipreg 0.1 |" not in table
    assert "| at+lipreg 0.1 | 70.0 |  |  | 50.0 | 3.0 | 1.00 |" in tried
    assert table2.TRIED not in full
    theirs = "| *the paper's at* |  |  | 86.4 | 42.6 | 47.7 | 33.4 |  |"
    assert theirs in alone, "beside what has no AT of its own"
    assert theirs not in few


def test_a_tier_of_which_arms_were_only_tried_has_a_report():
    tried = [cell for cell in trained_cells() if cell["label"] == "at+lipreg 0.1"]
    shown = table2.report({"cells": tried})
    assert "| at+lipreg 0.1 | 70.0 |  |  | 50.0 | 3.0 | 1.00 |" in shown


def test_first_seeds_come_first():
    tier = replace(TINY, seeds={"at": 2})
    assert list(tier.cells()) == [("at", 0), ("at+lipreg 0.05", 0), ("at", 1)]
    for tier in table2.TIERS.values():
        for label, seed in tier.cells():
            assert tier.settings(label, seed).seed == seed
