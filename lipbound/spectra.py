r"""The asymptotic distribution of all singular values of a convolution, from its symbol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lipbound.bounds import Bracket, bracket
from lipbound.geometry import Convolution, Layer, convolution
from lipbound.results import Result, digits, finite
from lipbound.runtime import in_threads, one_blas_thread
from lipbound.symbols import evaluate, grid, radians, samples_per_axis, taps

LARGEST = 1 << 26  # limit for the entries of all symbols together; above it, use fewer points
CHUNK = 1 << 23  # entries of the symbols that are evaluated together
LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Spectrum(Result):
    r"""The limit distribution of a layer's singular values, sampled on a grid of frequencies.

    Let M be the layer's matrix at an input of n pixels per axis, and F its symbol, with s rows and
    t columns. The singular values of M are distributed as those of F in the limit (Avram 1988,
    Parter 1986, Tilli 1998; Yi 2020 for convolutional layers): for every continuous φ with compact
    support,

    .. math:: \frac{1}{\min(s, t)\, n^D} \sum_i \varphi(\sigma_i(M)) \to
        \frac{1}{(2\pi)^D} \int \frac{1}{\min(s, t)} \sum_{j=1}^{\min(s, t)}
        \varphi(\sigma_j(F(\omega)))\, d\omega.

    The padding changes a share of the singular values that vanishes as the input grows. For a
    circular layer of stride 1 without dilation, whose output is as large as its input, the two
    sides are equal on the grid of n points per axis. Of all numbers here, only ``bracket`` is
    proved; the others are asymptotic, and approximate on a finite grid.

    Attributes:
        values: Singular values on the grid, sorted.
        weights: Share of each value in the distribution; their sum is 1.
        samples: Grid points per axis.
        bracket: Certified interval of the largest singular value over all input sizes.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    samples: tuple[int, ...]
    bracket: Bracket

    def quantile(self, level: float | Sequence[float]) -> Any:
        """Return the smallest value that at least a share ``level`` of all values do not exceed.

        Example:
            >>> spectrum(torch.tensor([[[1.0, 1.0]]])).quantile(0.5)  # |1 + exp(iω)| = 2 |cos(ω/2)|
            1.4142135623730951
        """
        levels = np.asarray(level, dtype=np.float64)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"level={level!r} must lie in [0, 1]")
        reached = np.cumsum(self.weights)
        places = np.searchsorted(reached, levels * reached[-1] * (1 - 1e-12))
        found = self.values[np.minimum(places, len(self.values) - 1)]
        return float(found) if found.ndim == 0 else found

    def share_above(self, threshold: float) -> float:
        """Return the share of the singular values that are greater than a number."""
        return float(self.weights[self.values > threshold].sum())

    @property
    def condition(self) -> float:
        """Largest over smallest singular value on the grid; ∞ if the smallest is 0."""
        smallest, largest = float(self.values[0]), float(self.values[-1])
        return largest / smallest if smallest > largest * 1e-15 else math.inf

    @property
    def effective_rank(self) -> float:
        r"""Share of the singular values that a flat spectrum of equal entropy would have.

        Roy and Vetterli (2007): :math:`e^H / N`, where H is the entropy of the N singular values
        divided by their sum. It is 1 for an orthogonal layer.
        """
        largest = float(self.values[-1])
        if not largest:
            return 0.0
        shares = self.values / largest
        shares = shares / (self.weights @ shares)
        kept = shares > 0
        return math.exp(-float(self.weights[kept] @ (shares[kept] * np.log(shares[kept]))))

    @property
    def stable_rank(self) -> float:
        r"""Share :math:`\sum_i \sigma_i^2 / (N \sigma_1^2)`, with the certified lower end as σ1."""
        if not self.bracket.lower:
            return 0.0
        return min(1.0, float(self.weights @ (self.values / self.bracket.lower) ** 2))

    def title(self) -> str:
        points = " × ".join(map(str, self.samples)) or "1"
        return f"Singular values in the limit of large inputs ({points} frequencies)"

    def rows(self) -> list[dict[str, Any]]:
        """Return the quantiles at some levels."""
        found = self.quantile(LEVELS)
        return [
            {"share of the values": level, "singular value, at most": float(value)}
            for level, value in zip(LEVELS, found, strict=True)
        ]

    def summary(self) -> list[str]:
        low, high = digits(self.bracket.lower, 6, "down"), digits(self.bracket.upper, 6, "up")
        return [
            f"Condition number {self.condition:.4g}, effective rank {self.effective_rank:.3f}, "
            f"stable rank {self.stable_rank:.3f} (shares of the number of singular values).",
            f"{100 * self.share_above(1.0):.1f} % of the singular values are greater than 1.",
            f"The largest one lies in [{low}, {high}] for large inputs, which is proved; "
            "all other numbers are asymptotic.",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers above as plain data, without the samples."""
        return {
            "quantiles": {f"{level:g}": float(self.quantile(level)) for level in LEVELS},
            "condition": finite(self.condition),
            "effective_rank": self.effective_rank,
            "stable_rank": self.stable_rank,
            "share_above_1": self.share_above(1.0),
            "samples": list(self.samples),
            "bracket": self.bracket.to_dict(),
        }


@torch.no_grad()
def spectrum(layer: Layer, samples: int | None = None, **geometry: object) -> Spectrum:
    r"""Sample the asymptotic distribution of all singular values of a layer.

    See :class:`Spectrum` for the theorem. ``nn.Linear`` has one frequency, and its singular values
    are exact up to rounding.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a weight tensor with its
            geometry as options.
        samples: Grid points per frequency axis. The default is 16 for each tap on the axis after
            the first, and at least 32; it is less for layers with many channels. A stride divides
            the number of taps.
        geometry: Options of a bare kernel.

    Returns:
        Quantiles, condition number, effective rank, the share above a number, and the certified
        bracket of the largest singular value.

    Raises:
        ValueError: If the grid is too coarse for the kernel's degree.

    Example:
        >>> found = spectrum(torch.eye(4).reshape(4, 4, 1, 1))  # the identity
        >>> found.condition, found.effective_rank, found.share_above(0.5)
        (1.0, 1.0, 1.0)
    """
    end = bracket(layer, **geometry)  # type: ignore[arg-type]
    return sampled(convolution(layer, **geometry), end, samples)[0]  # type: ignore[arg-type]


def sampled(
    conv: Convolution, end: Bracket, samples: int | None = None
) -> tuple[Spectrum, NDArray[np.float64]]:
    """Return the spectrum of a layer with a known bracket, and σ1 at every point of its grid."""
    # As in Convolution.symbol_stride, but a large circular input may be of any size.
    stride = tuple(t // math.gcd(a, t) for a, t in zip(conv.dilation, conv.stride, strict=True))
    coefficients = taps(conv, stride).double()
    counts = samples_per_axis(
        coefficients.shape[3:], _fitting(coefficients) if samples is None else samples
    )
    points = grid(counts, half=True)
    values = singular_values(coefficients, radians(points, counts))
    mirrored = (-points) % torch.tensor(counts, dtype=points.dtype)
    twice = 1.0 + (mirrored != points).any(1).double()  # −ω has the same values as ω
    each = (twice[:, None] / math.prod(counts)).expand_as(values).flatten()
    ordered, order = values.flatten().sort()
    rows, columns = conv.kernel.shape[0] // conv.groups, conv.kernel.shape[1]
    # Pixels that no tap touches have singular values of 0.
    share = values.shape[1] / (conv.groups * min(rows, columns * math.prod(conv.stride)))
    weights = (share * each[order] / values.shape[1]).numpy()
    found = ordered.numpy()
    if share < 1:
        found, weights = np.insert(found, 0, 0.0), np.insert(weights, 0, 1 - share)
    heights = np.full(counts, float(values.max()))
    for places in (points, mirrored) if counts else ():
        heights[tuple(places.T.numpy())] = values.amax(1).numpy()
    return Spectrum(found, weights, counts, end), heights


def singular_values(coefficients: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return all singular values at each frequency, ``(P, groups · min(rows, columns))``."""
    groups, rows, columns = coefficients.shape[:3]
    size = max(1, CHUNK // (groups * rows * columns))
    parts = [
        _svdvals(evaluate(coefficients, part)).transpose(0, 1).flatten(1)
        for part in frequencies.split(size)
    ]
    return torch.cat(parts)


def _svdvals(blocks: torch.Tensor) -> torch.Tensor:
    """As ``torch.linalg.svdvals``, whose threads wait for each other where other work runs."""
    if blocks.device.type != "cpu":
        return torch.linalg.svdvals(blocks).cpu()
    stack = blocks.flatten(0, 1).numpy()
    found = np.empty((len(stack), min(stack.shape[1:])))

    def work(part: slice) -> None:
        found[part] = np.linalg.svd(stack[part], compute_uv=False)

    with one_blas_thread():
        in_threads(work, len(stack))
    return torch.from_numpy(found).unflatten(0, blocks.shape[:2])


def _fitting(coefficients: torch.Tensor) -> int | None:
    """Return a number of points for which all symbols fit into ``LARGEST``; ``None`` if any do."""
    sizes = [m for m in coefficients.shape[3:] if m > 1]
    entries = math.prod(coefficients.shape[:3])
    if not sizes or math.prod(samples_per_axis(sizes, None)) * entries <= LARGEST:
        return None
    return max(9, max(sizes), int((LARGEST / entries) ** (1 / len(sizes))))
