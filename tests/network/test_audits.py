"""The network's bound is never below a Jacobian norm; every rule is searched for violations."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from helpers import fitted
from torch import nn
from torch.nn import functional as F
from zoo import NETWORKS, OPERATIONS, UNBOUNDED, Run, conv

import lipbound
from lipbound import audit, bracket, certify, register_rule
from lipbound.network.jacobian import jacobian_norm
from lipbound.network.rules import RULES, values
from lipbound.robust.models import ResNet


@pytest.mark.parametrize("name", NETWORKS)
def test_never_below_a_jacobian_norm(name):
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = fitted(build())
    found = audit(model, shape, search=0)
    assert found.upper < math.inf, found.reason
    inputs = torch.cat([s * torch.randn(6, *shape).double() for s in (0.01, 1, 10)])
    lower = jacobian_norm(model, inputs, iterations=20)
    assert lower <= found.upper * (1 + 1e-12)
    assert lower > 0


class Strided(nn.Conv2d):
    """A kernel with two geometries: its own, and with a stride after it."""

    def forward(self, x):
        return nn.functional.conv2d(super().forward(x).relu(), self.weight, stride=2, padding=1)


def test_equal_layers_are_searched_once(monkeypatch):
    searched, search = [], values.bracket
    monkeypatch.setattr(
        values, "bracket", lambda conv, rtol: searched.append(conv) or search(conv, rtol)
    )
    first, last = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 16, 2)
    folded = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))
    model = fitted(nn.Sequential(first, nn.ReLU(), folded, nn.ReLU(), nn.Flatten(), last))
    found = audit(model, (2, 4, 4), search=0)
    assert [tuple(conv.kernel.shape) for conv in searched] == [(3, 3, 3, 3)], "what was folded"
    with torch.no_grad():
        folded[0].weight *= (folded[1].weight / (folded[1].running_var + 1e-5).sqrt()).reshape(
            -1, 1, 1, 1
        )
    assert found.upper == pytest.approx(
        math.prod(search(layer).upper for layer in (first, folded[0], last))
    )


def test_a_kernel_of_two_geometries_is_searched_for_each():
    layer = nn.Conv2d(2, 2, 3, padding=1, bias=False).double()
    model = Strided(2, 2, 3, padding=1, bias=False).double()
    model.weight = layer.weight
    strided = bracket(layer.weight, stride=2).upper
    both = audit(nn.Sequential(layer, nn.ReLU(), model), (2, 6, 6), search=0).upper
    assert both == pytest.approx(bracket(layer).upper ** 2 * strided)
    assert strided != pytest.approx(bracket(layer).upper)


class Mixing(nn.Module):
    """Inputs of one batch know of each other."""

    def __init__(self, share=1.0):
        super().__init__()
        self.share = share

    def forward(self, x):
        return (x + self.share * x[:1]).flatten(1)


@pytest.mark.parametrize(
    ("build", "share"),
    [
        (lambda: [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 7)], 1.0),
        (lambda: [nn.Conv2d(2, 9, 3), nn.Tanh(), nn.Flatten()], 0.97),  # iterated
        (lambda: [Mixing()], 0.97),
        (lambda: [nn.Flatten(), nn.Linear(50, 1), Mixing()], 1.0),
        (lambda: [nn.Flatten(), nn.Linear(50, 1), Mixing(0.002)], 1.0),  # hardly seen
        (lambda: [nn.ReLU(), nn.Threshold(1e9, 2.0), nn.Flatten()], 1.0),  # a constant
    ],
)
def test_a_jacobians_norm_is_that_of_its_matrix(build, share):
    torch.manual_seed(0)  # the weights are drawn here, not when the file is read
    model = nn.Sequential(*build()).double().eval()
    inputs = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    norms = [
        torch.linalg.matrix_norm(
            torch.autograd.functional.jacobian(model, one[None]).reshape(-1, one.numel()), 2
        )
        for one in inputs
    ]
    found, truth = jacobian_norm(model, inputs), float(max(norms))
    assert share * truth <= found <= truth * (1 + 1e-9)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_refusals_name_the_reason_and_what_is_still_bounded(name):
    build, shape, reason = UNBOUNDED[name]
    found = audit(build(), shape, search=0)
    assert found.upper == math.inf
    assert reason in found.reason
    assert found.bounded_part is not None
    assert found.bounded_part.lipschitz < math.inf


LOOSE = (
    "token residual",
    "broadcast add",
    "alpha",
    "roll",
    "minimum",
    "chunks added",
    "assigned slice",
    "max with a constant",
    "einsum stack",
    "product with a stack",
    "stack times a value",
)  # sums of dependent terms


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_exceeds_its_rule(name):
    model, shape = OPERATIONS[name]
    model = fitted(model)
    upper = audit(model, shape, search=0).upper
    assert upper < math.inf
    torch.manual_seed(2)
    points = torch.cat([s * torch.randn(40, *shape).double() for s in (1e-4, 0.1, 1, 4)])
    best = jacobian_norm(model, points, iterations=30)
    for scale in (1e-3, 0.3, 3):
        moved = points + scale * torch.randn_like(points)
        with torch.no_grad():
            pairs = zip(_outputs(model, points), _outputs(model, moved), strict=True)
            change = [after - before for before, after in pairs]
        steps = torch.cat([c.reshape(len(points), -1) for c in change], 1).norm(dim=1)
        best = max(best, float((steps / (moved - points).flatten(1).norm(dim=1)).max()))
    assert best <= upper * (1 + 1e-9)
    if "norm" not in name and name not in LOOSE:
        assert upper <= 1.3 * best, "the rule should be nearly attained"


def _outputs(model, x):
    out = model(x)
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t.is_floating_point()]


def test_linear_residuals_are_bounded_by_their_own_symbol():
    model = Run(lambda m, x: x + m.conv(x), conv=conv(3, 3, bias=False))
    kernel = torch.zeros(3, 3, 3, 3)
    kernel[range(3), range(3), 1, 1] = -0.9
    model.conv.weight = nn.Parameter(kernel)
    assert audit(model, (3, 8, 8), search=0).upper == pytest.approx(0.1, rel=2e-3)
    for alpha, truth in ((1, 0.1), (-1, 1.9), (0, 1.0), (2.5, 1.25)):
        scaled = Run(lambda m, x, a=alpha: torch.add(x, m.conv(x), alpha=a), conv=model.conv)
        assert audit(scaled, (3, 8, 8), search=0).upper == pytest.approx(truth, rel=2e-3)
        taken = Run(lambda m, x, a=alpha: torch.sub(x, m.conv(x), alpha=-a), conv=model.conv)
        assert audit(taken, (3, 8, 8), search=0).upper == pytest.approx(truth, rel=2e-3)
    shifted = Run(lambda m, x: m.a(x) - m.b(x), a=conv(3, 4), b=conv(3, 4, 5))
    with torch.no_grad():
        shifted.b.weight.zero_()
        shifted.b.weight[:, :, 1:4, 1:4] = shifted.a.weight
    assert audit(shifted, (3, 8, 8), search=0).upper < 1e-10


def test_a_residual_without_a_batch_axis():
    model = Run(lambda m, x: (x[0] + m.conv(x[0]))[None], conv=conv(2, 2))
    found = audit(model, (2, 5, 5), search=4)
    assert found.lower <= found.upper < math.inf


def test_batch_norm_is_folded_and_strides_are_split():
    torch.manual_seed(0)
    model = fitted(nn.Sequential(conv(4, 6, stride=2, bias=False), nn.BatchNorm2d(6)))
    gains = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    kernel = (model[0].weight * gains.reshape(-1, 1, 1, 1)).detach()
    truth = lipbound.bracket(kernel, stride=2)
    found = audit(model, (4, 8, 8), search=0)
    assert truth.lower <= found.upper <= truth.upper * (1 + 1e-3)
    assert found.upper < found.product


def test_rules_of_ones_own():
    model = Run(lambda m, x: torch.diff(m.conv(x), dim=1), conv=conv(3, 3))
    found = audit(model, (3, 4, 4), search=0)
    assert "no rule for aten.diff" in found.reason
    assert "register_rule('aten.diff')" in found.reason

    @register_rule("aten.diff")
    def diff(step):
        return 2.0

    try:
        assert audit(model, (3, 4, 4), search=0).upper < math.inf
    finally:
        del RULES["aten.diff"]


def test_models_that_cannot_be_captured_are_audited_by_layer():
    model = Run(lambda m, x: m.conv(x) if x.sum() > 0 else x, conv=conv(3, 3))
    model.train()
    found = audit(model, (3, 4, 4))
    assert found.upper == math.inf
    assert found.reason.startswith("layers only: Run cannot be captured")
    assert [r.name for r in found.layers] == ["conv"]
    assert model.training


def test_audit_restores_modes_and_refuses_nan():
    model = nn.Sequential(conv(3, 3), nn.BatchNorm2d(3)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    audit(model, (3, 4, 4))
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        audit(model, (3, 4, 4))


def test_a_trained_resnet(shared: Path):
    safetensors = pytest.importorskip("safetensors.torch", reason="reads the weights")
    model = ResNet(20)
    weights = safetensors.load_file(shared / "data/weights/cifar10_resnet20.safetensors")
    model.load_state_dict(weights)
    found = audit(model, (3, 32, 32), search=2)
    assert found.lower <= found.upper < math.inf
    assert found.product >= 100 * found.upper
    assert len(found.layers) == 39


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
    with pytest.raises(AssertionError):  # of the check itself
        assert (
            float(lipbound.certify(model, dataclasses.replace(found, features_error=0.0), low)) == 0
        )


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


def test_errors_add_up_along_the_graph():
    """A sum's error is the sum of two, a concatenation's the root of the squares' sum."""
    soft, line = nn.Softplus(), nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        line.weight.copy_(3 * torch.eye(2))
    one = math.sqrt(2) * math.log1p(math.exp(-20))
    cases = {
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
    for name, (model, truth) in cases.items():
        found = audit(model.double(), (2,), search=0)
        assert found.upper < math.inf, name
        assert truth <= found.error <= truth * 1.01 + 1e-300, name


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


@pytest.mark.parametrize("power", [-160, -200, -300, 150])
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
    assert radius == pytest.approx(math.sqrt(2))  # of the diagonal
    assert radius <= math.sqrt(2)


def test_answers_of_any_size_are_compared_alone_and_together():
    model = Run(lambda m, x: 1e-170 * (x + x.mean(0)), like=nn.Linear(1, 1).double())
    with pytest.raises(ValueError, match="mixes the inputs of a batch"):
        lipbound.certify(model, audit(model, (3,)), torch.randn(4, 3, dtype=torch.float64))


def test_the_precision_of_the_inputs_is_that_of_a_network_without_weights():
    third = torch.tensor(1 / 3, dtype=torch.float64)
    model = Run(lambda m, x: x * third.to(x))
    for dtype in (torch.float64, torch.float32):
        found = audit(model, inputs=torch.randn(2, 3, dtype=dtype), search=0)
        assert found.upper == pytest.approx(float(third.to(dtype)), rel=1e-15)


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


def test_infinity_has_a_reason():
    for run in (lambda m, x: x * 1e300 * 1e300, lambda m, x: x * math.inf):
        found = audit(Run(run), (3,), search=0)
        assert found.upper == math.inf
        assert "largest float64" in found.reason or "not finite (aten.mul in" in found.reason


@pytest.mark.parametrize("equation", ["bj,jk->bk", "bj,bj->bj"])
def test_einsum_that_spreads_an_axis_is_refused(equation):
    shape = (5, 1) if "k" in equation else (1, 9)
    model = Run(lambda m, x: torch.einsum(equation, x[:, :1], torch.ones(shape)))
    assert "with a broadcast axis" in audit(model, (3,), search=0).reason


def test_a_tie_has_no_radius_though_the_rows_be_equal():
    head = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [1, 0], [0, 1]]))
    x = torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    first, second = lipbound.certify(head, audit(head, (2,)), x).tolist()
    assert (first, second) == (0, pytest.approx(math.sqrt(2)))


