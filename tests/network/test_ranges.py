"""Ranges of values, and the bounds of products of activations that follow from them."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound import audit, certify, ordinary_kernels
from lipbound.network.composition import compose
from lipbound.network.findings import audit_json
from lipbound.network.graph import Graph, capture
from lipbound.network.jacobian import norms_by_rows
from lipbound.network.rules import Options, Value, follow
from lipbound.network.rules.intervals import GROWING, LEAST, ONCE, TWICE
from lipbound.network.rules.ranges import INTERVALS, Range, Ranges
from lipbound.report.page import page


class Does(nn.Module):
    """A network that is a function of its input and some random layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.does = forward
        self.register_buffer("like", torch.zeros(()))  # gives the network a type
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def squeezed(self, x):
    x = torch.relu(self.norm(self.conv(x)))
    gate = torch.sigmoid(self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True)))))
    return self.last((x * gate).flatten(1))


def attended(self, x):
    """Pre-LayerNorm attention, written as most people write it."""
    q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
    shape = (*x.shape[:2], 2, -1)
    q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
    weights = ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1)
    return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def fused(self, x):
    q, k, v = (
        t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
    )
    return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attention(forward):
    return Does(forward, norm=nn.LayerNorm(8), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


def root_mean_square(self, x):
    return self.layer(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1))


def two() -> dict[str, nn.Module]:
    return {"a": nn.Linear(5, 4), "b": nn.Linear(5, 4)}


def broken_norm() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 2)
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


# name → network, input shape, domain; None if the bound holds for every input
CASES = {
    "squeeze and excitation": (
        lambda: Does(
            squeezed, conv=nn.Conv2d(2, 4, 3, padding=1), norm=broken_norm(),
            down=nn.Conv2d(4, 2, 1), up=nn.Conv2d(2, 4, 1), last=nn.Linear(64, 3),
        ), (2, 4, 4), (0.0, 1.0),
    ),
    "glu": (lambda: Does(lambda s, x: functional.glu(s.a(x), 1), **two()), (5,), (-1.0, 2.0)),
    "gated by hand": (
        lambda: Does(lambda s, x: s.a(x) * torch.sigmoid(s.b(x)), **two()), (5,), (-1.0, 1.0),
    ),
    "two gates": (
        lambda: Does(lambda s, x: torch.tanh(s.a(x)) * torch.sigmoid(s.b(x)), **two()), (5,), None,
    ),
    "swish by hand": (lambda: Does(lambda s, x: x * torch.sigmoid(x)), (6,), None),
    "hard swish by hand": (lambda: Does(lambda s, x: functional.hardsigmoid(x) * x), (6,), None),
    "attention by hand": (lambda: attention(attended), (5, 8), None),
    "attention": (lambda: attention(fused), (5, 8), None),
    "einsum": (
        lambda: Does(lambda s, x: torch.einsum("bij,bkj->bik", torch.tanh(x), torch.sigmoid(x))),
        (3, 4), None,
    ),
    "square": (lambda: Does(lambda s, x: x * x), (6,), (-1.0, 3.0)),
    "cube": (lambda: Does(lambda s, x: s.a(x).pow(3), a=nn.Linear(4, 4)), (4,), (-1.0, 1.0)),
    "exponential": (lambda: Does(lambda s, x: torch.exp(s.a(x)), **two()), (5,), (-1.0, 1.0)),
    "reciprocal": (lambda: Does(lambda s, x: 2.0 / (1 + x.abs())), (6,), (-1.0, 2.0)),
    "quotient": (lambda: Does(lambda s, x: x / (x.square().sum(1, True) + 1)), (6,), (-1.0, 1.0)),
    "root mean square": (lambda: Does(root_mean_square, layer=nn.Linear(6, 3)), (6,), (-1.0, 1.0)),
    "logarithm": (lambda: Does(lambda s, x: torch.log(torch.sqrt(x + 2)) * x), (6,), (-1.0, 1.0)),
    "deep": (
        lambda: Does(
            lambda s, x: s.b(torch.relu(s.a(x))) * s.c(functional.gelu(s.a(x))),
            a=nn.Linear(6, 6), b=nn.Linear(6, 3), c=nn.Linear(6, 3),
        ), (6,), (0.0, 1.0),
    ),
}  # fmt: skip
ACTIVATIONS = {
    "relu": torch.relu, "relu6": functional.relu6, "tanh": torch.tanh, "silu": functional.silu,
    "gelu": functional.gelu, "mish": functional.mish, "hardswish": functional.hardswish,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"), "abs": torch.abs,
    "leaky": lambda x: functional.leaky_relu(x, 0.1), "elu": functional.elu, "neg": torch.neg,
    "selu": functional.selu, "celu": functional.celu, "sin": torch.sin, "atan": torch.atan,
    "erf": torch.erf, "log sigmoid": functional.logsigmoid, "clamp": lambda x: x.clamp(-0.3, 0.2),
    "softsign": functional.softsign, "hardtanh": functional.hardtanh, "asinh": torch.asinh,
    "rsub": lambda x: 0.3 - x, "scaled": lambda x: -0.7 * x / 0.3, "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1), "logsumexp": lambda x: x.logsumexp((2, 3), keepdim=True),
    "max pool": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "average": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x, 3), "sum": lambda x: x.sum((2, 3)),
    "cumulated": lambda x: x.cumsum(2), "resized": lambda x: functional.interpolate(x, (7, 9)),
    "bilinear": lambda x: functional.interpolate(x, size=7, mode="bilinear"),
    "padded": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "joined": lambda x: torch.cat([x, -x], 1), "halved": lambda x: x.chunk(2, 1)[1],
    "sorted": lambda x: x.sort(1).values, "largest": lambda x: x.amax((2, 3)),
    "rolled": lambda x: x.roll(1, 2), "maximum": lambda x: torch.maximum(x, -x),
    "group norm": lambda x: functional.group_norm(x, 2, x.new_tensor([1.0, -2, 0.5, 3])),
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand_as(x) - x,
}  # fmt: skip


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.sigmoid(part).reshape(1, 2, 2) for part in x.chunk(2, 1))


