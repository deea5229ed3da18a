"""The oracle of real values against fractions, against mpmath, and against PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from gmpy2 import mpfr
from mpmath import mpf
from torch import nn
from torch.nn import functional as F
from zoo import OPERATIONS as ZOO
from zoo import Run

from lipbound.network import audits
from lipbound.network.graph import capture
from lipbound.network.rules import RULES
from lipbound.network.rules.values import readings
from verify import exact
from verify.__main__ import main
from verify.exact import NoValue, errors, real_outputs, real_values
from verify.real_operations import OPERATIONS, NoOperation, read

CLOSE = Fraction(1, 2**225)
NOT_COVERED = {
    "aten.fill",
    "aten.glu",
    "aten.scaled_dot_product_attention",
}  # not in the campaign
POINTS = (
    -60.0,
    -9.0,
    -3.1,
    -1.3,
    -0.5,
    -0.1,
    -1e-9,
    0.0,
    1e-9,
    0.1,
    0.5,
    1.7,
    2.9,
    6.5,
    12.0,
    60.0,
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
READINGS = pytest.mark.parametrize("reading", ["rounded", "exact"])


class Several(nn.Module):
    """Applies every part to the first entries of a vector, so that one capture is enough."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(p if isinstance(p, nn.Module) else Call(p) for p, _ in parts)
        self.shapes = [shape for _, shape in parts]

    def forward(self, x):
        flat = x.flatten()
        return [
            part(flat[: math.prod(shape)].reshape(1, *shape))
            for part, shape in zip(self.parts, self.shapes, strict=True)
        ]


