"""The penalty: its value bounds the layers, its gradients agree, and it lives in any loop."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from cases import LAYERS, ROUNDING, build, energy_maxima
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import lipbound
from lipbound import Penalty, PowerIteration, bracket, estimate
from lipbound.penalty import penalty as module
from lipbound.penalty import plain
from lipbound.penalty.factors import factors
from lipbound.row_energies import lags, row_peaks
from lipbound.symbols import taps

triton = pytest.importorskip("triton", reason="the fused kernels need Triton")


@pytest.fixture(params=["plain", pytest.param("fused", marks=pytest.mark.slow)])
def engine(request, monkeypatch):
    """Both engines; the fused one through Triton's interpreter."""
    devices = ("cpu", "cuda") if request.param == "fused" else ()
    monkeypatch.setattr(module, "DEVICES", devices)
    return request.param


def network(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Conv2d(4, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.Linear(6, 4),
    )
    for norm in (model[1], model[4]):
        nn.init.normal_(norm.weight)
        norm.running_var.uniform_(0.3, 2)
    return model.to(dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(one, other, rtol=1e-4):
    assert one.keys() == other.keys()
    for name in one:
        scale = other[name].abs().amax()
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=float(rtol * scale) + 1e-30)


@given(
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(4, 9),
    st.integers(0, 99),
)
def test_row_peaks_are_those_of_the_polyphase_symbol(sizes, stride, rows, channels, samples, seed):
    torch.manual_seed(seed)
    kernel = torch.randn(rows, channels, *sizes, dtype=torch.float64)
    kind = lags(sizes, tuple(min(t, s) for t, s in zip(stride, sizes, strict=True)), samples)
    split = taps(lipbound.convolution(kernel, stride=kind.stride))
    expected = energy_maxima(split, kind.samples).flatten()
    torch.testing.assert_close(row_peaks(kernel.flatten(2), kind)[0], expected)
    torch.testing.assert_close(row_peaks(kernel.flatten(2), kind, locate=False)[0], expected)


@pytest.mark.parametrize("name", LAYERS)
def test_bounds_are_never_below_the_truth(name, engine):
    layer = build(name, torch.float32)
    with torch.no_grad():
        layer.weight.mul_(1e3)  # a wrong power of the scale shows
    (value,) = Penalty(nn.Sequential(layer)).bounds().values()
    truth = bracket(layer)
    assert value >= truth.lower * ROUNDING
    assert value <= 20 * truth.upper


def test_bounds_survive_underflow_and_peaks_between_grid_points(engine):
    for kernel in (
        torch.full((2, 3, 3, 3), 1e-25),  # squares underflow
        torch.tensor([[[1.0, 0.0, -1.0]]])[..., None] * torch.ones(1, 1, 1, 1),
        torch.zeros(2, 2, 3, 3),
    ):
        layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2:])
        layer.weight = nn.Parameter(kernel)
        for samples in (None, 5, 7):
            (value,) = Penalty(nn.Sequential(layer), samples=samples).bounds().values()
            assert value >= bracket(layer).lower


def test_wide_float32_rows_stay_above(engine):
    torch.manual_seed(0)
    layer = nn.Conv2d(700, 3, 3)
    (value,) = Penalty(nn.Sequential(layer)).bounds().values()
    symbols = torch.fft.rfft2(layer.weight.double(), s=(96, 96))
    exact = symbols.abs().square().sum(1).flatten(1).amax(1).sum().sqrt().item()
    assert exact <= value <= 1.02 * exact


@pytest.mark.parametrize("norms", [True, False, "folded"])
@pytest.mark.parametrize("method", ["lipbound", "polygrid"])
def test_both_ways_and_the_plain_twin_agree(method, norms, engine):
    model = network()
    penalty = Penalty(model, 0.3, method, include_batchnorm=norms, samples=9)  # interpreted
    value = penalty()
    value.backward()
    through_autograd = gradients(model)
    added = penalty.add_grad_()
    closed_form = gradients(model)
    total = 0.3 * plain.logs(penalty.factors, -math.inf).sum()
    total.backward()
    torch.testing.assert_close(value, total, rtol=1e-5, atol=0)
    torch.testing.assert_close(added, total.detach(), rtol=1e-5, atol=0)
    twin = gradients(model)
    assert_same(through_autograd, twin)
    assert_same(closed_form, twin)


