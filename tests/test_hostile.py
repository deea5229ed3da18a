"""Hostile weights at every public entry: a sound answer, or one line that names the fix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import energy_maxima
from helpers import run
from torch import nn

from lipbound import (
    BOUNDS,
    Penalty,
    audit,
    bound,
    bracket,
    brackets,
    constrain,
    convolution,
    estimate,
    exact,
    lipschitz,
    row_energies,
    runtime,
)
from lipbound.bounds import gram_iteration
from lipbound.estimates import Climb
from lipbound.network.audits import audit_weights
from lipbound.row_energies import add_row_gradient_, lags, row_peaks
from lipbound.symbols import taps
from verify.hostile import ENTRIES, KERNELS, everything, layer_of, outcome

REFUSED = {"the end of float32": {"constrain"}}  # the norm to divide by exceeds float32

AUDITED = ("subnormal float64", "1e30", "mixed scales by channel", "transposed view")  # slow


@pytest.mark.parametrize("name", KERNELS)
def test_every_entry_is_sound_or_refuses(name):
    entries = [entry for entry in ENTRIES if entry != "audit" or name in AUDITED]
    found = everything(KERNELS[name](), entries)
    refused = {entry for entry, said in found.items() if said.startswith("refused")}
    assert refused == REFUSED.get(name, set())
    assert {e: said for e, said in found.items() if said != "sound" and e not in refused} == {}


def test_the_check_itself_can_fail(monkeypatch):
    monkeypatch.setitem(ENTRIES, "bracket", lambda kernel: bracket(kernel).lower / 2)
    assert outcome("bracket", KERNELS["rank one"]()).startswith("wrong")
    monkeypatch.setitem(ENTRIES, "bracket", lambda kernel: math.nan)
    assert outcome("bracket", KERNELS["rank one"]()).startswith("wrong")


K = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
BAD = {
    "complex": (K.to(torch.complex64), TypeError, r"complex64 is complex; .*\[\[Re K, -Im K\]"),
    "integer": (K.long(), TypeError, r"int64 is not floating-point.*kernel\.float\(\)"),
    "boolean": (K > 0, TypeError, "torch.bool"),
    "quantized": (
        torch.quantize_per_tensor(K, 0.1, 0, torch.qint8), TypeError, r"qint8.*dequantize\(\)",
    ),
    "float8": (K.to(torch.float8_e4m3fn), TypeError, r"float8_e4m3fn.*kernel\.float\(\)"),
    "meta": (K.to("meta"), ValueError, r"\(4, 2, 3, 3\) is on the meta device.*load them"),
    "sparse": (K.to_sparse(), TypeError, r"sparse_coo.*to_dense\(\)"),
    "mkldnn": (K.to_mkldnn(), TypeError, r"_mkldnn.*to_dense\(\)"),
    "empty": (K[:0], ValueError, r"empty, shape \(0, 2, 3, 3\)"),
    "no taps": (K[..., :0], ValueError, r"empty, shape \(4, 2, 3, 0\)"),
    "nan": (K.log(), ValueError, r"\(4, 2, 3, 3\) has \d+ NaN"),
    "infinite": (K / 0, ValueError, r"\(4, 2, 3, 3\) has 72 NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_no_entry_takes_what_has_no_bound(name):
    tensor, kind, message = BAD[name]
    layer = nn.Conv2d(2, 4, 3)
    layer.weight = nn.Parameter(tensor, requires_grad=False)
    model = nn.Sequential(nn.ReLU(), layer)
    for call in (
        lambda: bracket(tensor),
        lambda: bracket(layer, input_shape=(5, 5)),
        *(lambda m=m: bound(tensor, m) for m in BOUNDS),
        lambda: lipschitz(layer),
        lambda: estimate(tensor),
        lambda: exact(tensor, (5, 5)),
    ):
        with pytest.raises(kind, match=message):
            call()
    for call in (  # of many layers the one is named
        lambda: brackets(model),
        lambda: audit(model, (2, 5, 5)),
        lambda: Penalty(model),
        lambda: constrain(model),
    ):
        with pytest.raises(kind, match=f"^1: .*{message}"):
            call()


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([K[0], K[1]])
    for call in (bracket, bound, lipschitz, lambda k: audit_weights({"k": k})):
        with pytest.raises((TypeError, ValueError), match="nested"):
            call(nested)


def test_files_say_what_they_left_out(monkeypatch, capsys, tmp_path):
    path = tmp_path / "weights.pt"
    odd = {"a": K.to(torch.complex64), "b": K.long(), "q": BAD["quantized"][0]}
    torch.save({**odd, "good": K, "bias": K[0, 0, 0], "six": K[None, None]}, path)
    code, out, _ = run(monkeypatch, capsys, "audit", str(path))
    assert code == 0
    assert "3 left out (not real floating-point numbers): a (torch.complex64)" in out
    assert "1 left out (more than five axes, which no convolution has): six" in out
    torch.save(odd, path)
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n"), "3 left out" in err) == (2, 1, True)
    torch.save({"conv.weight": K.to_sparse()}, path)
    code, _, err = run(monkeypatch, capsys, "audit", str(path))
    assert (code, err.count("\n"), "conv.weight: the kernel's layout" in err) == (2, 1, True)


def test_layers_without_channels_or_groups():
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Conv2d(0, 4, 3)
    for layer in (empty, nn.Linear(0, 3)):
        with pytest.raises(ValueError, match="empty"):
            bracket(layer)
    for groups in (0, -2, 3, 1.0):
        with pytest.raises(ValueError, match=f"groups={groups} must divide"):
            bracket(K, groups=groups)
    kernel = torch.cat([torch.zeros(2, 2, 3, 3), K])  # a group of zeros among others
    assert bracket(kernel, groups=3).upper == bracket(K, groups=2).upper


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e not in ("audit FILE", "audit")])
def test_modes_and_layouts_change_nothing(entry):
    kernel = torch.randn(4, 3, 3, 3)
    wanted = ENTRIES[entry](kernel)
    inference = torch.inference_mode()(lambda: kernel.clone())()
    for other in (
        kernel.clone().requires_grad_(),
        kernel.to(memory_format=torch.channels_last),
        kernel.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([kernel, kernel], -1)[..., 0],
        inference,
    ):
        assert ENTRIES[entry](other) == pytest.approx(wanted, rel=2e-7)
    with torch.inference_mode():
        assert ENTRIES[entry](inference) == pytest.approx(wanted, rel=2e-7)


def test_constraining_half_precision_ends():
    """The scale and the weights are subnormal here: neither may stop the shrinking."""
    for value, norm in ((6e4, 1.0), (6e4, 1e-5), (1.0, 1e-6)):
        layer = nn.Conv2d(2, 3, 3, bias=False).half()
        with torch.no_grad():
            layer.weight.fill_(value)
        constrain(layer, norm).eval()
        assert bracket(layer).upper <= norm
        assert bracket(layer).upper >= 0.1 * norm or norm < 1e-5


def test_followed_penalties_survive_what_squares_do_not():
    for method in ("spectral", "power_iteration"):
        for name in ("1e30", "1e-30", "mixed scales by channel"):
            layer = layer_of(KERNELS[name]())
            channels = layer.in_channels
            penalty = Penalty(nn.Sequential(layer), 1.0, method, input_shape=(channels, 6, 6))
            penalty().backward()
            value = penalty.bounds()["0"]
            assert 0.5 * bracket(layer).lower < value < 1.001 * bracket(layer).upper
            assert bool(layer.weight.grad.isfinite().all())


def test_a_jacobian_that_overflows_is_no_lower_bound():
    found = audit(nn.Sequential(layer_of(KERNELS["1e30"]())), (2, 6, 6))
    assert found.lower == 0
    assert "its norm is outside the range of torch.float32" in found.note


@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
def test_large_kernels_sum_lags_without_a_table(stride, monkeypatch):
    monkeypatch.setattr(row_energies, "CHUNK", 8)
    kind = replace(lags((5, 4), stride))  # a new one: the other keeps its table
    assert kind.on(torch.device("cpu"), torch.float64)[1] is None
    kernel = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    peaks, points = row_peaks(kernel.flatten(2), kind)
    split = taps(convolution(kernel.detach(), stride=stride))
    torch.testing.assert_close(peaks, energy_maxima(split, kind.samples).flatten())
    peaks.sum().backward()
    closed = torch.zeros(3, 2, 20, dtype=torch.float64)
    add_row_gradient_(closed, kernel.detach().flatten(2), points, torch.ones(3).double(), kind)
    torch.testing.assert_close(closed.reshape(kernel.shape), kernel.grad)


def test_many_taps_are_looked_at_by_a_fourier_transform():
    climb = Climb((2, 3, 9, 10))
    rows = torch.randn(4, 3, 90, dtype=torch.complex128)
    waves = climb._waves(climb._grid_and_taps(rows.device)[0])  # (P, T)
    wanted = (rows @ waves.mT).abs().square().sum(1)
    torch.testing.assert_close(climb._on_grid(rows, rows.mH @ rows), wanted)


def crowded(function, most: int):
    """As the function, but with memory for no more than so many matrices or rows."""

    def limited(tensor, *rest, **options):
        if len(tensor) > most:
            raise torch.OutOfMemoryError("CUDA out of runtime. Tried to allocate 2.00 GiB.")
        return function(tensor, *rest, **options)

    return limited


def test_out_of_memory_is_answered_by_smaller_pieces(monkeypatch):
    kernel = torch.randn(6, 5, 3, 3)
    wanted = {m: float(bound(kernel, m)) for m in BOUNDS}
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "cholesky_ex", crowded(torch.linalg.cholesky_ex, 3))
        found = bracket(kernel)
        assert found.upper == pytest.approx(wanted["spectral"], rel=1e-6)
        assert brackets({"k": kernel})["k"] == found
    energies = row_energies._energies
    monkeypatch.setattr(
        row_energies, "_energies", lambda rows, kind: crowded(lambda r: energies(r, kind), 1)(rows)
    )
    assert float(bound(kernel, "lipbound")) == pytest.approx(wanted["lipbound"], rel=1e-6)
    iterate = gram_iteration._iterate

    def narrow(symbols, iterations):
        return crowded(lambda _: iterate(symbols, iterations), 40)(symbols[0])

    monkeypatch.setattr(gram_iteration, "_iterate", narrow)
    assert float(bound(kernel, "gram")) == pytest.approx(wanted["gram"], rel=1e-6)
    assert runtime.piece(1 << 20) == 1 << 20, "the next call begins as usual"


def test_out_of_memory_for_good_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.linalg, "cholesky_ex", crowded(torch.linalg.cholesky_ex, 0))
    with pytest.raises(
        MemoryError, match=r"even with the smallest pieces \(CUDA out of runtime.*device='cpu'"
    ):
        bracket(K)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert (code, err.count("\n"), "device='cpu'" in err) == (2, 1, True)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of runtime. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("lipbound.robust.models.digits.network", full)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")
    assert (code, err.count("\n"), "--device cpu" in err) == (2, 1, True)

    def wrong(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr("lipbound.robust.models.digits.network", wrong)
    code, _, err = run(monkeypatch, capsys, "audit", "demo")  # a defect is not hidden
    assert (code, "RuntimeError: something else" in err) == (3, True)