class Call(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


def number(value) -> Fraction:
    """Return a number of any of the libraries as a fraction."""
    if isinstance(value, mpf):
        sign, man, exp, _ = value._mpf_
        return (-1) ** sign * Fraction(int(man)) * Fraction(2) ** exp
    if isinstance(value, type(mpfr(0))):
        return Fraction(*map(int, value.as_integer_ratio()))
    return Fraction(value)


numbers = np.frompyfunc(number, 1, 1)


def fractions(tensor):
    """Return a tensor as an array of fractions."""
    return np.asarray(numbers(tensor.detach().double().numpy()), dtype=object)


def agree(real, plain):
    """Check that an array of the oracle equals the plain definition to 225 bits."""
    plain = np.asarray(plain, dtype=object)
    assert real.shape == plain.shape
    for one, other in zip(real.flat, plain.flat, strict=True):
        one, other = number(one), number(other)
        assert abs(one - other) <= CLOSE * max(1, abs(other))


def drawn(count, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, generator=draw, dtype=torch.float64).to(dtype)


def softplus(x):
    return mpmath.log1p(mpmath.exp(x)) if x < 100 else x + mpmath.log1p(mpmath.exp(-x))


def sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def below(x, low, high):
    return min(max(x, low), high)


SLOPES = torch.tensor([0.3])
ENTRYWISE = {  # operation, and its definition with r(number), the number that the network uses
    "relu": (F.relu, lambda x, r: max(x, 0)),
    "relu6": (F.relu6, lambda x, r: below(x, 0, 6)),
    "tanh": (torch.tanh, lambda x, r: mpmath.tanh(x)),
    "sigmoid": (torch.sigmoid, lambda x, r: sigmoid(x)),
    "silu": (F.silu, lambda x, r: x * sigmoid(x)),
    "mish": (F.mish, lambda x, r: x * mpmath.tanh(softplus(x))),
    "logsigmoid": (F.logsigmoid, lambda x, r: mpmath.log(sigmoid(x))),
    "softsign": (F.softsign, lambda x, r: x / (1 + abs(x))),
    "gelu": (F.gelu, lambda x, r: x * mpmath.ncdf(x)),
    "gelu tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x, r: (
            x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + r(0.044715) * x**3)))
        ),
    ),
    "softplus": (F.softplus, lambda x, r: x if x > 20 else softplus(x)),
    "softplus jumping": (
        lambda x: F.softplus(x, 0.7, 1.1),
        lambda x, r: x if r(0.7) * x > r(1.1) else softplus(r(0.7) * x) / r(0.7),
    ),
    "hardsigmoid": (F.hardsigmoid, lambda x, r: below(x + 3, 0, 6) / 6),
    "hardswish": (F.hardswish, lambda x, r: x * below(x + 3, 0, 6) / 6),
    "hardtanh": (lambda x: F.hardtanh(x, -0.3, 0.7), lambda x, r: below(x, r(-0.3), r(0.7))),
    "elu": (lambda x: F.elu(x, 1.1), lambda x, r: x if x > 0 else r(1.1) * mpmath.expm1(x)),
    "celu": (
        lambda x: F.celu(x, 0.3),
        lambda x, r: x if x > 0 else r(0.3) * mpmath.expm1(r(1 / 0.3) * x),
    ),
    "selu": (
        F.selu,
        lambda x, r: (
            r(1.0507009873554804934)
            * (x if x > 0 else r(1.6732632423543772848) * mpmath.expm1(x))
        ),
    ),
    "leaky": (lambda x: F.leaky_relu(x, 0.1), lambda x, r: x if x > 0 else r(0.1) * x),
    "rrelu": (lambda x: F.rrelu(x, 0.1, 0.6), lambda x, r: x if x > 0 else r(0.35) * x),
    "prelu": (
        lambda x: F.prelu(x, SLOPES.to(x)),
        lambda x, r: x if x > 0 else mpf(float(SLOPES[0])) * x,
    ),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.3), lambda x, r: x if x > r(0.1) else r(0.3)),
    "hardshrink": (lambda x: F.hardshrink(x, 0.3), lambda x, r: x if abs(x) > r(0.3) else 0),
    "softshrink": (
        lambda x: F.softshrink(x, 0.3),
        lambda x, r: x - r(0.3) * mpmath.sign(x) if abs(x) > r(0.3) else 0,
    ),
    "clamp": (lambda x: x.clamp(-0.7, 1.3), lambda x, r: below(x, r(-0.7), r(1.3))),
    "abs": (torch.abs, lambda x, r: abs(x)),
    "neg": (torch.neg, lambda x, r: -x),
    "sign": (torch.sign, lambda x, r: mpmath.sign(x)),
    "floor": (torch.floor, lambda x, r: mpmath.floor(x)),
    "ceil": (torch.ceil, lambda x, r: mpmath.ceil(x)),
    "trunc": (torch.trunc, lambda x, r: mpmath.sign(x) * mpmath.floor(abs(x))),
    "round": (torch.round, lambda x, r: mpmath.nint(x)),
    "sin": (torch.sin, lambda x, r: mpmath.sin(x)),
    "cos": (torch.cos, lambda x, r: mpmath.cos(x)),
    "atan": (torch.atan, lambda x, r: mpmath.atan(x)),
    "asinh": (torch.asinh, lambda x, r: mpmath.asinh(x)),
    "erf": (torch.erf, lambda x, r: mpmath.erf(x)),
    "exp": (lambda x: torch.exp(x.clamp(max=9)), lambda x, r: mpmath.exp(min(x, 9))),
    "expm1": (lambda x: torch.expm1(x.clamp(max=9)), lambda x, r: mpmath.expm1(min(x, 9))),
    "log": (lambda x: torch.log(x.abs() + 1), lambda x, r: mpmath.log(abs(x) + 1)),
    "log1p": (lambda x: torch.log1p(x.abs()), lambda x, r: mpmath.log1p(abs(x))),
    "sqrt": (lambda x: torch.sqrt(x.abs()), lambda x, r: mpmath.sqrt(abs(x))),
    "rsqrt": (lambda x: torch.rsqrt(x.abs() + 1), lambda x, r: 1 / mpmath.sqrt(abs(x) + 1)),
    "reciprocal": (lambda x: torch.reciprocal(x.abs() + 1), lambda x, r: 1 / (abs(x) + 1)),
    "square": (lambda x: x**2 - x.square(), lambda x, r: 0),
    "times": (lambda x: 0.7 * x, lambda x, r: r(0.7) * x),
    "divided": (lambda x: x / 0.7, lambda x, r: x / r(0.7)),
    "shifted": (lambda x: torch.add(x, x.abs(), alpha=0.1), lambda x, r: x + r(0.1) * abs(x)),
    "subtracted": (lambda x: torch.sub(x, x.abs(), alpha=0.1), lambda x, r: x - r(0.1) * abs(x)),
    "reversed": (
        lambda x: torch.rsub(x, 0.3, alpha=0.9), lambda x, r: r(0.3) - r(0.9) * x,
    ),
    "maximum": (lambda x: torch.maximum(x, -x), lambda x, r: abs(x)),
    "minimum": (lambda x: torch.minimum(x, -x), lambda x, r: -abs(x)),
    "compared": (
        lambda x: torch.where((x > 0.1) & ~(x >= 12), x, 3 * x),
        lambda x, r: x if r(0.1) < x < 12 else 3 * x,
    ),
    "wide constant": (
        lambda x: x * torch.tensor(0.7, dtype=torch.float64), lambda x, r: r(0.7) * x,
    ),
}  # fmt: skip


