"""Hold certified brackets against dense float64 truth on random layers of every kind.

    python -m lipbound.experiments.soundness --count 10000 --out record.json

A layer fails when lower > σ1(F) at its own frequency (dense SVD), when the largest σ1(F) of a
dense grid exceeds upper, or when σ1 of the layer's own matrix at a small input does; and, with
``input_shape``, when the matrix's σ1 leaves the bracket. Failures are printed with their seed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipbound import Convolution, __version__, bracket, convolution
from lipbound.files import write
from lipbound.symbols import evaluate, grid, radians, taps
from lipbound.toeplitz import operator_matrix

ROUNDING = 1e-12  # of the dense SVDs that serve as truth
KINDS = ("normal", "rank one", "flat", "two peaks", "off grid", "nearly zero", "smooth", "sparse")


@dataclass(frozen=True)
class Case:
    """One random layer: made from its seed alone."""

    seed: int
    kind: str
    kernel: Tensor
    options: dict[str, Any]
    size: tuple[int, ...]


def random_case(seed: int) -> Case:
    """A layer of any geometry, kernel family, precision and scale."""
    rng = np.random.default_rng(seed)
    dims = int(rng.choice([1, 2, 2, 2, 3]))
    most = {1: 6, 2: 4, 3: 3}[dims]
    sizes = tuple(int(k) for k in rng.integers(1, most + 1, dims))
    groups = int(rng.choice([1, 1, 1, 2, 3]))
    shape = (groups * int(rng.integers(1, 5)), int(rng.integers(1, 5)), *sizes)
    transposed = bool(rng.random() < 0.15)
    modes = (
        ["zeros"] if transposed else ["zeros", "zeros", "zeros", "circular", "reflect", "replicate"]
    )
    kind = str(rng.choice(KINDS))
    scale = float(rng.choice([1e-20, 1e-3, 1.0, 1.0, 1e3, 1e20]))
    dtype = (torch.float32, torch.float64, torch.bfloat16)[int(rng.choice([0, 0, 1, 1, 2]))]
    options = {
        "stride": tuple(int(t) for t in rng.integers(1, 4, dims)),
        "dilation": tuple(int(a) for a in rng.choice([1, 1, 2, 3], dims)),
        "groups": groups,
        "padding": tuple(int(p) for p in rng.integers(0, 3, dims)),
        "padding_mode": str(rng.choice(modes)),
        "transposed": transposed,
    }
    kernel = torch.from_numpy(random_kernel(rng, kind, shape) * scale).to(dtype)
    size = tuple(int(n) for n in rng.integers(3, {1: 12, 2: 8, 3: 5}[dims] + 1, dims))
    return Case(seed, kind, kernel, options, size)


def random_kernel(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """One kernel of a family in ``KINDS``."""
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


def violations(case: Case, rtol: float = 1e-3) -> list[str]:
    """What is wrong with a layer's brackets; empty when they hold."""
    wrong = []
    conv = convolution(case.kernel, **case.options)
    found = bracket(conv, rtol)
    if found.lower == found.upper == 0:
        return [] if not bool(case.kernel.any()) else ["a bracket of zero for a kernel that is not"]
    if not found.certified or found.lower > found.upper:
        wrong.append("not a certified interval")
    peak, at = _dense(conv, found.frequency)
    if found.lower > at * (1 + ROUNDING):
        wrong.append(f"lower {found.lower!r} is above σ1(F) = {at!r} at its own frequency")
    if found.upper < peak * (1 - ROUNDING):
        wrong.append(f"upper {found.upper!r} is below σ1(F) = {peak!r} on a dense grid")
    try:
        sized = convolution(conv, input_shape=case.size)
    except ValueError:
        return wrong  # the padding or the kernel does not fit this input
    dense = operator_matrix(sized, case.size).toarray()
    unit = float(np.abs(dense).max()) or 1.0  # 1e-20 squared would underflow nowhere, but be safe
    truth = float(np.linalg.norm(dense / unit, 2)) * unit
    if found.upper < truth * (1 - ROUNDING):
        wrong.append(f"upper {found.upper!r} is below σ1(M) = {truth!r} at {case.size}")
    finite = bracket(sized, rtol)
    if not finite.lower * (1 - ROUNDING) <= truth <= finite.upper * (1 + ROUNDING):
        wrong.append(f"σ1(M) = {truth!r} at {case.size} outside {finite}")
    return wrong


def _dense(conv: Convolution, frequency: tuple[float, ...]) -> tuple[float, float]:
    """Largest σ1(F) on a dense grid of the symbol that bounds the layer, and σ1 at a frequency.

    The lower end may belong to the strided symbol while the upper belongs to the other (circular
    padding of unknown size).
    """
    from dataclasses import replace

    coefficients = taps(conv).double()
    unit = float(coefficients.abs().max())
    samples = tuple(
        1 if m == 1 else {1: 512, 2: 60, 3: 16}[conv.dims] for m in coefficients.shape[3:]
    )
    points = radians(grid(samples, half=True), samples)
    peak = torch.linalg.matrix_norm(evaluate(coefficients / unit, points), 2).max()
    inner = taps(replace(conv, padding_mode="zeros")).double()
    place = torch.tensor([frequency], dtype=torch.float64).reshape(1, conv.dims)
    at = torch.linalg.matrix_norm(evaluate(inner / unit, place), 2).max()
    return float(peak) * unit, float(at) * unit


def reached(case: Case, rtol: float = 1e-3) -> bool:
    """Whether the bracket is as narrow as asked; only zero-padded layers have such a promise.

    A symbol that is flat on three axes runs into the search's limit and is left wider.
    """
    return bracket(case.kernel, rtol, **{**case.options, "padding_mode": "zeros"}).width <= rtol


def run(count: int, seed: int = 0, rtol: float = 1e-3) -> Iterator[tuple[Case, list[str]]]:
    """``count`` cases from consecutive seeds."""
    for index in range(seed, seed + count):
        case = random_case(index)
        yield case, violations(case, rtol)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="write the record here")
    chosen = parser.parse_args()
    start, failures, wide, kinds = time.perf_counter(), [], [], Counter[str]()
    for done, (case, wrong) in enumerate(run(chosen.count, chosen.seed, chosen.rtol), start=1):
        kinds[f"{case.kind}, {str(case.kernel.dtype).removeprefix('torch.')}"] += 1
        if not reached(case, chosen.rtol):
            wide.append(case.seed)
        for message in wrong:
            failures.append({"seed": case.seed, "message": message})
            print(f"seed {case.seed}: {message}", flush=True)
        if done % 500 == 0:
            print(f"{done} layers, {len(failures)} violations", flush=True)
    record = {
        "experiment": "soundness",
        "count": chosen.count,
        "first_seed": chosen.seed,
        "rtol": chosen.rtol,
        "violations": failures,
        "wider_than_rtol": wide,
        "kinds": dict(sorted(kinds.items())),
        "seconds": round(time.perf_counter() - start, 1),
        "device": f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "lipbound": __version__,
    }
    summary = f"{chosen.count} layers, {len(failures)} violations, {len(wide)} wide"
    print(f"{summary}, {record['seconds']} s")
    if chosen.out:
        write(chosen.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
