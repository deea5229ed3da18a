"""Run a model in eval mode, freeze its parameters, or record its layers' input shapes."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from lipbound.runtime import first_line, widened


@contextmanager
def in_eval(model: nn.Module) -> Iterator[nn.Module]:
    """Put every submodule in eval mode; restore each one's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


LINEAR_LAYERS = (_ConvNd, nn.Linear, _BatchNorm)


def input_shapes(model: nn.Module, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Record the input shape, without batch, of each convolution, Linear and BatchNorm layer."""
    seen: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, LINEAR_LAYERS):

            def record(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name, tuple(inputs[0].shape[1:]))

            hooks.append(layer.register_forward_pre_hook(record))
    try:
        parameter = next(model.parameters())
        with torch.no_grad(), in_eval(model):  # else BatchNorm would learn from the zeros
            model(torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of the parameters, so that an attack differentiates only the image."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def batch_norm_gains(
    variance: Tensor, weight: Tensor | None, eps: float, least: torch.dtype = torch.float64
) -> Tensor:
    """Factors γ/√(var + ε) per channel by which BatchNorm multiplies in eval mode.

    Computed at least in the precision ``least``. In float64 each has at most four roundings.
    """
    deviation = (widened(variance, least) + eps).sqrt()
    return 1 / deviation if weight is None else widened(weight, least) / deviation


def check_takes(model: nn.Module, inputs: Tensor) -> None:
    """Check that the model takes ``inputs``, by one forward pass in eval mode.

    Raises:
        ValueError: If the model does not take such inputs.
    """
    try:
        with in_eval(model), torch.no_grad():
            model(inputs.clone())
    except Exception as error:
        shape, said = tuple(inputs.shape[1:]), first_line(error)
        raise ValueError(
            f"the model does not take inputs of shape {shape}: {said}; give the shape of one "
            f"input, without the batch axis"
        ) from error


def bake(module: nn.Module, others: Container[int] = ()) -> None:
    """Replace the parametrized tensors of one module by plain parameters with the same values.

    An optimizer that holds an original parameter keeps it, unless its ``id`` is one of ``others``,
    which other modules use too.

    PyTorch's ``remove_parametrizations`` also removes a property from the module's class. Copies of
    the module share that class, and would break.
    """
    if not parametrize.is_parametrized(module):
        return
    listed = module._modules["parametrizations"]
    assert isinstance(listed, nn.ModuleDict)
    values = {name: getattr(module, name).detach().clone() for name in listed}
    originals: dict[str, Any] = {name: getattr(listed[name], "original", None) for name in listed}
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]
    for name, value in values.items():
        original = originals[name]
        own = isinstance(original, nn.Parameter) and id(original) not in others
        if own and original.shape == value.shape:
            original.data = value
        else:  # it is shared, or its gradient has another shape too
            original = nn.Parameter(value)
        module.register_parameter(name, original)


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy of a network in float64, with exactly the weights that the network uses.

    Raises:
        ValueError: If the network cannot be copied.
    """
    try:
        exact = copy.deepcopy(model).eval()
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied to float64 ({first_line(error)}); if it uses "
            f"torch.nn.utils.weight_norm, call remove_weight_norm first"
        ) from None
    everything = {id(parameter) for parameter in exact.parameters()}
    for module in list(exact.modules()):
        bake(module, everything)
    return exact.double()


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter that several modules hold."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {name for name, count in held.items() if count > 1}


def fingerprint(model: nn.Module) -> str:
    """Return a text that changes when a weight or a buffer of a network changes.

    It does not depend on the device, nor on a precision that represents the same numbers.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().cpu().double().contiguous().numpy().data)
    return digest.hexdigest()
