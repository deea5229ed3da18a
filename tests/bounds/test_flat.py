"""Flat symbols: their bracket holds the singular values at every frequency, and is narrow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lipbound import bound, bracket, constrain
from lipbound.bounds.flat import flat
from lipbound.bounds.problems import normalised
from lipbound.geometry import convolution
from lipbound.symbols import evaluate, taps


def orthogonal(rows: int, columns: int) -> torch.Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns, dtype=torch.float64))


def block(outs: int, ins: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    torch.manual_seed(outs + ins)
    layer = nn.Conv2d(ins, outs, size, stride, groups=groups, dtype=torch.float64)
    return constrain(layer, 1.0, "bcop").eval()


KERNELS = {
    "matrix": lambda: orthogonal(5, 9),
    "tall": lambda: orthogonal(9, 5),
    "one tap": lambda: orthogonal(4, 4).reshape(4, 4, 1, 1),
    "moved tap": lambda: nn.functional.pad(orthogonal(4, 6).reshape(4, 6, 1, 1), (2, 0, 0, 1)),
    "3×3": lambda: block(4, 6, 3).weight.detach(),
    "more outputs": lambda: block(7, 3, 3).weight.detach(),
    "two groups": lambda: block(6, 8, 3, groups=2).weight.detach(),
    "stride": lambda: block(6, 4, 4, stride=2).weight.detach(),
}
GEOMETRY = {"two groups": {"groups": 2}, "stride": {"stride": 2}}


def singular_values(kernel: torch.Tensor, **geometry: int) -> torch.Tensor:
    """All singular values at random frequencies, by SVD."""
    conv = convolution(kernel, **geometry)
    if conv.dims == 0:
        return torch.linalg.svdvals(kernel)
    draw = torch.Generator().manual_seed(3)
    frequencies = 2 * math.pi * torch.rand(64, conv.dims, generator=draw, dtype=torch.float64)
    return torch.linalg.svdvals(evaluate(taps(conv), frequencies))


@pytest.mark.parametrize("size", [1.0, 3e-5, 7e20])
@pytest.mark.parametrize("name", KERNELS)
def test_a_flat_bracket_holds_all_singular_values(name, size):
    torch.manual_seed(0)
    kernel, geometry = size * KERNELS[name](), GEOMETRY.get(name, {})
    found = bracket(kernel, **geometry)
    values = singular_values(kernel, **geometry)
    most = values.max()
    assert found.lower <= values.max() * (1 + 1e-13)
    assert most * (1 - 1e-13) <= found.upper <= most * (1 + 1e-11)
    assert found.width < 1e-11
    assert found.evaluations == 1, "no search"
    assert float(bound(kernel, "spectral", **geometry)) >= most * (1 - 1e-13)


@pytest.mark.parametrize("noise", [1e-9, 1e-6, 1e-4, 3e-4, 1e-2])
@pytest.mark.parametrize("name", KERNELS)
def test_noise_is_covered_or_searched(name, noise):
    """A perturbed kernel is within the bracket, whether it still counts as flat or not."""
    torch.manual_seed(1)
    kernel, geometry = KERNELS[name](), GEOMETRY.get(name, {})
    kernel = kernel + noise * torch.randn_like(kernel)
    found = bracket(kernel, 1e-3, **geometry)
    assert singular_values(kernel, **geometry).max() <= found.upper * (1 + 1e-14)
    assert found.width <= 1.01e-3
    symbols = taps(convolution(kernel, **geometry))
    wide = symbols if symbols.shape[1] <= symbols.shape[2] else symbols.transpose(1, 2)
    interval = flat(wide, 1e-3)
    assert (interval is None) == (noise > 5e-3) or 1e-5 < noise < 5e-3


def test_groups_of_different_norms_are_not_flat_together_but_exact():
    kernel = torch.cat([orthogonal(3, 3), 2 * orthogonal(3, 3)]).reshape(6, 3, 1, 1)
    found = bracket(kernel, groups=2)
    assert found.lower <= 2 * (1 + 1e-13)
    assert 2 * (1 - 1e-13) <= found.upper < 2 * (1 + 1e-3)


@pytest.mark.parametrize("order", [(1.0, 5.0), (5.0, 1.0)])
def test_the_gradient_belongs_to_the_largest_group(order):
    kernel = torch.tensor(order).double().reshape(2, 1, 1, 1).requires_grad_()
    bound(kernel, "spectral", groups=2).backward()
    assert kernel.grad.flatten().tolist() == pytest.approx([0.2 * (v - 1) / 0.8 for v in order])


def test_the_gradient_of_an_almost_flat_matrix_is_that_of_its_largest_value():
    torch.manual_seed(0)
    matrix = orthogonal(4, 4)
    left, values, right = torch.linalg.svd(matrix)
    values = values + torch.tensor([0.0, 0, 1e-5, 0])
    kernel = (left @ values.diag() @ right).requires_grad_()
    bound(kernel, "spectral").backward()
    assert torch.allclose(kernel.grad, torch.outer(left[:, 2], right[2]), atol=1e-4)


@pytest.mark.parametrize("power", [-320, -170, -162, -160, -154, 0, 150, 153, 154, 160, 300])
def test_flat_layers_are_suspected_at_every_scale(power):
    """Squares of their entries may under- or overflow."""
    torch.manual_seed(0)
    rows = orthogonal(8, 8) * 10.0**power
    (problem,) = normalised({"": convolution(rows[..., None, None])}).values()
    assert problem.spread < 1e-9
