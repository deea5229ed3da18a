"""Search for kernels whose bound is as close to wrong as possible, by ascent on truth/bound.

The ascent starts from trained kernels and from structured ones. The truth is σ1 of the symbol at
the frequency where it is largest, differentiable as u*F(ω*)v; the bounds are differentiable too.
Both ends of a bracket follow the truth within rtol, so their gradients carry no information. For
them, random steps are kept if the ratio grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound import BOUNDS, bound, bracket
from lipbound.paper.source import trained_layers
from verify.layer_checks import GRIDDED, Claim
from verify.oracles import Symbols
from verify.random_layers import FAMILIES, Settings, Stack, structured
from verify.shrinking import reproduction
from verify.tally import Tally

STEPS, TRIES = 60, 40
GRADIENTS = [name for name in BOUNDS if name != "spectral"]  # it equals the bracket's upper end
CHANNELS = 12  # largest number of channels taken from a trained kernel
_trained = lru_cache(1)(trained_layers)


def starts(seed: int, weights: Sequence[Path]) -> tuple[str, Tensor]:
    """Return a start kernel: a trained one for even seeds, a structured one for odd seeds."""
    rng = np.random.default_rng(seed)
    if seed % 2 == 0:
        known = _trained(tuple(weights))
        name, kernel = known[int(rng.integers(len(known)))]
        rows, columns = (int(rng.integers(1, min(n, CHANNELS) + 1)) for n in kernel.shape[:2])
        return f"trained: {name}", kernel[:rows, :columns].clone()
    family = str(rng.choice(FAMILIES))
    dims = int(rng.choice([1, 2, 2, 3]))
    most = {1: 7, 2: 4, 3: 3}[dims]
    sizes = tuple(int(s) for s in rng.integers(2, most + 1, dims))
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 5)), *sizes)
    return family, torch.from_numpy(structured(rng, family, shape))


def geometry(rng: np.random.Generator, dims: int) -> dict[str, Any]:
    """Draw a stride, the only option that changes the least value of a valid bound."""
    return {
        "stride": tuple(int(t) for t in rng.choice([1, 1, 1, 2], dims)),
        "dilation": (1,) * dims,
        "groups": 1,
        "padding": (0,) * dims,
        "padding_mode": "zeros",
        "transposed": False,
    }


def truth(kernel: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the largest σ1 of the symbol, differentiable."""
    symbols = Symbols(Stack(0, (kernel,), options, None))
    place = symbols.climb(torch.zeros(1, kernel.ndim - 2))[1]
    return symbols.at(place)[0]


def ascend(kernel: Tensor, ratio: Callable[[Tensor], Tensor], steps: int) -> tuple[float, Tensor]:
    """Run Adam on log(truth/bound), and return the largest ratio and its kernel."""
    point = (kernel / kernel.abs().max()).clone().requires_grad_(True)
    optimizer = torch.optim.Adam([point], lr=0.03)
    best, where = 0.0, point.detach().clone()
    for _ in range(steps):
        optimizer.zero_grad()
        value = ratio(point)
        if value.item() > best:
            best, where = value.item(), point.detach().clone()
        (-value.log()).backward()
        if point.grad is None or not bool(torch.isfinite(point.grad).all()):
            break  # a double singular value has no gradient
        optimizer.step()
    return best, where


@torch.no_grad()
def wander(
    kernel: Tensor, ratio: Callable[[Tensor], float], tries: int, rng: np.random.Generator
) -> tuple[float, Tensor]:
    """Take random steps, keep them if the ratio grows, and shorten them otherwise."""
    where = kernel / kernel.abs().max()
    best, reach = ratio(where), 0.3
    for _ in range(tries):
        step = torch.from_numpy(rng.standard_normal(tuple(where.shape))).to(where)
        value = ratio(where + reach * step)
        if value > best:
            best, where = value, where + reach * step
        else:
            reach *= 0.8
    return best, where


def search_kernels(
    seeds: range, weights: Sequence[Path], device: str = "cpu", steps: int = STEPS,
    tries: int = TRIES,
) -> Tally:  # fmt: skip
    """Attack every bound from each seed's kernel, and tally the smallest margins."""
    tally = Tally()
    for seed in seeds:
        name, kernel = starts(seed, weights)
        if not bool(kernel.any()):
            continue
        rng = np.random.default_rng([seed, 1])
        kernel = kernel.to(device, torch.float64)
        options = geometry(rng, kernel.ndim - 2)
        least = max([*kernel.shape[2:], 1])
        samples = int(rng.choice([least, least + 1, 2 * (least - 1) or 1, 10, 32]))
        settings = Settings(
            rtol=float(rng.choice([1e-3, 1e-6])),
            samples=max(least, samples),
            iterations=int(rng.integers(1, 7)),
        )
        tally.count += 1
        source = "trained" if name.startswith("trained") else name
        tally.counts.setdefault("starts", Counter()).update([source])
        for claim, where in [
            *(driven(name, kernel, options, settings, steps) for name in GRADIENTS),
            *(wandered(upper, kernel, options, settings, tries, seed) for upper in (True, False)),
        ]:
            tally.saw(claim.name, claim.margins(), [seed])
            if claim.wrong():
                said = f"{claim.values[0]!r} against {claim.truth[0].item()!r}"
                stack = Stack(seed, (where,), options, None, settings=settings)
                tally.violated(claim.name, [seed], said, reproduction(stack, claim.name))
    return tally


def driven(
    name: str, kernel: Tensor, options: dict[str, Any], settings: Settings, steps: int
) -> tuple[Claim, Tensor]:
    """Return the claim of a bound about the worst kernel that its gradient finds."""
    own = {key: getattr(settings, key) for key in GRIDDED.get(name, ())}

    def ratio(k: Tensor) -> Tensor:
        return truth(k, options) / bound(k, name, **options, **own)

    _, where = ascend(kernel, ratio, steps)
    value = bound(where, name, **options, **own).item()
    return Claim(name, [value], truth(where, options)[None].cpu()), where


def wandered(
    upper: bool, kernel: Tensor, options: dict[str, Any], settings: Settings, tries: int, seed: int
) -> tuple[Claim, Tensor]:
    """Return the claim of one end of the bracket about the worst kernel of random steps."""

    def ends(k: Tensor) -> tuple[float, Tensor]:
        found = bracket(k, settings.rtol, **options)
        symbols = Symbols(Stack(0, (k,), options, None))
        here = torch.tensor([found.frequency], dtype=torch.float64).reshape(1, -1)
        size = symbols.peaks(here) if upper else symbols.at(here)
        return (found.upper if upper else found.lower), size.cpu()

    def closeness(k: Tensor) -> float:
        value, size = ends(k)
        return float(size) / value if upper else value / float(size)

    rng = np.random.default_rng([seed, 2, int(upper)])
    _, where = wander(kernel, closeness, tries, rng)
    value, size = ends(where)
    return Claim("bracket upper" if upper else "bracket lower", [value], size, upper), where
