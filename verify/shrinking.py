"""Shrink a failing case: simplify it while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from verify.random_layers import Settings, Stack

T = TypeVar("T")
SECONDS = 60.0


def shrink(
    case: T, simpler: Callable[[T], Iterator[T]], fails: Callable[[T], bool],
    seconds: float = SECONDS,
) -> T:  # fmt: skip
    """Replace a case by a simpler one that still fails, until there is none or time is up."""
    end = time.monotonic() + seconds
    while True:
        for candidate in simpler(case):
            if time.monotonic() > end:
                return case
            try:
                failing = fails(candidate)
            except Exception:  # an invalid case, such as a padding that does not fit
                failing = False
            if failing:
                case = candidate
                break
        else:
            return case


def simpler_layers(stack: Stack) -> Iterator[Stack]:
    """Yield simpler stacks of one layer: fewer groups, channels, taps, options, digits."""
    (kernel,) = stack.kernels
    groups = stack.options.get("groups", 1)
    if groups > 1:
        for part in kernel.chunk(groups):
            yield _with(stack, part, groups=1)
    elif stack.dims or kernel.ndim == 2:
        for axis in (0, 1):
            yield from (_with(stack, part) for part in _parts(kernel, axis))
    for axis in range(2, kernel.ndim):
        yield from (_with(stack, part) for part in _parts(kernel, axis))
    yield from _plainer(stack)
    yield from _smaller_inputs(stack)
    if stack.settings != Settings(sized=stack.settings.sized):
        yield replace(stack, settings=Settings(sized=stack.settings.sized))
    yield from _rounder(stack)


def _with(stack: Stack, kernel: Tensor, **options: Any) -> Stack:
    return replace(
        stack, kernels=(kernel.clone(),), families=(), options={**stack.options, **options}
    )


def _parts(kernel: Tensor, axis: int) -> Iterator[Tensor]:
    size = kernel.shape[axis]
    for count in dict.fromkeys((size // 2, size - 1)):
        if 0 < count < size:
            yield kernel.narrow(axis, 0, count)
            yield kernel.narrow(axis, size - count, count)


def _plainer(stack: Stack) -> Iterator[Stack]:
    plain = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}
    options = stack.options
    for name, least in plain.items():
        value: Any = options.get(name, ())
        if isinstance(value, str):
            yield replace(stack, options={**options, name: (0,) * stack.dims})
            continue
        for axis, here in enumerate(value):
            if here != least:
                changed = (*value[:axis], least, *value[axis + 1 :])
                yield replace(stack, options={**options, name: changed})
    if options.get("transposed"):
        rest = {k: v for k, v in options.items() if k != "output_padding"}
        yield replace(stack, options={**rest, "transposed": False})
    if options.get("padding_mode", "zeros") != "zeros":
        yield replace(stack, options={**options, "padding_mode": "zeros"})


def _smaller_inputs(stack: Stack) -> Iterator[Stack]:
    size = stack.size or ()
    for axis, n in enumerate(size):
        if n > 1:
            yield replace(stack, size=(*size[:axis], n - 1, *size[axis + 1 :]))
    if stack.size is not None and stack.dims and not stack.settings.sized:
        yield replace(stack, size=None)


def _rounder(stack: Stack) -> Iterator[Stack]:
    """Yield kernels with fewer digits and fewer nonzero entries."""
    (kernel,) = stack.kernels
    unit = 2.0 ** float(kernel.double().abs().max().clamp_min(1e-300).log2().floor())
    for digits in (0, 2, 5):
        rounded = ((kernel.double() / unit * 10**digits).round() / 10**digits).to(kernel.dtype)
        if not rounded.equal(kernel):
            yield _with(stack, rounded)
    places = kernel.flatten().nonzero()[:, 0].tolist()
    for place in places if len(places) <= 32 else []:
        changed = kernel.clone().flatten()
        changed[place] = 0
        yield _with(stack, changed.reshape(kernel.shape))


def reproduction(stack: Stack, claim: str) -> str:
    """Return Python code that checks this layer again."""
    (kernel,) = stack.kernels
    weights = f"torch.tensor({kernel.double().tolist()}, dtype={kernel.dtype})"
    place = "" if kernel.device.type == "cpu" else f'.to("{kernel.device}")'
    return f"""import torch
from verify.layer_checks import claims
from verify.random_layers import Settings, Stack

kernel = {weights}{place}
options = {stack.options!r}
stack = Stack({stack.seed}, (kernel,), options, {stack.size!r}, settings={stack.settings!r})
for claim in claims(stack):
    if claim.name == {claim!r}:
        print(claim.name, claim.values, "truth", claim.truth.tolist())
"""