def outputs(model, inputs):
    """Return the outputs by the reading of numbers, from one capture."""
    graph = capture(model.eval(), (inputs,))
    for reading in ("rounded", "exact"):
        values = real_values(graph, inputs, reading)
        yield reading, [values[name] for name in graph.outputs]


@DTYPES
def test_functions_of_one_entry(dtype):
    inputs = torch.tensor([POINTS], dtype=torch.float64).to(dtype)
    model = Several([(run, (len(POINTS),)) for run, _ in ENTRYWISE.values()])
    for reading, real in outputs(model, inputs):
        rounds = dtype == torch.float32 and reading == "rounded"
        with mpmath.workprec(300):

            def r(value, rounds=rounds):
                return mpf(float(np.float32(value)) if rounds else value)

            for found, (_, plain) in zip(real, ENTRYWISE.values(), strict=True):
                agree(found, [[plain(mpf(x), r) for x in inputs[0].tolist()]])


def plain_conv(x, layer):
    """Return Σ over channels and taps, entry by entry."""
    w, b = fractions(layer.weight), fractions(layer.bias)
    dims, groups = w.ndim - 2, layer.groups
    pads = layer.padding
    if pads == "same":
        pads = [a * (k - 1) // 2 for a, k in zip(layer.dilation, w.shape[2:], strict=True)]
        total = [a * (k - 1) for a, k in zip(layer.dilation, w.shape[2:], strict=True)]
    else:
        total = [2 * p for p in pads]
    sizes = [
        (n + t - a * (k - 1) - 1) // s + 1
        for n, t, a, k, s in zip(
            x.shape[1:], total, layer.dilation, w.shape[2:], layer.stride, strict=True
        )
    ]
    result = np.full((1, len(w), *sizes), Fraction(0), dtype=object)
    for o, *place in np.ndindex(len(w), *sizes):
        value = b[o]
        first = o // (len(w) // groups) * w.shape[1]
        for c, *tap in np.ndindex(*w.shape[1:]):
            at = [
                layer.stride[d] * place[d] + layer.dilation[d] * tap[d] - pads[d]
                for d in range(dims)
            ]
            if all(0 <= i < n for i, n in zip(at, x.shape[1:], strict=True)):
                value += w[(o, c, *tap)] * x[(first + c, *at)]
        result[(0, o, *place)] = value
    return result


def plain_transposed(x, layer):
    """Let every entry of the input add its taps to the output."""
    w, b = fractions(layer.weight), fractions(layer.bias)
    dims, out = w.ndim - 2, w.shape[1]
    sizes = [
        layer.stride[d] * (x.shape[1 + d] - 1) + layer.dilation[d] * (w.shape[2 + d] - 1) + 1
        - 2 * layer.padding[d] + layer.output_padding[d]
        for d in range(dims)
    ]  # fmt: skip
    result = np.full((1, len(b), *sizes), Fraction(0), dtype=object)
    for o, *place in np.ndindex(len(b), *sizes):
        result[(0, o, *place)] = b[o]
    for c, *place in np.ndindex(*x.shape):
        group = c // (len(w) // layer.groups)
        for o, *tap in np.ndindex(*w.shape[1:]):
            at = [
                layer.stride[d] * place[d] + layer.dilation[d] * tap[d] - layer.padding[d]
                for d in range(dims)
            ]
            if all(0 <= i < n for i, n in zip(at, sizes, strict=True)):
                result[(0, group * out + o, *at)] += w[(c, o, *tap)] * x[(c, *place)]
    return result


@DTYPES
def test_convolutions(dtype):
    torch.manual_seed(0)
    layers = [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (4, 9)),
        (nn.Conv1d(2, 2, 4, padding="same"), (2, 5)),
        (nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)), (2, 3, 4)),
        (nn.Conv2d(2, 2, (2, 3), padding="same", dilation=(1, 2)), (2, 4, 3)),
        (nn.Conv3d(1, 2, (1, 2, 3), padding=(0, 1, 1), stride=(1, 1, 2)), (1, 2, 3, 3)),
    ]
    backwards = [
        (nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1, groups=2, dilation=2), (4, 4)),
        (nn.ConvTranspose2d(2, 3, (3, 2), (1, 2), (1, 0), output_padding=(0, 1)), (2, 3, 2)),
        (nn.ConvTranspose3d(2, 1, (2, 1, 3), (2, 1, 1), (0, 0, 1), (1, 0, 0)), (2, 2, 2, 3)),
    ]
    model = Several([*layers, *backwards]).to(dtype)
    inputs = drawn(40, dtype)
    found = real_outputs(model, inputs)
    for index, (layer, shape) in enumerate([*layers, *backwards]):
        x = fractions(inputs)[0, : math.prod(shape)].reshape(shape)
        plain = plain_conv if index < len(layers) else plain_transposed
        agree(found[index], plain(x, layer))


