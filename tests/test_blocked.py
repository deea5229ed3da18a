"""Factorizations by products: what they claim of a matrix, and of a layer, is true."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipbound import bracket
from lipbound.bounds import blocked, single
from lipbound.bounds.blocked import least_above
from lipbound.bounds.rounding import cholesky_error

SIZES = (1, 2, 63, 64, 65, 128, 130)


def with_least(size: int, least: float, count: int = 2) -> torch.Tensor:
    """Hermitian matrices with spectra from ``least`` to 1."""
    turned = torch.linalg.qr(torch.randn(count, size, size, dtype=torch.complex128))[0]
    values = torch.linspace(least, 1, size, dtype=torch.float64) if size > 1 else least
    return (turned * values) @ turned.mH


@pytest.mark.parametrize("size", SIZES)
@given(exponent=st.floats(-12, -1), negative=st.booleans())
def test_no_eigenvalue_below_the_slack_is_missed(size, exponent, negative):
    slack = blocked.ROOM * size * cholesky_error(size)
    least = -(10**exponent) if negative else 10**exponent
    found = least_above(with_least(size, least), slack)
    rounding = 1e-14 * size  # of the matrices themselves
    if least < -slack - rounding:
        assert not found.any()
    if least > rounding:
        assert found.all()


@pytest.mark.parametrize("size", SIZES[4:])
def test_an_inverse_that_is_off_proves_nothing(monkeypatch, size):
    solve = torch.linalg.solve_triangular
    matrices = with_least(size, 0.1)
    assert least_above(matrices, 1e-9).all()
    monkeypatch.setattr(
        torch.linalg, "solve_triangular", lambda *a, **k: solve(*a, **k) * (1 + 1e-7)
    )
    assert not least_above(matrices, 1e-9).any()


def test_one_bad_matrix_spoils_no_other():
    matrices = with_least(130, 0.1, 4)
    matrices[1] *= -1
    matrices[2, 3, 0] = torch.nan
    assert least_above(matrices, 1e-9).tolist() == [True, False, False, True]


@pytest.mark.parametrize("shape", [(130, 130, 3, 3), (129, 40, 2), (70, 70, 3, 3)], ids=str)
@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
def test_brackets_are_the_plain_ones(monkeypatch, shape, rtol):
    kernel = torch.randn(shape, dtype=torch.float64)
    plain = bracket(kernel, rtol)
    monkeypatch.setattr(blocked, "suits", lambda field: True)
    monkeypatch.setattr(single, "ROWS", 1 << 20)  # leaves every cell to float64
    found = bracket(kernel, rtol)
    assert found.upper <= found.lower * (1 + rtol)
    assert plain.lower <= found.upper * (1 + 1e-12)
    assert found.lower <= plain.upper * (1 + 1e-12)
    assert found.upper == pytest.approx(plain.upper, rel=rtol)
