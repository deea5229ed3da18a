"""Bound the distance between what a network computes and its exact value, near given inputs."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.bounds.rounding import norms_above
from lipbound.modules import in_eval
from lipbound.network.findings import LayerReport
from lipbound.network.graph import Call, Graph, Reference, capture
from lipbound.network.rules import Options, Value, follow
from lipbound.network.rules.rounding import FORMATS, LINEAR, Near, NotProved, rounded
from lipbound.runtime import first_line

Array = NDArray[np.float64]
ROOM = 1 + 2.0**-20  # for the rounding of the measured norms, which are of at most 2^32 entries
USUAL = 1e-140, 1e140  # norms between these neither lost squares nor overflowed
STEPS = 4  # power iterations for the norm of a matrix of absolute values


@dataclass(frozen=True)
class Measured:
    """Sizes of a network's values at some inputs, and its logits there.

    Attributes:
        norms: Input or call → L2 norm of its result, for each input.
        absolute: Linear call → L2 norm of its result with all numbers replaced by their sizes, or
            a bound on it.
        logits: The graph's first output.
    """

    norms: dict[str, Array]
    absolute: dict[str, Array]
    logits: Tensor

    @staticmethod
    def joined(parts: Iterable[Measured]) -> Measured:
        """Join the sizes at several batches of inputs."""
        found = list(parts)
        norms = {k: np.concatenate([p.norms[k] for p in found]) for k in found[0].norms}
        sizes = {k: np.concatenate([p.absolute[k] for p in found]) for k in found[0].absolute}
        return Measured(norms, sizes, torch.cat([p.logits for p in found]))


@dataclass(frozen=True)
class Errors:
    """Bounds on the rounding of the logits in the ball around each input.

    Attributes:
        logits: L2 error of the vector of all logits.
        features: L2 error of the input of the last Linear layer.
        since: L2 error that the last layer adds.
        head: Matrix of the last Linear layer, ``None`` if there is none.
        why: Why there is no bound at any input; empty if there is one.
    """

    logits: Array
    features: Array
    since: Array
    head: Tensor | None
    why: str = ""

    def pairs(self, best: Tensor) -> Tensor:
        """Bound the error of f_i − f_j for the given class i of each input and every class j.

        The difference of two entries is √2-Lipschitz. The error of the features reaches it
        through the difference of two rows.
        """
        device = best.device
        whole = torch.from_numpy(self.logits).to(device)[:, None] * (math.sqrt(2) * (1 + 1e-12))
        if self.head is None:
            return whole
        rows = self.head.double().cpu()
        apart = torch.stack([norms_above(row - rows) for row in rows]).to(device)[best]
        features, since = (torch.from_numpy(e).to(device) for e in (self.features, self.since))
        split = features[:, None] * apart + math.sqrt(2) * since[:, None]
        split = torch.where(features[:, None] < math.inf, split * (1 + 1e-12), math.inf)
        return torch.minimum(whole.expand_as(split), split)


@dataclass
class Executed:
    """A network as it runs in a floating-point format, ready to bound its rounding.

    Its exact value is that of the captured operations in real arithmetic. Constants that it
    computes from its weights in every run count as stored.

    Args:
        model: The network, in the format in which it runs.
        layers: Audited layers of the network, whose norms are used again.
        example: One input with its batch axis, in that format.
    """

    model: nn.Module
    layers: Sequence[LayerReport]
    example: Tensor
    graph: Graph = field(init=False)
    wide: tuple[Call, ...] = field(init=False)
    gains: dict[str, float] = field(init=False)
    biases: dict[str, float] = field(init=False)
    options: Options = field(init=False)

    def __post_init__(self) -> None:
        with in_eval(self.model):
            self.graph = capture(self.model, [self.example])
        self.wide = tuple(call.in_float64() for call in self.graph.calls)
        self.options = Options()
        for report in self.layers:
            if isinstance(report.layer, nn.modules.batchnorm._BatchNorm):
                continue
            module = isinstance(report.layer, nn.Module)  # its weight may change when it is read
            with in_eval(report.layer) if module else nullcontext():
                self.options.keep(report.layer, report.bracket)
        shapes: dict[str, Any] = {**self.graph.inputs, **{c.name: c.shape for c in self.wide}}
        place = self.example.device
        linear = {c.name: (c, shapes[c.references()[0]]) for c in self.wide if _linear(c)}
        self.gains = {name: absolute_gain(*some, place) for name, some in linear.items()}
        self.biases = {name: _bias(*some, place) for name, some in linear.items()}

    @torch.no_grad()
    def measure(self, inputs: Tensor, sums: bool = True) -> Measured:
        """Run the network in float64 and measure the sizes of all its values.

        Args:
            inputs: The inputs.
            sums: Whether to compute |W||x| + |b| for every linear call. Otherwise its norm is
                bounded by ‖|W|‖‖x‖ + ‖b‖, which takes less time.
        """
        one = inputs.double()[:, None]
        exact = {name for name, gain in self.gains.items() if sums or not gain < math.inf}
        measured = self._measured(one, _sizes(self.graph, self.wide, exact, vector_norm))
        every = [*measured.norms.values(), *measured.absolute.values()]
        if not all(((norms > USUAL[0]) & (norms < USUAL[1])).all() for norms in every):
            measured = self._measured(one, _sizes(self.graph, self.wide, exact, _norm))
        for call in self.wide:
            if call.name in self.gains.keys() - exact:
                before = measured.norms[call.references()[0]]
                bound = (self.gains[call.name] * before + self.biases[call.name]) * ROOM
                measured.absolute[call.name] = bound
        return measured

    def _measured(self, one: Tensor, run: Callable[[Tensor], Any]) -> Measured:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
        last = one.contiguous(memory_format=torch.channels_last_3d) if one.ndim == 5 else one
        try:  # convolutions on a processor are up to three times faster with the channels last
            found = torch.func.vmap(run)(last)
        except (RuntimeError, ValueError) as error:  # an operation without a rule for batches
            if len(one) > 1:
                warnings.warn(f"the inputs run one by one: {first_line(error)}", stacklevel=7)
            each = [run(x) for x in one]
            found = tree_map(lambda *parts: torch.stack(parts), *each)
        norms, absolute, logits = found
        return Measured(_up(norms), _up(absolute), logits[:, 0])

    def values(self, measured: Measured, radius: Array) -> dict[str, Any]:
        """Return every value with its error for all inputs in a ball around each measured input.

        Raises:
            NotProved: If an operation has no bound on its rounding.
        """
        arithmetic = FORMATS[str(self.example.dtype).removeprefix("torch.")]
        near = Near(arithmetic, radius, measured.norms, measured.absolute, self.gains)
        values: dict[str, Any] = {}
        for name, shape in self.graph.inputs.items():
            values[name] = Value(shape, constant=1.0)
            near.names[id(values[name])] = name
        for call in self.graph.calls:
            found = follow(call, values, self.options, lambda step, v: rounded(step, near, v))
            values[call.name] = found
            if isinstance(found, Value):
                near.names.setdefault(id(found), call.name)
        return values

    def errors(self, measured: Measured, radius: Array) -> Errors:
        """Bound the rounding of the logits for all inputs in a ball around each measured input.

        Raises:
            NotProved: If an operation has no bound on its rounding.
        """
        last = self.values(measured, radius)[self.graph.outputs[0]]
        nowhere = np.full(radius.shape, math.inf)
        if not last.lipschitz < math.inf:
            return Errors(nowhere, nowhere, nowhere, None, last.why)
        whole = np.broadcast_to(last.error, radius.shape).astype(np.float64)
        if last.linear is None or last.linear.conv.dims or len(last.shape) != 2:
            return Errors(whole, nowhere, nowhere, None)
        features, since = (
            np.broadcast_to(error, radius.shape).astype(np.float64)
            for error in (last.linear.anchor.error, last.apart)
        )
        matrix = last.linear.conv.kernel if not last.linear.error else None
        return Errors(whole, features, since, matrix)


def absolute_gain(call: Call, shape: tuple[int, ...], device: torch.device) -> float:
    """Bound the norm of the matrix |W| of a linear call by the theorem of Collatz and Wielandt.

    For a matrix A ≥ 0 and a vector v > 0, ‖A‖² ≤ max (AᵀAv)ᵢ/vᵢ. Sums of numbers ≥ 0 have a small
    relative error, whatever their order. A column of zeros has 0/0, which counts as 0.
    """

    def run(x: Tensor) -> Tensor:
        return _absolute(call, {call.references()[0]: x}, bias=False)

    vector = torch.ones(shape, dtype=torch.float64, device=device)
    best = math.inf
    for _ in range(STEPS):
        pulled: Any = torch.func.vjp(run, vector)
        level = pulled[0].max().clamp_min(1e-300)  # so that nothing is squared
        (image,) = pulled[1](pulled[0] / level)
        quotient = torch.where(image > 0, image / vector, 0.0).max()
        best = min(best, math.sqrt(float(quotient)) * math.sqrt(float(level)))
        vector = image / image.max().clamp_min(1e-300)
        vector = torch.where(image > 0, vector.clamp_min(1e-10), 1.0)
    return best * ROOM + 1e-300 if math.isfinite(best) else math.inf


def _bias(call: Call, shape: tuple[int, ...], device: torch.device) -> float:
    """Bound the norm of what a linear call adds."""
    nothing = torch.zeros(shape, dtype=torch.float64, device=device)
    norm = float(_norm(_absolute(call, {call.references()[0]: nothing})))
    return norm * ROOM + 1e-300 if math.isfinite(norm) else math.inf


def _linear(call: Call) -> bool:
    name = call.op.removeprefix("aten.")
    return name in LINEAR and call.floating and len(call.references()) == 1


def _absolute(call: Call, values: dict[str, Any], bias: bool = True) -> Tensor:
    """Run a linear call with the sizes of all numbers; without its bias if asked for."""
    given = call.arguments()
    for name, value in given.items():
        if isinstance(value, int | float) and name in ("alpha", "beta", "divisor_override"):
            given[name] = abs(value)
        elif name == "bias" or (name == "self" and call.op in ("aten.addmm", "aten.baddbmm")):
            given[name] = value.abs() if isinstance(value, Tensor) and bias else None
            if given[name] is None and name == "self":
                given[name] = torch.zeros((), dtype=torch.float64, device=value.device)
        else:
            given[name] = tree_map(lambda leaf: _size(leaf, values), value)
    return call.run(given)


def _size(leaf: Any, values: dict[str, Any]) -> Any:
    found = values[leaf.name] if isinstance(leaf, Reference) else leaf
    return found.abs() if isinstance(found, Tensor) and found.is_floating_point() else found


def _batch_norm(given: dict[str, Any]) -> Tensor:
    """Run a BatchNorm with running statistics by elementary operations."""
    value, eps = given["input"], given["eps"]
    mean, variance, weight, bias = (
        None if given[name] is None else given[name].reshape(-1, *[1] * (value.ndim - 2))
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    scale = (variance + eps).rsqrt() if weight is None else weight / (variance + eps).sqrt()
    return torch.addcmul((0.0 if bias is None else bias) - mean * scale, value, scale)


def _sizes(
    graph: Graph, calls: Sequence[Call], exact: Collection[str], size: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Any]:
    """Return a function that runs calls on one input and returns the sizes of all values.

    Args:
        graph: The network.
        calls: Its calls in float64.
        exact: Names of the linear calls that also run with the sizes of all numbers.
        size: Computes a norm.
    """
    last = {name: call.name for call in calls for name in call.references()}

    def run(x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        (first,) = graph.inputs
        values: dict[str, Any] = {first: x}
        norms, absolute = {first: size(x)}, {}
        for call in calls:
            if call.op == "aten._native_batch_norm_legit_no_training":  # unknown to vmap
                values[call.name] = [_batch_norm(call.given(values))]
            elif (call.op, call.overload) == ("aten.view", "default"):  # in any order of storage
                given = call.given(values)
                values[call.name] = given["self"].reshape(given["size"])
            else:
                values[call.name] = call.run(call.given(values))
            if call.name in exact:
                absolute[call.name] = size(_absolute(call, values))
            result = tree_leaves(values[call.name])[0]
            if isinstance(result, Tensor) and result.is_floating_point():
                norms[call.name] = size(result)
            for name in call.references():
                if last[name] == call.name and name not in graph.outputs:
                    values.pop(name, None)
        return norms, absolute, values[graph.outputs[0]]

    return run


def _norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm, or more if its squares would underflow or overflow."""
    norm = torch.linalg.vector_norm(tensor)
    if not tensor.numel():
        return norm
    usual = (norm > USUAL[0]) & (norm < USUAL[1])
    return torch.where(usual, norm, tensor.abs().amax() * math.sqrt(tensor.numel()))