@pytest.mark.parametrize("norms", [True, "folded"])
def test_gradient_is_that_of_finite_differences(norms):
    model = network(torch.float64)
    penalty = Penalty(model, 1.0, include_batchnorm=norms)
    penalty.add_grad_()
    found = gradients(model)
    for name, parameter in model.named_parameters():
        if name not in found:
            continue
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                parameter.add_(sign * 1e-6 * direction)
                ends.append(penalty())
                parameter.sub_(sign * 1e-6 * direction)
        slope = (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(slope, (found[name] * direction).sum(), rtol=1e-5, atol=1e-8)


FAST = [  # one for every kernel style, and one that is summed over its input channels
    nn.Conv2d(40, 5, 3),
    nn.Conv2d(4, 6, 5),
    nn.Conv2d(9, 300, 1),
    nn.Conv2d(5, 8, 3),
]
SLOW = [
    nn.Conv2d(3, 8, 7, 2),
    nn.Conv2d(3, 8, 11, 4),
    nn.Conv2d(4, 4, 5, groups=4),
    nn.Conv1d(3, 4, 9, dilation=2),
    nn.Conv3d(2, 3, 3),
    nn.ConvTranspose2d(4, 6, 4, 2),
    nn.Conv2d(5, 3, 2),
    nn.Conv2d(33, 4, (1, 4)),
    nn.Conv2d(4, 8, 1, groups=2),
    nn.Conv1d(8, 5, 6),
    nn.Conv2d(64, 3, 3, 2),
    nn.Conv2d(2, 40, 3, groups=2),
    nn.Conv2d(33, 66, 3, groups=33),
]  # fmt: skip


@pytest.mark.parametrize(
    "layer", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids=str
)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(torch.contiguous_format, torch.float32), (torch.channels_last, torch.bfloat16)],
)
def test_fused_equals_plain(layer, layout, dtype, monkeypatch):
    model = nn.Sequential(copy.deepcopy(layer).to(dtype))
    model[0].reset_parameters()  # from this test's seed, not from the import
    if layout is torch.channels_last:
        if layer.weight.ndim != 4:
            pytest.skip("channels_last has four axes")
        if layer.groups > 4:
            pytest.skip("many groups take the interpreter long")
        model = model.to(memory_format=layout)
    penalty = Penalty(model, 1.0)
    monkeypatch.setattr(module, "DEVICES", ())
    plain = penalty.add_grad_()
    expected = gradients(model)
    monkeypatch.setattr(module, "DEVICES", ("cpu", "cuda"))
    fused = Penalty(model, 1.0)
    value = fused.add_grad_()
    assert len(fused._terms._fused.factors) == 1
    torch.testing.assert_close(value, plain, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), expected, 1e-4 if dtype == torch.float32 else 1e-2)


def test_method_values_are_those_of_the_layers():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3, stride=2))
    expected = sum(estimate(layer, "polygrid").log() for layer in model)
    torch.testing.assert_close(Penalty(model, 1.0, "polygrid")(), expected, rtol=1e-5, atol=0)
    norm = nn.BatchNorm2d(4).eval()
    nn.init.normal_(norm.weight)
    (value,) = Penalty(nn.Sequential(norm)).bounds().values()
    assert value == pytest.approx(float(lipbound.lipschitz(norm)), rel=1e-5)


def test_floor_leaves_small_layers_alone(engine):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[2].weight.mul_(0.5)
    free, held = (Penalty(model, 1.0, samples=9, floor=floor) for floor in (None, 1.0))
    value = held.add_grad_()
    found = gradients(model)
    bounds = free.bounds()
    # Bounds in float64 pay less for rounding than the float32 value.
    assert float(value) == pytest.approx(math.log(bounds["1"]), abs=2e-4)
    assert not found["0.weight"].any()
    assert not found["2.weight"].any()
    assert found["1.weight"].any()
    value = held()
    held.bounds()  # without the floor, in the same buffers
    value.backward()
    assert_same(gradients(model), found)
    assert float(free()) < float(value)


