"""The parts of the search: precision, triangles, field, cells, turns, eigenvectors and factors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import lapack

from lipbound.bounds.lapack import factor
from lipbound.bounds.supremum import eigen, search
from lipbound.bounds.supremum.cells import Cover
from lipbound.bounds.supremum.eigen import bottom_eigenpairs, top_eigenpairs
from lipbound.bounds.supremum.field import Field
from lipbound.bounds.supremum.search import Search
from lipbound.bounds.supremum.single import NO, UNDECIDED, YES, Single, _spread
from lipbound.bounds.supremum.triangles import Triangles, pieces
from lipbound.runtime import in_threads
from lipbound.symbols import evaluate


def mixed(kernel: torch.Tensor) -> torch.Tensor:
    return kernel * torch.logspace(-3, 0, len(kernel), dtype=torch.float64)[:, None, None, None]


@pytest.mark.parametrize("rows", [17, 48, 61, 130])
@pytest.mark.parametrize(
    "change", [lambda k: k, lambda k: k + 1, mixed], ids=["he", "peak", "mixed"]
)
def test_single_precision_proves_nothing_false(rows, change):
    """λ1 against limits on both sides of it, down to the last digits float32 has."""
    draw = torch.Generator().manual_seed(rows)
    kernel = torch.randn(rows, rows + 3, 3, 3, dtype=torch.float64, generator=draw)
    field = Field(change(kernel)[None])
    single = Single(field)
    rng = np.random.default_rng(rows)
    places = rng.uniform(-3, 3, (12, 2))
    block = np.zeros(len(places), dtype=np.int64)
    truth = torch.linalg.eigvalsh(field.gram(block, places))[:, -1].numpy()
    single.suits(block, np.ones(len(block)), truth)  # makes the lags
    if rows < 48:
        assert not {"triangles", "weight"} & vars(single).keys()
        return

    def prove(limit, angle=1.0):
        return single.prove(block, places, limit, np.full(len(block), angle))

    for below in (1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        assert (prove(truth * (1 - below)) != YES).all()
    assert (prove(truth * 1.01) != NO).all()
    assert (prove(truth * 1.01) == YES).all()  # it has learned what to expect
    # Without room to spare it leaves the last word to float64.
    assert (prove(truth * 0.99) == NO).all()
    assert (prove(truth * 0.99, angle=1e-4) == UNDECIDED).all()
    # The guess of δ never decides: told that factors are harmless, it leaves cells undecided.
    single.spread[:] = 0
    assert (prove(truth * (1 + 3e-5)) != YES).all()


@pytest.mark.parametrize("rows", [48, 61, 130])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_triangles_are_the_fields_matrices(rows, real):
    """The fast path against its twin, at several blocks, entry by entry."""
    field = Field(torch.randn(3, rows, rows + 5, 3, 2, dtype=torch.float64))
    block = np.array([0, 0, 1, 2, 2])
    places = np.random.default_rng(rows).uniform(-3, 3, (5, 2))
    scale = 1 / torch.linalg.eigvalsh(field.gram(block, places))[:, -1].numpy()
    made = Triangles(field, real)
    wanted = field.gap(block, places, scale).numpy()
    for (first, last), band in pieces(made.gaps(block, places, scale)):
        kept = np.triu(np.ones(band.shape[1:]))
        error = 100 * np.finfo(real).eps
        np.testing.assert_allclose(band, kept * wanted[:, first:last, first:], atol=error)
        assert not band[:, ~kept.astype(bool)].any()
    start = torch.randn(5, rows, dtype=torch.complex128)
    start /= torch.linalg.vector_norm(start, dim=1, keepdim=True)
    least, left = made.bottom_eigenpairs(block, places, scale, start, 6)
    plain, vectors = bottom_eigenpairs(field.gap(block, places, scale), start, 6)
    np.testing.assert_allclose(least, plain, atol=1e3 * error)
    torch.testing.assert_close(torch.linalg.vector_norm(left, dim=1), torch.ones(5).double())
    overlap = (left.conj() * vectors).sum(1).abs()
    torch.testing.assert_close(overlap, torch.ones(5).double(), atol=1e3 * error, rtol=0)
    huge = scale * np.array([1, 1, 1e12, 1, 1])
    lost = np.isnan(made.bottom_eigenpairs(block, places, huge, start, 6)[0])
    assert lost.tolist() == [False, False, real is np.float32, False, False]
    assert made.positive(block, places, scale * (1 - 1e-4)).all()
    assert not made.positive(block, places, scale * (1 + 1e-4)).any()


def test_single_precision_errs_by_less_than_stated():
    """The two halves of δ, each against float64."""
    # Near 2π/3 the symbol of all ones vanishes: lags a thousand times what is left of them.
    field = Field(1 + 0.1 * torch.randn(1, 90, 95, 3, 3, dtype=torch.float64))
    single, block, places = Single(field), np.zeros(5, dtype=np.int64), np.full((5, 2), 2.0944)
    scale = 0.9 / torch.linalg.eigvalsh(field.gram(block, places))[:, -1].numpy()
    single.suits(block, np.ones(5), 1 / scale)
    gaps = np.triu(single.triangles.gaps(block, places, scale))
    exact = field.gap(block, places, scale).numpy()
    half = gaps * (1 - np.eye(90) / 2)
    whole = half + half.conj().swapaxes(1, 2)
    off = np.linalg.norm(whole - exact, 2, axis=(1, 2))
    assert (off <= single._delta(np.zeros(5), scale * single.weight[block])).all()
    lapack.cpotrf(gaps[0].T, lower=1, clean=0, overwrite_a=1)
    factor = np.triu(gaps[0]).astype(complex)
    off = np.linalg.norm(factor.T @ factor.conj() - whole[0].conj(), 2)
    spread = _spread(gaps[:1])
    assert off <= single._delta(spread, np.zeros(1)) <= 1000 * off
    weighted = np.abs(factor) * np.sqrt(np.arange(3, 93))
    assert 1 <= spread / np.linalg.norm(weighted, 2) ** 2 <= 1.5


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 4), st.integers(1, 3))
def test_field_is_the_symbols_gram_matrix(sizes, rows, extra):
    """The fast path (lag matrices) and its twin (a product each time) against the symbol."""
    coefficients = torch.randn(3, rows, rows + extra, *sizes, dtype=torch.float64)
    field = Field(coefficients)
    block = np.array([0, 2, 1, 2])
    places = np.random.default_rng(0).uniform(0, 6, (4, len(sizes)))
    wanted = torch.stack(
        [
            evaluate(coefficients[b][None], torch.from_numpy(w)[None])[0, 0]
            for b, w in zip(block, places, strict=True)
        ]
    )
    wanted = wanted @ wanted.mH
    torch.testing.assert_close(field.gram(block, places), wanted)
    field.keeps_lags = False
    torch.testing.assert_close(field.gram(block, places), wanted)
    off = torch.linalg.matrix_norm(field.gram(block, places) - wanted, 2)
    assert (off.numpy() <= field.error[block]).all()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 2**31)
)
def test_cells_cover_the_torus(sizes, levels, seed):
    """Every frequency, or its negative, lies within the angle of some cell, however divided."""
    cover = Cover([sizes])
    cells = cover.start()
    rng = np.random.default_rng(seed)
    for _ in range(levels if math.prod(sizes) <= 27 and len(cells) < 2000 else 0):
        divided = cover.divide(cells, rng.integers(1, 4, len(cells)))
        cells = cells if divided is None else divided
    assert (cells.own == (np.abs(np.sin(cells.frequency)) < 1e-12).all(1)).all()
    points = rng.uniform(0, 2 * np.pi, (80, len(sizes)))
    degree = np.array([(m - 1) / 2 for m in sizes])
    for point in points:
        inside = False
        for mirror in (point, -point):
            offset = np.angle(np.exp(1j * (cells.frequency - mirror)))
            inside = inside or (np.abs(offset) @ degree <= cells.angle * (1 + 1e-12)).any()
        assert inside


def test_one_cover_for_several_shapes_is_each_shapes_own():
    shapes = [(3, 1, 4), (2, 1, 2), (1, 1, 1), (3, 1, 4)]
    together = Cover(shapes)
    cells = together.start()
    divided = together.divide(cells, 2 + cells.block % 2)
    for block, sizes in enumerate(shapes):
        cover = Cover([sizes])
        mine, alone = divided[divided.block == block], cover.start()
        if sizes != (1, 1, 1):  # a matrix keeps its only cell
            alone = cover.divide(alone, np.full(len(alone), 2 + block % 2))
        np.testing.assert_array_equal(mine.frequency, alone.frequency)
        np.testing.assert_allclose(mine.angle, alone.angle, rtol=1e-11, atol=1e-12)  # the slack
        np.testing.assert_array_equal(mine.own, alone.own)
    np.testing.assert_array_equal(divided.block, cells.block[divided.left.numpy()])
    with pytest.raises(ValueError, match="different axes"):
        Cover([(3, 1), (1, 3)])


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_no_cell_is_lost_between_turns(monkeypatch, seed, raised):
    """Whatever fails in either turn comes back, once, by block, with its value and vector."""
    field = Field(torch.randn(3, 50, 50, 3, 3, dtype=torch.float64))
    rng = np.random.default_rng(seed)
    run = Search(field, np.array([0, 0, 1]), 2, 1e-3, limit=10**9)
    cells = Cover([field.sizes] * 3).start(field)
    fails = rng.random(len(cells)) < 0.4
    value = rng.random(len(cells))
    cells.left[:, 0] = torch.from_numpy(value).to(cells.left)
    known = {tuple(f): i for i, f in enumerate(np.c_[cells.block, cells.frequency].tolist())}

    def prove(some, values=None, target=None):
        at = np.array([known[tuple(f)] for f in np.c_[some.block, some.frequency].tolist()])
        lost = fails[at] if values is None else rng.random(len(at)) < 0.5
        fails[at] = lost
        return some[lost], value[at][lost]

    monkeypatch.setattr(run, "_prove", prove)
    rises = lambda *given: run.peak.lower.__iadd__(float(raised))  # noqa: E731
    monkeypatch.setattr(run.peak, "raise_from", rises)
    monkeypatch.setattr(search, "TURNS", 0)
    failed, values = run._prove_in_turns(cells)
    assert (np.diff(failed.block) >= 0).all()
    np.testing.assert_array_equal(failed.left[:, 0].real.numpy(), values)
    at = [known[tuple(f)] for f in np.c_[failed.block, failed.frequency].tolist()]
    assert sorted(at) == fails.nonzero()[0].tolist()
    np.testing.assert_array_equal(values, value[at])


def test_many_small_problems_are_solved_in_parts(monkeypatch):
    """A GPU's solver takes far more memory than the matrices."""
    half = torch.randn(7, 4, 4, dtype=torch.complex128)
    matrices, sizes = half @ half.mH, []
    values, vectors = top_eigenpairs(matrices, half[:, 0], 6)
    least, left = bottom_eigenpairs(matrices, half[:, 0], 6)
    solve = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (sizes.append(len(m)), solve(m))[1])
    monkeypatch.setattr(eigen, "MATRICES", 3)
    parts = top_eigenpairs(matrices, half[:, 0], 6)
    torch.testing.assert_close(parts, (values, vectors))
    torch.testing.assert_close(bottom_eigenpairs(matrices, half[:, 0], 6)[1], left)
    assert sizes == [3, 3, 1] * 2
    assert least.tolist() == pytest.approx(torch.linalg.eigvalsh(matrices)[:, 0].tolist())