def _up(sizes: dict[str, Tensor]) -> dict[str, Array]:
    """Return norms as arrays, enlarged by more than their rounding; NaN becomes ∞."""
    return {
        name: np.nan_to_num(t.double().cpu().numpy() * ROOM + 1e-300, nan=math.inf, posinf=math.inf)
        for name, t in sizes.items()
    }


def check_same_factors(model: nn.Module, wide: Graph, example: Tensor) -> None:
    """Check that a network has the same factors in float64, so that its bound holds there too.

    Constants that are only added, such as biases, may differ by their rounding.

    Raises:
        NotProved: If a factor differs or the operations do.
    """
    with in_eval(model):
        one, other = capture(model, [example]).calls, wide.calls
    places = [{call.name: place for place, call in enumerate(calls)} for calls in (one, other)]
    if [call.op for call in one] != [call.op for call in other]:
        raise NotProved("the network runs other operations in float64; audit model.double()")
    for mine, theirs in zip(one, other, strict=True):
        sources = [
            [place.get(name) for name in call.references()]
            for call, place in zip((mine, theirs), places, strict=True)
        ]
        if sources[0] != sources[1]:
            raise NotProved(
                f"{mine.op} in {mine.module or 'the network'} reads other values in float64; audit "
                f"model.double() and certify that"
            )
        if not all(map(_equal, _factors(mine), _factors(theirs))):
            raise NotProved(
                f"{mine.op} in {mine.module or 'the network'} computes a factor from its weights, "
                f"which is rounded differently in float64; audit model.double() and certify that"
            )


def check_recomputed(model: nn.Module, wide: nn.Module) -> None:
    """Check that ``model.double()`` has the weights of the copy that is certified.

    Raises:
        NotProved: If a parametrization computes other weights in float64.
    """
    again = dict(copy.deepcopy(model).eval().double().named_modules())
    for name, module in wide.named_modules():
        for own, tensor in module.named_parameters(recurse=False):
            if not torch.equal(getattr(again[name], own), tensor):
                path = f"{name}.{own}" if name else own
                raise NotProved(
                    f"{path} is computed by a parametrization, which gives other numbers in "
                    f"model.double(); make it a plain weight (lipbound.unconstrain or "
                    f"torch.nn.utils.parametrize.remove_parametrizations), then audit again"
                )


def _factors(call: Call) -> list[Any]:
    added = {"bias", "running_mean"}
    if call.op in ("aten.addmm", "aten.baddbmm"):
        added.add("self")
    if call.op in ("aten.add", "aten.sub", "aten.rsub"):
        added |= {"self", "other"}
    given = {name: value for name, value in call.arguments().items() if name not in added}
    return tree_leaves(given)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.double() == other.double()).all())
    return isinstance(one, torch.dtype) or bool(one == other)
