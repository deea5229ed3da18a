"""Random stacks of layers: a seed gives one geometry and many kernels of all families."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipbound.geometry import Convolution, convolution
from lipbound.symbols import WIDENINGS

KINDS = ("normal", "rank one", "flat", "two peaks", "off grid", "nearly zero", "smooth", "sparse")
FAMILIES = (*KINDS, "alternating", "equal", "delta", "mixed scales", "few bits")
DTYPES = (torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float16)
SCALES = (1e-20, 1e-3, 1.0, 1.0, 1e3, 1e18)  # squares of 1e20 overflow float32
RTOLS = (  # per number of axes; the smallest expose rounding errors of the bracket
    (1e-3, 1e-8, 1e-12),
    (1e-1, 1e-2, 1e-3, 1e-4, 1e-8),
    (1e-1, 1e-2, 1e-3, 1e-3, 1e-3, 1e-4, 1e-6),
    (1e-1, 1e-2, 1e-3, 1e-3, 1e-3, 1e-4),
)
SHORT, LONG = 72, 500  # largest sides of a layer's matrix, the shorter one first
MODULES = {
    False: (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    True: (nn.Linear, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}


@dataclass(frozen=True)
class Settings:
    """The options with which the bounds of a stack are called."""

    rtol: float = 1e-3
    samples: int | None = None
    widening: str = "best"
    iterations: int = 6
    sized: bool = False  # whether the grid bounds get the input size


@dataclass(frozen=True)
class Stack:
    """Layers of one geometry.

    Attributes:
        seed: Seed; a kernel depends only on it and the kernel's index.
        kernels: Weights as the module holds them, each in its own precision.
        options: Geometry, as the options of a bare kernel.
        size: A valid spatial input size, or ``None``.
        families: Family of each kernel.
        settings: Options of the bounds.
    """

    seed: int
    kernels: tuple[Tensor, ...]
    options: dict[str, Any]
    size: tuple[int, ...] | None
    families: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)

    @property
    def dims(self) -> int:
        return self.kernels[0].ndim - 2

    def doubles(self) -> Tensor:
        """Return the exact kernels in float64, ``(layers, cout, cin / groups, *spatial)``."""
        return torch.stack([kernel.double() for kernel in self.kernels])

    def modules(self) -> list[nn.Module]:
        """Return the layers as PyTorch modules."""
        return [module(kernel, self.options) for kernel in self.kernels]

    def features(self) -> list[str]:
        """Return the features of the geometry, for counting."""
        options = self.options
        found = [f"{self.dims}d" if self.dims else "matrix"]
        found += ["wide"] if min(self.kernels[0].shape[:2]) > 16 else []
        if self.dims:
            found += [options["padding_mode"]]
            found += ["transposed"] if options["transposed"] else []
            found += ["grouped"] if options["groups"] > 1 else []
            found += ["strided"] if max(options["stride"]) > 1 else []
            found += ["dilated"] if max(options["dilation"]) > 1 else []
            found += ["even kernel"] if any(s % 2 == 0 for s in self.kernels[0].shape[2:]) else []
        return found


def module(kernel: Tensor, options: dict[str, Any]) -> nn.Module:
    """Return the layer with this weight, without bias."""
    dims = kernel.ndim - 2
    transposed = bool(options.get("transposed"))
    kind: Any = MODULES[transposed][dims]
    if dims == 0:
        layer = kind(kernel.shape[1], kernel.shape[0], bias=False, device="meta")
    else:
        groups = options["groups"]
        channels = (kernel.shape[0], kernel.shape[1] * groups)
        arguments = {k: v for k, v in options.items() if k not in ("transposed", "output_padding")}
        if transposed:
            arguments["output_padding"] = options.get("output_padding", 0)
        layer = kind(
            *(channels if transposed else channels[::-1]),
            tuple(kernel.shape[2:]), bias=False, device="meta", **arguments,
        )  # fmt: skip
    layer.weight = nn.Parameter(kernel, requires_grad=False)
    return layer


def random_stack(seed: int, layers: int, device: str = "cpu") -> Stack:
    """Draw a geometry and ``layers`` kernels from the seed; wide layers get an eighth of them.

    Wide layers have so many channels that the search uses Lanczos instead of a full decomposition.
    """
    rng = np.random.default_rng(seed)
    wide, large = rng.random(2) < 0.05
    dims = int(rng.choice([0, 1, 2] if wide else [0, 1, 1, 2, 2, 2, 2, 2, 3]))
    most = (1, 13, 7, 4) if large and not wide else (1, 7, 4, 3)
    sizes = tuple(int(k) for k in rng.integers(1, most[dims] + 1, dims))
    groups = 1 if wide or not dims else int(rng.choice([1, 1, 1, 2, 3]))
    few, many = (17, 60) if wide else (1, 2) if large else (1, 5)
    shape = (groups * int(rng.integers(few, many + 1)), int(rng.integers(few, many + 1)), *sizes)
    options = _geometry(rng, dims, groups) if dims else {}
    settings = Settings(
        rtol=float(rng.choice([1e-1, 1e-2, 1e-3, 1e-3, 1e-3] if wide else RTOLS[dims])),
        samples=_samples(rng, sizes),
        widening=str(rng.choice(["best", "best", *WIDENINGS])),
        iterations=int(rng.integers(1, 9)),
        sized=bool(rng.random() < 0.5),
    )
    size = _size(rng, shape, options)
    layers = max(1, layers // 8) if wide else layers
    drawn = [_layer(np.random.default_rng([seed, i]), shape) for i in range(layers)]
    kernels = tuple(kernel.to(device) for _, kernel in drawn)
    return Stack(seed, kernels, options, size, tuple(kind for kind, _ in drawn), settings)


def _geometry(rng: np.random.Generator, dims: int, groups: int) -> dict[str, Any]:
    transposed = bool(rng.random() < 0.15)
    plain = ["zeros"] * 3
    modes = plain if transposed else [*plain, "circular", "reflect", "replicate"]
    stride = tuple(int(t) for t in rng.choice([1, 1, 1, 2, 2, 3], dims))
    dilation = tuple(int(a) for a in rng.choice([1, 1, 1, 2, 3], dims))
    padding: Any = tuple(int(p) for p in rng.integers(0, 3, dims))
    if max(stride) == 1 and not transposed:
        padding = (padding, "same", "valid")[int(rng.choice([0, 0, 1, 2]))]
    options = {
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "padding": padding,
        "padding_mode": str(rng.choice(modes)),
        "transposed": transposed,
    }
    if transposed:
        most = [max(t, a) for t, a in zip(stride, dilation, strict=True)]
        options["output_padding"] = tuple(int(rng.integers(0, n)) for n in most)
    return options


def _samples(rng: np.random.Generator, sizes: tuple[int, ...]) -> int | None:
    """Draw mostly coarse grids, for which the bound depends on the widening."""
    least = max([s for s in sizes if s > 1], default=1)  # must exceed the spread s − 1
    chosen = [least, least + 1, 2 * least, 10, 4 * least]
    pick = int(rng.integers(0, len(chosen) + 1))
    fine_is_cheap = len(sizes) < 3
    return None if pick == len(chosen) and fine_is_cheap else max(least, chosen[pick % 5])


def _size(rng: np.random.Generator, shape: tuple[int, ...], options: Any) -> tuple[int, ...] | None:
    """Draw a valid input size whose matrix is small enough for an SVD."""
    dims = len(shape) - 2
    for _ in range(20):
        size = tuple(int(n) for n in rng.integers(1, {0: 1, 1: 16, 2: 7, 3: 5}[dims] + 1, dims))
        try:
            conv = convolution(torch.zeros(shape), **options, input_shape=size)
        except ValueError:
            continue
        sides = sorted(matrix_shape(conv))
        if sides[0] <= SHORT and sides[1] <= LONG:
            return size
    return None


def matrix_shape(conv: Convolution) -> tuple[int, int]:
    """Return the rows and columns of the layer's matrix at its input size."""
    size = conv.input_size or ()
    outputs = conv.out_channels * math.prod(conv.output_size(size))
    return outputs, conv.in_channels * math.prod(size)