def plain_product(left, right):
    return [
        [
            sum(a * b for a, b in zip(row, column, strict=True))
            for column in zip(*right, strict=True)
        ]
        for row in left
    ]


@DTYPES
def test_products_with_matrices(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).to(dtype)
    matrix, bias = drawn(12, dtype, 1).reshape(3, 4), drawn(8, dtype, 2).reshape(2, 4)
    m, b = fractions(matrix), fractions(bias)
    w, c = fractions(layer.weight), fractions(layer.bias)
    alpha, beta = Fraction(float(torch.tensor(0.7).to(dtype))), Fraction(2)
    if dtype == torch.float64:
        alpha = Fraction(0.7)
    parts = {
        "linear": (layer, lambda x: [plain_product(x, w.T) + c]),
        "right": (lambda x: x @ matrix, lambda x: [plain_product(x, m)]),
        "left": (lambda x: matrix.mT[:, :2] @ x, lambda x: [plain_product(m.T[:, :2], x)]),
        "mm": (lambda x: x[0].mm(matrix), lambda x: [plain_product(x, m)]),
        "bmm": (lambda x: torch.bmm(x, matrix[None]), lambda x: [plain_product(x, m)]),
        "addmm": (
            lambda x: torch.addmm(bias, x[0], matrix, alpha=0.7, beta=2),
            lambda x: [beta * b + alpha * np.array(plain_product(x, m))],
        ),
        "baddbmm": (
            lambda x: torch.baddbmm(bias[None], x, matrix[None], alpha=0.7, beta=2),
            lambda x: [beta * b + alpha * np.array(plain_product(x, m))],
        ),
        "einsum": (
            lambda x: torch.einsum("bij,jk->kb", x, matrix),
            lambda x: [[[sum(row)] for row in zip(*plain_product(x, m), strict=True)]],
        ),
        "vector": (lambda x: x @ matrix[:, 0], lambda x: [[r[0] for r in plain_product(x, m)]]),
    }
    inputs = drawn(6, dtype, 3)
    found = real_outputs(Several([(run, (2, 3)) for run, _ in parts.values()]), inputs)
    x = fractions(inputs)[0].reshape(2, 3)
    for real, (_, plain) in zip(found, parts.values(), strict=True):
        agree(real, plain(x))


def whitened(numbers, eps):
    """Return (x − mean)/√(variance + ε) of a list of numbers."""
    numbers = list(numbers)
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / len(numbers)
    root = mpmath.sqrt(big(variance + eps))
    return [big(x - mean) / root for x in numbers]


def big(fraction):
    return mpf(fraction.numerator) / fraction.denominator