def single(number):
    return float(torch.tensor(number, dtype=torch.float32))


NUMBERS = {
    "factor": (Run(lambda m, x: 0.7 * x), 0.7, 1),
    "divisor": (Run(lambda m, x: x / 0.7), 0.7, -1),
    "alpha": (Run(lambda m, x: torch.add(torch.zeros(3), x, alpha=0.1)), 0.1, 1),
    "alpha of sub": (Run(lambda m, x: torch.sub(torch.zeros(3), x, alpha=0.1)), 0.1, 1),
    "alpha of rsub": (Run(lambda m, x: torch.rsub(x, torch.zeros(3), alpha=0.1)), 0.1, 1),
    "alpha of addmm": (
        Run(lambda m, x: torch.addmm(torch.zeros(3), x, torch.eye(3), alpha=0.1)), 0.1, 1,
    ),
    "leaky": (nn.LeakyReLU(1.1), 1.1, 1),
    "rrelu": (nn.RReLU(1.1, 1.1), 1.1, 1),
    "elu": (nn.ELU(1.1), 1.1, 1),
    "mean": (Run(lambda m, x: x.mean(1)), 3.0, -0.5),
    "layer norm": (nn.LayerNorm(3, eps=1.1e-5), 1.1e-5, -0.5),
    "group norm": (Run(lambda m, x: F.group_norm(x, 1, eps=1.1e-5)), 1.1e-5, -0.5),
    "batch norm": (
        Run(lambda m, x: F.batch_norm(x, torch.zeros(3), torch.zeros(3), eps=1.1e-5)), 1.1e-5, -0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_python_number_is_also_what_float32_makes_of_it(name):
    """0.1 is larger in float32, 0.7 smaller; a bound is for both."""
    model, number, power = NUMBERS[name]
    truth = max(number**power, single(number) ** power)
    upper = audit(model, (3,), search=0).upper
    assert upper >= truth * (1 - 1e-15)
    assert upper <= truth * (1.002 if name == "alpha of addmm" else 1 + 2e-6)


def test_casts_are_said():
    found = audit(Run(lambda m, x: x.half().to(x.dtype)), (3,))
    assert found.upper < 1.001
    assert "rounding of a cast to torch.float16 is not part of the bound" in found.note
    found = audit(Run(lambda m, x: (x, x.argmax(1))), (3,))
    assert "1 integer output(s) are not included in the bound" in found.note


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.AvgPool2d(2), (1, 512, 512)),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 512, 512)),
        (nn.Upsample(scale_factor=2, mode="bicubic"), (1, 300, 512)),
        (nn.AdaptiveAvgPool2d((1, 7)), (1, 600, 512)),
    ],
)
def test_large_images_are_pooled_and_resized_by_lines(layer, shape):
    """Each axis as the matrix it is to a line: images would take gigabytes."""
    small = audit(layer, (1, 24, 25), search=0).upper
    upper = audit(layer, shape, search=0).upper
    assert upper < math.inf
    if not isinstance(layer, nn.AdaptiveAvgPool2d):
        assert upper == pytest.approx(small, rel=0.02)


