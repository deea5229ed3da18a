"""Weighted residual blocks: never below the operators they bound, whatever the weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import fitted
from torch import nn
from zoo import NETWORKS, Run, conv

from lipbound import audit, bracket
from lipbound.network import blocks
from lipbound.network.graph import capture
from lipbound.network.jacobian import jacobian_norm
from lipbound.network.rules import Options, Value, follow
from lipbound.robust.models import ResNet
from lipbound.symbols import evaluate, grid, radians
from lipbound.toeplitz import operator_matrix


def chain_of(model, shape):
    graph = capture(model, (torch.randn(1, *shape).double(),))
    values = {name: Value(s, constant=1.0) for name, s in graph.inputs.items()}
    for call in graph.calls:
        values[call.name] = follow(call, values, Options())
    return blocks.find_chain(values[graph.outputs[0]])


def dense(layer: nn.Module, size: int) -> torch.Tensor:
    return torch.as_tensor(operator_matrix(layer, (size, size)).toarray())


def network(stride: int, shortcut: str) -> nn.Module:
    width = 3 if shortcut == "identity" else 5

    def forward(m, x):
        x = torch.relu(m.stem(x))
        skip = x
        if shortcut == "conv":
            skip = m.skip(x)
        elif shortcut == "sliced":
            skip = nn.functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 1, 1))
        return m.head(torch.relu(m.two(torch.relu(m.one(x))) + skip).mean((2, 3)))

    return Run(
        forward, stem=conv(2, 3), one=conv(3, 4, stride=stride, bias=False),
        two=conv(4, width, bias=False), skip=conv(3, width, 1, stride=stride, bias=False),
        head=nn.Linear(width, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stride", "shortcut"), [(1, "identity"), (1, "conv"), (2, "conv"), (2, "sliced")]
)
def test_factors_are_the_block_and_bound_every_pattern_of_slopes(stride, shortcut):
    torch.manual_seed(0)
    model = network(stride, shortcut).double().eval()
    n = 12
    m = n // stride
    chain = chain_of(model, (2, n, n))
    assert len(chain.blocks) == 1
    one, two = dense(model.one, n), dense(model.two, m)
    if shortcut == "conv":
        skip = dense(model.skip, n)
    else:
        eye = torch.eye(3 * n * n, dtype=torch.float64).reshape(-1, 3, n, n)
        if shortcut == "sliced":
            eye = nn.functional.pad(eye[:, :, ::stride, ::stride], (0, 0, 0, 0, 1, 1))
        skip = eye.flatten(1).mT
    frequencies = radians(grid((16, 16), half=True), (16, 16))
    for seed in range(3):
        torch.manual_seed(seed)
        weights = blocks.Weights(chain)
        for parameter in (*weights.sides, *weights.inner):
            parameter.data.normal_(0, 0.5 * (seed > 0))
        left, right = (k.detach() for k in weights.factors()[1:3])
        found = bracket(left).upper * bracket(right).upper
        before = weights.sides[0].detach().exp().repeat_interleave(n * n)
        after = weights.sides[1].detach().exp().repeat_interleave(m * m)

        def norm(slopes: torch.Tensor, after=after, before=before) -> float:
            whole = after[:, None] * (skip + two @ (slopes[:, None] * one)) / before[None, :]
            return float(torch.linalg.matrix_norm(whole.detach(), 2))

        assert norm((torch.rand(len(one)) > 0.5).double()) <= found * (1 + 1e-12)
        for slope in (torch.zeros(4), torch.ones(4), torch.rand(4)):
            # The same slope everywhere: one symbol, which the dense norm nearly attains.
            middle = torch.cat([torch.ones(right.shape[1]), 2 * slope - 1]).to(torch.complex128)
            symbols = evaluate(left[None], frequencies)[0] @ (
                middle[:, None] * evaluate(right[None], frequencies)[0]
            )
            largest = float(torch.linalg.matrix_norm(symbols, 2).max())
            truth = norm(slope.double().repeat_interleave(m * m))
            assert truth <= min(found * (1 + 1e-12), 1.05 * largest)
            assert truth >= 0.9 * largest


def test_high_effort_is_lower_and_still_above_the_jacobian(monkeypatch):
    torch.manual_seed(0)
    few = partial(blocks.optimised, steps=6)
    monkeypatch.setattr("lipbound.network.composition.optimised", few)
    model = fitted(ResNet(8))
    shape = (3, 8, 8)
    normal, high = (audit(model, shape, search=0, effort=e) for e in ("normal", "high"))
    lower = jacobian_norm(model, torch.randn(8, *shape).double())
    assert lower <= high.upper < normal.upper
    assert "3 residual blocks" in high.note
    assert high.features * float(torch.linalg.matrix_norm(high.head, 2)) <= high.upper * (1 + 1e-9)


def test_high_effort_on_a_network_that_is_zero(monkeypatch):
    monkeypatch.setattr(
        "lipbound.network.composition.optimised", partial(blocks.optimised, steps=2)
    )
    model = fitted(ResNet(8))
    nn.init.zeros_(model.conv1.weight)
    found = audit(model, (3, 8, 8), effort="high", search=0)
    assert "3 residual blocks" in found.note
    assert 0 <= found.upper < 1e-300


@pytest.mark.parametrize("powers", [1, 3, 7])
def test_schatten_norms_and_their_gradients(powers):
    draw = torch.Generator().manual_seed(powers)
    root = torch.randn(3, 4, 6, dtype=torch.complex128, generator=draw).requires_grad_()

    def norm(root):
        return blocks.LogSchatten.apply(root @ root.mH, powers)

    values = torch.linalg.eigvalsh(root @ root.mH)
    plain = (values**2**powers).sum().log() / 2**powers
    torch.testing.assert_close(norm(root), plain)
    assert torch.autograd.gradcheck(norm, root)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(3, 5, 3, 3), (5, 3, 4), (4, 4)])
def test_the_estimate_is_that_of_the_symbols_norms(shape, size):
    draw = torch.Generator().manual_seed(0)
    kernel = size * torch.randn(shape, dtype=torch.float64, generator=draw)
    counts = (7,) * (len(shape) - 2)
    frequencies = radians(grid(counts, half=True), counts)
    values = torch.linalg.svdvals(evaluate(kernel[None], frequencies)[0])
    largest = values.max()
    plain = largest.log() + ((values / largest) ** 64).sum().log() / 64
    torch.testing.assert_close(blocks._estimate(kernel, 7, 5), plain, rtol=0, atol=1e-5)


def test_other_networks_say_that_nothing_was_gained():
    build, shape = NETWORKS["plain"]
    found = audit(build(), shape, search=0, effort="high")
    assert found.note.startswith("effort='high' had no effect")
    with pytest.raises(ValueError, match="effort='max' is not"):
        audit(build(), shape, effort="max")


def test_pixels_are_not_taken_for_channels():
    """Sixteen pixels left by a mean over sixteen channels: weights would meet wrong columns."""
    model = Run(
        lambda m, x: m.head(_residual(m, torch.relu(m.stem(x))).mean(1).flatten(1)),
        stem=conv(3, 16), one=conv(16, 16), two=conv(16, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    assert chain_of(model.double().eval(), (3, 4, 4)) is None


def _residual(m, x):
    return torch.relu(m.two(torch.relu(m.one(x))) + x)


@pytest.mark.parametrize("dims", [1, 3])
def test_chains_of_any_number_of_axes(monkeypatch, dims):
    monkeypatch.setattr(
        "lipbound.network.composition.optimised", partial(blocks.optimised, steps=5)
    )
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    torch.manual_seed(0)

    def forward(m, x):
        x = torch.relu(m.stem(x))
        return m.head(torch.relu(x + m.two(torch.relu(m.one(x)))).mean(tuple(range(2, 2 + dims))))

    model = Run(
        forward,
        stem=kind(1, 2, 2), one=kind(2, 2, 3, padding=1), two=kind(2, 2, 2, padding="same"),
        head=nn.Linear(2, 2),
    ).double().eval()  # fmt: skip
    shape = (1, *[4] * dims)
    found = audit(model, shape, effort="high", search=0)
    assert found.note.startswith("effort='high' used two weighted norms")
    inputs = torch.randn(8, *shape, dtype=torch.float64)
    assert jacobian_norm(model, inputs) <= found.upper * (1 + 1e-12)
