"""Attacks as strong as the libraries', evaluations that notice when an attack failed."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers import run
from torch import nn

from lipbound import audit
from lipbound.results import key
from lipbound.robust.attacks import plan as plans
from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.doubts import Case, _gradients
from lipbound.robust.attacks.evaluate import (
    evaluate,
    interval,
    jacobian_norms,
    outcomes,
    paired,
)
from lipbound.robust.attacks.evaluation import in_balls
from lipbound.robust.attacks.half_precision import Rough
from lipbound.robust.attacks.pgd import margin, perturbation_norms, random_search
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.attacks.plan import ATTACKS, Plan, _smallest_ball, engine, pushed, strongest
from lipbound.robust.attacks.recheck import Examples
from lipbound.robust.data.sets import digits
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import settings
from lipbound.robust.training.trained import load_model

pytest.importorskip("sklearn", reason="scikit-learn's digits")
RADIUS = 0.15
COUNT = 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that resists about half of the attacks, and images to attack."""
    folder = tmp_path_factory.mktemp("run")
    wanted = settings("at", "digits", epochs=6, attack=5, step=0.4, check=20, check_attack=1)
    train(wanted, digits(), folder, device="cpu")
    model, _ = load_model(folder / "final.safetensors")
    images, labels = digits().test.load(torch.arange(COUNT))
    return model, images.float() / 255, labels, folder / "final.safetensors"


def standard_error(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / count)


def test_pgd_breaks_what_foolbox_breaks(trained):
    foolbox = pytest.importorskip("foolbox", reason="the attacks extra")
    model, images, labels, _ = trained
    budget = {"radius": RADIUS, "step": RADIUS / 5, "iterations": 40}
    ours = strongest_pgd(model, images, labels, **budget)
    assert bool((perturbation_norms(ours.images, images, "linf") <= RADIUS * (1 + 1e-6)).all())
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    attack = foolbox.attacks.LinfPGD(steps=40, rel_stepsize=0.2)
    theirs = attack(wrapped, images, labels, epsilons=RADIUS)[2].float().mean()
    share = float(ours.broken.float().mean())
    assert 0.2 < share < 0.8
    assert share >= float(theirs) - standard_error(share, COUNT)


@pytest.mark.slow
def test_pgd_with_decay_comes_up_to_apgd(trained):
    pytest.importorskip("pyautoattack", reason="the attacks extra")
    model, images, labels, _ = trained
    ours = strongest_pgd(
        model, images, labels, radius=RADIUS, step=RADIUS, iterations=25, restarts=4, decay=True
    )
    theirs = autoattack(model, images, labels, radius=RADIUS, attacks=["apgd-ce"])  # 100 steps
    share = float(ours.broken.float().mean())
    assert share >= float(theirs.broken.float().mean()) - standard_error(share, COUNT)
    assert bool((theirs.norms <= RADIUS * (1 + 1e-5)).all())


@pytest.mark.slow
def test_carlini_wagner_is_as_close_as_foolboxs(trained):
    foolbox = pytest.importorskip("foolbox", reason="the attacks extra")
    model, images, labels, _ = trained
    images, labels = images[:20], labels[:20]
    ours = carlini_wagner(model, images, labels, steps=80, searches=6, lr=0.3)
    attack = foolbox.attacks.L2CarliniWagnerAttack(
        binary_search_steps=6, steps=80, stepsize=0.1, abort_early=False
    )
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    found = attack(wrapped, images, labels, epsilons=None)[0]
    theirs = (found - images).flatten(1).norm(dim=1)
    assert ours.norms.median() <= 1.05 * theirs.median()
    broken = model(ours.images).argmax(1) != labels
    assert bool((broken == ours.broken).all())
    torch.testing.assert_close(
        ours.norms[broken], (ours.images - images)[broken].flatten(1).norm(dim=1)
    )
    counts = [int((ours.norms <= r).sum()) for r in (0, 0.3, 0.6, 0.9, math.inf)]
    assert counts == sorted(counts)


