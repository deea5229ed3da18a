"""Write docs/results/robustness.md: the paper's Tables 2 and 3 and Figure 3, with conclusions.

The conclusions are sentences, so each stands beside an assertion that the records still support it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipbound.paper import fig3, gaps, table2, table3
from lipbound.paper.reproduce import write_figure
from lipbound.report.figures import canvas, save
from lipbound.report.markdown import filled_table
from lipbound.robust.attacks.plan import SLACK
from tools.pages import DOCS, cells, differences, fits, overfitting, write

LIPREG, SPECTRAL = f"at+lipreg {gaps.WEIGHT:g}", "at+spectral 0.008"
OURS, CONTROL, DECAY = "ours awp 0.005", "at awp 0.005", "at decay 2e-3"
FULL = 0.95  # a dose from which on it is the paper's
WORDS = "*PGD* and *C&W* are attacks: PGD within L∞ radius 8/255, and Carlini & Wagner's within an L2 radius. *AT* is adversarial training. The *dose* of a regularizer is the sum of the learning rate over all steps, relative to the paper's training."

Cells = list[dict[str, Any]]
Pairs = dict[gaps.Pair, gaps.Gaps]


class Evidence:
    """Groups of cells and differences, tier by tier."""

    def __init__(self, tiers: Mapping[str, Cells]):
        self.tiers = tiers
        self.deviations = differences.pooled(tiers.values())
        self.groups = {name: gaps.grouped(gaps.attacked(own)) for name, own in tiers.items()}
        self.pairs: dict[str, Pairs] = {
            name: differences.against(own, self.deviations) for name, own in tiers.items()
        }

    def gap(self, tier: str, label: str, column: str, other: str = "at") -> dict[str, Any]:
        return self.pairs[tier][label, other][column]

    def told(self, tier: str, label: str, column: str, other: str = "at") -> str:
        """A difference with its interval, in points."""
        return table2.gap(self.gap(tier, label, column, other)).strip("*")

    def seeds(self, tier: str, label: str = LIPREG, other: str = "at") -> str:
        """How many seeds the differences of two arms count."""
        return differences.seeds(len(self.gap(tier, label, "PGD", other)["seeds"]))

    def below(self) -> list[str]:
        """The tiers with less than the paper's dose, from the smallest dose on."""
        tiers = [name for name, pairs in self.pairs.items() if (LIPREG, "at") in pairs]
        return sorted((name for name in tiers if self.dose(name) < FULL), key=self.dose)

    def uncertain(self) -> list[str]:
        """The tiers below the paper's dose whose difference under PGD could be zero."""
        return [name for name in self.below() if self.gap(name, LIPREG, "PGD")["high"] >= 0]

    def full(self) -> dict[str, Any] | None:
        """The difference under PGD in the tier with the paper's dose, if it is recorded."""
        return self.pairs.get(overfitting.TIER, {}).get((LIPREG, "at"), {}).get("PGD")

    def ratio(self, tier: str) -> float:
        return fits.jacobian_ratio(self.groups[tier][LIPREG], self.groups[tier]["at"])

    def dose(self, tier: str) -> float:
        found = fits.dose(self.tiers[tier][0])
        assert found is not None
        return found


