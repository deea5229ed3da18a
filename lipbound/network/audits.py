"""Audit a model: certify an interval for every layer and a bound for the whole network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lipbound.geometry import named, own_forward
from lipbound.modules import check_takes, fingerprint, in_eval
from lipbound.network.capture_check import difference, exceeds
from lipbound.network.composition import TOO_LARGE, compose, log10_bound
from lipbound.network.findings import Audit, LayerReport, joined
from lipbound.network.graph import Graph, NotCaptured, capture
from lipbound.network.jacobian import jacobian_norm
from lipbound.network.layers import layer_reports, product
from lipbound.network.rules import RULES, Options
from lipbound.registry import unknown
from lipbound.results import digits, fixed
from lipbound.runtime import Progress, first_line, silent, time_is_up, within

EFFORTS = ("low", "normal", "high")
ALONE = "layers only: "  # begins the reason if there is no graph to bound
FLAX = re.compile(r"(^|[./])kernel(:0)?$")  # Flax and Keras order the axes (*spatial, in, out)
NO_KERNEL = re.compile(r"(^|[./_])(\w*embed\w*|\w*tokens?|\w*table|exp_avg\w*|momentum_buffer)$")


def audit(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    rtol: float = 1e-3,
    *,
    inputs: Tensor | None = None,
    effort: str = "normal",
    method: str = "spectral",
    search: int = 4,
    seed: int = 0,
    minutes: float | None = None,
    domain: tuple[float, float] | None = None,
    progress: Progress = silent,
) -> Audit:
    """Certify the Lipschitz constant of every layer and of the whole network.

    ``torch.export`` captures the network's graph in eval mode. BatchNorm is folded into the
    convolution before it, and branches that are linear in the same value are added before they
    are bounded. An operation without a global constant makes the bound infinite and is named.

    Args:
        model: The network; its training mode is restored afterwards.
        input_shape: Shape ``(channels, *spatial)`` of one input. Default: bound only the layers.
        rtol: Relative width of the layers' certified intervals.
        inputs: Batch at which to search for large Jacobian norms. Default: random inputs.
        effort: ``'low'`` bounds every operation by itself, so a network without branches gets the
            product of its layers. ``'normal'`` merges linear operations first. ``'high'`` bounds
            chains of linear maps and activations by LipSDP, which takes minutes to hours and can
            gain orders of magnitude.
        method: Name in ``BOUNDS`` of the bound to use for each convolution.
        search: Number of inputs at which to search for the lower bound; 0 for no search.
        seed: Seed of the random inputs.
        minutes: Time limit. Layers that are not finished by then get an upper bound from a cheaper
            method. All returned bounds are still certified.
        domain: Smallest and largest number that an input may contain, for example ``(0, 1)``. It is
            used if the network has no bound for every input, because it multiplies activations.
            The bound then holds for two inputs of this domain, see :attr:`Audit.domain`.
        progress: Shows the progress, see :class:`lipbound.runtime.Progress`.

    Returns:
        The audit; ``upper`` holds for the real-arithmetic network in eval mode, for every input
        unless it has a domain.

    Example:
        >>> found = audit(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), (1, 8, 8))
        >>> found.lower <= found.upper <= found.layers[0].bracket.upper * 1.001
        True
    """
    if effort not in EFFORTS:
        raise unknown("effort", effort, EFFORTS)
    if effort == "high" and method != "spectral":
        raise ValueError(f"effort='high' needs method='spectral'; leave out method={method!r}")
    if input_shape is not None and not (
        isinstance(input_shape, Sequence)
        and not isinstance(input_shape, str)
        and len(input_shape) > 0
        and all(isinstance(n, Integral) and n > 0 for n in input_shape)
    ):
        if isinstance(input_shape, Tensor):
            raise ValueError(
                f"input_shape is a tensor of shape {tuple(input_shape.shape)}; pass the shape of "
                f"one input, for example (3, 8, 8), or a batch as inputs=TENSOR"
            )
        raise ValueError(f"input_shape={input_shape!r} is not a shape; pass for example (3, 8, 8)")
    options = Options(rtol, effort, method)
    domain = _checked(domain)
    with in_eval(model), within(minutes):
        inputs = _inputs(model, input_shape, inputs, max(1, search), seed, domain)
        layers = layer_reports(model, options, progress)
        shape = None if inputs is None else tuple(inputs.shape[1:])
        early = _cut_short(layers, minutes)
        note = joined(early, _left_out(model))
        found = Audit(layers, math.inf, 0.0, "", (), product(layers), shape, note=note)
        if inputs is None:
            reason = "no input shape was given, so only the layers are bounded"
            return replace(found, reason=reason)
        check_takes(model, inputs[:1])  # after the layers, whose errors are clearer
        found = replace(found, weights=fingerprint(model))
        found = _with_upper(model, inputs, options, found, progress, domain)
        if time_is_up() and not early:
            said = "the time limit passed before the audit was complete; without it, bounds may be "
            found = replace(found, note=joined(found.note, f"{said}smaller"))
        if not search or time_is_up() or found.reason.startswith(ALONE):
            return found
        return _with_lower(model, inputs[:search], found)


def _checked(domain: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the domain as two floats.

    Raises:
        ValueError: If it is not a smaller and a larger number.
    """
    if domain is None:
        return None
    try:
        low, high = (math.nan if isinstance(end, str) else float(end) for end in domain)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(
            f"domain={domain!r} is not a smaller and a larger number; pass for example (0, 1)"
        )
    return low, high


