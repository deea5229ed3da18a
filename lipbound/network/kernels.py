"""Tell whether a network's operations run as the model of arithmetic assumes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lipbound.network.graph import Graph
from lipbound.network.rules.rounding import NotProved

EMULATED = ("CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATE_SINGLE_PRECISION")


@contextmanager
def ordinary_kernels() -> Iterator[None]:
    """Let PyTorch use only kernels that compute ordinary sums of products.

    A network that is certified as it runs in float32 or float64 must also be run like this.
    """
    before = torch.get_float32_matmul_precision()
    with torch.backends.cudnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def check_runs(model: nn.Module, arithmetic: str) -> None:
    """Check that a network may be certified in an arithmetic, before it runs.

    Raises:
        ValueError: If it may not, with what to change.
    """
    if arithmetic != "float32":
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ValueError(
                f"{name!r} is {tensor.dtype}, but arithmetic='float32' certifies a float32 "
                f"network; use model.float(), or arithmetic='float64'"
            )


def check_kernels(graph: Graph, example: Tensor) -> None:
    """Check that every sum of products is an ordinary one in the format of its arguments.

    Raises:
        NotProved: If a setting of PyTorch allows something else, with what to change.
    """
    device, single = example.device.type, example.dtype == torch.float32
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
        if single and torch.get_float32_matmul_precision() != "highest":
            raise NotProved(
                "float32 products may run in TF32; call "
                "torch.set_float32_matmul_precision('highest')"
            )
        for name in EMULATED:
            if os.environ.get(name, "0") not in ("", "0"):
                raise NotProved(f"{name} emulates products by integers; unset it")
        return
    if not single:
        return
    if torch.get_float32_matmul_precision() != "highest":
        raise NotProved(
            "float32 products may run in bfloat16; call "
            "torch.set_float32_matmul_precision('highest')"
        )
    if convolves and torch.backends.nnpack.is_available() and torch._C._get_nnpack_enabled():
        raise NotProved(
            "NNPACK may convolve by Winograd's method, whose rounding is not that of a sum; call "
            "torch.backends.nnpack.set_flags(False)"
        )
