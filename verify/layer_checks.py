"""Check that every bound of a layer is at least what the layer is known to attain.

Estimates (:data:`lipbound.ESTIMATES`: polygrid, power iteration, ...) are not guaranteed, so they
are not checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lipbound import BOUNDS, Bracket, Penalty, bound, brackets, constrain, convolution
from lipbound.bounds import certified
from lipbound.bounds.supremum import levels
from lipbound.bounds.supremum import stack as stacks
from lipbound.geometry import Convolution
from verify.oracles import Symbols, operator_norms
from verify.random_layers import Stack, counted, module, random_stack
from verify.shrinking import reproduction, shrink, simpler_layers
from verify.tally import Tally

ROUNDING = 1e-12  # rounding error of the dense spectra that serve as truth
GRIDDED = {"lipbound": ("samples", "widening"), "frobenius": ("samples", "widening"),
           "gram": ("samples", "widening", "iterations")}  # fmt: skip
LIMIT = 0.75  # limit of constrained layers, as a fraction of their norm
PRODUCTS = 4, 3  # rows of matrices and of corners with which small factors are made of products
TURNS = 1 << 19  # bytes with which the cells of small layers are handled in turns


@dataclass(frozen=True)
class Claim:
    """The values of one bound for the first layers of a stack, and the true values.

    Attributes:
        name: Name of the bound.
        values: Values of the bound, one per layer.
        truth: Norms that the layers attain, ``(layers,)``.
        upper: Whether ``values`` must be at least the truth; otherwise at most.
    """

    name: str
    values: Sequence[float]
    truth: Tensor
    upper: bool = True

    def margins(self) -> list[float]:
        """Return the margins relative to the truth, at least 0 where the claim holds, or NaN."""
        found = []
        for value, truth in zip(self.values, self.truth.tolist(), strict=True):
            if truth > 0:
                found.append(value / truth - 1 if self.upper else 1 - value / truth)
            else:  # a truth of zero has no relative margin
                found.append(math.inf if self.upper == (value >= 0) or value == 0 else math.nan)
        return found

    def wrong(self) -> list[int]:
        """Return the layers for which the claim fails by more than the rounding of the truth."""
        return [i for i, margin in enumerate(self.margins()) if not margin >= -ROUNDING]


@dataclass(frozen=True)
class Known:
    """True norms of a stack: for bounds of all input sizes, and at the stack's input size."""

    any_size: Tensor
    here: Tensor | None


Check = Callable[[Stack, Sequence[nn.Module], Known], Iterable[Claim]]


def claims(stack: Stack, only: Iterable[str] | None = None) -> list[Claim]:
    """Return the claims about a stack's layers, or ``only`` those of the named checks."""
    layers = stack.modules()
    symbols = Symbols(stack)
    found = brackets(_named(layers), stack.settings.rtol)
    frequencies = torch.tensor([b.frequency for b in found.values()], dtype=torch.float64)
    frequencies = frequencies.reshape(len(layers), -1)
    peaks = symbols.peaks(frequencies).cpu()
    here = operator_norms(stack).cpu() if stack.size is not None else None
    known = Known(peaks if here is None else torch.maximum(peaks, here), here)
    chosen = CHECKS.values() if only is None else [{**CHECKS, **MORE}[name] for name in only]
    result = _both_ends("bracket", list(found.values()), known.any_size, symbols.at(frequencies))
    return [*result, *(claim for check in chosen for claim in check(stack, layers, known))]


def _named(layers: Iterable[Any]) -> dict[str, Any]:
    return {str(index): layer for index, layer in enumerate(layers)}


def _both_ends(name: str, found: Sequence[Bracket], above: Tensor, below: Tensor) -> list[Claim]:
    """Return the claims of both ends of brackets; lower ends must be at most ``below``."""
    uppers = [b.upper if b.certified and b.lower <= b.upper else math.nan for b in found]
    lowers = [b.lower for b in found]
    return [
        Claim(f"{name} upper", uppers, above),
        Claim(f"{name} lower", lowers, below.cpu(), upper=False),
    ]


