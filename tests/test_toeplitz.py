"""The operators equal torch's own layers, and Theorems 1 to 5 hold on the matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import LAYERS, build, spectral_norm
from toeplitz_matrices import coefficients, hankel, toeplitz
from torch import nn

from lipbound import bound, exact
from lipbound.toeplitz import operator, operator_matrix

SIZES = [1, 2, 3, 6, 10]


def peak(f, dims: int, points: int = 400) -> float:
    """sup |f| on a grid fine enough for degree ≤ 3 polynomials to be within 1e-3 of it."""
    axes = np.meshgrid(*[2 * np.pi * np.arange(points) / points] * dims, indexing="ij")
    return float(np.abs(f(*axes)).max())


def polynomial(coefs: np.ndarray, dims: int):
    """The generating function of centred coefficients, blocks in trailing axes."""

    def f(*frequencies):
        total = 0
        for index in np.ndindex(coefs.shape[:dims]):
            h = [i - s // 2 for i, s in zip(index, coefs.shape, strict=False)]
            phase = np.exp(1j * sum(k * w for k, w in zip(h, frequencies, strict=True)))
            block = coefs[index]
            total = total + phase.reshape(*phase.shape, *[1] * block.ndim) * block
        return total

    return f


@pytest.mark.parametrize("name", LAYERS)
def test_matrix_and_operator_equal_the_module(name):
    layer, size = build(name), LAYERS[name]["size"]
    inputs = (layer.in_channels, *size)
    basis = torch.eye(int(np.prod(inputs)), dtype=torch.float64).reshape(-1, *inputs)
    truth = layer(basis).flatten(1).T.numpy()  # torch's own forward on every basis vector
    assert np.allclose(operator_matrix(layer, size).toarray(), truth, atol=1e-14)
    linear = operator(layer, inputs)
    assert np.allclose(linear @ np.eye(linear.shape[1]), truth, atol=1e-14)
    assert np.allclose(linear.H @ np.eye(linear.shape[0]), truth.T, atol=1e-14)


def test_linear_is_its_matrix():
    layer = nn.Linear(4, 3, dtype=torch.float64)
    assert np.allclose(operator_matrix(layer, (4,)).toarray(), layer.weight.detach())
    assert exact(layer, (4,)) == pytest.approx(float(torch.linalg.matrix_norm(layer.weight, 2)))


def test_lanczos_agrees_with_the_dense_svd(monkeypatch):
    layer = build("3x3")
    dense = exact(layer, (8, 8))
    monkeypatch.setattr("lipbound.toeplitz.DENSE", 0)
    assert exact(layer, (8, 8)) == pytest.approx(dense, rel=1e-12)


def test_coefficients_invert_the_generating_function():
    rng = np.random.default_rng(0)
    for coefs, dims in [
        (rng.normal(size=5), 1),
        (rng.normal(size=(3, 2, 4)), 1),
        (rng.normal(size=(3, 5)), 2),
    ]:
        degree = [s // 2 for s in coefs.shape[:dims]]
        assert np.allclose(coefficients(polynomial(coefs, dims), degree), coefs, atol=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_theorem_1_toeplitz(n):
    rng = np.random.default_rng(n)
    for coefs in [rng.normal(size=5), np.array([1.0, 0, -1]), np.ones(3)]:
        f = polynomial(coefs, 1)
        matrix = toeplitz(coefs, n)
        assert np.allclose(matrix, toeplitz(coefficients(f, len(coefs) // 2), n))
        assert spectral_norm(matrix) <= peak(f, 1, 20000) * (1 + 1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_theorem_2_block_toeplitz(n):
    rng = np.random.default_rng(n)
    blocks = rng.normal(size=(3, 4, 4))
    frequencies = 2 * np.pi * np.arange(20000) / 20000
    sup = np.linalg.norm(polynomial(blocks, 1)(frequencies), 2, axis=(-2, -1)).max()
    assert spectral_norm(toeplitz(blocks, n)) <= sup * (1 + 1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_theorem_3_doubly_block_toeplitz(n):
    rng = np.random.default_rng(n)
    coefs = rng.normal(size=(3, 5))
    matrix = toeplitz(coefs, (n, n + 1))
    # The proof: D(f) is block T(F), with F(ω1) = T(f(ω1, ·)).
    stacked = np.stack([toeplitz(row, n + 1) for row in coefs])
    assert np.array_equal(matrix, toeplitz(stacked, n))
    assert spectral_norm(matrix) <= peak(polynomial(coefs, 2), 2) * (1 + 1e-3)


LOW, MID = (lambda i, j: i + j + 1), (lambda i, j: j - i)


def high(n):
    return lambda i, j: j - i - n


def widom(f: np.ndarray, g: np.ndarray, n: int) -> np.ndarray:
    """The right side of the generalized Widom identity, Σ_p included.

    H^α3 is taken as the proof uses it, coefficient (j1 − i1 − n, j2 + i2 + 1): its definition in
    the paper, (−j − i + n)ω1, and the list after it, j1 + i1 + n, differ from that and from each
    other, and give no identity.
    """
    flip = np.eye(n * n)[::-1]
    total = toeplitz(f, (n, n)) @ toeplitz(g, (n, n))
    for index in [(LOW, MID), (MID, LOW), (LOW, LOW), (high(n), LOW)]:
        conjugate_f, conjugate_g = f[::-1, ::-1], g[::-1, ::-1]  # real coefficients
        total = total + hankel(conjugate_f, (n, n), index).T @ hankel(g, (n, n), index)
        mirrored = hankel(f, (n, n), index).T @ hankel(conjugate_g, (n, n), index)
        total = total + flip @ mirrored @ flip
    return total


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_widom_identity_of_theorem_4(n):
    rng = np.random.default_rng(n)
    f, g = rng.normal(size=(2, 3, 3))
    product = coefficients(
        lambda a, b: polynomial(f, 2)(a, b) * polynomial(g, 2)(a, b), (2, 2)
    ).real
    assert np.allclose(toeplitz(product, (n, n)), widom(f, g, n), atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_theorem_4_stacked(n):
    rng = np.random.default_rng(n)
    coefs = rng.normal(size=(4, 3, 3))
    stacked = np.concatenate([toeplitz(c, (n, n)) for c in coefs])
    energies = sum(
        coefficients(lambda a, b, c=c: np.abs(polynomial(c, 2)(a, b)) ** 2, (2, 2)).real
        for c in coefs
    )
    # The proof's steps: D(Σ|f_i|²) − MᵀM is positive semidefinite (a sum of Hankel squares),
    # and D of a non-negative function is at most its supremum.
    outer = toeplitz(energies, (n, n))
    assert np.linalg.eigvalsh(outer - stacked.T @ stacked).min() >= -1e-12
    sup = peak(lambda a, b: sum(np.abs(polynomial(c, 2)(a, b)) ** 2 for c in coefs), 2)
    assert np.linalg.eigvalsh(outer).max() <= sup * (1 + 1e-3)
    assert spectral_norm(stacked) <= np.sqrt(sup) * (1 + 1e-3)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_theorem_5_convolution(n):
    rng = np.random.default_rng(n)
    kernel = rng.normal(size=(3, 2, 3, 3))
    matrix = np.block([[toeplitz(kernel[i, j], (n, n)) for j in range(2)] for i in range(3)])
    # D's blocks are the layer's: torch's cross-correlation reads a_{j−i}, as D does.
    layer = torch.from_numpy(kernel)
    assert np.allclose(matrix, operator_matrix(layer, (n, n)).toarray())
    sups = [
        peak(
            lambda a, b, i=i: sum(np.abs(polynomial(kernel[i, j], 2)(a, b)) ** 2 for j in range(2)),
            2,
        )
        for i in range(3)
    ]
    assert spectral_norm(matrix) <= np.sqrt(sum(sups)) * (1 + 1e-3)
    assert spectral_norm(matrix) <= float(bound(layer, "lipbound")) <= np.sqrt(sum(sups)) * 1.01
