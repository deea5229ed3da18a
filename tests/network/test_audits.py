"""The network's bound is never below a Jacobian norm; every rule is searched for violations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import fitted
from torch import nn
from torch.nn import functional as F
from zoo import NETWORKS, OPERATIONS, UNBOUNDED, Run, conv

import lipbound
from lipbound import audit, bracket, register_rule
from lipbound.network.jacobian import jacobian_norm
from lipbound.network.rules import RULES, values
from lipbound.robust.models import ResNet

LESS = {"plain", "no norm", "pre-activation", "bottleneck", "repvgg", "inception"}  # much alike


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LESS else []) for n in NETWORKS]
)
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
    shifted = Run(lambda m, x: m.a(x) - m.b(x), a=conv(3, 4), b=conv(3, 4, 5))
    with torch.no_grad():
        shifted.b.weight.zero_()
        shifted.b.weight[:, :, 1:4, 1:4] = shifted.a.weight
    assert audit(shifted, (3, 8, 8), search=0).upper < 1e-10


@pytest.mark.parametrize(
    ("alpha", "truth"), [(1, 0.1), (2.5, 1.25), *(pytest.param(*case, marks=pytest.mark.slow)
                                                  for case in ((-1, 1.9), (0, 1.0)))]
)  # fmt: skip
def test_linear_residuals_with_a_factor(alpha, truth):
    layer = conv(3, 3, bias=False)
    kernel = torch.zeros(3, 3, 3, 3)
    kernel[range(3), range(3), 1, 1] = -0.9
    layer.weight = nn.Parameter(kernel)
    scaled = Run(lambda m, x: torch.add(x, m.conv(x), alpha=alpha), conv=layer)
    assert audit(scaled, (3, 8, 8), search=0).upper == pytest.approx(truth, rel=2e-3)
    taken = Run(lambda m, x: torch.sub(x, m.conv(x), alpha=-alpha), conv=layer)
    assert audit(taken, (3, 8, 8), search=0).upper == pytest.approx(truth, rel=2e-3)


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


class Choosing(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


def test_what_cannot_be_audited_is_said_in_one_line(capfd):
    found = audit(Choosing(), (3,))
    assert found.reason.endswith("a branch depends on the values of a tensor")
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 9, 9\): mat1 and mat2"):
        audit(model, (3, 9, 9))
    with pytest.raises(ValueError, match=r"is a tensor of shape \(1, 3, 8, 8\); pass the shape of"):
        audit(nn.Linear(3, 3), torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="input_shape='3,8,8' is not a shape"):
        audit(model, "3,8,8")
    with pytest.raises(ValueError, match=r"\(8.5, 8\) must contain integers only"):
        bracket(nn.Conv2d(1, 1, 3), input_shape=(8.5, 8))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("shape", [(3, -1, 8), (), (3.0, 8, 8), 5, "3,8,8"])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"is not a shape; pass for example \(3, 8, 8\)"):
        audit(nn.Conv2d(3, 4, 3), shape)


def test_power_iteration_keeps_no_graphs(monkeypatch):
    """Each iteration would otherwise keep the activations of all iterations before it."""
    given, jvp = [], torch.func.jvp

    def seen(run, points, tangents):
        given.extend(tangents)
        return jvp(run, points, tangents)

    monkeypatch.setattr(torch.func, "jvp", seen)
    jacobian_norm(nn.Linear(40, 40), torch.randn(1, 40))
    assert len(given) > 2
    assert not any(tangent.requires_grad for tangent in given)
