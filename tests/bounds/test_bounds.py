"""Every bound is at least σ1, is not far above it, and its gradient is right."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import LAYERS, ROUNDING, build, energy_maxima, kernels, spectral_norm
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import sparse
from torch import nn

from lipbound import BOUNDS, ESTIMATES, Penalty, bound, bracket, convolution, estimate, exact
from lipbound.bounds.banded import banded_norm_above
from lipbound.bounds.rounding import norms_above, round_up, spectral_norm_above
from lipbound.runtime import within
from lipbound.symbols import taps
from lipbound.toeplitz import operator_matrix

EACH_BOUND = pytest.mark.parametrize("method", BOUNDS)
COARSE = {"lipbound": {"samples": 11}, "frobenius": {"samples": 11}, "gram": {"samples": 11}}


def at_least(method: str, layer, truth: float, **options) -> None:
    value = float(bound(layer, method, **options))
    assert value >= truth * ROUNDING, (method, value, truth)


@pytest.mark.parametrize("name", LAYERS)
def test_never_below_the_svd(name):
    layer, size = build(name), LAYERS[name]["size"]
    for index, kernel in enumerate(kernels(tuple(layer.weight.shape), 11).values()):
        scale = (1e-3, 1.0, 1e3)[index % 3]  # a wrong power of the scale shows
        layer.weight.copy_(kernel * scale)
        truth = spectral_norm(operator_matrix(layer, size))
        for method in BOUNDS:
            at_least(method, layer, truth)  # for every size
            at_least(method, layer, truth, input_shape=size)  # for this one
            if method in COARSE:
                at_least(method, layer, truth, **COARSE[method])


@st.composite
def geometries(draw):
    dims = draw(st.integers(1, 2))
    ints = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * dims))  # noqa: E731
    groups = draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    mode = (
        "zeros"
        if transposed
        else draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    )
    options = {
        "stride": ints(1, 4),
        "dilation": ints(1, 4),
        "groups": groups,
        "padding": ints(0, 3),
        "padding_mode": mode,
        "transposed": transposed,
    }
    shape = (groups * draw(st.integers(1, 2)), draw(st.integers(1, 2)), *ints(1, 4))
    return shape, ints(1, 8), options, draw(st.integers(0, 2**31))


@given(geometries())
def test_never_below_the_svd_on_any_geometry(case):
    shape, size, options, seed = case
    kernel = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    try:
        matrix = operator_matrix(kernel, size, **options)
    except ValueError:  # the padding or the kernel does not fit this input
        assume(False)
    truth = spectral_norm(matrix)
    for method in BOUNDS:
        at_least(method, kernel, truth, **options)
        at_least(method, kernel, truth, input_shape=size, **options)


@pytest.mark.parametrize("method", ["lipbound", "frobenius", "gram"])
@pytest.mark.parametrize("widening", ["best", "cosine", "paper"])
def test_a_peak_between_grid_points(method, widening):
    """|F(ω)| = 2|sin ω| peaks at π/2, which no grid of 10 contains: without widening, 1.902."""
    kernel = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)
    assert float(bound(kernel, method, samples=10, widening=widening)) >= 2
    # and of 6, for the paper's factor at S < 4d
    assert float(bound(kernel, method, samples=3, widening=widening)) >= 2
    plane = kernel[..., None] * kernel[..., None, :]
    assert float(bound(plane, method, samples=10, widening=widening)) >= 4


@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (1, 6, 3, 3), (1, 4, 5, 5), (1, 3, 4, 2)])
def test_tight_for_one_output_channel(shape):
    kernel = torch.randn(shape, dtype=torch.float64)
    truth = exact(kernel, (32, 32))
    for method, options in (("lipbound", {}), ("frobenius", {}), ("gram", {"iterations": 8})):
        assert float(bound(kernel, method, samples=64, **options)) <= 1.05 * truth, method


@pytest.mark.parametrize("method", ["lipbound", "frobenius", "gram"])
def test_tight_with_stride(method):
    """On a low-pass kernel, as trained ones are, ignoring the stride costs a factor near 1.9."""
    layer = nn.Conv2d(4, 1, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
    layer.requires_grad_(False).weight.normal_(1, 0.2)
    truth = exact(layer, (64, 64))
    strided = float(bound(layer, method, samples=64))
    ignored = float(bound(layer.weight, method, samples=64))
    assert strided <= 1.02 * truth
    assert ignored >= 1.7 * truth


def test_gap_of_figure_2():
    """Γ(50) of a 6×3×3 kernel, uniform entries as a fresh layer's: the paper reports 0.012."""
    torch.manual_seed(0)
    kernel = nn.Conv2d(6, 1, 3, dtype=torch.float64).weight.detach()
    gap = float(bound(kernel, "lipbound", samples=256)) - exact(kernel, (50, 50))
    assert 0 <= gap <= 0.012


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (3, 4, 5, 5), (2, 3, 4), (2, 2, 3, 3, 3), (5, 4)])
def test_order_of_the_bounds(shape):
    """sup σ1 ≤ sup ‖F‖_F ≤ LipBound, and the adjoint's smaller LipBound is the same."""
    kernel = torch.randn(shape, dtype=torch.float64)
    assert bound(kernel, "gram", iterations=10) <= bound(kernel, "frobenius") * (1 + 1e-9)
    assert bound(kernel, "frobenius") <= bound(kernel, "lipbound") * (1 + 1e-9)
    adjoint, smaller = (
        float(bound(kernel, "lipbound", sides="both", transposed=t)) for t in (True, False)
    )
    assert adjoint == pytest.approx(smaller, rel=1e-12)


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (3, 5, 3, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_lipbound_sums_the_shorter_side_or_takes_the_smaller_sum(shape, stride):
    kernel = torch.randn(shape, dtype=torch.float64)
    split = taps(convolution(kernel, stride=stride))
    by_rows = float(energy_maxima(split, (360, 360)).sum().sqrt())
    by_columns = float(energy_maxima(split.transpose(1, 2), (360, 360)).sum().sqrt())
    shorter = by_columns if stride == 1 and shape[1] < shape[0] else by_rows
    for sides, wanted in (("shorter", shorter), ("both", min(by_rows, by_columns))):
        found = float(bound(kernel, "lipbound", samples=256, sides=sides, stride=stride))
        assert wanted <= found <= wanted * 1.001
    assert by_rows != by_columns
    with pytest.raises(ValueError, match="sides='left' is not one of shorter, both"):
        bound(kernel, "lipbound", sides="left")


def test_the_penalty_sums_the_same_lipbound():
    """On one layer Penalty.bounds() and bound(layer, 'lipbound') are one number."""
    for layer in (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 5, stride=2), nn.ConvTranspose2d(4, 6, 3)):
        (found,) = Penalty(nn.Sequential(layer)).bounds().values()
        assert found == pytest.approx(float(bound(layer, "lipbound")), rel=1e-5)