@DTYPES
@READINGS
def test_normalizations(dtype, reading):
    torch.manual_seed(0)
    layers = [
        nn.BatchNorm1d(4, eps=0.3), nn.LayerNorm([4, 3], eps=0.3), nn.GroupNorm(2, 4, eps=0.3),
        nn.InstanceNorm1d(4, eps=0.3, affine=True),
        nn.InstanceNorm1d(4, eps=0.3, affine=True, track_running_stats=True),
    ]  # fmt: skip
    for layer in layers:
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    model = Several([(layer, (4, 3)) for layer in layers]).to(dtype).eval()
    inputs = drawn(12, dtype)
    found = real_outputs(model, inputs, reading)
    x = fractions(inputs)[0].reshape(4, 3)
    eps = Fraction(read(0.3, dtype, reading))
    with mpmath.workprec(300):
        flat = whitened(x.ravel(), eps)
        plain = [
            None,
            [flat[3 * c : 3 * c + 3] for c in range(4)],
            [whitened(x[c // 2 * 2 : c // 2 * 2 + 2].ravel(), eps)[c % 2 * 3 :][:3]
             for c in range(4)],
            [whitened(x[c], eps) for c in range(4)],
            None,
        ]  # fmt: skip
        for real, layer, white in zip(found, layers, plain, strict=True):
            w, b = fractions(layer.weight), fractions(layer.bias)
            if white is None:
                mean, variance = fractions(layer.running_mean), fractions(layer.running_var)
                roots = [mpmath.sqrt(big(v + eps)) for v in variance]
                white = [[big(x[c, i] - mean[c]) / roots[c] for i in range(3)] for c in range(4)]
            rows = [
                [
                    white[c][i] * big(w[c] if w.ndim == 1 else w[c, i])
                    + big(b[c] if b.ndim == 1 else b[c, i])
                    for i in range(3)
                ]
                for c in range(4)
            ]
            agree(real, [rows])


def plain_softmax(row):
    powers = [mpmath.exp(big(x)) for x in row]
    return [p / sum(powers) for p in powers]


def test_functions_of_an_axis():
    parts = {
        "mean": (lambda x: x.mean(2), lambda x: [[sum(row) / 5 for row in x]]),
        "mean of all": (lambda x: x.mean(), lambda x: [sum(x.ravel()) / 15]),
        "sum": (lambda x: x.sum((1, 2)), lambda x: [sum(x.ravel())]),
        "amax": (lambda x: x.amax(2, keepdim=True), lambda x: [[[max(row)] for row in x]]),
        "amin": (lambda x: x.amin((1, 2)), lambda x: [min(x.ravel())]),
        "max": (lambda x: x.max(2).values, lambda x: [[max(row) for row in x]]),
        "min": (lambda x: x.min(1, keepdim=True)[0], lambda x: [[list(map(min, *x))]]),
        "max of all": (lambda x: x.max(), lambda x: [max(x.ravel())]),
        "max of two": (lambda x: torch.max(x, -x), lambda x: [abs(x)]),
        "median": (lambda x: x[..., :4].median(2).values,
                   lambda x: [[sorted(row[:4])[1] for row in x]]),
        "median of all": (lambda x: x.median(), lambda x: [sorted(x.ravel())[7]]),
        "kthvalue": (lambda x: x.kthvalue(2, 2).values, lambda x: [[sorted(r)[1] for r in x]]),
        "sort": (lambda x: x.sort(2).values, lambda x: [[sorted(row) for row in x]]),
        "topk": (lambda x: x.topk(2, 2).values, lambda x: [[sorted(r)[:2:-1] for r in x]]),
        "cumsum": (lambda x: x.cumsum(2), lambda x: [[[*itertools.accumulate(r)] for r in x]]),
        "norm": (lambda x: torch.linalg.vector_norm(x, dim=2),
                 lambda x: [[mpmath.sqrt(big(sum(v * v for v in row))) for row in x]]),
        "norm 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=2),
                   lambda x: [[sum(map(abs, row)) for row in x]]),
        "softmax": (lambda x: x.softmax(2), lambda x: [[plain_softmax(row) for row in x]]),
        "log softmax": (lambda x: x.log_softmax(2),
                        lambda x: [[[*map(mpmath.log, plain_softmax(row))] for row in x]]),
        "logsumexp": (lambda x: x.logsumexp(2),
                      lambda x: [[mpmath.log(sum(mpmath.exp(big(v)) for v in r)) for r in x]]),
    }  # fmt: skip
    inputs = 4 * drawn(15, torch.float64)
    found = real_outputs(Several([(run, (3, 5)) for run, _ in parts.values()]), inputs)
    x = fractions(inputs)[0].reshape(3, 5)
    with mpmath.workprec(300):
        for real, (_, plain) in zip(found, parts.values(), strict=True):
            agree(real, plain(x))


def plain_pool(x, layer, dims):
    """Apply the definition to every window of the padded input, entry by entry."""
    mean = "Avg" in type(layer).__name__

    def each(value):
        return (value,) * dims if isinstance(value, int) else tuple(value)

    kernel, stride, padding = map(each, (layer.kernel_size, layer.stride, layer.padding))
    dilation = (1,) * dims if mean else each(layer.dilation)
    sizes = []
    for n, k, s, p, a in zip(x.shape[1:], kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - a * (k - 1) - 1
        count = math.ceil(Fraction(room, s)) + 1 if layer.ceil_mode else room // s + 1
        sizes.append(count - (layer.ceil_mode and (count - 1) * s >= n + p))
    result = np.empty((1, len(x), *sizes), dtype=object)
    for c, *place in np.ndindex(len(x), *sizes):
        inside, padded = [], 0
        for tap in np.ndindex(*kernel):
            at = [stride[d] * place[d] + dilation[d] * tap[d] - padding[d] for d in range(dims)]
            if all(0 <= i < n for i, n in zip(at, x.shape[1:], strict=True)):
                inside.append(x[(c, *at)])
            padded += all(i < n + p for i, n, p in zip(at, x.shape[1:], padding, strict=True))
        count = padded if mean and layer.count_include_pad else len(inside)
        count = getattr(layer, "divisor_override", None) or count
        result[(0, c, *place)] = sum(inside) / count if mean else max(inside)
    return result


def test_pooling():
    layers = [
        (nn.MaxPool1d(3, 2, 1, ceil_mode=True), (2, 6)),
        (nn.MaxPool2d((2, 3), (2, 1), (1, 0), dilation=(2, 1)), (2, 5, 4)),
        (nn.MaxPool3d(2, 1, 1), (1, 2, 3, 2)),
        (nn.AvgPool1d(3, 2, 1), (2, 6)),
        (nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True), (2, 4, 4)),
        (nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True, count_include_pad=False), (2, 4, 4)),
        (nn.AvgPool2d(2, 1, divisor_override=3), (2, 3, 4)),
        (nn.AvgPool3d(2, 1, 1), (1, 2, 3, 2)),
    ]
    adaptive = [
        (nn.AdaptiveAvgPool1d(3), (2, 7)), (nn.AdaptiveAvgPool2d((3, 2)), (1, 5, 4)),
        (nn.AdaptiveMaxPool2d((2, 3)), (1, 5, 4)), (nn.AdaptiveMaxPool1d(4), (2, 3)),
    ]  # fmt: skip
    inputs = drawn(60, torch.float64)
    found = real_outputs(Several([*layers, *adaptive]), inputs)
    for index, (layer, shape) in enumerate([*layers, *adaptive]):
        x = fractions(inputs)[0, : math.prod(shape)].reshape(shape)
        if index < len(layers):
            plain = plain_pool(x, layer, len(shape) - 1)
        else:
            out = np.atleast_1d(layer.output_size)
            plain = np.empty((1, len(x), *out), dtype=object)
            for c, *place in np.ndindex(len(x), *out):
                spans = [
                    range(i * n // int(m), -(-(i + 1) * n // int(m)))
                    for i, n, m in zip(place, shape[1:], out, strict=True)
                ]
                window = [x[(c, *at)] for at in itertools.product(*spans)]
                mean = "Avg" in type(layer).__name__
                plain[(0, c, *place)] = sum(window) / len(window) if mean else max(window)
        agree(found[index], plain)


def cubic(distance):
    """Return Keys' kernel with a = −3/4."""
    a, t = Fraction(-3, 4), abs(distance)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else Fraction(0)


def tent(distance):
    return max(1 - abs(distance), Fraction(0))


def plain_line(line, count, scale, corners, kernel):
    """Interpolate one line, whose ends are repeated."""
    size = len(line)
    result = []
    for row in range(count):
        if corners:
            place = Fraction(row * (size - 1), count - 1)
        else:
            place = (row + Fraction(1, 2)) / scale - Fraction(1, 2)
        if kernel is not cubic and size == count:
            place = Fraction(row)  # PyTorch does not use the scale then
        if kernel is not cubic:
            place = max(place, Fraction(0))
        near = range(math.floor(place) - 2, math.floor(place) + 4)
        result.append(sum(kernel(i - place) * line[min(max(i, 0), size - 1)] for i in near))
    return result


@DTYPES
def test_interpolation(dtype):
    """Exact positions equal the formula; PyTorch's own weights are as close as their precision."""
    third = Fraction(1.3)
    cases = [
        (nn.Upsample(size=7, mode="linear"), 1, [Fraction(7, 4)], False, tent),
        (nn.Upsample(size=3, mode="linear"), 1, [Fraction(3, 4)], False, tent),
        (nn.Upsample(scale_factor=1.3, mode="bilinear"), 2, [third, third], False, tent),
        (nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True), 2, [0, 0], True, tent),
        (nn.Upsample(scale_factor=2.0, mode="trilinear"), 3, [2, 2, 2], False, tent),
        (nn.Upsample(scale_factor=1.3, mode="bicubic"), 2, [third, third], False, cubic),
        (nn.Upsample(size=(3, 6), mode="bicubic", align_corners=True), 2, [0, 0], True, cubic),
    ]
    shapes = {1: (2, 4), 2: (1, 4, 3), 3: (1, 2, 3, 2)}
    inputs = drawn(12, dtype)
    model = Several([(layer, shapes[dims]) for layer, dims, *_ in cases])
    real, stored = (real_outputs(model, inputs, how) for how in ("exact", "rounded"))
    for index, (_, dims, scales, corners, kernel) in enumerate(cases):
        shape = shapes[dims]
        plain = fractions(inputs)[0, : math.prod(shape)].reshape(1, *shape)
        for axis in range(dims):
            count = real[index].shape[2 + axis]
            line = np.apply_along_axis(
                lambda v, n=count, s=scales[axis], c=corners, k=kernel: np.array(
                    plain_line(list(v), n, s, c, k), dtype=object
                ),
                2 + axis,
                plain,
            )
            plain = line
        agree(real[index], plain)
        apart = np.abs(numbers(real[index]) - numbers(stored[index])).max()
        assert 0 <= apart <= 50 * torch.finfo(dtype).eps
    assert dtype == torch.float64 or apart > 0


