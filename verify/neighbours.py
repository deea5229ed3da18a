"""Check the rule of every elementwise operation at neighbouring floats.

    python -m verify neighbours --out benchmarks/records/neighbours.json

The check takes floats a and b that are 1 to 2^40 units in the last place apart, around every place
where a formula changes or the slope is largest, and over the whole range of numbers:

    |f(a) − f(b)| ≤ L·|a − b| + error + 2·ulps·(unit in the last place of f)

L and the error are those that ``audit`` uses for the operation. The number of ulps is the sum of
the documented errors of the functions in the formula (SLEEF's exp, expm1, log1p, tanh, erf: 1).
Where a formula subtracts, the unit is that of the number it subtracts from.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipbound import audit

APART = tuple(range(0, 41))
AROUND = 200  # number of floats on either side of a breakpoint


@dataclass(frozen=True)
class Case:
    """An operation, the places where its formula changes or is steepest, and its accuracy.

    Attributes:
        run: The operation.
        breaks: Points around which all neighbouring floats are checked.
        ulps: Documented error of the formula's functions, summed.
        unit: Value whose last place is the unit: the result, or the input if it is subtracted from.
    """

    run: Callable[[Tensor], Tensor]
    breaks: tuple[float, ...]
    ulps: float
    unit: str = "result"


CASES: dict[str, Case] = {
    "relu": Case(F.relu, (0.0,), 0),
    "relu6": Case(F.relu6, (0.0, 6.0), 0),
    "tanh": Case(torch.tanh, (0.0, 0.625, 9.0, 19.0), 1),
    "hardtanh": Case(lambda x: F.hardtanh(x, -0.3, 0.7), (-0.3, 0.7), 0),
    "softsign": Case(F.softsign, (0.0,), 2),
    "log_sigmoid": Case(F.logsigmoid, (0.0,), 3),
    "abs": Case(torch.abs, (0.0,), 0),
    "neg": Case(torch.neg, (0.0,), 0),
    "sin": Case(torch.sin, (0.0, math.pi, 2 * math.pi, 100.0), 3.5),
    "cos": Case(torch.cos, (0.0, math.pi / 2, math.pi, 100.0), 3.5),
    "atan": Case(torch.atan, (0.0, 1.0), 1),
    "asinh": Case(torch.asinh, (0.0, 1.0), 4, "input"),
    "silu": Case(F.silu, (0.0, 2.3993572805154668, -88.0, -709.0), 4),
    "mish": Case(F.mish, (0.0, 1.4906, 20.0, -88.0), 6),
    "hardswish": Case(F.hardswish, (-3.0, 0.0, 3.0), 3),
    "hardsigmoid": Case(F.hardsigmoid, (-3.0, 0.0, 3.0), 3),
    "selu": Case(F.selu, (0.0,), 3),
    "sigmoid": Case(torch.sigmoid, (0.0, 16.0, 88.0), 3),
    "erf": Case(torch.erf, (0.0, 0.5, 1.0, 4.0, 6.0), 1),
    "clamp": Case(lambda x: x.clamp(-0.1, 2.5), (-0.1, 2.5), 0),
    "gelu": Case(F.gelu, (0.0, math.sqrt(2), -math.sqrt(2), -5.0), 6, "input"),
    "gelu tanh": Case(
        lambda x: F.gelu(x, approximate="tanh"), (0.0, 1.4177, -1.4177, -5.0), 8, "input",
    ),
    **{f"leaky_relu {a}": Case(partial(F.leaky_relu, negative_slope=a), (0.0,), 1)
       for a in (0.01, 1.1, -2.5, 0.1)},
    "prelu": Case(lambda x: F.prelu(x, torch.full((1,), -1.7).to(x)), (0.0,), 1),
    "rrelu": Case(lambda x: F.rrelu(x, 0.1, 2.3), (0.0,), 2),
    "dropout": Case(lambda x: F.dropout(x, 0.5, False), (0.0,), 0),
    **{f"elu {a}": Case(partial(F.elu, alpha=a), (0.0,), 3) for a in (0.5, 1.0, 1.1, 3.0)},
    **{f"celu {a}": Case(partial(F.celu, alpha=a), (0.0,), 4) for a in (0.3, 1.0, 2.7)},
    **{f"softplus {b} {t}": Case(partial(F.softplus, beta=b, threshold=t), (0.0, t / b), 3)
       for b, t in ((1.0, 20.0), (1000.0, 7.0), (3.0, 30.0), (-1.0, 20.0), (1.0, 14.0))},
    "softshrink": Case(lambda x: F.softshrink(x, 0.3), (-0.3, 0.3), 1, "input"),
    "threshold": Case(lambda x: F.threshold(x, 0.2, 0.2), (0.2,), 0),
    "times": Case(lambda x: 0.7 * x, (0.0,), 1),
    "divided": Case(lambda x: x / 0.7, (0.0,), 2),
    "shifted": Case(lambda x: torch.add(torch.ones_like(x), x, alpha=0.1), (0.0, -10.0), 2, "both"),
}  # fmt: skip


class Alone(nn.Module):
    """A network of one input that applies the operation."""

    def __init__(self, run: Callable[[Tensor], Tensor], dtype: torch.dtype):
        super().__init__()
        self.run = run
        self.register_buffer("like", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def stepped(points: Tensor, count: Tensor | int) -> Tensor:
    """Return the floats ``count`` places above the given ones."""
    kind = torch.int64 if points.dtype == torch.float64 else torch.int32
    bits = points.contiguous().view(kind).to(torch.int64)
    least = torch.iinfo(kind).min
    ordered = torch.where(bits < 0, least - bits, bits) + count  # as integers, in their order
    back = torch.where(ordered < 0, least - ordered, ordered)
    return back.to(kind).view(points.dtype)


def places(case: Case, dtype: torch.dtype) -> Tensor:
    """Return floats around the breakpoints and over the whole range."""
    nearby = torch.arange(-AROUND, AROUND + 1)
    powers = 2 ** torch.arange(2, 30 if dtype == torch.float32 else 52)
    offsets = torch.cat([nearby, powers, -powers])
    close = [stepped(torch.full((len(offsets),), at, dtype=dtype), offsets) for at in case.breaks]
    draw = torch.Generator().manual_seed(0)
    exponents = torch.rand(2000, generator=draw, dtype=torch.float64) * 60 - 40
    wide = (torch.exp2(exponents) * torch.randn(2000, generator=draw)).to(dtype)
    found = torch.cat([*close, wide, torch.linspace(-12, 12, 4001, dtype=torch.float64).to(dtype)])
    return found[found.isfinite()]


@torch.no_grad()
def check(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Return the number of pairs, violations, and the smallest (allowed − found)/allowed."""
    model = Alone(case.run, dtype).eval()
    found = audit(model, (1,), search=0)
    assert found.upper < math.inf, found.reason
    points = places(case, dtype)
    eps = torch.finfo(dtype).eps
    count, wrong, least, worst = 0, 0, math.inf, []
    furthest = 40 if dtype == torch.float64 else 28
    for power in APART[: furthest + 1]:
        for sign in (1, -1):
            others = stepped(points, sign * 2**power)
            kept = others.isfinite() & ((others > 0) == (points > 0)) | (others.abs() < 1e30)
            one, two = points[kept], others[kept]
            f, g = model(one[:, None])[:, 0].double(), model(two[:, None])[:, 0].double()
            # Differences of close floats are exact in float64; the slack covers other rounding.
            apart = (one.double() - two.double()).abs() * (1 + 1e-15)
            inside = torch.maximum(one.double().abs(), two.double().abs())
            size = torch.maximum(f.abs(), g.abs())
            if case.unit != "result":
                size = torch.maximum(size, inside) + (1.0 if case.unit == "both" else 0.0)
            slack = 2 * case.ulps * eps * size + 2 * torch.finfo(dtype).smallest_normal * eps
            allowed = found.upper * apart + found.error + slack
            margin = (allowed - (f - g).abs()) / allowed
            bad = ~(margin >= 0) & (f.isfinite() & g.isfinite())
            count, wrong = count + len(one), wrong + int(bad.sum())
            least = min(least, float(margin[f.isfinite() & g.isfinite()].min()))
            worst += [[float(a), float(b)] for a, b in zip(one[bad], two[bad], strict=True)][:2]
    return {
        "pairs": count, "violations": wrong, "margin": least, "worst": worst[:3],
        "lipschitz": found.upper, "error": found.error,
    }  # fmt: skip


def everything(names: Sequence[str] = tuple(CASES)) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": check(CASES[name], dtype)
        for name in names
        for dtype in (torch.float32, torch.float64)
    }


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found = everything()
    pairs = sum(one["pairs"] for one in found.values())
    print(f"{len(found)} operations and precisions, {pairs:,} pairs")
    wrong = [f"{name}: {one}" for name, one in found.items() if one["violations"]]
    return {"operations": found}, wrong