def test_paper_widening_is_125_percent_of_polygrid():
    for seed in range(5):
        kernel = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(seed)).double()
        published = 1.25 * float(estimate(kernel, "polygrid"))
        assert float(bound(kernel, "lipbound", samples=10, widening="paper")) == pytest.approx(
            published, rel=1e-6
        )


def test_groups_are_the_maximum_not_the_sum():
    blocks = torch.randn(3, 2, 2, 3, 3, dtype=torch.float64)
    for method in BOUNDS:
        apart = max(float(bound(block, method)) for block in blocks)
        together = float(bound(blocks.flatten(0, 1), method, groups=3))
        assert together == pytest.approx(apart, rel=1e-9)


SHAPES = [(2, 3, 3, 3), (3, 2, 4), (2, 1, 2, 3, 2), (3, 4)]


@EACH_BOUND
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.slow if len(s) == 5 else ()) for s in SHAPES]
)
def test_gradients(method, shape):
    kernel = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    options = {"rtol": 1e-10} if method == "spectral" else COARSE.get(method, {})
    torch.autograd.gradcheck(lambda k: bound(k, method, **options), kernel, atol=1e-6)
    (gradient,) = torch.autograd.grad(bound(kernel, method, stride=1).log(), kernel)
    assert float((gradient * kernel).sum()) == pytest.approx(1, rel=1e-9)  # homogeneity


