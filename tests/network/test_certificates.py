"""Certified radii hold, and so do the errors and rounding that they take into account."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import fitted
from torch import nn
from zoo import NETWORKS, UNBOUNDED, Run

import lipbound
from lipbound import audit, certify, register_rule
from lipbound.network.rounding import Executed
from lipbound.network.rules import RULES, values


def test_certified_radii_hold_and_use_the_last_layer():
    torch.manual_seed(0)
    model = fitted(NETWORKS["plain"][0]())
    with torch.no_grad():
        model[-1][-1].weight.mul_(0.01)
    found = audit(model, (3, 8, 8), search=0)
    assert found.head is not None
    inputs = torch.randn(20, 3, 8, 8, dtype=torch.float64)
    radii = lipbound.certify(model, found, inputs)
    with torch.no_grad():
        logits = model(inputs)
    torch.testing.assert_close(lipbound.certify(logits, found), radii)
    general = lipbound.certify(logits, dataclasses.replace(found, head=None))
    assert (radii >= general).all()
    assert (radii > general).any()
    best = logits.argmax(1)
    moved = inputs.clone()
    for _ in range(20):  # walk to the nearest class as far as is allowed
        moved.requires_grad_()
        out = model(moved)
        second = out.scatter(1, best[:, None], -math.inf).amax(1)
        gap = out.gather(1, best[:, None])[:, 0] - second
        (slope,) = torch.autograd.grad(gap.sum(), moved)
        with torch.no_grad():
            step = slope / slope.flatten(1).norm(dim=1).clamp_min(1e-30)[:, None, None, None]
            offset = moved - inputs - radii[:, None, None, None] / 5 * step
            size = offset.flatten(1).norm(dim=1)
            shrink = (radii / size.clamp_min(1e-30)).clamp_max(1)
            moved = inputs + offset * shrink[:, None, None, None]
    assert torch.equal(model(moved).argmax(1), best)


def test_radii_of_a_linear_map_are_exact():
    model = nn.Linear(3, 4).double()
    inputs = torch.randn(10, 3, dtype=torch.float64)
    radii = lipbound.certify(model, audit(model, (3,)), inputs)
    with torch.no_grad():
        logits = model(inputs)
    for index, row in enumerate(logits):
        i = int(row.argmax())
        exact = min(
            float((row[i] - row[j]) / (model.weight[i] - model.weight[j]).norm())
            for j in range(4)
            if j != i
        )
        assert radii[index] <= exact * (1 + 1e-12)
        assert radii[index] >= exact * (1 - 1e-9)


def test_softplus_jumps_and_certificates_know():
    """At its threshold torch's softplus is no 1-Lipschitz function; a class flips there."""
    model = nn.Sequential(nn.Softplus(), nn.Linear(1, 2)).double()
    jump = math.log1p(math.exp(-20))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
        model[1].bias.copy_(torch.tensor([-20 - jump / 2, 20 + jump / 2], dtype=torch.float64))
    found = audit(model, (1,))
    assert jump <= found.features_error <= 1.001 * jump
    assert found.error >= math.sqrt(2) * jump
    assert "softplus jumps" in found.note
    low = torch.tensor([[20.0]], dtype=torch.float64)  # softplus(20) is above, the identity below
    high = torch.nextafter(low, low + 1)
    assert int(model(low).argmax()) != int(model(high).argmax())
    assert float(lipbound.certify(model, found, low)) == 0
    far = torch.tensor([[30.0]], dtype=torch.float64)
    assert 9.99 < float(lipbound.certify(model, found, far)) <= 10
    blind = dataclasses.replace(found, features_error=0.0)
    assert float(lipbound.certify(model(low), blind)) > 0
    assert float(lipbound.certify(model, blind, low)) == 0  # the rounding's walk finds it again


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (1000.0, 7.0), (-1000.0, 7.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_jump_is_within_the_error(beta, threshold, dtype):
    model = nn.Sequential(nn.Softplus(beta, threshold), nn.Softplus(beta, threshold)).to(dtype)
    found = audit(model, (1,), search=0)
    at = torch.tensor(threshold / beta, dtype=dtype)
    points = [at]
    for _ in range(30):
        points.append(torch.nextafter(points[-1], at + 1))
        points.insert(0, torch.nextafter(points[0], at - 1))
    x = torch.stack(points)[:, None]
    with torch.no_grad():
        y = model(x)
    apart, moved = (y - y.mT).abs().double(), (x - x.mT).abs().double()
    rounding = 8 * torch.finfo(dtype).eps * float(y.abs().max())
    assert (apart <= found.upper * moved + 2 * found.error + rounding).all()
    assert float(apart.max()) > 2 * float(moved.max()) or dtype is torch.float32


def erring():
    """Networks of softplus, and the errors that add up in them."""
    soft, line = nn.Softplus(), nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        line.weight.copy_(3 * torch.eye(2))
    one = math.sqrt(2) * math.log1p(math.exp(-20))
    return {
        "after": (nn.Sequential(soft, line), 3 * one),
        "before": (nn.Sequential(line, soft), one),
        "twice": (nn.Sequential(soft, soft), 2 * one),
        "sum": (Run(lambda m, x: m.s(x) + 2 * m.s(x.flip(1)), s=soft), 3 * one),
        "beside": (Run(lambda m, x: torch.cat([m.s(x), m.s(x)], 1), s=soft), math.sqrt(2) * one),
        "larger": (Run(lambda m, x: torch.maximum(m.s(x), -m.s(x)), s=soft), math.sqrt(2) * one),
        "spread": (Run(lambda m, x: m.s(x)[:, None] + torch.zeros(3, 1), s=soft), 3**0.5 * one),
        "residual": (Run(lambda m, x: m.s(x) + m.l(m.s(x)), s=soft, l=line), 4 * one),
        "lost": (Run(lambda m, x: x + 0 * m.s(x), s=soft), 0.0),
        "two results": (Run(lambda m, x: (m.s(x), m.s(x)), s=soft), math.sqrt(2) * one),
    }


LATER = {"before", "twice", "two results"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LATER else []) for n in erring()]
)
def test_errors_add_up_along_the_graph(name):
    """A sum's error is the sum of two, a concatenation's the root of the squares' sum."""
    model, truth = erring()[name]
    found = audit(model.double(), (2,), search=0)
    assert found.upper < math.inf
    assert truth <= found.error <= truth * 1.01 + 1e-300


