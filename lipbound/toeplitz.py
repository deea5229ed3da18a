"""Layers as matrices and operators at one input size, and the exact largest singular value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lipbound.geometry import Convolution, Layer, convolution
from lipbound.runtime import one_blas_thread

if TYPE_CHECKING:
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator

DENSE = 1500  # below this many rows or columns LAPACK's SVD is quicker than Lanczos


def operator_matrix(layer: Layer, input_shape: Sequence[int], **geometry: object) -> csr_array:
    """Build the layer's sparse matrix at an input size, from index arithmetic alone.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        input_shape: ``(*spatial)`` or ``(cin, *spatial)``.
        geometry: Options of a bare kernel.

    Returns:
        SciPy sparse float64, ``(cout·outputs, cin·inputs)``; rows and columns are channel-major,
        as ``flatten`` orders them.
    """
    from scipy.sparse import csr_array

    conv = convolution(layer, input_shape=input_shape, **geometry)  # type: ignore[arg-type]
    assert conv.input_size is not None
    size, result = conv.input_size, conv.output_size(conv.input_size)
    # The convolution described maps "fine" to "coarse"; the layer may be its adjoint.
    fine, coarse = (result, size) if conv.transposed else (size, result)
    kernel = conv.kernel.detach().cpu().double().numpy()
    cout, cin = kernel.shape[:2]
    sources = [_sources(conv, axis, fine[axis], coarse[axis]) for axis in range(conv.dims)]
    rows, columns, values = [], [], []
    coarse_index = np.arange(math.prod(coarse)).reshape(coarse)
    for tap in np.ndindex(kernel.shape[2:]):
        source = np.zeros(coarse, dtype=np.int64)
        valid = np.ones(coarse, dtype=bool)
        for axis in range(conv.dims):
            along = sources[axis][tap[axis]]
            shape = [-1 if a == axis else 1 for a in range(conv.dims)]
            source = source * fine[axis] + np.maximum(along, 0).reshape(shape)
            valid &= (along >= 0).reshape(shape)
        at, src = coarse_index[valid], source[valid]
        for out in range(cout):
            first = (out // (cout // conv.groups)) * cin
            for channel in range(cin):
                rows.append(out * coarse_index.size + at)
                columns.append((first + channel) * math.prod(fine) + src)
                values.append(np.full(at.size, kernel[(out, channel, *tap)]))
    whole = (cout * coarse_index.size, cin * conv.groups * math.prod(fine))
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    matrix = csr_array(entries, shape=whole)  # duplicates add up
    return matrix.T.tocsr() if conv.transposed else matrix


def _sources(conv: Convolution, axis: int, fine: int, coarse: int) -> NDArray[np.int64]:
    """Input index read by each tap at each output, −1 for a padded zero: ``(taps, outputs)``."""
    padded = conv.pixels(axis, fine)
    read = (
        np.arange(coarse)[None, :] * conv.stride[axis]
        + np.arange(conv.kernel.shape[2 + axis])[:, None] * conv.dilation[axis]
    )
    inside = read < padded.size  # output_padding can reach past the last tap
    return np.where(inside, padded[np.minimum(read, padded.size - 1)], -1)


def operator(layer: Layer, input_shape: Sequence[int], **geometry: object) -> LinearOperator:
    """The layer as a matrix-free SciPy ``LinearOperator``: torch's convolution and its adjoint.

    It takes the arguments of :func:`operator_matrix` and suits large layers.
    """
    from scipy.sparse.linalg import LinearOperator

    conv = convolution(layer, input_shape=input_shape, **geometry)  # type: ignore[arg-type]
    assert conv.input_size is not None
    inputs = (1, conv.in_channels, *conv.input_size)
    outputs = (1, conv.out_channels, *conv.output_size(conv.input_size))
    device = conv.kernel.device

    def tensor(vector: NDArray[Any], shape: Sequence[int]) -> Tensor:
        flat = np.ascontiguousarray(vector, dtype=np.float64).reshape(shape)
        return torch.from_numpy(flat).to(device)

    def matvec(vector: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            return apply(conv, tensor(vector, inputs)).cpu().numpy().ravel()

    def rmatvec(vector: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            return adjoint(conv, tensor(vector, outputs), inputs[2:]).cpu().numpy().ravel()

    shape = (math.prod(outputs), math.prod(inputs))
    return LinearOperator(shape, matvec=matvec, rmatvec=rmatvec, dtype=np.float64)


CONV = (functional.conv1d, functional.conv2d, functional.conv3d)
CONV_TRANSPOSE = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


def apply(conv: Convolution, x: Tensor) -> Tensor:
    """Apply the layer without bias to inputs ``(batch, channels, *spatial)``."""
    if conv.transposed:
        full = _spread(conv, x)
        for axis, size in enumerate(conv.output_size(x.shape[2:])):
            full = _window(full, 2 + axis, conv.padding[axis][0], size)
        return full
    for axis in range(conv.dims):
        if conv.padding_mode == "zeros":
            before, after = conv.padding[axis]
            x = _window(x, 2 + axis, -before, before + x.shape[2 + axis] + after)
            continue
        pixels = torch.from_numpy(conv.pixels(axis, x.shape[2 + axis])).to(x.device)
        x = x.index_select(2 + axis, pixels)
    return _gather(conv, x)


def adjoint(conv: Convolution, y: Tensor, input_size: Sequence[int]) -> Tensor:
    """Apply the transpose of :func:`apply` for inputs of spatial size ``input_size``."""
    if conv.transposed:
        for axis, size in enumerate(input_size):
            length = (size - 1) * conv.stride[axis] + conv.spans[axis] + 1
            y = _window(y, 2 + axis, -conv.padding[axis][0], length)
        return _gather(conv, y)
    x = _spread(conv, y)
    for axis, size in enumerate(input_size):
        if conv.padding_mode == "zeros":
            x = _window(x, 2 + axis, conv.padding[axis][0], size)
            continue
        pixels = torch.from_numpy(conv.pixels(axis, size)).to(y.device)
        x = _window(x, 2 + axis, 0, len(pixels))  # the stride may leave pixels unread
        shape = [*x.shape]
        shape[2 + axis] = size
        x = x.new_zeros(shape).index_add(2 + axis, pixels, x)
    return x


def _gather(conv: Convolution, x: Tensor) -> Tensor:
    weight = conv.kernel.to(x.dtype)
    if conv.dims == 0:
        return functional.linear(x, weight)
    return CONV[conv.dims - 1](x, weight, None, conv.stride, 0, conv.dilation, conv.groups)


def _spread(conv: Convolution, y: Tensor) -> Tensor:
    weight = conv.kernel.to(y.dtype)
    if conv.dims == 0:
        return functional.linear(y, weight.mT)
    transpose = CONV_TRANSPOSE[conv.dims - 1]
    return transpose(y, weight, None, conv.stride, 0, 0, conv.groups, conv.dilation)


def _window(x: Tensor, axis: int, start: int, size: int) -> Tensor:
    """Take ``size`` positions along an axis from ``start``, with zeros outside the tensor."""
    margins = (max(0, -start), max(0, start + size - x.shape[axis]))
    padded = functional.pad(x, [0, 0] * (x.ndim - axis - 1) + list(margins))
    return padded.narrow(axis, start + margins[0], size)


def exact(layer: Layer, input_shape: Sequence[int], **geometry: object) -> float:
    """Compute σ1 of the layer at an input size: by LAPACK if small, otherwise by ARPACK (IRAM).

    The result is accurate to float64 rounding, but it may be below or above σ1.

    Args:
        layer: Module or kernel, see :func:`lipbound.geometry.convolution`.
        input_shape: ``(*spatial)`` or ``(cin, *spatial)``.
        geometry: Options of a bare kernel.

    Example:
        >>> round(exact(torch.ones(1, 1, 3), (50,)), 4)  # 1 + 2cos(π/51)
        2.9962
    """
    conv = convolution(layer, input_shape=input_shape, **geometry)  # type: ignore[arg-type]
    linear = operator(conv, conv.input_size or ())
    scale = float(conv.kernel.detach().abs().max())
    if scale == 0:
        return 0.0
    if min(linear.shape) <= DENSE and max(linear.shape) <= 8 * DENSE:
        matrix = operator_matrix(conv, conv.input_size or ()).toarray() / scale
        return float(np.linalg.norm(matrix, 2)) * scale
    # The largest eigenvalues are close together, so the Krylov space is large. An eigenvalue's
    # error is the square of its vector's, so residuals of 1e-10 are enough.
    draw, options = np.random.default_rng(0), {"ncv": 40, "return_singular_vectors": False}
    return float(leading(linear * (1 / scale), draw, 1e-10, **options)[0]) * scale


def leading(linear: LinearOperator, draw: np.random.Generator, tol: float, **options: Any) -> Any:
    """Compute the largest singular value by ``svds`` from a random start.

    Args:
        tol: Tolerance for the residual of its square; the value itself is more accurate.
    """
    from scipy.sparse.linalg import svds

    start = draw.standard_normal(min(linear.shape))
    with one_blas_thread():  # more threads would slow torch's convolutions
        return svds(linear, k=1, v0=start, tol=math.sqrt(tol), **options)  # svds squares tol