def number(*entries, dtype=torch.float64) -> Tensor:
    return torch.tensor(entries, dtype=dtype)


# Found by an attack on this code: what broke a bound or a range → function, input shape, domain.
ATTACKED = {
    "bias of a product": (
        lambda s, x: torch.baddbmm(s.like.expand(1, 2, 2) + 100, *halves(x)) @ halves(x)[0],
        (8,), None,
    ),
    "negative bias of a product": (
        lambda s, x: torch.baddbmm(s.like.expand(1, 2, 2) - 100, *halves(x)) * x[0, :1],
        (8,), (0.0, 1.0),
    ),
    "negative alpha": (
        lambda s, x: torch.baddbmm(torch.zeros(1, 2, 2).double(), *halves(x), alpha=-3) * x[0, :1],
        (8,), (0.0, 1.0),
    ),
    "bias of a linear map": (
        lambda s, x: (
            functional.linear(halves(x)[0][0], halves(x)[1][0], number(-100.0, 100.0)) * x[0, :1]
        ),
        (8,), (0.0, 1.0),
    ),
    "int8": (lambda s, x: x * number(-128, -128, dtype=torch.int8) * x, (2,), (0.0, 1.0)),
    "int8, matrices": (
        lambda s, x: (x * number(-128, -128, dtype=torch.int8))[:, None] @ x[:, :, None],
        (2,), (0.0, 1.0),
    ),
    "large integers": (
        lambda s, x: ((x + torch.tensor(1000000031)) - 1e9) * x, (2,), (0.0, 1e-3),
    ),
    "underflow": (lambda s, x: number(1e300, 2e300) / x * 1e100, (2,), (1e200, 2e200)),
    "underflow of a quotient": (lambda s, x: x * 1e90 / x.flip(1) * 1e100, (2,), (1e200, 2e200)),
    "overflow of the centre": (
        lambda s, x: torch.clamp(x, max=1.5e308) * 1e-308 * torch.sigmoid(x * 1e-308),
        (2,), (1e308, 1.7e308),
    ),
    "a product taken off": (lambda s, x: x - x * x, (3,), (-1.0, 1.0)),
    "gates taken off": (lambda s, x: x - torch.sigmoid(x) * torch.tanh(x), (3,), None),
    "a subnormal scale": (
        lambda s, x: functional.scaled_dot_product_attention(
            x[..., None] * 1e224, x[..., None] * 1e100,
            x[..., None] * 1e-3 + number(1e5, -1e5)[:, None], scale=5e-324,
        ), (2,), (-1.0, 1.0),
    ),
    "a vector divided": (lambda s, x: number(1.0, -2.0, 3.0) / (x + 2), (3,), (-1.0, 1.0)),
}  # fmt: skip