def test_shared_frozen_and_parametrized_weights(engine):
    first, second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    second.weight = first.weight
    strided = nn.Conv2d(4, 4, 3, stride=2)
    strided.weight = first.weight  # the same weight, another geometry
    frozen = nn.Conv2d(4, 5, 3).requires_grad_(False)
    normed = parametrizations.weight_norm(nn.Conv2d(5, 3, 3))
    model = nn.Sequential(first, second, strided, frozen, normed)
    penalty = Penalty(model, 1.0, samples=9)  # few points: interpreted
    assert [f.count for f in penalty.factors] == [2, 1, 1, 1]
    value = penalty()
    value.backward()
    expected = gradients(model)
    assert set(expected) == {
        "0.weight", "4.parametrizations.weight.original0", "4.parametrizations.weight.original1",
    }  # fmt: skip
    torch.testing.assert_close(penalty.add_grad_(), value.detach())
    found = gradients(model)
    assert_same(found, expected)
    apart = [Penalty(nn.Sequential(layer), 1.0, samples=9) for layer in model]
    torch.testing.assert_close(sum(p() for p in apart), value)


def test_weights_may_move_and_gradients_may_be_replaced(engine):
    model = network()
    penalty = Penalty(model, 1.0, samples=9)  # few points: interpreted
    for change in (
        lambda: None,
        lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(4, 3, 3, 3))),
        lambda: model[3].weight.data.mul_(3),
        lambda: setattr(model[3], "weight", nn.Parameter(model[3].weight.detach())),  # same memory
        lambda: setattr(model[1], "eps", 0.5),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model[6].requires_grad_(False),
        lambda: model[6].requires_grad_(True),
    ):
        change()
        model.zero_grad(set_to_none=False)
        penalty.add_grad_(2.0)
        twice = gradients(model)
        plain.logs(penalty.factors, -math.inf).sum().backward()
        once = gradients(model)
        assert_same({n: g / 2 for n, g in twice.items() if g.any()}, once)


def test_two_calls_before_one_backward(engine):
    model = network()
    penalty = Penalty(model, 1.0, samples=9)  # few points: interpreted
    (penalty() + 2 * penalty()).backward()
    found = gradients(model)
    penalty.add_grad_(3.0)
    assert_same(gradients(model), found)
    penalty.add_grad_(torch.tensor(3.0))
    assert_same(gradients(model), found)


def test_both_ways_in_turns_with_gradients_that_stay(engine):
    """A backward pass points the kernels elsewhere; adding must look where to again."""
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    penalty = Penalty(model, 1.0, samples=9)  # few points: interpreted
    penalty.add_grad_()
    once = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    penalty.add_grad_()
    penalty().backward()
    penalty.add_grad_()
    penalty.add_grad_()
    assert_same({n: g / 5 for n, g in gradients(model).items()}, once)


def test_odd_gradients(engine):
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    penalty = Penalty(model, 1.0, samples=9)  # few points: interpreted
    penalty.add_grad_()
    expected = gradients(model)
    bucket = torch.zeros(model[0].weight.numel() + 1)
    model[0].weight.grad = bucket[1:].view_as(model[0].weight)  # as DDP's buckets: unaligned
    penalty.add_grad_()
    assert_same(gradients(model), expected)
    model[0].weight.grad = torch.zeros(8, 8, 3, 3).to(memory_format=torch.channels_last)
    penalty.add_grad_()
    assert_same(gradients(model), expected)