def test_fold_adds_what_unfold_copies():
    inputs = drawn(54, torch.float64)
    model = Several([(nn.Unfold(2, padding=1), (1, 2, 3)), (nn.Fold((3, 2), 2), (12, 2))])
    unfolded, folded = real_outputs(model, inputs)
    x = fractions(inputs)[0]
    image = np.full((4, 5), Fraction(0), dtype=object)
    image[1:3, 1:4] = x[:6].reshape(2, 3)
    plain = [
        [image[i + a, j + b] for i in range(3) for j in range(4)] for a in (0, 1) for b in (0, 1)
    ]
    agree(unfolded, [plain])
    columns = x[:24].reshape(3, 2, 2, 2)  # channel, tap down, tap right, place
    result = np.full((3, 3, 2), Fraction(0), dtype=object)
    for c, a, b, place in np.ndindex(*columns.shape):
        result[c, place + a, b] += columns[c, a, b, place]
    agree(folded, [result])


def test_moved_entries_are_those_of_pytorch():
    """Nothing is computed, so the results are equal to the last bit; constants are moved too."""
    constant = torch.tensor([0.1, 0.7], dtype=torch.float64)
    runs = [
        lambda x: torch.cat([x.flatten(), constant]), lambda x: F.pad(x, (1, 0, 0, 2), value=0.3),
        lambda x: F.pad(x, (1, 1, 1, 1), "circular"), lambda x: F.pad(x, (1, 1), "reflect"),
        lambda x: F.pad(x, (2, 1), "replicate"), lambda x: x.tril(), lambda x: x.triu(1),
        lambda x: x.masked_fill(torch.tensor([True, False, True]), 0.3),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)), lambda x: x.repeat(1, 2, 1).rot90(),
        lambda x: torch.select_scatter(x, constant[None], 2, 1),
        lambda x: x[..., [0, 2, 2]].flip(1),
        lambda x: torch.stack(x.unbind(2)[::-1]), lambda x: x.roll(1, 2).permute(2, 0, 1),
        lambda x: x.repeat_interleave(2, 1), lambda x: F.interpolate(x, size=7),
        lambda x: x.to(torch.float32).double() * 0 + torch.full_like(x, 0.3),
        lambda x: x * torch.tensor([True, False, True]),
    ]  # fmt: skip
    inputs = drawn(6, torch.float64)
    model = Several([(run, (2, 3)) for run in runs])
    for computed, real in zip(model(inputs), real_outputs(model, inputs), strict=True):
        rows = computed[None] if real.ndim > computed.ndim else computed
        assert errors(rows, real).max() == 0


