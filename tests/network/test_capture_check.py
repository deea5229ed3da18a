"""What is bounded is the network that runs, not what it shows while it is captured."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lipbound import audit, certify, constrain
from lipbound.network.graph import capture
from lipbound.network.recorder import record


class Forward(nn.Module):
    """A forward by itself, with a parameter and a buffer."""

    def __init__(self, run):
        super().__init__()
        self.run, self.calls = run, 0
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.run(self, x)


def steep(x):
    """Far away only: no value at a few small inputs shows it."""
    return x + 50 * F.relu(x - 1000)


def attempt(read):
    """Go one way where a value can be read, the other where it cannot."""

    def run(m, x):
        try:
            read(x)
        except Exception:
            return x
        return steep(x)

    return run


EYE = torch.eye(3)
exporting = torch.compiler.is_exporting


def after_failing(run, x):
    """Another network where an operation whose result nobody reads fails."""
    try:
        run()
    except (IndexError, RuntimeError):
        return 1000 * x
    return x * 1.0


def counted_steep(x, count):
    return x * (1.0 + 1e6 * (count > 0))


def crossed(h):
    """The same operations on other results."""
    a = h * 1e6
    b = (a if exporting() else h) * 1e-6
    c = (h if exporting() else a) * 1.0
    return b + c


def inside_export():
    frame = sys._getframe()
    while frame is not None:
        if "torch/export" in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


WAYS = {
    "is_compiling": lambda m, x: x if torch.compiler.is_compiling() else steep(x),
    "is_exporting": lambda m, x: x if torch.compiler.is_exporting() else steep(x),
    "the tensor's type": lambda m, x: steep(x) if type(x) is torch.Tensor else x,
    "a fake tensor": lambda m, x: x if isinstance(x, FakeTensor) else steep(x),
    "fake mode": lambda m, x: x if torch._guards.detect_fake_mode([x]) else steep(x),
    "a mode that dispatches": lambda m, x: x if _get_current_dispatch_mode_stack() else 50 * x,
    "the parameter's type": lambda m, x: steep(x) if type(m.weight) is nn.Parameter else x,
    "frames": lambda m, x: x if inside_export() else steep(x),
    "gradients on": lambda m, x: steep(x) if torch.is_grad_enabled() else x,
    "gradients off": lambda m, x: x if torch.is_grad_enabled() else steep(x),
    "inference mode": lambda m, x: steep(x) if torch.is_inference_mode_enabled() else x,
    "an input with gradients": lambda m, x: steep(x) if x.requires_grad else x,
    "a caught bool": attempt(lambda x: bool(x.sum() > 0)),
    "a caught branch": attempt(lambda x: 1 if x.sum() > 0 else 0),
    "a caught item": attempt(lambda x: math.sqrt(abs(x.sum().item()))),
    "a caught float": attempt(lambda x: float(x[0, 0])),
    "a caught index": attempt(lambda x: [1, 2, 3][int(x[0, 0].abs() * 0)]),
    "a caught list": attempt(lambda x: sum(x.tolist()[0])),
    "a caught array": attempt(lambda x: np.asarray(x).sum()),
    "a caught numpy": attempt(lambda x: x.numpy().sum()),
    "an address": attempt(lambda x: 1 / (x.data_ptr() % 7 + 1)),
    "its text": lambda m, x: steep(x) if "Fake" not in repr(x) else x,
    "a number of its own": lambda m, x: 3 * x if torch.compiler.is_exporting() else 3.0001 * x,
    "a constant of its own": lambda m, x: (
        x * m.weight if torch.compiler.is_exporting() else x * (m.weight + 1e-7)
    ),
    "a failing index": lambda m, x: after_failing(lambda: torch.zeros(100)[x.long()], x),
    "a failing embedding": lambda m, x: after_failing(lambda: F.embedding(x.long(), m.scale), x),
    "a failing inverse": lambda m, x: after_failing(lambda: torch.linalg.inv(x.T @ x + EYE), x),
    "a count": lambda m, x: x if exporting() else counted_steep(x, (x > 1000).nonzero().shape[0]),
    "a number of values": lambda m, x: (
        x if exporting() else counted_steep(x, torch.unique(x > 1000).numel() - 1)
    ),
    "masked": lambda m, x: x if exporting() else counted_steep(x, x[x > 1000].numel()),
    "other wires": lambda m, x: crossed(F.relu(x - 1000)),
    "another view": lambda m, x: (
        2 * (F.relu(x - 1000) if exporting() else F.relu(x - 1000)[:, :1].expand(-1, 3))
    ),
    "another index": lambda m, x: F.relu(x - 1000)[
        :, torch.arange(3) if exporting() else torch.zeros(3, dtype=torch.long)
    ],
    "a constant's last bits": lambda m, x: (
        m.weight * x - x * (m.weight if exporting() else m.weight * (1 + 2e-7))
    ),
    "applied": lambda m, x: (
        x
        if exporting()
        else counted_steep(x, x.detach().clone().apply_(lambda v: v > 1000).shape[0] - 1)
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_forward_that_knows_it_is_captured_is_refused(name):
    model = Forward(WAYS[name]).eval()
    found = audit(model, (3,))
    assert found.upper == math.inf
    assert found.reason.startswith("layers only: ") or "jumps" in found.reason
    assert (certify(torch.randn(4, 3), found) == 0).all()


def counted(m, x):
    m.calls += 1
    return x * (1 + m.calls * 1e-9)


def drifting(m, x):
    with torch.no_grad():
        m.weight.mul_(1.0001)
    return x * m.weight


def through_data(m, x):
    if not torch.compiler.is_exporting():
        m.weight.data.mul_(1 + 1e-6)
    return x * m.weight


def a_buffer(m, x):
    if not torch.compiler.is_exporting():
        m.scale.add_(1e-7)
    return x * m.scale


def a_plain_tensor(m, x):
    if not torch.compiler.is_exporting():
        m.kept = getattr(m, "kept", torch.ones(3)) * (1 + 1e-7)
    return x * m.weight


CHANGES = {
    "a counter": counted,
    "a parameter": drifting,
    "a parameter's data": through_data,
    "a buffer": a_buffer,
    "an attribute": a_plain_tensor,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forward_that_changes_its_module_is_refused(name):
    found = audit(Forward(CHANGES[name]), (3,))
    assert found.upper == math.inf
    assert "when it runs" in found.reason


def test_a_forward_that_draws_is_refused():
    numbers = itertools.count()
    found = audit(Forward(lambda m, x: x * (1 + next(numbers) % 2)), (3,))
    assert found.upper == math.inf
    assert "behaves differently when it runs than when torch.export captures it" in found.reason


def hidden(ignore):
    """An operation that fails for large inputs; only the shape of its result is used."""

    def forward(m, x):
        table = torch.ones(5, 1)
        try:
            added = ignore(x, table, (x[:, 0] * 1e-3).abs().long())
        except Exception:
            return 100 * x
        return x * m.scale + added

    return forward


IGNORED = {
    "zeros_like": hidden(lambda x, table, i: torch.zeros_like(F.embedding(i, table))),
    "new_ones": hidden(lambda x, table, i: table.index_select(0, i).new_ones(1, 1)),
    "fill": hidden(lambda x, table, i: table.gather(0, i[:, None]).fill_(0.0)),
    "copy": hidden(lambda x, table, i: table.gather(0, i[:, None]).copy_(table[:1])),
    "loss": hidden(lambda x, table, i: torch.zeros_like(F.nll_loss(x, i))),
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_failure_behind_a_result_that_ignores_it_is_refused(name):
    found = audit(Forward(IGNORED[name]), (3,), search=0)
    assert found.upper == math.inf
    assert "may fail" in found.reason


class Keeping(nn.Module):
    """Keeps its last activation for others to look at, which changes nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = torch.zeros(())

    def forward(self, x):
        y = self.layer(x)
        if not torch.compiler.is_exporting():
            self.seen = y.detach()
        return y