def claims(tiers: Mapping[str, Cells]) -> list[list[str]]:
    """Lines for the index of the results: a claim, a number, a link."""
    found = Evidence(tiers)
    paper = gaps.paper_gaps(found.groups["B"][LIPREG][0])
    theirs = fig3.JACOBIANS["at+lipreg"] / fig3.JACOBIANS["at"]
    page = "[robustness](robustness.md)"
    full = found.groups["B"]
    told = ", ".join(
        f"{found.told(tier, LIPREG, 'PGD')} at dose {found.dose(tier):.2f} ({found.seeds(tier)})"
        for tier in ("A", "B", *([overfitting.TIER] if found.full() else []))
    )
    return [
        [
            headline(found),
            f"points: {told}; the paper {100 * paper['PGD']:+.1f}",
            page,
        ],
        [
            "Clean accuracy, accuracy under C&W and Jacobian norms approach the paper's as the dose grows.",
            f"at dose {found.dose('B'):.2f} ({found.seeds('B')}): clean {points(found.gap('B', LIPREG, 'clean'))}, C&W 0.8 {points(found.gap('B', LIPREG, 'C&W 0.8'))}, Jacobians × {found.ratio('B'):.2f}; the paper {100 * paper['clean']:+.1f}, {100 * paper['C&W 0.8']:+.1f}, × {theirs:.2f}",
            page,
        ],
        *overfitting.claims(tiers),
        [
            "Most of our own recipe's gain under PGD comes from weight perturbation and averaging, not from the penalty.",
            f"PGD {accuracy(full['at'][0], 'pgd')} % with AT, {accuracy(full[CONTROL][0], 'pgd')} % with these two, {accuracy(full[OURS][0], 'pgd')} % with the penalty too (first seed)",
            page,
        ],
        [
            "No ordinary network's bound certifies an image at L2 radius 36/255.",
            "certified accuracy 0 % for every network that has learned",
            page,
        ],
    ]


def page() -> str:
    tiers, imagenette = table2.by_tier(cells("table2")), cells("table3")
    found = Evidence(tiers)
    hold(found, imagenette)
    paper = gaps.paper_gaps(found.groups["A"][LIPREG][0])
    return f"""# Robustness

**{headline(found)}** The paper regularizes adversarial training (AT) with LipBound and reports {100 * paper["PGD"]:+.1f} points of accuracy under PGD. Here the measured difference is negative at every *dose* below the paper's, although in {tiers_of(found.uncertain())} it could be zero. As the dose grows, clean accuracy, accuracy under C&W and the norm of the Jacobians do move towards the paper's results. {at_full_dose(found, paper)}

*The paper* is Araujo et al. (AAAI 2021). *LipBound* is its upper bound on the Lipschitz constant of a layer. *PGD* and *C&W* (Carlini & Wagner) search for a small change of an image that makes the network wrong: PGD within L∞ radius 8/255, C&W within an L2 radius of 0.6 or 0.8. *AutoAttack* is a standard set of strong attacks. The trainings are named as follows:

{table2.WORDS}
{doses(found, imagenette)}
All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them. `lipbound reproduce table2`, `fig3` and `table3` repeat the trainings.

{overfitting.section(tiers)}{findings(found, paper)}
{limits(found)}
{recipe(found)}
## Table 2: robustness on CIFAR

{fits.details(tiers)}
{fig3.report(figure3(), margins(tiers))}
{table3.report({"tiny": False, "cells": imagenette})}"""


def headline(found: Evidence) -> str:
    """One sentence on the paper's gain under PGD."""
    full = found.full()
    gained = full is not None and len(full["seeds"]) >= gaps.SEEDS and full["low"] > 0
    rest = "found only at the paper's full dose" if gained else "not found at any dose"
    return f"The paper's gain under PGD was {rest}."


def at_full_dose(found: Evidence, paper: Mapping[str, float]) -> str:
    """What the tier with the paper's dose says of its gain under PGD."""
    full, tier = found.full(), overfitting.TIER
    if full is None:
        return "No training here has the paper's full dose, so its result is neither confirmed nor refuted."
    count = differences.seeds(len(full["seeds"]))
    return f"Tier {tier} has the paper's full dose, with a smaller network on fewer images. There the difference under PGD is {found.told(tier, LIPREG, 'PGD')} ({count}): {differences.verdict(full, paper['PGD'])}."


def tiers_of(names: Sequence[str]) -> str:
    """The tiers in a sentence: "tiers A, B and C"."""
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"tier{'s' if len(names) > 1 else ''} {listed}"


def doses(found: Evidence, imagenette: Cells) -> str:
    groups = gaps.grouped(imagenette)
    label = "at+lipreg 0.001"
    row = fits.dosed(groups[label], groups["at"])
    return fits.doses(
        found.tiers,
        [["Table 3 (imagenette64), 1 seed", *row, *["–"] * len(fits.DOSED)]],
    )


