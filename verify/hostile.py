"""Call every public function with numerically difficult kernels.

    python -m verify hostile [--large] --out FILE

Every entry must return a number that is at least σ1 of the layer's matrix at a small input (a dense
float64 SVD of the kernel divided by a power of two), or refuse with one line. ``--large`` also runs
large layers, each in its own process, and records their time and memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipbound import BOUNDS, Penalty, audit, bound, bracket, constrain, lipschitz
from lipbound.network.audits import audit_weights
from lipbound.toeplitz import operator_matrix

SIZE = (6, 6)
ROUNDING = 1e-12  # rounding error of the dense SVD that serves as truth
REFUSALS = (ValueError, TypeError)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def _integers(unit: float) -> Tensor:
    return (3 * _normal(3, 2, 3, 3)).round() * unit


def _flat() -> Tensor:
    kernel = torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 2] = torch.linalg.qr(_normal(4, 4))[0]
    return kernel


def _signs() -> Tensor:
    row = torch.tensor([1.0, -1.0, 1.0])
    return (row * row[:, None]).expand(4, 4, 3, 3)


def _spread(shape: tuple[int, ...]) -> Tensor:
    return 10.0 ** torch.linspace(-30, 30, math.prod(shape), dtype=torch.float64).reshape(shape)


KERNELS: dict[str, Callable[[], Tensor]] = {
    "subnormal float64": lambda: _integers(2.0**-1074),
    "subnormal float32": lambda: _integers(2.0**-149).float(),
    "subnormal float16": lambda: _integers(2.0**-24).half(),
    "1e-30": lambda: (_normal(3, 2, 3, 3) * 1e-30).float(),
    "1e30": lambda: (_normal(3, 2, 3, 3) * 1e30).float(),
    "1e30 in float64": lambda: _normal(3, 2, 3, 3) * 1e30,
    "the end of float32": lambda: torch.full((3, 2, 3, 3), 3e38),
    "the end of float16": lambda: torch.full((3, 2, 3, 3), 6e4).half(),
    "mixed scales by channel": lambda: (_normal(4, 3, 3, 3) * _spread((4, 1, 1, 1))).float(),
    "mixed scales by entry": lambda: (_normal(4, 3, 3, 3) * _spread((4, 3, 3, 3))).float(),
    "mixed scales in float64": lambda: _normal(4, 3, 3, 3) * _spread((4, 3, 3, 3)),
    "rank one": lambda: torch.einsum(
        "a,b,c,d->abcd", *[_normal(n, seed=n) for n in (4, 3, 2, 5)]
    ).float(),
    "orthogonal": _flat,
    "all equal": lambda: torch.ones(4, 4, 3, 3),
    "alternating": _signs,
    "zero": lambda: torch.zeros(2, 2, 3, 3),
    "negative zero": lambda: -torch.zeros(2, 2, 3, 3),
    "one entry": lambda: torch.nn.functional.pad(torch.ones(2, 2, 1, 1), (1, 1, 1, 1)),
    "one channel of zeros": lambda: _normal(4, 3, 3, 3).float() * torch.eye(4, 3)[..., None, None],
    "13x13": lambda: _normal(2, 2, 13, 13).float(),
    "bfloat16": lambda: _normal(3, 2, 3, 3).bfloat16(),
    "transposed view": lambda: _normal(3, 2, 3, 3).float().permute(1, 0, 3, 2),
    "channels_last": lambda: _normal(3, 2, 3, 3).float().to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1, 1, 3, 3).expand(3, 2, 3, 3),
    "every other entry": lambda: _normal(3, 4, 6, 3).float()[:, ::2, ::2],
}
"""Name → function that makes a kernel with two spatial axes."""


def layer_of(kernel: Tensor) -> nn.Conv2d:
    """Return a layer whose weight is this tensor itself, not a copy."""
    height, width = kernel.shape[2:]
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], (height, width), padding="same", bias=False)
    layer.weight = nn.Parameter(kernel, requires_grad=not kernel.is_inference())
    return layer


def truth(kernel: Tensor) -> tuple[float, float]:
    """Return σ1 of the layer's matrix at ``SIZE`` divided by a power of two, and that power."""
    wide = kernel.detach().double()
    largest = float(wide.abs().max())
    if largest == 0:
        return 0.0, 1.0
    unit = 2.0 ** math.frexp(largest)[1] / 2
    return float(np.linalg.norm(operator_matrix(wide / unit, SIZE).toarray(), 2)), unit


