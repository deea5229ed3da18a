"""Compare PyTorch's values of random networks with their values in real arithmetic.

    python -m verify exact --count 300 --seed 40000000 --dtype float64

The oracle runs the graph that the audit bounds in arithmetic of 256 bits, on the stored weights. A
float network differs from it by its own rounding errors only, so a difference of more than
``LIMITS`` times the largest value of the network is a fault of the oracle or of the graph. Networks
of larger seeds have more kinds of parts, see ``verify.random_networks``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gmpy2
import numpy as np
import torch
from gmpy2 import mpfr
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.modules import in_eval
from lipbound.network.graph import Call, Graph, NotCaptured, Reference, capture
from verify.random_networks import random_network
from verify.random_parts import Sly
from verify.real_operations import (
    OPERATIONS,
    PRECISION,
    READINGS,
    Array,
    NoOperation,
    Step,
    real_array,
)

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-12}
WORST = 5  # number of seeds to print


class NoValue(ArithmeticError):
    """The network has no real value at this input: an operation gives NaN, such as ∞ − ∞."""


def real_values(graph: Graph, inputs: Tensor, reading: str = "rounded") -> dict[str, Any]:
    """Return every value of a captured network in real arithmetic.

    Weights and buffers have their stored values, and what the network computes from them alone has
    the value that the capture computed. Rounding to 256 bits remains, which is about 1e-77 of the
    values that are added.

    Args:
        graph: The captured network.
        inputs: float32 or float64 input of the shape that was captured.
        reading: ``'rounded'`` if a number in the program (a slope, an ε, a factor) has the value in
            the network's precision, which PyTorch's kernels use; ``'exact'`` for its own value.
            The rules of the audit hold for both. In a float64 network they differ in the weights
            of interpolation only: those that PyTorch computes, or those of real positions.

    Returns:
        Name → array of ``mpfr``, of booleans or of integers; a list of them for several results.

    Raises:
        NoOperation: If the oracle does not know an operation; the message names it.
        NoValue: If an operation gives NaN. A pooling window in padding alone is −∞, and ∞ − ∞ may
            follow.
    """
    if reading not in READINGS:
        raise ValueError(f"reading={reading!r} is not one of {', '.join(READINGS)}")
    (name,) = graph.inputs
    if inputs.dtype not in LIMITS or tuple(inputs.shape) != graph.inputs[name]:
        raise ValueError(
            f"the input must be float32 or float64 of shape {graph.inputs[name]}, "
            f"got {inputs.dtype} of shape {tuple(inputs.shape)}"
        )
    with gmpy2.context(precision=PRECISION), np.errstate(invalid="ignore"):
        values: dict[str, Any] = {name: real_array(inputs)}
        types = {name: inputs.dtype}
        for call in graph.calls:
            values[call.name] = _value(call, values, types, reading)
    return values


def _value(call: Call, values: dict[str, Any], types: dict[str, torch.dtype], reading: str) -> Any:
    """Return the result of a call, and note the precision in which the network computes it."""

    def known(argument: Any) -> Any:
        return values[argument.name] if isinstance(argument, Reference) else argument

    # A comparison has booleans as its result, and happens in the precision of its arguments.
    types[call.name] = call.dtype if call.floating and call.dtype else types[call.references()[0]]
    args, kwargs = tree_map(known, (call.args, call.kwargs))
    if call.op == "getitem":
        return args[0][args[1]]
    if call.op == "aten._assert_tensor_metadata":
        return None  # it precedes a cast and has no result
    if call.op not in OPERATIONS:
        raise NoOperation(f"the oracle has no operation {call.op} ({call.module or call.source})")
    step = Step(replace(call, args=args, kwargs=kwargs), types[call.name], reading)
    if step.dtype not in LIMITS:
        raise step.unknown(f"the type {step.dtype}")
    result = OPERATIONS[call.op](step)
    if call.shape is not None and result.shape != call.shape:
        raise AssertionError(f"{call.op} has shape {call.shape}, but here {result.shape}")
    if call.shape is not None and not call.floating and result.dtype == object:
        raise step.unknown(f"a result of type {call.dtype}")
    reals = [v for v in tree_leaves(result) if isinstance(v, np.ndarray) and v.dtype == object]
    if any(gmpy2.is_nan(entry) for array in reals for entry in array.flat):
        raise NoValue(f"{call.op} is not a number ({call.module or call.source})")
    return result


def real_outputs(model: nn.Module, inputs: Tensor, reading: str = "rounded") -> list[Array]:
    """Return the outputs of a network in real arithmetic, as arrays of ``mpfr``.

    The audit captures a network for one input, and so does this function: every input of the batch
    is alone in its own batch, also in a network that mixes the inputs of a batch. The other
    arguments are those of :func:`real_values`.

    Args:
        model: The network, which runs in eval mode.
        inputs: One or more inputs, ``(batch, ...)``.
        reading: How to read numbers in the program.

    Returns:
        One array for each output that is not of integers, with the batch as its first axis.
    """
    with in_eval(model):
        graph = capture(model, (inputs[:1],))
    found = [real_values(graph, inputs[i : i + 1], reading) for i in range(len(inputs))]
    return [_joined([values[name] for values in found]) for name in graph.outputs]


def _joined(rows: Sequence[Array]) -> Array:
    """Join the results of single inputs along the batch axis, or along a new one."""
    batched = rows[0].ndim and rows[0].shape[0] == 1
    return np.concatenate(rows) if batched else np.stack(rows)


def errors(computed: Tensor, real: Array) -> NDArray[np.float64]:
    """Return |computed − real| entry by entry, rounded up; 0 for equal infinities, NaN for NaN."""
    if tuple(computed.shape) != real.shape:
        raise ValueError(f"the shapes {tuple(computed.shape)} and {real.shape} differ")

    def apart(one: mpfr, other: mpfr) -> float:
        size = abs(one - other) if one != other else 0.0
        return math.nextafter(float(size), math.inf) if size else 0.0

    with gmpy2.context(precision=PRECISION), np.errstate(invalid="ignore"):
        found = np.frompyfunc(apart, 2, 1)(real_array(computed), real)
    return np.asarray(found, dtype=np.float64)


def scale(values: dict[str, Any]) -> float:
    """Return the largest finite absolute value of a network."""
    arrays = [v for v in tree_leaves(values) if isinstance(v, np.ndarray) and v.dtype == object]
    found = (abs(entry) for array in arrays for entry in array.flat if gmpy2.is_finite(entry))
    return float(max(found, default=mpfr(0)))


def network(seed: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Draw a network of this precision and an input.

    Its weights and buffers get random last digits, because a weight that was drawn with fewer would
    make many products exact.
    """
    model, shape = random_network(seed)
    draw = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=draw, dtype=torch.float64)
                tensor.copy_(tensor.double() * (1 + noise / 256))
    size = (0.1, 1.0, 10.0)[seed // 2 % 3]
    return model, (size * torch.randn(1, *shape, generator=draw, dtype=torch.float64)).to(dtype)


@torch.no_grad()
def compare(seed: int, dtype: torch.dtype, reading: str) -> dict[str, Any]:
    """Compare one network with the oracle.

    Returns:
        The outcome, the seconds of capture and oracle, and where both have values, the largest
        difference relative to the largest output and to the largest value.
    """
    model, inputs = network(seed, dtype)
    if any(isinstance(m, Sly) for m in model.modules()):
        return {"outcome": "sly, so the graph is another function"}
    start = time.perf_counter()
    try:
        graph = capture(model, (inputs,))
    except NotCaptured as error:
        return {"outcome": f"not captured: {error}"}
    captured = time.perf_counter()
    try:
        values = real_values(graph, inputs, reading)
    except NoValue as error:
        return {"outcome": f"no real value: {error}"}
    seconds = {"capture": captured - start, "oracle": time.perf_counter() - captured}
    computed = [t for t in tree_leaves(model(inputs.clone())) if t.is_floating_point()]
    pairs = list(zip(computed, (values[name] for name in graph.outputs), strict=True))
    apart = [float(np.max(errors(*pair), initial=0.0)) for pair in pairs]
    sizes = [scale({"": real}) for _, real in pairs]
    largest = float(np.max(apart))  # NaN if one is
    if math.isnan(largest) or not all(gmpy2.is_finite(e) for _, real in pairs for e in real.flat):
        return {"outcome": "not finite", "agree": not math.isnan(largest), **seconds}
    relative = max(e / s if s else e for e, s in zip(apart, sizes, strict=True))
    return {
        "outcome": "compared", "output": relative, "value": largest / (scale(values) or 1.0),
        **seconds,
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=300, help="number of networks (default 300)")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--reading", choices=READINGS, default="rounded", help="of numbers")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    record, wrong = {}, []
    for name in chosen.dtype or DTYPES:
        dtype = DTYPES[name]
        found: dict[int, dict[str, Any]] = {}
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            try:
                found[seed] = compare(seed, dtype, chosen.reading)
            except Exception as error:
                found[seed] = {"outcome": "error"}
                wrong.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
        record[name] = summary(found)
        print(name, record[name], flush=True)
        wrong += [
            f"{name}, seed {seed}: {one}"
            for seed, one in found.items()
            if one.get("value", 0.0) > LIMITS[dtype] or one.get("agree") is False
        ]
    return {"dtypes": record, "count": chosen.count, "reading": chosen.reading}, wrong


def summary(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the outcomes, the largest differences with their seeds, and the mean seconds."""
    compared = {seed: one for seed, one in found.items() if one["outcome"] == "compared"}
    timed = [one for one in found.values() if "oracle" in one]
    worst = {
        kind: {
            seed: float(f"{compared[seed][kind]:.3g}")
            for seed in sorted(compared, key=lambda seed: -compared[seed][kind])[:WORST]
        }
        for kind in ("output", "value")
    }
    return {
        "outcomes": dict(Counter(one["outcome"].split(":")[0] for one in found.values())),
        "relative_to_output": worst["output"],
        "relative_to_largest_value": worst["value"],
        "seconds": {
            part: round(sum(one[part] for one in timed) / max(1, len(timed)), 4)
            for part in ("capture", "oracle")
        },
    }