def two_classes(count: int):
    """A linear classifier with logits ±w·x/2, images, their w·x, and its own labels."""
    torch.manual_seed(0)
    weight = torch.randn(12)
    images = 0.4 + 0.2 * torch.rand(count, 3, 2, 2)
    gaps = (images.flatten(1) - 0.5) @ weight

    def logits(x):
        score = (x.flatten(1) - 0.5) @ weight
        return torch.stack([score, -score], 1) / 2

    return logits, weight, images, gaps, (gaps < 0).long()


@pytest.mark.parametrize("ball", ["linf", "l2"])
def test_minimal_norms_of_a_linear_model(ball):
    """Two classes, logits ±w·x/2: the distance to the boundary is |w·x|/‖w‖."""
    logits, weight, images, gaps, labels = two_classes(10)
    dual = weight.abs().sum() if ball == "linf" else weight.norm()
    distance = gaps.abs() / dual
    if ball == "l2":
        found = carlini_wagner(logits, images, labels, steps=300, searches=8)
        assert bool((found.norms >= distance * (1 - 1e-4)).all())
        assert bool((found.norms <= distance * 1.02 + 1e-3).all())
    for share in (0.9, 1.1):
        radius = float(distance.median()) * share
        found = strongest_pgd(
            logits, images, labels, radius=radius, step=radius / 4, iterations=20, ball=ball
        )
        assert torch.equal(found.broken, distance < radius)
        assert bool((found.norms <= radius * (1 + 1e-5)).all())


def test_strongest_is_the_worst_of_all_iterations_and_restarts(trained):
    model, images, labels, _ = trained
    options = {"radius": 0.1, "step": 0.05, "seed": 3}
    counts = [
        int(strongest_pgd(model, images, labels, iterations=n, restarts=r, **options).broken.sum())
        for n, r in ((1, 1), (5, 1), (20, 1), (20, 3))
    ]
    assert counts == sorted(counts)
    plain = strongest_pgd(model, images, labels, iterations=20, width=1000, **options)
    dropped = strongest_pgd(model, images, labels, iterations=20, width=7, **options)
    assert torch.equal(plain.broken, dropped.broken), "leaving the batch changes nothing"
    assert torch.equal(plain.iteration, dropped.iteration)
    assert bool((model(plain.images).argmax(1) != labels).eq(plain.broken).all())
    unbroken = ~plain.broken
    with torch.no_grad():
        before, after = (
            margin(model(x[unbroken]), labels[unbroken]) for x in (images, plain.images)
        )
    assert bool((after > before).float().mean() > 0.95)


@pytest.mark.slow
def test_random_search_stays_inside_and_finds_something(trained):
    model, images, labels, _ = trained
    for ball, radius in (("linf", RADIUS), ("l2", 0.8)):
        found = random_search(model, images, labels, radius=radius, ball=ball, iterations=200)
        assert bool((found.norms <= radius * (1 + 1e-5)).all())
        assert found.images.min() >= 0
        assert found.images.max() <= 1
        white = strongest_pgd(
            model, images, labels, radius=radius, step=radius / 5, iterations=40, ball=ball
        )
        clean = int((model(images).argmax(1) != labels).sum())
        assert clean < int(found.broken.sum()) <= int(white.broken.sum())


@pytest.mark.slow
def test_what_ends_short_of_the_boundary_is_pushed_over_it():
    logits, weight, images, gaps, labels = two_classes(40)
    distance = gaps.abs() / weight.norm()
    found = carlini_wagner(logits, images, labels, steps=300, searches=8)
    short = replace(found, images=images + 0.99 * (found.images - images) * (
        distance / found.norms).reshape(-1, 1, 1, 1))  # fmt: skip

    class Model(nn.Module):
        def forward(self, x):
            return logits(x)

    mended = pushed(Model(), images, labels, short, 40)
    assert not bool((logits(short.images).argmax(1) != labels).any())
    assert bool((logits(mended.images).argmax(1) != labels).all())
    assert bool((mended.norms <= 1.05 * distance).all())


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_rough_search_is_looked_at_once_more(trained, precision):
    model, images, labels, _ = trained
    images, labels = images[::6], labels[::6]  # some processors only emulate half precision
    plan = Plan(("pgd", "cw"), radius=0.1, iterations=10, restarts=1, search_steps=30, searches=3,
                constant=1.0)  # fmt: skip
    plain, rough = (
        evaluate(model, images, labels, p, curves=False, doubts=False)
        for p in (plan, replace(plan, precision=precision))
    )
    for name, entry in (("pgd", lambda r: r["pgd"]), ("cw", lambda r: r["cw"]["0.6"])):
        differ = outcomes(entry(plain)) ^ outcomes(entry(rough))
        assert int(differ.sum()) <= 2, name
        assert rough[name]["not_reproduced"] <= plain[name]["not_reproduced"] + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9])
