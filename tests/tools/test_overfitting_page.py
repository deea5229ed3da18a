"""Does a full dose stop overfitting? The answer on records that were made up."""

from __future__ import annotations

import copy

import pytest
import torch

from lipbound.paper import fig3, table2
from lipbound.report.figures import canvas
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.training.settings import as_dict
from tools.pages import cells, overfitting, robustness

AT, LIPREG, MATCHED = table2.TIERS["P"].arms
IMAGES = 2000


def made(label, seed, falls, steady=800, like=None):
    """A cell of tier P, of whose 2000 images the best network has this many more right."""
    draw = torch.Generator().manual_seed(100 * seed + len(label))
    order = torch.randperm(IMAGES, generator=draw)
    final = torch.zeros(IMAGES, dtype=torch.bool)
    final[order[:steady]] = True
    best = final.clone()
    best[order[steady : steady + falls]] = True
    more = {"weight_decay": 0.00123} if label == MATCHED else {}
    cell = copy.deepcopy(like) or {
        "final": {}, "best": {}, "training": {"final": {}, "best": {}},
        "epochs": [{"held_out_pgd_accuracy": 0.4, "train_accuracy": 0.5}] * 2,
    }  # fmt: skip
    cell |= {"tier": "P", "label": label, "seed": seed,
             "settings": as_dict(table2.TIERS["P"].settings(label, seed, **more))}  # fmt: skip
    cell["training"]["steps"] = 50_000
    for network, right in (("best", best), ("final", final)):
        found = accuracy(right)
        tested = {"test_pgd_accuracy": found["accuracy"], "test": {"pgd": found}}
        cell["training"][network] |= tested
        pgd = cell[network].get("pgd", {"against_iterations": {"10": 0.5}})
        cell[network]["pgd"] = {**pgd, **accuracy(right[:1000])}
    return cell


def arm(label, *falls):
    return [made(label, seed, fall) for seed, fall in enumerate(falls)]


@pytest.mark.parametrize(
    ("at", "own", "answer"),
    [
        ((200, 210, 190), (20, 25, 15), "yes"),
        ((200, 210, 190), (200, 190, 215), "no"),
        ((200, 210, 190), (150, 155, 145), "no"),  # a little less, but more than half remains
        ((200, 210, 190), (100, 60, 140), "undecided"),
        ((0, 5, 0), (0, 0, 0), "undecided"),  # nothing to stop
        ((200, 210, 190), (20, 25), ""),
        ((200, 210), (20, 25, 15), ""),
    ],
)
def test_an_arm_stops_overfitting_if_it_removes_more_than_half_of_the_fall(at, own, answer):
    at, own = arm(AT, *at), arm(LIPREG, *own)[::-1]
    assert overfitting.verdict(own, at) == answer
    shown = overfitting.section({"P": [*at, *own]})
    said = {"yes": "**Yes: ", "no": "**No: ", "undecided": "**Undecided.**", "": "no answer yet**"}
    assert said[answer] in shown
    assert len(own) == 3 or "`at` has 3 seeds and `at+lipreg 0.008` has 2 seeds." in shown
    assert bool(overfitting.claims({"P": [*at, *own]})) == bool(answer)


def test_the_fall_is_paired_over_seeds_and_images():
    at, own = arm(AT, 200, 220, 180), arm(LIPREG, 40, 60, 20)
    found = overfitting.excess(own, at)
    assert found["seeds"] == pytest.approx([0.03, 0.025, 0.035])
    assert overfitting.fall(at)["difference"] == pytest.approx(0.1)
    assert overfitting.excess(own[1:], at)["seeds"] == pytest.approx([0.025, 0.035])
    assert overfitting.excess(own[:1], at[1:]) is None


def test_the_matched_decay_has_an_answer_of_its_own():
    at, own = arm(AT, 200, 210, 190), arm(LIPREG, 20, 25, 15)
    shown = overfitting.section({"P": [*at, *own, *arm(MATCHED, 200, 190, 205)]})
    assert "weight decay of 0.00123 shrinks" in shown
    assert "It does not stop overfitting: " in shown
    assert f"| {LIPREG} − {MATCHED}, final |" in shown
    assert "| *the paper's* |" in shown
    few = overfitting.section({"P": [*at, *own, *arm(MATCHED, 200)]})
    assert "It has 1 seed beside AT and so no answer" in few
    assert overfitting.section({"A": []}) == ""
    assert "`at+lipreg 0.008` has none" in overfitting.section({"P": at})


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_page_takes_the_tier_as_soon_as_it_is_recorded(monkeypatch, seeds):
    recorded = {(c["tier"], c["label"], c["seed"]): c for c in cells("table2")}
    new = [
        made(label, seed, fall, like=recorded["O", AT if label == MATCHED else label, seed])
        for label, fall in ((AT, 200), (LIPREG, 20), (MATCHED, 100))
        for seed in range(seeds)
    ]
    both = [*recorded.values(), *new]
    monkeypatch.setattr(robustness, "cells", lambda name: both if name == "table2" else cells(name))
    shown = robustness.page()
    assert "Tier P has the paper's full dose" in shown
    assert ("**Yes: " in shown) == (seeds == 3)
    assert f"| P (cifar10), {seeds} seed" in shown
    assert "`at decay matched` is `at` with weight_decay 0.00123" in shown
    assert fig3.from_cells(both)["tiers"]["P"].keys() == {AT, LIPREG, MATCHED}
    assert len(overfitting.figure(new, canvas()).axes[0].lines) == 6 * seeds
