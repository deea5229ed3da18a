"""The asymptotic distribution of singular values, held against SVDs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import lipbound
from lipbound import spectrum
from lipbound.toeplitz import operator_matrix

LAYERS = {  # layer, two input sizes
    "1d": (lambda: nn.Conv1d(3, 5, 4, padding=3), (40, 160)),
    "strided": (lambda: nn.Conv1d(5, 3, 3, stride=2, padding=1), (40, 160)),
    "dilated": (lambda: nn.Conv1d(2, 3, 3, dilation=3, padding=3), (48, 192)),
    "grouped": (lambda: nn.Conv1d(4, 8, 3, groups=2, padding=1), (30, 120)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 5, stride=2, padding=2), (40, 160)),
    "untouched pixels": (lambda: nn.Conv1d(2, 5, 3, stride=2, dilation=2, padding=2), (40, 160)),
    "2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), (8, 24)),
    "2d strided": (lambda: nn.Conv2d(1, 3, (3, 2), stride=2, padding=1), (12, 36)),
    "reflected": (lambda: nn.Conv1d(3, 3, 5, padding=2, padding_mode="reflect"), (40, 160)),
}


def drawn(build) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def truth(layer: nn.Module, size: int) -> np.ndarray:
    shape = (size,) * (layer.weight.ndim - 2)
    return np.sort(np.linalg.svd(operator_matrix(layer, shape).toarray(), compute_uv=False))


@pytest.mark.parametrize("name", LAYERS)
def test_quantiles_approach_those_of_svds(name):
    """The mean deviation shrinks as the share of pixels at the border does."""
    build, sizes = LAYERS[name]
    layer, deviations = drawn(build), []
    found = spectrum(layer, samples=64 if "2d" in name else 1024)
    for size in sizes:
        values = truth(layer, size)
        levels = (np.arange(len(values)) + 0.5) / len(values)
        deviations.append(float(np.abs(found.quantile(levels) - values).mean()))
    assert deviations[1] < 0.45 * deviations[0]
    assert deviations[1] < 0.04 * found.bracket.upper


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(2, 3), (3, 2)])
def test_circular_layers_have_these_values_on_their_grid(channels, stride):
    layer = drawn(
        lambda: nn.Conv2d(*channels, 3, stride, padding=1, padding_mode="circular", bias=False)
    )
    size = 8
    found = spectrum(layer, samples=size // stride)
    values = truth(layer, size)
    times = np.rint(found.weights * len(values)).astype(int)
    np.testing.assert_allclose(np.repeat(found.values, times), values, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_squares_add_up_to_the_kernel(name):
    layer = drawn(LAYERS[name][0])
    found, kernel = spectrum(layer), lipbound.convolution(layer).kernel
    columns = kernel.shape[1] * math.prod(lipbound.convolution(layer).stride)
    groups = lipbound.convolution(layer).groups
    count = groups * min(kernel.shape[0] // groups, columns)
    assert found.weights.sum() == pytest.approx(1)
    total = float(kernel.detach().square().sum())
    assert count * float(found.weights @ found.values**2) == pytest.approx(total)


def test_the_numbers_of_known_layers():
    even = spectrum(torch.eye(3).reshape(3, 3, 1, 1))
    assert (even.condition, even.share_above(1.0), even.share_above(0.99)) == (1, 0, 1)
    assert even.effective_rank == pytest.approx(1)
    assert even.stable_rank == pytest.approx(1)
    half = spectrum(torch.diag(torch.tensor([2.0, 0.0])))
    assert (half.condition, half.share_above(1)) == (math.inf, 0.5)
    assert half.effective_rank == pytest.approx(0.5)
    assert half.stable_rank == pytest.approx(0.5)
    assert half.quantile([0.0, 0.5, 0.51, 1.0]).tolist() == [0, 0, 2, 2]
    nothing = spectrum(torch.zeros(2, 2, 3))
    assert (nothing.condition, nothing.effective_rank, nothing.stable_rank) == (math.inf, 0, 0)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_shares_do_not_depend_on_the_scale(scale):
    found = spectrum(scale * torch.tensor([[[1.0, 0.5]]], dtype=torch.float64))
    same = spectrum(torch.tensor([[[1.0, 0.5]]], dtype=torch.float64))
    for name in ("condition", "effective_rank", "stable_rank"):
        assert getattr(found, name) == pytest.approx(getattr(same, name))
    assert "stable rank 0.55" in str(found)


def test_a_tiny_value_beside_a_large_one_has_no_weight():
    diagonal = torch.diag(torch.tensor([1e10, 1e-318], dtype=torch.float64))
    assert spectrum(diagonal).effective_rank == pytest.approx(0.5)


def test_the_largest_value_lies_below_the_certified_end():
    layer = drawn(lambda: nn.Conv2d(3, 4, 3))
    found = spectrum(layer)
    assert found.quantile(1.0) <= found.bracket.upper
    assert found.bracket.upper == lipbound.bracket(layer).upper
    assert "[" in found.summary()[-1]
    assert len(str(found).splitlines()) == 2 + len(found.rows()) + 3
    assert found.to_dict()["quantiles"]["1"] == found.quantile(1.0)


def test_wide_layers_use_fewer_frequencies(monkeypatch):
    monkeypatch.setattr("lipbound.spectra.LARGEST", 12 * 100)
    assert spectrum(torch.ones(3, 4, 3, 3)).samples == (10, 10)
    assert spectrum(torch.ones(30, 50)).samples == ()


@pytest.mark.parametrize("level", [-0.1, 1.5, [0.5, math.nan]])
def test_wrong_levels_are_refused(level):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        spectrum(torch.ones(1, 1, 3)).quantile(level)


def test_a_coarse_grid_is_refused():
    with pytest.raises(ValueError, match="samples=2 is too coarse"):
        spectrum(torch.ones(1, 1, 5), samples=2)
    with pytest.raises(ValueError, match="samples=0 must be a positive integer"):
        spectrum(torch.ones(1, 1, 5), samples=0)