def test_compiles_whole():
    model = network()
    penalty = Penalty(model, 1.0)
    penalty().backward()
    expected = gradients(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def value():
        return penalty()

    value().backward()
    assert_same(gradients(model), expected)


def test_scaler_scales_what_is_added():
    model = network()
    penalty = Penalty(model, 1.0)
    penalty.add_grad_()
    plain = gradients(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(penalty()).backward()
    penalty.add_grad_(scale=scaler.get_scale())
    twice = {n: g / 128 for n, g in gradients(model).items()}
    assert_same(twice, plain)


def test_spectral_follows_the_supremum():
    model = network()
    penalty = Penalty(model, 1.0, "spectral", iterations=2)
    for _ in range(100):
        penalty()
    for _ in range(3):  # follow the weights as they train
        values = penalty.bounds()
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Conv2d):
                truth = bracket(layer, 1e-4)
                assert 0.99 * truth.lower <= values[name] <= truth.upper * (1 + 1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
        for _ in range(10):
            penalty()
    penalty().backward()
    first = gradients(model)
    penalty.add_grad_()
    assert_same(gradients(model), first, 1e-2)
    layer = nn.Conv2d(2, 3, 3)
    (found,) = Penalty(nn.Sequential(layer), method="spectral", iterations=500).bounds().values()
    reached = Penalty(nn.Sequential(layer), 1.0, "spectral", iterations=500)
    reached().backward()
    bound = lipbound.bound(layer, rtol=1e-6)
    (expected,) = torch.autograd.grad(bound.log(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-2, atol=1e-3)
    assert found == pytest.approx(float(bound), rel=1e-4)


def test_spectral_folds_batchnorm():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)).eval()
    nn.init.normal_(model[1].weight)
    gains = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    truth = bracket(model[0].weight.detach() * gains.detach().reshape(-1, 1, 1, 1))
    penalty = Penalty(model, method="spectral", include_batchnorm="folded", iterations=300)
    (value,) = penalty.bounds().values()
    assert 0.999 * truth.lower <= value <= truth.upper * (1 + 1e-5)


def test_power_iteration_at_the_layers_own_sizes():
    model = network().train()
    mean = model[1].running_mean.clone()
    penalty = Penalty(model, 1.0, "power_iteration", input_shape=(3, 9, 9), iterations=200)
    values = penalty.bounds()
    assert torch.equal(model[1].running_mean, mean), "reading the sizes must not train BatchNorm"
    assert model.training
    assert values["0"] == pytest.approx(lipbound.exact(model[0], (9, 9)), rel=1e-2)
    assert values["3"] == pytest.approx(lipbound.exact(model[3], (9, 9)), rel=1e-2)
    penalty.add_grad_()
    assert "0.weight" in gradients(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(4, 4, 3, padding=1),
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, dilation=2, stride=2),
        lambda: nn.Conv2d(4, 4, (2, 3), padding=2, padding_mode="circular"),
        lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1),
        lambda: nn.Conv1d(4, 4, 5),
        lambda: nn.Linear(4, 4),
    ],
)
def test_power_iteration_of_equal_layers_is_that_of_each(make):
    """Run as groups of one layer; one of them is zero, one huge, and the weights move."""
    model = nn.ModuleList([make() for _ in range(4)]).double()
    with torch.no_grad():
        model[1].weight.zero_()
        model[2].weight.mul_(1e200)
    size = (4, *[7] * (model[0].weight.ndim - 2))
    model.forward = lambda x: sum(layer(x).sum() for layer in model)
    penalty = Penalty(model, 1.0, "power_iteration", input_shape=size, iterations=3)
    layers = [f.layer for f in penalty.factors]
    alone = [PowerIteration(layer, size) for layer in layers]
    for iterations in (20, 3, 3):
        found = list(penalty.bounds().values())
        expected = [float(one(iterations).detach().clamp_min(1e-300)) for one in alone]
        assert found == pytest.approx(expected, rel=1e-12)
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(1.0 + 0.1 * torch.rand_like(layer.weight))
    batches = [len(batch.indices) for batch in penalty._terms.layers]
    assert batches == ([1] * 3 if isinstance(layers[0], nn.Linear) else [4])
    penalty.add_grad_()
    found = [layer.weight.grad.clone() for layer in layers]
    for layer, one, gradient in zip(layers, alone, found, strict=True):
        (expected,) = torch.autograd.grad(one(3).clamp_min(1e-300).log(), layer.weight)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["spectral", "power_iteration"])
