"""``audit(model)``: every layer's bracket, and a bound on the whole network over its real graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.blocks import certified, find_chain, optimised
from lipbound.bounds import BOUNDS, Bracket, bound, bracket, brackets
from lipbound.bounds.rounding import norm_above
from lipbound.faithful import difference, exceeds, first_line, outputs
from lipbound.geometry import Convolution, Layer, named, own_forward
from lipbound.graph import Call, Graph, NotCaptured, capture
from lipbound.jacobian import jacobian_norm
from lipbound.modes import in_eval
from lipbound.progress import Progress, silent, time_is_up, within
from lipbound.rules import RULES, Options, Value, follow
from lipbound.rules.values import layer_bracket, up


@dataclass(frozen=True)
class LayerReport:
    """One layer as it stands, alone.

    Attributes:
        name: As in ``model.named_modules()``.
        layer: The module, or the weight tensor where there is no module.
        bracket: Certified interval of its norm, for every input size.
        lipbound: The paper's bound beside it; ``None`` for BatchNorm and Linear.
    """

    name: str
    layer: Any
    bracket: Bracket
    lipbound: float | None


@dataclass(frozen=True)
class StepReport:
    """One operation of the graph: what the bound is after it.

    Attributes:
        name: Of its result.
        op: The operation.
        module: Path of the module it belongs to.
        inputs: Names of what it reads.
        shape: Of its result, without the batch axis.
        lipschitz: Bound on the map from the network's input to its result.
        gain: That over the largest of its inputs'.
        reason: Why it is unbounded.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    lipschitz: float
    gain: float
    reason: str