def _single(name: str) -> Check:
    """Return the check of one of ``BOUNDS``, layer by layer, with the settings it takes."""

    def check(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
        options = {key: getattr(stack.settings, key) for key in GRIDDED.get(name, ())}
        truth = known.any_size
        if stack.settings.sized and known.here is not None and stack.dims:
            options["input_shape"], truth = stack.size, known.here
        values = [float(bound(layer, name, **options)) for layer in layers]
        yield Claim(f"{name}, sized" if "input_shape" in options else name, values, truth)

    return check


def _spectral(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
    """Check the differentiable bound, which refines the peak; it is slow, so on few layers."""
    few = _share(layers, 32)
    for layer in few:
        layer.weight.requires_grad_(True)
    values = [bound(layer, "spectral", rtol=stack.settings.rtol).item() for layer in few]
    for layer in few:
        layer.weight.requires_grad_(False)
    yield Claim("spectral", values, known.any_size[: len(few)])


def _finite(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
    """Check brackets at one input size, on a few layers."""
    if known.here is None or not stack.dims:
        return
    few = [convolution(layer, input_shape=stack.size) for layer in _share(layers, 32)]
    found = list(brackets(_named(few), stack.settings.rtol).values())
    truth = known.here[: len(few)]
    yield from _both_ends("sized bracket", found, truth, truth)


def _penalty(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
    """Check ``Penalty.bounds``, in the precision of the weights and fused on a GPU."""
    classifier = nn.Linear(1, 1, device=stack.kernels[0].device)  # the last layer is left out
    penalty = Penalty(nn.ModuleList([*layers, classifier]), samples=stack.settings.samples)
    values = penalty.bounds()
    yield Claim("penalty", [values[str(i)] for i in range(len(layers))], known.any_size)


def _constrained(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
    """Check that layers constrained to less than their norm stay below the limit."""
    truth = known.any_size
    few = [i for i in range(len(_share(layers, 64))) if 1e-3 < truth[i] < 1e6]
    if not few:
        return
    limits = [LIMIT * float(truth[i]) for i in few]
    method = list(BOUNDS)[stack.seed % len(BOUNDS)]
    weights = []
    for i, limit in zip(few, limits, strict=True):
        layer = module(stack.kernels[i], stack.options).eval()
        held: Any = constrain(layer, limit, method)
        weights.append(held.weight.detach())
    left = replace(stack, kernels=tuple(weights), settings=replace(stack.settings, rtol=1e-3))
    after = Symbols(left).peaks(torch.zeros(len(few), stack.dims)).cpu()
    if stack.size is not None:
        after = torch.maximum(after, operator_norms(left).cpu())
    yield Claim("constrain", limits, after)


def _levels(stack: Stack, layers: Sequence[nn.Module], known: Known) -> Iterable[Claim]:
    """Hold brackets by levels on the stack's device against the plain search on a processor.

    The supremum lies in both, so neither may lie beyond the other. The widths may exceed ``rtol``
    where those of the plain search do, because floats are too coarse for it. On a GPU other weights
    come first, so that graphs are captured for them and replayed for those that are checked. The
    layers are small, so odd seeds make factors as for large ones, and half of the seeds handle
    their cells in turns.
    """
    rtol, device = stack.settings.rtol, stack.kernels[0].device.type
    sizes = PRODUCTS if stack.seed % 2 else (stacks.BLOCKED, stacks.CORNER)
    room = (lambda device, stacks: TURNS) if stack.seed % 4 > 1 else levels.room
    with (
        patch.object(certified, "BY_LEVELS", {device}),
        patch.multiple(stacks, BLOCKED=sizes[0], CORNER=sizes[1]),
        patch.object(levels, "room", room),
    ):
        for _ in range(2 if device == "cuda" else 0):
            brackets({name: _changed(layer) for name, layer in _named(layers).items()}, rtol)
        found = list(brackets(_named(layers), rtol).values())
    with patch.object(certified, "BY_LEVELS", set()):
        plain = list(brackets(_named(layers), rtol, device="cpu").values())
    below, above, widths = torch.tensor(
        [(b.lower, b.upper, max(1.001 * rtol, 2 * b.width)) for b in plain], dtype=torch.float64
    ).unbind(1)
    frequencies = torch.tensor([b.frequency for b in found], dtype=torch.float64)
    attained = Symbols(stack).at(frequencies.reshape(len(layers), -1)).cpu()
    yield from _both_ends("levels", found, torch.maximum(known.any_size, attained), attained)
    yield from _both_ends("levels, plain", found, below, above)
    yield Claim("levels, width", [b.width for b in found], widths, upper=False)


def _changed(layer: nn.Module) -> Convolution:
    """The layer with other weights."""
    conv = convolution(layer)
    return replace(conv, kernel=conv.kernel * (0.5 + 0.5 * torch.rand_like(conv.kernel)))


def _share(layers: Sequence[Any], part: int) -> Sequence[Any]:
    """Return one layer in ``part``, and at least one."""
    return layers[: max(1, len(layers) // part)]


CHECKS: dict[str, Check] = {
    **{name: _single(name) for name in BOUNDS if name != "spectral"},
    "spectral": _spectral,
    "sized bracket": _finite,
    "penalty": _penalty,
    "constrain": _constrained,
}
"""Name → check. The brackets for all input sizes always run first."""
MORE: dict[str, Check] = {"levels": _levels}
"""Checks that run only where they are named."""


def fails(stack: Stack, claim: str) -> bool:
    """Whether a claim of that name fails for the stack."""
    check = claim.split(",")[0].removesuffix(" upper").removesuffix(" lower")
    only = [check] if check in CHECKS or check in MORE else []
    return any(c.name == claim and c.wrong() for c in claims(stack, only))


def check_stack(stack: Stack, tally: Tally, only: Iterable[str] | None = None) -> None:
    """Check the bounds of a stack's layers, and shrink the failing cases."""
    tally.count += len(stack.kernels)
    for axis, each in counted(stack).items():
        tally.counts.setdefault(axis, Counter()).update(each)
    try:
        found = claims(stack, only)
    except Exception as error:  # refusing a valid layer is also a violation
        said = f"{type(error).__name__}: {error}"
        tally.violated("error", [stack.seed], said)
        return
    for claim in found:
        margins = claim.margins()
        tally.saw(claim.name, margins, [stack.seed])
        for index in claim.wrong():
            message = f"{claim.values[index]!r} against {claim.truth[index].item()!r}"
            again = ""
            if all(v["claim"] != claim.name for v in tally.violations):  # one per claim is enough
                one = replace(stack, kernels=stack.kernels[index : index + 1], families=())
                small = shrink(one, simpler_layers, partial(fails, claim=claim.name))
                again = reproduction(small, claim.name)
            tally.violated(claim.name, [stack.seed, index], message, again)


def check_layers(
    seeds: range, layers: int, device: str = "cpu", only: Sequence[str] | None = None
) -> Tally:
    """Check the stacks of these seeds, ``layers`` kernels each, by all checks or ``only`` some."""
    tally = Tally()
    for seed in seeds:
        check_stack(random_stack(seed, layers, device), tally, only)
    return tally