def test_every_operation_of_the_zoo_agrees_with_pytorch():
    torch.manual_seed(0)
    parts = [(copy.deepcopy(model), shape) for model, shape in ZOO.values()]
    model = Several(parts).double().eval()
    inputs = drawn(max(math.prod(shape) for _, shape in parts), torch.float64)
    with torch.no_grad():
        computed = [t[0] if isinstance(t, tuple) else t for t in model(inputs)]
    for _, real in outputs(model, inputs):
        for name, one, other in zip(ZOO, computed, real, strict=True):
            assert errors(one, other).max() <= 1e-14 * max(1, float(one.abs().max())), name


def test_every_rule_has_an_operation():
    assert set(RULES) - set(OPERATIONS) == NOT_COVERED


@DTYPES
def test_numbers_are_read_as_the_rules_read_them(dtype):
    for value in (0.1, 1e-5, -0.3, 1.0, 2):
        both = {read(value, dtype, reading) for reading in ("rounded", "exact")}
        assert both == set(readings(value, dtype))


def test_a_batch_is_single_inputs():
    mixing = Run(lambda m, x: (x + x.mean(), x.mean()))
    inputs = drawn(6, torch.float64).reshape(2, 3)
    both, mean = real_outputs(mixing, inputs)
    assert both.shape == (2, 3)
    agree(mean, [sum(row) / 3 for row in fractions(inputs)])
    assert errors(torch.cat([mixing(row[None])[0] for row in inputs]), both).max() < 1e-15


