"""The statistics and tables that the results pages add to the package's reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import trained_cells

from lipbound.files import read
from lipbound.paper import fig3, gaps, table2, table3, trainings
from lipbound.robust.attacks.evaluate import accuracy
from tools.pages import differences, fits, robustness


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
    found = differences.whole_difference(two, one, "clean (all)")
    assert found["seeds"] == pytest.approx([0.1, 0.2])
    # The seeds' deviation is 0.0707, that of their mean 0.05; Student's t of one degree is 12.706.
    # Of 100 images 10 differ by 1: variance 0.09·100/99, over 10,000 images; t of 99 degrees 1.984.
    seeds, images = 12.706 * 0.05, 1.984 * (0.09 * 100 / 99 / 10_000) ** 0.5
    assert found["high"] - found["difference"] == pytest.approx(
        (seeds**2 + images**2) ** 0.5, rel=1e-3
    )
    alike = [with_accuracies("x", seed, 60, 0.6) for seed in range(3)]
    same = differences.whole_difference(alike, one, "clean (all)")
    assert same["high"] - same["difference"] == pytest.approx(images, rel=1e-3), "images remain"
    single = differences.whole_difference(two[:1], one, "clean (all)")
    assert table2.gap(single) == "+10.0", "one seed alone has no interval"
    known = differences.whole_difference(
        two[:1], one, "clean (all)", differences.Deviation(0.05, 1)
    )
    assert known["high"] - known["difference"] == pytest.approx(
        (seeds**2 + images**2) ** 0.5, rel=1e-3
    )
    assert differences.whole_difference(two[2:], one, "clean (all)") is None
    assert differences.whole_difference(two, one, "PGD-10 (all)") is None
    for cell in (*one, *two):
        del cell["final"]
    unknown = differences.whole_difference(two, one, "clean (all)")
    assert table2.gap(unknown) == "+15.0", "nothing is known of the images"


def test_recorded_outcomes_on_all_test_images_give_their_own_interval():
    def cell(label, *right):
        test = {"clean": accuracy(torch.tensor(right))}
        share = sum(right) / len(right)
        return {
            "label": label,
            "seed": 0,
            "training": {"final": {"test_accuracy": share, "test": test}},
            "final": {},
        }

    one = [cell("at", True, False, False, True)]
    two = [cell("x", True, True, True, True)]
    found = differences.whole_difference(two, one, "clean (all)")
    gap = torch.tensor([0.0, 1, 1, 0], dtype=torch.float64)
    reach = gaps.student(float(gap.var()) / 4, 3)
    assert found["difference"] == 0.5
    assert found["high"] == pytest.approx(0.5 + reach)
    wider = differences.whole_difference(two, one, "clean (all)", differences.Deviation(0.1, 2))
    assert wider["high"] > found["high"], "one seed says nothing about others"
    del one[0]["training"]["final"]["test"]
    assert table2.gap(differences.whole_difference(two, one, "clean (all)")) == "+50.0"


def test_the_deviation_over_seeds_is_pooled_over_arms_with_three_seeds():
    def tier(**arms):
        return [
            with_accuracies(label, seed, clean, clean / 100, attack=0 if label == "off" else 10)
            for label, accuracies in {"at": (50, 50, 50), **arms}.items()
            for seed, clean in enumerate(accuracies)
        ]

    few = tier(x=(50, 51, 52), y=(50, 53, 56), z=(10, 90), off=(0, 50, 99))  # deviations 1 and 3
    other = tier(x=(54, 50, 52))  # deviation 2
    found = differences.pooled([few, other])
    # (2·1 + 2·9 + 2·4) / 6 points²; two of three differences share their reference: correlation ½.
    for name in ("clean", "clean (all)"):
        assert found[name].value == pytest.approx(0.01 * (28 / 6) ** 0.5)
        assert found[name].degrees == pytest.approx(6**2 / (4 * 1.25 + 2))
    assert found["PGD"].value == 0
    assert "PGD-10 (all)" not in found
    assert differences.pooled([tier(x=(50, 60))]) == {}


def test_the_dose_is_the_papers_for_the_papers_training():
    def cell(steps, **chosen):
        return {"settings": {"data": "packed-cifar10", **chosen}, "training": {"steps": steps}}

    paper = {"epochs": 200, "lr": 0.1, "schedule": "steps", "milestones": [60, 120, 160]}
    assert fits.dose(cell(50_000, **paper)) == pytest.approx(1)
    assert fits.dose(cell(5_000, **paper)) == pytest.approx(0.1)
    # 250 steps an epoch: 60 · 0.1 + 60 · 0.01 + 40 · 0.001 + 40 · 0.0001 = 6.644, in all 1661.
    assert fits.dose(cell(1661, lr=0.1, schedule="constant")) == pytest.approx(0.1)
    # One cycle's mean is half of its highest rate.
    assert fits.dose(cell(16_610, lr=0.2, schedule="onecycle")) == pytest.approx(1, rel=1e-3)
    # ImageNet: 312 steps an epoch, (30 · 0.1 + 30 · 0.01 + 20 · 0.001) · 312 = 1035.84.
    other = cell(10_358, lr=0.01, schedule="constant", data="packed-imagenette64")
    assert fits.dose(other) == pytest.approx(0.1, rel=1e-4)
    assert fits.dose(cell(10, data="digits")) is None


def test_doses_of_the_committed_trainings():
    records = Path(__file__).parents[2] / "benchmarks" / "records"
    cells = [*trainings.latest(read(records / "table2.jsonl")).values()]
    cells += trainings.latest(read(records / "table3.jsonl")).values()
    doses = {cell["tier"]: round(fits.dose(cell), 3) for cell in cells}
    assert {"P": 1.0, **doses} == {
        "A0": 0.06, "A": 0.187, "O": 0.184, "B100": 0.345, "B": 0.69, "C": 0.384, "P": 1.0,
        "imagenette": 0.012,
    }  # fmt: skip
    assert "its dose is 0.012 of the paper's" in table3.TIER.says
    ratio = fits.jacobian_ratio(*(
        [cell for cell in cells if (cell["tier"], cell["label"]) == ("B", label)]
        for label in ("at+lipreg 0.008", "at")
    ))  # fmt: skip
    assert ratio == pytest.approx(3.907 / 6.165, rel=1e-3)


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
    assert differences.verdict({"low": low, "high": high, "seeds": [0] * 3}, 0.1) == said
    assert differences.verdict({"low": -high, "high": -low, "seeds": [0] * 3}, -0.1) == said


def test_curves_that_were_counted_otherwise_are_named():
    final = {
        "clean": {"accuracy": 0.6}, "plan": {"precision": "bfloat16"},
        "pgd": {"against_iterations": {"0": 0.63, "10": 0.5}},
    }  # fmt: skip
    old = {"label": "at", "seed": 0, "final": final}
    new = {**old, "final": {**final, "precision": "bfloat16"}}
    exact = {**old, "final": {**final, "plan": {"precision": "float32"}}}
    shown = robustness.margins({"A0": [old], "B": [new], "C": [exact]})
    assert "at of tier A0 (margin 0.1, up to 3.0 points above clean at the start)." in shown
    assert "tier B" not in shown
    assert "tier C" not in shown
    assert robustness.margins({"B": [new]}) == ""
    arm = {"norms": [1.0, 2.0], "against_iterations": {"0": 0.63, "10": 0.5}}
    report = fig3.report({"tiers": {"B": {"at": arm}}}, shown)
    assert f"checked again in\nfloat32.{shown}\n" in report
    assert "| B | at | 1.50 |" in report


def test_the_page_compares_every_tier_with_the_paper():
    tiers = table2.by_tier(trained_cells())
    shown = fits.doses(tiers) + fits.details(tiers)
    top, few, full, _ = shown.split("### Tier ")
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
    assert "| *the paper's* | -5.6 | +3.1 | +7.0 | +10.4 | -5.6 | +3.1 |" in few
    assert "| *the paper's* | -3.9 | +1.6 | +3.1 | +4.3 | -3.9 | +1.6 |" in full
    said = "`at+lipreg 0.008` beside the paper's, in this tier's setting. clean, clean (all): "
    assert f"{said}opposite to the paper's direction; PGD: the interval contains zero" in few
    assert "setting. clean: same direction as the paper's, similar size; " in full
    assert "C&W 0.6:" not in few + full, "no network was attacked so"
    assert "`at decay 2e-3` beside" not in few, "the paper has no such arm"
    assert "`at+lipreg 0.1` beside" not in few, "nor such a weight"


def test_one_seed_borrows_the_deviation_over_seeds():
    one = gaps.interval(0.05, 1.96 * 0.0069, [0.05])
    assert differences.verdict(one, 0.03) == "fewer than 3 seeds, so no verdict"
    # One seed with a known deviation over seeds of 3 points and Student's t of 4 degrees, 2.776.
    wide = differences.widened(one, differences.Deviation(0.03, 4))
    images, seeds = (1.96 * 0.0069) ** 2, (2.776 * 0.03) ** 2
    assert wide["high"] - wide["difference"] == pytest.approx((images + seeds) ** 0.5, rel=1e-3)
    differ = gaps.interval(0.05, 0.2, [-0.05, 0.05, 0.15])
    known = differences.widened(differ, differences.Deviation(9.0, 4))
    assert known == differ, "several seeds have a deviation of their own"


def test_the_recipe_is_compared_with_the_best_epoch_of_the_tuned_reference():
    def cell(label, right):
        return {"label": label, "seed": 0, "best": {"pgd": accuracy(torch.arange(100) < right)}}

    arms = {"ours awp 0.005": 55, "at awp 0.005": 50, "at+lipreg 0.008": 40, "at tuned 0.001": 45}
    groups = {label: [cell(label, right)] for label, right in arms.items()}
    shown = robustness.reference(SimpleNamespace(groups={"B": groups}))
    assert "| ours awp 0.005 − at tuned 0.001 | +10.0 [" in shown
    assert "there is no verdict" in shown
    assert "**+" not in shown
    del groups["at tuned 0.001"]
    assert robustness.reference(SimpleNamespace(groups={"B": groups})) == ""