def ranges(graph: Graph, domain: tuple[float, float] | None) -> tuple[Ranges, dict[str, Value]]:
    values: dict = {name: Value(shape, constant=1.0) for name, shape in graph.inputs.items()}
    options = Options(domain=domain)
    found = Ranges(graph, values, options, domain)
    object.__setattr__(options, "ranges", found)
    for call in graph.calls:
        values[call.name] = follow(call, values, options)
    return found, values


def contains(found: Range, value: Tensor) -> bool:
    inside = bool(((found.low <= value) & (value <= found.high)).all())
    return inside and math.hypot(*value.flatten().tolist()) <= found.norm


def drawn(shape, domain, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(1, *shape, generator=draw, dtype=torch.float64)
    if seed % 3 == 0:
        x = x.round()  # corners
    low, high = domain or (-50.0, 50.0)
    return low + (high - low) * x


def check_ranges(model: nn.Module, shape, domain, wanted: bool = True) -> None:
    model = model.double().eval()
    graph = capture(model, [drawn(shape, domain, 1)])
    found, _ = ranges(graph, domain)
    for seed in range(30):
        at = dict.fromkeys(graph.inputs, drawn(shape, domain, seed))
        for call in graph.calls:
            at[call.name] = call.run(call.given(at))
            known = found[call.name]
            if isinstance(at[call.name], Tensor) and known is not None:
                assert contains(known, at[call.name]), f"{call.name} at seed {seed}"
    assert not wanted or all(found[name] is not None for name in graph.outputs)


@pytest.mark.parametrize("name", CASES)
def test_products_are_bounded_and_their_ranges_hold(name):
    make, shape, domain = CASES[name]
    torch.manual_seed(len(name))
    model = make().double().eval()
    check_ranges(model, shape, domain, wanted=False)
    found = audit(model, shape, domain=domain)
    assert found.domain == domain
    assert found.upper < math.inf, found.reason
    if domain is not None:
        assert audit(model, shape, search=0).upper == math.inf
    points = torch.cat([drawn(shape, domain, seed) for seed in range(40)])
    assert float(norms_by_rows(lambda x: model(x).flatten(1), points).max()) <= found.upper
    with torch.no_grad():
        results = model(points).flatten(1)
    moved, reached = ((p[:, None] - p[None]).norm(dim=2) for p in (points.flatten(1), results))
    other = moved > 1e-6
    assert float((reached[other] / moved[other]).max()) <= found.upper * (1 + 1e-9)


@pytest.mark.parametrize("name", ATTACKED)
def test_attacks_on_the_ranges_stay_mended(name):
    does, shape, domain = ATTACKED[name]
    model = Does(does).double().eval()
    check_ranges(model, shape, domain, wanted=False)
    found = audit(model, shape, domain=domain, search=0)
    if "bias" not in name and "alpha" not in name:
        assert found.upper < math.inf, found.reason
    points = [drawn(shape, domain, seed) for seed in range(30)]
    most = max(float(norms_by_rows(lambda x: model(x).flatten(1), x)) for x in points)
    assert most <= found.upper * (1 + 1e-9)


UNDERFLOW = {  # of a power or a norm, then multiplied by a large number
    "power 10": (lambda s, x: x**10 * 1e300, (1,), 1.24e-36),
    "power 2000": (lambda s, x: x**2000 * 1e300, (1,), 0.6888),
    "outer": (lambda s, x: ((x * 1e300)[:, :, None] * x[:, None, :]) * 1e10, (2,), 5e-324),
}


@pytest.mark.parametrize("name", UNDERFLOW)
def test_slopes_do_not_underflow(name):
    does, shape, high = UNDERFLOW[name]
    found = audit(Does(does).double().eval(), shape, domain=(0, high), search=0)
    with localcontext(prec=50, Emin=-9999):
        edge, large = Decimal(high), Decimal("1e300")
        if name == "outer":
            truth = 2 * Decimal(2).sqrt() * edge * large * Decimal(10) ** 10
        else:
            power = int(name.split()[1])
            truth = power * edge ** (power - 1) * large
        assert truth <= Decimal(found.upper) < Decimal("Infinity")


AFFINE = {
    "addmm": lambda s, x: torch.addmm(s.a.bias, x, s.a.weight.t(), beta=0.5, alpha=-2.0),
    "baddbmm": lambda s, x: torch.baddbmm(
        s.a.bias.expand(1, 1, 4), x[None], s.a.weight.t()[None], alpha=-3.0
    )[0],
    "matmul, constant left": lambda s, x: (s.a.weight @ x[..., None])[..., 0],
    "mm, constant left": lambda s, x: torch.mm(s.a.weight, x.t()).t(),
    "bmm, constant left": lambda s, x: torch.bmm(s.a.weight[None], x[..., None])[..., 0],
}  # fmt: skip


@pytest.mark.parametrize("name", AFFINE)
def test_ranges_of_affine_maps_hold(name):
    torch.manual_seed(4)
    model = Does(lambda s, x: AFFINE[name](s, x).square(), a=nn.Linear(5, 4)).double()
    check_ranges(model, (5,), (-1.0, 2.0))
    found = audit(model, (5,), domain=(-1, 2), search=0)
    points = [drawn((5,), (-1.0, 2.0), seed) for seed in range(20)]
    most = max(float(norms_by_rows(model, x)) for x in points)
    assert most <= found.upper < 20 * most, found.reason


def test_a_pole_at_the_edge_of_the_largest_numbers_is_refused():
    model = Does(lambda s, x: 1 / (torch.clamp(x, max=1.5e308) * 1e-308 - 1.1)).double()
    assert audit(model, (1,), domain=(1e308, 1.7e308), search=0).upper == math.inf


def test_the_domain_is_compared_in_float64():
    """0.1 is a larger number in float32 than in float64."""
    model = Does(lambda s, x: torch.cat([x * x, 1 - x], 1)).double()
    found = audit(model, (1,), domain=(0, 0.1), search=0)
    with pytest.raises(ValueError, match="audit with a larger domain"):
        certify(model, found, torch.tensor([[0.1]]))


def test_a_number_that_pads_may_be_rounded():
    def padded(self, x):
        short = float(torch.tensor(0.1))
        return ((functional.pad(x, (0, 1), value=0.1) - short) * 1e9 + 1.49)[:, -1:] * x

    found = audit(Does(padded), (1,), domain=(-1e-12, 1e-12), search=0)
    assert found.upper >= 1.49


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("domain", [(-1.0, 1.0), (0.5, 0.75), (-9.0, -3.0), (-40.0, 60.0)])
def test_ranges_of_operations_hold(name, domain):
    torch.manual_seed(3)
    network = Does(lambda s, x: ACTIVATIONS[name](s.norm(s.conv(x))), norm=broken_norm(),
                   conv=nn.Conv2d(2, 4, 3, padding=1))  # fmt: skip
    check_ranges(network, (2, 5, 5), domain)


def test_every_operation_with_an_interval_has_a_rule():
    from lipbound.network.rules import RULES

    names = {op for op in INTERVALS if op != "getitem"}
    assert names - RULES.keys() == set()
    assert {f"aten.{n}" for n in (*GROWING, *ONCE, *TWICE)} | {*LEAST} <= names


def test_the_lipschitz_constant_narrows_a_range():
    """A rotation keeps the norm, but intervals do not know it."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(8)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers).double()
    graph = capture(model, [drawn((16,), (-1.0, 1.0), 1)])
    found, _ = ranges(graph, (-1.0, 1.0))
    alone = Ranges(graph, {}, Options(), (-1.0, 1.0))
    last = graph.outputs[0]
    assert found[last].norm == pytest.approx(4, rel=1e-2)
    assert float(found[last].high.max()) <= 4.1 < float(alone[last].high.max())


def test_the_bound_for_every_input_is_preferred():
    model = Does(lambda s, x: torch.tanh(x) * torch.sigmoid(x)).double()
    found = audit(model, (3,), domain=(0, 1), search=0)
    assert found.domain is None
    assert "every input" in found.note
    assert found.upper == audit(model, (3,), search=0).upper


def test_a_network_without_products_computes_no_range(monkeypatch):
    monkeypatch.setattr(Ranges, "_range", lambda *_: pytest.fail("not needed"))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    assert audit(model, (1, 5, 5), domain=(0, 1), search=0).upper < math.inf


@pytest.mark.parametrize("domain", [(1, 0), (0, 0), (0, math.inf), (0,), "01", (math.nan, 1), 3])
def test_bad_domains_are_refused(domain):
    with pytest.raises(ValueError, match="is not a smaller and a larger number"):
        audit(nn.ReLU(), (3,), domain=domain)


def test_inputs_outside_the_domain_are_refused():
    with pytest.raises(ValueError, match=r"outside domain=\(0.0, 1.0\), from -1 to 2"):
        audit(nn.ReLU(), inputs=torch.tensor([[-1.0, 2.0]]), domain=(0, 1))


def test_errors_are_not_multiplied():
    """softplus is only near a Lipschitz function, by a jump that a product would enlarge."""
    model = Does(lambda s, x: functional.softplus(x) * torch.sigmoid(x))
    found = audit(model, (3,), domain=(0, 1), search=0)
    assert "multiplies their errors (rounding, small jumps)" in found.reason


def test_float32_numbers_are_within_the_range():
    """0.3 is another number in float32; the range holds for both."""
    model = Does(lambda s, x: (x * 0.3) * (x - 0.1)).eval()
    graph = capture(model, [torch.ones(1, 3)])
    found = compose(graph, Options(domain=(0.0, 1.0)))
    known, _ = ranges(graph, (0.0, 1.0))
    product = graph.calls[0]
    exact = product.run(product.given({next(iter(graph.inputs)): torch.ones(1, 3)}))
    assert float(known[product.name].high.max()) >= max(float(exact.max()), 0.3)
    assert found.upper < math.inf


def test_certificates_of_a_domain_speak_of_inputs_in_it():
    torch.manual_seed(1)
    make, shape, domain = CASES["squeeze and excitation"]
    model = make().double().eval()
    found = audit(model, shape, domain=domain, search=0)
    batch = torch.cat([drawn(shape, domain, seed) for seed in range(12)])
    with pytest.warns(UserWarning, match=r"for changed inputs in \[0, 1\]: its rounding is not"):
        radii = certify(model, found, batch)
    assert float(radii.max()) > 0
    moved = torch.randn(50, *batch.shape, dtype=torch.float64)
    lengths = radii[:, None, None, None] / moved.flatten(2).norm(dim=2)[..., None, None, None]
    inside = (batch + 0.999 * lengths * moved).clamp(0, 1)
    with torch.no_grad():
        classes = model(inside.flatten(0, 1)).argmax(1).reshape(50, -1)
        assert bool((classes == model(batch).argmax(1)).all())
    with pytest.raises(ValueError, match=r"from .* to 2, but the audit is for inputs in \[0, 1\]"):
        certify(model, found, batch + (batch == batch.max()) * (2 - batch.max()))
    with pytest.raises(ValueError, match="its rounding is not bounded"), ordinary_kernels():
        certify(model, found, batch, "float64")


def test_the_domain_is_shown():
    found = audit(Does(lambda s, x: x * x), (2,), domain=(-1, 0.5), search=0)
    assert found.summary()[0].endswith("for inputs in [-1, 0.5]")
    assert json.loads(audit_json(found, "square"))["domain"] == [-1.0, 0.5]
    assert "network for inputs in [-1, 0.5]" in page(found, "square")


def test_a_bound_above_the_largest_number_has_a_logarithm():
    """Four factors, 1e370 in all: the constants are divided on the way."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    model = Does(
        lambda s, x: 1e100 * torch.tanh(1e90 * s.a(torch.tanh(1e90 * s.a(torch.tanh(1e90 * x))))),
        a=layer,
    ).double()
    found = audit(model, (2,), search=0)
    assert found.upper == math.inf
    assert found.log10_upper == pytest.approx(370, abs=0.01)
    assert "above the largest float64, 1.8e308: it is 10^370" in found.reason
    assert audit(layer, (2,), search=0).log10_upper == pytest.approx(0, abs=1e-3)


def test_a_shared_value_is_divided_once():
    """Both halves of the sum are the same value, and a part of a chunk is listed twice."""
    model = Does(lambda s, x: sum(t * 1e200 + t * 1e200 for t in (x * 1e200).chunk(1, 1))).double()
    assert audit(model, (2,), search=0).log10_upper == pytest.approx(400.301, abs=0.01)


def masked(self, x):
    """A mask that is computed from constants in the shape of the input, as in Swin."""
    mask = x.new_zeros(x.shape[1:])
    mask[1:] = 2
    mask = (mask[None] - 1).masked_fill(mask[None] != 0, -5.0)
    return x + mask


def test_masks_of_constants_are_constants():
    found = audit(Does(masked).double(), (4,), search=0)
    assert found.upper == pytest.approx(1)
    jumps = Does(lambda s, x: x.masked_fill(x.clone().relu() != 0, 0.0)).double()
    assert audit(jumps, (4,), search=0).upper == math.inf
