"""Certified brackets: both ends hold, are as close as asked, and survive hostile kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import LAYERS, ROUNDING, build, kernels, spectral_norm
from torch import nn

from lipbound import bound, bracket, brackets, convolution, exact, lipschitz
from lipbound.bounds.finite import embedding
from lipbound.bounds.supremum import search, triangles
from lipbound.bounds.supremum.cells import Cover
from lipbound.bounds.supremum.eigen import bottom_eigenpairs
from lipbound.bounds.supremum.field import CHUNK_BYTES, Field
from lipbound.bounds.supremum.search import Search
from lipbound.symbols import evaluate, taps
from lipbound.toeplitz import operator_matrix
from verify.layer_checks import claims
from verify.random_layers import random_stack
from verify.trained import grid_peak


def dense_peak(kernel: torch.Tensor, samples: int = 96) -> float:
    """max σ1(F) over a fine grid, by SVD: at most the supremum, at least cos²(πd/S) of it."""
    spatial = tuple(range(2, kernel.ndim))
    transform = torch.fft.fftn(kernel.double(), s=[samples] * len(spatial), dim=spatial)
    return float(torch.linalg.matrix_norm(transform.flatten(2).permute(2, 0, 1), 2).max())


def check(kernel: torch.Tensor, rtol: float = 1e-3) -> None:
    found = bracket(kernel, rtol)
    assert found.certified
    assert found.lower <= found.upper <= found.lower * (1 + rtol)
    place = torch.tensor([found.frequency], dtype=torch.float64)
    symbol = evaluate(taps(convolution(kernel)).double(), place)
    assert found.lower <= float(torch.linalg.matrix_norm(symbol, 2).max()) * (1 + 1e-13)
    assert found.upper >= dense_peak(kernel) * ROUNDING


@pytest.mark.parametrize("block", range(4))
def test_the_same_as_if_all_layers_were_wide(monkeypatch, block):
    """Bands of two rows, single precision, two turns and smaller cells wherever they can be."""
    monkeypatch.setattr(triangles, "ROWS", 2)
    monkeypatch.setattr(triangles, "LEAST", 2)
    monkeypatch.setattr(search, "TURNS", 0)
    monkeypatch.setattr(search, "WIDE", 0)
    for seed in range(1000 + 3 * block, 1003 + 3 * block):
        wrong = [claim.name for claim in claims(random_stack(seed, 8)) if claim.wrong()]
        assert wrong == [], seed


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rtol", [pytest.param(1e-3, marks=pytest.mark.slow), 1e-6])
def test_finite_size_bracket_holds_the_svd(name, rtol):
    layer, size = build(name), LAYERS[name]["size"]
    for kernel in list(kernels(tuple(layer.weight.shape)).values())[::5]:
        layer.weight.copy_(kernel)
        truth = spectral_norm(operator_matrix(layer, size))
        found = bracket(layer, rtol, input_shape=size)
        assert found.lower * ROUNDING <= truth <= found.upper / ROUNDING
        assert found.upper <= bracket(layer, rtol).upper * (1 + 1e-12)
        assert found.lower >= truth * (1 - rtol)


@pytest.mark.parametrize("rtol", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(8, 4, 5, stride=2, padding=2, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2), nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    ],
    ids=str,
)  # fmt: skip
def test_the_lower_end_by_lanczos_is_near_the_svd(layer, rtol):
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    truth = spectral_norm(operator_matrix(layer, (14, 14)))
    found = bracket(layer, rtol, input_shape=(14, 14))
    assert truth * (1 - rtol / 10) <= found.lower <= truth / ROUNDING


ONE_TAP = {  # layer, input size
    "matrix": (nn.Linear(4, 3), ()),
    "1x1": (nn.Conv2d(4, 3, 1), (3, 4)),
    "padding": (nn.Conv2d(4, 3, 1, padding=2), (3, 4)),
    "stride 2, odd sizes": (nn.Conv2d(3, 5, 1, stride=2), (5, 7)),
    "stride 3, groups": (nn.Conv2d(6, 4, 1, stride=3, padding=1, groups=2), (5, 4)),
    "one of 1d": (nn.Conv1d(3, 3, 1, stride=4, padding=1, dilation=2), (4,)),
    "none of 1d": (nn.Conv1d(3, 3, 1, stride=3, padding=1), (2,)),
    "none on one axis": (nn.Conv2d(2, 3, 1, stride=(1, 2), padding=(0, 1)), (4, 1)),
    "3d": (nn.Conv3d(2, 3, 1, stride=2, padding=(0, 1, 0)), (3, 2, 1)),
    "transposed": (nn.ConvTranspose2d(3, 4, 1, stride=2, output_padding=1), (3, 2)),
    "transposed, cut": (nn.ConvTranspose1d(3, 2, 1, stride=4, padding=1), (3,)),
    "transposed, all cut": (nn.ConvTranspose1d(3, 2, 1, stride=4, padding=1), (2,)),
    "circular, stride 2 of 3": (
        nn.Conv2d(3, 2, 1, stride=2, padding=2, padding_mode="circular"), (3, 4)
    ),
    "reflect": (nn.Conv2d(3, 2, 1, padding=2, padding_mode="reflect"), (3, 4)),
    "reflect, stride 2": (
        nn.Conv1d(3, 2, 1, stride=2, padding=2, padding_mode="reflect"), (4,)
    ),
    "replicate, stride 2": (
        nn.Conv2d(3, 2, 1, stride=2, padding=3, padding_mode="replicate"), (2, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 1e-200])
@pytest.mark.parametrize("name", ONE_TAP)
def test_a_single_tap_needs_no_second_search_at_an_input_size(name, scale):
    """Against the SVD of the Jacobian that PyTorch computes."""
    layer, size = ONE_TAP[name]
    torch.manual_seed(0)
    weight = scale * torch.randn_like(layer.weight, dtype=torch.float64)
    layer.double().requires_grad_(False).weight.copy_(weight)
    layer.bias.zero_()
    channels = convolution(layer).in_channels
    x = torch.zeros(1, channels, *size, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x).reshape(-1, x.numel())
    truth = spectral_norm(jacobian.numpy() / scale) * scale
    found = bracket(layer, input_shape=size)
    assert found.lower * ROUNDING <= truth <= found.upper / ROUNDING
    assert found.upper <= found.lower * 1.001
    assert (found.upper == 0) == ("none" in name or "all cut" in name)
    assert found.evaluations == bracket(layer).evaluations
    assert float(bound(layer, input_shape=size)) >= truth * ROUNDING


def twin_peaks() -> torch.Tensor:
    """cos and sin waves on separate channels, their peaks equal to the last digits."""
    h = torch.arange(5, dtype=torch.float64)
    kernel = torch.zeros(2, 2, 5, dtype=torch.float64)
    kernel[0, 0] = torch.cos(0.9 * (h - 2))
    kernel[1, 1] = torch.cos(2.1 * (h - 2))
    peaks = [dense_peak(kernel[i : i + 1, i : i + 1], 40_000) for i in range(2)]
    kernel[1, 1] *= peaks[0] / peaks[1] * (1 + 1e-9)
    return kernel


def orthogonal() -> torch.Tensor:
    kernel = torch.zeros(6, 6, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    return kernel


HOSTILE = {
    "two near-equal peaks": twin_peaks,
    "flat": orthogonal,
    "shifted flat": lambda: orthogonal().roll((1, 0), (2, 3)),
    "rank one": lambda: torch.einsum("a,b,c,d->abcd", *[torch.randn(4).double() for _ in range(4)]),
    "spike between grid points": lambda: torch.cos(
        1.2345 * torch.arange(9, dtype=torch.float64)
    ).reshape(1, 1, 9),
    "1e-20": lambda: torch.randn(3, 4, 3, 3) * 1e-20,
    "1e20": lambda: torch.randn(3, 4, 3, 3) * 1e20,
    "nearly zero": lambda: torch.randn(3, 4, 3, 3).double() * 1e-300,
    "one entry": lambda: torch.nn.functional.pad(torch.ones(1, 1, 1, 1), (1, 1, 1, 1)),
    "all equal": lambda: torch.ones(4, 4, 3, 3),
    "alternating": lambda: torch.ones(4, 4, 3, 3) * torch.tensor([1.0, -1, 1]),
    "mixed scales": lambda: (
        torch.randn(4, 4, 3, 3).double() * torch.logspace(-9, 9, 4)[:, None, None, None]
    ),
    "half": lambda: torch.randn(3, 4, 3, 3).half(),
    "bfloat16": lambda: torch.randn(3, 4, 3, 3).bfloat16(),
    "even": lambda: torch.randn(3, 2, 4, 2),
    "matrix": lambda: torch.randn(7, 5),
    "wide matrix": lambda: torch.randn(40, 70),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_hostile_kernels(name, rtol):
    torch.manual_seed(1)
    kernel = HOSTILE[name]()
    if name == "matrix":
        found, truth = bracket(kernel, rtol), float(torch.linalg.matrix_norm(kernel.double(), 2))
        assert found.lower <= truth <= found.upper <= found.lower * (1 + rtol)
    elif name == "wide matrix":
        found, truth = bracket(kernel, rtol), float(torch.linalg.matrix_norm(kernel.double(), 2))
        assert found.lower * ROUNDING <= truth <= found.upper <= found.lower * (1 + rtol)
    elif name == "nearly zero":
        found, same = bracket(kernel, rtol), bracket(kernel * 2.0**900, rtol)
        assert found.upper == pytest.approx(same.upper * 2.0**-900, rel=1e-14)
    else:
        check(kernel, rtol)


def test_zero_kernel():
    found = bracket(torch.zeros(2, 3, 3, 3))
    assert (found.lower, found.upper, found.certified) == (0, 0, True)
    assert bracket(torch.zeros(2, 3, 3, 3), input_shape=(5, 5)).upper == 0


def test_the_ends_of_float64():
    """Three taps of the least, and of the greatest, number: 3 units, and more than any float."""
    least, greatest = 5e-324, 1.7e308
    found = bracket(torch.full((1, 1, 3), least, dtype=torch.float64))
    assert found.lower < 3 * least < found.upper
    found = bracket(torch.full((1, 1, 3), greatest, dtype=torch.float64))
    assert math.isfinite(found.lower)
    assert found.upper == math.inf


@pytest.mark.slow
def test_trained_kernels(shared):
    """All convolutions of two trained ResNets, in float32 and float64; few evaluations."""
    from safetensors.torch import load_file

    evaluations = []
    for depth in (20, 32):
        weights = load_file(shared / "data" / "weights" / f"cifar10_resnet{depth}.safetensors")
        layers = {k: v for k, v in weights.items() if v.ndim == 4}
        single, double = brackets(layers), brackets({k: v.double() for k, v in layers.items()})
        for name, kernel in layers.items():
            peak = grid_peak(kernel, 24)
            for found in (single[name], double[name]):
                assert found.upper <= found.lower * 1.001
                assert peak * ROUNDING <= found.upper
                assert found.lower <= peak / math.cos(math.pi / 24) ** 2
            evaluations.append(single[name].evaluations)
    assert len(evaluations) >= 50
    assert np.median(evaluations) <= 400


def test_a_network_in_one_call_equals_layer_by_layer():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    together = brackets(model)
    assert list(together) == ["0", "1", "3", "4", "5", "7"]
    for name, found in together.items():
        alone = bracket(model.get_submodule(name))
        assert found.lower <= alone.upper
        assert alone.lower <= found.upper
        assert found.width <= 1e-3
    with pytest.raises(ValueError, match="NaN"):
        brackets({"bad": torch.full((1, 1, 3, 3), torch.nan)})


def test_spectral_is_the_default_and_the_brackets_upper_end():
    layer = nn.Conv2d(3, 4, 3).double().requires_grad_(False)
    upper = bracket(layer).upper
    assert float(bound(layer)) == pytest.approx(upper, rel=1e-14)
    assert float(lipschitz(layer)) == pytest.approx(upper, rel=1e-14)
    tighter = bound(layer, input_shape=(8, 8))
    assert exact(layer, (8, 8)) <= float(tighter) < upper


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(n, marks=pytest.mark.slow) for n in range(15, 40))]
)
def test_gradients_on_a_ridge(seed):
    """Two taps: the symbol is largest on a line, where second derivatives are singular."""
    kernel = torch.zeros(1, 1, 2, 3, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    taps = torch.rand(2, generator=draw, dtype=torch.float64)
    kernel[0, 0, 0, 2], kernel[0, 0, 1, 0] = taps
    kernel.requires_grad_()
    value = bound(kernel)
    (gradient,) = torch.autograd.grad(value, kernel)
    assert value.item() == pytest.approx(taps.sum().item(), rel=1e-3)
    assert (gradient * kernel).sum().item() == pytest.approx(value.item(), rel=1e-9)
    assert gradient[0, 0, [0, 1], [2, 0]].tolist() == pytest.approx([1, 1], rel=2e-3)


def test_gradient_is_the_maximizers():
    """Against the SVD at the peak: ∂σ1/∂K_h = Re(ū v* e^{ih·ω})."""
    kernel = torch.randn(5, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    value = bound(kernel)
    (gradient,) = torch.autograd.grad(value, kernel)
    found = bracket(kernel, 1e-9)
    place = torch.tensor([found.frequency], dtype=torch.float64)
    symbol = evaluate(kernel[None], place)
    (wanted,) = torch.autograd.grad(torch.linalg.matrix_norm(symbol, 2).sum(), kernel)
    torch.testing.assert_close(gradient, wanted * float(value) / found.lower, rtol=1e-4, atol=1e-5)


def test_the_proof_decides(monkeypatch):
    """With worthless estimates the interval widens or the search works longer; it stays true."""

    def useless(matrices, start, steps):
        return np.ones(len(matrices)), torch.ones_like(start)

    monkeypatch.setattr("lipbound.bounds.supremum.peak.top_eigenpairs", useless)
    monkeypatch.setattr("lipbound.bounds.supremum.peak.bottom_eigenpairs", useless)
    monkeypatch.setattr("lipbound.bounds.supremum.search.bottom_eigenpairs", useless)
    monkeypatch.setattr("lipbound.bounds.certified.LIMIT", 1e8)
    kernel = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    found = bracket(kernel)
    peak = dense_peak(kernel)
    assert found.lower <= peak * 1.01
    assert peak <= found.upper <= 20 * peak
    assert found.certified


@pytest.mark.parametrize("excess", [1e3, 1e8, 1e100])
def test_one_value_far_above_the_others_is_found(excess):
    """Chebyshev's polynomials overflow there."""
    left = torch.randn(60, dtype=torch.complex128)
    left /= torch.linalg.vector_norm(left)
    others = torch.randn(60, 60, dtype=torch.complex128) / 20
    gaps = torch.eye(60) - others @ others.mH - excess * torch.outer(left, left.conj())
    start = torch.ones(1, 60, dtype=torch.complex128) / 60**0.5
    least, found = bottom_eigenpairs(gaps[None].clone(), start, 48)
    assert 1 - least[0] == pytest.approx(excess, rel=1e-2)
    assert abs(complex(found[0].conj() @ left)) == pytest.approx(1, abs=1e-2)


