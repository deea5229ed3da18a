"""Tell whether a network's operations run as the model of arithmetic assumes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.network.graph import Graph
from lipbound.network.rules.rounding import NotProved

EMULATED = ("CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATE_SINGLE_PRECISION")
ALLOWED = {
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
}
"""Environment variable of a library → values with which float32 products stay in float32."""
PRODUCTS: dict[str, Any] = {
    "torch.backends.mkldnn.matmul": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    "torch.backends.mkldnn.conv": torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    "torch.backends.cuda.matmul": torch.backends.cuda.matmul,
}
"""Settings of PyTorch with a ``fp32_precision``, by their names."""


@contextmanager
def ordinary_kernels() -> Iterator[None]:
    """Let PyTorch use only kernels that compute ordinary sums of products.

    It switches off cuDNN, NNPACK, TF32 and bfloat16 products, and restores the settings at the end.
    A network that is certified as it runs in float32 or float64 must also be run like this.

    Example:
        >>> model, image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), torch.ones(1, 1, 3, 3)
        >>> from lipbound import audit, certify
        >>> report = audit(model, (1, 3, 3))
        >>> with ordinary_kernels():
        ...     radius = certify(model, report, image, "float32")
        ...     logits = model(image)
    """
    before = {name: setting.fp32_precision for name, setting in PRODUCTS.items()}
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # it cannot say what the newer settings above say
        older = "highest"
    with torch.backends.cudnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        torch.set_float32_matmul_precision("highest")  # both must agree, or PyTorch complains
        for setting in PRODUCTS.values():
            setting.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(older)
            for name, setting in PRODUCTS.items():
                setting.fp32_precision = "none"  # as a more general setting says
                if setting.fp32_precision != before[name]:
                    setting.fp32_precision = before[name]


def check_runs(model: nn.Module, arithmetic: str) -> None:
    """Check that a network may be certified in an arithmetic, before it runs.

    Raises:
        ValueError: If it may not, with what to change.
    """
    if arithmetic == "real":
        return
    for name, module in model.named_modules():
        if _compiled(module):
            which = f"module {name!r}" if name else "the network"
            raise NotProved(
                f"{which} is compiled, and torch.compile may replace operations, so "
                f"arithmetic={arithmetic!r} cannot certify what it runs; certify and run a network "
                f"without torch.compile and .compile()"
            )
    if arithmetic == "float64":
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ValueError(
                f"{name!r} is {tensor.dtype}, but arithmetic='float32' certifies a float32 "
                f"network; use model.float(), or arithmetic='float64', and run that network too"
            )


def _compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a module or to a function that it holds."""
    held = [*vars(module).values(), *vars(type(module)).values()]
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in held)
    )


def check_kernels(graph: Graph, example: Tensor) -> None:
    """Check that every sum of products is an ordinary one in the format of its arguments.

    Raises:
        NotProved: If a setting of PyTorch allows something else, with what to change.
    """
    device, single = example.device.type, example.dtype == torch.float32
    small = {torch.float32: 2.0**-127, torch.float64: 2.0**-1023}
    if not all(bool((torch.full((64,), n, dtype=kind) * 1.0).all()) for kind, n in small.items()):
        raise NotProved("small numbers are flushed to zero; call torch.set_flush_denormal(False)")
    if device not in ("cpu", "cuda"):
        raise NotProved(f"the kernels of {device!r} are not known; use the CPU or CUDA")
    if torch.is_autocast_enabled(device):
        raise NotProved("autocast computes in a lower precision; leave torch.autocast")
    convolves = any("conv" in call.op for call in graph.calls)
    if device == "cuda":
        if convolves and torch.backends.cudnn.enabled:
            raise NotProved(
                "cuDNN may convolve by Winograd's method or by FFT, whose rounding is not that of "
                "a sum; set torch.backends.cudnn.enabled = False"
            )
        for name in EMULATED:
            if os.environ.get(name, "0") not in ("", "0"):
                raise NotProved(f"{name} emulates products by integers; unset it")
    if not single:
        return
    for name, setting in PRODUCTS.items():
        if setting.fp32_precision not in ("none", "ieee"):
            raise NotProved(
                f"{name}.fp32_precision is {setting.fp32_precision!r}, so float32 products may run "
                f"in a lower precision; set it to 'ieee'"
            )
    for name, allowed in ALLOWED.items():
        if os.environ.get(name, "").lower() not in allowed:
            raise NotProved(
                f"{name}={os.environ[name]} lets float32 products run in a lower precision; "
                f"unset it"
            )
    if torch.backends.mkldnn.allow_tf32:
        raise NotProved(
            "torch.backends.mkldnn.allow_tf32 lets float32 products run in TF32; set it to False"
        )
    if device == "cpu" and platform.machine().lower() not in ("x86_64", "amd64"):
        check_depthwise(graph)
    nnpack = device == "cpu" and torch.backends.nnpack.is_available()
    if convolves and nnpack and torch._C._get_nnpack_enabled():
        raise NotProved(
            "NNPACK may convolve by Winograd's method, whose rounding is not that of a sum; call "
            "torch.backends.nnpack.set_flags(False)"
        )


def check_depthwise(graph: Graph) -> None:
    """Check that no convolution is depthwise with 3×3 taps, which ARM computes by Winograd.

    Raises:
        NotProved: If there is one.
    """
    for call in graph.calls:
        given = call.arguments()
        weight = given.get("weight")
        three = isinstance(weight, Tensor) and tuple(weight.shape[2:]) == (3, 3)
        if "conv" in call.op and three and given.get("groups", 1) > 1:
            raise NotProved(
                f"{call.op} in {call.module or 'the network'} is depthwise, which this processor "
                f"may compute by Winograd's method; use arithmetic='float64'"
            )