def dead(m, x):
    torch.tanh(x)
    return 2 * x


def written(m, x):
    y = x.clone()
    y[:, 0] = 2 * x[:, 1]
    return y.mul_(2).relu_()


def shifted(m, x):
    """A mask made from the input's type, then a reshape that copies."""
    mask = x.new_zeros(4)
    mask[2:] = 1
    mask = mask.masked_fill(mask != 0, 0.5)
    return (x + mask).mT.reshape(len(x), -1)


HONEST = {
    "a reshape that copies": (Forward(shifted), (3, 4), 1.0),
    "kept activations": (Keeping(), (3,), 10.0),
    "results that nobody reads": (Forward(dead), (3,), 2.0),
    "writing in place": (Forward(written), (3,), 2 * math.sqrt(5)),
    "in place on the input": (nn.ReLU(inplace=True), (3,), 1.0),
    "no gradients inside": (Forward(torch.no_grad()(lambda m, x: 3 * x)), (3,), 3.0),
    "inference mode inside": (Forward(torch.inference_mode()(lambda m, x: 3 * x)), (3,), 3.0),
    "inference mode and a layer": (
        Forward(torch.inference_mode()(lambda m, x: F.linear(x, m.weight.diag()))),
        (3,),
        1.002,
    ),
    "a constant's value": (Forward(lambda m, x: x * m.scale.item()), (3,), 1.0),
    "constrained": (
        nn.Sequential(constrain(nn.Conv2d(1, 2, 3), 0.5), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)),
        (1, 3, 3),
        1.0,
    ),
    "torch's own": (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)),
        (3,),
        2.0,
    ),
    "half": (nn.Sequential(nn.Linear(3, 3), nn.GELU()).bfloat16(), (3,), 10.0),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_networks_are_bounded(name):
    model, shape, most = HONEST[name]
    found = audit(model, shape)
    assert found.upper <= most * 1.0001, found.reason


