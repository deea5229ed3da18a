"""What an audit suggests is true: gains of blocks, and the bound with norms of 1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from zoo import Run, conv

from lipbound import audit, bracket
from lipbound.network.advice import advice, blocks, contributions
from lipbound.network.audits import audit_weights
from lipbound.results import digits


def residual(m: nn.Module, x: Tensor) -> Tensor:
    x = m.act(m.stem(x))
    return m.head(x + m.norm(m.two(m.act(m.one(x)))))


def network() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.weight.data.fill_(3.0)
    model = Run(residual, act=nn.ReLU(), stem=conv(2, 4), one=conv(4, 4), two=conv(4, 4),
                norm=norm, head=conv(4, 3))  # fmt: skip
    for layer in (model.stem, model.one, model.two, model.head):
        layer.weight.data *= 3
    return model.double().eval()


def test_the_gain_of_a_block_is_that_of_its_sum():
    model = network()
    (found,) = blocks(audit(model, (2, 6, 6), effort="low", search=0))
    inner = bracket(model.one).upper * bracket(model.two).upper * 3 / math.sqrt(1 + 1e-5)
    assert found["gain"] == pytest.approx(1 + inner, rel=1e-6)


def test_the_bound_with_norms_of_one():
    model = network()
    found = audit(model, (2, 6, 6), search=0)
    assert found.at_one == pytest.approx(1 + 3 / math.sqrt(1 + 1e-5), rel=1e-6)
    for layer in (model.stem, model.one, model.two, model.head):  # the same by hand
        layer.weight.data /= bracket(layer).upper
    assert audit(model, (2, 6, 6), effort="low", search=0).upper <= found.at_one * (1 + 1e-6)


def test_advice_names_the_largest_layers_and_free_norms():
    found = audit(network(), (2, 6, 6), search=0)
    said = " ".join(advice(found))
    largest = contributions(found)[0][0]
    assert f"{largest.name} ({digits(largest.bracket.upper, 3, 'up')})" in said
    at_one = digits(found.at_one, 3, "up")
    assert f"would be at most {at_one} with the BatchNorm layers as they are" in said
    assert "1 BatchNorm layer amplifies (norm)" in said


def test_no_advice_without_a_bound_or_a_need():
    assert advice(audit_weights({"a": torch.randn(2, 2, 3, 3)})) == []
    small = nn.Linear(3, 3)
    small.weight.data *= 0.1
    assert advice(audit(small, (3,), search=0)) == []
