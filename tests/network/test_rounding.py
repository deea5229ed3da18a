"""Bounds on rounding: against 256-bit arithmetic, at the worst cases, and in certificates."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from zoo import OPERATIONS, Run

import lipbound
from lipbound import audit, certify
from lipbound.modules import in_float64
from lipbound.network import kernels
from lipbound.network.certificates import ARITHMETIC, Certifier
from lipbound.network.rounding import absolute_gain
from lipbound.network.rounding import capture as captured
from lipbound.network.rules import RULES, register_rule
from lipbound.network.rules import rounding as rules
from lipbound.network.rules.rounding import ROUNDINGS, Arithmetic, Near
from lipbound.network.rules.values import Value
from verify import rounding_checks
from verify.rounding_checks import check, compare

SIZES = (1.0, 1e-3, 1e4)


def test_every_rule_bounds_its_rounding_or_says_why_not():
    assert {op for op in RULES if op.startswith("aten.")} == set(ROUNDINGS)
    for rounding in ROUNDINGS.values():
        assert callable(rounding) or len(rounding) > 10


def inputs(shape: tuple[int, ...], size: float, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return (size * torch.randn(1, *shape, generator=draw, dtype=torch.float64)).to(dtype)


SWEEP = [(name, torch.float32) for name in OPERATIONS]
SWEEP += [
    pytest.param(name, torch.float64, marks=pytest.mark.slow) for name in list(OPERATIONS)[::4]
]


@pytest.mark.parametrize(("name", "dtype"), SWEEP)
def test_rounding_of_every_operation_is_below_its_bound(name, dtype):
    model, shape = OPERATIONS[name]
    centres = [inputs(shape, size, dtype) for size in SIZES]
    found = compare(copy.deepcopy(model).to(dtype).eval(), *centres)
    assert not found.wrong
    assert found.outcome == "compared" or found.outcome.startswith("refused"), found.outcome


def test_the_rounding_of_a_large_network_is_below_its_bound(monkeypatch):
    monkeypatch.setattr(rounding_checks, "LARGE", ("shift-digits",))
    monkeypatch.setattr(rounding_checks, "SHAPE", (1, 3, 8, 8))
    found = rounding_checks.compare_formats(0)
    assert not found.wrong
    assert len(found.margins) > 100
    limits = rounding_checks.limits
    monkeypatch.setattr(
        rounding_checks, "limits", lambda *given: [(c, e / 1e3) for c, e in limits(*given)]
    )
    assert rounding_checks.compare_formats(0).wrong


@pytest.mark.parametrize("seed", [41000011, 41000012, 41000014])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_in_random_networks_is_below_its_bound(seed, dtype):
    found = check(seed, dtype)
    assert (found.outcome, found.wrong) == ("compared", [])
    assert len(found.margins) >= 10


def gap_network() -> nn.Sequential:
    """f₂ − f₁ = 2x − 1 at a height of 2²², where float32 has steps of a half."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.fill_(2.0**22)
        model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]))
        model[1].bias.copy_(torch.tensor([2.0**22 + 0.5, -(2.0**22) - 0.5]))
    return model


def lost_digits(n: int = 200) -> Tensor:
    """A one, and numbers of half its last place, which a sum from the left loses one by one."""
    return torch.cat([torch.ones(1), torch.full((n,), 2.0**-53, dtype=torch.float64)])[None]


WORST = {
    "sum from the left": (Run(lambda m, x: x.cumsum(1)), lost_digits()),
    "bias": (gap_network(), torch.tensor([[0.76]])),
    "ball": (nn.Linear(3, 3, bias=False), torch.zeros(1, 3)),
    "number": (Run(lambda m, x: x + 0.1), torch.full((1, 4), -0.1)),
    "function": (nn.Tanh(), torch.linspace(-3, 3, 400)[None]),
    "product": (Run(lambda m, x: x * 0.1), torch.linspace(1, 2, 300)[None]),
    "passed on": (Run(lambda m, x: ((x + 1) - 1) * 1e4), torch.full((1, 3), 1e-9)),
    "parts": (
        Run(lambda m, x: torch.cat([p + 2.0**12 for p in x.chunk(2, 1)], 1) - 2.0**12),
        torch.full((1, 4), 1e-5),
    ),
    "batch norm": (nn.BatchNorm1d(3).eval(), torch.randn(1, 3)),
}
MUTATIONS = {
    "gamma": ("sum from the left", Arithmetic, "gamma", lambda self, count: count * self.unit / 4),
    "terms": ("sum from the left", rules, "terms", lambda step, value: 1.0),
    "ball": ("ball", Near, "moved", lambda self, value: np.zeros(1)),
    "number": ("number", Near, "sizes", lambda self, argument, shape: 0.0),
    "passed on": ("passed on", Value, "rounded", lambda self, error: self),
    "parts": ("parts", Value, "rounded", lambda self, error: self),
}


