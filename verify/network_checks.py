"""Compare the audit's bound of random networks with the largest Jacobian norms found."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lipbound import BOUNDS, audit
from lipbound.network.lipsdp import multipliers
from verify.oracles import norms
from verify.random_networks import code, random_domain, random_network
from verify.random_parts import Concat, Larger, Residual, Reuse, Shape, Sly
from verify.shrinking import shrink
from verify.tally import Tally

ROUNDING = 1e-12  # rounding error of a Jacobian in float64
FEW = 20  # steps for the multipliers of LipSDP


def _device(model: nn.Module) -> torch.device:
    """Return the device of a network, the CPU if it has no tensors."""
    return next(iter((*model.parameters(), *model.buffers())), torch.zeros(())).device


def jacobians(model: nn.Module, points: Tensor) -> Tensor:
    """Return Jacobians ``(points, outputs, inputs)`` by forward mode, one batch entry per input."""
    count, inputs = len(points), points[0].numel()
    tangents = torch.eye(inputs).to(points).reshape(inputs, *points.shape[1:])
    tangents = tangents.repeat(count, *[1] * (points.ndim - 1))
    primals = points.repeat_interleave(inputs, 0)
    images = torch.func.jvp(model, (primals,), (tangents,))[1]
    return images.reshape(count, inputs, -1).mT


@torch.no_grad()
def searched_norm(
    model: nn.Module,
    shape: Shape,
    seed: int,
    rounds: int = 3,
    error: float = 0.0,
    domain: tuple[float, float] | None = None,
) -> float:
    """Return the largest Jacobian norm or difference quotient found for a float64 network.

    The search tries random points of several scales, and then points around the best of them, along
    the gradient of ‖J‖ where it exists and at random.
    """
    draw = torch.Generator().manual_seed(seed)
    device = _device(model)

    def normal(count: int) -> Tensor:
        return torch.randn(count, *shape, generator=draw, dtype=torch.float64).to(device)

    def inside(points: Tensor) -> Tensor:
        return points if domain is None else _inside(points, domain)

    points = torch.cat([scale * normal(3) for scale in (0.03, 0.3, 1.0, 3.0, 10.0)])
    points = inside(torch.cat([points, points[::3].abs(), 10 + normal(1)]))
    best, where = 0.0, points[:1]
    for turn in range(rounds):
        found = jacobians(model, points)
        sizes = norms(found)
        place = int(sizes.argmax())
        if float(sizes[place]) > best:
            best, where = float(sizes[place]), points[place : place + 1]
            matrix = found[place]
        reach = 0.5**turn
        moves = [reach * normal(4)]
        if best > 0:
            moves += [reach * scale * _uphill(model, where, matrix) for scale in (0.3, 1.0, 3.0)]
        points = inside(where + torch.cat(moves))
    far = inside(torch.cat([where + reach * normal(4) for reach in (1e-2, 1.0, 10.0)]))
    images = model(torch.cat([where, far])).flatten(1)
    moved = ((images[1:] - images[0]).norm(dim=1) - 2 * error).clamp_min(0)  # jumps apart
    steps = moved / (far - where).flatten(1).norm(dim=1)
    return max(best, float(steps.max()))


def _inside(points: Tensor, domain: tuple[float, float]) -> Tensor:
    """Move points into the domain, not onto its border, where a derivative may belong outside."""
    low, high = domain
    room = (high - low) / 1000
    return points.clamp(low + room, high - room)


def _uphill(model: nn.Module, point: Tensor, matrix: Tensor) -> Tensor:
    """Return the unit direction of growing ‖J(x)v‖, v the top singular vector; zero if none."""
    right = torch.linalg.svd(matrix, full_matrices=False)[2][0].reshape(point.shape)

    def size(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(torch.func.jvp(model, (x,), (right,))[1])

    try:
        slope = torch.func.grad(size)(point)
    except (RuntimeError, NotImplementedError):  # no second derivative
        return torch.zeros_like(point)
    return slope / slope.norm() if 0 < float(slope.norm()) < math.inf else torch.zeros_like(point)


@torch.no_grad()
def empty_windows(model: nn.Module, shape: Shape) -> bool:
    """Whether a pooling window of a float64 network lies in padding alone, so its maximum is −∞.

    PyTorch has no gradient there, so the audit's bound of such networks cannot be checked.
    """
    seen: list[bool] = []

    def look(module: nn.Module, given: object, result: Tensor) -> None:
        seen.append(bool((result == -math.inf).any()))

    pools = [m for m in model.modules() if type(m).__name__.startswith("MaxPool")]
    hooks = [pool.register_forward_hook(look) for pool in pools]
    try:
        model(torch.zeros(1, *shape, dtype=torch.float64, device=_device(model)))
    finally:
        for hook in hooks:
            hook.remove()
    return any(seen)


@dataclass
class Margin:
    """The bound of a network and what was found below it.

    Attributes:
        upper: The bound.
        truth: Largest Jacobian norm or difference quotient that was found.
        floor: Number below which LipSDP cannot go, rounded down; 0 if it is not known.
        lowered: Whether LipSDP lowered the bound.
        pairs: Smallest excess of a bound on the difference of two outputs; ∞ without such bounds.
        reason: Why there is no bound, or none that can be checked.
    """

    upper: float
    truth: float = 0.0
    floor: float = 0.0
    lowered: bool = False
    pairs: float = math.inf
    reason: str = ""

    def excess(self, below: float) -> float:
        """Return upper/below − 1."""
        return self.upper / below - 1 if below else math.inf

    def fails(self) -> bool:
        smallest = min(self.excess(max(self.truth, self.floor)), self.pairs)
        return not self.reason and not smallest >= -ROUNDING


def margin(model: nn.Module, shape: Shape, seed: int, effort: str = "normal") -> Margin:
    """Bound a network, and search for a larger Jacobian norm.

    With effort='high' few steps choose the multipliers of LipSDP, because any are valid.
    """
    domain = random_domain(seed)
    method = list(BOUNDS)[seed % len(BOUNDS)] if seed % 2 and effort != "high" else "spectral"
    with patch.multiple(multipliers, STEPS=FEW, EACH=0):
        found = audit(model, shape, search=0, method=method, effort=effort, domain=domain)
    if found.upper == math.inf:
        return Margin(math.inf, reason=found.reason or "the bound is above the largest float64")
    wide = copy.deepcopy(model).double()
    if empty_windows(wide, shape):
        return Margin(found.upper, reason="a pooling window lies in padding alone")
    truth = searched_norm(wide, shape, seed, error=found.error, domain=domain)
    apart = math.inf
    if found.pairs is not None:
        apart = differences(wide, shape, seed, found.pairs, domain)
    return Margin(found.upper, truth, found.floor, "lowered the bound" in found.note, apart)


@torch.no_grad()
def differences(
    model: nn.Module,
    shape: Shape,
    seed: int,
    bounds: Tensor,
    domain: tuple[float, float] | None = None,
) -> float:
    """Return the smallest bound/norm − 1 over differences of two rows of Jacobians."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(40, *shape, generator=draw, dtype=torch.float64)
    points *= 10.0 ** torch.arange(-2, 2).repeat(10).reshape(-1, *[1] * len(shape))
    if domain is not None:
        points = _inside(points, domain)
    rows = jacobians(model, points.to(_device(model)))
    truth = (rows[:, :, None] - rows[:, None]).norm(dim=-1).amax(0)
    seen = truth > 0
    ratios = bounds.to(truth)[seen] / truth[seen] - 1
    return float(ratios.min()) if len(ratios) else math.inf