def hold(found: Evidence, imagenette: Cells) -> None:
    """Assert what the sentences of the page say."""
    gap, groups = found.gap, found.groups
    dosed = found.below()
    assert {*dosed} == {"A0", "O", "A", "B100", "B"}
    assert all(gap(name, LIPREG, "PGD")["difference"] < 0 for name in dosed)
    assert found.uncertain()
    assert not found.full() or found.dose(overfitting.TIER) >= FULL
    low, high = dosed[0], dosed[-1]
    shares = {name: share(found, name, "C&W 0.8") for name in dosed}
    assert shares[low] < min(shares["A"], shares["O"]) <= max(shares["A"], shares["O"])
    assert max(shares["A"], shares["O"]) < shares["B100"] < shares[high] < 1
    cleans = {name: share(found, name, "clean") for name in dosed}
    assert max(cleans[name] for name in ("A0", "A", "O")) < min(cleans["B100"], cleans["B"])
    ratios = {name: found.ratio(name) for name in dosed}
    assert ratios["A0"] > max(ratios["A"], ratios["O"])
    assert min(ratios["A"], ratios["O"]) > ratios["B100"] > ratios["B"]
    paper = gaps.paper_gaps(groups["A"][LIPREG][0])
    for column in ("C&W 0.6", "C&W 0.8"):
        assert (
            gap("A", LIPREG, column)["low"] < 0 < gap("A", LIPREG, column)["high"] < paper[column]
        )
        assert (
            0 < gap("O", LIPREG, column)["low"] < gap("O", LIPREG, column)["high"] < paper[column]
        )
    for name in ("A", "O"):
        assert gap(name, LIPREG, "PGD")["low"] < 0 < gap(name, LIPREG, "PGD")["high"] < paper["PGD"]
    assert gap("A", LIPREG, "PGD-10 (all)")["high"] < 0
    assert all(trained(own) > 0.97 for own in (groups["O"]["at"], groups["O"][LIPREG]))
    assert gap("A", DECAY, "PGD-10 (all)")["low"] > 0 > gap("A", DECAY, "C&W 0.8")["high"]
    assert gap("A", DECAY, "PGD")["low"] < 0
    assert all(one["low"] <= 0 <= one["high"] for one in found.pairs["A"]["ours", "at"].values())
    gained, without = (gap("B", label, "PGD")["difference"] for label in (OURS, CONTROL))
    assert gained > 0 < without > gained / 2
    for one in found.pairs["B"][OURS, CONTROL].values():
        assert one["low"] <= 0 <= one["high"]
    assert gap("B100", OURS, "clean")["difference"] < 0
    attacked = found.pairs["B100"][OURS, "at"].keys() & gaps.COLUMNS.keys() - {"clean"}
    assert {"PGD", "C&W 0.8"} < attacked
    for column in attacked:
        assert gap("B100", OURS, column)["low"] <= 0 <= gap("B100", OURS, column)["high"]
    every = [cell for own in (*found.tiers.values(), imagenette) for cell in own]
    (constant,) = (cell for cell in every if (fits.certified(cell["final"]) or 0) > 0)
    assert (constant["tier"], constant["label"]) == ("A", "at+spectral 0.1")
    assert constant["final"]["clean"]["accuracy"] < 0.11
    trial = {cell["label"]: gaps.held(cell) for cell in found.tiers["A"] if cell["seed"] == 0}
    for swept in (table2.LIPREG, table2.SPECTRAL):
        assert trial["at"] > max(trial[label] for label in swept) == trial[next(iter(swept))]
    assert trial[SPECTRAL] >= trial[LIPREG]
    ours = groups["C"][OURS][0]
    assert ours["settings"]["model"] == "wrn-28-10"
    assert ours["epochs"][-1]["held_out_pgd_accuracy"] == gaps.peak(ours)
    theirs = dict(zip(gaps.COLUMNS, gaps.PAPER["cifar10"]["at+lipreg"], strict=False))
    beside = {n: gaps.COLUMNS[n](ours["final"])["accuracy"] - told for n, told in theirs.items()}
    assert beside["PGD"] > 0.03
    assert all(-0.02 < beside[name] < 0 for name in beside if name != "PGD")
    for tier, data in (("B", "cifar10"), ("B100", "cifar100")):
        at = groups[tier]["at"][0]
        clean, pgd = gaps.PAPER[data]["at+lipreg"][:2]
        assert at["final"]["clean"]["accuracy"] > clean
        assert at["final"]["pgd"]["accuracy"] > pgd
    plans = [own["final"]["plan"] for own in every if "pgd" in own["final"]]
    assert {plan["loss"] for plan in plans} == {"alternate"}