def test_a_half_precision_gradient_keeps_its_size(dtype, size):
    """Image by image: one that is sure of itself beside one that is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(288, 10))
    images, weights = torch.rand(4, 1, 8, 8), torch.tensor([size, 1.0, 0.0, -size])

    def gradient(logits):
        x = images.clone().requires_grad_()
        scores = logits(x)
        return torch.autograd.grad(((scores[:, 1] - scores[:, 0]) * weights).sum(), x)[0]

    exact, rough = gradient(model), gradient(Rough(model, dtype))
    errors = (rough - exact).flatten(1).double().norm(dim=1)
    lengths = exact.flatten(1).double().norm(dim=1)
    assert bool((errors <= 4 * torch.finfo(dtype).eps * lengths).all())


def test_a_gradient_of_no_number_stays_one(trained):
    model, images, _, _ = trained
    x = images[:2].clone().requires_grad_()
    scores = Rough(model, torch.float16)(x)
    (found,) = torch.autograd.grad((scores[0] * torch.inf).sum() + scores[1].sum(), x)
    assert not bool(found[0].isfinite().all())
    assert bool(found[1].isfinite().all())


class Inner(nn.Module):
    """The same function, with activations and derivatives that leave float16."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        return self.inner(x * self.factor / self.factor) * self.factor / self.factor


@pytest.mark.parametrize("factor", [1e6, 1e-9])
def test_where_half_precision_fails_the_search_is_finer(trained, factor):
    model, images, labels, _ = trained
    network = Inner(model, factor).eval()
    plan = Plan(("pgd",), radius=0.1, iterations=20, restarts=1, precision="float16")
    said = []
    found = evaluate(network, images, labels, plan, curves=False, doubts=False, say=said.append)
    plain = evaluate(model, images, labels, replace(plan, precision="float32"), curves=False,
                     doubts=False)  # fmt: skip
    assert found["precision"] == "tf32"
    assert "float16 loses this network's gradients, so the attacks search in tf32" in said
    assert int((outcomes(found["pgd"]) ^ outcomes(plain["pgd"])).sum()) <= 2


def test_an_image_right_by_less_than_half_precision_is_not_robust():
    """Wrong in the search, right in float32: its smallest perturbation is not none."""
    weight = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    images = torch.rand(200, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    along = (weight[1] - weight[0]).reshape(1, 4, 4)
    gaps = (images * along).flatten(1).sum(1) / along.square().sum()
    images = (images - (gaps + 1e-6)[:, None, None, None] * along).clamp(0, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2, bias=False)).eval()
    model[1].weight.data = weight
    with torch.no_grad():
        near = model(images).diff(dim=1)[:, 0].abs() < 1e-4
    images = images[near]
    with torch.no_grad():
        labels = model(images).argmax(1)
    plan = Plan(("cw",), searches=3, search_steps=40, constant=1.0, precision="float16")
    found = evaluate(model, images, labels, plan, doubts=False)
    assert len(images) > 20
    assert found["cw"]["0.6"]["accuracy"] == 0
    assert found["cw"]["not_reproduced"] == 0


@pytest.mark.slow
def test_a_weak_attack_is_doubted(trained):
    model, images, labels, _ = trained
    images, labels = images[::2], labels[::2]
    found = evaluate(model, images, labels, Plan(radius=RADIUS, iterations=1, restarts=1))
    assert any("than pgd" in said for said in found["doubts"])


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_the_curve_ends_where_the_attack_does(precision):
    """An image that is broken, but by less than a search in half precision goes on to."""
    images, labels = torch.tensor([[[[0.5, 0.45]]], [[[0.9, 0.1]]]]), torch.tensor([0, 0])
    plan = Plan(("pgd",), radius=0.03, iterations=20, restarts=1, precision=precision)
    found = evaluate(nn.Flatten().eval(), images, labels, plan, curves=False, doubts=False)["pgd"]
    assert found["against_iterations"]["20"] == found["accuracy"] == 0.5


