"""constrain: never above the limit where it promises that, close to it while training."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from cases import LAYERS, build
from torch import nn
from torch.nn.utils import parametrize

from lipbound import BOUNDS, bracket, brackets, constrain, exact, unconstrain
from lipbound.constraints import norm_limit, scales
from lipbound.robust.models import SmallCNN


def test_a_change_of_precision_does_not_round_the_scale():
    """Weights that bfloat16 holds exactly compare equal afterwards; the scale must not change."""
    torch.manual_seed(0)
    for _ in range(20):
        layer = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            layer.weight.copy_((5 * layer.weight).bfloat16().float())
        constrain(layer, 1.0).eval()
        for there in (torch.bfloat16, torch.float16):
            layer.to(there).float()
            assert bracket(layer).upper <= 1
            layer.to(there)
            assert bracket(layer).upper <= 1
            layer.float()
        assert "scale" not in dict(layer.named_buffers())


def test_a_weight_cached_in_training_is_not_used_in_eval_mode():
    torch.manual_seed(0)
    layer = constrain(nn.Conv2d(3, 4, 3), 1.0)
    with torch.no_grad():
        free(layer).mul_(9)
    with parametrize.cached():
        layer(torch.randn(1, 3, 5, 5))
        assert bracket(layer.eval()).upper <= 1


CHANGES = {
    "stride": lambda m: setattr(m, "stride", (1, 1)),
    "padding": lambda m: setattr(m, "padding", (0, 0)),
    "padding_mode": lambda m: setattr(m, "padding_mode", "circular"),
    "dilation": lambda m: setattr(m, "dilation", (2, 2)),
    "groups": lambda m: setattr(m, "groups", 2),
    "_reversed_padding_repeated_twice": lambda m: setattr(
        m, "_reversed_padding_repeated_twice", [0, 0, 0, 0]
    ),
    "Doubled": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
}


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_changes_afterwards_is_refused(name, training):
    layer = constrain(nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2)), 1.0).train(training)
    with pytest.raises(ValueError, match=name):  # noqa: PT012
        CHANGES[name](layer)
        layer(torch.randn(1, 2, 8, 8))


@pytest.mark.parametrize("name", ["norm", "method", "scale"])
def test_what_was_certified_is_certified_anew_when_its_terms_change(name):
    layer = constrain(nn.Conv2d(2, 4, 3), 1.0).eval()
    with torch.no_grad():
        free(layer).mul_(9)
    assert bracket(layer).upper <= 1
    constraint = layer.parametrizations.weight[0]
    setattr(constraint, name, {"norm": 0.5, "method": "lipbound", "scale": 1.0}[name])
    assert bracket(layer).upper <= (0.5 if name == "norm" else 1)


def free(layer: nn.Module) -> nn.Parameter:
    return layer.parametrizations.weight.original


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_kind_keeps_the_limit(name):
    layer, size = build(name), LAYERS[name]["size"]
    with torch.no_grad():
        layer.weight *= 5
    kept = layer.weight.detach().clone()
    constrain(layer, 0.7)
    torch.testing.assert_close(free(layer), kept, rtol=0, atol=0)
    layer.eval()
    assert exact(layer, size) <= 0.7 * (1 + 1e-6)
    assert 0.7 * 0.99 / 4 <= bracket(layer).upper <= 0.7 * (1 + 1e-6)
    unconstrain(layer)
    assert type(layer.weight) is nn.Parameter
    assert bracket(layer).upper <= 0.7 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", BOUNDS)
def test_every_method_and_dtype(method, dtype):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1).to(dtype)
    with torch.no_grad():
        layer.weight *= 4
    unconstrain(constrain(layer, 1.0, method))
    assert layer.weight.dtype == dtype
    found = bracket(layer)
    assert found.lower <= 1 + 1e-6
    assert found.upper <= 1 + (1e-6 if method == "spectral" else 1e-3)
    assert found.upper > (0.97 if method == "spectral" else 0.2), "not stricter than it must be"


def test_the_limit_is_kept_to_the_last_digit():
    layer = nn.Conv1d(1, 1, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1 + 5e-8)
    assert unconstrain(constrain(layer, 1.0, "fantastic_four")).weight.item() <= 1.0


def test_small_layers_and_zeros_are_left_alone():
    for gain in (0.0, 1e-3):
        layer = nn.Conv2d(3, 3, 3)
        with torch.no_grad():
            layer.weight *= gain
        before = layer.weight.detach().clone()
        constrain(layer, 1.0)
        layer(torch.randn(1, 3, 5, 5)).sum().backward()
        assert torch.equal(layer.weight.detach(), before)
        assert torch.isfinite(free(layer).grad).all()
        assert torch.equal(unconstrain(layer).weight.detach(), before)


def test_training_stays_close_and_its_gradient_is_that_of_the_scaled_weight():
    torch.manual_seed(0)
    layer = constrain(nn.Conv2d(3, 8, 5, stride=2, padding=2), 1.0)
    optimizer = torch.optim.SGD(layer.parameters(), 0.05)
    target = torch.randn(4, 8, 8, 8)
    images = torch.randn(4, 3, 16, 16)
    for _ in range(40):
        optimizer.zero_grad()
        (layer(images) - target).square().mean().backward()
        optimizer.step()
    assert bracket(layer).upper < 1.02
    assert bracket(layer).lower > 0.97
    # K/σ(K) does not change with K's size: no gradient along K.
    optimizer.zero_grad()
    (layer(images) - target).square().mean().backward()
    gradient = free(layer).grad
    along = (gradient * free(layer)).sum() / gradient.norm() / free(layer).norm()
    assert abs(float(along.detach())) < 1e-3


def test_gradient_against_finite_differences():
    torch.manual_seed(0)
    layer = constrain(nn.Conv2d(2, 3, 3).double(), 0.5)
    for _ in range(60):
        _ = layer.weight  # let the climb arrive
    probe = torch.randn_like(layer.weight)

    def value(weight):
        return (layer.parametrizations.weight[0](weight) * probe).sum()

    weight = free(layer).detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(weight), weight)
    direction = torch.randn_like(weight)
    step = 1e-5
    with torch.no_grad():
        around = [value(weight + s * step * direction) for s in (1, -1) for _ in range(30)]
    slope = (around[29] - around[59]) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-3)


def test_whole_model_states_copies_and_later_changes():
    torch.manual_seed(0)
    model = constrain(SmallCNN(inputs=3), 1.0)
    with pytest.raises(ValueError, match="is constrained already"):
        constrain(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all(parametrize.is_parametrized(m) for m in layers)
    twin = copy.deepcopy(model)
    other = constrain(SmallCNN(inputs=3), 1.0)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    for each in (model, twin, other):
        each.eval()
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model(x), other(x))
    with torch.no_grad():
        free(layers[0]).mul_(100)  # weights that change in eval mode are certified anew
    assert bracket(layers[0]).upper <= 1 + 1e-6
    fresh = constrain(SmallCNN(inputs=3), 1.0).eval()
    fresh.load_state_dict(
        {k: 3 * v if "original" in k else v for k, v in twin.state_dict().items()}
    )
    assert all(bracket(m).upper <= 1 + 1e-6 for m in fresh.modules() if isinstance(m, nn.Conv2d))


def test_compile_export_autocast_and_inference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    with torch.no_grad():
        model[0].weight *= 9
    constrain(model, 1.0)
    x = torch.randn(2, 3, 8, 8)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(20):
            model(x)
    assert bracket(model[0]).upper < 1.01, "the climb does not run in bfloat16"
    model.eval()
    with torch.inference_mode():
        expected = model(x)
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: constrain(nn.ReLU()), "has no convolution"),
        (lambda: constrain(nn.Conv2d(1, 1, 1), 0.0), "norm=0.0 must be a positive"),
        (lambda: constrain(nn.Conv2d(1, 1, 1), "1"), "norm='1' must be a positive"),
        (lambda: constrain(nn.Conv2d(1, 1, 1), rtol=5), "rtol=5 must lie between 0 and 1"),
        (lambda: constrain(nn.Conv2d(1, 1, 1), 1.0, "guess"), "unknown method 'guess'"),
    ],
)
def test_wrong_use_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_whatever_steps_the_weights_eval_mode_notices(kind, fused):
    torch.manual_seed(0)
    layer = constrain(nn.Conv2d(2, 3, 3), 1.0)
    optimizer = kind(layer.parameters(), 0.3, fused=fused)
    x = torch.randn(4, 2, 6, 6)
    for _ in range(3):
        layer.train()
        for _ in range(4):
            optimizer.zero_grad()
            layer(x).square().mean().neg().backward()
            optimizer.step()
        layer.eval()
        assert bracket(layer).upper <= 1 + 1e-6
        layer(x).square().mean().neg().backward()
        optimizer.step()  # in eval mode too
        free(layer).data.mul_(3)
        assert bracket(layer).upper <= 1 + 1e-6
    compiled = torch.compile(layer, backend="eager")
    before = compiled(x)
    with torch.no_grad():
        free(layer).mul_(100)
    torch.testing.assert_close(compiled(x), before, rtol=1e-3, atol=1e-3)


def test_loaded_weights_are_certified_before_an_export():
    torch.manual_seed(0)
    stored = constrain(nn.Conv2d(2, 3, 3), 1.0)
    with torch.no_grad():
        free(stored).mul_(20)
    x = torch.randn(1, 2, 6, 6)
    for assign in (False, True):
        layer = constrain(nn.Conv2d(2, 3, 3), 1.0).eval()
        layer.load_state_dict(stored.state_dict(), assign=assign)
        graph = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(graph(x), copy.deepcopy(stored).eval()(x))
        assert bracket(layer).upper <= 1 + 1e-6


@pytest.fixture
def searches(monkeypatch):
    """Numbers of layers of the searches made from now on."""
    counts = []

    def counted(layers, *args):
        counts.append(len(layers))
        return brackets(layers, *args)

    monkeypatch.setattr(scales, "brackets", counted)
    return counts


def test_layers_of_a_model_are_certified_together(searches):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3), nn.Linear(5, 6), nn.Conv2d(3, 4, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(9)
    constrain(model, 0.5).eval()
    assert searches[0] == 4
    assert len(searches) < 4
    assert all(found.upper <= 0.5 for found in brackets(model).values())
    copied = copy.deepcopy(model)
    searches.clear()
    with torch.no_grad():
        free(copied[1]).mul_(3)
        free(model[0]).mul_(3)
    copied.eval()
    assert set(searches) == {1}, "the copy certifies its own layers, and only those that changed"
    before = model[0].parametrizations.weight[0].scale
    assert bracket(model[0]).upper <= 0.5
    assert model[0].parametrizations.weight[0].scale < before


def test_other_layers_do_not_disturb_a_certificate():
    """Neither weights that are no numbers, nor layers that are limited no longer."""
    model = constrain(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(4))), 0.5)
    with torch.no_grad():
        free(model[1]).fill_(float("nan"))
    unconstrain(model[2])
    constrain(model[2], 2.0)
    kept = model[3]
    del model[3]
    assert bracket(model[0].eval()).upper <= 0.5
    assert bracket(kept.eval()).upper <= 0.5
    with pytest.raises(ValueError, match="has 36 NaN"):
        model.eval()


WRONG = {
    "on another device": lambda layer: layer.to("meta"),
    "no width": lambda layer: setattr(layer.parametrizations.weight[0], "rtol", 5),
    "no limit": lambda layer: setattr(layer.parametrizations.weight[0], "norm", -1.0),
    "another shape": lambda layer: setattr(free(layer), "data", torch.zeros(0)),
    "freed": lambda layer: free(layer).untyped_storage().resize_(0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_one_layer_concerns_no_other(wrong):
    model = constrain(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), 0.5)
    WRONG[wrong](model[1])
    assert bracket(model[0].eval()).upper <= 0.5


def test_limits_that_are_no_longer_positive_are_refused():
    layer = constrain(nn.Conv2d(2, 2, 3)).eval()
    layer.parametrizations.weight[0].norm = -1.0
    with pytest.raises(ValueError, match=r"norm=-1\.0 must be a positive"):
        layer(torch.zeros(1, 2, 5, 5))


def test_a_write_during_the_search_is_noticed(monkeypatch):
    """As of a thread that trains the weights."""
    layer = constrain(nn.Conv2d(2, 2, 3), 0.5).eval()

    def interrupted(limits):
        found = scales.certified_scales(limits)
        with torch.no_grad():
            free(layer).mul_(100)
        return found

    with torch.no_grad():
        free(layer).mul_(3)
    with monkeypatch.context() as patch:
        patch.setattr(norm_limit, "certified_scales", interrupted)
        layer(torch.zeros(1, 2, 5, 5))
    assert bracket(layer).upper <= 0.5


def test_a_write_after_the_comparison_changes_nothing(monkeypatch):
    layer = constrain(nn.Conv2d(2, 2, 3), 0.5).eval()
    certify = norm_limit.Constrained._certify

    def interrupted(self, *given):
        scale = certify(self, *given)
        with torch.no_grad():
            free(layer).mul_(100)
        return scale

    monkeypatch.setattr(norm_limit.Constrained, "_certify", interrupted)
    weight = layer.weight
    assert bracket(weight).upper <= 0.5


@pytest.mark.parametrize("method", ["lipbound", "spectral"])
def test_a_bound_that_is_no_number_proves_nothing(monkeypatch, method):
    nothing = {"0": replace(bracket(torch.ones(1, 1)), upper=torch.nan)}
    monkeypatch.setattr(scales, "brackets", lambda *_: nothing)
    monkeypatch.setattr(scales, "bound", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(ValueError, match="is not a number"):
        constrain(nn.Linear(2, 2), 1.0, method).eval()


def test_one_wrong_layer_costs_no_second_search_of_the_others(searches):
    model = constrain(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(9))), 0.01)
    model[8].parametrizations.weight[0].method = "guess"
    with pytest.raises(ValueError, match=r"^8: unknown"):
        model.eval()
    assert len(searches) < 3 * 9


def test_layers_in_training_mode_are_left_alone(searches):
    model = constrain(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(4))))
    model[0].eval()
    searches.clear()
    with torch.no_grad():
        for layer in model:
            free(layer).mul_(9)
    assert bracket(model[0]).upper <= 1
    assert set(searches) == {1}


@pytest.mark.parametrize("method", ["spectral", "cayley"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_model_that_cannot_be_certified_is_left_alone(monkeypatch, method, error):
    def failing(limits):
        raise error("stop")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(norm_limit, "certified_scales", failing)
    with pytest.raises(error, match="stop"):
        constrain(model, 0.1, method)
    assert [layer.training for layer in model] == [True, False]
    assert [name for name, _ in model.named_parameters()] == list(before)
    assert not any(parametrize.is_parametrized(layer) for layer in model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_model_that_cannot_be_certified_stays_constrained():
    model = constrain(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(3))))
    with torch.no_grad():
        free(model[1]).fill_(torch.nan)
    with pytest.raises(ValueError, match="1: the kernel"):
        unconstrain(model)
    assert all(parametrize.is_parametrized(layer) for layer in model)
    assert all(part.training for part in model.modules())
    with torch.no_grad():
        free(model[1]).fill_(1)
    model[1].stride = (2, 2)
    with pytest.raises(ValueError, match="1: stride of this constrained Conv2d"):
        unconstrain(model)
    assert all(parametrize.is_parametrized(layer) for layer in model)
    model[1].stride = (1, 1)
    assert [name for name, _ in unconstrain(model)[0].named_parameters()] == ["weight", "bias"]


def test_a_search_takes_only_so_many_weights(monkeypatch, searches):
    monkeypatch.setattr(norm_limit, "TOGETHER", {"cpu": 90})
    model = constrain(nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(5))), 100.0).eval()
    assert searches == [2, 2, 1]
    assert all(found.upper <= 100 for found in brackets(model).values())


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.bfloat16(),
        lambda layer: layer.bfloat16().float(),
        lambda layer: setattr(layer.parametrizations.weight[0], "norm", 0.1),
    ],
)
def test_an_export_refuses_a_certificate_of_something_else(change):
    layer = constrain(nn.Conv2d(2, 3, 3)).eval()
    change(layer)
    x = torch.randn(1, 2, 6, 6, dtype=free(layer).dtype)
    with pytest.raises(ValueError, match=r"call \.eval\(\) before"):
        torch.export.export(layer, (x,))
    layer.eval()
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


def test_layers_constrained_in_eval_mode_are_certified_together(searches):
    model = constrain(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 6)).eval(), 0.1)
    assert searches[0] == 2
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_models_that_are_cast_afterwards(dtype):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3)
    with torch.no_grad():
        layer.weight *= 9
    constrain(layer, 1.0).to(dtype)
    layer(torch.randn(1, 2, 6, 6, dtype=dtype)).sum().backward()
    assert bracket(layer.eval()).upper <= 1 + 1e-6
    assert bracket(layer.float()).upper <= 1 + 1e-6


def test_inference_mode_throughout():
    with torch.inference_mode():
        layer = constrain(nn.Conv2d(2, 3, 3), 1.0).eval()
        layer.load_state_dict({k: 30 * v for k, v in layer.state_dict().items()})
        assert bracket(layer).upper <= 1 + 1e-6


def test_weights_that_are_no_numbers_are_named():
    layer = constrain(nn.Conv2d(2, 3, 3), 1.0)
    with torch.no_grad():
        free(layer).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite"):
        layer.eval()
    model = constrain(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)))
    with torch.no_grad():
        free(model[1]).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^1: the kernel .* has 54 NaN"):
        model.eval()


def test_a_little_above_the_limit_is_above_it():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3).double()
    with torch.no_grad():
        layer.weight *= 1.004 / bracket(layer, 1e-6).upper
    constrain(layer, 1.0).eval()
    assert bracket(layer).upper <= 1 + 1e-6


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_counts_while_training(mode):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    with torch.no_grad():
        layer.weight *= 9
    constrain(layer, 1.0)
    for _ in range(20):
        layer(torch.randn(1, 2, 6, 6))
    assert bracket(layer).upper < 1.01


def test_free_batch_norms_are_named():
    parts = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    with pytest.warns(
        UserWarning, match=r"1 BatchNorm layer\(s\) of this Sequential stay free \('1'\)"
    ):
        model = constrain(nn.Sequential(*parts))
    assert bracket(model[0].eval()).upper <= 1
