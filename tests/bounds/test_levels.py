"""The search by levels: against the plain search and dense truth, and in the way a GPU runs it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import ROUNDING
from graph_rules import Graph, Pool, captured, on_streams
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipbound
from lipbound import bracket, brackets
from lipbound.bounds import certified
from lipbound.bounds.certified import spectral
from lipbound.bounds.problems import normalised
from lipbound.bounds.supremum import field, levels, stack
from lipbound.bounds.supremum.blocked import shortfall
from lipbound.bounds.supremum.cells import Cover
from lipbound.bounds.supremum.eigen import top_by_products
from lipbound.runtime import OutOfTime
from lipbound.symbols import symbol
from verify.layer_checks import claims
from verify.random_layers import random_stack


@pytest.fixture
def by_levels(monkeypatch):
    monkeypatch.setattr(certified, "BY_LEVELS", {"cpu"})


def network(seed: int) -> nn.ModuleDict:
    """Layers of many shapes, most of them several times."""
    torch.manual_seed(seed)
    made = {
        "wide": lambda: nn.Conv2d(7, 9, 3),
        "strided": lambda: nn.Conv2d(4, 6, (3, 5), stride=2),
        "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
        "depthwise": lambda: nn.Conv2d(5, 5, 3, groups=5),
        "row": lambda: nn.Conv2d(5, 4, (1, 3)),
        "long": lambda: nn.Conv1d(20, 18, 5),
        "solid": lambda: nn.Conv3d(2, 3, 2),
        "point": lambda: nn.Conv2d(20, 30, 1),
        "dense": lambda: nn.Linear(40, 25),
        "one": lambda: nn.Conv2d(1, 1, 3),
    }
    layers = {f"{name}{i}": make() for name, make in made.items() for i in range(3)}
    layers["zero"] = made["wide"]()
    layers["flat"] = nn.Conv2d(8, 8, 3)
    with torch.no_grad():
        layers["zero"].weight.zero_()
        layers["grouped0"].weight[:4].zero_()
        nn.init.dirac_(layers["flat"].weight)
    return nn.ModuleDict(layers).double()


def assert_same(model: nn.Module, found: dict, rtol: float) -> None:
    """Both brackets hold the same number, are as narrow as asked, and attain their lower ends."""
    plain = brackets(model, rtol)
    assert list(found) == list(plain)
    for name, mine in found.items():
        theirs = plain[name]
        assert mine.certified
        assert mine.lower <= theirs.upper, name
        assert theirs.lower <= mine.upper, name
        assert mine.upper <= mine.lower * (1 + rtol), name
        assert all(abs(angle) <= math.pi for angle in mine.frequency)
        if mine.lower > 0 and name != "flat":
            place = [] if name.startswith("dense") else mine.frequency
            layer = dict(model.named_modules())[name]
            if name.startswith("dense"):
                attained = torch.linalg.matrix_norm(layer.weight, 2)
            elif max(layer.stride) == 1:
                attained = torch.linalg.matrix_norm(symbol(layer, [place]), 2)
            else:
                continue  # the symbol without simplification has other frequencies
            assert mine.lower <= float(attained) * (1 + 1e-12), name


@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_plain_search_is_the_definition(monkeypatch, seed, rtol):
    model = network(seed)
    with monkeypatch.context() as patch:
        patch.setattr(certified, "BY_LEVELS", {"cpu"})
        patch.setattr(stack, "BLOCKED", 5)
        patch.setattr(stack, "CORNER", 3)
        patch.setattr(levels, "room", lambda *_: (1 << 25, 1 << 14)[seed])  # many cells in turns
        found = brackets(model, rtol)
    assert_same(model, found, rtol)


@pytest.mark.parametrize("seed", range(700, 712))
def test_random_layers_against_dense_truth_and_the_plain_search(seed):
    found = claims(random_stack(seed, 8), ["levels"])
    assert [claim.name for claim in found if claim.wrong()] == []


class ReadsNothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not any(word in str(function) for word in ("scalar_dense", "nonzero", "item"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 6, 9, 3, 3), (1, 5, 5, 1, 1), (3, 70, 80, 2, 2)])
@pytest.mark.parametrize(("width", "room"), [(4, 1 << 25), (1000, 1 << 25), (1000, 1)])
def test_a_level_reads_nothing_back(monkeypatch, shape, width, room):
    """A graph could not be captured otherwise."""
    monkeypatch.setattr(stack, "BLOCKED", width)
    taps = torch.randn(shape, dtype=torch.float64)
    work = stack.Stack(taps, np.arange(shape[0]), 1e-3, room)
    with ReadsNothing():
        work.load(taps)
    cells = Cover([list(shape[3:])] * shape[0]).start()
    packed = torch.from_numpy(levels._packed(cells, cells.block, 7))
    for first in (True, False):
        with ReadsNothing():
            row = work.level(packed, first)
        assert row.shape == (4 * len(cells) + shape[0],)
        assert (row[: len(cells)] == 7).all()
    with pytest.raises(AssertionError), ReadsNothing():
        float(row[0])


@pytest.fixture
def graphs(monkeypatch, by_levels):
    """Capture and replay on the processor, by the rules of a GPU."""
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(stack, "captured", captured)
    monkeypatch.setattr(stack, "graph_pool", Pool)
    monkeypatch.setattr(levels, "on_streams", on_streams)
    monkeypatch.setattr(levels, "device_memory", lambda _: 1 << 40)
    monkeypatch.setattr(levels, "_kept", {})


@pytest.mark.parametrize("room", [1 << 20, 1 << 25])
def test_graphs_serve_networks_with_other_weights(monkeypatch, graphs, room):
    """Levels that come again are replayed, on stacks kept from the first call."""
    monkeypatch.setattr(levels, "room", lambda *_: room)
    replays, stacks = [], []
    for seed in (3, 3, 3, 4):
        model = network(seed)
        field._equal_lags.cache_clear()  # many other shapes may come between two calls
        found = brackets(model)
        replays.append(Graph.replays)
        stacks.append({id(kept) for alike in levels._kept.values() for kept in alike})
        with monkeypatch.context() as patch:
            patch.setattr(certified, "BY_LEVELS", set())
            assert_same(model, found, 1e-3)
    counts = np.diff(replays)  # more room for vectors, made in the first call, costs a few graphs
    assert room < 1 << 25 or replays[0] < 20 < min(counts[:2])
    assert replays[0] < min(counts[:2])
    assert counts[2] > 0
    assert stacks[0] == stacks[1] == stacks[3]
    before = sum(map(len, levels._kept.values()))
    monkeypatch.setattr(levels, "device_memory", lambda _: 0)
    brackets(model, rtol=1e-2)
    assert sum(map(len, levels._kept.values())) == before  # no room for more
    levels.release_memory()
    assert not levels._kept


@pytest.mark.parametrize("counts", [(40, 72, 72, 72), (9, 200, 40, 300, 300)])
def test_levels_of_growing_size_find_room(graphs, counts):
    """Levels are padded to powers of two, and lost graphs are captured again."""
    taps = torch.randn(3, 4, 4, 3, 3, dtype=torch.float64)
    work = stack.Stack(taps, np.arange(3), 1e-3, 1 << 25)
    work.chunk = 32
    cells = Cover([[3, 3]] * 3).start()
    packed = torch.from_numpy(levels._packed(cells, cells.block, 7))[:1]  # none of other layers
    for _ in range(3):
        work.load(taps)
        for level, count in enumerate(counts):
            row = work.level(packed.expand(sum(work.sizes(count)), -1), first=level == 0)
            assert row[-3:].tolist() == [pytest.approx(row[-3].item()), 0, 0]
            assert row[-3] > 0
    assert work.graphs
    assert work.pool is not None


def test_graphs_serve_calls_inside_and_outside_of_inference_mode(graphs):
    layer = nn.Conv2d(9, 9, 3).double()
    right = bracket(layer).upper
    for _ in range(3):
        with torch.inference_mode():
            inside = bracket(layer).upper
        assert [inside, bracket(layer).upper] == pytest.approx([right, right], rel=1e-3)


def test_settings_of_the_caller_do_not_matter(monkeypatch, by_levels):
    """A default device, half precision by autocast, and memory freed in the middle of a search."""
    layer = nn.Conv2d(9, 9, 3).double()
    right, level = bracket(layer), stack.Stack.level

    def checked(self, packed, first):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
        levels.release_memory()
        return level(self, packed, first)

    monkeypatch.setattr(stack.Stack, "level", checked)
    with torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        assert bracket(layer) == right


def test_a_graph_that_does_nothing_is_noticed(monkeypatch, graphs):
    """The results of another call would prove nothing."""
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    layer = nn.Conv2d(9, 9, 3).double()
    with pytest.raises(RuntimeError, match="results of earlier work"):
        [bracket(layer) for _ in range(3)]


def test_work_that_cannot_be_captured_is_launched(monkeypatch, by_levels):
    def captured(work, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(stack, "captured", captured)
    monkeypatch.setattr(stack, "graph_pool", lambda _: (0, 0))
    monkeypatch.setattr(levels, "device_memory", lambda _: 1 << 40)
    monkeypatch.setattr(levels, "_kept", {})
    layer = nn.Conv2d(6, 6, 3).double()
    with pytest.warns(UserWarning, match="cannot capture .*stream is capturing"):
        found = [bracket(layer) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", ["scale", "vectors", "nothing found", "too high"])
def test_the_device_only_chooses(monkeypatch, by_levels, wrong):
    """Absurd choices cost time and width, never the bound."""
    draw = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(9, 9, 3).double()
    peak = float(
        torch.linalg.matrix_norm(
            torch.fft.fft2(layer.weight, s=(96, 96)).flatten(2).permute(2, 0, 1), 2
        ).max()
    )
    scales = stack.Stack._scales
    changed = {
        "scale": lambda self, block, cosine: scales(self, block, cosine)
        * torch.rand(len(block), dtype=torch.float64, generator=draw) * 1.5,
        "too high": lambda self, block, cosine: scales(self, block, cosine) * 1.01,
        "nothing found": lambda self, block, cosine: scales(self, block, cosine) * 0,
    }  # fmt: skip
    if wrong == "vectors":
        noise = lambda m, start, steps: (torch.rand(len(m)).double(), torch.randn_like(start))  # noqa: E731
        monkeypatch.setattr(stack, "top_by_products", noise)
    else:
        monkeypatch.setattr(stack.Stack, "_scales", changed[wrong])
    found = bracket(layer)
    assert found.lower <= peak * 1.01
    assert found.upper >= peak * ROUNDING
    assert found.width <= 1e-3 or wrong == "scale"


def test_matrices_are_searched_beside_convolutions(monkeypatch, by_levels):
    searches = []

    def search(symbols, owners, rtol):
        searches.append([list(taps.shape[3:]) for taps in symbols])
        return plain(symbols, owners, rtol)

    plain = levels.search
    monkeypatch.setattr(levels, "search", search)
    points = [nn.Linear(9, 7), nn.Conv2d(7, 9, 1), nn.Conv3d(7, 8, 1)]
    model = nn.Sequential(*points, nn.Conv2d(3, 4, 3)).double()
    found = brackets(model)
    assert searches == [[[1, 1], [1, 1], [1, 1], [3, 3]]]
    for layer, name in zip(points, "012", strict=True):
        true = float(torch.linalg.matrix_norm(layer.weight.flatten(1), 2))
        assert found[name].lower <= true * (1 + 1e-14)
        assert found[name].upper >= true * (1 - 1e-14)
    assert [len(found[name].frequency) for name in "0123"] == [0, 2, 3, 2]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_vectors_lie_where_torch_can_read_them(by_levels, dims):
    """It fails on complex numbers at addresses that are not multiples of 16."""
    draw = torch.Generator().manual_seed(0)
    kernel = torch.randn(2, 2, *[3] * dims, dtype=torch.float64, generator=draw)
    (problem,) = normalised({"": lipbound.convolution(kernel)}).values()
    found = certified._search([problem], 1e-3)[0]
    assert found.left.ctypes.data % 16 == 0
    assert float(spectral(kernel)) <= bracket(kernel).lower * (1 + 1e-3)


def test_no_factor_proves_a_cell_that_reaches_a_right_angle(monkeypatch, by_levels):
    """The cosine in the lemma would not be positive."""
    monkeypatch.setattr(stack.Stack, "_scales", lambda self, block, cosine: 0 * cosine + 1e-9)
    kernel = torch.ones(1, 1, 2, 2, 2, dtype=torch.float64)
    monkeypatch.setattr(levels, "LEVELS", 1)
    (result,) = levels.search([kernel[None]], [np.zeros(1, dtype=int)], 1e-3)
    assert not result.done.any()


def test_what_levels_leave_undone_is_searched(monkeypatch, by_levels):
    monkeypatch.setattr(levels, "LEVELS", 1)
    model = network(5)
    found = brackets(model)
    monkeypatch.setattr(certified, "BY_LEVELS", set())
    assert_same(model, found, 1e-3)


def test_without_time_what_is_proved_stays(monkeypatch, by_levels):
    """Layers that are done keep their bracket, and the others their lower end."""
    model = network(6)
    right, calls = brackets(model), []

    def out_of_time(*_, **__):
        calls.append(0)
        if len(calls) > 4:
            raise OutOfTime

    monkeypatch.setattr(levels, "check_time", out_of_time)
    with monkeypatch.context() as patch:
        patch.setattr(certified, "Search", out_of_time)
        found = brackets(model)
    done = [name for name in found if found[name] == right[name]]
    assert 5 < len(done) < len(found)
    started = [name for name in found if found[name].evaluations]
    assert len(done) < len(started) < len(found)
    for name in found.keys() - set(done):
        assert found[name].lower <= right[name].upper
        assert found[name].lower > 0.5 * right[name].lower or not found[name].evaluations
        assert found[name].upper >= right[name].lower
        assert found[name].certified


@pytest.mark.parametrize("count", [4, 20])
def test_layers_left_undone_share_the_limit_of_their_shape(monkeypatch, by_levels, count):
    limits = []
    search = certified.Search

    def limited(*given, limit):
        limits.append(limit)
        return search(*given, limit=limit)

    monkeypatch.setattr(certified, "Search", limited)
    monkeypatch.setattr(certified, "LIMIT", 0)
    monkeypatch.setattr(levels, "LEVELS", 1)
    layers = {"rank one": nn.Conv2d(1, 1, 1), **{f"{i}": nn.Conv2d(3, 3, 3) for i in range(count)}}
    brackets(layers)
    assert limits == [count * 5_000]


@pytest.mark.parametrize("rtol", [2e-11, 6e-11, 1e-10, 1e-9, 1e-4, 1e-2])
def test_a_factor_of_products_costs_no_width(monkeypatch, by_levels, rtol):
    """A matrix of almost equal rows has almost the largest shortfall of its size."""
    monkeypatch.setattr(stack, "BLOCKED", 5)
    monkeypatch.setattr(stack, "CORNER", 8)
    monkeypatch.setattr(certified, "Search", None)  # it is not needed
    layer = nn.Linear(60, 60).double()
    with torch.no_grad():
        layer.weight.add_(3)
    assert bracket(layer, rtol).width <= rtol


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 24, 40])
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
@pytest.mark.parametrize("excess", [1e-2, 1e-8, 1e-12, 0, -1e-14, -1e-13, -1e-10, -1e-3])
def test_the_shortfall_bounds_the_least_eigenvalue(size, kind, excess):
    draw = torch.Generator().manual_seed(size)
    half = torch.randn(5, size, size, dtype=kind, generator=draw)
    gram = half @ half.mH
    gram = gram / torch.linalg.eigvalsh(gram)[:, -1, None, None]
    gap = (1 + excess) * torch.eye(size, dtype=kind) - gram
    least = torch.linalg.eigvalsh(gap)[:, 0]
    short = shortfall(gap.clone(), width=8)
    assert (least >= -short - 1e-15 * size).all()
    if excess >= 1e-8:
        assert (short < 1e-11).all()
    if excess <= -1e-10:
        assert (short == math.inf).all()


def test_the_inverse_is_measured(monkeypatch):
    """With a wrong inverse there is no factorization, and the shortfall says how far off it is."""
    solve = torch.linalg.solve_triangular
    off = lambda *given, **options: solve(*given, **options) * (1 + 1e-4)  # noqa: E731
    monkeypatch.setattr(torch.linalg, "solve_triangular", off)
    half = torch.randn(4, 20, 20, dtype=torch.complex128)
    gram = half @ half.mH
    gap = 2 * torch.linalg.eigvalsh(gram)[:, -1, None, None] * torch.eye(20) - gram
    gap = gap / gap.diagonal(dim1=1, dim2=2).real.amax(1)[:, None, None]
    short = shortfall(gap.clone(), width=8)
    assert ((short > 1e-6) & (short < 1e-2)).all()


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_estimates_by_products_come_from_below(size, kind):
    draw = torch.Generator().manual_seed(size)
    half = torch.randn(6, size, size, dtype=kind, generator=draw)
    matrices = half @ half.mH / (4 * size)
    truth = torch.linalg.eigvalsh(matrices)[:, -1]
    start = torch.randn(6, size, dtype=kind, generator=draw)
    start = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
    value, vector = top_by_products(2 * matrices, start, 16)
    quotient = (vector.conj() * (matrices @ vector[..., None])[..., 0]).sum(1).real
    assert (quotient <= truth * (1 + 1e-12)).all()
    assert (quotient >= truth * (0.97 if size == 40 else 1 - 1e-6)).all()
    torch.testing.assert_close(value, quotient, rtol=1e-5, atol=0)