def test_followed_terms_leave_the_parameters_in_place(method, monkeypatch):
    """They differentiate by stand-ins; a parametrized layer's leaf lies elsewhere."""
    model = network()
    model[3].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    penalty = Penalty(model, 1.0, method, input_shape=(3, 9, 9), iterations=3)
    penalty()
    state = {name: tensor.clone() for name, tensor in penalty.state_dict().items()}
    penalty().backward()
    first = gradients(model)
    penalty.load_state_dict(state)
    penalty.add_grad_(scale=2.0)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model[3].weight.grad is None
    assert_same(gradients(model), {n: 2 * g for n, g in first.items()})
    monkeypatch.setattr(penalty._terms, "total", lambda *given, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        penalty.add_grad_()
    assert dict(model.named_parameters())["0.weight"] is before["0.weight"]
    model[0].weight = nn.Parameter(model[0].weight.detach())  # the same place, another parameter
    monkeypatch.undo()
    penalty.add_grad_()
    assert model[0].weight.grad is not None
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    penalty.add_grad_()
    assert model[0].parametrizations.weight.original.grad is not None


@pytest.mark.parametrize("method", ["spectral", "power_iteration"])
def test_followed_terms_in_odd_surroundings(method):
    model = network().double()
    model.register_buffer("graph", torch.eye(3).to_sparse())  # no layer's, and without an address
    penalty = Penalty(model, 1.0, method, input_shape=(3, 9, 9), iterations=3)
    with torch.inference_mode():
        start = penalty()
        penalty.add_grad_()
    assert gradients(model).keys() >= {"0.weight", "10.weight"}
    snapshot = penalty.state_dict()
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    penalty().backward()
    expected = gradients(model)
    assert all(torch.equal(snapshot[name], tensor) for name, tensor in before.items())
    for scale in (1.0, torch.ones(1), torch.ones((), dtype=torch.float64)):
        penalty.load_state_dict(before)
        with torch.autocast("cpu", torch.bfloat16):
            copy.deepcopy(penalty).add_grad_()
            penalty.add_grad_(scale)
        assert_same(gradients(model), expected, 1e-9)
    late = penalty()
    penalty.add_grad_()  # climbs on; the gradient of the value before is still right
    late.backward()
    assert abs(float(late.detach()) - float(start)) < 1


def test_which_layers_are_factors():
    model = network()
    names = [f.name for f in factors(model)]
    assert names == ["0", "1", "3", "4", "6", "7", "10"], "every layer but the last Linear"
    assert [f.name for f in factors(model, include_batchnorm=False)] == ["0", "3", "6", "7", "10"]
    folded = {f.name: f.norm for f in factors(model, include_batchnorm="folded")}
    assert list(folded) == ["0", "3", "6", "7", "10"]
    assert folded["0"] is model[1]
    assert folded["6"] is None
    for exclude, left in (
        ("10", ["0", "1", "3", "4", "6", "7"]),
        (["1?", "0"], ["1", "3", "4", "6", "7"]),
        (nn.Conv2d, ["1", "4", "10"]),
        ([lambda name, layer: name == "6", nn.BatchNorm2d], ["0", "3", "7", "10"]),
        ("11", names),
    ):
        assert [f.name for f in factors(model, exclude=exclude)] == left


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: Penalty(m, method="gram"), r"method='gram' is not one of lipbound, polygrid"),
        (
            lambda m: Penalty(m, exclude="conv9"),
            r"exclude='conv9' matches no layer; the layers are 0",
        ),
        (lambda m: Penalty(m, exclude=3), r"exclude=3 is not a name, type or function"),
        (lambda m: Penalty(m, include_batchnorm="fold"), r"include_batchnorm='fold' is not True"),
        (lambda m: Penalty(m, floor=0.0), r"floor=0.0 must be positive"),
        (lambda m: Penalty(m, samples=2), r"samples=2 must be an integer of at least 3"),
        (lambda m: Penalty(m, method="power_iteration"), r"pass input_shape=\(channels"),
        (lambda m: Penalty(m, method="spectral", iterations=0), r"iterations=0 must be"),
        (lambda m: Penalty(nn.ReLU()), r"ReLU has no convolution"),
        (
            lambda m: Penalty(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False))),
            r"0: its BatchNorm keeps no running statistics",
        ),
        (
            lambda m: Penalty(
                m, method="power_iteration", include_batchnorm="folded", input_shape=(3, 9, 9)
            ),
            r"use include_batchnorm=True",
        ),
    ],
)
def test_bad_arguments_name_the_fix(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(network())


def test_untraceable_models_cannot_be_folded():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)

        def forward(self, x):
            return self.conv(x) if x.sum() > 0 else x

    with pytest.raises(ValueError, match="use include_batchnorm=True"):
        Penalty(Branching(), include_batchnorm="folded")
    assert Penalty(Branching())() is not None