@pytest.mark.parametrize("step", [0.0, -0.2, math.nan, math.inf])
def test_a_step_leads_somewhere(step):
    with pytest.raises(ValueError, match="step"):
        Plan(step=step)


class Boastful(nn.Module):
    """Gives way in half precision to what float32 withstands."""

    def forward(self, x):
        half = torch.is_autocast_enabled("cpu")
        return x.flatten(1) - torch.tensor([0.9 * half, 0.0, 0.0, 0.0])


class Overflowing(nn.Module):
    """Leaves the range of half precision where the last pixel is bright."""

    def __init__(self, gradients_only):
        super().__init__()
        self.gradients_only = gradients_only

    def forward(self, x):
        scores = x.flatten(1)
        bright = scores[:, -1:] > 0.5
        if not torch.is_autocast_enabled("cpu"):
            return scores
        if self.gradients_only:  # finite, but the slope at 0 is not
            return scores + 1e-9 * torch.where(bright, scores - scores.detach(), 1.0).abs().sqrt()
        return scores + torch.where(bright, torch.nan, 0.0)


PRECISELY = [
    pytest.param("pgd"),
    pytest.param("cw-projected"),
    pytest.param("cw"),
    pytest.param("autoattack", marks=pytest.mark.slow),
]


def standing(model, attack, images, monkeypatch):
    if attack == "autoattack":
        pytest.importorskip("pyautoattack", reason="the attacks extra")
    monkeypatch.setattr(plans, "LOOKED_AT", 1)
    plan = Plan((attack,), radius=0.1, radii=(0.15,), iterations=20, restarts=1, constant=1.0,
                searches=4, search_steps=50, precision="float16")  # fmt: skip
    labels = torch.zeros(len(images), dtype=torch.long)
    found = evaluate(model.eval(), images, labels, plan, doubts=False, curves=False)
    assert found["precision"] == "float16"
    assert found[attack]["not_reproduced"] == 0
    return outcomes(found[attack].get("0.15", found[attack])).tolist()


@pytest.mark.parametrize("attack", PRECISELY)
def test_what_an_attack_broke_in_its_own_precision_alone_is_tried_again(monkeypatch, attack):
    images = torch.tensor([[[[0.6, 0.5, 0.1, 0.1]]], [[[0.9, 0.1, 0.1, 0.1]]]])
    assert standing(Boastful(), attack, images, monkeypatch) == [False, True]


@pytest.mark.parametrize("gradients_only", [False, True])
@pytest.mark.parametrize("attack", PRECISELY)
def test_what_overflows_in_half_precision_is_tried_again(monkeypatch, attack, gradients_only):
    """Otherwise class 0, to which a maximum over nothing but NaN points, would stand."""
    images = torch.tensor([[[[0.9, 0.1, 0.1, 0.1]]], [[[0.6, 0.1, 0.1, 0.55]]]])
    model = Overflowing(gradients_only)
    assert standing(model, attack, images, monkeypatch) == [True, False]


def test_jacobian_norms_are_exact(trained):
    model, images, _, _ = trained
    norms = jacobian_norms(model, images[:3])
    for x, norm in zip(images, norms, strict=False):
        jacobian = torch.autograd.functional.jacobian(model, x[None]).reshape(10, -1)
        assert float(norm) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-4)
    assert float(norms.max()) <= audit(model, (1, 8, 8), search=0).upper