@pytest.mark.slow
@EACH_BOUND
def test_gradients_through_stride_and_groups(method):
    kernel = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    options = {"rtol": 1e-10} if method == "spectral" else COARSE.get(method, {})
    geometry = {"stride": 2, "dilation": 3, "groups": 2}
    torch.autograd.gradcheck(lambda k: bound(k, method, **options, **geometry), kernel, atol=1e-6)


@EACH_BOUND
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_kernel_is_exactly_zero(method, dtype):
    kernel = torch.zeros(3, 2, 3, 3, dtype=dtype, requires_grad=True)
    value = bound(kernel, method)
    (gradient,) = torch.autograd.grad(value, kernel)
    assert float(value.detach()) == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@EACH_BOUND
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_every_precision_and_scale(method, dtype, scale):
    kernel = (torch.randn(3, 2, 3, 3, dtype=torch.float64) * scale).to(dtype)
    if not torch.isfinite(kernel).all():
        pytest.skip(f"{scale:g} does not fit {dtype}")
    value = bound(kernel, method)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert float(value) >= exact(kernel, (6, 6)) * ROUNDING
    assert float(value) <= float(bound(kernel.double(), method)) * (1 + 2e-7) + 2e-45


@EACH_BOUND
def test_subnormal_weights(method):
    kernel = torch.full((1, 1, 3), 5e-324, dtype=torch.float64)
    assert bound(kernel, method) >= 3 * kernel[0, 0, 0]
    kernel = torch.full((1, 1, 3), 1e308, dtype=torch.float64)
    assert bound(kernel, method) == math.inf


@EACH_BOUND
def test_contexts(method):
    kernel = torch.randn(4, 3, 3, 3)
    plain = bound(kernel, method)
    with torch.no_grad():
        assert bound(kernel, method) == plain
    with torch.inference_mode():
        assert bound(kernel, method) == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bound(kernel, method) == plain
    # and what a context left behind does not spoil a later gradient
    leaf = kernel.clone().requires_grad_()
    bound(leaf, method).backward()
    assert leaf.grad is not None


@pytest.mark.parametrize(
    "method",
    [m if m == "lipbound" else pytest.param(m, marks=pytest.mark.slow) for m in BOUNDS],
)
def test_compiled(method):
    torch.compiler.reset()  # or a frame skipped for one method would stay skipped for all
    kernel = torch.randn(4, 3, 3, 3, requires_grad=True)
    whole = method in ("lipbound", "frobenius")  # the others search: their graph breaks
    compiled = torch.compile(lambda k: bound(k, method), backend="aot_eager", fullgraph=whole)
    torch.testing.assert_close(compiled(kernel), bound(kernel, method))
    (mine,) = torch.autograd.grad(compiled(kernel), kernel)
    (wanted,) = torch.autograd.grad(bound(kernel, method), kernel)
    torch.testing.assert_close(mine, wanted)


def test_non_contiguous_and_channels_last():
    kernel = torch.randn(4, 3, 3, 3)
    for method in BOUNDS:
        laid = kernel.to(memory_format=torch.channels_last)
        assert bound(laid, method) == bound(kernel, method)
        assert bound(kernel.permute(1, 0, 3, 2), method) == bound(
            kernel.permute(1, 0, 3, 2).contiguous(), method
        )