def share(found: Evidence, tier: str, column: str) -> float:
    """The measured difference as a part of the paper's on the same data."""
    paper = gaps.paper_gaps(found.groups[tier][LIPREG][0])
    return found.gap(tier, LIPREG, column)["difference"] / paper[column]


def findings(found: Evidence, paper: Mapping[str, float]) -> str:
    groups, told = found.groups, found.told
    overfitted = groups["O"]["at"]
    in_training = [100 * trained(groups["O"][label]) for label in ("at", LIPREG)]
    peaks = {label: mean(gaps.peak, groups["O"][label]) for label in ("at", LIPREG)}
    ends = {label: mean(gaps.held, groups["O"][label]) for label in ("at", LIPREG)}
    early = {
        (label, column): [mean(part(network, column), groups["O"][label]) for network in ("final", "best")]
        for label in ("at", LIPREG)
        for column in ("clean", "PGD")
    }  # fmt: skip
    grown = ", ".join(
        f"{100 * share(found, name, 'C&W 0.8'):.0f} % in {name}" for name in found.below()
    )
    most = found.gap("B", LIPREG, "C&W 0.8")
    inside = most["low"] <= paper["C&W 0.8"] <= most["high"]
    swept = ", ".join(label.split()[1] for label in [*table2.LIPREG][1:])
    few = mean(gaps.peak, groups["A"]["at"]), mean(gaps.held, groups["A"]["at"])
    at, at100 = groups["B"]["at"][0], groups["B100"]["at"][0]
    clean, pgd = gaps.PAPER["cifar10"]["at+lipreg"][:2]
    clean100, pgd100 = gaps.PAPER["cifar100"]["at+lipreg"][:2]
    early_at, early_lipreg = early["at", "PGD"], early[LIPREG, "PGD"]
    return f"""## What was found

Numbers in brackets are 95 % intervals, in points of accuracy. [Table 2](#table-2-robustness-on-cifar) says how they were made.

- **The difference under PGD is negative at every dose{" below the paper's" if found.full() else ""}.** In tier A the difference is {told("A", LIPREG, "PGD")}, in tier O {told("O", LIPREG, "PGD")}, both with 3 seeds; the paper's {100 * paper["PGD"]:+.1f} is outside both intervals. In tier B it is {told("B", LIPREG, "PGD")} ({found.seeds("B")}), in tier B100 {told("B100", LIPREG, "PGD")} ({found.seeds("B100")}). Under the weak attack with ten steps, on all test images, it is {told("A", LIPREG, "PGD-10 (all)")} in tier A. The pilot A0 is too small to show a difference: {told("A0", LIPREG, "PGD")} under PGD and {told("A0", LIPREG, "PGD-10 (all)")} with ten steps on all images.
- **Clean accuracy, C&W 0.8 and Jacobians approach the paper's as the dose grows.** In tier B, at {found.dose("B"):.2f} of the paper's dose ({found.seeds("B")}), clean accuracy changes by {told("B", LIPREG, "clean")} (the paper {100 * paper["clean"]:+.1f}), C&W 0.8 by {told("B", LIPREG, "C&W 0.8")} (the paper {100 * paper["C&W 0.8"]:+.1f}), and the Jacobians shrink to {found.ratio("B"):.2f} of AT's (the paper {fig3.JACOBIANS["at+lipreg"] / fig3.JACOBIANS["at"]:.2f}). As a part of the paper's gain on the same data, C&W 0.8 is {grown}, in the order of the doses (those of O and A are almost the same).
- **A gain of the paper's size under C&W is excluded at small doses{" only" if inside else ""}.** In tier A it is {told("A", LIPREG, "C&W 0.6")} at 0.6 and {told("A", LIPREG, "C&W 0.8")} at 0.8, at {found.dose("A"):.2f} of the dose (the paper {100 * paper["C&W 0.6"]:+.1f} and {100 * paper["C&W 0.8"]:+.1f}). A larger weight λ2 ({swept}) does not replace the dose: it only loses accuracy on held-out images. In tier B the paper's gain at 0.8 is {"inside" if inside else "outside"} the interval.
- **Tier O does not test whether a full dose stops overfitting.** AT does not overfit in tier A (PGD on held-out images: {few[0]:.1f} % at its peak, {few[1]:.1f} % at the end), so tier O repeats 3,000 images 200 times. There AT falls from {peaks["at"]:.1f} % to {ends["at"]:.1f} %, and with the regularizer from {peaks[LIPREG]:.1f} % to {ends[LIPREG]:.1f} %. But at {found.dose("O"):.2f} of the dose the penalty did not regularize: the accuracy on attacked training images is {in_training[0]:.1f} % without it and {in_training[1]:.1f} % with it. Accuracy under C&W rises a little, by {told("O", LIPREG, "C&W 0.6")} at 0.6 and {told("O", LIPREG, "C&W 0.8")} at 0.8. That is less than the paper's, and because the penalty did not regularize it is no test of the paper's claim.
- **Early stopping gains more under PGD than the regularizer, and costs clean accuracy.** In tier O the best epoch of AT has {early_at[1]:.1f} % under PGD where the last has {early_at[0]:.1f} %. Its clean accuracy falls from {early["at", "clean"][0]:.1f} % to {early["at", "clean"][1]:.1f} % (mean of {len(overfitted)} seeds). With the regularizer, PGD rises from {early_lipreg[0]:.1f} % to {early_lipreg[1]:.1f} %, and clean accuracy falls from {early[LIPREG, "clean"][0]:.1f} % to {early[LIPREG, "clean"][1]:.1f} %.
- **A larger weight decay gains under the weak attack and costs accuracy under C&W.** In tier A, weight decay 2e-3 changes the accuracy under PGD by {told("A", DECAY, "PGD")}, with ten steps on all images by {told("A", DECAY, "PGD-10 (all)")}, and under C&W 0.8 by {told("A", DECAY, "C&W 0.8")}.
- **Plain adversarial training reaches the paper's numbers under PGD.** In tier B the first seed of AT has {shown(at)} % clean and under PGD after {len(at["epochs"])} epochs; the paper's AT with LipBound (WRN-28-10, 200 epochs) has {100 * clean:.1f} / {100 * pgd:.1f} %. On CIFAR-100, AT has {shown(at100)} % after {len(at100["epochs"])} epochs; the paper's has {100 * clean100:.1f} / {100 * pgd100:.1f} %.
- **Table 3 says nothing about the regularizer.** Its dose is {fits.dose(cells("table3")[0]):.3f} of the paper's.
"""


