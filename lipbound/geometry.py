"""Describe any convolution, given as a module or as a bare kernel, by one dataclass.

All other modules use the result of :func:`convolution`, so layers are read and checked in one
place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Layer = Any  # nn.Module | Tensor | Convolution; `Any` keeps singledispatch and torch.compile simple

OPTIONS = (
    "stride", "dilation", "groups", "padding", "padding_mode", "transposed", "output_padding",
)  # fmt: skip
NUMPY_MODES = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}


@dataclass(frozen=True)
class Convolution:
    """Kernel and geometry of a convolution with D spatial axes (D = 0: a matrix, as in Linear).

    Attributes:
        kernel: ``(cout, cin / groups, *spatial)``. A transposed convolution is the adjoint of an
            ordinary one with the same weight tensor; ``kernel`` is that of the ordinary one.
        stride: Stride per axis.
        dilation: Dilation per axis.
        groups: Number of independent channel blocks.
        padding: ``(before, after)`` per axis.
        padding_mode: ``'zeros'``, ``'circular'``, ``'reflect'`` or ``'replicate'``.
        transposed: Whether the layer is the adjoint of the convolution described.
        output_padding: Extra rows of a transposed layer's output, per axis.
        input_size: The layer's spatial input size, or ``None`` for "any size".
    """

    kernel: Tensor
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[tuple[int, int], ...]
    padding_mode: str
    transposed: bool
    output_padding: tuple[int, ...]
    input_size: tuple[int, ...] | None

    @property
    def dims(self) -> int:
        return self.kernel.ndim - 2

    @property
    def spans(self) -> tuple[int, ...]:
        """Distance between the first and the last tap per axis, a·(s − 1)."""
        sizes = self.kernel.shape[2:]
        return tuple(a * (s - 1) for a, s in zip(self.dilation, sizes, strict=True))

    @property
    def in_channels(self) -> int:
        cout, cin = self.kernel.shape[:2]
        return int(cout if self.transposed else cin * self.groups)

    @property
    def out_channels(self) -> int:
        cout, cin = self.kernel.shape[:2]
        return int(cin * self.groups if self.transposed else cout)

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Spatial output size for the spatial input size ``size``."""
        axes = zip(size, self.spans, self.stride, self.padding, self.output_padding, strict=True)
        if self.transposed:
            return tuple((n - 1) * t + w + 1 - sum(p) + extra for n, w, t, p, extra in axes)
        return tuple((n + sum(p) - w - 1) // t + 1 for n, w, t, p, _ in axes)

    def pixels(self, axis: int, size: int) -> NDArray[np.int64]:
        """Input index that each padded position copies, −1 for a zero."""
        source, pad = np.arange(size), self.padding[axis]
        if self.padding_mode == "zeros":
            return np.pad(source, pad, constant_values=-1)
        return np.pad(source, pad, NUMPY_MODES[self.padding_mode])  # type: ignore[call-overload]

    def symbol_stride(self) -> tuple[int, ...]:
        """The stride whose polyphase symbol bounds this layer, per axis.

        Dilation and stride partly cancel. Taps at a·h, split by residue mod t, touch only the
        residues that are multiples of g = gcd(a, t). Since a/g and t/g are coprime, each phase has
        every (t/g)-th tap, at frequency (a/g)·ω and up to a unit phase per column. The supremum is
        therefore that of dilation 1 and stride t/g.

        Circular padding wraps around n pixels, so the rows kept by a stride t lie on the multiples
        of gcd(t, n). If n is unknown, they may lie on all pixels.
        """
        strides = self.stride
        if self.padding_mode == "circular":
            sizes = self.input_size or (1,) * self.dims
            strides = tuple(math.gcd(t, n) for t, n in zip(strides, sizes, strict=True))
        return tuple(t // math.gcd(a, t) for a, t in zip(self.dilation, strides, strict=True))

    def padding_gain(self) -> float:
        """Norm of the padding operator P: √(largest number of copies of one pixel).

        The layer is a zero-padded convolution after P. PᵀP is diagonal with the numbers of copies,
        which multiply over the axes. For circular padding the circulant's rows repeat instead, if
        the output is longer than the input. Without an input size the count holds for every size.
        """
        return math.sqrt(math.prod([self._copies(axis) for axis in range(self.dims)]))

    def _copies(self, axis: int) -> int:
        before, after = self.padding[axis]
        mode, size = self.padding_mode, self.input_size
        if mode == "zeros":
            return 1
        if mode == "circular":
            if size is not None:
                distinct = size[axis] // math.gcd(size[axis], self.stride[axis])
                return math.ceil(self.output_size(size)[axis] / distinct)
            excess = before + after - self.spans[axis]
            return 1 if excess <= 0 else 1 + math.ceil(excess / max(before, after))
        if size is not None:
            return int(np.bincount(self.pixels(axis, size[axis])).max())
        if mode == "reflect":
            return 1 + (before > 0) + (after > 0)
        return 1 + before + after  # replicate, for an input one pixel wide


def convolution(
    layer: Layer,
    *,
    stride: int | Sequence[int] | None = None,
    dilation: int | Sequence[int] | None = None,
    groups: int | None = None,
    padding: str | int | Sequence[int] | None = None,
    padding_mode: str | None = None,
    transposed: bool | None = None,
    output_padding: int | Sequence[int] | None = None,
    input_shape: Sequence[int] | None = None,
) -> Convolution:
    """Read a layer, or a bare kernel with options, into a :class:`Convolution`.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a weight tensor
            ``(cout, cin / groups, *spatial)`` (transposed: ``(cin, cout / groups, *spatial)``).
        stride: Stride, one int or one per axis. Default 1. This and the next six options are for
            bare kernels only.
        dilation: Dilation, one int or one per axis. Default 1.
        groups: Number of groups. Default 1.
        padding: ``'same'`` (default), ``'valid'``, or the amount on both sides.
        padding_mode: ``'zeros'`` (default), ``'circular'``, ``'reflect'``, ``'replicate'``.
        transposed: Whether the kernel is that of a transposed convolution. Default ``False``.
        output_padding: Output padding of a transposed kernel. Default 0.
        input_shape: ``(*spatial)`` or ``(cin, *spatial)``. Results then hold for this input size
            only and may be tighter.

    Raises:
        TypeError: If the layer is not a convolution, if it overrides ``forward``, or if its weight
            is not a real floating-point tensor.
        ValueError: If the kernel or an option is invalid.

    Example:
        >>> convolution(nn.Conv2d(3, 8, 5, stride=2, padding=2)).stride
        (2, 2)
    """
    values = (stride, dilation, groups, padding, padding_mode, transposed, output_padding)
    options: dict[str, Any] = dict(zip(OPTIONS, values, strict=True))
    conv = _unchecked(layer, options, input_shape)
    if not isinstance(layer, Convolution):
        check_values(conv.kernel)
    return conv


def _unchecked(
    layer: Layer, options: dict[str, Any], input_shape: Sequence[int] | None
) -> Convolution:
    """Read a layer as :func:`convolution` does, but do not look at the values of its kernel."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(layer, nn.Module | Convolution) and given:
        name = next(iter(given))
        raise TypeError(
            f"{name}={given[name]!r} was given with {type(layer).__name__}, which has its own; "
            f"remove the option, or pass the weight tensor"
        )
    if isinstance(layer, Convolution):
        conv = layer
    else:
        kernel = _kernel(layer)
        check_form(kernel)
        if isinstance(layer, _ConvNd):
            given = {name: getattr(layer, name) for name in OPTIONS}
            given["transposed"] = isinstance(layer, _ConvTransposeNd)  # forward goes by the type
        conv = _with_options(layer, kernel, given)
    return conv if input_shape is None else _with_input_shape(conv, input_shape)


def _kernel(layer: Layer) -> Tensor:
    """Return the weight of a layer that applies it unchanged, or the tensor itself."""
    if not torch.compiler.is_compiling() and own_forward(layer):
        raise TypeError(
            f"{type(layer).__name__} overrides forward and may not use its weight unchanged; if it "
            f"does, pass the weight tensor with its geometry; otherwise audit or exclude the layer"
        )
    if isinstance(layer, _ConvNd | nn.Linear):
        return weight_of(layer)
    if isinstance(layer, Tensor):
        return layer
    raise TypeError(
        f"expected a convolution, nn.Linear or a weight tensor, got {type(layer).__name__}; "
        f"for other layers use lipschitz(layer), for networks audit(model, input_shape)"
    )


def _with_options(layer: Layer, kernel: Tensor, given: dict[str, Any]) -> Convolution:
    """Check the options, and fill in the defaults of those that were not given."""
    dims = kernel.ndim - 2
    mode = given.get("padding_mode", "zeros")
    if mode not in NUMPY_MODES:
        raise ValueError(f"padding_mode={mode!r} is not one of {', '.join(NUMPY_MODES)}")
    group_count = given.get("groups", 1)
    if not isinstance(group_count, int) or group_count < 1 or kernel.shape[0] % group_count:
        raise ValueError(
            f"groups={group_count!r} must divide the kernel's first axis, {kernel.shape[0]}"
        )
    dilations = _per_axis("dilation", given.get("dilation", 1), dims, least=1)
    conv = Convolution(
        kernel=kernel,
        stride=_per_axis("stride", given.get("stride", 1), dims, least=1),
        dilation=dilations,
        groups=group_count,
        padding=_paddings(given.get("padding", "same"), kernel.shape[2:], dilations)
        if mode == "zeros" or not isinstance(layer, _ConvNd)
        else _padded_before(layer, dims),
        padding_mode=mode,
        transposed=bool(given.get("transposed", False)),
        output_padding=_per_axis("output_padding", given.get("output_padding", 0), dims, least=0),
        input_size=None,
    )
    if conv.transposed and mode != "zeros":
        raise ValueError(f"padding_mode={mode!r}: a transposed convolution supports only 'zeros'")
    return conv


def own_forward(layer: object) -> bool:
    """Whether a convolution, Linear or BatchNorm layer overrides PyTorch's forward.

    Such a layer may not use its weight unchanged: it may for example standardize or mask it.
    """
    if not isinstance(layer, _ConvNd | nn.Linear | _BatchNorm):
        return False
    parts = ("forward", "_conv_forward", "_call_impl", "__call__")
    if any(name in vars(layer) for name in parts):
        return True
    functions = [getattr(type(layer), name) for name in parts if hasattr(type(layer), name)]
    homes = [getattr(function, "__module__", None) or "" for function in functions]
    return any(not home.startswith("torch.nn.") for home in homes)


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight that the layer's next forward pass will use.

    The older hooks of PyTorch (``weight_norm``, ``spectral_norm``, ``prune`` in ``torch.nn.utils``)
    set the attribute ``weight`` at the start of a forward pass, so it is outdated until then. Other
    hooks are ignored.
    """
    for hook in () if torch.compiler.is_compiling() else layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            return hook.compute_weight(layer)
        if isinstance(hook, SpectralNorm) and hook.name == "weight":
            return hook.compute_weight(layer, do_power_iteration=False)
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight":
            return hook.apply_mask(layer)
    return layer.weight  # type: ignore[return-value]


def named(name: str, layer: Layer, **geometry: Any) -> Convolution:
    """Call :func:`convolution`; error messages begin with the layer's name."""
    return _named(name, lambda: convolution(layer, **geometry))


def named_unchecked(name: str, layer: Layer) -> Convolution:
    """Read a layer whose values the caller checks, for example with :func:`check_values`.

    A GPU would wait for every single check.
    """
    return _named(name, lambda: _unchecked(layer, {}, None))


def _named(name: str, read: Callable[[], Convolution]) -> Convolution:
    try:
        return read()
    except (ValueError, TypeError) as error:
        raise type(error)(_message(name, error)) from None


def _message(name: str, error: object) -> str:
    return f"{name}: {error}" if name else str(error)


def check_kernel(kernel: Tensor) -> None:
    """Check that the kernel is a finite, real, non-empty floating-point tensor."""
    check_form(kernel)
    check_values(kernel)


def check_form(kernel: Tensor) -> None:
    """Check that the kernel is a real, non-empty, dense floating-point tensor."""
    compiling = torch.compiler.is_compiling()  # a graph cannot branch on values
    if kernel.is_nested:
        raise TypeError("the kernel is a nested tensor; pass a dense tensor, for example kernel[0]")
    if not compiling and is_lazy(kernel):
        raise ValueError("the layer is lazy and has no weights yet; run one batch through it first")
    shape = tuple(kernel.shape)
    if not 2 <= kernel.ndim <= 5:
        raise ValueError(
            f"a kernel has 2 (a matrix) to 5 axes, (cout, cin, *spatial); got shape {shape}"
        )
    if kernel.numel() == 0:
        raise ValueError(f"the kernel is empty, shape {shape}; every axis must be at least 1")
    if not kernel.is_floating_point():
        kind, fix = "not floating-point", "pass real weights, for example kernel.float()"
        if kernel.is_complex():
            kind, fix = "complex", "pass its real form, [[Re K, -Im K], [Im K, Re K]]"
        elif kernel.is_quantized:
            kind, fix = "quantized", "use kernel.dequantize()"
        raise TypeError(f"the kernel's dtype {kernel.dtype} is {kind}; {fix}")
    if kernel.element_size() < 2:
        raise TypeError(f"the kernel's dtype {kernel.dtype} has no arithmetic; use kernel.float()")
    if kernel.is_meta:
        raise ValueError(
            f"the kernel of shape {shape} is on the meta device and has no values; load them first"
        )
    if kernel.layout is not torch.strided:
        raise TypeError(f"the kernel's layout {kernel.layout} is not dense; use kernel.to_dense()")


def check_values(kernel: Tensor, name: str = "") -> None:
    """Check that all entries are finite; an error begins with the layer's ``name``."""
    if torch.compiler.is_compiling():  # a graph cannot branch on values
        return
    # One reduction finds both: NaN and infinity appear in the minimum or the maximum.
    if not all(map(math.isfinite, map(float, torch.aminmax(kernel.detach())))):
        bad, shape = int((~torch.isfinite(kernel)).sum()), tuple(kernel.shape)
        error = f"the kernel of shape {shape} has {bad} NaN or infinite value(s)"
        raise ValueError(_message(name, f"{error}; a bound needs finite weights"))


def _with_input_shape(conv: Convolution, shape: Sequence[int]) -> Convolution:
    if isinstance(shape, int):
        raise ValueError(f"input_shape={shape} is not a shape; pass {(shape,) * conv.dims}")
    try:
        shape = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise ValueError(f"input_shape={tuple(shape)} must contain integers only") from None
    size = shape[-conv.dims :] if conv.dims else ()
    expected = f"({', '.join(['n'] * conv.dims)}) or ({conv.in_channels}, ...)"
    if len(shape) - conv.dims not in (0, 1) or any(n < 1 for n in shape):
        raise ValueError(f"input_shape={shape} does not fit the layer; it takes {expected}")
    if len(shape) > conv.dims and shape[0] != conv.in_channels:
        raise ValueError(
            f"input_shape={shape} has {shape[0]} channels, but the layer takes {conv.in_channels}"
        )
    limit = {"reflect": 1, "circular": 0}.get(conv.padding_mode)
    for n, pair in zip(size, conv.padding, strict=True):
        if limit is not None and max(pair) > n - limit:
            raise ValueError(
                f"{conv.padding_mode} padding {max(pair)} is wider than the input {size} allows; "
                f"it needs at least {max(pair) + limit} pixels on that axis"
            )
    if any(n < 1 for n in conv.output_size(size)):
        raise ValueError(
            f"input_shape={shape} is too small for the kernel {tuple(conv.kernel.shape)}; "
            f"the output would be empty"
        )
    return replace(conv, input_size=size)


def _per_axis(name: str, value: Any, dims: int, least: int) -> tuple[int, ...]:
    try:
        several = value if isinstance(value, Iterable) else (value,) * dims
        values = tuple(operator.index(v) for v in several)
    except TypeError:
        values = ()
    if len(values) != dims or any(v < least for v in values):
        raise ValueError(
            f"{name}={value!r} must be one integer ≥ {least}, or {dims} of them, one per axis"
        )
    return values


def _padded_before(layer: _ConvNd, dims: int) -> tuple[tuple[int, int], ...]:
    """Padding in modes other than zeros, which PyTorch fixes when it creates the layer."""
    amounts = [operator.index(n) for n in layer._reversed_padding_repeated_twice]
    if len(amounts) != 2 * dims or min(amounts, default=0) < 0:
        raise ValueError(
            f"_reversed_padding_repeated_twice={amounts} is not a padding of {dims} axes; create "
            f"the layer again"
        )
    return tuple((amounts[2 * i], amounts[2 * i + 1]) for i in reversed(range(dims)))


def _paddings(value: Any, sizes: Sequence[int], dilation: Sequence[int]) -> tuple[Any, ...]:
    if value == "same":
        totals = [a * (s - 1) for a, s in zip(dilation, sizes, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if value == "valid":
        value = 0
    if isinstance(value, str):
        raise ValueError(f"padding={value!r} is not 'same', 'valid', an integer or one per axis")
    return tuple((p, p) for p in _per_axis("padding", value, len(sizes), least=0))