def test_large_kernels_fit_in_memory():
    """A 31×31 depthwise layer: Gram matrices and transforms are made in chunks of rows."""
    kernel = torch.randn(24, 1, 31, 31)
    whole = bound(kernel, "lipbound", groups=24)
    apart = max(bound(k[None], "lipbound") for k in kernel[:4])
    assert apart <= whole <= kernel.flatten(1).abs().sum(1).max()


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_spectral_norm_above_is_above_and_close(rows, columns, complex_, seed):
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if complex_ else torch.float64
    matrix = torch.randn(3, rows, columns, dtype=dtype, generator=draw)
    matrix[1] = 0
    matrix[2] = matrix[2, :, :1] @ matrix[2, :1, :]
    truth = torch.linalg.matrix_norm(matrix, 2)
    above = spectral_norm_above(matrix)
    assert (above >= truth * ROUNDING).all()
    assert (above <= truth * (1 + 1e-12) + 1e-14).all()


def test_banded_norms_are_above_and_close():
    draw = np.random.default_rng(0)
    for size in (1, 2, 7, 40):
        for width, power in itertools.product((0, 1, 3, size), (-300, 0, 150)):
            matrix = np.tril(np.triu(draw.normal(size=(size, size + 3)), -width), width)
            matrix[0] += 1
            truth = np.linalg.norm(matrix, 2)
            found = banded_norm_above(sparse.csr_array(matrix * 10.0**power)) / 10.0**power
            assert truth * (1 - 1e-14) <= found <= truth * (1 + 1e-9)
    assert banded_norm_above(sparse.csr_array(np.zeros((3, 4)))) == 0


@pytest.mark.parametrize("power", [-320, -308, -160, 0, 160, 307])
def test_norms_of_any_size_are_above(power):
    rows = torch.randn(50, 7, dtype=torch.float64) * 10.0**power
    for row, found in zip(rows.tolist(), norms_above(rows).tolist(), strict=True):
        squares = sum(Fraction(x) ** 2 for x in row)
        assert Fraction(found) ** 2 >= squares
        assert Fraction(found) ** 2 <= squares * (1 + Fraction(1, 10**9)) or power < -300
    assert norms_above(torch.zeros(2, 3)).tolist() == [0, 0]


@given(st.floats(0, 1e308))
def test_round_up(value):
    number = torch.tensor(value, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        up = round_up(number, dtype)
        assert up.double() >= number
        assert (value == 0) == (float(up) == 0)


@pytest.mark.parametrize("gain", [1e-200, 10.0])
@pytest.mark.parametrize("name", LAYERS)
def test_a_bracket_without_time_is_still_a_bound(name, gain):
    layer, size = build(name), LAYERS[name]["size"]
    with torch.no_grad():
        layer.weight *= gain
    with within(0):
        found = bracket(layer)
        sized = bracket(layer, input_shape=size)
    for one in (found, sized):
        assert one.lower == 0
        assert one.upper >= exact(layer, size) * ROUNDING
    with torch.no_grad():
        loose = float(layer.weight.abs().sum()) * 4
    assert found.upper <= loose


def test_time_that_is_up_inside_a_search(monkeypatch):
    """After every number of looks at the clock: what is known by then, or the whole answer."""
    layer = build("3x3")
    whole, looks = bracket(layer), []

    def late(after):
        looks.append(after)
        return len(looks) > after

    for after in (1, 2, 4, 8, 16, 10_000):
        looks.clear()
        monkeypatch.setattr("lipbound.runtime.time_is_up", lambda after=after: late(after))
        found = bracket(layer)
        assert found.lower <= whole.upper
        assert found.upper >= whole.lower
    assert found == whole
    assert len(looks) > 4


def test_estimates_are_not_bounds():
    assert not set(BOUNDS) & set(ESTIMATES)
    kernel = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)
    assert float(estimate(kernel, "polygrid")) < exact(kernel, (500,)) < float(bound(kernel))