def test_radii_of_unbounded_networks_are_zero():
    build, shape, _ = UNBOUNDED["attention"]
    found = audit(build(), shape, search=0)
    assert (lipbound.certify(torch.randn(3, 5), found) == 0).all()
    with pytest.raises(ValueError, match="needs the inputs"):
        lipbound.certify(build(), found)
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        lipbound.certify(torch.zeros(3), found)


class Choosing(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


def test_what_cannot_be_audited_is_said_in_one_line(capfd):
    found = audit(Choosing(), (3,))
    assert found.reason.endswith("a branch depends on the values of a tensor")
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 9, 9\): mat1 and mat2"):
        audit(model, (3, 9, 9))
    with pytest.raises(ValueError, match="input_shape='3,8,8' is not a shape"):
        audit(model, "3,8,8")
    with pytest.raises(ValueError, match=r"\(8.5, 8\) must contain integers only"):
        bracket(nn.Conv2d(1, 1, 3), input_shape=(8.5, 8))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("shape", [(3, -1, 8), (), (3.0, 8, 8), 5, "3,8,8", torch.zeros(3)])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"is not a shape; pass for example \(3, 8, 8\)"):
        audit(nn.Conv2d(3, 4, 3), shape)


def test_a_network_without_logits_cannot_be_certified():
    model = Run(lambda m, x: x.argmax(1))
    with pytest.raises(ValueError, match="returns nothing"):
        certify(model, audit(model, (4,)), torch.randn(3, 4))