def test_a_rule_that_forgets_the_error_is_refused():
    @register_rule("aten.diff")
    def diff(step):
        return values.Value(step.shape, 2.0 * step.only().lipschitz)

    try:
        model = Run(lambda m, x: torch.diff(m.s(x)), s=nn.Softplus())
        assert "without the error" in audit(model, (3,), search=0).reason
        assert audit(Run(lambda m, x: torch.diff(x)), (3,), search=0).upper < 2.001
    finally:
        del RULES["aten.diff"]


@pytest.mark.parametrize("power", [-160, pytest.param(-200, marks=pytest.mark.slow), -300, 150])
def test_norms_neither_underflow_nor_overflow(power):
    size = 10.0**power
    column = torch.full((4,), size, dtype=torch.float64)
    model = Run(lambda m, x: (x / size) @ column, like=nn.Linear(1, 1).double())
    assert 2 <= audit(model, (4,), search=0).upper <= 2.001
    stacked = Run(lambda m, x: (x / size) @ column.expand(2, 4)[..., None], like=model.like)
    assert 2 * math.sqrt(2) <= audit(stacked, (4,), search=0).upper <= 2.001 * math.sqrt(2)
    head = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [0, 0]]).double() * size)
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    radius = float(lipbound.certify(head, audit(head, (2,)), x))
    assert radius == pytest.approx(math.sqrt(2), rel=1e-5)  # of the diagonal
    assert radius <= math.sqrt(2)


def test_rows_that_rounding_made_equal_have_a_radius():
    """A BatchNorm folded into the last layer rounds its rows; their difference must not be lost."""
    line, norm = nn.Linear(1, 2).double(), nn.BatchNorm1d(2, eps=0.0).double()
    base = next(
        w for w in (1.3e10 + k for k in range(1000)) if w * 0.7 == math.nextafter(w, 2e10) * 0.7
    )
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[base], [math.nextafter(base, 2e10)]], dtype=torch.float64))
        line.bias.zero_()
        norm.weight.fill_(0.7)
        norm.bias.copy_(torch.tensor([1e-6, 0.0]))
    model = nn.Sequential(line, norm).eval()
    radius = float(lipbound.certify(model, audit(model, (1,)), torch.zeros(1, 1).double()))
    step = math.nextafter(base, 2e10) - base
    assert 0 < radius <= 1e-6 / (0.7 * step)