def test_a_jacobian_above_the_bound_is_a_refusal(monkeypatch):
    monkeypatch.setattr("lipbound.network.audits.difference", lambda *_: "")
    model = Forward(lambda m, x: x if torch.compiler.is_exporting() else 50 * x)
    found = audit(model, (3,))
    assert found.upper == math.inf
    assert "Jacobian of norm 50 was found, above the bound 1" in found.reason


READS = {
    "bool": lambda x: x if x.sum() > 0 else 2 * x,
    "item": lambda x: x * x.sum().item(),
    "list": lambda x: x * x.tolist()[0][0],
    "numpy": lambda x: x * float(x.numpy().sum()),
    "detached": lambda x: x * x.detach().numpy().sum(),
    "array": lambda x: x * float(np.asarray(x).sum()),
    "dlpack": lambda x: x * np.from_dlpack(x)[0, 0],
    "format": lambda x: x * len(f"{x[0, 0]}"),
    "contains": lambda x: x if 3.0 in x else 2 * x,
    "python's max": lambda x: max(x[0]),
    "equal": lambda x: x if torch.equal(x, 2 * x) else 2 * x,
    "allclose": lambda x: x if torch.allclose(x, 2 * x) else 2 * x,
    "storage": lambda x: x * x.untyped_storage()[0],
}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_read_a_value_is_seen(name):
    assert record(READS[name], torch.randn(1, 3)).read


def test_operations_are_those_that_count():
    trace = record(lambda x: (torch.tanh(x), torch.ones(3) * 2, (2 * x).view(3, 1).relu())[2],
                   torch.randn(1, 3))  # fmt: skip
    live = [trace.operations[place].name for place in trace.live()]
    assert live == ["aten.mul.Tensor", "aten.relu.default"]


def test_reading_a_value_is_refused_though_the_error_be_caught():
    with pytest.raises(ValueError, match=r"tries to read a value \(bool\) and catches the error"):
        capture(Forward(WAYS["a caught bool"]), (torch.randn(1, 3),))


def test_what_cannot_be_compared_is_refused(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such stack\nof modes")

    monkeypatch.setattr("lipbound.network.audits.difference", broken)
    found = audit(Forward(lambda m, x: 2 * x), (3,))
    assert found.upper == math.inf
    assert "could not be compared (no such stack)" in found.reason
