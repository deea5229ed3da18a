"""Estimates equal their published definitions."""

from __future__ import annotations

import math

import pytest
import torch
from cases import LAYERS, build
from torch import nn

from lipbound import ESTIMATES, PowerIteration, bracket, estimate, exact

EACH = pytest.mark.parametrize("method", ESTIMATES)
SIZED = {"power_iteration", "circulant"}


def options(method: str, size=(6, 6)) -> dict:
    return {"input_shape": size} if method in SIZED else {}


@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (4, 3, 3, 3), (2, 5, 5, 5)])
@pytest.mark.parametrize("samples", [10, 7])
def test_polygrid_is_algorithm_1(shape, samples):
    """The two loops of the paper, point by point, one polynomial f_i per output channel."""
    kernel = torch.randn(shape, dtype=torch.float64)
    degree = shape[-1] // 2
    step = 2 * math.pi / samples
    total = 0.0
    for row in kernel:
        sigma = 0.0
        first = 0.0
        for _ in range(samples):
            first, second = first + step, 0.0
            for _ in range(samples):
                second += step
                energy = 0.0
                for channel in row:
                    f = sum(
                        channel[a, b]
                        * torch.exp(
                            torch.tensor(1j * ((a - degree) * first + (b - degree) * second))
                        )
                        for a in range(shape[-1])
                        for b in range(shape[-1])
                    )
                    energy += float(abs(f)) ** 2
                sigma = max(sigma, energy)
        total += sigma
    assert float(estimate(kernel, "polygrid", samples=samples)) == pytest.approx(
        math.sqrt(total), rel=1e-6
    )
    single = float(estimate(kernel.float(), "polygrid", samples=samples))
    assert single == pytest.approx(math.sqrt(total), rel=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_the_default_is_close_to_the_bracket(name):
    """On a strided layer the earlier default gave 4.00, where the certified end is 1.02."""
    layer = build(name)
    interval = bracket(layer, 1e-4)
    assert 0.98 * interval.lower <= float(estimate(layer)) <= interval.upper * (1 + 1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_power_iteration_reaches_sigma_from_below(name):
    layer, size = build(name), LAYERS[name]["size"]
    truth = exact(layer, size)
    few = float(estimate(layer, "power_iteration", input_shape=size))
    many = float(estimate(layer, "power_iteration", input_shape=size, iterations=300))
    assert few <= many * (1 + 1e-12)
    assert many <= truth * (1 + 1e-12)
    assert many == pytest.approx(truth, rel=2e-2)


def test_power_iteration_warm_starts():
    layer = build("3x3")
    warm = PowerIteration(layer, (8, 8))
    values = [float(warm(1)) for _ in range(40)]
    cold = float(estimate(layer, "power_iteration", input_shape=(8, 8), iterations=40))
    assert values[-1] == pytest.approx(cold, rel=1e-12)
    assert values == sorted(values)
    layer.weight.mul_(2)  # the layer trains; the vector stays good
    assert float(warm(1)) >= 2 * values[-1] * (1 - 1e-12)


def test_circulant_is_exact_for_circular_padding():
    for options_ in ({}, {"dilation": 2, "padding": 2}, {"groups": 2}):
        layer = (
            nn.Conv2d(4, 2, 3, **{"padding": 1, **options_}, padding_mode="circular", bias=False)
            .double()
            .requires_grad_(False)
        )
        found = float(estimate(layer, "circulant", input_shape=(6, 7)))
        assert found == pytest.approx(exact(layer, (6, 7)), rel=1e-12)


def test_reshape_is_torch_spectral_norm():
    layer = nn.Conv2d(3, 5, 3, dtype=torch.float64)
    found = float(estimate(layer, "reshape").detach())
    normed = nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=500)
    original = normed.parametrizations.weight.original
    ratio = original.flatten()[0] / normed.weight.flatten()[0]
    assert found == pytest.approx(float(ratio.detach()), rel=1e-9)


@EACH
def test_gradients(method):
    kernel = torch.randn(2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    if method == "power_iteration":  # its gradient is u·vᵀ's: right once it has converged
        value = estimate(kernel, method, input_shape=(4, 4), iterations=3000)
        (gradient,) = torch.autograd.grad(value, kernel)
        step = 1e-6 * torch.randn_like(kernel)
        up, down = (exact((kernel + s * step).detach(), (4, 4)) for s in (1, -1))
        assert float((gradient * step).sum()) == pytest.approx((up - down) / 2, rel=1e-4)
    else:
        torch.autograd.gradcheck(lambda k: estimate(k, method, **options(method)), kernel)
    (gradient,) = torch.autograd.grad(estimate(kernel, method, **options(method)).log(), kernel)
    assert float((gradient * kernel).sum().detach()) == pytest.approx(1, rel=1e-9)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precisions_and_zero(method, dtype):
    kernel = torch.randn(3, 2, 3, 3).to(dtype)
    value = estimate(kernel, method, **options(method))
    wanted = estimate(kernel.double(), method, **options(method))
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=0)
    zero = torch.zeros(3, 2, 3, 3, dtype=dtype, requires_grad=True)
    value = estimate(zero, method, **options(method))
    value.backward()
    assert float(value.detach()) == 0
    assert torch.isfinite(zero.grad).all()
    with torch.inference_mode():
        assert torch.isfinite(estimate(kernel, method, **options(method)))


@pytest.mark.parametrize("method", sorted(SIZED))
def test_sized_estimates_ask_for_the_size(method):
    with pytest.raises(ValueError, match=r"pass for example input_shape="):
        estimate(torch.ones(1, 1, 3, 3), method)