def _inputs(
    model: nn.Module,
    shape: Sequence[int] | None,
    given: Tensor | None,
    count: int,
    seed: int,
    domain: tuple[float, float] | None,
) -> Tensor | None:
    """Copy the given inputs, or draw random ones, with the device and type of the weights.

    Raises:
        ValueError: If the given inputs are not in the domain.
    """
    if given is None and shape is None:
        return None
    if given is None:
        draw = torch.Generator().manual_seed(seed)
        given = torch.randn(count, *(shape or ()), generator=draw)
        if domain is not None:
            given = domain[0] + (domain[1] - domain[0]) * torch.rand(given.shape, generator=draw)
    elif domain is not None and not bool(
        ((given.double() >= domain[0]) & (given.double() <= domain[1])).all()
    ):
        raise ValueError(
            f"inputs contain numbers outside domain={domain}, from {float(given.min()):g} to "
            f"{float(given.max()):g}; pass a larger domain"
        )
    stored = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    like = next(stored, given if given.is_floating_point() else torch.zeros(()))
    return given.to(like.device, like.dtype, copy=True)  # the network may write to it


def _with_upper(
    model: nn.Module,
    inputs: Tensor,
    options: Options,
    alone: Audit,
    progress: Progress,
    domain: tuple[float, float] | None,
) -> Audit:
    """Add the bound of the captured graph, if the graph does what the network does.

    The domain is used only if there is no bound for every input.
    """
    try:
        graph = capture(model, (inputs[:1],))
    except NotCaptured as error:
        return replace(alone, reason=f"{ALONE}{error}")
    for report in alone.layers:
        if not isinstance(report.layer, _BatchNorm):
            options.keep(report.layer, report.bracket)
    found = compose(graph, options, progress)
    if found.upper < math.inf:  # of single operations, because sums of layers may exceed 1
        limited = replace(options, effort="low", limit=1.0, notes={})
        found = replace(found, at_one=compose(graph, limited).upper)
    if domain is not None and found.upper < math.inf:
        found = replace(
            found,
            note=joined(found.note, "the domain was not needed: the bound holds for every input"),
        )
    elif domain is not None:
        options = replace(options, domain=domain)
        found = replace(compose(graph, options, progress), domain=domain)
    if found.reason == TOO_LARGE:
        above = log10_bound(graph, options)
        said = f"{TOO_LARGE}: it is 10^{fixed(above, 1, 'up')}" if above < math.inf else TOO_LARGE
        found = replace(found, above=above, reason=said)
    other = unfaithful(graph, model, inputs)
    if other and found.upper < math.inf:
        return replace(alone, reason=f"{ALONE}{other}")
    return replace(
        found,
        layers=alone.layers,
        weights=alone.weights,
        product=alone.product,
        input_shape=alone.input_shape,
        note=joined(found.note, other, alone.note),
    )


def _with_lower(model: nn.Module, inputs: Tensor, found: Audit) -> Audit:
    """Add the largest Jacobian norm found; a norm above the bound invalidates the bound."""
    try:
        lower = jacobian_norm(model, inputs)
    except (NotImplementedError, RuntimeError) as error:
        why = first_line(error)
    else:
        if exceeds(lower, found.upper, inputs.dtype):
            why = (
                f"{ALONE}a Jacobian of norm {digits(lower, 6, 'down')} was found, above the bound "
                f"{digits(found.upper, 6, 'up')} of the captured graph, so the graph or the "
                f"Jacobian is wrong. If the backward is not the derivative of the forward, pass "
                f"search=0"
            )
            return Audit(
                found.layers, math.inf, lower, why, (), found.product, found.input_shape,
                note=found.note,
            )  # fmt: skip
        if math.isfinite(lower):
            return replace(found, lower=lower)
        why = f"its norm is outside the range of {inputs.dtype}"
    said = f"no lower bound: the Jacobian could not be computed ({why})"
    return replace(found, note=joined(found.note, said))