@pytest.mark.slow
def test_an_honest_network_raises_no_doubt(trained):
    model, images, labels, _ = trained
    images, labels = images[::7], labels[::7]
    plan = Plan(("pgd", "cw", "cw-projected"), radius=0.1, iterations=20, restarts=2,
                search_steps=120, searches=4, constant=1.0)  # fmt: skip
    found = evaluate(
        model, images, labels, plan, audit=audit(model, (1, 8, 8), search=0), jacobians=10
    )
    assert found["doubts"] == []
    assert found["pgd"]["accuracy"] <= found["clean"]["accuracy"]
    assert found["pgd"]["not_reproduced"] == 0
    for name in ("cw", "cw-projected"):
        assert found[name]["0.8"]["accuracy"] <= found[name]["0.6"]["accuracy"]
    curve = list(found["pgd"]["against_iterations"].values())
    assert curve == sorted(curve, reverse=True)
    assert curve[0] <= found["clean"]["accuracy"]
    curve = found["against_steps"]
    assert list(curve) == ["3", "10", "30", "120"]
    for radius in ("0.6", "0.8"):
        assert curve["120"][radius] == found["cw"][radius]["accuracy"]
        assert curve["3"][radius] > curve["120"][radius]
    shares = [c["accuracy"] for c in found["certified"].values()]
    assert shares == sorted(shares, reverse=True)
    json.dumps(found)


@pytest.mark.slow
def test_only_what_is_right_is_searched_around(monkeypatch, trained):
    """And each of those finds what it finds in a company of others."""
    model, images, labels, _ = trained
    labels = labels.clone()
    labels[::3] = (labels[::3] + 1) % 10
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    seen, search = [], carlini_wagner

    def counted(logits, some, *given, **options):
        seen.append(len(some))
        return search(logits, some, *given, **options)

    monkeypatch.setattr(plans, "carlini_wagner", counted)
    plan = Plan(("cw",), batch=16, search_steps=30, searches=3)
    with engine(model, images, plan) as ready:
        found = ATTACKS["cw"](ready, images, labels)
        alone = search(model, images[right][:16], labels[right][:16], steps=30, searches=3)
    assert sum(seen) == int(right.sum()) < len(images)
    assert bool(found.broken[~right].all())
    assert not found.norms[~right].any()
    assert bool((found.images[~right] == images[~right]).all())
    torch.testing.assert_close(found.norms[right][:16], alone.norms, rtol=0.05, atol=1e-3)


def test_a_mistake_is_never_standing():
    """Not even one by less than bfloat16's rounding, which PGD leaves alone."""
    model = nn.Flatten().eval()
    images, labels = torch.tensor([[[[0.5, 0.501]]], [[[0.5, 0.1]]]]), torch.tensor([0, 0])
    plan = Plan(("pgd",), radius=1e-6, iterations=2, restarts=1, precision="bfloat16")
    found = evaluate(model, images, labels, plan, curves=False, doubts=False)
    assert found["pgd"]["accuracy"] == found["clean"]["accuracy"] == 0.5
    assert set(found["pgd"]["against_iterations"].values()) == {0.5}


class Quantized(nn.Module):
    """Rounds what goes in and what comes out of the inner network: gradients are zero."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.round(x * 15) / 15)


def test_masked_gradients_raise_doubts(trained):
    model, images, labels, _ = trained
    images, labels = images[::10], labels[::10]
    plan = Plan(radius=RADIUS, iterations=10, restarts=2)
    found = evaluate(Quantized(model).eval(), images, labels, plan)
    said = " ".join(found["doubts"])
    assert "no gradient at all" in said
    assert "without gradients does better" in said
    assert "however large the perturbation" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [({"restarts": 2}, ""), ({"restarts": 1}, "the margin has one"),
     ({"restarts": 2, "loss": "cross-entropy"}, "the margin has one")],
)  # fmt: skip
def test_a_cross_entropy_without_gradient_is_a_doubt_only_if_nothing_follows_the_margin(
    trained, options, said
):
    """So does a certified network, whose margins are large."""
    model, images, labels, _ = trained
    plan = Plan(radius=RADIUS, iterations=1, **options)
    on = Examples(images[:60], labels[:60], torch.zeros(60, dtype=torch.bool))
    case = Case(Scaled(model, 1e3).eval(), on, plan, {"pgd": None}, None)
    _gradients(case)
    assert said in " ".join(case.said)
    assert bool(case.said) == bool(said)
    assert (case.evidence["images_without_gradient"] > 0.05) == bool(said)


class Nan(nn.Module):
    """Right answers, and gradients that are no numbers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0 * (x[:, :1, :1, 0, None] * 0).abs().sqrt().flatten(1)


