"""LipSDP on symbols: never below a Jacobian with any slopes, and below the bound by the graph."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import fitted
from torch import Tensor, nn
from zoo import Run, conv

from lipbound import audit, certify
from lipbound.network.graph import capture
from lipbound.network.jacobian import jacobian_norm
from lipbound.network.lipsdp import cover, gains, multipliers, newton, pairs, pieces, reading
from lipbound.network.lipsdp.laurent import Laurent
from lipbound.network.rules import RULES, Options, Value, follow
from lipbound.robust.models import ResNet
from lipbound.toeplitz import operator_matrix
from verify.interior_point import lipsdp


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Choose multipliers in a few steps: any are valid."""
    monkeypatch.setattr(gains, "optimised", partial(multipliers.optimised, steps=25))


def sequence(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


def bottleneck(m: nn.Module, x: Tensor) -> Tensor:
    y = m.c(m.act(m.b(m.act(m.a(x)))))
    return m.act(y + m.skip(x))


def preactivated(m: nn.Module, x: Tensor) -> Tensor:
    x = m.stem(x)
    for norm, one, two in ((m.n1, m.a1, m.b1), (m.n2, m.a2, m.b2)):
        x = x + two(m.act(one(m.act(norm(x)))))
    return m.head(m.act(x).mean((2, 3)))


def residual(m: nn.Module, x: Tensor) -> Tensor:
    x = m.act(m.stem(x))
    x = m.act(x + m.two(m.act(m.one(x))))
    skip = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
    x = m.act(skip + m.four(m.act(m.three(x))))
    return m.head(nn.functional.avg_pool2d(x, x.size()[3]).flatten(1))


def parts(act: type[nn.Module] = nn.ReLU) -> dict[str, nn.Module]:
    return {"act": act()}


def normed(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    norm.running_var.uniform_(0.5, 2.0)
    norm.weight.data.uniform_(0.5, 2.0)
    return norm


POOLED = "residual, avg_pool2d over x.size()"


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "plain chain": (
            sequence(conv(2, 4), nn.ReLU(), conv(4, 4), nn.ReLU(), conv(4, 3), nn.ReLU()),
            (2, 5, 5),
        ),
        "strided": (
            sequence(conv(2, 4), nn.ReLU(), conv(4, 4, stride=2), nn.ReLU(), conv(4, 3), nn.ReLU()),
            (2, 6, 6),
        ),
        POOLED: (
            Run(residual, **parts(), stem=conv(2, 3), one=conv(3, 4), two=conv(4, 3),
                three=conv(3, 4, stride=2), four=conv(4, 5), head=nn.Linear(5, 3)),
            (2, 6, 6),
        ),
        "pre-activation": (
            Run(preactivated, **parts(), stem=conv(2, 3), n1=normed(3), a1=conv(3, 4),
                b1=conv(4, 3), n2=normed(3), a2=conv(3, 4), b2=conv(4, 3), head=nn.Linear(3, 2)),
            (2, 5, 5),
        ),
        "bottleneck with a stride inside": (
            Run(bottleneck, **parts(), a=conv(3, 2, 1), b=conv(2, 2, stride=2), c=conv(2, 4, 1),
                skip=conv(3, 4, 1, stride=2)),
            (3, 6, 6),
        ),
        "LeakyReLU": (
            sequence(conv(2, 4), nn.LeakyReLU(0.2), conv(4, 4), nn.LeakyReLU(0.2), conv(4, 3)),
            (2, 5, 5),
        ),
        "GELU": (
            sequence(conv(2, 4), nn.GELU(), conv(4, 4), nn.GELU(), conv(4, 3), nn.GELU()),
            (2, 5, 5),
        ),
        "flatten": (
            sequence(conv(1, 3), nn.ReLU(), conv(3, 3, stride=2), nn.ReLU(), nn.Flatten(),
                     nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 3)),
            (1, 6, 6),
        ),
        "dense": (
            sequence(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
            (6,),
        ),
        "valid, grouped and dilated": (
            sequence(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(),
                     nn.Conv2d(4, 3, 2, dilation=2), nn.ReLU()),
            (2, 8, 8),
        ),
        "one axis": (
            sequence(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 3, 4), nn.ReLU(),
                     nn.AvgPool1d(2), nn.Conv1d(3, 2, 3, padding=1), nn.ReLU()),
            (2, 9),
        ),
        "unknown middle part": (
            sequence(conv(2, 4), nn.ReLU(), conv(4, 4), nn.ReLU(), nn.MaxPool2d(2),
                     conv(4, 4), nn.ReLU(), conv(4, 3), nn.ReLU()),
            (2, 6, 6),
        ),
        "two convolutions without an activation": (
            sequence(conv(2, 4), conv(4, 4), nn.ReLU(), conv(4, 3), nn.ReLU()),
            (2, 5, 5),
        ),
    }  # fmt: skip
    return {name: (model.double().eval(), shape) for name, (model, shape) in found.items()}