def test_a_scale_far_too_small_costs_no_bound(monkeypatch):
    made = Field.__init__

    def small(self, taps):
        made(self, taps)
        self.usual = self.usual * 1e-30

    monkeypatch.setattr(Field, "__init__", small)
    kernel = torch.ones(60, 60, requires_grad=True)
    found = bracket(kernel)
    assert 59.99 < found.lower <= 60 <= found.upper <= 60.07
    bound(kernel).backward()
    assert bool(kernel.grad.isfinite().all())


@pytest.mark.parametrize("rows", [1, 20, 60])
def test_groups_with_scales_hardly_in_one_range(rows):
    kernel = torch.randn(2 * rows, rows, 3, 3, dtype=torch.float64)
    kernel[:rows] *= 1e-157
    found, alone = bracket(kernel, groups=2), bracket(kernel[rows:])
    assert found.upper == pytest.approx(alone.upper, rel=2e-3)
    assert found.lower == pytest.approx(alone.lower, rel=2e-3)


def test_subnormal_entries_are_not_taken_for_zeros():
    kernel = torch.full((1, 1, 3, 3), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(ValueError, match="set_flush_denormal"):
            bracket(kernel)
        assert bracket(torch.ones(1, 1, 3, 3)).upper >= 9
    finally:
        torch.set_flush_denormal(False)
    assert bracket(kernel).lower > 8.9e-40


def test_twisted_circulant_is_exact_for_the_box_kernel():
    """(1, 1, 1): σ1 = 1 + 2cos(π/(n + 1)), which the twist φ = π attains."""
    for n in (3, 8, 20):
        kernel = torch.ones(1, 1, 3, dtype=torch.float64)
        found = bracket(kernel, 1e-6, input_shape=(n,))
        truth = 1 + 2 * math.cos(math.pi / (n + 1))
        assert found.lower <= truth * (1 + 1e-14)
        assert truth <= found.upper <= truth * (1 + 2e-6)
        grid = embedding(convolution(kernel, input_shape=(n,)), (0.0,))
        assert (grid.sizes, grid.twist) == ((n + 1,), (1,))


def test_search_gives_up_by_widening():
    coefficients = torch.randn(1, 3, 3, 3, 3, dtype=torch.float64)
    field = Field(coefficients)
    search = Search(field, np.zeros(1, dtype=np.int64), 1, 1e-6, limit=10)
    cover = Cover([field.sizes])
    upper = float(search.run(cover.start(field), cover.divide)[0])
    peak = dense_peak(coefficients[0])
    assert peak <= upper <= 3 * peak


def test_memory_of_very_many_groups_is_bounded():
    """Lags gathered for a chunk of cells count too: tiny matrices come with many of them."""
    field = Field(torch.randn(500, 1, 1, 7, 7, dtype=torch.float64))
    assert field.chunk * 16 * len(field.lags) <= CHUNK_BYTES["cpu"]
    assert field.chunk <= 1 << 17
