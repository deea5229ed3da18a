"""Hold the asymptotic distribution of a layer's singular values against SVDs at input sizes.

    python -m benchmarks.spectra WEIGHTS.safetensors --sizes 16,32,64 --most 8192 --out FILE
    python -m benchmarks.spectra WEIGHTS.safetensors --sizes 64 --most 0 --counts 200 --out FILE

Every convolution of the file is compared at every input size. Convolutions have stride 1 and zero
padding of half the kernel here. A deviation is the distance of a quantile of ``spectrum`` from the
same quantile of the layer's matrix, divided by the largest singular value. An SVD is taken where
the smaller side of the matrix has at most ``--most`` rows. Otherwise the singular values below up
to ``--counts`` thresholds are counted (see ``benchmarks.inertia``), which gives an interval for the
largest deviation. Thresholds are placed where the interval is widest, until it is narrower than
0.001. Layers and sizes that the file already contains are skipped, or get more thresholds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigvalsh
from torch import Tensor

from benchmarks.inertia import below
from lipbound import spectrum
from lipbound.files import append, provenance, read
from lipbound.runtime import time_is_up, within
from lipbound.toeplitz import operator_matrix
from lipbound.weights import read_weights

NARROW = 1e-3  # of an interval for the largest deviation
MEMORY = {"cpu": 2**30, "cuda": 24 * 2**30}  # for the windows of all thresholds together


def compared(kernel: Tensor, size: int) -> dict[str, Any]:
    """Return the deviations of the quantiles of one convolution at an input size."""
    padding = tuple(m // 2 for m in kernel.shape[2:])
    dims = kernel.ndim - 2
    start = time.perf_counter()
    found = spectrum(kernel, padding=padding)
    seconds = time.perf_counter() - start
    matrix = operator_matrix(kernel, (size,) * dims, padding=padding)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    squares = eigvalsh(gram.toarray(), overwrite_a=True, check_finite=False)
    values = np.sqrt(np.maximum(squares, 0.0))
    levels = (np.arange(len(values)) + 0.5) / len(values)
    away = np.abs(found.quantile(levels) - values) / values[-1]
    return {
        "count": len(values),
        "largest": float(away.max()),
        "mean": float(away.mean()),
        "condition": float(min(found.condition, 1e300)),
        "effective_rank": found.effective_rank,
        "samples": found.samples,
        "spectrum_seconds": round(seconds, 3),
    }


@dataclass
class Deviation:
    """What counts of singular values below thresholds say about the largest deviation.

    Attributes:
        quantiles: Of the limit distribution, one for each singular value, in units of ``end``.
        end: Upper end for all singular values.
        below: Threshold, in units of ``end`` → number of singular values below it.
    """

    quantiles: NDArray[np.float64]
    end: float
    below: dict[float, int] = field(default_factory=dict)

    def edges(self) -> list[tuple[float, int]]:
        return [(0.0, 0), *sorted(self.below.items()), (1.0, len(self.quantiles))]

    def interval(self) -> tuple[float, float]:
        """Return a lower and an upper end for the largest deviation."""
        lower, (edges, q) = 0.0, (self.edges(), self.quantiles)
        for threshold, count in edges:  # σ of rank count < threshold ≤ σ of the next rank
            if count > 0:
                lower = max(lower, q[count - 1] - threshold)
            if count < len(q):
                lower = max(lower, threshold - q[count])
        uppers = [self._upper(*pair) for pair in pairwise(edges)]
        return lower, max(lower, *uppers)

    def _upper(self, left: tuple[float, int], right: tuple[float, int]) -> float:
        """Return an upper end for the deviations between two thresholds."""
        if left[1] == right[1]:
            return 0.0
        return float(
            max(self.quantiles[right[1] - 1] - left[0], right[0] - self.quantiles[left[1]])
        )

    def thresholds(self, count: int) -> list[float]:
        """Return the best next thresholds, if counts change evenly between those that are known."""
        edges, chosen = self.edges(), []
        known, rank = np.array(edges).T, len(self.quantiles)
        shift = known[1] - np.searchsorted(self.quantiles, known[0])
        shift[-1] = 0
        for _ in range(count):
            uppers = [self._upper(*pair) for pair in pairwise(edges)]
            place = int(np.argmax(uppers))
            (start, low), (end, high) = edges[place : place + 2]
            middle = (start + end) / 2
            guess = np.searchsorted(self.quantiles, middle) + np.interp(middle, known[0], shift)
            edges.insert(place + 1, (middle, int(np.clip(guess, low, min(high, rank)))))
            chosen.append(middle)
        return chosen


def counted(
    kernel: Tensor, size: int, seen: dict[str, Any], batch: int, device: str
) -> dict[str, Any]:
    """Count the singular values below more thresholds, after those of an earlier record."""
    if kernel.shape[0] > kernel.shape[1]:  # the transposed matrix has fewer rows
        kernel = kernel.transpose(0, 1).flip(2, 3)
    start = time.perf_counter()
    found = spectrum(kernel, padding=tuple(m // 2 for m in kernel.shape[2:]))
    seconds = time.perf_counter() - start
    end, count = found.bracket.upper, kernel.shape[0] * size**2
    quantiles = found.quantile((np.arange(count) + 0.5) / count) / end
    known = dict(zip(seen.get("thresholds", []), seen.get("below", []), strict=True))
    deviation = Deviation(quantiles, end, known)
    window = 8 * (kernel.shape[2] * kernel.shape[0] * size) ** 2
    chosen = deviation.thresholds(max(1, min(batch, MEMORY[device] // window)))
    start = time.perf_counter()
    counts = below(kernel, size, [end * t for t in chosen], device=device)
    deviation.below.update(zip(chosen, counts.below, strict=True))
    interval = deviation.interval()
    return {
        "count": count,
        "interval": list(interval),
        "thresholds": sorted(deviation.below),
        "below": [deviation.below[t] for t in sorted(deviation.below)],
        "growth": max(counts.growth, seen.get("growth", 0.0)),
        "samples": found.samples,
        "spectrum_seconds": round(seconds, 3),
        "count_seconds": round(time.perf_counter() - start + seen.get("count_seconds", 0.0), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("weights", type=Path, metavar="WEIGHTS")
    parser.add_argument("--sizes", default="16,32,64", help="input sizes, with commas")
    parser.add_argument("--most", type=int, default=8192, help="largest matrix to decompose")
    parser.add_argument("--counts", type=int, default=0, help="thresholds for larger matrices")
    parser.add_argument("--batch", type=int, default=48, help="thresholds to count together")
    parser.add_argument("--device", default="cpu", choices=MEMORY, help="where to count")
    parser.add_argument("--minutes", type=float, help="start no more after this time")
    parser.add_argument("--only", default="", help="layers whose names contain this text")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to append to")
    settings = parser.parse_args()
    seen = {(r["weights"], r["layer"], r["size"]): r for r in read(settings.out)}

    def compare(name: str, kernel: Tensor, size: int) -> bool:
        """Compare a layer, once or with more counts; return whether more are needed."""
        key = (settings.weights.name, name, size)
        old = seen.get(key, {})
        small = min(kernel.shape[:2]) * size ** (kernel.ndim - 2) <= settings.most
        even = kernel.ndim != 4 or any(m % 2 == 0 for m in kernel.shape[2:])
        full = even or len(old.get("thresholds", [])) >= settings.counts
        low, high = old.get("interval", (0.0, 0.0))
        if time_is_up() or (old and high - low <= NARROW) or (full and not small):
            return False
        if small:
            new = {**compared(kernel.double(), size), **provenance("cpu")}
        else:
            new = counted(kernel.double(), size, old, settings.batch, settings.device)
            new.update(provenance(settings.device))
        about = {"weights": key[0], "layer": name, "shape": list(kernel.shape), "size": size}
        seen[key] = {"experiment": "spectra", **about, **new}
        append(settings.out, seen[key])
        low, high = new.get("interval", [new.get("largest")] * 2)
        print(f"{name:30} {size:4} {low:.4f} to {high:.4f}", flush=True)
        return not small

    layers = [
        (name, kernel, size)
        for name, kernel in read_weights(settings.weights).items()
        if name.endswith("weight") and kernel.ndim >= 3 and settings.only in name
        for size in map(int, settings.sizes.split(","))
    ]
    layers.sort(key=lambda layer: min(layer[1].shape[:2]) * layer[2])  # small matrices first
    with within(settings.minutes):
        while layers:  # in rounds, so that all have a result when the time is up
            layers = [layer for layer in layers if compare(*layer)]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
