"""Networks of known norm: parts that are joined again, and residual layers with tied weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lipbound import audit
from lipbound.constraints import ConvexPotential, CyclicShift, GroupSort, HalfAbs, MinMax
from lipbound.constraints.orthogonal import orthogonal_layers
from lipbound.robust.models import LiResNet, ShiftNetwork


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def parts(x: Tensor, count: int = 2) -> tuple[Tensor, ...]:
    return x.chunk(count, 1)


def shuffled(x: Tensor) -> Tensor:
    a, b, c = x.split([1, 2, 3], 1)
    return torch.cat([c.roll(1, 2), 0.5 * a, -b], 1)


def nested(x: Tensor) -> Tensor:
    a, b = parts(x)
    first, second = a.split([1, 2], 1)
    return torch.cat([b.abs(), torch.cat([second, first.tanh()], 1)], 1)


def every_other(x: Tensor) -> Tensor:
    return torch.cat([x[:, ::2], x[:, 1::2].relu()], 1)


def two_axes(x: Tensor) -> Tensor:
    """The parts along two axes overlap."""
    return torch.cat([x[:, :3].flatten(1), x[:, :, :2].flatten(1)], 1)


def twice(x: Tensor) -> Tensor:
    a, b = parts(x)
    return torch.cat([a, b, a], 1)


def overlapping(x: Tensor) -> Tensor:
    return torch.cat([x[:, :4], x[:, 3:]], 1)


def only_maxima(x: Tensor) -> Tensor:
    a, b = parts(x)
    return torch.cat([torch.maximum(a, b), torch.maximum(a, b)], 1)


def other_pair(x: Tensor) -> Tensor:
    a, b, c = parts(x, 3)
    return torch.cat([torch.maximum(a, b), torch.minimum(a, c)], 1)


def mixed(x: Tensor) -> Tensor:
    """A part that depends on other parts too."""
    a, b = parts(x)
    return torch.cat([a + b, b], 1)


def stacked(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(1)[::-1], 1)


EXACT = {
    "MinMax": (MinMax(), 1.0),
    "GroupSort": (GroupSort(3), 1.0),
    "HalfAbs": (HalfAbs(), 1.0),
    "CyclicShift": (CyclicShift(6, [(1, 0), (0, -1)], share=3), 1.0),
    "shuffled": (Of(shuffled), 1.0),
    "nested": (Of(nested), 1.0),
    "every other": (Of(every_other), 1.0),
    "unbound and stacked": (Of(stacked), 1.0),
    "twice": (Of(twice), math.sqrt(2)),
    "overlapping": (Of(overlapping), math.sqrt(2)),
    "two axes": (Of(two_axes), math.sqrt(2)),
    "two MinMax": (nn.Sequential(MinMax(), HalfAbs(), MinMax()), 1.0),
    "pair of two branches": (
        Of(lambda x: (lambda y: torch.cat([torch.maximum(x, y), torch.minimum(x, y)], 1))(2 * x)),
        math.sqrt(5),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_joined_parts_count_once(name):
    model, norm = EXACT[name]
    found = audit(model, (6, 4, 5))
    assert found.upper == pytest.approx(norm, rel=1e-9)
    assert found.lower <= found.upper * (1 + 1e-6)


SLY = {
    "only maxima": Of(only_maxima),
    "other pair": Of(other_pair),
    "mixed": Of(mixed),
    "twice": Of(twice),
    "overlapping": Of(overlapping),
    "grouped": nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), Of(nested), Of(twice)),
}


@pytest.mark.parametrize("name", SLY)
def test_parts_that_overlap_are_never_bounded_too_low(name):
    """Against the largest Jacobian norm of inputs at which maxima change sides."""
    torch.manual_seed(0)
    model = SLY[name].double().eval()
    found = audit(model, (6, 3, 3), search=0)
    for _ in range(20):
        image = torch.randn(1, 6, 3, 3, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(model, image)
        norm = torch.linalg.matrix_norm(jacobian.reshape(-1, 54), 2)
        assert norm <= found.upper * (1 + 1e-12)


class Residual(nn.Module):
    """x − scale · Aᵀ(weights · relu(Ax + b)), or a near miss."""

    def __init__(self, kind: str, scale: float = 2.0):
        super().__init__()
        torch.manual_seed(4)
        self.kind, self.scale = kind, scale
        self.kernel = nn.Parameter(torch.randn(5, 3, 3, 3) / 6)
        self.other = nn.Parameter(self.kernel.detach() * (1 + 1e-3))
        self.bias = nn.Parameter(torch.randn(5))
        self.weights = nn.Parameter(torch.rand(5, 1, 1) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.conv2d(x, self.kernel, self.bias, padding=1).relu()
        if self.kind == "weighted":
            inner = self.weights * inner
        if self.kind == "signed":
            inner = (self.weights - 0.5) * inner
        kernel = self.other if self.kind == "another kernel" else self.kernel
        back = functional.conv_transpose2d(inner, kernel, padding=1)
        if self.kind == "added":
            return x + self.scale * back
        start = 2 * x if self.kind == "another start" else x
        return start - self.scale * back


def brute(model: nn.Module) -> float:
    """The largest Jacobian norm at many inputs."""
    most = 0.0
    for seed in range(12):
        image = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
        jacobian = torch.autograd.functional.jacobian(model, 3 * image).reshape(48, 48)
        most = max(most, float(torch.linalg.matrix_norm(jacobian, 2)))
    return most


@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("kind", ["plain", "weighted"])
def test_residual_layers_with_tied_weights(kind, scale):
    model = Residual(kind, scale).double()
    weights = model.weights[:, :, :, None] if kind == "weighted" else torch.ones(1)
    from lipbound import bracket

    size = bracket((model.kernel * weights.sqrt()).detach()).upper
    found = audit(model, (3, 4, 4), search=0)
    assert found.upper == pytest.approx(max(1.0, scale * size**2 - 1), rel=1e-2)
    assert brute(model) <= found.upper * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["signed", "another kernel", "added", "another start"])
def test_near_misses_keep_the_ordinary_bound(kind):
    model = Residual(kind).double()
    found = audit(model, (3, 4, 4), search=0)
    assert found.upper > 1.5
    assert brute(model) <= found.upper * (1 + 1e-12)


def test_tokens_are_not_taken_for_channels():
    """A factor per token stands where one per channel would: five tokens of five features."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(5, 5))
            self.factor = nn.Parameter(torch.tensor([9.0, 0.1, 0.1, 0.1, 0.1])[:, None])

        def forward(self, x: Tensor) -> Tensor:
            inner = self.factor * functional.linear(x, self.matrix).relu()
            return x - functional.linear(inner, self.matrix.t())

    model = Tokens().double()
    found = audit(model, (5, 5), search=0)
    for seed in range(10):
        x = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
        jacobian = torch.autograd.functional.jacobian(model, x).reshape(25, 25)
        assert torch.linalg.matrix_norm(jacobian, 2) <= found.upper