def limits(found: Evidence) -> str:
    highest = max((*found.below(), *([overfitting.TIER] if found.full() else [])), key=found.dose)
    other = {"B": "another network and another schedule", "P": "a smaller network and fewer images"}
    counts = {
        name: {len(gap["seeds"]) for known in pairs.values() for gap in known.values()}
        for name, pairs in found.pairs.items()
    }
    alone = [name for name, own in counts.items() if own and min(own) == 1]
    several = [name for name, own in counts.items() if own and max(own) >= gaps.SEEDS]
    return f"""## What limits the comparison

- **Dose.** No tier has the paper's network, data and dose together. The tiers differ in more than the dose: the highest one, in tier {highest}, has {other[highest]}.
- **Attack.** Our PGD is stronger than the paper's. Its restarts alternate between the cross-entropy and the margin of the logits, while the paper's maximize one loss. Accuracies under the two attacks are therefore not the same quantity. A regularizer that flattens the cross-entropy without making the network more robust could gain under the paper's attack and not under ours.
- **BatchNorm.** The regularizer bounds convolutions and BatchNorm layers apart, as in the paper. The variance of a BatchNorm layer is measured, not trained, so it gets no gradient. A convolution before a BatchNorm layer has no scale of its own: if its kernel shrinks, the variance shrinks too, and the network does the same. Part of the penalty therefore only shrinks such kernels and does not make the network smoother.
- **Seeds.** In {tiers_of(alone)} some or all differences are those of one seed. Their intervals borrow the deviation over seeds from {tiers_of(several)}, and they get no verdict. Tier C has one seed.
"""