@given(st.integers(1, 30), st.integers(0, 2**31))
def test_lanczos_never_exceeds_the_top(size, seed):
    draw = torch.Generator().manual_seed(seed)
    half = torch.randn(2, size, size, dtype=torch.complex128, generator=draw)
    matrices = half @ half.mH
    start = torch.randn(2, size, dtype=torch.complex128, generator=draw)
    values, vectors = top_eigenpairs(matrices, start, 6)
    truth = torch.linalg.eigvalsh(matrices)[:, -1]
    assert (values <= truth * (1 + 1e-12)).all()
    quotient = (vectors.conj() * (matrices @ vectors[..., None])[..., 0]).sum(-1).real
    torch.testing.assert_close(quotient, values)
    # The same space in another basis, for the other end of the spectrum turned around.
    gaps = torch.eye(size) - matrices / truth[:, None, None]
    least, left = bottom_eigenpairs(gaps, start, 6)
    torch.testing.assert_close((1 - torch.from_numpy(least)) * truth, values, rtol=1e-7, atol=0)
    norms = torch.linalg.vector_norm(left, dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


@pytest.mark.parametrize("threads", [1, 3, 9])
def test_threads_do_everything_once(threads):
    seen = []
    in_threads(lambda part: seen.extend(range(7)[part]), 7, threads)
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize("kind", [np.complex64, np.complex128])
def test_factors_in_place_are_lapacks(kind):
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, 5, 50, 60))
    wide = (parts[0] + 1j * parts[1]).astype(kind)
    matrices = wide @ wide.conj().swapaxes(1, 2)
    matrices[3] -= 40 * np.eye(50)  # has negative eigenvalues
    stored = matrices.copy()
    found = factor(matrices)
    assert found.tolist() == [True, True, True, False, True]
    for i in found.nonzero()[0]:
        lower = np.linalg.cholesky(stored[i].conj().astype(complex))
        np.testing.assert_allclose(np.triu(matrices[i]), lower.T, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(np.tril(matrices[i], -1), np.tril(stored[i], -1))
    with pytest.raises(ValueError, match="are not contiguous"):
        factor(stored.swapaxes(1, 2))


@pytest.mark.parametrize("kind", [np.complex64, np.complex128])
@pytest.mark.parametrize("place", [(0, 0), (3, 24), (49, 49)])
def test_what_is_no_number_has_no_factor(kind, place):
    matrices = np.stack([np.eye(50, dtype=kind)] * 2)
    matrices[0][place] = np.nan
    assert factor(matrices).tolist() == [False, True]