def _file(kernel: Tensor) -> float:
    """Return the bound from ``lipbound audit FILE --json``."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file({"conv.weight": kernel.detach().clone().contiguous()}, path)
        from lipbound.weights import read_weights

        return audit_weights(read_weights(path)).layers[0].bracket.upper


def _penalty(layer: nn.Module) -> float:
    (value,) = Penalty(nn.Sequential(layer)).bounds().values()
    return value


ENTRIES: dict[str, Callable[[Tensor], float]] = {
    "bracket": lambda k: bracket(k).upper,
    "bracket, sized": lambda k: bracket(k, input_shape=SIZE).upper,
    **{
        f"bound, {name}": lambda k, name=name: float(bound(k, name).detach())  # type: ignore[misc]
        for name in BOUNDS
    },
    "lipschitz": lambda k: float(lipschitz(layer_of(k)).detach()),
    "audit": lambda k: audit(nn.Sequential(layer_of(k), nn.ReLU()), (k.shape[1], *SIZE)).upper,
    "audit FILE": _file,
    "Penalty": lambda k: _penalty(layer_of(k)),
}
"""Name → function that returns an upper bound for the layer of a kernel."""


def outcome(entry: str, kernel: Tensor) -> str:
    """Return ``sound``, ``refused: …`` or ``wrong: …``."""
    try:
        found = ENTRIES[entry](kernel)
    except REFUSALS as error:
        return f"refused: {error}"
    value, unit = truth(kernel)
    good = found / unit >= value * (1 - ROUNDING)  # dividing by a power of two is exact
    return "sound" if good else f"wrong: {found!r} is below {value!r} times {unit!r}"


def limited(kernel: Tensor, norm: float = 1.0) -> str:
    """Check ``constrain`` likewise: no NaN in training mode, at most the norm in eval mode."""
    try:
        layer = constrain(layer_of(kernel.detach().clone()), norm)
    except REFUSALS as error:
        return f"refused: {error}"
    if not bool(layer.train().weight.isfinite().all()):
        return "wrong: weights that are no numbers in training"
    value, unit = truth(layer.eval().weight)
    good = value * unit <= norm * (1 + ROUNDING)
    return "sound" if good else f"wrong: {value * unit!r} is above {norm!r}"


def bracketed(kernel: Tensor) -> str:
    """Check a bracket likewise: its lower end is at most σ1, and its ends are in order."""
    found = bracket(kernel, input_shape=SIZE)
    value, unit = truth(kernel)
    good = found.lower / unit <= value * (1 + ROUNDING) and found.lower <= found.upper
    return "sound" if good else f"wrong: {found} does not hold {value!r} times {unit!r}"


def everything(kernel: Tensor, entries: Sequence[str] = tuple(ENTRIES)) -> dict[str, str]:
    """Return entry → outcome."""
    results = {entry: outcome(entry, kernel) for entry in entries}
    return {**results, "lower end": bracketed(kernel), "constrain": limited(kernel)}


LARGE: dict[str, tuple[tuple[int, ...], int, tuple[str, ...]]] = {
    "31x31, 8 channels": ((8, 8, 31, 31), 1, (*BOUNDS, "Penalty", "constrain")),
    "31x31 depthwise, 96 channels": ((96, 1, 31, 31), 96, (*BOUNDS, "Penalty")),
    "4096 channels, depthwise 3x3": ((4096, 1, 3, 3), 4096, (*BOUNDS, "Penalty", "constrain")),
    "4096 to 8 channels, 3x3": ((8, 4096, 3, 3), 1, (*BOUNDS, "Penalty", "constrain")),
    "4096x4096, 1x1": ((4096, 4096, 1, 1), 1, ("spectral", "lipbound", "Penalty")),
    "4096x4096, 3x3": ((4096, 4096, 3, 3), 1, ("lipbound", "Penalty")),  # 600 MB of weights
}
"""Name → shape, groups and entries to run."""


def large(name: str, method: str) -> dict[str, Any]:
    """Run one large layer in this process; return its bound, a lower bound, time and memory."""
    shape, groups, _ = LARGE[name]
    kernel = _normal(*shape).float() / math.sqrt(math.prod(shape[1:]))
    layer = nn.Conv2d(groups * shape[1], shape[0], shape[2], groups=groups, bias=False)
    layer.weight = nn.Parameter(kernel, requires_grad=False)
    start = time.perf_counter()
    if method == "Penalty":
        value = _penalty(layer)
    elif method == "constrain":
        value = bracket(constrain(layer, 0.5).eval()).upper
    else:
        value = float(bound(layer, method))
    seconds = time.perf_counter() - start
    limits = (0.0, 0.500001) if method == "constrain" else (_attained(kernel, groups), math.inf)
    return {
        "layer": name,
        "method": method,
        "value": value,
        "sound": limits[0] <= value <= limits[1],
        "seconds": round(seconds, 1),
        "peak_mb": _peak(),
    }


def _peak() -> int:
    """Return the peak memory of this process in MiB; getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


def _attained(kernel: Tensor, groups: int) -> float:
    """Return a lower bound of σ1: ‖Kv‖ at frequency zero after a few power steps in float64."""
    matrices = kernel.double().flatten(2).sum(2).reshape(groups, -1, kernel.shape[1])
    vector = torch.ones(groups, kernel.shape[1], 1, dtype=torch.float64)
    for _ in range(20):
        vector = matrices.mT @ (matrices @ vector)
        vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return float(torch.linalg.vector_norm(matrices @ vector, dim=1).max()) * (1 - ROUNDING)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", action="store_true", help="also run large layers (minutes)")
    parser.add_argument("--one", nargs=2, metavar=("LAYER", "METHOD"), help=argparse.SUPPRESS)


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    if chosen.one:
        print(json.dumps(large(*chosen.one)))
        return {}, []
    outcomes = {}
    for name, make in KERNELS.items():
        outcomes[name] = everything(make())
        print(name, flush=True)
    record: dict[str, Any] = {"outcomes": outcomes}
    if chosen.large:
        record["large"] = []
        for name, (*_, methods) in LARGE.items():
            for method in methods:
                run = [sys.executable, "-m", "verify", "hostile", "--one", name, method]
                done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
                record["large"].append(json.loads(done.stdout.splitlines()[0]))
                print(record["large"][-1], flush=True)
    wrong = [
        f"{kernel}, {entry}: {said}"
        for kernel, found in outcomes.items()
        for entry, said in found.items()
        if said.startswith("wrong")
    ] + [f"{r['layer']}, {r['method']}" for r in record.get("large", []) if not r["sound"]]
    return record, wrong