@dataclass(frozen=True)
class Audit:
    """What is known of a network.

    Attributes:
        layers: Its layers, alone.
        upper: A bound on its L2 Lipschitz constant, proved; ∞ with ``reason`` if there is none.
        lower: The largest Jacobian norm that was found; 0 if none was looked for.
        reason: Why ``upper`` is infinite, or why there is no graph.
        steps: The graph, operation by operation; empty if it could not be captured.
        product: The product of the layers' own bounds, BatchNorm apart, for comparison.
        input_shape: Of one input.
        features: Where the network ends in a Linear layer, the bound up to that layer's input.
        head: That layer's matrix.
        note: How the bound was lowered below what the steps say, what was assumed and left out.
        error: How far the network may be, everywhere, from a function with the constant ``upper``,
            in the L2 norm; 0 unless an operation jumps a little, as torch's softplus does.
        features_error: The same up to the last layer's input.
        head_error: Bounds the norm of what rounding did to ``head``, where it was computed.
    """

    layers: tuple[LayerReport, ...]
    upper: float
    lower: float
    reason: str
    steps: tuple[StepReport, ...]
    product: float
    input_shape: tuple[int, ...] | None
    features: float = math.inf
    head: Tensor | None = None
    note: str = ""
    error: float = 0.0
    features_error: float = 0.0
    head_error: float = 0.0

    @property
    def bounded_part(self) -> StepReport | None:
        """The last operation before the first unbounded one."""
        last = None
        for step in self.steps:
            if step.lipschitz == math.inf:
                break
            last = step
        return last


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
    progress: Progress = silent,
) -> Audit:
    """Certify a network: every layer, and the whole by its graph.

    The graph is what ``torch.export`` captures in eval mode; BatchNorm is folded into the
    convolution before it, branches that are linear in the same value are added before they are
    bounded. Operations without a global constant make the bound infinite, and are named.

    Args:
        model: The network; its mode is restored.
        input_shape: Of one input, ``(channels, *spatial)``. Without it only the layers are read.
        rtol: Relative width of the layers' brackets.
        inputs: A batch at which to look for large Jacobian norms; random ones without it.
        effort: ``'high'`` bounds chains of residual blocks by two weighted norms each
            (:mod:`lipbound.blocks`): minutes, and orders of magnitude.
        method: A name in ``BOUNDS``: what bounds each convolution.
        search: How many inputs to look at for the lower bound; 0 for none.
        seed: Of the random inputs.
        minutes: Time to search the layers for; those that are not done by then keep an upper end
            from a cheaper bound. Everything that is returned is proved all the same.
        progress: Shows how far it is, see :mod:`lipbound.progress`.

    Returns:
        The audit; ``upper`` holds for the real-arithmetic network in eval mode, for every input.

    Example:
        >>> found = audit(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), (1, 8, 8))
        >>> found.lower <= found.upper <= found.layers[0].bracket.upper * 1.001
        True
    """
    if effort not in ("normal", "high"):
        raise ValueError(f"effort={effort!r} is not 'normal' or 'high'")
    if effort == "high" and method != "spectral":
        raise ValueError(f"effort='high' brackets its own factors; leave out method={method!r}")
    if isinstance(input_shape, int | str):
        raise ValueError(f"input_shape={input_shape!r} is no shape; pass (3, 32, 32) say")
    options = Options(rtol, effort, method)
    with in_eval(model), within(minutes):
        if inputs is None and input_shape is not None:
            draw = torch.Generator().manual_seed(seed)
            inputs = torch.randn(max(1, search), *input_shape, generator=draw)
        if inputs is not None:
            stored = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
            like = next(stored, inputs if inputs.is_floating_point() else torch.zeros(()))
            inputs = inputs.to(like.device, like.dtype, copy=True)  # the network may write to it
        layers = layer_reports(model, options, progress)
        product = _product(layers)
        apart = [name for name, m in model.named_modules() if own_forward(m)]
        note = f"not among the layers, for their forward is their own: {', '.join(apart)}"
        note = note if apart else ""
        note = _together(_cut_short(layers, minutes), note)
        if inputs is None:
            reason = "no input shape was given, so only the layers were read"
            return Audit(layers, math.inf, 0.0, reason, (), product, None, note=note)
        shape = tuple(inputs.shape[1:])
        _check_takes(model, inputs[:1])  # after the layers: what is wrong with one is named
        try:
            graph = capture(model, (inputs[:1],))
        except NotCaptured as error:
            why = f"layers only: {error}"
            return Audit(layers, math.inf, 0.0, why, (), product, shape, note=note)
        for report in layers:
            if not isinstance(report.layer, _BatchNorm):
                options.keep(report.layer, report.bracket)
        found = compose(graph, options, progress)
        other = unfaithful(graph, model, inputs)
        if other and found.upper < math.inf:
            why = f"layers only: {other}"
            return Audit(layers, math.inf, 0.0, why, (), product, shape, note=note)
        note = _together(found.note, other, note)
        found = replace(found, layers=layers, product=product, input_shape=shape, note=note)
        if not search or time_is_up():
            return found
        try:
            lower = jacobian_norm(model, inputs[:search])
            if exceeds(lower, found.upper, inputs.dtype):
                why = (
                    f"layers only: a Jacobian of norm {lower:.6g} was found, above the bound "
                    f"{found.upper:.6g} of what was captured, so one of the two is not this "
                    f"network's. If its backward is not that of its forward, pass search=0"
                )
                return Audit(layers, math.inf, lower, why, (), product, shape, note=note)
            if math.isfinite(lower):
                return replace(found, lower=lower)
            why = f"its norm left the range of {inputs.dtype}"
        except (NotImplementedError, RuntimeError) as error:
            why = first_line(error)
        said = f"no lower bound: the Jacobian could not be computed ({why})"
        return replace(found, note=_together(found.note, said))


@torch.no_grad()
def _check_takes(model: nn.Module, inputs: Tensor) -> None:
    """Whether the network takes such inputs.

    Raises:
        ValueError: If it does not.
    """
    try:
        outputs(model, inputs)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        shape = tuple(inputs.shape[1:])
        raise ValueError(f"the model does not take inputs of {shape}: {said}") from error