def recipe(found: Evidence) -> str:
    groups, told = found.groups, found.told
    full = groups["B"]
    ours = groups["C"][OURS][0]
    clean, pgd = gaps.PAPER["cifar10"]["at+lipreg"][:2]
    less = [
        bound(of["at"]) - bound(own)
        for of in groups.values()
        for own in of.values()
        if "at" in of and own[0]["settings"]["penalty"] and not gaps.plain(own[0])
    ]
    trial = {cell["label"]: cell for cell in found.tiers["A"] if cell["seed"] == 0}
    underfits = [f"{100 * gaps.held(trial[label]):.0f} %" for label in (OURS, "at")]
    rows = []
    shown_arms = (("A", "ours"), ("B", CONTROL), ("B", OURS), ("B100", OURS), ("C", OURS))
    for tier, label in shown_arms:
        pair = found.pairs[tier].get((label, "at"))
        if pair is None:
            continue
        count = differences.seeds(len(pair["PGD"]["seeds"]))
        rows.append([f"{tier}, {count}", label, *table2.gap_row(pair, differences.GAPS)])
    return f"""## Our own recipe

*Our recipe* (`ours`) combines a spectral penalty with averaged weights, and in tiers B, B100 and C with adversarial weight perturbation (`awp`). The table shows its differences from AT, in points.

{filled_table(["tier", "arm", *differences.GAPS], rows)}

- In tier A no difference from AT can be seen.
- In tier B the first seed of the recipe has {shown(full[OURS][0])} % clean and under PGD after {full[OURS][0]["training_seconds"] / 60:.0f} minutes of an H200; AT has {shown(full["at"][0])} %. Perturbation and averaging alone have {shown(full[CONTROL][0])} %, so they are most of the gain. What the penalty adds to these two cannot be told from zero ({found.seeds("B", OURS, CONTROL)}): {told("B", OURS, "PGD", CONTROL)} under PGD, {told("B", OURS, "C&W 0.8", CONTROL)} under C&W 0.8. It does lower the certified bound, by a factor of 10^{bound(full[CONTROL]) - bound(full[OURS]):.1f}.
- The recipe has costs. In tier B100 clean accuracy changes by {told("B100", OURS, "clean")}, without a gain that {found.seeds("B100", OURS)} could show. In tier A the same perturbation underfits: {underfits[0]} under PGD on held-out images, where AT has {underfits[1]}.
- On the paper's network (tier C, one seed) the recipe has {shown(ours)} % clean and under PGD and {accuracy(ours, "autoattack")} % under AutoAttack, after {len(ours["epochs"])} epochs and {ours["training_seconds"] / 60:.0f} minutes of an H200. It was still improving. The paper's AT with LipBound has {100 * clean:.1f} / {100 * pgd:.1f} % after 200 epochs. Clean and under C&W, ours is one to two points lower.
- The penalties lower the certified bound of a network by {min(less):.0f} to {max(less):.0f} powers of ten. At the paper's weight, the spectral penalty gives a bound that is 10^{bound([trial[LIPREG]]) - bound([trial[SPECTRAL]]):.1f} times lower than LipBound's, and no lower accuracy on held-out images (tier A, first seed). Larger weights lose accuracy.
- The bounds remain far too large to certify an image. The certified accuracy at L2 radius 36/255 is 0 for every network except one that gives the same answer for every image (`at+spectral 0.1`).
{reference(found)}"""