@pytest.mark.parametrize("name", WORST)
def test_worst_cases_are_below_the_bound_and_not_far(name):
    found = compare(*WORST[name])
    assert not found.wrong
    assert min(found.margins) < 0.99


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_constant_is_caught(name, monkeypatch):
    case, owner, attribute, wrong = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    assert compare(*WORST[case]).wrong


def test_without_the_bias_a_bound_is_too_small(monkeypatch):
    monkeypatch.setitem(ROUNDINGS, "aten.linear", lambda step, near, result: 1e-6)
    monkeypatch.setitem(ROUNDINGS, "aten.addmm", lambda step, near, result: 1e-6)
    assert compare(*WORST["bias"]).wrong


@pytest.mark.parametrize("layer", [
    nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
    nn.Conv1d(2, 3, 5, dilation=2), nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1),
    nn.AvgPool2d(3, 2, 1), nn.Linear(6, 4),
])  # fmt: skip
def test_the_norm_of_absolute_values_is_bounded(layer):
    layer, shape = layer.double(), {nn.Linear: (6,), nn.Conv1d: (2, 11)}.get(type(layer))
    shape = shape or (getattr(layer, "in_channels", 2), 7, 6)
    (call,) = captured(layer, [torch.zeros(1, *shape, dtype=torch.float64)]).calls
    found = absolute_gain(call, (1, *shape), torch.device("cpu"))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.abs_()
        zero = layer(torch.zeros(1, *shape, dtype=torch.float64))
        basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        matrix = (layer(basis) - zero).flatten(1)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    assert truth <= found <= 1.1 * truth


def test_the_gap_between_real_and_float32_is_closed():
    """The issue's network: its class changes at 0.5 for real, and elsewhere in float32."""
    model, x = gap_network(), torch.tensor([[0.76]])
    found = audit(model, (1,))
    old = float(certify(model(x), found))
    assert old > 0.49
    near = torch.tensor([[0.74]])  # float32 rounds it to another half
    assert int(model(near).argmax()) != int(model(x).argmax())
    assert float(certify(model, found, x, "float32")) == 0
    for arithmetic in ("real", "float64"):
        radius = float(certify(model, found, x, arithmetic))
        assert 0.2599 < radius <= 0.26 + 1e-6


def test_certificates_in_float64_are_hardly_smaller():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    found, x = audit(model, (1, 6, 6)), torch.rand(5, 1, 6, 6)
    real = certify(model, found, x)
    wide = certify(model, found, x, "float64")
    torch.testing.assert_close(wide, real, rtol=1e-9, atol=0.0)
    assert (wide < real).all()
    with kernels.ordinary_kernels():
        single = certify(model, found, x, "float32")
    assert ((single < wide) & (single > 0.9 * wide)).all()


def test_a_rule_without_rounding_leaves_real_arithmetic_only():
    model = nn.Sequential(nn.Linear(2, 2), Run(lambda m, x: x.frac() + x))
    rule = RULES.get("aten.frac")
    register_rule("aten.frac")(lambda step: 1.0)
    try:
        found, x = audit(model, (2,)), torch.rand(3, 2)
        certifier = Certifier(model, found)
        certifier.add(x)
        proved = certifier.finish()
        assert proved.arithmetic.startswith(ARITHMETIC["logits"])
        assert "aten.frac" in proved.arithmetic
        with pytest.raises(ValueError, match=r"aten.frac.*lipbound.register_rounding"):
            certify(model, found, x, "float64")
    finally:
        del RULES["aten.frac"]
        if rule is not None:
            RULES["aten.frac"] = rule


def half_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1, dtype=torch.float16))
    return model


