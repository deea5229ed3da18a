"""Bound every single layer of a network: its certified interval, and LipBound to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.bounds import BOUNDS, Bracket, bound, brackets
from lipbound.geometry import Convolution, Layer, own_forward
from lipbound.modules import batch_norm_gains
from lipbound.network.findings import LayerReport
from lipbound.network.rules import Options
from lipbound.network.rules.values import layer_bracket, up
from lipbound.registry import unknown
from lipbound.runtime import Progress, silent, time_is_up


@torch.no_grad()
def layer_reports(
    source: nn.Module | Mapping[str, Layer], options: Options, progress: Progress = silent
) -> tuple[LayerReport, ...]:
    """Bound each convolution, Linear and BatchNorm layer of a model, or each given layer."""
    if options.method not in BOUNDS:
        raise unknown("method", options.method, BOUNDS)
    named = dict(source.named_modules() if isinstance(source, nn.Module) else source)
    linear = {
        name: layer
        for name, layer in named.items()
        if isinstance(layer, _ConvNd | nn.Linear | Convolution) and not own_forward(layer)
    }
    if options.method == "spectral":
        found = brackets(linear, options.rtol, progress=progress)
    else:
        items = progress(list(linear.items()), "layers")
        found = {name: layer_bracket(layer, options) for name, layer in items}
    reports = []
    for name, layer in progress(list(named.items()), "LipBound"):
        if own_forward(layer):
            continue
        if isinstance(layer, _BatchNorm) and layer.running_var is not None:
            reports.append(LayerReport(name, layer, _norm_bracket(layer), None))
        elif name in found:
            compared = not isinstance(layer, nn.Linear) and not time_is_up()
            paper = float(bound(layer, "lipbound")) if compared else None
            reports.append(LayerReport(name, layer, found[name], paper))
    return tuple(reports)


def _norm_bracket(layer: _BatchNorm) -> Bracket:
    """Return max|γ|/√(var + ε) with four roundings on either side; up to ∞ if it is NaN."""
    assert layer.running_var is not None
    gains = batch_norm_gains(layer.running_var, layer.weight, layer.eps)
    value = float(gains.abs().amax())
    if not math.isfinite(value):
        return Bracket(0.0, math.inf, (), 0)
    return Bracket(value * (1 - 2.0**-50), value * (1 + 2.0**-50), (), 0)


def product(layers: Sequence[LayerReport]) -> float:
    """Return the product of the layers' upper bounds, rounded up."""
    total = 1.0
    for report in layers:
        total = up(total * report.bracket.upper)
    return total
