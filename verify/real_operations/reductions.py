"""Functions of the entries along an axis: sums, orders, softmax and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gmpy2
import numpy as np

from verify.real_operations.elementwise import extremum
from verify.real_operations.steps import Array, Step, entries, mapped, operation


def _dims(step: Step, ndim: int) -> tuple[int, ...]:
    """Return the axes to reduce; none given means all."""
    given = step["dim"]
    dims = [given] if isinstance(given, int) else list(given or ())
    return tuple(d % max(1, ndim) for d in dims) if dims and ndim else tuple(range(ndim))


def _reduced(step: Step, reduce: Callable[..., Any], x: Array) -> Array:
    return entries(reduce(x, axis=_dims(step, x.ndim), keepdims=bool(step["keepdim"])))


@operation("sum")
def _sum(step: Step) -> Array:
    return _reduced(step, np.sum, step.array("self"))


@operation("mean")
def _mean(step: Step) -> Array:
    x = step.array("self")
    return entries(_reduced(step, np.sum, x) / math.prod(x.shape[d] for d in _dims(step, x.ndim)))


@operation("amax")
def _amax(step: Step) -> Array:
    return _reduced(step, np.max, step.array("self"))


@operation("amin")
def _amin(step: Step) -> Array:
    return _reduced(step, np.min, step.array("self"))


@operation("linalg_vector_norm")
def _norm(step: Step) -> Array:
    x, order = step.array("self"), step["ord"]
    if order == 2:
        return mapped(gmpy2.sqrt, _reduced(step, np.sum, x * x))
    if order in (1, math.inf):
        return _reduced(step, np.sum if order == 1 else np.max, abs(x))
    raise step.unknown(f"ord={order}")


@operation("cumsum")
def _cumsum(step: Step) -> Array:
    x = step.array("self")
    return entries(np.add.accumulate(x, axis=step["dim"]) if x.ndim else x)


def _exponentials(step: Step) -> tuple[Array, Array, Array, Array]:
    """Return x − max x, exp of it, its sum, and max x, over the axes ``dim``."""
    x = step.array("self")
    dims = _dims(step, x.ndim)
    largest = entries(np.max(x, axis=dims, keepdims=True))
    below = entries(x - largest)
    powers = mapped(gmpy2.exp, below)
    return below, powers, entries(np.sum(powers, axis=dims, keepdims=True)), largest


@operation("softmax", "_softmax")
def _softmax(step: Step) -> Array:
    _, powers, total, _ = _exponentials(step)
    return entries(powers / total)


@operation("log_softmax", "_log_softmax")
def _log_softmax(step: Step) -> Array:
    below, _, total, _ = _exponentials(step)
    return entries(below - mapped(gmpy2.log, total))


@operation("logsumexp")
def _logsumexp(step: Step) -> Array:
    _, _, total, largest = _exponentials(step)
    result = entries(mapped(gmpy2.log, total) + largest)
    return result if step["keepdim"] else result.squeeze(_dims(step, result.ndim))


def _ordered(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    """Return the entries sorted along an axis, and their places."""
    places = np.argsort(-x if descending else x, axis=axis, kind="stable")
    return np.take_along_axis(x, places, axis), places


def _taken(step: Step, pick: Callable[[int], int], descending: bool = False) -> list[Array]:
    """Return the entry of one rank along an axis, and its place."""
    x, axis = step.array("self"), step["dim"]
    pair = _ordered(x, axis, descending) if x.ndim else (x, np.zeros((), dtype=np.int64))
    if not x.ndim:
        return list(pair)
    rank = pick(x.shape[axis])
    found = [np.take(part, [rank], axis) for part in pair]
    return found if step["keepdim"] else [part.squeeze(axis) for part in found]


@operation("sort")
def _sort(step: Step) -> list[Array]:
    axis = -1 if step["dim"] is None else step["dim"]
    return list(_ordered(step.array("self"), axis, bool(step["descending"])))


@operation("topk")
def _topk(step: Step) -> list[Array]:
    axis = -1 if step["dim"] is None else step["dim"]
    pair = _ordered(step.array("self"), axis, step["largest"] is not False)
    return [np.take(part, range(step["k"]), axis) for part in pair]


@operation("kthvalue")
def _kthvalue(step: Step) -> list[Array]:
    return _taken(step, lambda size: step["k"] - 1)


@operation("median")
def _median(step: Step) -> Any:
    """Return the median; of an even number of entries, the smaller of the two in the middle."""
    if step.call.overload == "default":
        x = np.sort(step.array("self").ravel())
        return entries(x[(len(x) - 1) // 2])
    return _taken(step, lambda size: (size - 1) // 2)


@operation("max", "min")
def _largest(step: Step) -> Any:
    if "other" in step.call.arguments():
        return extremum(step)
    if "dim" in step.call.arguments():
        return _taken(step, lambda size: 0, descending=step.name == "max")
    return _reduced(step, np.max if step.name == "max" else np.min, step.array("self"))


def _affine(step: Step, x: Array, shape: Sequence[int]) -> Array:
    """Multiply by the weight and add the bias, which have this shape in broadcasting."""
    if step["weight"] is not None:
        x = x * step.array("weight").reshape(shape)
    return entries(x if step["bias"] is None else x + step.array("bias").reshape(shape))


def _whitened(step: Step, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return (x − mean)/√(variance + ε) over some axes, the mean, and 1/√(variance + ε)."""
    count = math.prod(x.shape[a] for a in axes)
    mean = entries(np.sum(x, axis=axes, keepdims=True) / count)
    apart = x - mean
    variance = entries(np.sum(apart * apart, axis=axes, keepdims=True) / count)
    eps = step.number("eps", 1e-5)
    inverse = mapped(lambda v: 1 / gmpy2.sqrt(v + eps), variance)
    return entries(apart * inverse), mean, inverse


@operation("layer_norm", "native_layer_norm")
def _layer_norm(step: Step) -> Any:
    x, shape = step.array("input"), list(step["normalized_shape"])
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    white, mean, inverse = _whitened(step, x, axes)
    result = _affine(step, white, shape)
    return result if step.call.results == 1 else [result, mean, inverse]


@operation("group_norm")
def _group_norm(step: Step) -> Array:
    x = step.array("input")
    white = _whitened(step, x.reshape(len(x), step["num_groups"], -1), (2,))[0]
    return _affine(step, white.reshape(x.shape), [-1, *[1] * (x.ndim - 2)])


@operation("instance_norm")
def _instance_norm(step: Step) -> Any:
    if not step["use_input_stats"]:
        return _batch_norm(step)
    x = step.array("input")
    white = _whitened(step, x, tuple(range(2, x.ndim)))[0]
    return _affine(step, white, [-1, *[1] * (x.ndim - 2)])


@operation("_native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm",
           "native_batch_norm")  # fmt: skip
def _batch_norm(step: Step) -> Any:
    if step["training"]:
        raise step.unknown("training=True")
    x, eps = step.array("input"), step.number("eps", 1e-5)
    shape = [-1, *[1] * (x.ndim - 2)]
    mean, variance = (step.array(f"running_{name}").reshape(shape) for name in ("mean", "var"))
    inverse = mapped(lambda v: 1 / gmpy2.sqrt(v + eps), variance)
    result = _affine(step, entries((x - mean) * inverse), shape)
    return result if step.call.results == 1 else [result, *[None] * (step.call.results - 1)]