def unfaithful(graph: Graph, model: nn.Module, inputs: Tensor) -> str:
    """How the network that runs is not what was captured of it; empty if it is."""
    assert graph.captured is not None
    assert graph.analysed is not None
    try:
        said = difference(model, graph.captured, graph.analysed, inputs, RULES.__contains__)
    except Exception as error:
        said = f"the two could not be compared ({first_line(error)})"
    return (
        f"{type(model).__name__} does something else when it runs than when torch.export captures "
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
    """Weights without an architecture: every tensor of three to five axes is read as a kernel.

    Args:
        weights: Tensors by name.
        rtol: Relative width of the brackets.
        method: A name in ``BOUNDS``: what bounds each kernel.
        minutes: Time to search the kernels for, see :func:`audit`.
        progress: Shows how far it is, see :mod:`lipbound.progress`.
        geometry: ``stride``, ``dilation``, ``groups`` of all of them.

    Raises:
        ValueError: If there is no kernel among them, or one is not finite, by name.
    """
    like = {k: t for k, t in weights.items() if t.is_nested or 3 <= t.ndim <= 5}
    numbers = {k: t for k, t in like.items() if t.is_floating_point()}
    kernels = {name: named(name, tensor, **geometry) for name, tensor in numbers.items()}
    left_out = {
        "no real floating-point numbers": [
            f"{k} ({t.dtype})" for k, t in like.items() if k not in kernels
        ],
        "matrices, Linear layers only where an architecture says so": [
            k for k, t in weights.items() if not t.is_nested and t.ndim == 2
        ],
        "BatchNorm, which scales its input": [
            k.removesuffix("running_var").rstrip(".") for k in weights if k.endswith("running_var")
        ],
    }
    note = "; ".join(
        f"{len(names)} left out, {why}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for why, names in left_out.items()
        if names
    )
    if not kernels:
        raise ValueError(
            f"none of the {len(weights)} tensors is a kernel of three to five axes"
            + (f"; {note}" if note else "")
        )
    with within(minutes):
        layers = layer_reports(kernels, Options(rtol, method=method), progress)
        note = _together(_cut_short(layers, minutes), note)
    reason = "weights alone: without the architecture there is no network to bound"
    return Audit(layers, math.inf, 0.0, reason, (), _product(layers), None, note=note)


@torch.no_grad()
def layer_reports(
    source: nn.Module | Mapping[str, Layer], options: Options, progress: Progress = silent
) -> tuple[LayerReport, ...]:
    """Every convolution, Linear and BatchNorm of a model, or every given layer, each alone."""
    if options.method not in BOUNDS:
        raise ValueError(f"unknown bound method {options.method!r}; there are {', '.join(BOUNDS)}")
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


def _cut_short(layers: Sequence[LayerReport], minutes: float | None) -> str:
    """How many layers were not searched to the end, if the time is up."""
    if not time_is_up():
        return ""
    count = sum(r.bracket.lower == 0 < r.bracket.upper for r in layers)
    return (
        f"the search stopped after {minutes:g} minutes: {count} of {len(layers)} layers have an "
        f"upper end from a cheaper bound, which is proved too, and no lower end"
    )


def _together(*notes: str) -> str:
    """Notes as one, without the empty ones."""
    return "; ".join(filter(None, notes))


def _norm_bracket(layer: _BatchNorm) -> Bracket:
    """max|γ|/√(var + ε), four roundings on either side; ∞ where it is no number."""
    assert layer.running_var is not None
    scale = 1.0 if layer.weight is None else layer.weight.double().abs()
    value = float((scale / (layer.running_var.double() + layer.eps).sqrt()).amax())
    if not math.isfinite(value):
        return Bracket(0.0, math.inf, (), 0)
    return Bracket(value * (1 - 2.0**-50), value * (1 + 2.0**-50), (), 0)


def compose(graph: Graph, options: Options, progress: Progress = silent) -> Audit:
    """The network's bound, why it is infinite if it is, and every operation's; no layers alone.

    Several inputs or outputs count as one vector.
    """
    values: dict[str, Any] = {
        name: Value(shape, constant=1.0) for name, shape in graph.inputs.items()
    }
    for call in progress(graph.calls, "graph"):
        values[call.name] = follow(call, values, options)
    steps = _kept(graph, values)
    ops = {call.name: call.op for call in graph.calls}
    reports = []
    for call in steps:
        value = values[call.name]
        inputs = [_largest(values[name]) for name in call.references() if name in values]
        base = max(inputs) if value.linear is None else value.linear.anchor.lipschitz
        reports.append(
            StepReport(
                call.name, _shown(call, ops), call.module, tuple(call.references()),
                value.shape[1:], value.lipschitz,
                value.lipschitz / base if 0 < base < math.inf else math.nan,
                value.why if value.lipschitz == math.inf else "",
            )
        )  # fmt: skip
    outputs = [values[name] for name in graph.outputs]
    total = up(math.hypot(*[v.lipschitz for v in outputs]))
    error = math.hypot(*[v.error for v in outputs])
    reason = next((v.why for v in outputs if v.lipschitz == math.inf), "")
    if total == math.inf and not reason:
        reason = "the bound is above 1.8e308, the largest float64"
    notes = [*options.notes]
    if graph.left_out:
        notes.append(f"{len(graph.left_out)} result(s) of whole numbers are no part of the bound")
    audit = Audit(
        (), total, 0.0, reason, tuple(reports), math.inf, None, note="; ".join(notes),
        error=up(error) if error else 0.0,
    )  # fmt: skip
    last = outputs[0].linear
    rows = len(outputs) == 1 and len(outputs[0].shape) == 2 and outputs[0].shape[0] == 1
    if rows and last is not None and last.conv.dims == 0:
        audit = replace(
            audit, features=last.anchor.lipschitz, head=last.conv.kernel,
            features_error=last.anchor.error, head_error=last.error,
        )  # fmt: skip
    return audit if options.effort == "normal" else _weighted(audit, outputs, options, progress)


def _weighted(
    audit: Audit, outputs: Sequence[Value], options: Options, progress: Progress
) -> Audit:
    """The bound by weighted blocks, where the network is a chain of them and it is smaller."""
    exact = len(outputs) == 1 and not audit.error
    chain = find_chain(outputs[0]) if exact else None
    if chain is None:
        note = "effort high: the network is no chain of residual blocks, so nothing was gained"
        return replace(audit, note=_together(audit.note, note))
    features, head = certified(chain, optimised(chain, progress=progress), options.rtol, progress)
    matrix = bracket(head, options.rtol)
    upper = up(features * up(matrix.upper * (1 + 2.0**-40)))
    note = f"effort high: two weighted norms for each of {len(chain.blocks)} residual blocks"
    note = note if upper < audit.upper else f"{note}, which did not lower the bound"
    note = _together(audit.note, note)
    if upper >= audit.upper:
        return replace(audit, note=note)
    lost = up(2.0**-48 * norm_above(head) + head.numel() * 2.0**-1074)
    return replace(audit, upper=upper, features=features, head=head, note=note, head_error=lost)


def _shown(call: Call, ops: dict[str, str]) -> str:
    """The operation's name; of one of several results, the operation they come from."""
    op = ops.get(call.references()[0], call.op) if call.op == "getitem" else call.op
    return "aten.batch_norm" if "batch_norm" in op else op


def _kept(graph: Graph, values: dict[str, Any]) -> list[Call]:
    """Calls with one result that an output depends on, without those taken into a later one.

    A convolution before a BatchNorm is not bounded by itself: its readers are convolutions of
    the same value.
    """
    needed = set(graph.outputs)
    readers: dict[str, list[Any]] = {}
    for call in reversed(graph.calls):
        if call.name not in needed:
            continue
        for name in call.references():
            needed.add(name)
            readers.setdefault(name, []).append(values[call.name])

    def taken(name: str) -> bool:
        value = values[name]
        if value.linear is None or name in graph.outputs:
            return False
        later = [v[0] if isinstance(v, list) else v for v in readers.get(name, [])]
        return bool(later) and all(
            v.linear is not None and v.linear.anchor is value.linear.anchor for v in later
        )

    single = [c for c in graph.calls if c.name in needed and isinstance(values[c.name], Value)]
    return [call for call in single if not taken(call.name)]


def _largest(value: Any) -> float:
    return max(v.lipschitz for v in value) if isinstance(value, list) else value.lipschitz


def _product(layers: Sequence[LayerReport]) -> float:
    product = 1.0
    for report in layers:
        product = up(product * report.bracket.upper)
    return product