def fails(case: tuple[nn.Module, Shape], seed: int, effort: str) -> bool:
    return margin(*case, seed, effort).fails()


def simpler_networks(case: tuple[nn.Module, Shape]) -> Iterator[tuple[nn.Module, Shape]]:
    """Yield copies with a module dropped, or a composite replaced by one of its parts."""
    model, shape = case
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Sequential):
            for index in range(len(part)):
                changed = copy.deepcopy(model)
                del changed.get_submodule(name)[index]  # type: ignore[operator]
                yield changed, shape
        elif isinstance(part, Residual | Concat | Larger | Reuse):
            inner = part.branches if isinstance(part, Concat) else part.children()
            for child in inner:
                changed = copy.deepcopy(model)
                changed.set_submodule(name, copy.deepcopy(child))
                yield changed, shape
    for axis in range(1, len(shape)):
        if shape[axis] > 1:
            yield model, (*shape[:axis], shape[axis] - 1, *shape[axis + 1 :])


def reproduction(model: nn.Module, shape: Shape, seed: int, effort: str) -> str:
    """Return Python code that checks this network again."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    state = {name: tensor.double().tolist() for name, tensor in model.state_dict().items()}
    return f"""import torch
from torch import nn
from verify.network_checks import margin
from verify.random_parts import *

model = {code(model)}
state = {state!r}
model.load_state_dict({{name: torch.tensor(value) for name, value in state.items()}})
print(margin(model.to({dtype}).eval(), {shape!r}, {seed}, {effort!r}))
"""


def _short(reason: str) -> str:
    """Return the kind of a reason, without its details."""
    reason = reason.split(" (")[0].split(" when it runs")[0].removeprefix("layers only: ")
    return "a range is not known" if reason.startswith("the range of ") else reason


def check_networks(seeds: Iterable[int], device: str = "cpu", effort: str = "normal") -> Tally:
    """Check one network per seed. Refusals are counted; an error is a violation.

    With effort='high' three networks of five are chains of linear maps and activations.
    """
    tally = Tally()
    outcomes, kinds, reasons = Counter[str](), Counter[str](), Counter[str]()
    for seed in seeds:
        model, shape = random_network(seed, blocks=effort == "high" and seed % 5 < 3)
        model = model.to(device)
        tally.count += 1
        kinds.update({type(m).__name__ for m in model.modules()})
        try:
            found = margin(model, shape, seed, effort)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if "not implemented for 'BFloat16'" in said:  # PyTorch cannot run it either
                outcomes["refused"] += 1
                reasons["PyTorch does not run it in bfloat16"] += 1
                continue
            tally.violated("error", [seed], said, reproduction(model, shape, seed, effort))
            continue
        outcomes["refused" if found.reason else "bounded"] += 1
        if found.reason:
            reasons[_short(found.reason)] += 1
            continue
        if any(isinstance(m, Sly) for m in model.modules()):
            said = "a sly network was not refused"
            tally.violated("network", [seed], said, reproduction(model, shape, seed, effort))
            continue
        tally.saw("network", [found.excess(found.truth)], [seed])
        if found.lowered:
            tally.saw("lowered by LipSDP", [found.excess(found.truth)], [seed])
        if found.pairs < math.inf:
            tally.saw("differences of outputs", [found.pairs], [seed])
        if found.floor:
            tally.saw("floor", [found.excess(found.floor)], [seed])
        if found.fails():
            wrong = partial(fails, seed=seed, effort=effort)
            small, smaller = shrink((model, shape), simpler_networks, wrong)
            script = reproduction(small, smaller, seed, effort)
            tally.violated("network", [seed], repr(found), script)
    tally.counts = {"outcomes": outcomes, "modules": kinds, "reasons": reasons}
    return tally
