"""Two audits side by side: layers matched by name, and what changed."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from torch import nn
from zoo import NETWORKS

from lipbound import Comparison, audit


def pair(name: str = "resnet") -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
    """Return a network, and the same one with its last kernel doubled."""
    build, shape = NETWORKS[name]
    old = build()
    new = deepcopy(old)
    kernels = [m for m in new.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    kernels[-1].weight.data *= 2
    return new, old, shape


def test_a_doubled_layer_is_what_changed():
    new, old, shape = pair()
    found = Comparison(audit(new, shape, search=0), audit(old, shape, search=0), ("new", "old"))
    (changed,) = found.changed()
    assert changed["A / B"] == pytest.approx(2, rel=2e-3)
    for row, a, b in zip(found.rows(), found.a.layers, found.b.layers, strict=True):
        assert row["layer"] == a.name == b.name
        assert (row["lower A"], row["upper A"]) == (a.bracket.lower, a.bracket.upper)
        assert (row["lower B"], row["upper B"]) == (b.bracket.lower, b.bracket.upper)
    said = "\n".join(found.summary())
    assert f"what changed most, from B to A: {changed['layer']} (×2)" in said
    assert "only in" not in said
    assert f"1 of {len(found.rows())} layers" in said
    assert found.blocks()
    assert found.title() == "new (A) against old (B)"
    other = Comparison(found.b, found.a)
    assert other.changed()[0]["A / B"] == pytest.approx(0.5, rel=2e-3)


def test_layers_of_another_architecture_stand_alone():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    b = nn.Sequential(nn.Conv2d(1, 3, 5), nn.ReLU(), nn.Conv2d(3, 2, 3))
    found = Comparison(audit(a, (1, 8, 8), search=0), audit(b, (1, 8, 8), search=0))
    first, last = found.rows()
    assert first["geometry"] == "1→2 3×3, 1→3 5×5"
    assert last["upper A"] is last["A / B"] is None
    assert last["upper B"] == found.b.layers[1].bracket.upper
    assert "only in B: 2" in found.summary()
    assert all(len(line) <= 100 for line in str(found).splitlines())
    json.dumps(found.to_dict(), allow_nan=False)


def test_networks_without_a_bound_have_no_ratio():
    unbounded = type("Square", (nn.Module,), {"forward": lambda self, x: x * x})
    model = nn.Sequential(nn.Linear(2, 2), unbounded())
    found = Comparison(*(audit(one, (2,), search=0) for one in (model, model[:1])))
    assert not any("the bound of A is" in line for line in found.summary())
    assert found.to_dict()["ratio"] is None
    assert found.changed() == []
