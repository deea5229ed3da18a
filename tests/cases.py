"""The cases every bound is held against: layers of each kind, kernels of each shape of trouble."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from lipbound.symbols import evaluate, grid, radians

# Rounding of the oracle itself (a dense float64 SVD of a small matrix), and of nothing else.
ROUNDING = 1 - 1e-13

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _cases() -> dict[str, dict]:
    """name → (dims, size, keyword arguments of the layer)."""
    cases: dict[str, dict] = {}

    def add(name: str, dims: int, size: int | tuple, **options) -> None:
        size = (size,) * dims if isinstance(size, int) else size
        options.setdefault("in_channels", 3)
        options.setdefault("out_channels", 2)
        cases[name] = {"dims": dims, "size": size, **options}

    add("1x1", 2, 4, kernel_size=1)
    add("3x3", 2, 5, kernel_size=3, padding=1)
    add("3x3 valid", 2, 5, kernel_size=3)
    add("3x3 wide padding", 2, 4, kernel_size=3, padding=3)
    add("even", 2, 5, kernel_size=2, padding="same")
    add("even 4", 2, 5, kernel_size=4, padding=2)
    add("rectangular", 2, (5, 6), kernel_size=(1, 4), padding=(0, 2))
    add("5x3", 2, (6, 5), kernel_size=(5, 3), padding=(2, 1))
    add("tall", 2, 5, kernel_size=3, padding=1, in_channels=1, out_channels=4)
    add("wide", 2, 5, kernel_size=3, padding=1, in_channels=4, out_channels=1)
    add("groups", 2, 5, kernel_size=3, padding=1, in_channels=4, out_channels=6, groups=2)
    add("depthwise", 2, 5, kernel_size=3, padding=1, in_channels=3, out_channels=3, groups=3)
    add("dilated", 2, 7, kernel_size=3, padding=2, dilation=2)
    for stride in (2, 3):
        add(f"stride {stride}", 2, 7, kernel_size=3, padding=1, stride=stride)
    add("stride 2 of 1x1", 2, 5, kernel_size=1, stride=2)
    add("stride 3x2 of 4x5", 2, (7, 6), kernel_size=(4, 5), padding=2, stride=(3, 2))
    add("stride 2 dilation 2", 2, 8, kernel_size=3, padding=2, stride=2, dilation=2)
    add("stride 3 dilation 2", 2, 9, kernel_size=3, padding=2, stride=3, dilation=2)
    add("stride 4 dilation 2", 2, 9, kernel_size=3, padding=2, stride=4, dilation=2)
    add(
        "stride 2 groups", 2, 6, kernel_size=3, padding=1, stride=2,
        in_channels=4, out_channels=4, groups=2,
    )  # fmt: skip
    for mode in ("circular", "reflect", "replicate"):
        add(mode, 2, 5, kernel_size=3, padding=1, padding_mode=mode)
        add(f"{mode} tiny", 2, 3, kernel_size=3, padding=1, padding_mode=mode)
        add(f"{mode} wide", 2, 4, kernel_size=2, padding=3, padding_mode=mode)
        add(f"{mode} 1d wide", 1, 5, kernel_size=3, padding=4, padding_mode=mode)
        for stride, n in itertools.product((2, 3), (6, 7)):
            add(
                f"{mode} stride {stride} of {n}", 2, n,
                kernel_size=3, padding=1, stride=stride, padding_mode=mode,
            )  # fmt: skip
        add(
            f"{mode} stride 2 dilation 2", 1, 9,
            kernel_size=3, padding=2, stride=2, dilation=2, padding_mode=mode,
        )  # fmt: skip
    add("replicate one pixel", 2, 1, kernel_size=3, padding=1, padding_mode="replicate")
    add("1d", 1, 9, kernel_size=5, padding=2)
    add("1d stride 2", 1, 9, kernel_size=4, padding=1, stride=2)
    add("3d", 3, 3, kernel_size=(3, 2, 3), padding=1, in_channels=2)
    add("3d stride 2", 3, 4, kernel_size=3, padding=1, stride=2, in_channels=2)
    add("transposed", 2, 4, kernel_size=3, padding=1, transposed=True)
    add(
        "transposed stride 2", 2, 4,
        kernel_size=3, padding=1, stride=2, output_padding=1, transposed=True,
    )  # fmt: skip
    add(
        "transposed stride 2 dilation 3", 2, 4, kernel_size=2, padding=1, stride=2, dilation=3,
        output_padding=2, transposed=True,
    )  # fmt: skip
    add(
        "transposed groups", 2, 4, kernel_size=3, stride=3, in_channels=4, out_channels=6,
        groups=2, transposed=True,
    )  # fmt: skip
    add("transposed 1d", 1, 5, kernel_size=4, stride=2, padding=1, transposed=True)
    add("transposed 3d", 3, 3, kernel_size=2, stride=2, in_channels=2, transposed=True)
    return cases


LAYERS = _cases()


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    options = dict(LAYERS[name])
    dims, _ = options.pop("dims"), options.pop("size")
    kinds = TRANSPOSED if options.pop("transposed", False) else CONVS
    return kinds[dims](**options, bias=False, dtype=dtype).requires_grad_(False)


def kernels(shape: tuple[int, ...], count: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """Random kernels and the structured ones that break careless bounds, float64."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    spatial = shape[2:]
    where = [torch.arange(s, dtype=torch.float64) for s in spatial]
    parity = sum(torch.meshgrid(*where, indexing="ij")) if spatial else torch.zeros(())
    found = {
        "ones": torch.ones(shape, dtype=torch.float64),
        "alternating": torch.ones(shape, dtype=torch.float64) * (-1) ** parity,
        # e^{iφ·h} is real only in pairs: cosines put the symbol's peak off every small grid
        "off-grid": torch.cos(0.3 + 0.77 * parity).expand(shape).clone(),
        "one tap": torch.zeros(shape, dtype=torch.float64),
        "difference": torch.zeros(shape, dtype=torch.float64),
        "rank one": torch.einsum("a,b->ab", normal(shape[0]), normal(shape[1])).reshape(
            *shape[:2], *[1] * len(spatial)
        )
        * normal(*spatial),
        "mixed scales": normal(*shape) * 10.0 ** torch.linspace(-6, 6, shape[0]).reshape(
            -1, *[1] * (len(shape) - 1)
        ),
    }  # fmt: skip
    found["one tap"].flatten(2)[..., -1] = normal(*shape[:2])
    found["difference"].flatten(2)[..., 0] = 1.0
    found["difference"].flatten(2)[..., -1] += -1.0
    for index in range(count - len(found)):
        found[f"random {index}"] = normal(*shape)
    return found


def spectral_norm(matrix) -> float:
    """Dense float64 SVD."""
    dense = matrix.toarray() if hasattr(matrix, "toarray") else np.asarray(matrix)
    return float(np.linalg.norm(dense, 2))


def energy_maxima(taps: Tensor, samples: tuple[int, ...]) -> Tensor:
    """max Σ_j |F_ij|² over the grid, straight from the symbol: ``(groups, rows)``."""
    symbols = evaluate(taps, radians(grid(samples), samples))
    return symbols.abs().square().sum(-1).amax(1)