class Broadcast(nn.Module):
    """The branch has one entry, which is subtracted from all five."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 1, stride=5)
        nn.init.ones_(self.conv.weight)
        nn.init.constant_(self.conv.bias, -1000)

    def forward(self, x: Tensor) -> Tensor:
        back = functional.conv_transpose1d(self.conv(x).relu(), self.conv.weight, stride=5)
        return x - 2 * back


class WithoutBatch(nn.Module):
    """Without a batch axis, a factor for each row stands where one for each channel would."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        nn.init.zeros_(self.conv.weight)
        self.conv.weight.data[0, 0] = 1
        nn.init.constant_(self.conv.bias, -1000)
        self.register_buffer("factor", torch.tensor([0.0, 0, 0, 10]).reshape(1, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.squeeze(0)
        back = functional.conv_transpose2d(self.factor * self.conv(y).relu(), self.conv.weight)
        return (y - back).unsqueeze(0)


class Negated(nn.Module):
    """addmm with alpha −1 negates its product."""

    def __init__(self, tied: bool):
        super().__init__()
        self.tied = tied
        self.register_buffer("matrix", -torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        y = (x - 1000).relu()
        product = torch.addmm(x.new_zeros(2), y, self.matrix, alpha=-1)
        if not self.tied:
            return y + product
        return x - torch.addmm(x.new_zeros(2), (x @ self.matrix).relu(), self.matrix, alpha=-1)


@pytest.mark.parametrize(
    ("model", "shape", "at"),
    [
        (Broadcast(), (1, 5), 2000.0),
        (WithoutBatch(), (3, 4, 4), 2000.0),
        (Negated(False), (2,), 2000.0),
        (Negated(True), (2,), -2000.0),
    ],
)
def test_parts_that_random_inputs_do_not_reach(model, shape, at):
    """A sceptic's cases: the activation is off at random inputs, so no search notices."""
    model = model.double().eval()
    found = audit(model, shape)
    x = torch.full((1, *shape), at, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(model, x).reshape(x.numel(), -1)
    assert torch.linalg.matrix_norm(jacobian, 2) <= found.upper * (1 + 1e-12)


def test_a_value_that_is_overwritten_leaves_no_error():
    def forward(x: Tensor) -> Tensor:
        w = functional.softplus(x).clone()
        w[:] = x
        return w

    assert audit(Of(forward), (4,)).upper == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    "method", ["spectral", "aol", "sll", pytest.param("bcop", marks=pytest.mark.slow)]
)
def test_convex_potential_networks_are_audited_at_their_product(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), ConvexPotential(4, 6, method=method), ConvexPotential(4, method=method)
    ).eval()
    found = audit(model, (3, 8, 8), search=0)
    first = found.layers[0].bracket.upper
    assert found.upper <= first * 1.01


SMALL = {"size": 8, "width": 16, "kernel": 3, "stride": 1, "cells": 2, "dense": 2}


@pytest.mark.parametrize("kind", [ShiftNetwork, LiResNet])
def test_certified_networks_are_audited_at_the_product_of_their_layers(kind):
    torch.manual_seed(0)
    model = kind(4, 1, **SMALL, depth=3, dense_width=16).eval()
    found = audit(model, (1, 8, 8))
    assert found.upper == pytest.approx(found.product, rel=1e-2)
    assert found.lower <= found.upper
    orthogonal = orthogonal_layers(model)
    known = {r.name: r.bracket.upper for r in found.layers if r.name in orthogonal}
    assert len(known) == len(orthogonal) > 3
    assert max(known.values()) <= 1 + 1e-6
