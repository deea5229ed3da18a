r"""Time LipBound and its gradient on whole networks, compared with the alternatives.

The contenders run in one process on the same He-initialised weights, all in float32:

* ``lipbound``: the value of our certified penalty for the convolutions alone, on its default grid
  (32 points per unit of degree);
* ``direct``: the polynomials on a 10×10 grid, one product of the taps with cosines and one with
  sines per layer, as in the authors' published code; 1×1 kernels by their norm;
* ``power``: ten power iterations on each layer at its real stride and input size;
* ``gram``: Gram iteration, five products on a 10×10 grid (60 points of it);
* ``lipbound_gradient``: our penalty of the whole network (convolutions, BatchNorm, hidden Linear
  layers), value and gradient added to ``.grad``; ``lipbound_autograd``: through ``backward()``;
* ``direct_gradient``: the direct evaluation of the convolutions with ``backward()``;
* ``sgd``: one fused SGD step with momentum over all parameters of the network;
* ``floor``: the convolutions' bytes divided by the read bandwidth measured in this run.

A time is the median over repeats of (time between two synchronizations) / calls, after a warm-up.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lipbound
from lipbound.paper.networks import NAMES, Layers
from lipbound.penalty import plain
from lipbound.penalty.penalty import Penalty
from lipbound.registry import unknown
from lipbound.row_energies import row_peaks
from lipbound.runtime import pick_device, widened
from lipbound.symbols import grid, positions, radians

SAMPLES, ITERATIONS = 10, 10


class Direct:
    """LipBound by direct evaluation of every polynomial on the grid."""

    def __init__(self, kernels: Sequence[Tensor]):
        self.kernels = kernels
        self.waves: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        samples = (SAMPLES, SAMPLES)
        for kernel in kernels:
            size = tuple(kernel.shape[2:])
            angle = positions(size).double() @ radians(grid(samples), samples).mT  # (taps, points)
            self.waves[size] = (angle.cos().to(kernel), angle.sin().to(kernel))

    def __call__(self) -> Tensor:
        return torch.stack([self._one(kernel) for kernel in self.kernels]).log().sum()

    def _one(self, kernel: Tensor) -> Tensor:
        if kernel[0, 0].numel() == 1:
            return torch.linalg.vector_norm(kernel)
        if kernel.shape[0] > kernel.shape[1]:
            kernel = kernel.transpose(0, 1)
        cosines, sines = self.waves[tuple(kernel.shape[2:])]
        flat = kernel.reshape(-1, len(cosines))
        shape = (*kernel.shape[:2], -1)
        real, imaginary = (flat @ cosines).view(shape), (flat @ sines).view(shape)
        energy = torch.einsum("ijk,ijk->ik", real, real)
        energy = energy + torch.einsum("ijk,ijk->ik", imaginary, imaginary)
        return energy.amax(-1).sum().sqrt()


def power_method(layers: Sequence[nn.Conv2d], starts: Sequence[Tensor]) -> Tensor:
    """Run ten power iterations on each layer, at its input size."""
    values = []
    for layer, start in zip(layers, starts, strict=True):
        vector, weight = start, layer.weight
        stride, dilation, groups = layer.stride, layer.dilation, layer.groups
        padding = [int(p) for p in layer.padding]
        spans = zip(vector.shape[2:], padding, dilation, layer.kernel_size, stride, strict=True)
        rest = [(n + 2 * p - d * (k - 1) - 1) % s for n, p, d, k, s in spans]
        for _ in range(ITERATIONS):
            image = functional.conv2d(vector, weight, None, stride, padding, dilation, groups)
            image = image / torch.linalg.vector_norm(image)
            vector = functional.conv_transpose2d(
                image, weight, None, stride, padding, rest, groups, dilation
            )
            norm = torch.linalg.vector_norm(vector)
            vector = vector / norm
        values.append(norm)
    return torch.stack(values).log().sum()


def gram_iteration(kernel: Tensor, iterations: int = 5) -> Tensor:
    """Run Gram iteration (Delattre et al. 2023) as published: an estimate that ignores strides."""
    symbol = torch.fft.rfft2(kernel, s=(SAMPLES, SAMPLES)).permute(2, 3, 0, 1).flatten(0, 1)
    product = symbol if symbol.shape[-2] <= symbol.shape[-1] else symbol.mH
    logarithm = torch.zeros(len(product), device=kernel.device)
    for _ in range(iterations):
        norm = torch.linalg.matrix_norm(product)
        product = product / norm[:, None, None]
        product = product @ product.mH
        logarithm = 2 * (logarithm + norm.log())
    total = logarithm + torch.linalg.matrix_norm(product).log()
    return (total / 2**iterations).exp().amax()


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 11) -> float:
    """Return the median time of a call over repeats; short calls are repeated in a loop."""

    def timed(calls: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize(device)
        return (time.perf_counter() - start) / calls

    for _ in range(3):
        once = timed(1)
    if once > 0.3:
        repeats = 3
    calls = max(1, min(20, math.ceil(0.004 / once)))
    return 1e3 * statistics.median(timed(calls) for _ in range(repeats))


def bandwidth(device: torch.device) -> float:
    """Return the bytes per millisecond that a sum over a large buffer reads."""
    size = (1 << 30) if device.type == "cuda" else (1 << 27)
    buffer = torch.ones(size // 4, device=device)
    return size / milliseconds(lambda: buffer.sum(), device)


def measure(
    name: str, device: torch.device, methods: Sequence[str], per_ms: float
) -> dict[str, Any]:
    """Measure one network and return its record."""
    network = Layers(name).to(device)
    layers: list[nn.Conv2d] = list(network.convolutions)  # type: ignore[arg-type]
    kernels = [layer.weight for layer in layers]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = [k.detach() for k in kernels]
    whole = Penalty(network, 1.0)
    linear = nn.Linear if len(network.linears) > 1 else ()  # the last one is never included
    alone = Penalty(network, 1.0, include_batchnorm=False, exclude=linear)
    direct, direct_graph = Direct(weights), Direct(kernels)
    starts = [
        torch.randn(1, layer.in_channels, *size, device=device)
        for layer, size in zip(layers, network.inputs, strict=True)
    ]
    optimizer = torch.optim.SGD(network.parameters(), 0.0, momentum=0.9, fused=True)
    contenders: dict[str, Callable[[], object]] = {
        "lipbound": torch.no_grad()(lambda: alone()),
        "direct": direct,
        "power": torch.no_grad()(lambda: power_method(layers, starts)),
        "gram": lambda: [gram_iteration(kernel) for kernel in weights],
        "lipbound_gradient": whole.add_grad_,
        "lipbound_autograd": lambda: whole().backward(),
        "direct_gradient": lambda: direct_graph().backward(),
        "sgd": optimizer.step,
    }
    times = {m: round(milliseconds(contenders[m], device), 5) for m in methods}
    size = sum(k.numel() * k.element_size() for k in kernels)
    times["floor"] = round(size / per_ms, 5)
    return {
        "network": name,
        "convolutions": len(layers),
        "convolution_parameters": sum(k.numel() for k in kernels),
        "parameters": sum(p.numel() for p in network.parameters()),
        "milliseconds": times,
        **_agreement(whole, network),
    }


def _agreement(penalty: Penalty, network: nn.Module) -> dict[str, float]:
    """Return the relative differences of value and gradient from plain PyTorch with autograd.

    If two grid points of a row have the same energy up to rounding, either is a maximizer and the
    gradients differ. Such rows are counted (``ties``, with the gap between the energies) and left
    out of the gradient's difference.
    """
    for parameter in network.parameters():
        parameter.grad = None
    value = penalty.add_grad_()
    total = plain.logs(penalty.factors, -math.inf).sum()
    found = [(p, p.grad) for p in network.parameters() if p.grad is not None]
    twin = torch.autograd.grad(total, [p for p, _ in found])
    tied, gap = _ties(penalty)
    difference = 0.0
    for (parameter, mine), theirs in zip(found, twin, strict=True):
        rows = tied.get(parameter, torch.zeros(len(mine), dtype=torch.bool, device=mine.device))
        apart = (mine - theirs).transpose(0, int(len(rows) != len(mine)))[~rows].abs().amax()
        difference = max(difference, float(apart / theirs.abs().amax()))
    total = total.detach()
    return {
        "value_difference": float((value - total).abs() / total.abs()),
        "gradient_difference": difference,
        "ties": int(sum(rows.sum() for rows in tied.values())),
        "tie_gap": gap,
    }


def _ties(penalty: Penalty) -> tuple[dict[Tensor, Tensor], float]:
    """Return weight → rows whose maximizer differs from plain PyTorch's, and the largest gap."""
    fused = getattr(penalty._terms, "_fused", None)
    tied: dict[Tensor, Tensor] = {}
    gap = 0.0
    if fused is None:
        return tied, gap
    for factor, first in fused.firsts():
        if factor.kind.taps == 1:
            continue
        weight = factor.weight()
        with torch.no_grad():
            peaks, points = row_peaks(factor.rows(widened(weight)), factor.kind)
        here = slice(first, first + len(peaks))
        tied[weight] = fused.points[here] != points
        gaps = ((fused.peaks[here] - peaks).abs() / peaks)[tied[weight]]
        gap = max(gap, float(gaps.amax()) if len(gaps) else 0.0)
    return tied, gap


METHODS = (
    "lipbound", "direct", "power", "gram",
    "lipbound_gradient", "lipbound_autograd", "direct_gradient", "sgd",
)  # fmt: skip


def speed(
    names: Sequence[str] = NAMES, device: str | None = None, methods: Sequence[str] = METHODS
) -> Iterator[dict[str, Any]]:
    """Yield one record per network, measured when it is requested.

    Raises:
        ValueError: Before any measurement, if a network, method or device is unknown.
    """
    for kind, chosen, known in (("network", names, NAMES), ("method", methods, METHODS)):
        for name in chosen:
            if name not in known:
                raise unknown(kind, name, known)
    return _records(names, pick_device(device), methods)


def _records(
    names: Sequence[str], device: torch.device, methods: Sequence[str]
) -> Iterator[dict[str, Any]]:
    context = {
        "benchmark": "speed",
        "device": processor(device),
        "torch": torch.__version__,
        "lipbound": lipbound.__version__,
        "seed": 0,
    }
    per_ms = bandwidth(device)
    for name in names:
        torch.manual_seed(0)
        yield {**context, **measure(name, device, methods, per_ms)}


def processor(device: torch.device) -> str:
    """Return the name of the processor for a record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads, {platform.machine()}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