def test_what_is_not_known_is_named():
    refused = {
        "aten.glu": Run(lambda m, x: F.glu(x, 1)),
        "int64": Run(lambda m, x: x.long().double()),
        "rounding_mode='floor'": Run(lambda m, x: torch.div(x, 2.0, rounding_mode="floor")),
        "ord=3": Run(lambda m, x: torch.linalg.vector_norm(x, 3, dim=1)),
        "train=True": Run(lambda m, x: F.dropout(x, 0.5, True)),
    }
    for named, model in refused.items():
        with pytest.raises(NoOperation, match=named):
            real_outputs(model, drawn(4, torch.float64))
    with pytest.raises(ValueError, match="reading='other'"):
        real_outputs(nn.Identity(), drawn(4, torch.float64), "other")
    graph = capture(nn.Linear(4, 2), (drawn(4, torch.float32),))
    with pytest.raises(ValueError, match=r"shape \(1, 4\)"):
        real_values(graph, drawn(3, torch.float32))


def test_a_window_in_padding_alone_is_minus_infinity_and_nan_is_refused():
    pool = nn.MaxPool1d(2, 2, padding=1, dilation=3)  # of two entries
    inputs = drawn(2, torch.float64).reshape(1, 1, 2)
    assert real_outputs(pool, inputs)[0].item() == mpfr("-inf")
    agree(real_outputs(nn.Sequential(pool, nn.ReLU()), inputs)[0], [[[0]]])
    with pytest.raises(NoValue, match=r"aten\.sub is not a number"):
        real_outputs(Run(lambda m, x: (m.pool(x) - m.pool(x)).relu(), pool=pool), inputs)


def test_errors_are_rounded_up():
    real = real_outputs(Run(lambda m, x: x / 3), torch.ones(1, 1))[0]
    found = errors(torch.full((1, 1), 1 / 3, dtype=torch.float64), real)[0, 0]
    truth = abs(Fraction(1 / 3) - Fraction(1, 3))
    assert truth <= Fraction(float(found)) <= truth * (1 + Fraction(1, 2**50))
    infinite = np.array([mpfr("-inf"), mpfr("nan"), mpfr(0)], dtype=object)
    apart = errors(torch.tensor([-math.inf, math.nan, math.inf]), infinite)
    assert (apart[0], apart[2]) == (0, math.inf)
    assert math.isnan(apart[1])


def test_random_networks_agree_and_a_wrong_operation_is_found(monkeypatch, tmp_path, capsys):
    words = ["exact", "--count", "4", "--seed", "40000000", "--dtype", "float64"]
    assert main([*words, "--out", str(tmp_path / "record.json")]) == 0
    assert "relative_to_output" in (tmp_path / "record.json").read_text()
    add = OPERATIONS["aten.add"]
    monkeypatch.setitem(OPERATIONS, "aten.add", lambda step: add(step) * (1 + mpfr(1e-9)))
    assert main(words) == 1
    assert "VIOLATION float64, seed" in capsys.readouterr().out


@torch.no_grad()
def test_the_value_lies_within_the_audits_bound_of_another():
    """The oracle's values move no further apart than the audit allows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Softplus(), nn.Flatten(),
                          nn.Linear(12, 2)).eval()  # fmt: skip
    found = audits.audit(model, (2, 4), search=0)
    inputs = drawn(16, torch.float32).reshape(2, 2, 4)
    one, other = (numbers(row) for row in real_outputs(model, inputs)[0])
    far = sum(d * d for d in (fractions(inputs[0]) - fractions(inputs[1])).ravel())
    assert sum(d * d for d in one - other) <= Fraction(found.upper) ** 2 * far


def test_the_hunt_draws_weights_with_all_digits():
    model, inputs = exact.network(40_000_002, torch.float64)
    assert inputs.dtype == torch.float64
    for weight in model.parameters():
        assert weight.dtype == torch.float64
        assert weight.numel() < 2 or not torch.equal(weight, weight.float().double())
