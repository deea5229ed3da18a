"""Table 1: the ratio of each method's value to σ1, on trained kernels and on whole layers.

The paper used kernels with one output channel (1×3×3 and 32×3×3), where LipBound equals sup σ1(F).
We add the layers they come from, with all output channels. ARPACK computes σ1 at 32×32 inputs.
Ratios are for float64 kernels on the CPU; times are for float32 ones, on the GPU if there is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipbound import bound, bracket, estimate, exact
from lipbound.paper.request import Request
from lipbound.paper.source import row, spread, trained_layers
from lipbound.paper.speed import milliseconds, processor
from lipbound.report.markdown import digits, table
from lipbound.runtime import pick_device

SIZE = 32
METHODS: dict[str, tuple[str, Callable[[Tensor, int], float]]] = {
    "sedghi": ("Sedghi et al.", lambda k, n: float(estimate(k, "circulant", input_shape=(n, n)))),
    "singla": ("Singla & Feizi", lambda k, n: float(bound(k, "fantastic_four"))),
    "farnia_10": (
        "Farnia et al., 10 iterations",
        lambda k, n: float(estimate(k, "power_iteration", input_shape=(n, n), iterations=10)),
    ),
    "polygrid": ("LipBound as published", lambda k, n: float(estimate(k, "polygrid"))),
    "lipbound": ("LipBound, certified", lambda k, n: float(bound(k, "lipbound", sides="both"))),
    "bracket": ("ours (bracket), certified", lambda k, n: bracket(k).upper),
    "finite": (
        "ours at this size, certified",
        lambda k, n: bracket(k, input_shape=(n, n)).upper,
    ),
    "exact": ("σ1 itself (`exact`)", lambda k, n: exact(k, (n, n))),
}
PAPER = {
    "1×3×3": {"sedghi": (0.431, 0.042, 1088), "singla": (1.293, 0.126, 1.9),
              "farnia_10": (0.973, 0.006, 4.3), "polygrid": (0.992, 0.012, 0.49)},
    "32×3×3": {"sedghi": (0.666, 0.123, 1729), "singla": (1.441, 0.188, 1.9),
               "farnia_10": (0.972, 0.004, 4.93), "polygrid": (0.984, 0.021, 0.63)},
}  # fmt: skip
"""The paper's ratio, its standard deviation, and its milliseconds on a Tesla V100."""
TIMED = 6  # number of kernels per group that are timed


def compute(request: Request) -> dict[str, Any]:
    size, count = (8, 3) if request.tiny else (SIZE, 24)
    device = pick_device(request.device)
    layers = [(n, k) for n, k in trained_layers(request.weights) if k.shape[2:] == (3, 3)]
    wide = [(n, k) for n, k in layers if k.shape[1] >= (2 if request.tiny else 32)]
    if len(layers) < 2 or len(wide) < 2:
        raise ValueError(
            f"{', '.join(str(path) for path in request.weights)}: {len(layers)} kernels of 3×3, "
            f"{len(wide)} of them with 32 or more input channels; table1 needs at least two"
        )
    groups: dict[str, list[Tensor]] = {
        "1×3×3": [row(k, 1) for _, k in spread(layers, count)],
        "32×3×3": [row(k, 32) for _, k in spread(wide, count)],
        "whole layers": [k for _, k in spread(layers, count)],
    }
    result: dict[str, Any] = {"input_size": size, "timed_on": processor(device), "groups": {}}
    for name, kernels in groups.items():
        some = spread(kernels, 1 if request.tiny else TIMED)
        timed = [k.to(device, torch.float32) for k in some]
        values, times = {}, {}
        for method, (title, measure) in METHODS.items():
            request.say(f"{name}, {len(kernels)} kernels: {title}")
            values[method] = [measure(k, size) for k in kernels]
            times[method] = [
                milliseconds(partial(measure, k, size), device, repeats=3) for k in timed
            ]
        columns = {m: _column(values[m], values["exact"], times[m]) for m in METHODS}
        result["groups"][name] = {"kernels": len(kernels), "methods": columns}
    return result


def _column(values: list[float], truth: list[float], times: list[float]) -> dict[str, float]:
    ratios = [value / sigma for value, sigma in zip(values, truth, strict=True)]
    return {
        "ratio": statistics.mean(ratios),
        "std": statistics.stdev(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "ms": round(statistics.median(times), 4),
    }


def report(record: dict[str, Any]) -> str:
    parts = []
    for name, group in record["groups"].items():
        rows = []
        for method, found in group["methods"].items():
            paper = PAPER.get(name, {}).get(method)
            told = [f"{paper[0]:.3f} ± {paper[1]:.3f}", f"{paper[2]:g}"] if paper else ["", ""]
            ratio = f"{found['ratio']:.4f} ± {found['std']:.4f}"
            spread = f"{found['least']:.4f} to {found['most']:.4f}"
            rows.append([METHODS[method][0], ratio, spread, digits(found["ms"]), *told])
        heads = ["method", "ratio to σ1", "least to most", "ms", "the paper's ratio", "its ms"]
        parts.append(f"**{name}**, {group['kernels']} kernels:\n\n{table(heads, rows)}")
    body = "\n\n".join(parts)
    n = record["input_size"]
    return f"""## Table 1: the methods on trained kernels

Ratios to σ1 at {n}×{n} inputs are means ± standard deviations. Below 1 a method underestimates σ1.
Times are medians for a single float32 kernel on {record["timed_on"]}; the paper used a Tesla V100.
For LipBound and the bracket, most of this time is the launch of short operations. Both are designed
to process all layers of a network together, and Table 4 times LipBound in this way.

{body}

The formula of Sedghi et al. does not give the ratios that the paper reports for it: it is exact for
circular padding, and close to σ1 here. On kernels with one output channel LipBound equals sup σ1(F)
up to its grid. On whole layers it is a sum over the output channels, and the bracket is the only
certified method with ratios near 1.
"""