@pytest.mark.parametrize(
    ("model", "arithmetic", "said"),
    [
        (nn.Linear(2, 2), "float16", "unknown arithmetic 'float16'"),
        (nn.Linear(2, 2).double(), "float32", "is torch.float64.*model.float"),
        (half_buffer(), "float32", "'scale' is torch.float16"),
        (Run(lambda m, x: x.bfloat16().float()), "float32", "computes in torch.bfloat16"),
        (nn.Upsample(scale_factor=2, mode="linear"), "float64", "positions of pixels"),
    ],
)
def test_what_is_not_proved_is_refused(model, arithmetic, said):
    shape = (2, 2) if isinstance(model, nn.Upsample) else (2,)
    found = audit(model, shape)
    if isinstance(model, nn.Upsample):
        model = nn.Sequential(model, nn.Flatten())
    x = torch.rand(1, *shape, dtype=torch.float64 if "float64" in said else torch.float32)
    with pytest.raises(ValueError, match=said):
        certify(model, found, x, arithmetic)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("autocast", "autocast"),
        ("nnpack", "NNPACK"),
        ("medium", "mkldnn.matmul.fp32_precision"),
        ("products", "mkldnn.matmul.fp32_precision"),
        ("convolutions", "mkldnn.conv.fp32_precision"),
        ("oneDNN", "ONEDNN_DEFAULT_FPMATH_MODE=bf16"),
    ],
)
def test_kernels_that_are_no_ordinary_sums_are_refused(setting, said, monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    found, x = audit(model, (1, 3, 3)), torch.rand(1, 1, 3, 3)
    with kernels.ordinary_kernels():
        if setting == "medium":
            torch.set_float32_matmul_precision("medium")
        if setting == "products":
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        if setting == "convolutions":
            torch.backends.mkldnn.conv.fp32_precision = "bf16"
        if setting == "oneDNN":
            monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "bf16")
        with (
            torch.autocast("cpu", enabled=setting == "autocast"),
            torch.backends.nnpack.flags(enabled=setting == "nnpack"),
            pytest.raises(ValueError, match=said),
        ):
            certify(model, found, x, "float32")


@pytest.mark.parametrize("before", ["none", "ieee", "bf16"])
def test_ordinary_kernels_leave_the_settings_as_they_were(before):
    setting = torch.backends.mkldnn.conv
    try:
        setting.fp32_precision = before
        with kernels.ordinary_kernels():
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == before
        torch.backends.fp32_precision = "tf32"
        assert setting.fp32_precision == ("tf32" if before == "none" else before)
    finally:
        torch.backends.fp32_precision = setting.fp32_precision = "none"


def test_logits_that_rounding_does_not_explain_are_refused():
    """A network that mixes the inputs of a batch by a little."""
    model = Run(lambda m, x: x + 1e-4 * x.mean(0, keepdim=True))
    certifier = Certifier(model, audit(Run(lambda m, x: x * 1.0001), (2,)), "float64")
    certifier.add(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    with pytest.raises(ValueError, match="more than rounding can explain"):
        certifier.finish()


def test_a_copy_in_float64_is_the_certified_network():
    torch.manual_seed(0)
    model = lipbound.constrain(nn.Linear(3, 3), 1.0)
    found, x = audit(model, (3,)), torch.rand(2, 3)
    certifier = Certifier(model, found, "float64")
    logits = certifier.add(x)
    assert torch.equal(logits, in_float64(model)(x.double()))
    assert (certifier.finish().radii > 0).all()


def overflowing_softplus() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 2), nn.Softplus(threshold=100.0))
    model[0].weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    model[0].bias.data.copy_(torch.tensor([300.0, 0.0]))
    return model


def overflowing_mean() -> nn.Module:
    head = nn.Linear(1, 2)
    head.weight.data.copy_(torch.tensor([[-1e-35], [1e-35]]))
    head.bias.data.copy_(torch.tensor([4.0, -4.0]))
    return Run(lambda m, x: m.head(x.mean(1, keepdim=True)), head=head)


def other_pixels(m: nn.Module, x: Tensor) -> Tensor:
    """float32 takes pixel 0 here, and float64 pixel 1."""
    z = nn.functional.interpolate(x, size=82, mode="nearest")[:, :, 41]
    return nn.functional.pad(torch.relu((z[:, 0:1] + z[:, 2:3]) - z[:, 1:2] - 1), (1, 0)) + 0.5


HIGH = torch.tensor([[[2.0**24, 0.0], [2.0**24, 0.0], [0.999, 0.999]]])