def _layer(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[str, Tensor]:
    family = str(rng.choice(FAMILIES))
    scale = float(rng.choice(SCALES))
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    most = torch.finfo(dtype).max / 2
    kernel = torch.from_numpy(structured(rng, family, shape) * scale)
    return family, kernel.clamp(-most, most).to(dtype)


def structured(rng: np.random.Generator, family: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a kernel of one of ``FAMILIES``."""
    where = np.indices(shape[2:]).sum(0) if len(shape) > 2 else np.zeros((), int)
    if family == "alternating":  # the peak is at the corner (π, π, ...) of the torus
        return rng.standard_normal((*shape[:2], *[1] * (len(shape) - 2))) * (-1.0) ** where
    if family == "equal":
        return np.ones(shape)
    if family == "delta":
        kernel = np.zeros(shape)
        kernel[tuple(rng.integers(0, n) for n in shape)] = rng.standard_normal()
        return kernel
    if family == "mixed scales":  # by output channel
        scales = 10.0 ** rng.uniform(-8, 8, (shape[0], *[1] * (len(shape) - 1)))
        return rng.standard_normal(shape) * scales
    if family == "few bits":
        return rng.integers(-2, 3, shape).astype(float)
    return random_kernel(rng, family, shape if shape[2:] else (*shape, 1)).reshape(shape)


def counted(stack: Stack) -> dict[str, Counter[str]]:
    """Count the layers of each feature, family and precision."""
    layers = len(stack.kernels)
    return {
        "kinds": Counter({feature: layers for feature in stack.features()}),
        "families": Counter(stack.families),
        "dtypes": Counter(str(k.dtype).removeprefix("torch.") for k in stack.kernels),
    }


def random_kernel(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a kernel of a family in ``KINDS``."""
    normal = rng.standard_normal(shape)
    cout, cin, *sizes = shape
    where = np.stack(np.meshgrid(*[np.arange(s) for s in sizes], indexing="ij"))
    flat = (1,) * len(sizes)
    if kind == "rank one":
        channels = np.outer(rng.standard_normal(cout), rng.standard_normal(cin))
        return channels.reshape(cout, cin, *flat) * rng.standard_normal(sizes)
    if kind == "flat":  # one tap per channel pair of an orthogonal matrix: σ1(F) = 1 everywhere
        side = max(cout, cin)
        orthogonal = np.linalg.qr(rng.standard_normal((side, side)))[0][:cout, :cin]
        kernel = np.zeros((cout, cin, math.prod(sizes)))
        chosen = rng.integers(0, math.prod(sizes), cin)
        kernel[:, np.arange(cin), chosen] = orthogonal
        return kernel.reshape(shape)
    if kind in ("two peaks", "off grid"):
        kernel = 1e-3 * normal
        for _ in range(2 if kind == "two peaks" else 1):
            wave = np.cos(np.tensordot(rng.uniform(0, np.pi, len(sizes)), where, 1))
            channels = np.outer(rng.standard_normal(cout), rng.standard_normal(cin))
            channels /= np.linalg.norm(channels)
            kernel = kernel + channels.reshape(cout, cin, *flat) * wave
        return kernel
    if kind == "nearly zero":
        return normal * 10.0 ** rng.uniform(-12, 0, shape)
    if kind == "smooth":
        return 1 + 0.3 * normal
    if kind == "sparse":
        return normal * (rng.random(shape) < 0.3)
    return normal