class Scaled(nn.Module):
    """So sure of itself that float32 has no gradient left."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        return self.inner(x) * self.factor


class Wavy(nn.Module):
    """A fine ripple that turns the gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 0.005 * torch.sin(1000 * x))


@pytest.mark.slow
@pytest.mark.parametrize("ball", ["linf", "l2"])
def test_other_ways_to_hide_gradients(trained, ball):
    model, images, labels, _ = trained
    images, labels = images[::5], labels[::5]
    radius = RADIUS if ball == "linf" else 0.6
    plan = Plan(ball=ball, radius=radius, iterations=20, restarts=2)
    honest = evaluate(model, images, labels, plan, curves=False, doubts=False)["pgd"]["accuracy"]
    every = (Scaled(model, 1e4), Nan(model), Wavy(model))
    for masked in every if ball == "linf" else every[:1]:
        found = evaluate(masked.eval(), images, labels, plan, curves=False)
        assert found["doubts"] or found["pgd"]["accuracy"] <= honest + 0.03, type(masked).__name__
    for factor in (1e-12, 8.0):  # the direction is all that counts
        found = evaluate(Scaled(model, factor).eval(), images, labels, plan, curves=False,
                         doubts=False)  # fmt: skip
        assert found["pgd"]["accuracy"] <= honest + 0.1