def overflowing_norm(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """γ/√ε times the mean is above the largest float32, although the result is small."""
    norm.weight.data.fill_(2e36)
    return Run(lambda m, x: m.norm(x.reshape(shape)).reshape(1, 2), norm=norm)


def writing() -> nn.Module:
    """The second entry, which rounds the first one, is gone after a run."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = x[:, :1] + x[:, 1:] - x[:, 1:]
        x.mul_(torch.tensor([1.0, 0.0]))
        return torch.cat([y, torch.full_like(y, 5.0)], 1)

    return Run(run)


def compiled_module() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile()
    return layer


def scaled_norm(norm: nn.Module, weight: float, variance: float = 1.0) -> nn.Module:
    norm.weight.data.fill_(weight)
    if isinstance(norm, nn.BatchNorm1d):
        norm.running_var.fill_(variance)
    return norm.eval()


HOLES = {
    "an exponential overflows": (overflowing_softplus(), torch.tensor([[80.0]])),
    "a sum overflows before its division": (overflowing_mean(), torch.full((1, 1024), 3.2e35)),
    "formats take different pixels": (Run(other_pixels), HIGH),
    "alpha comes before or after the sum": (
        Run(lambda m, x: torch.addmm(torch.zeros(2), x, torch.eye(2), alpha=1e-10)),
        torch.tensor([[1.0, 2.0]]),
    ),
    "the constant is summed alone": (
        Run(lambda m, x: torch.einsum("bi,kj->bj", x, torch.ones(3, 2))), torch.ones(1, 2),
    ),
    "an integer is rounded": (
        Run(lambda m, x: torch.maximum(x, torch.tensor([16777217, 0]))), torch.ones(1, 2),
    ),
    "a float64 constant is rounded": (
        Run(lambda m, x: torch.maximum(x, torch.tensor(0.1, dtype=torch.float64))),
        torch.ones(1, 2),
    ),
    "a number is not normal": (Run(lambda m, x: x * 1.9e-45), torch.tensor([[1e37, 0.0]])),
    "a number is above the largest": (
        Run(lambda m, x: torch.cat([torch.relu(x * 1e39) * 1e-20 * 1e-20, x * 0 + 1e-3], 1)),
        torch.tensor([[-1e-4]]),
    ),
    "a constant is above the largest": (
        Run(lambda m, x: x / torch.tensor(1e39, dtype=torch.float64)),
        torch.tensor([[-1e10, 1e18]]),
    ),
    "a factor of a normalization overflows": (
        overflowing_norm(nn.GroupNorm(1, 2, eps=1.0), (1, 2, 1)), torch.tensor([[239.4, 241.4]]),
    ),
    "the value is summed before it is multiplied": (
        Run(lambda m, x: torch.einsum("bi,j->bj", x, torch.tensor([-1e-30, 1e-30]))
            + torch.tensor([1e9, -1e9])), torch.full((1, 4), 7e37),
    ),
    "the network writes to its input": (writing(), torch.tensor([[8.0, 2.0**25]])),
    "variance and epsilon cancel": (
        scaled_norm(nn.BatchNorm1d(2), 1.0, -9.999e-6), torch.tensor([[1.0, 0.2]]),
    ),
    "a module was compiled": (compiled_module(), torch.ones(1, 2)),
    "there is no bound": (Run(lambda m, x: x * x), torch.tensor([[1.0, 2.0]])),
    "the network is compiled": (torch.compile(nn.Linear(2, 2)), torch.ones(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLES)
def test_what_a_second_reader_broke_has_no_radius(name):
    model, x = HOLES[name]
    found = audit(model, tuple(x.shape[1:]), search=0)
    with kernels.ordinary_kernels():
        try:
            assert float(certify(model, found, x, "float32")) == 0
        except rules.NotProved:
            pass
        except ValueError as error:
            assert "torch.compile" in str(error)  # noqa: PT017


class Negated(nn.Module):
    def forward(self, weight):
        return -weight


@pytest.mark.parametrize("arithmetic", ["real", "float64"])
def test_a_parameter_that_two_layers_share_is_not_overwritten(arithmetic):
    layers = [nn.Linear(2, 2) for _ in range(2)]
    for layer in layers:
        layer.weight.data.copy_(torch.eye(2))
    layers[0].bias.data.copy_(torch.tensor([3.0, 0.0]))
    layers[1].bias = layers[0].bias
    parametrize.register_parametrization(layers[0], "bias", Negated(), unsafe=True)
    model = nn.Sequential(*layers)
    found = certify(model, audit(model, (2,), search=0), torch.tensor([[1.0, 0.0]]), arithmetic)
    assert float(found) == pytest.approx(math.sqrt(0.5))


def test_weights_that_are_computed_anew_in_float64_are_refused():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.raises(rules.NotProved, match=r"weight is computed by a parametrization"):
        certify(layer, audit(layer, (3,), search=0), torch.ones(1, 3), "float64")


def test_a_network_in_training_is_not_changed():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    found = audit(layer, (2,), search=0)
    before = copy.deepcopy(layer.train().state_dict())
    certify(layer, found, torch.ones(1, 2))
    assert layer.training
    assert all(torch.equal(before[name], now) for name, now in layer.state_dict().items())


def test_other_sums_in_float64_are_refused():
    def run(m: nn.Module, x: Tensor) -> Tensor:
        a, b = m.one(x), m.two(x)
        return (a + b) + (b + a) if x.dtype == torch.float32 else (a + a) + (a + b)

    model = Run(run, one=nn.Linear(2, 2), two=nn.Linear(2, 2))
    with pytest.raises(rules.NotProved, match="other values in float64"):
        certify(model, audit(model, (2,), search=0), torch.ones(1, 2), "float64")


def test_flushing_is_noticed_with_any_default_dtype():
    layer = nn.Linear(2, 2)
    found = audit(layer, (2,), search=0)
    torch.set_default_dtype(torch.float64)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU does not flush")
        with kernels.ordinary_kernels(), pytest.raises(rules.NotProved, match="flushed"):
            certify(layer, found, torch.ones(1, 2, dtype=torch.float32), "float32")
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("arithmetic", ["real", "float64", "float32"])
def test_images_are_not_changed(arithmetic):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    images = torch.tensor([[-1.0, 2.0]])
    with kernels.ordinary_kernels():
        certify(model, audit(model, (2,), search=0), images, arithmetic)
    assert images.tolist() == [[-1.0, 2.0]]


def test_the_audit_must_be_of_these_weights():
    layer = nn.Linear(2, 2)
    found = audit(layer, (2,), search=0)
    assert float(certify(copy.deepcopy(layer).double(), found, torch.ones(1, 2).double())) > 0
    layer.weight.data *= 2
    with pytest.raises(ValueError, match="audit it again"):
        certify(layer, found, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("model", "centre"),
    [
        (nn.SiLU(), torch.tensor([[-88.73, -88.75]])),
        (nn.SiLU(), torch.tensor([[-709.79, -709.8]], dtype=torch.float64)),
        (scaled_norm(nn.BatchNorm1d(3), 1.1e-42), torch.full((1, 3), 1e36)),
        (scaled_norm(nn.BatchNorm1d(3), 1.1e-25, 1.4e36), torch.full((1, 3), 9e35)),
        (scaled_norm(nn.GroupNorm(1, 4, 1e30), 1.3e-29), 1e16 * torch.arange(12.0).view(1, 4, 3)),
    ],
)  # fmt: skip
def test_factors_that_underflow_are_counted(model, centre):
    found = compare(model, centre)
    assert (found.outcome, found.wrong) == ("compared", [])


def test_flushed_numbers_are_refused():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    found = audit(layer, (2,))
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(ValueError, match=r"set_flush_denormal\(False\)"):
            certify(layer, found, x, "float64")
    finally:
        torch.set_flush_denormal(False)


def test_whole_factors_repeat_pixels_exactly():
    model = nn.Sequential(nn.Upsample(scale_factor=2), nn.Flatten())
    assert compare(model, torch.rand(1, 1, 3, 2)).margins


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_depthwise_convolutions_are_refused_on_arm(machine, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten())
    found, x = audit(model, (2, 3, 3), search=0), torch.rand(1, 2, 3, 3)
    with kernels.ordinary_kernels():
        if machine == "x86_64":
            assert certify(model, found, x, "float32") >= 0
        else:
            with pytest.raises(ValueError, match="depthwise"):
                certify(model, found, x, "float32")


def test_logits_have_no_arithmetic():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    found = audit(model, (2,))
    for given in ((None, "float32"), (x, "real")):
        with pytest.raises(ValueError, match=r"need the network.*certify\(model"):
            certify(model(x), found, *given)


def test_the_mode_of_the_network_is_kept():
    model, x = nn.Linear(2, 2).train(), torch.ones(1, 2)
    certify(model, audit(model, (2,)), x, "float32")
    assert model.training


@pytest.mark.parametrize("wrong", [None, -1.0, "much", torch.ones(1)])
def test_a_bound_on_rounding_must_be_a_number(wrong):
    register_rule("aten.frac")(lambda step: 1.0)
    lipbound.register_rounding("aten.frac")(lambda step, near, result: wrong)
    try:
        model = Run(lambda m, x: x.frac() + x)
        with pytest.raises(ValueError, match=r"rounding of aten.frac must be a number"):
            certify(model, audit(model, (2,), search=0), torch.rand(1, 2), "float64")
    finally:
        del RULES["aten.frac"], ROUNDINGS["aten.frac"]


def test_names_of_operations_are_checked():
    with pytest.raises(ValueError, match=r"'mylib::op' is not the name"):
        register_rule("mylib::op")
    with pytest.raises(ValueError, match=r"'mylib::op' has no Lipschitz rule.*'mylib.op'"):
        lipbound.register_rounding("mylib::op")
