"""What a sceptic found against the rules of the graph and beside them: no bound below the truth."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lipbound
from lipbound import Penalty, audit, bracket, certify, constrain


class Run(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(x)


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(100))

    def forward(self, x):
        self.centre.copy_(x.mean())
        return x + self.centre


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale.mul_(2)
        return x * self.scale


class Unbatched(nn.Module):
    """A chain of residual blocks whose second axis is not the channels."""

    def __init__(self, positions: int):
        super().__init__()
        self.first, self.one, self.two = (nn.Conv1d(n, 4, 1, bias=False) for n in (2, 4, 4))
        self.head = nn.Linear(positions, 3, bias=False)
        with torch.no_grad():
            self.first.weight[0] *= 1e-3
            self.first.weight[1:] *= 10
            self.one.weight *= 1e-3
            self.two.weight *= 1e-3
            self.head.weight[:, 1:] *= 1e-3

    def forward(self, x):
        y = functional.relu(self.first(x[0]))
        return self.head(functional.relu(self.two(functional.relu(self.one(y))) + y))


class Tenfold(nn.BatchNorm2d):
    def forward(self, x):
        return 10 * super().forward(x)


class Standardized(nn.Conv2d):
    def forward(self, x):
        weight = self.weight / self.weight.std((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight, None, self.stride, self.padding)


def norm(*gains: float) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(len(gains)).eval()
    layer.weight.data = torch.tensor(gains)
    return layer


SIGNS = torch.diag(torch.tensor([1.0, -1.0]))
FIRST = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
BN = norm(1e-3, 1.0)
EYE = torch.eye(3)[..., None, None]
ONE, ZERO = torch.ones(3), torch.zeros(3)
LOW = torch.full((1, 50), -9.0)
COUNTS = torch.tensor([1, 9])
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
LINEAR = nn.Linear(3, 3)
SPREAD = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
STEEP = nn.PReLU(init=math.nan)

# Every one of these was bounded too low once, or ended in a traceback.
ATTACKS: dict[str, tuple] = {
    "from both sides": (Run(lambda x: SIGNS @ x - x @ SIGNS), (2, 2)),
    "BatchNorm after a matrix from the left": (Run(lambda x: BN(FIRST @ x[0]), bn=BN), (2, 2)),
    "BatchNorm over positions": (
        Run(lambda x: BN(functional.conv1d(x[0], FIRST[..., None])), bn=BN), (2, 2),
    ),
    "a graph and a layer": (Run(lambda x: SQUARE @ x + LINEAR(x), layer=LINEAR), (4, 3)),
    "bias of linear": (Run(lambda x: functional.linear(x, torch.eye(4), 10 * x[0])), (4,)),
    "bias alone": (Run(lambda x: functional.linear(torch.eye(4), torch.eye(4), x[0])), (4,)),
    "bias of a convolution": (
        Run(lambda x: functional.conv2d(x, EYE, 10 * x.mean((0, 2, 3)))), (3, 2, 2),
    ),
    "bias of a transposed convolution": (
        Run(lambda x: functional.conv_transpose2d(x, EYE, 10 * x.mean((0, 2, 3)))), (3, 2, 2),
    ),
    "bias of BatchNorm": (
        Run(lambda x: functional.batch_norm(x, ZERO, ONE, ONE, 10 * x.mean((0, 2, 3)))), (3, 2, 2),
    ),
    "mean of BatchNorm": (
        Run(lambda x: functional.batch_norm(x, -10 * x.mean((0, 2, 3)), ONE)), (3, 2, 2),
    ),
    "weight of BatchNorm": (
        Run(lambda x: functional.batch_norm(x, ZERO, ONE, x.mean((0, 2, 3)))), (3, 2, 2),
    ),
    "weight of LayerNorm": (Run(lambda x: functional.layer_norm(x, (3,), x[0])), (3,)),
    "clamped and spread": (Run(lambda x: torch.clamp(x, min=LOW)), (1,)),
    "a limit that is spread": (Run(lambda x: torch.clamp(LOW, min=x)), (1,)),
    "copied and spread": (Centre(), (100,)),
    "copied over": (Run(lambda x: torch.zeros(1, 9).copy_(x.sum(1, keepdim=True))), (4,)),
    "repeated unequally": (
        Run(lambda x: x.repeat_interleave(COUNTS, dim=1, output_size=10)), (2,),
    ),
    "softsign with alpha": (Run(lambda x: x / torch.add(x.abs(), 1, alpha=0.01)), (3,)),
    "softsign rounded": (
        Run(lambda x: torch.div(x, 1 + x.abs(), rounding_mode="floor")), (3,),
    ),
    "softsign of a vector": (Run(lambda x: x / (x.abs() + ONE / 2)), (3,)),
    "drawn": (Run(lambda x: 10 * x * torch.bernoulli(torch.full((3,), 0.5))), (3,)),
    "other bits": (Run(lambda x: x.view(torch.float16)), (4,)),
    "NaN slope": (nn.LeakyReLU(math.nan), (3,)),
    "NaN slopes": (STEEP, (3,)),
    "a number read back": (Run(lambda x: x / x.norm().item()), (3,)),
    "several results": (Run(lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5)[0]), (3,)),


    "bias of a constant's LayerNorm": (
        Run(lambda x: functional.layer_norm(torch.ones(1, 1), (1,), None, x[0])), (1,),
    ),
    "bias of a constant's InstanceNorm": (
        Run(lambda x: functional.instance_norm(
            SPREAD, None, None, None, x[0], True, 0.1, 10.0)), (3,),
    ),
    "mean of LayerNorm": (
        Run(lambda x: torch.native_layer_norm(x, (1,), None, None, 1e-5)[1]), (1,),
    ),
    "buffer that changes": (Changing(), (3,)),
    "complex output": (Run(lambda x: (x, 100 * torch.fft.fft(x))), (3,)),
    "dropout of None": (Run(lambda x: torch.native_dropout(x, 0.5, None)[0]), (5,)),
    "division by zero": (Run(lambda x: x / torch.tensor([1.0, 0.0, 2.0])), (3,)),
}  # fmt: skip
REFUSED = (
    "buffer that changes",
    "complex output",
    "dropout of None",
    "division by zero",
    "softsign rounded",
    "drawn",
    "other bits",
    "a number read back",
)


@pytest.mark.parametrize("name", ATTACKS)
def test_no_bound_below_a_jacobian(name):
    model, shape = ATTACKS[name]
    found = audit(model, shape, search=0)
    assert found.upper == math.inf or name not in REFUSED
    if found.upper == math.inf:
        assert found.reason
        return
    for seed in range(4):
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) / 10**seed
        jacobian = torch.autograd.functional.jacobian(model, x).reshape(-1, x.numel())
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= found.upper * (1 + 1e-5)


def test_matrices_that_cancel_leave_their_rounding_to_batchnorm():
    layer = nn.Conv2d(1, 1, 1, bias=False).double()
    layer.weight.data.fill_(3.0)
    after = nn.BatchNorm2d(1).double().eval()
    after.weight.data.fill_(1e10)
    model = Run(lambda x: after(torch.sub(x, layer(x), alpha=1 / 3)), layer=layer, after=after)
    assert audit(model, (1, 2, 2), search=0).upper >= 5.5e-7

    twice = Run(lambda x: 2 * (model(x) + model(x)), model=model)
    assert audit(twice, (1, 2, 2), search=0).upper >= 2.2e-6
    both = Run(lambda x: (lambda y: y + y)(model(x)), model=model)
    assert audit(both, (1, 2, 2), search=0).upper >= 1.1e-6


@pytest.mark.parametrize("positions", [4, 5])
def test_chains_without_a_batch_axis(positions):
    torch.manual_seed(0)
    model = Unbatched(positions)
    found = audit(model, (2, positions), effort="high")
    assert found.lower <= found.upper
    flat = Run(
        lambda x: LINEAR(functional.relu(x).mean((2, 3)).squeeze().view(1, -1)), layer=LINEAR
    )
    assert audit(flat, (3, 5, 5), effort="high").upper < math.inf


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.running_var.fill_(math.nan),
        lambda b: b.running_var.fill_(-1.0),
        lambda b: b.weight.data.fill_(math.inf),
    ],
)
def test_a_diverged_batchnorm_ends(change):
    norm = nn.BatchNorm2d(2)
    change(norm)
    found = audit(nn.Sequential(nn.Conv2d(2, 2, 3), norm), (2, 6, 6), search=0)
    assert (found.upper, "finite gains" in found.reason) == (math.inf, True)


def test_inputs_are_not_written_to_and_count_once():
    x = -torch.ones(2, 3)
    found = audit(nn.ReLU(inplace=True), inputs=x)
    assert torch.equal(x, -torch.ones(2, 3))
    assert found.upper < 1.001
    assert found.note == ""


def test_radii_are_rounded_down():
    model, x = nn.ReLU(), torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    (radius,) = certify(model, audit(model, (2,)), x).tolist()
    assert radius <= math.sqrt(2) * (1 - 1e-13)
    bad = torch.tensor([[math.nan, 0.0], [math.inf, 0.0]])
    assert certify(bad, audit(model, (2,))).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="3 classes, the audited network has 2"):
        certify(torch.zeros(1, 3), audit(nn.Linear(2, 2), (2,)))


@pytest.mark.parametrize("divided", [False, True])
def test_a_wide_number_in_a_tensor_is_rounded_like_a_number(divided):
    factor = torch.tensor(10.0 / 3 if divided else 0.1, dtype=torch.float64)
    model = Run(lambda x: x / factor if divided else x * factor)
    x = torch.ones(1, 1)
    assert audit(model, (1,), search=0).upper >= float(model(x)) or divided
    assert audit(model, (1,), search=0).upper >= float(1 / factor.float().double()) or not divided


@pytest.mark.parametrize("layer", [nn.LayerNorm(4, eps=1e-50), nn.BatchNorm1d(4, eps=1e-50)])
def test_an_epsilon_that_float32_rounds_to_zero_gives_no_bound(layer):
    if isinstance(layer, nn.BatchNorm1d):
        layer.running_var.zero_()
    assert audit(layer.eval(), (4,), search=0).upper == math.inf
    assert audit(layer.double(), (4,), search=0).upper < math.inf


def test_a_matrix_from_the_left_is_no_head():
    weight = torch.tensor([[1.0, 0.0], [0.999, 0.0]])
    model = Run(lambda x: weight @ x[0])
    found = audit(model, (2, 2))
    with pytest.raises(ValueError, match=r"returns \(2, 2\) for a single input"):
        certify(model, found, torch.tensor([[[3.0, 1.0], [0.0, 0.0]]]))
    assert certify(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), found).max() <= 1.556


def test_penalties_know_no_autocast_and_no_reduced_products():
    layer = nn.Conv1d(16, 1, 2, bias=False)
    layer.weight.data.fill_(1.0019)
    truth, penalty = bracket(layer).lower, Penalty(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert penalty.bounds()[""] >= truth
        assert float(penalty()) == pytest.approx(float(Penalty(layer)()), rel=1e-6)
    wide = nn.Conv2d(64, 1, 3, bias=False)
    wide.weight.data.fill_(1.0019)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert Penalty(wide, samples=200).bounds()[""] >= bracket(wide).lower
    finally:
        torch.set_float32_matmul_precision(before)


def test_layers_with_a_forward_of_their_own():
    layer = Standardized(3, 4, 3, padding=1, bias=False)
    everything = (
        bracket, lipbound.bound, constrain, lipbound.lipschitz, lipbound.estimate,
        lambda layer: lipbound.brackets({"a": layer}), lambda layer: lipbound.exact(layer, (6, 6)),
    )  # fmt: skip
    for call in everything:
        with pytest.raises(TypeError, match="Standardized overrides forward"):
            call(layer)
    model = nn.Sequential(layer, nn.ReLU(), nn.Conv2d(4, 2, 3))
    found = audit(model, (3, 6, 6))
    assert [report.name for report in found.layers] == ["2"]
    assert "they override forward: 0" in found.note
    assert list(lipbound.brackets(model)) == ["2"]
    assert found.upper >= found.lower > 0
    with pytest.raises(TypeError, match=r"0: Standardized overrides forward .* exclude the layer"):
        Penalty(model)
    assert Penalty(model, exclude="0").bounds().keys() == {"2"}
    found = audit(nn.Sequential(Tenfold(2)), (2, 3, 3))
    assert (found.layers, found.upper > 9) == ((), True)
    assert bracket(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))).certified


def test_batchnorm_alone_is_between_its_ends():
    layer = nn.BatchNorm2d(1).eval()
    layer.running_var.fill_(0.7)
    (report,) = audit(nn.Sequential(layer)).layers
    truth = 1 / math.sqrt(float(layer.running_var) + layer.eps)
    assert report.bracket.lower <= truth <= report.bracket.upper <= truth * (1 + 1e-14)
    layer.running_var.fill_(-1.0)
    assert audit(nn.Sequential(layer), (1, 2, 2), search=0).upper == math.inf


def test_other_integers_and_no_shape():
    kernel = torch.ones(1, 1, 3)
    assert bracket(kernel, stride=np.int64(2)) == bracket(kernel, stride=2)
    with pytest.raises(ValueError, match="input_shape=5 is not a shape"):
        audit(nn.ReLU(), 5)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.count * x


class Growing(Counting):
    def forward(self, x):
        self.count += 1
        return [x] * self.count


UNBOUNDED = {
    "a sum, read out": lambda x: x + 100 * x.sum().item(),
    "a count": lambda x: x + 100 * (x > 0).sum().item(),
    "a size": lambda x: x + 100 * x.nonzero().shape[0],
    "Python's random numbers": lambda x: random.uniform(0, 10) * x,
    "a state of its own": Counting(),
    "more answers each time": Growing(),
}


@pytest.mark.parametrize("what", UNBOUNDED)
def test_numbers_from_elsewhere_are_no_constants(what):
    found = audit(Run(UNBOUNDED[what]), (3,))
    assert found.upper == math.inf
    assert found.reason


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_python_numbers_keep_their_digits(dtype):
    part = nn.Parameter(torch.zeros(1, dtype=dtype))
    for factor in (0.7, 0.1, 3, -1e-3):
        for truth, model in ((abs(factor), lambda x, c=factor: c * x),
                             (1 / abs(factor), lambda x, c=factor: x / c)):  # fmt: skip
            found = audit(Run(model, part=part), (3,))
            assert truth <= found.upper <= truth * (1 + 1e-6)
            assert found.lower <= found.upper * (1 + 4 * torch.finfo(dtype).eps)
    large = torch.eye(3, dtype=torch.float64) * 1e46
    tiny = Run(lambda x: functional.linear(x * 1e-46, large), part=nn.Parameter(large))
    assert audit(tiny, (3,), search=0).upper >= 1


def test_radii_are_of_the_size_that_was_audited():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"shape \(1, 3, 3\), but the audit is for \(1, 8, 8"):
        certify(model, audit(model, (1, 8, 8)), torch.randn(2, 1, 3, 3))
    with pytest.raises(ValueError, match=r"inputs are torch.uint8"):
        certify(model, audit(model, (1, 8, 8)), torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert len(certify(model, audit(model, (1, 8, 8)), torch.zeros(0, 1, 8, 8))) == 0


MIXING = {
    "their number": lambda x: len(x) * x,
    "their places": lambda x: x * torch.arange(1, 1 + len(x))[:, None],
    "one place alone": lambda x: x * (1 + 9 * (torch.arange(len(x)) == 1))[:, None],
    "one answer for all": lambda x: x.sum(0, keepdim=True),
}


@pytest.mark.parametrize("what", MIXING)
@pytest.mark.parametrize("first", [0.0, math.nan])
def test_inputs_that_change_each_others_answers(what, first):
    mixing, inputs = Run(MIXING[what]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [3.0, 5.0]])
    found, inputs[0, 0] = audit(mixing, (2,)), first
    assert len(certify(mixing, found, inputs[1:2])) == 1
    with pytest.raises(
        ValueError, match="mixes the inputs of a batch: its logits for these 3 differ"
    ):
        certify(mixing, found, inputs)
    assert certify(nn.ReLU(), audit(nn.ReLU(), (2,)), inputs)[1] == pytest.approx(0.5**0.5)


HOOKED = {
    "weight_norm": (lambda c: nn.utils.weight_norm(c), "weight_g"),
    "spectral_norm": (lambda c: nn.utils.spectral_norm(c).eval(), "weight_orig"),
    "prune": (lambda c: nn.utils.prune.l1_unstructured(c, "weight", amount=0.3), "weight_orig"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", HOOKED)
def test_weights_that_a_hook_sets_are_those_of_the_next_forward(kind):
    torch.manual_seed(0)
    make, name = HOOKED[kind]
    layer = make(nn.Conv2d(2, 3, 3, padding=1).double())
    penalty = Penalty(layer)
    getattr(layer, name).data[0] *= 10
    found, value = bracket(layer), float(penalty())
    penalty.add_grad_()
    assert getattr(layer, name).grad.abs().sum() > 0
    layer(torch.zeros(1, 2, 4, 4, dtype=torch.float64))
    assert bracket(layer.weight).upper == pytest.approx(found.upper, rel=1e-12)
    assert float(penalty()) == pytest.approx(value, rel=1e-6)


def test_a_call_of_its_own_is_a_forward_of_its_own():
    class Tenfold(nn.Linear):
        def __call__(self, x):
            return 10 * super().__call__(x)

    with pytest.raises(TypeError, match="overrides forward"):
        bracket(Tenfold(2, 2))


@pytest.mark.parametrize(("size", "goal"), [(2, 82), (3, 47), (7, 200)])
def test_which_pixel_is_nearest_is_asked_in_both_precisions(size, goal):
    for dtype in (torch.float32, torch.float64):
        model = Run(lambda x: functional.interpolate(x, size=goal), part=nn.Parameter(
            torch.zeros(1, dtype=dtype)))  # fmt: skip
        copies = functional.interpolate(torch.eye(size, dtype=dtype)[None], size=goal)[0].sum(1)
        assert audit(model, (1, size), search=0).upper >= math.sqrt(float(copies.max()))


def test_a_little_mixing_does_not_move_a_radius():
    """Less than what a batch may differ by: the logits of each input alone count."""
    model = Run(lambda x: x.relu() + 0.004 * (x.mean(0, keepdim=True) - x))
    found, x = audit(model, (2,), search=0), torch.tensor([[1.0, 1.0002], [1.3, 0.6]])
    assert int(model(x)[0].argmax()) != int(model(x[:1])[0].argmax())
    alone = certify(model, found, x[:1])
    with pytest.raises(ValueError, match="more than rounding can explain"):
        certify(model, found, x)
    unknown = Run(lambda x: rounded(model(x)))  # an operation whose rounding is not bounded
    found = audit(unknown, (2,), search=0)
    result = lipbound.certified_accuracy(unknown, found, [(x, torch.tensor([0, 0]))], [1e-4])
    assert result.predictions[0] == unknown(x[:1])[0].argmax() == 1
    assert result.certified[0] == 0 < alone[0]


def rounded(y: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(y[:, None], scale_factor=2, mode="linear")[:, 0, ::2]


@pytest.mark.parametrize("times", [1.1, 1.5, 1.9, 3.0])
def test_mixing_as_small_as_rounding(times):
    one, other = nn.Linear(2, 64, bias=False).double(), nn.Linear(64, 2, bias=False).double()
    with torch.no_grad():
        one.weight.copy_(torch.eye(2).repeat_interleave(32, 0) / 32)
        other.weight.copy_(torch.eye(2).repeat_interleave(32, 1))

    def run(x):
        y = other(one(x))
        return y + 1e-3 * (x.mean(0, keepdim=True) - x)

    model, off = Run(run, one=one, other=other), times * 1.33e-11 * 2**0.5
    found = audit(model, (2,), search=0)
    x = torch.tensor([[1, 1 + 2**-52], [1 + off, 1 - off]], dtype=torch.float64)
    alone = certify(model, found, x[:1])
    if times < 2:
        assert certify(model, found, x)[0] <= alone[0]
    else:
        with pytest.raises(ValueError, match="more than rounding can explain"):
            certify(model, found, x)


def test_no_images_have_no_accuracy():
    model = nn.Linear(2, 2)
    empty = torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="there are no images"):
        lipbound.certified_accuracy(model, audit(model, (2,)), [empty])
