"""The symbol of any geometry: faithful to the layer, reduced without changing the supremum."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import LAYERS, build, energy_maxima, spectral_norm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lipbound import convolution, row_energies, symbol
from lipbound.row_energies import Lags, row_peaks
from lipbound.symbols import evaluate, grid, radians, taps, widening
from lipbound.toeplitz import operator_matrix

FULL = {name: case for name, case in LAYERS.items() if case.get("padding_mode", "zeros") == "zeros"}


@pytest.mark.parametrize("name", FULL)
def test_shape_and_definition(name):
    layer = build(name)
    conv = convolution(layer)
    frequencies = torch.rand(5, conv.dims, dtype=torch.float64) * 6
    values = symbol(layer, frequencies)
    phases = math.prod(conv.stride)
    cout, cin = layer.out_channels, layer.in_channels
    wanted = (5, cout * phases, cin) if conv.transposed else (5, cout, cin * phases)
    assert values.shape == wanted
    # At stride 1 the definition, Σ_h K_h e^{i a h·ω}, block diagonal, spelled out.
    if phases == 1 and not conv.transposed and conv.groups == 1:
        direct = torch.zeros_like(values)
        for h in itertools.product(*map(range, conv.kernel.shape[2:])):
            shift = torch.tensor([a * k for a, k in zip(conv.dilation, h, strict=True)]).double()
            direct += torch.exp(1j * (frequencies @ shift))[:, None, None] * conv.kernel[(..., *h)]
        torch.testing.assert_close(values, direct)


@pytest.mark.parametrize("name", FULL)
def test_asymptotically_exact(name):
    """On a long input the operator's σ1 comes up to the symbol's supremum, and never past it."""
    layer = build(name)
    conv = convolution(layer)
    if conv.dims > 2:
        pytest.skip("a long 3d input is too large for a dense SVD")
    size = (60,) if conv.dims == 1 else (12, 12)
    if conv.transposed:
        size = tuple(n // 2 for n in size)
    truth = spectral_norm(operator_matrix(layer, size))
    points = radians(grid((48,) * conv.dims), (48,) * conv.dims)
    peak = float(torch.linalg.matrix_norm(symbol(layer, points), 2).max())
    assert truth <= peak * 1.02
    assert truth >= peak * (0.75 if max(conv.dilation) > 1 else 0.85)


@given(
    st.tuples(*[st.integers(1, 5)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.integers(1, 2),
)
def test_reduction_keeps_the_singular_values(size, stride, dilation, groups):
    """taps() drops dilation and merges phases; the faithful symbol has these values at aω/g."""
    kernel = torch.randn(2 * groups, 2, *size, dtype=torch.float64)
    conv = convolution(kernel, stride=stride, dilation=dilation, groups=groups)
    factor = torch.tensor([a // math.gcd(a, t) for a, t in zip(dilation, stride, strict=True)])
    frequencies = torch.rand(4, 2, dtype=torch.float64) * 6
    faithful = symbol(conv, frequencies)
    reduced = evaluate(taps(conv), frequencies * factor)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(reduced, 2).amax(0), torch.linalg.matrix_norm(faithful, 2)
    )


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_half_grid_and_its_mirror_are_the_grid(samples):
    half = grid(samples, half=True)
    mirrored = (-half) % torch.tensor(samples)
    both = {tuple(p) for p in torch.cat([half, mirrored]).tolist()}
    assert both == {tuple(p) for p in grid(samples).tolist()}
    pairs = {
        frozenset((tuple(p), tuple(q)))
        for p, q in zip(half.tolist(), mirrored.tolist(), strict=True)
    }
    assert len(pairs) == len(half)


@pytest.mark.parametrize("table", [row_energies.TABLE, 0], ids=["table", "by axes"])
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(4, 9), st.integers(0, 2**31))
def test_row_energies_equal_the_symbol(table, sizes, samples, seed):
    """The fast paths against the definition, Σ_j |F_ij|² of the symbol on the grid."""
    draw = torch.Generator().manual_seed(seed)
    kernel = torch.randn(1, 3, 2, *sizes, dtype=torch.float64, generator=draw)
    counts = (samples,) * len(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_energies, "TABLE", table)
        kind = Lags(tuple(sizes), (1,) * len(sizes), counts)
        rows = kernel[0].reshape(3, 2, -1).requires_grad_()
        peaks, points = row_peaks(rows, kind)
        assert kind.by_axes == (table == 0)
        torch.testing.assert_close(peaks, energy_maxima(kernel, counts)[0])
        (wanted,) = torch.autograd.grad(peaks.sum(), rows)
        closed = torch.zeros_like(wanted)
        ones = torch.ones(3, dtype=torch.float64)
        row_energies.add_row_gradient_(closed, rows.detach(), points, ones, kind)
        torch.testing.assert_close(closed, wanted)


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from(["cosine", "paper", "best"]),
    st.integers(0, 2**31),
)
def test_widening_covers_the_supremum(size, extra, kind, seed):
    """One axis, any degree (half-integers included), a vector-valued polynomial."""
    samples = size - 1 + extra
    draw = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(1, 1, 2, size, dtype=torch.float64, generator=draw)
    coarse = energy_maxima(coefficients, (samples,)).sqrt()
    fine = energy_maxima(coefficients, (samples * 60,)).sqrt()
    assert float(coarse) * widening((samples,), (size,), kind) >= float(fine) * (1 - 1e-12)


def test_cosine_widening_is_sharp():
    """Degree 1, S = 10, the phase that puts the peak midway between two points: equality."""
    spread = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)  # 2|sin ω|, S = 10
    coarse = float(energy_maxima(spread[None], (10,)).sqrt())
    assert coarse * widening((10,), (3,), "cosine") == pytest.approx(2, rel=1e-12)


def test_widening_figures_of_the_design():
    assert widening((10, 10), (3, 3), "paper") == pytest.approx(1.25)
    assert widening((10, 10), (3, 3)) == pytest.approx(1.1056, abs=1e-4)
    assert widening((32, 32), (3, 3)) == pytest.approx(1.0097, abs=1e-4)
    assert widening((3, 3), (3, 3)) == widening((3, 3), (3, 3), "paper")  # S < 4d


def test_ignoring_the_module_is_the_same():
    layer = nn.Conv2d(2, 3, 3, stride=2, dilation=3, padding_mode="reflect", padding=1).double()
    w = torch.rand(3, 2, dtype=torch.float64)
    bare = symbol(layer.weight, w, stride=2, dilation=3)
    torch.testing.assert_close(symbol(layer, w), bare)