@pytest.mark.slow
def test_no_attack_beats_being_wrong_or_a_certificate():
    """Clean mistakes count everywhere, and what is certified at a radius stands there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[1].weight *= 4
    images = torch.rand(80, 1, 4, 4)
    labels = model(images).argmax(1)
    labels[:20] = (labels[:20] + 1) % 4
    radii = tuple(r / 255 for r in (36, 72, 108, 255))
    plan = Plan(("pgd", "cw", "cw-projected", "apgd-l2"), "l2", 72 / 255, radii=radii,
                iterations=30, restarts=2, searches=6, search_steps=100)  # fmt: skip
    found = evaluate(model, images, labels, plan, audit=audit(model, (1, 4, 4), search=0))
    assert found["clean"]["accuracy"] == 0.75
    certified = [c["accuracy"] for c in found["certified"].values()]
    assert 0.05 < certified[1] < 0.75
    for name in ("cw", "cw-projected", "apgd-l2"):
        attacked = [found[name][key(r)]["accuracy"] for r in radii]
        assert all(c <= a <= 0.75 for c, a in zip(certified, attacked, strict=True))
        assert attacked[1] <= certified[1] + 0.1, "on a linear model they nearly meet"
    assert certified[1] <= found["pgd"]["accuracy"] <= 0.75
    assert found["doubts"] == []


@pytest.mark.parametrize(("ball", "radius"), [("l2", 0.2), ("linf", 0.05)])
def test_no_attack_comes_below_the_certified_accuracy_or_it_is_a_contradiction(ball, radius):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    images = torch.rand(80, 1, 4, 4)
    labels = model(images).argmax(1)
    plan = Plan(("pgd", "cw-projected"), ball, radius, radii=(0.1, 0.3), iterations=20, restarts=2)
    bounds = audit(model, (1, 4, 4), search=0)
    found = evaluate(model, images, labels, plan, audit=bounds, doubts=False)
    shares = [(one["certified"], one["accuracy"]) for *_, one in in_balls(found)]
    assert all(proved <= attacked for proved, attacked in shares)
    assert any(proved > 0.1 for proved, _ in shares)
    assert found["contradictions"] == []
    assert "contradiction" not in str(found)
    curve = found["certified_curve"][ball]
    assert curve[0][0] == 0
    assert curve[-1][1] == 0

    wrong = replace(bounds, upper=bounds.upper / 20, features=bounds.features / 20)
    found = evaluate(model, images, labels, plan, audit=wrong, doubts=False, curves=False)
    count = sum(not one for one in outcomes(found["pgd"]).tolist())
    assert f"contradiction: pgd broke {count} images in the {ball} ball of radius" in str(found)
    assert len(found["contradictions"]) == 3


@pytest.mark.parametrize("ball", ["linf", "l2"])
def test_autoattack_of_a_network_in_channels_last(ball):
    """Its gradients are in channels_last, which the package cannot view in L2."""
    pytest.importorskip("pyautoattack", reason="the attacks extra")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(64, 5)).eval().to(memory_format=torch.channels_last)
    images = torch.rand(6, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    labels = model(images).argmax(1)
    wanted = dict(radius=0.3, ball=ball, attacks=["apgd-ce"])
    found = autoattack(model, images, labels, **wanted)
    usual = autoattack(model.to(memory_format=torch.contiguous_format), images, labels, **wanted)
    assert bool(found.broken.any())
    assert torch.equal(found.broken, usual.broken)


def test_l2_attacks_try_again_only_what_no_smaller_ball_broke(trained, monkeypatch):
    model, images, labels, _ = trained
    given = []

    def attack(on, images, labels, radius):
        given.append((radius, len(images)))
        return strongest(on, images, labels, radius, ball="l2", iterations=5, restarts=1)

    few = images[:40], labels[:40]
    with engine(model, few[0], Plan(radii=(0.9, 0.5))) as on:
        found = _smallest_ball(on, *few, attack)
    mistakes = int((model(few[0]).argmax(1) != few[1]).sum())
    within = int((found.broken & (found.norms <= 0.5 * (1 + 1e-5))).sum())
    assert given == [(0.5, 40 - mistakes), (0.9, 40 - within)]
    assert mistakes < within < int(found.broken.sum())


def test_an_l2_attack_that_stops_early_raises_a_doubt(trained):
    model, images, labels, _ = trained
    plan = Plan(("cw",), radius=0.1, search_steps=3, searches=1)
    said = evaluate(model, images[:60], labels[:60], plan, curves=False)["doubts"]
    assert any(one.startswith("PGD in the L2 ball of radius 0.8 does better") for one in said)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_autoattack_with_few_classes(classes):
    pytest.importorskip("pyautoattack", reason="the attacks extra")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, classes)).eval()
    images = torch.rand(6, 1, 4, 4)
    found = autoattack(model, images, model(images).argmax(1), radius=0.2)
    assert bool((found.norms <= 0.5 * (1 + 1e-5)).all())


def test_l2_pgd_breaks_what_foolbox_breaks(trained):
    foolbox = pytest.importorskip("foolbox", reason="the attacks extra")
    model, images, labels, _ = trained
    ours = strongest_pgd(
        model, images, labels, radius=0.6, step=0.12, iterations=40, ball="l2", restarts=1
    )
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    attack = foolbox.attacks.L2PGD(steps=40, rel_stepsize=0.2)
    theirs = float(attack(wrapped, images, labels, epsilons=0.6)[2].float().mean())
    share = float(ours.broken.float().mean())
    assert share >= theirs - standard_error(share, COUNT)


class Noisy(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 0.1 * torch.randn_like(x))


@pytest.mark.slow
def test_a_random_network_raises_a_doubt(trained):
    model, images, labels, _ = trained
    images, labels = images[:30], labels[:30]
    found = evaluate(Noisy(model).eval(), images, labels, Plan(iterations=5, restarts=1))
    assert "answers the same images differently" in " ".join(found["doubts"])


def test_wrong_inputs_are_named(trained):
    model, images, labels, _ = trained

    class Broken(nn.Module):
        def forward(self, x):
            return model(x) * math.nan

    cases = [
        (lambda: evaluate(model, images * 255, labels), "not in \\[0, 1\\]"),
        (lambda: evaluate(model, images - 0.5, labels), "not in \\[0, 1\\]"),
        (lambda: evaluate(model, images * math.nan, labels), "not in \\[0, 1\\]"),
        (lambda: evaluate(model, images, labels + 5), "there are 10 classes"),
        (lambda: evaluate(model, images, labels[:3]), "do not match"),
        (lambda: evaluate(Broken().eval(), images, labels), "not all finite"),
        (lambda: evaluate(model, images, labels, Plan(("guess",))), "unknown attack 'guess'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        evaluate(model, images, labels)
    model.eval()


def test_autoattack_names_its_extra(trained, monkeypatch):
    model, images, labels, _ = trained
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(ValueError, match="lipbound\\[attacks\\]"):
        autoattack(model, images, labels, radius=0.1)


def test_intervals_and_pairs():
    low, high = interval(0, 10)
    assert low == pytest.approx(0, abs=1e-12)
    assert 0.2 < high < 0.35
    same = paired([True] * 5, [True] * 5)
    assert same == {"difference": 0.0, "low": 0.0, "high": 0.0}
    assert set(ATTACKS) == {"pgd", "cw", "cw-projected", "apgd-l2", "autoattack"}


@pytest.mark.slow
def test_the_command(trained, monkeypatch, capsys, tmp_path):
    *_, path = trained
    out, plot = tmp_path / "attacks.jsonl", tmp_path / "curves.svg"
    arguments = ["attack", str(path), "--count", "20", "--iterations", "5", "--restarts", "1"]
    code, table, _ = run(
        monkeypatch, capsys, *arguments, "--out", str(out), "--plot", str(plot), "--certify"
    )
    assert code == 0
    assert "pgd linf 0.1, 5×1" in table
    assert "no attack, l2 0.1411" in table
    assert "contradiction" not in table
    assert json.loads(out.read_text())["arm"] == "at"
    assert plot.exists()
    arguments[1] = str(path.parent)  # the run: best and final, each against the other's images
    page = tmp_path / "page.html"
    code, records, _ = run(monkeypatch, capsys, *arguments, "--json", "--html", str(page))
    assert code == 0
    assert page.read_text().count("data:image/svg+xml") == 2
    assert records.count('"transfer"') == 2
    for wrong, message in (
        (["attack", "nowhere.safetensors"], "there is no file"),
        ([*arguments, "--ball", "l1"], "unknown ball 'l1'"),
        ([*arguments, "--attack", "guess"], "unknown attack 'guess'"),
        ([*arguments, "--loss", "guess"], "unknown loss 'guess'"),
        ([*arguments, "--radius", "8"], "exceeds the range [0, 1]"),
        ([*arguments, "--radius", "0"], "--radius '0' is not a positive number; write 0.25"),
        ([*arguments, "--restarts", "0"], "restarts=0 must be at least 1"),
        ([*arguments, "--batch", "0"], "batch=0 must be at least 1"),
        ([*arguments, "--count", "-5"], "must be 0 or larger"),
        ([*arguments, "--l2-radius", "-1", "--attack", "cw"], "radii=-1.0 must be positive"),
        ([*arguments, "--plot", "curves.txt"], "must end in .svg or .png"),
        ([*arguments, "--data", "fashion-mnist", "--folder", str(tmp_path)], "there is no"),
    ):
        code, _, err = run(monkeypatch, capsys, *wrong)
        assert (code, message in err) == (2, True), err


def test_the_last_step_is_looked_at():
    logits, weight, images, gaps, labels = two_classes(40)
    distance = gaps.abs() / weight.abs().sum()
    radius = float(distance.median()) * 1.01
    found = strongest_pgd(logits, images, labels, radius=radius, step=2 * radius, iterations=1)
    assert torch.equal(found.broken, distance < radius), "one step is enough on a linear model"


def test_mistakes_count_whatever_the_attack_makes_of_them():
    class Stripes(nn.Module):
        """The class is a fast function of one pixel: attacks may well mend a mistake."""

        def forward(self, x):
            wave = torch.sin(200 * x[:, 0, 0, 0])
            return torch.stack([wave, -wave], 1)

    torch.manual_seed(0)
    images = torch.rand(60, 1, 2, 2)
    model = Stripes().eval()
    labels = 1 - model(images).argmax(1)  # all of them mistakes
    plan = Plan(("pgd",), radius=0.1, step=0.05, iterations=3, restarts=1)
    found = evaluate(model, images, labels, plan, doubts=False)
    assert found["clean"]["accuracy"] == found["pgd"]["accuracy"] == 0


def test_gradients_that_are_no_numbers_do_not_help(trained):
    model, images, labels, _ = trained
    budget = {"radius": 0.6, "step": 0.12, "iterations": 20, "ball": "l2"}
    found = strongest_pgd(Nan(model).eval(), images, labels, **budget)
    assert bool(found.images.isfinite().all())
    honest = strongest_pgd(model, images, labels, **budget)
    assert found.broken.sum() >= 0.9 * honest.broken.sum(), "the other pixels still have theirs"