def _one_of_two(rank: int, store: str) -> None:
    """A process of the test below: both must end with the same, right gradients."""
    import torch._dynamo  # before the group, see lipbound.robust.training.distributed
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for views in (False, True):
            model = network()
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
            inputs = torch.full((2, 3, 8, 8), float(rank + 1))
            for penalty in (Penalty(wrapped, 0.1), Penalty(model, 0.1)):
                model.zero_grad()
                wrapped(inputs).square().mean().backward()
                penalty.add_grad_()
                afterwards = [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                (wrapped(inputs).square().mean() + penalty()).backward()
                for mine, inside in zip(afterwards, model.parameters(), strict=True):
                    torch.testing.assert_close(mine, inside.grad, rtol=1e-4, atol=1e-6)
                both = [torch.empty_like(afterwards[0]) for _ in range(2)]
                distributed.all_gather(both, afterwards[0])
                torch.testing.assert_close(*both, rtol=0, atol=0)
        # Its reducer joins gloo's threads with the interpreter's lock in hand, if it goes last.
        del wrapped, penalty, model
        gc.collect()
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    torch.multiprocessing.spawn(_one_of_two, args=(str(tmp_path / "store"),), nprocs=2)


def test_the_constant_pays_for_any_order_of_summation():
    """1 + Σ 2^-25, summed from the left in float32, is 1: the worst order loses all the rest."""
    count = 4096
    layer = nn.Conv2d(count + 1, 1, 1)
    weight = torch.full((1, count + 1, 1, 1), 2.0**-12.5)
    weight[0, 0] = 1
    layer.weight = nn.Parameter(weight)
    (factor,) = factors(nn.Sequential(layer))
    scale, tiny = factor.constant(factor.rows(layer.weight.detach()))
    assert scale**2 * (1 + tiny) >= 1 + count * 2.0**-25


def test_channels_that_tie_share_the_gradient(engine):
    model = nn.Sequential(nn.BatchNorm2d(5))  # fresh: every γ attains the maximum
    penalty = Penalty(model, 1.0)
    penalty.add_grad_()
    torch.testing.assert_close(model[0].weight.grad, torch.full((5,), 0.2), rtol=1e-5, atol=0)
    model.zero_grad()
    penalty().backward()
    torch.testing.assert_close(model[0].weight.grad, torch.full((5,), 0.2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_squares_that_overflow_bound_nothing(engine, layout, size):
    """One group of two is too large for float32 squares: ∞, whatever the other one says."""
    for groups in (1, 2):
        model = nn.Sequential(nn.Conv2d(4, 4, size, groups=groups), nn.Linear(1, 1))
        with torch.no_grad():
            model[0].weight[1] *= 1e21
        (value,) = Penalty(model.to(memory_format=layout)).bounds().values()
        # In plain PyTorch bounds are computed in float64, which has room.
        assert value == math.inf if engine == "fused" else value >= bracket(model[0]).lower


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(32, 2, 31), nn.Conv1d(16, 16, 1024), nn.Conv2d(64, 64, 13)], ids=str
)
def test_large_kernels_are_summed_in_double_precision(layer):
    """In float32 the allowance for rounding would exceed the value itself."""
    penalty = Penalty(nn.Sequential(layer), 1.0)
    (found,) = penalty.bounds().values()
    assert float(penalty()) == pytest.approx(math.log(found), abs=1e-4)
    assert float(penalty.add_grad_()) == pytest.approx(math.log(found), abs=1e-4)
    assert bool(layer.weight.grad.isfinite().all())


def test_a_traced_call_leaves_no_empty_tables():
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, (3, 11))

        def forward(self, x):
            return self.conv(x).mean() + lipbound.bound(self.conv, "lipbound")

    torch.export.export(Penalized(), (torch.randn(1, 3, 12, 12),), strict=False)
    assert float(lipbound.bound(nn.Conv2d(3, 4, (3, 11)), "lipbound")) > 0
