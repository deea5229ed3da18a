"""lipschitz(layer) by type; every bad input refused with the input and the fix."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from lipbound import BOUNDS, bound, bracket, convolution, estimate, exact, lipschitz, symbol

KERNEL = torch.ones(2, 2, 3, 3)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
@pytest.mark.parametrize("name", ["padding", "_reversed_padding_repeated_twice", "padding_mode"])
def test_a_layer_is_read_as_its_forward_reads_it(mode, name):
    """PyTorch pads by another attribute than ``padding`` in every mode but zeros."""
    layer = nn.Conv2d(1, 1, 3, padding=(1, 2), padding_mode=mode).double()
    changed = {"padding": (0, 0), "padding_mode": "replicate",
               "_reversed_padding_repeated_twice": [2, 1, 0, 2]}  # fmt: skip
    setattr(layer, name, changed[name])
    with torch.no_grad():
        layer.bias.zero_()
        basis = torch.eye(25, dtype=torch.float64).reshape(25, 1, 5, 5)
        truth = torch.linalg.matrix_norm(layer(basis).flatten(1), 2)
    assert exact(layer, (5, 5)) == pytest.approx(float(truth))
    assert bracket(layer, input_shape=(5, 5)).upper >= truth * (1 - 1e-12)
    assert bracket(layer).upper >= truth * (1 - 1e-12)


@pytest.mark.parametrize("name", ["forward", "_conv_forward", "_call_impl"])
def test_a_layer_whose_methods_were_replaced_is_refused(name, monkeypatch):
    layer = nn.Conv2d(1, 1, 3)
    setattr(layer, name, getattr(layer, name))
    with pytest.raises(TypeError, match="overrides forward"):
        bracket(layer)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 100 * x)
    with pytest.raises(TypeError, match="overrides forward"):
        bracket(nn.Linear(2, 2))


def test_padding_that_is_none_is_refused():
    layer = nn.Conv2d(1, 1, 3, padding_mode="circular")
    layer._reversed_padding_repeated_twice = [1, 1]
    with pytest.raises(ValueError, match=r"\[1, 1\] is not a padding of 2 axes; create the layer"):
        bracket(layer)


def test_linear_is_its_largest_singular_value():
    for shape in [(7, 5), (5, 7), (1, 4)]:
        layer = nn.Linear(*shape, dtype=torch.float64).requires_grad_(False)
        truth = float(torch.linalg.matrix_norm(layer.weight, 2))
        for method in BOUNDS:
            assert (
                truth * (1 - 1e-14) <= float(lipschitz(layer, method=method)) <= truth * (1 + 1e-12)
            )


def test_convolutions_use_the_method():
    layer = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert lipschitz(layer) == bound(layer)
    for method in BOUNDS:
        assert lipschitz(layer, method=method) == bound(layer, method)
    assert lipschitz(layer.weight) == bound(layer.weight)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(kind, affine):
    layer = kind(5, affine=affine).requires_grad_(False).eval()
    layer.running_var.uniform_(0.01, 2)
    if affine:
        layer.weight.normal_()
    gamma = layer.weight.double() if affine else torch.ones(5).double()
    truth = (gamma.abs() / (layer.running_var.double() + layer.eps).sqrt()).max()
    assert truth <= lipschitz(layer).double() <= truth * (1 + 1e-6)
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        lipschitz(layer.train())
    with pytest.raises(ValueError, match="track_running_stats=True"):
        lipschitz(kind(5, track_running_stats=False).eval())


def test_parametrized_and_shared_weights():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    value = lipschitz(layer)
    value.backward()
    assert all(p.grad is not None for p in layer.parametrizations.parameters())


def test_own_layers_and_unknown_ones():
    class Twice(nn.Module):
        pass

    with pytest.raises(TypeError, match=r"no Lipschitz rule for Twice.*@lipschitz\.register"):
        lipschitz(Twice())

    @lipschitz.register(Twice)
    def _(layer, *, method=None):
        return torch.tensor(2.0)

    assert lipschitz(Twice()) == 2


NAN = KERNEL.clone()
NAN[0, 0, 0, 0] = torch.nan
REFLECT = nn.Conv2d(2, 2, 9, padding=4, padding_mode="reflect")

BAD = {
    "nan": (lambda: bound(NAN), ValueError, r"\(2, 2, 3, 3\) has 1 NaN"),
    "inf": (lambda: bound(NAN.nan_to_num(nan=torch.inf)), ValueError, "NaN or infinite"),
    "empty": (lambda: bound(KERNEL[:0]), ValueError, r"empty, shape \(0, 2, 3, 3\)"),
    "axes": (lambda: bound(torch.ones(3)), ValueError, r"got shape \(3,\)"),
    "complex": (lambda: bound(KERNEL.to(torch.complex64)), TypeError, "complex64 is complex"),
    "integer": (lambda: bound(KERNEL.long()), TypeError, r"int64.*kernel\.float\(\)"),
    "float8": (
        lambda: bound(KERNEL.to(torch.float8_e4m3fn)),
        TypeError,
        r"float8_e4m3fn.*kernel\.float\(\)",
    ),
    "meta": (lambda: bound(KERNEL.to("meta")), ValueError, "meta device"),
    "sparse": (lambda: bound(KERNEL.to_sparse()), TypeError, r"to_dense\(\)"),
    "coarse": (
        lambda: bound(KERNEL, "lipbound", samples=2),
        ValueError,
        "samples=2 is too coarse for 3 taps",
    ),
    "samples": (lambda: bound(KERNEL, "lipbound", samples=0.5), ValueError, "samples=0.5"),
    "polygrid samples": (lambda: estimate(KERNEL, "polygrid", samples=0), ValueError, "samples=0"),
    "rtol": (lambda: bound(KERNEL, rtol=0), ValueError, "rtol=0 must lie between 0 and 1"),
    "iterations": (lambda: bound(KERNEL, "gram", iterations=0), ValueError, "iterations=0"),
    "widening": (
        lambda: bound(KERNEL, "lipbound", widening="wide"),
        ValueError,
        "'wide' is not one of best",
    ),
    "method": (lambda: bound(KERNEL, "lipbond"), ValueError, "'lipbond'.*did you mean 'lipbound'"),
    "estimate": (
        lambda: estimate(KERNEL, "sedghi"),
        ValueError,
        "choose one of: ascent, polygrid, power",
    ),
    "option": (
        lambda: bound(KERNEL, strid=2),
        TypeError,
        "no option 'strid'; it takes rtol, stride",
    ),
    "own stride": (lambda: bound(REFLECT, stride=2), TypeError, "stride=2 was given with Conv2d"),
    "stride": (lambda: bound(KERNEL, stride=0), ValueError, "stride=0 must be one integer ≥ 1"),
    "strides": (lambda: bound(KERNEL, stride=(1, 2, 3)), ValueError, "or 2 of them"),
    "groups": (lambda: bound(KERNEL, groups=3), ValueError, "groups=3 must divide"),
    "padding": (lambda: bound(KERNEL, padding="full"), ValueError, "padding='full'"),
    "mode": (lambda: bound(KERNEL, padding_mode="mirror"), ValueError, "'mirror' is not one of"),
    "transposed mode": (
        lambda: bound(KERNEL, transposed=True, padding_mode="reflect"),
        ValueError,
        "'reflect'",
    ),
    "lazy": (lambda: bound(nn.LazyConv2d(3, 3)), ValueError, "lazy.*run one batch"),
    "lazy linear": (lambda: lipschitz(nn.LazyLinear(3)), ValueError, "lazy"),
    "no layer": (lambda: bound(nn.ReLU()), TypeError, r"got ReLU; .*lipschitz\(layer\)"),
    "string": (lambda: bound("conv1"), TypeError, "got str"),
    "reflect": (lambda: exact(REFLECT, (4, 4)), ValueError, "reflect padding 4 is wider.*least 5"),
    "reflect bound": (lambda: bound(REFLECT, input_shape=(4, 4)), ValueError, "wider"),
    "circular": (
        lambda: convolution(KERNEL, padding=4, padding_mode="circular", input_shape=(3, 3)),
        ValueError,
        "circular padding 4 is wider",
    ),
    "shape": (lambda: exact(KERNEL, (4,)), ValueError, r"input_shape=\(4,\) does not fit"),
    "channels": (lambda: exact(KERNEL, (3, 4, 4)), ValueError, "has 3 channels, but the layer"),
    "no output": (lambda: exact(nn.Conv2d(2, 2, 5), (3, 3)), ValueError, "too small for the"),
    "frequencies": (
        lambda: symbol(KERNEL, torch.zeros(4, 3)),
        ValueError,
        r"\(4, 3\).*pass \(P, 2\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_repeats_it_and_names_the_fix(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()


def test_import_is_light_and_needs_no_scipy():
    """The core loads with torch and numpy alone; everything else waits until it is asked for."""
    heavy = ["scipy", "matplotlib", "rich", "typer", "sklearn", "triton", "torch._dynamo"]
    code = (
        "import sys, torch; before = set(sys.modules); import lipbound;"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
