"""Experiments in small: what they write, and that a second run adds nothing."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import run
from safetensors.torch import save_file
from scipy.stats import t as student
from torch._dynamo.utils import counters

from benchmarks import audits
from lipbound.files import read
from lipbound.paper import fig3, gaps, table1, table2, table3, table4, trainings
from lipbound.paper.gaps import difference
from lipbound.paper.reproduce import EXPERIMENTS, report, write_figure
from lipbound.paper.trainings import work
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.models import MODELS, ResNet
from lipbound.robust.training.assess import networks
from lipbound.robust.training.run_folder import lock


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


TINY = replace(table2.TINY, common={"epochs": 1, "check": 20, "batch": 256}, images=8, jacobians=2)


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
    with pytest.raises(ValueError, match="no 'lipreg 1'; there are at, at"):
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


@pytest.mark.parametrize("reason", ["time limit", "interrupted"])
def test_a_training_that_was_stopped_is_no_cell(monkeypatch, tmp_path, reason):
    monkeypatch.setattr(trainings, "train", lambda *given, **options: {"stopped": reason})
    said = []
    ends = pytest.raises(KeyboardInterrupt) if reason == "interrupted" else nullcontext()
    with ends:
        assert work("tiny", TINY, tmp_path, device="cpu", say=said.append) == []
    assert said[-1] == f"stopped ({reason}); run the same command again to continue"
    assert not (tmp_path / "cells.jsonl").exists()


def test_intervals_count_seeds_that_disagree():
    def cells(*shares):
        return [
            {"seed": seed, "final": {"clean": accuracy(torch.arange(1000) % 1000 < right)}}
            for seed, right in enumerate(shares)
        ]

    column, none = gaps.COLUMNS["clean"], cells(500, 500, 500)
    agree = difference(cells(550, 550, 550), none, "final", column)
    differ = difference(cells(450, 550, 650), none, "final", column)
    one = difference(cells(550), none, "final", column)
    assert agree["difference"] == pytest.approx(differ["difference"]) == pytest.approx(0.05)
    assert differ["high"] - differ["low"] == pytest.approx(2 * 4.3 * 0.1 / 3**0.5, rel=0.1)
    # 5 % of 1,000 images: √(0.05 · 0.95 / 1000) = 0.0069
    assert agree["high"] - agree["low"] == pytest.approx(2 * 1.96 * 0.0069, rel=0.01)
    assert one["high"] == pytest.approx(agree["high"])
    assert gaps.verdict(one, 0.03) == "fewer than 3 seeds, so no verdict"
    # One seed with a known deviation over seeds of 3 points and Student's t of 4 degrees, 2.776.
    wide = difference(cells(550), none, "final", column, gaps.Deviation(0.03, 4))
    images, seeds = (1.96 * 0.0069) ** 2, (2.776 * 0.03) ** 2
    assert wide["high"] - wide["difference"] == pytest.approx((images + seeds) ** 0.5, rel=1e-3)
    known = difference(cells(450, 550, 650), none, "final", column, gaps.Deviation(9.0, 4))
    assert known == differ, "several seeds have a deviation of their own"


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
    gap = difference(other, at, "final", gaps.COLUMNS["clean"])
    assert (gap["difference"], gap["seeds"]) == (0.25, [0.25])
    assert gap["low"] < 0.25 < gap["high"]
    assert difference(other[1:], at, "final", gaps.COLUMNS["clean"]) is None


def with_accuracies(label, seed, clean, everywhere, pgd=50, **chosen):
    """A cell with this many of 100 attacked images right, and this accuracy on all."""
    return {
        "label": label,
        "seed": seed,
        "settings": {"arm": label, "data": "packed-cifar10", "attack": 10, **chosen},
        "training": {"final": {"test_accuracy": everywhere}},
        "final": {
            "clean": accuracy(torch.arange(100) < clean),
            "pgd": accuracy(torch.arange(100) < pgd),
        },
    }


def test_intervals_on_all_test_images_count_images_and_seeds():
    one = [with_accuracies("at", seed, 50, 0.5) for seed in range(3)]
    two = [with_accuracies("x", seed, 60, right) for seed, right in ((2, 0.6), (0, 0.7), (3, 0.0))]
    found = gaps.whole_difference(two, one, "final", "clean (all)")
    assert found["seeds"] == pytest.approx([0.1, 0.2])
    # The seeds' deviation is 0.0707, that of their mean 0.05; Student's t of one degree is 12.706.
    # Of 100 images 10 differ by 1: variance 0.09·100/99, over 10,000 images; t of 99 degrees 1.984.
    seeds, images = 12.706 * 0.05, 1.984 * (0.09 * 100 / 99 / 10_000) ** 0.5
    assert found["high"] - found["difference"] == pytest.approx(
        (seeds**2 + images**2) ** 0.5, rel=1e-3
    )
    alike = [with_accuracies("x", seed, 60, 0.6) for seed in range(3)]
    same = gaps.whole_difference(alike, one, "final", "clean (all)")
    assert same["high"] - same["difference"] == pytest.approx(images, rel=1e-3), "images remain"
    single = gaps.whole_difference(two[:1], one, "final", "clean (all)")
    assert table2.gap(single) == "+10.0", "one seed alone has no interval"
    known = gaps.whole_difference(two[:1], one, "final", "clean (all)", gaps.Deviation(0.05, 1))
    assert known["high"] - known["difference"] == pytest.approx(
        (seeds**2 + images**2) ** 0.5, rel=1e-3
    )
    assert gaps.whole_difference(two[2:], one, "final", "clean (all)") is None
    assert gaps.whole_difference(two, one, "final", "PGD-10 (all)") is None
    for cell in (*one, *two):
        del cell["final"]
    unknown = gaps.whole_difference(two, one, "final", "clean (all)")
    assert table2.gap(unknown) == "+15.0", "nothing is known of the images"


def test_the_deviation_over_seeds_is_pooled_over_arms_with_three_seeds():
    def tier(**arms):
        return [
            with_accuracies(label, seed, clean, clean / 100, attack=0 if label == "off" else 10)
            for label, accuracies in {"at": (50, 50, 50), **arms}.items()
            for seed, clean in enumerate(accuracies)
        ]

    few = tier(x=(50, 51, 52), y=(50, 53, 56), z=(10, 90), off=(0, 50, 99))  # deviations 1 and 3
    other = tier(x=(54, 50, 52))  # deviation 2
    found = gaps.pooled([few, other])
    # (2·1 + 2·9 + 2·4) / 6 points²; two of three differences share their reference: correlation ½.
    for name in ("clean", "clean (all)"):
        assert found[name].value == pytest.approx(0.01 * (28 / 6) ** 0.5)
        assert found[name].degrees == pytest.approx(6**2 / (4 * 1.25 + 2))
    assert found["PGD"].value == 0
    assert "PGD-10 (all)" not in found
    assert gaps.pooled([tier(x=(50, 60))]) == {}


def test_the_dose_is_the_papers_for_the_papers_training():
    def cell(steps, **chosen):
        return {"settings": {"data": "packed-cifar10", **chosen}, "training": {"steps": steps}}

    paper = {"epochs": 200, "lr": 0.1, "schedule": "steps", "milestones": [60, 120, 160]}
    assert gaps.dose(cell(50_000, **paper)) == pytest.approx(1)
    assert gaps.dose(cell(5_000, **paper)) == pytest.approx(0.1)
    # 250 steps an epoch: 60 · 0.1 + 60 · 0.01 + 40 · 0.001 + 40 · 0.0001 = 6.644, in all 1661.
    assert gaps.dose(cell(1661, lr=0.1, schedule="constant")) == pytest.approx(0.1)
    # One cycle's mean is half of its highest rate.
    assert gaps.dose(cell(16_610, lr=0.2, schedule="onecycle")) == pytest.approx(1, rel=1e-3)
    # ImageNet: 312 steps an epoch, (30 · 0.1 + 30 · 0.01 + 20 · 0.001) · 312 = 1035.84.
    other = cell(10_358, lr=0.01, schedule="constant", data="packed-imagenette64")
    assert gaps.dose(other) == pytest.approx(0.1, rel=1e-4)
    assert gaps.dose(cell(10, data="digits")) is None


def test_doses_of_the_committed_trainings():
    records = Path(__file__).parents[2] / "benchmarks" / "records"
    cells = [*trainings.latest(read(records / "table2.jsonl")).values()]
    cells += trainings.latest(read(records / "table3.jsonl")).values()
    doses = {cell["tier"]: round(gaps.dose(cell), 3) for cell in cells}
    assert doses == {
        "A0": 0.06, "A": 0.187, "O": 0.184, "B100": 0.345, "B": 0.69, "C": 0.384,
        "imagenette": 0.012,
    }  # fmt: skip
    ratio = gaps.jacobian_ratio(*(
        [cell for cell in cells if (cell["tier"], cell["label"]) == ("B", label)]
        for label in ("at+lipreg 0.008", "at")
    ))  # fmt: skip
    assert ratio == pytest.approx(3.907 / 6.165, rel=1e-3)


def test_only_enough_seeds_make_a_difference_bold():
    found = {"difference": 0.02, "low": 0.01, "high": 0.03}
    assert table2.gap({**found, "seeds": [0.02] * 3}) == "**+2.0 [+1.0, +3.0]**"
    assert table2.gap({**found, "seeds": [0.02] * 2}) == "+2.0 [+1.0, +3.0]"


def test_curves_that_were_counted_otherwise_are_named():
    arm = {"clean": 0.6, "norms": [1.0, 2.0], "against_iterations": {"0": 0.63, "10": 0.5}}
    tiers = {"A0": {"at": {**arm, "margin": 0.1}}, "B": {"at": {**arm, "margin": None}}}
    shown = fig3.report({"tiers": tiers})
    assert "at of tier A0 (margin 0.1, up to 3.0 points above clean at the start)." in shown
    assert "tier B (" not in shown
    assert "| B | at | 1.50 |" in shown
    assert "too high" not in fig3.report({"tiers": {"B": tiers["B"]}})


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


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.03, "same direction as the paper's, smaller"),
        (0.01, 0.12, "same direction as the paper's, similar size"),
        (0.12, 0.14, "same direction as the paper's, larger"),
        (-0.03, -0.01, "opposite to the paper's direction"),
        (-0.02, 0.01, "the interval contains zero, and not the paper's value"),
        (-0.02, 0.11, "the interval contains zero, and also the paper's value"),
    ],
)
def test_what_a_difference_says_of_the_papers(low, high, said):
    assert gaps.verdict({"low": low, "high": high, "seeds": [0] * 3}, 0.1) == said
    assert gaps.verdict({"low": -high, "high": -low, "seeds": [0] * 3}, -0.1) == said


def test_a_report_has_its_arms_in_order_and_the_papers_numbers_of_its_data():
    def cell(tier, label, right, data, seed):
        found = {
            "clean": accuracy(torch.arange(100) < right),
            **({} if label == "at+lipreg 0.1" else {"pgd": accuracy(torch.arange(100) < 9)}),
            "log10_lipschitz": {"upper": 3.0},
            "jacobian_norms": {"quantiles": [1.0] * 7, "all": [1.0], "mean": 1.0 + (label == "at")},
        }
        epochs = [{"held_out_accuracy": 0.7, "held_out_pgd_accuracy": None, "train_accuracy": 0.5}]
        return {
            "tier": tier, "label": label, "seed": seed, "best": found, "final": found,
            "device": "cpu", "epochs": epochs, "training_seconds": 1.0,
            "training": {"final": {"test_accuracy": (right + seed) / 100}, "steps": 1661},
            "settings": {"data": f"packed-{data}", "arm": label.split()[0],
                         "penalty_weight": float(label.split()[1]) if "+" in label else 0.008,
                         "schedule": "constant", "lr": 0.1 if tier == "A" else 0.5},
        }  # fmt: skip

    wanted = [
        ("B100", "at+lipreg 0.008", 45, "cifar100"), ("B100", "at", 50, "cifar100"),
        ("A", "at decay 2e-3", 70, "cifar10"), ("A", "at+lipreg 0.008", 60, "cifar10"),
        ("A", "at+lipreg 0.1", 60, "cifar10"), ("A", "at", 50, "cifar10"),
        ("C", "ours awp 0.005", 40, "cifar10"),
    ]  # fmt: skip
    cells = [cell(*each, seed) for each in wanted for seed in range(3)]
    shown = table2.report({"cells": cells})
    top, few, full, alone = shown.split("### Tier ")
    lower, higher = (
        "| A (cifar10), 3 seeds | 0.100 | 0.50 |",
        "| B100 (cifar100), 3 seeds | 0.500 |",
    )
    assert (
        top.index(lower)
        < top.index(higher)
        < top.index("| the paper (cifar10) | 1 | 0.65 |  | -5.6 | +3.1 | +10.4 |")
    )
    assert "C (cifar10)" not in top, "it has no AT to compare with"
    assert few.startswith("A\n")
    assert "| *the paper's* | -5.6 | +3.1 | +7.0 | +10.4 |  | -5.6 | +3.1 |" in few
    assert "| *the paper's* | -3.9 | +1.6 | +3.1 | +4.3 |  | -3.9 | +1.6 |" in full
    assert few.index("| at | final") < few.index("| at+lipreg 0.008 | final")
    said = "`at+lipreg 0.008` beside the paper's, in this tier's setting. clean, clean (all): "
    assert f"{said}opposite to the paper's direction; PGD: the interval contains zero" in few
    assert "setting. clean: same direction as the paper's, similar size; " in full
    assert "C&W 0.6:" not in few + full, "no network was attacked so"
    assert "`at decay 2e-3` beside" not in few, "the paper has no such arm"
    assert "`at+lipreg 0.1` beside" not in few, "nor such a weight"
    table, tried = few.split(table2.TRIED)
    assert "| at+lipreg 0.1 |" not in table
    assert "| at+lipreg 0.1 | 70.0 |  | 50.0 | 3.0 | 1.00 |" in tried
    assert table2.TRIED not in full
    theirs = "| *the paper's at* |  |  | 86.4 | 42.6 | 47.7 | 33.4 |  |  |  |"
    assert theirs in alone, "beside what has no AT of its own"
    assert theirs not in few


def test_first_seeds_come_first():
    tier = replace(TINY, seeds={"at": 2})
    assert list(tier.cells()) == [("at", 0), ("at+lipreg 0.05", 0), ("at", 1)]
    for tier in table2.TIERS.values():
        for label, seed in tier.cells():
            assert tier.settings(label, seed).seed == seed