NETWORKS = networks()


class Slopes(nn.Module):
    """Multiplies every entry by its own slope, a parameter; one for each call."""

    def __init__(self, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high
        self.slopes: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(self.slopes) == self.calls:
            drawn = (torch.rand(x.shape[1:]) < 0.5).double()
            self.slopes.append((self.low + (self.high - self.low) * drawn).requires_grad_())
        self.calls += 1
        return x * self.slopes[self.calls - 1]


def freed(model: nn.Module) -> tuple[nn.Module, list[Slopes]]:
    """Return the network with free slopes in place of its activations."""
    free = copy.deepcopy(model)
    for module in free.modules():
        for bias in ("bias", "running_mean"):
            if isinstance(getattr(module, bias, None), Tensor):
                getattr(module, bias).data.zero_()
    ends = {
        nn.ReLU: (0.0, 1.0),
        nn.Tanh: (0.0, 1.0),
        nn.LeakyReLU: (0.2, 1.0),
        nn.GELU: (-0.12, 1.12),
    }
    found = []
    for name, module in list(free.named_modules()):
        if type(module) in ends:
            found.append(Slopes(*ends[type(module)]))
            free.set_submodule(name, found[-1])
    return free, found


def floor(model: nn.Module, shape: tuple[int, ...], seed: int) -> float:
    """Return a large Jacobian norm over freely chosen slopes, by alternating maximization."""
    torch.manual_seed(seed)
    free, activations = freed(model)

    def run(x: Tensor) -> Tensor:
        for one in activations:
            one.calls = 0
        return free(x[None])[0].flatten()

    best, x = 0.0, torch.zeros(shape, dtype=torch.float64)
    run(x)
    for _ in range(8):
        jacobian = torch.func.jacrev(run)(x).reshape(-1, math.prod(shape)).detach()
        left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
        best = max(best, float(values[0]))
        slopes = [s for one in activations for s in one.slopes]
        gain = left[:, 0] @ (run(right[0].reshape(shape)) - run(torch.zeros_like(x)))
        grads = torch.autograd.grad(gain, slopes)
        ends = [(one.low, one.high) for one in activations for _ in one.slopes]
        for slope, grad, (low, high) in zip(slopes, grads, ends, strict=True):
            slope.data = low + (high - low) * (grad > 0).double()
    return best


@pytest.mark.parametrize("name", NETWORKS)
def test_above_every_jacobian_and_below_the_graph(name):
    model, shape = NETWORKS[name]
    normal, high = (audit(model, shape, search=0, effort=e) for e in ("normal", "high"))
    assert "proved by LipSDP" in high.note
    assert high.upper < 0.999 * normal.upper
    truth = jacobian_norm(model, torch.randn(8, *shape, dtype=torch.float64))
    if name != "unknown middle part":  # a maximum is no slope
        truth = max(truth, *(floor(model, shape, seed) for seed in range(3)))
    assert truth <= high.upper * (1 + 1e-12)
    assert high.floor <= high.upper
    assert (high.floor > 0) == (name != "unknown middle part")
    assert ("aten.max_pool2d" in high.note) == (name == "unknown middle part")


class Apart(nn.Module):
    """The difference of two outputs."""

    def __init__(self, model: nn.Module, i: int, j: int):
        super().__init__()
        self.model, self.i, self.j = model, i, j

    def forward(self, x: Tensor) -> Tensor:
        y = self.model(x)
        return y[:, self.i : self.i + 1] - y[:, self.j : self.j + 1]


@pytest.mark.parametrize("name", [POOLED, "pre-activation", "flatten", "dense"])
def test_differences_of_outputs_are_above_every_jacobian(name):
    model, shape = NETWORKS[name]
    found = audit(model, shape, search=0, effort="high")
    assert found.pairs is not None
    assert bool((found.pairs < 1.02 * math.sqrt(2) * found.upper).all())
    assert bool((found.pairs == found.pairs.T).all())
    for i, j in ((0, 1), (0, len(found.pairs) - 1)):
        truth = max(floor(Apart(model, i, j), shape, seed) for seed in range(3))
        assert 0 < truth <= float(found.pairs[i, j]) * (1 + 1e-12)


def test_constants_of_differences_are_those_of_the_last_stage():
    """Multipliers of another stage were taken once, when those of the last one gave nothing."""
    torch.manual_seed(0)
    ending = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
    model = sequence(nn.ReLU(), nn.AvgPool2d(2), *ending).double()
    found = audit(model, (3, 5, 4), search=0, effort="high")
    assert found.pairs is None or bool((found.pairs < 1.02 * math.sqrt(2) * found.upper).all())
    assert floor(model, (3, 5, 4), 0) <= found.upper * (1 + 1e-12)


TINY = {
    "head": lambda: sequence(conv(2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
    "pooled": lambda: sequence(
        conv(2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    ),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("scale", [1e-150, 1e-306])
def test_differences_never_underflow(name, scale):
    torch.manual_seed(0)
    model = TINY[name]().double().eval()
    with torch.no_grad():
        model[-1].weight *= scale
    found = audit(model, (2, 4, 4), search=0, effort="high").pairs
    rows = torch.func.jacrev(model)(torch.randn(1, 2, 4, 4, dtype=torch.float64)).reshape(3, -1)
    entries = (rows[:, None] - rows[None]).abs().amax(-1)  # squares would underflow
    assert found is None or bool((found >= entries).all())


def test_equal_rows_of_the_head_leave_the_other_differences():
    torch.manual_seed(0)
    model = sequence(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[2].weight[1] = model[2].weight[0]
    found = audit(model, (4,), search=0, effort="high")
    assert 0 <= found.pairs[0, 1] < 1e-4 * found.upper < found.pairs[0, 2]


def test_channels_of_a_flattened_image_are_not_outputs():
    model = sequence(conv(2, 3, 1), nn.ReLU(), conv(3, 2, 1), nn.Flatten()).double().eval()
    found = audit(model, (2, 1, 3), search=0, effort="high")
    assert found.pairs is None
    assert len(certify(model, found, torch.zeros(1, 2, 1, 3, dtype=torch.float64))) == 1


class SortedSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten().sigmoid().sort().values[None]


def test_an_activation_without_channels_has_no_floor():
    found = audit(SortedSigmoid(), (3,), search=0, effort="high")
    assert found.floor == 0


def test_differences_of_linear_outputs_are_tight():
    torch.manual_seed(0)
    model = sequence(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    rows = (model[1].weight @ model[0].weight).detach()
    found = audit(model, (5,), search=0, effort="high").pairs
    ratios = found / (rows[:, None] - rows[None]).norm(dim=-1)
    each = ratios[~torch.eye(3, dtype=torch.bool)]
    assert 1 <= float(each.min()) <= float(each.max()) < 1 + 1e-5


@pytest.mark.parametrize("room", [1.1, 0.99])
def test_smaller_constants_of_differences_are_not_proved(room, monkeypatch):
    run = first_run(*NETWORKS[POOLED])
    stage, index = run.stages[-1], len(run.stages) - 1
    found = multipliers.optimised(run.stages, 25)
    ones = torch.eye(stage.sizes[-1], dtype=torch.float64)
    fixed = multipliers.fixed(found, index, ones, 0.003)
    monkeypatch.setattr(pairs, "ROOMS", (room,))
    if room > 1:
        assert bool((pairs.pair_constants(stage, fixed) >= 0).all())
    else:
        with pytest.raises(cover.NotPositive):
            pairs.pair_constants(stage, fixed)


def first_run(model: nn.Module, shape: tuple[int, ...]) -> reading.Run:
    graph = capture(model, (torch.zeros(1, *shape, dtype=torch.float64),))
    values = {name: Value(s, constant=1.0) for name, s in graph.inputs.items()}
    for call in graph.calls:
        values[call.name] = follow(call, values, Options())
    return reading.runs(values[graph.outputs[0]], torch.device("cpu"))[0][0]


@pytest.mark.parametrize("fault", ["none", "source", "result", "inner", "tap", "slope"])
def test_planted_faults_are_not_proved(fault):
    run = first_run(*NETWORKS["plain chain"])
    (stage,) = run.stages
    found = multipliers.optimised(run.stages, 25)
    fixed = multipliers.fixed(found, 0, torch.eye(stage.sizes[-1]).double(), 0.003)
    if fault == "source":
        fixed.source *= 0.98
    if fault == "result":  # a larger X, by entries beside its diagonal alone
        fixed.weights += 0.2 * (1 - torch.eye(len(fixed.weights)).double())
    if fault == "inner":
        first = stage.activations[0]
        fixed.inner[first] = fixed.inner[first].clone()
        fixed.inner[first][0] *= 0.2
    if fault == "tap":
        node = next(i for i, terms in enumerate(stage.terms) if terms)
        j, op = stage.terms[node][0]
        stage.terms[node] = [(j, Laurent.of(op.taps * 1.05, op.first))]
    if fault == "slope":
        last = stage.activations[-1]
        stage.slopes[last] = stage.slopes[last] * 1.1
    form = cover.form_of(stage, fixed)
    if fault == "none":
        assert cover.prove(form) > 0
    else:
        with pytest.raises(cover.NotPositive):
            cover.prove(form)


def test_an_incomplete_path_of_newton_is_no_loss(monkeypatch):
    """Adam takes over; ten layers of width 100 had twice the bound once."""
    model, shape = NETWORKS["dense"]
    whole = audit(model, shape, search=0, effort="high").upper
    monkeypatch.setattr(newton, "INNER", 1)
    _, complete = newton.path(first_run(model, shape).stages[0])
    assert not complete
    found = audit(model, shape, search=0, effort="high").upper
    assert whole <= found * (1 + 1e-6)
    assert found < audit(model, shape, search=0).upper


def test_a_matrix_between_stages_proves_less_than_a_diagonal(monkeypatch):
    """Two stages, because of the stride: the multiplier between them need not be diagonal."""
    torch.manual_seed(0)
    mixed = nn.Conv2d(6, 6, 1, bias=False)
    mixed.weight.data += 1.0  # correlated channels
    model = sequence(conv(2, 6), nn.ReLU(), mixed, nn.ReLU(), conv(6, 4, stride=2), nn.ReLU(),
                     conv(4, 3)).double().eval()  # fmt: skip
    whole = audit(model, (2, 8, 8), search=0, effort="high").upper
    monkeypatch.setattr(multipliers, "MIXING", 0.0)
    assert whole < 0.97 * audit(model, (2, 8, 8), search=0, effort="high").upper


def scalar(taps: Tensor, degree: int) -> cover.Form:
    """Return the form Σ t_k cos(kω) of one row."""
    places = torch.arange(degree + 1)[:, None]
    halves = taps.clone() / 2
    return cover.Form(halves.reshape(-1, 1, 1), places, [degree], 1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_only_positive_polynomials_are_proved(seed):
    draw = torch.Generator().manual_seed(seed)
    degree = 1 + seed % 4
    taps = torch.randn(degree + 1, generator=draw, dtype=torch.float64)
    angles = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    values = (taps * torch.cos(angles[:, None] * torch.arange(degree + 1))).sum(1)
    taps[0] -= values.min()
    for room, positive in ((0.02, True), (-1e-6, False)):
        moved = taps.clone()
        moved[0] += room
        if positive:
            assert cover.prove(scalar(moved, degree)) > 0
        else:
            with pytest.raises(cover.NotPositive):
                cover.prove(scalar(moved, degree))


def test_cells_that_are_too_large_would_prove_too_much(monkeypatch):
    """The test above can fail: with half the angle a polynomial that is not positive passes."""
    taps = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]).double()
    angles = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    least = (taps * torch.cos(angles[:, None] * torch.arange(5))).sum(1).min()
    taps[0] = -least - 1e-4
    with pytest.raises(cover.NotPositive):
        cover.prove(scalar(taps, 4))
    plain = cover.Cover._angles
    monkeypatch.setattr(cover.Cover, "_angles", lambda *given: plain(*given) / 1e3)
    assert cover.prove(scalar(taps, 4)) > 0


@pytest.mark.parametrize("stride", [1, 2])
def test_operators_are_those_of_the_layer(stride):
    """The phases of an operator, put together on a torus, are the layer's circular matrix."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, stride, 1, padding_mode="circular").double()
    matrix = torch.as_tensor(operator_matrix(layer, (4, 4)).toarray())
    op = Laurent.of(layer.weight.detach(), (-1, -1)).polyphase((stride, stride), (1, 1))
    side = 4 // stride
    grid = torch.cartesian_prod(*[torch.arange(side)] * 2) * (2 * math.pi / side)
    values = torch.linalg.svdvals(op.symbol(grid.double(), torch.complex128)).flatten()
    truth = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(values.sort().values, truth.sort().values[-len(values) :])


def test_products_and_adjoints_of_operators():
    draw = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, *sizes: int) -> Laurent:
        taps = torch.randn(rows, columns, *sizes, generator=draw, dtype=torch.float64)
        return Laurent.of(taps, (-1, 0))

    one, other = drawn(2, 3, 3, 2), drawn(3, 4, 2, 3)
    points = torch.rand(5, 2, generator=draw, dtype=torch.float64)
    at = partial(Laurent.symbol, frequencies=points, dtype=torch.complex128)
    torch.testing.assert_close(at(one @ other), at(one) @ at(other))
    torch.testing.assert_close(at(one.adjoint), at(one).mH)
    torch.testing.assert_close(at(one + drawn(2, 3, 1, 1)).shape, at(one).shape)


@pytest.mark.parametrize("powers", [1, 3, 7])
def test_schatten_norms_and_their_gradients(powers):
    draw = torch.Generator().manual_seed(powers)
    root = torch.randn(3, 4, 6, dtype=torch.complex128, generator=draw).requires_grad_()

    def norm(root):
        return multipliers.LogSchatten.apply(root @ root.mH, powers)

    values = torch.linalg.eigvalsh(root @ root.mH)
    plain = (values**2**powers).sum().log() / 2**powers
    torch.testing.assert_close(norm(root), plain)
    assert torch.autograd.gradcheck(norm, root)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.3)], ids=["relu", "leaky"])
@pytest.mark.parametrize("seed", range(3))
def test_the_floor_is_the_largest_jacobian_over_all_slopes(activation, seed):
    torch.manual_seed(seed)
    model = sequence(nn.Linear(3, 6), activation, nn.Linear(6, 4)).double()
    first, last = model[0].weight.detach(), model[2].weight.detach()
    least = getattr(activation, "negative_slope", 0.0)
    ends = torch.cartesian_prod(*[torch.tensor([least, 1.0], dtype=torch.float64)] * 6)
    truth = torch.linalg.matrix_norm(last @ (ends[:, :, None] * first), 2).max()
    found = audit(model, (3,), effort="high", search=0)
    assert 0.999 * truth < found.floor <= truth
    assert found.floor <= found.upper


@pytest.mark.parametrize("sizes", [(6, 10, 4), (4, 8, 6, 3), (4, 12, 12, 12, 1)])
def test_dense_networks_reach_the_optimum_of_lipsdp(sizes):
    torch.manual_seed(1)
    layers = [nn.Linear(a, b).double() for a, b in pairwise(sizes)]
    truth = lipsdp([layer.weight.detach().numpy() for layer in layers])
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    upper = audit(model, sizes[:1], effort="high", search=0).upper
    assert truth * (1 - 1e-5) <= upper <= truth * (1 + 1e-5)


def test_little_effort_gives_the_product_of_the_layers():
    torch.manual_seed(0)
    model = fitted(sequence(conv(2, 3), nn.BatchNorm2d(3), nn.ReLU(), conv(3, 2)))
    low, normal = (audit(model, (2, 6, 6), search=0, effort=e) for e in ("low", "normal"))
    assert low.upper == pytest.approx(low.product, rel=2e-3)
    assert normal.upper < low.upper


def test_linear_maps_are_tight_from_both_sides():
    torch.manual_seed(0)
    first, last = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()
    truth = float(torch.linalg.matrix_norm((last.weight @ first.weight).detach(), 2))
    found = audit(nn.Sequential(first, last), (4,), effort="high", search=0)
    assert (1 - 1e-6) * truth < found.floor <= truth <= found.upper < 1.01 * truth


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_known_constants_are_tight(scale):
    """Orthogonal matrices with activations of slope 1 somewhere have the product of their norms."""
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)) for _ in range(3)]
    for layer in layers:
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        layer.weight.data *= scale
    model = sequence(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()
    found = audit(model, (5,), effort="high", search=0)
    assert 0.5 * scale**3 < found.upper <= scale**3 * 1.001


@pytest.mark.slow
def test_residual_networks():
    torch.manual_seed(0)
    model = fitted(ResNet(8))
    shape = (3, 8, 8)
    normal, high = (audit(model, shape, search=0, effort=e) for e in ("normal", "high"))
    lower = jacobian_norm(model, torch.randn(8, *shape).double())
    assert lower <= high.upper < normal.upper / 5
    assert "not part of a chain" not in high.note


def test_a_network_that_is_zero_keeps_its_bound():
    model, shape = copy.deepcopy(NETWORKS["plain chain"])
    nn.init.zeros_(model[2].weight)
    found = audit(model, shape, effort="high", search=0)
    assert 0 <= found.upper < 1e-100


def test_other_networks_say_that_nothing_was_gained():
    model = sequence(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    found = audit(model, (1, 8, 8), search=0, effort="high")
    assert "effort='high' did not lower the bound" in found.note
    assert "aten.max_pool2d in 1" in found.note
    with pytest.raises(ValueError, match="unknown effort 'max'"):
        audit(model, (1, 8, 8), effort="max")


def test_the_time_limit_leaves_the_bound_of_the_graph():
    model, shape = NETWORKS["plain chain"]
    normal = audit(model, shape, search=0)
    found = audit(model, shape, search=0, effort="high", minutes=0.0)
    assert found.upper >= normal.upper
    assert "time limit" in found.note


def test_pixels_are_not_taken_for_channels():
    """Sixteen pixels left by a mean over sixteen channels: weights would meet wrong columns."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.relu(m.stem(x))
        return m.head(torch.relu(m.two(torch.relu(m.one(x))) + x).mean(1).flatten(1))

    model = Run(
        forward, stem=conv(3, 16), one=conv(16, 16), two=conv(16, 16), head=nn.Linear(16, 3)
    )
    found = audit(model.double().eval(), (3, 4, 4), effort="high", search=0)
    assert "aten.mean" in found.note


def lines_pooled(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(torch.relu(x - 0.9 * nn.functional.avg_pool1d(x, 3, 1, 1)))


def columns_pooled(m: nn.Module, x: Tensor) -> Tensor:
    pooled = nn.functional.avg_pool2d(x, (3,), (1,), (1,)) if x.ndim == 3 else x
    return m.head(torch.relu(x - 0.9 * pooled))


BROKEN = {
    "avg_pool1d of vectors": (Run(lines_pooled, head=nn.Linear(6, 6)), (6,)),
    "avg_pool2d of lines": (Run(columns_pooled, head=nn.Conv1d(4, 4, 1)), (4, 5)),
    "ELU that falls": (
        Run(lambda m, x: m.head(x - nn.functional.elu(x, -1.0)), head=nn.Linear(3, 3)), (3,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_second_reader_broke(name):
    torch.manual_seed(0)
    model, shape = BROKEN[name]
    model = model.double()
    found = audit(model, shape, effort="high", search=0)
    truth = jacobian_norm(model, torch.randn(50, *shape, dtype=torch.float64))
    assert truth <= found.upper * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["SAME", "RISING", "MIRRORED", "EITHER", "LEAKY", "PRELU",
                                  "BATCH_NORM", "POOLS"])  # fmt: skip
def test_operations_are_known_by_names_that_have_rules(kind):
    assert getattr(pieces, kind) <= set(RULES)


def test_the_rounding_of_epsilon_is_counted():
    """The gain with the given ε and with the one in float32 differ, and the rest cancels."""
    norm = nn.BatchNorm2d(1, eps=2.0**-16 * (1 + 2.0**-25))
    norm.running_var.zero_()
    norm.weight.data.fill_(2.0**-8)
    head = nn.Conv2d(1, 1, 1, bias=False)
    head.weight.data.fill_(1.0)
    model = Run(
        lambda m, x: m.head(torch.relu(x * (1 + 2.0**-22) - m.norm(x))), norm=norm, head=head
    ).eval()
    upper = audit(model, (1, 2, 2), effort="high", search=0).upper
    assert upper >= (1 + 2.0**-22) - 2.0**-8 / math.sqrt(norm.eps)


@pytest.mark.parametrize("size", [1e-10, 1e10, 1e20])
def test_sizes_of_weights_do_not_matter(size):
    torch.manual_seed(0)
    model = sequence(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        layer.weight.data *= size
    found = audit(model.double(), (4,), effort="high", search=0)
    assert jacobian_norm(model, torch.randn(20, 4).double()) <= found.upper < math.inf