def reference(found: Evidence) -> str:
    """Compare the recipe with plain adversarial training, tuned and stopped on held-out images."""
    groups = found.groups["B"]
    tuned = next((groups[label] for label in table2.TUNED if label in groups), None)
    if tuned is None:
        return ""
    columns = [name for name in gaps.COLUMNS if gaps.COLUMNS[name](tuned[0]["best"])]
    rows = []
    for label in (OURS, CONTROL, LIPREG):
        gap = {
            name: gaps.difference(groups[label], tuned, gaps.COLUMNS[name], "best")
            for name in columns
        }
        if any(gap.values()):
            row = [table2.gap(known) if known else "" for known in gap.values()]
            rows.append([f"{label} − {tuned[0]['label']}", *row])
    decays = ", ".join(f"{arm['weight_decay']:g}" for arm in table2.TUNED.values())
    return f"""
The reference that the recipe must beat is `{tuned[0]["label"]}` of tier B: AT with averaged weights, the weight decay of {decays} that was best on held-out images, and the epoch that was best there. The table shows differences from it between the *best* networks, in points, on the same images of {differences.seeds(len(tuned))}. With fewer than {gaps.SEEDS} seeds, the intervals count the images alone and there is no verdict.

{filled_table(["", *columns], rows)}
"""


def bound(own: Cells) -> float:
    """The mean of log10 of the certified Lipschitz bounds."""
    return statistics.fmean(cell["final"]["log10_lipschitz"]["upper"] for cell in own)


def trained(own: Cells) -> float:
    """The mean accuracy on attacked training images in the last epoch."""
    return statistics.fmean(cell["epochs"][-1]["train_accuracy"] for cell in own)


def part(network: str, column: str) -> Callable[[dict[str, Any]], float]:
    """The accuracy of a cell's best or final network in a column."""
    return lambda cell: gaps.COLUMNS[column](cell[network])["accuracy"]


def mean(measure: Callable[[dict[str, Any]], float], own: Cells) -> float:
    """The mean over seeds, in per cent."""
    return 100 * statistics.fmean(map(measure, own))


def points(gap: dict[str, Any]) -> str:
    return f"{100 * gap['difference']:+.1f}"


def accuracy(cell: dict[str, Any], name: str) -> str:
    return f"{100 * cell['final'][name]['accuracy']:.1f}"


def shown(cell: dict[str, Any]) -> str:
    return f"{accuracy(cell, 'clean')} / {accuracy(cell, 'pgd')}"


def figure3() -> dict[str, Any]:
    return {"experiment": "fig3", "tiny": False, **fig3.from_cells(cells("table2"))}


def margins(tiers: Mapping[str, Cells]) -> str:
    """Describe curves that are too high because an image had to be wrong by a margin.

    The first version of the attack counted so. The first trainings of tiers A and A0 are recorded
    in this way; later records name the precision of the attack.
    """
    named = []
    for tier, own in tiers.items():
        early = {
            cell["label"]: cell["final"]
            for cell in gaps.attacked(own)
            if cell["seed"] == 0
            and "precision" not in cell["final"]
            and SLACK[cell["final"]["plan"]["precision"]]
        }
        if early:
            above = max(
                final["pgd"]["against_iterations"].get("0", 0.0) - final["clean"]["accuracy"]
                for final in early.values()
            )
            excess = (
                f", up to {100 * above:.1f} points above clean at the start" if above > 0 else ""
            )
            sizes = sorted({SLACK[final["plan"]["precision"]] for final in early.values()})
            margin = " or ".join(f"{size:g}" for size in sizes)
            named.append(f"{', '.join(early)} of tier {tier} (margin {margin}{excess})")
    if not named:
        return ""
    return (
        " Some curves lie too high, because the attack then counted an image as broken only when "
        f"it was wrong by a margin: {'; '.join(named)}."
    )


def main(folder: Path = DOCS) -> None:
    pages = folder / "results"
    pages.mkdir(parents=True, exist_ok=True)
    write(pages / "robustness.md", page())
    drawn = table2.without_pilots(table2.by_tier(cells("table2")))
    save(differences.figure(drawn, canvas()), pages / "table2.svg", dpi=130)
    write_figure(figure3(), pages)
    if overfitting.TIER in drawn:
        save(
            overfitting.figure(drawn[overfitting.TIER], canvas()),
            pages / "overfitting.svg",
            dpi=130,
        )


if __name__ == "__main__":
    main()