def test_underflow_of_folded_kernels_is_counted():
    line = nn.Linear(400, 400, bias=False).double()
    norm = nn.BatchNorm1d(400, eps=0.0).double()
    with torch.no_grad():
        line.weight.fill_(2.0**-540)
        norm.weight.fill_(2.0**-536)
    model = nn.Sequential(line, norm, Run(lambda m, x: x * 2.0**1000)).eval()
    assert audit(model, (400,), search=0).upper >= 400 * 2.0**-76
    zero = nn.Linear(400, 400, bias=False).double()
    nn.init.zeros_(zero.weight)
    added = Run(lambda m, x: torch.add(m.a(x), m.b(x), alpha=2.0**-536) * 2.0**1000, a=zero, b=line)
    assert audit(added, (400,), search=0).upper >= 400 * 2.0**-76


def test_a_tie_has_no_radius_though_the_rows_be_equal():
    head = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [1, 0], [0, 1]]))
    x = torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    first, second = lipbound.certify(head, audit(head, (2,)), x).tolist()
    assert (first, second) == (0, pytest.approx(math.sqrt(2)))


def test_radii_of_unbounded_networks_are_zero():
    build, shape, _ = UNBOUNDED["attention"]
    found = audit(build(), shape, search=0)
    assert (lipbound.certify(torch.randn(3, 5), found) == 0).all()
    with pytest.raises(ValueError, match="needs the inputs"):
        lipbound.certify(build(), found)
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        lipbound.certify(torch.zeros(3), found)


def test_a_network_without_logits_cannot_be_certified():
    model = Run(lambda m, x: x.argmax(1))
    with pytest.raises(ValueError, match=r"logits must be \(batch, classes\).*got \(3,\)"):
        certify(model, audit(model, (4,)), torch.randn(3, 4))


def strided() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(36, 3)).eval()


def test_inputs_run_together_as_each_alone():
    """The radii of a batch are those of its inputs, however many run together."""
    model, x = strided(), torch.randn(20, 2, 6, 6)
    found = audit(model, (2, 6, 6))
    alone = torch.cat([certify(model, found, x[i : i + 1]) for i in range(20)])
    torch.testing.assert_close(certify(model, found, x), alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-165])
def test_sums_of_sizes_are_bounded_and_norms_measured_in_any_layout(scale):
    """Against a run by hand; tiny inputs have norms whose squares underflow."""
    model, x = strided().double(), scale * torch.randn(5, 2, 6, 6).double()
    ready = Executed(model, (), x[:1])
    exact, bounded = ready.measure(x), ready.measure(x, sums=False)
    assert exact.absolute.keys() == bounded.absolute.keys()
    for name, sums in exact.absolute.items():
        assert (bounded.absolute[name] >= sums).all()
        assert (bounded.absolute[name] <= 4 * sums).all()
    images, first = x, [*exact.norms.values()][:4]  # input, convolution, BatchNorm, ReLU
    for found, module in zip(first, (nn.Identity(), *model[:3]), strict=True):
        images = module(images).detach()
        most = images.abs().max()
        wanted = (images / most).flatten(1).norm(dim=1) * most
        assert (found >= wanted.numpy()).all()
        assert (found <= 20 * wanted.numpy()).all()
    torch.testing.assert_close(bounded.logits, model(x).detach(), rtol=1e-12, atol=0.0)


def test_operations_without_a_batched_form_run_one_by_one(monkeypatch):
    model, x = strided(), torch.randn(3, 2, 6, 6)
    found = audit(model, (2, 6, 6))
    together = certify(model, found, x)

    def refused(run):
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(torch.func, "vmap", refused)
    with pytest.warns(UserWarning, match="one by one: no batching rule"):
        torch.testing.assert_close(certify(model, found, x), together, rtol=1e-9, atol=1e-12)
