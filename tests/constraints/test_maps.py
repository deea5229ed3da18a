"""Kernels of known norm: every method at every geometry that it takes, certified."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lipbound import bracket, constrain, unconstrain
from lipbound.constraints import (
    ConvexPotential,
    CyclicShift,
    GroupSort,
    HalfAbs,
    MinMax,
    OrthogonalLinear,
    Retraction,
)
from lipbound.constraints.layers import Centre, settle
from lipbound.constraints.maps import MAPS, ORTHOGONAL
from lipbound.constraints.orthogonal import newton_schulz, tangent

LAYERS = {
    "wide": lambda: nn.Linear(6, 4),
    "tall": lambda: nn.Linear(4, 7),
    "1×1": lambda: nn.Conv2d(6, 4, 1),
    "kernel = stride": lambda: nn.Conv2d(3, 5, 2, stride=2),
    "3×3": lambda: nn.Conv2d(6, 4, 3, padding=1),
    "3×3, more outputs": lambda: nn.Conv2d(4, 7, 3, padding=1),
    "3×3, stride 2": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "4×4, stride 2": lambda: nn.Conv2d(4, 6, 4, stride=2, padding=1),
    "groups": lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1),
    "one axis": lambda: nn.Conv1d(4, 4, 5, padding=2),
    "dilated": lambda: nn.Conv2d(3, 3, 3, dilation=2),
}
MATRICES = {"wide", "tall", "1×1", "kernel = stride"}
BLOCKS = {*LAYERS} - {"wide", "tall", "3×3, stride 2", "transposed", "dilated"}
TAKEN = {
    "cayley": MATRICES,
    "bjorck": MATRICES,
    "exponential": MATRICES,
    "bcop": BLOCKS,
    **{method: {*LAYERS} for method in ("aol", "sll", "parseval")},
}
PAIRS = [(method, name) for method in MAPS for name in LAYERS]


def made(method: str, name: str, norm: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return constrain(LAYERS[name](), norm, method)


def images(layer: nn.Module) -> torch.Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(2, layer.in_features)
    return torch.randn(2, layer.in_channels, *[8] * (layer.weight.ndim - 2))


def test_the_table_is_complete():
    assert TAKEN.keys() == MAPS.keys()
    assert {*ORTHOGONAL} <= MAPS.keys()


@pytest.mark.parametrize(("method", "name"), [p for p in PAIRS if p[1] in TAKEN[p[0]]])
def test_the_norm_is_the_limit_at_most_and_it_trains(method, name):
    layer = made(method, name, 0.7)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (layer(images(layer)) - 1).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
    assert bracket(layer, 1e-3).upper <= 0.7 * 1.0011
    layer.eval()
    found = bracket(layer, 1e-5)
    assert found.upper <= 0.7 * (1 + (1e-6 if method in ORTHOGONAL else 1e-3))
    if method in ORTHOGONAL:
        assert found.lower >= 0.7 * (1 - 1e-5)
    plain = unconstrain(layer)
    assert bracket(plain, 1e-5).upper == found.upper
    assert plain.weight.grad is None or plain.weight.grad.shape == plain.weight.shape


@pytest.mark.parametrize(("method", "name"), [p for p in PAIRS if p[1] not in TAKEN[p[0]]])
def test_other_layers_are_refused_with_a_method_that_takes_them(method, name):
    with pytest.raises(ValueError, match=f"method '{method}' needs .*'aol'"):
        made(method, name)


def test_orthogonal_kernels_keep_all_lengths():
    """A 3×3 kernel with as many outputs as inputs keeps the norm of an image inside a border."""
    torch.manual_seed(0)
    layer = constrain(nn.Conv2d(4, 4, 3, padding=2, bias=False), 1.0, "bcop").double().eval()
    image = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    assert torch.allclose(layer(image).norm(), image.norm(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_retraction_returns_to_orthogonal_matrices(shape):
    torch.manual_seed(0)
    model = nn.Sequential(OrthogonalLinear(shape[1], shape[0]), nn.Linear(shape[0], 2))
    keep, optimizer = Retraction(model), torch.optim.Adam(model.parameters(), 1e-2)
    inputs = torch.randn(16, shape[1])
    for _ in range(20):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        keep.project_()
        weight, slope = model[0].weight, model[0].weight.grad
        short = weight if shape[0] <= shape[1] else weight.mT
        turned = slope if shape[0] <= shape[1] else slope.mT
        inner = turned @ short.mT
        assert torch.allclose(inner, -inner.mT, atol=1e-5), "the gradient is tangent"
        optimizer.step()
        keep.retract_()
    assert torch.allclose(torch.linalg.svdvals(model[0].weight), torch.ones(min(shape)), atol=1e-3)
    keep.polish_()
    assert bracket(model[0]).upper <= 1 + 1e-6


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 5)])
def test_newton_schulz_finds_the_polar_factor(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    matrix = matrix / torch.linalg.matrix_norm(matrix, 2)[..., None, None] * 1.7
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose(newton_schulz(matrix, 40), left @ right)
    assert torch.allclose(tangent(left @ right, left @ right), torch.zeros(shape).double())


ACTIVATIONS = {
    "MinMax": MinMax(),
    "MinMax last": MinMax(-1),
    "GroupSort": GroupSort(3),
    "HalfAbs": HalfAbs(),
    "CyclicShift": CyclicShift(6, [(1, 0), (0, -1)], share=3),
    "CyclicShift last": CyclicShift(6, [(1, 0), (-1, 2)], share=3, dim=-1),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_norms_of_differences_or_shorten_them(name):
    torch.manual_seed(0)
    layer = ACTIVATIONS[name]
    inputs = torch.randn(2, 6, 6, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, inputs).reshape(inputs.numel(), -1)
    values = torch.linalg.svdvals(jacobian)
    assert torch.allclose(values, torch.ones_like(values)), "they only move and negate entries"
    one, other = inputs
    assert (layer(one[None]) - layer(other[None])).norm() <= (one - other).norm() * (1 + 1e-12)


@pytest.mark.parametrize("layer", [MinMax(), HalfAbs()])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_odd_numbers_of_channels_are_refused(layer, channels):
    with pytest.raises(ValueError, match=f"odd number of channels, {channels}, on axis 1"):
        layer(torch.randn(2, channels, 4, 4))


def test_a_move_by_nothing_stays():
    x = torch.randn(1, 4, 3, 3)
    assert torch.equal(CyclicShift(4, [(0, 0), (1, 0)], 4)(x)[:, :1], x[:, :1])


@pytest.mark.parametrize("size", [1e-25, 1e20])
@pytest.mark.parametrize("method", ["bjorck", "parseval", "aol", "sll"])
def test_the_size_of_the_first_weights_does_not_matter(method, size):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    other = nn.Linear(5, 3)
    other.weight.data = layer.weight.data * size
    one, two = (constrain(m, 1.0, method).eval().weight for m in (layer, other))
    assert torch.allclose(one, two, atol=1e-4)


def test_weights_that_overflow_are_named():
    layer = nn.Linear(5, 5)
    layer.weight.data *= 1e20
    with pytest.raises(ValueError, match="method 'exponential' overflows for weights up to"):
        constrain(layer, 1.0, "exponential")


def test_nothing_is_left_half_constrained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="2: method 'bcop' needs"):
        constrain(model, 1.0, "bcop")
    assert not any("parametrizations" in name for name in model.state_dict())


def test_a_copy_is_unconstrained_without_its_original():
    layer = constrain(nn.Linear(3, 3), 1.0, "cayley").eval()
    before = layer(torch.ones(1, 3))
    copied = copy.deepcopy(layer)
    held = copied.parametrizations.weight.original
    plain = unconstrain(copied)
    assert torch.equal(layer(torch.ones(1, 3)), before)
    assert torch.equal(plain(torch.ones(1, 3)), before)
    assert plain.weight is held, "an optimizer keeps its parameter"


def test_too_many_moves_are_refused():
    with pytest.raises(ValueError, match="3 moves need share=3 or more, not 2"):
        CyclicShift(6, [(1,), (2,), (3,)], share=2)


def test_centre_subtracts_the_mean_of_the_batch_then_a_constant():
    torch.manual_seed(0)
    layer = Centre(3)
    batch = torch.randn(8, 5, 3) + 2
    assert torch.allclose(layer(batch)[:4].mean((0, 1)), torch.zeros(3), atol=1e-6)
    settle(layer, batch)
    assert torch.allclose(layer.mean, batch[:4].mean((0, 1)))
    layer.eval()
    assert torch.allclose(layer(batch[:1]), batch[:1] - layer.mean)
    assert layer.momentum == 0.01


@pytest.mark.parametrize("method", ["spectral", "sll"])
def test_convex_potential_layers_have_norm_one(method):
    torch.manual_seed(0)
    layer = ConvexPotential(3, 5, method=method).double().eval()
    for _ in range(5):
        image = torch.randn(1, 3, 5, 5, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(layer, image).reshape(75, 75)
        assert torch.linalg.matrix_norm(jacobian, 2) <= 1 + 1e-12