def _left_out(model: nn.Module) -> str:
    """Name the layers with a forward of their own, whose weight need not be their kernel."""
    apart = [name for name, m in model.named_modules() if own_forward(m)]
    said = f"not listed, because they override forward: {', '.join(apart)}"
    return said if apart else ""


@torch.no_grad()
def unfaithful(graph: Graph, model: nn.Module, inputs: Tensor) -> str:
    """Describe how the network differs from its captured graph; empty if it does not."""
    assert graph.captured is not None
    assert graph.analysed is not None
    try:
        said = difference(model, graph.captured, graph.analysed, inputs, RULES.__contains__)
    except Exception as error:
        said = f"the two could not be compared ({first_line(error)})"
    return (
        f"{type(model).__name__} behaves differently when it runs than when torch.export captures "
        f"it: {said}"
        if said
        else ""
    )


@torch.no_grad()
def audit_weights(
    weights: Mapping[str, Tensor],
    rtol: float = 1e-3,
    *,
    method: str = "spectral",
    minutes: float | None = None,
    progress: Progress = silent,
    **geometry: int,
) -> Audit:
    """Audit weights without an architecture: each tensor of three to five axes is a kernel.

    Args:
        weights: Tensors by name.
        rtol: Relative width of the certified intervals.
        method: Name in ``BOUNDS`` of the bound to use for each kernel.
        minutes: Time limit, see :func:`audit`.
        progress: Shows the progress, see :class:`lipbound.runtime.Progress`.
        geometry: ``stride``, ``dilation`` and ``groups`` to assume for all kernels.

    Raises:
        ValueError: If there is no kernel, or if a kernel is not finite; the message names it.
    """
    several = {k: t for k, t in weights.items() if t.is_nested or 3 <= t.ndim <= 5}
    like = {k: t for k, t in several.items() if not FLAX.search(k) and not NO_KERNEL.search(k)}
    numbers = {k: t for k, t in like.items() if t.is_floating_point()}
    kernels = {name: named(name, tensor, **geometry) for name, tensor in numbers.items()}
    left_out = {
        "axes as in Flax and Keras; permute them to (out, in, *spatial), call it weight": [
            k for k in several if FLAX.search(k)
        ],
        "not kernels by their names": [k for k in several if NO_KERNEL.search(k)],
        "not real floating-point numbers": [
            f"{k} ({t.dtype})" for k, t in like.items() if k not in kernels
        ],
        "matrices, which need an architecture": [
            k for k, t in weights.items() if not t.is_nested and t.ndim == 2
        ],
        "more than five axes, which no convolution has": [
            k for k, t in weights.items() if not t.is_nested and t.ndim > 5
        ],
        "BatchNorm layers, which need an architecture": [
            k.removesuffix("running_var").rstrip(".") for k in weights if k.endswith("running_var")
        ],
    }
    note = "; ".join(
        f"{len(names)} left out ({why}): {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for why, names in left_out.items()
        if names
    )
    if not kernels:
        raise ValueError(
            f"none of the {len(weights)} tensors is a kernel, which has three to five axes"
            + (f"; {note}" if note else "")
        )
    with within(minutes):
        layers = layer_reports(kernels, Options(rtol, method=method), progress)
        note = joined(_cut_short(layers, minutes), note)
    used = ", ".join(f"{name} {geometry.get(name, 1)}" for name in ("stride", "dilation", "groups"))
    note = joined(f"assumed for every kernel: {used}", note)
    reason = "the weights come without an architecture, so there is no network to bound"
    return Audit(layers, math.inf, 0.0, reason, (), product(layers), None, note=note)


def _cut_short(layers: Sequence[LayerReport], minutes: float | None) -> str:
    """Say how many layers were not finished, if the time is up."""
    if not time_is_up():
        return ""
    passed = "at the time limit" if minutes is None else f"after {minutes:g} minutes"
    count = sum(r.bracket.lower == 0 < r.bracket.upper for r in layers)
    return (
        f"the search stopped {passed}: {count} of {len(layers)} layers have an "
        f"upper bound from a cheaper method, which is certified too, and no lower bound"
    )
