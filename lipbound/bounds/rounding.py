r"""Rounding errors of the bounds, and how the bounds are enlarged to cover them.

Every bound is computed in float64, to which all weights convert exactly (the spectral search proves
cells with enough margin in float32, see :mod:`.supremum.single`). The kernel is first divided by a
power of two near its largest entry, and the bound is then enlarged by an a-priori bound of its
rounding error. Notation: :math:`u = 2^{-53}`, :math:`\gamma_k = ku/(1 - ku)`. A float64
inner product of length k, in any order, with or without fused multiply-adds, errs by at most
:math:`\gamma_k \sum |x_i y_i|` (Higham, *Accuracy and Stability*, §3.1); a complex one by at most
:math:`\sqrt2\,\gamma_{2k}\sum|x_i||y_i|`, being two real ones of length 2k.

The guarantee is for the layer in real arithmetic with exactly these weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipbound.bounds.lapack import factor
from lipbound.geometry import Convolution
from lipbound.runtime import in_threads, wide
from lipbound.symbols import taps

UNIT = 2.0**-53
LAPACK_FROM = 24  # rows from which LAPACK is faster


def gamma(count: float, unit: float = UNIT) -> float:
    """Relative error of ``count`` consecutive roundings, in float64 by default."""
    return count * unit / (1 - count * unit)


def gamma_complex(count: float) -> float:
    """Relative error of a complex float64 inner product of length ``count``."""
    return math.sqrt(2) * gamma(2 * count)


def symbol_error(sizes: Sequence[int]) -> float:
    r"""Error of a computed symbol's entries, relative to :math:`\sum_h |K_h|` entry by entry.

    An angle h·ω is a short inner product of numbers below 2πm, with an error of a few u of its
    size. Its sine and cosine add one rounding, and the sum over the taps adds the rest.
    """
    angle = 4 * math.pi * sum(sizes) + 8
    return gamma_complex(math.prod(sizes) + angle)


def cholesky_error(size: int) -> float:
    """‖LL* − B‖ of a computed Cholesky factor, relative to tr B; see ``spectral_norm_above``.

    It uses n + 2, not the theorem's n + 1, for libraries that multiply by a pivot's reciprocal.
    """
    return gamma_complex(size + 2) / (1 - gamma_complex(size + 2))


def positive(matrices: Tensor) -> NDArray[np.bool_]:
    """Test which Hermitian complex128 matrices have a Cholesky factor in floating point.

    Args:
        matrices: ``(P, n, n)``, contiguous; overwritten on the CPU.
    """
    if matrices.device.type != "cpu" or matrices.shape[-1] < LAPACK_FROM:
        return (torch.linalg.cholesky_ex(matrices).info == 0).cpu().numpy()
    stack, found = matrices.numpy(), np.empty(len(matrices), dtype=bool)

    def work(part: slice) -> None:
        found[part] = factor(stack[part])

    in_threads(work, len(stack), None if matrices.shape[-1] >= 48 else 1)
    return found


def shorter_side_first(matrices: Tensor) -> Tensor:
    """The matrices or their adjoints, whichever have no more rows than columns."""
    return matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mH


class Scaled:
    """A layer's kernel at a scale where squares neither overflow nor underflow in float64.

    A float64 kernel is divided by a power of two near its largest entry, and :meth:`finish`
    multiplies by it again, rounding up. Kernels of lower precision are not scaled: no square of
    theirs is below 1e-90 or above 1e77.

    Args:
        conv: The layer.

    Attributes:
        kernel: The scaled kernel, in its own precision.
        zero: Whether the kernel is zero, set by :meth:`taps`; a tensor, so that nothing is read
            back from a device.
    """

    def __init__(self, conv: Convolution):
        check_subnormals(conv.kernel)
        self.conv, self.kernel = conv, conv.kernel
        self.dtype = wide(conv.kernel.dtype)
        self.device = conv.kernel.device
        self.gain = conv.padding_gain()
        self.scale: float | Tensor = 1.0
        self.zero: Tensor | None = None
        if conv.kernel.dtype == torch.float64:
            largest = self._largest()
            # 2^-e is exact, and finite up to e = −1022; smaller kernels end near 2^-52, not 1.
            exponent = torch.where(largest > 0, largest, 1.0).log2().floor().clamp(-1022, 1022)
            self.scale = exponent.exp2()
            self.kernel = conv.kernel / self.scale

    def _largest(self) -> Tensor:
        least, most = torch.aminmax(self.kernel.detach())
        return torch.maximum(-least, most)

    def taps(self) -> Tensor:
        """The taps of the symbol in float64, ``(groups, rows, columns, *m)``.

        A zero kernel is replaced by ones, and :meth:`finish` multiplies its bound by zero: bound
        and gradient are then exactly zero, and no method has to handle this case.
        """
        self.zero = self._largest() == 0
        coefficients = taps(replace(self.conv, kernel=double(self.kernel)))
        return coefficients + self.zero.to(coefficients)

    def finish(self, value: Tensor, relative: float) -> Tensor:
        """Enlarge by the relative error (and the last few roundings), rescale, round up."""
        value = value * (self.gain * (1 + relative + 16 * UNIT))
        value = value * self.scale
        value = value if self.zero is None else torch.where(self.zero, value * 0, value)
        return round_up(value, self.dtype).to(self.device)


def double(tensor: Tensor) -> Tensor:
    """Convert to float64 exactly; on a device without float64, on the CPU.

    Raises:
        ValueError: If the processor flushes subnormal entries to zero.
    """
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    check_subnormals(tensor)
    return tensor.to(torch.float64)


def check_subnormals(tensor: Tensor) -> None:
    """Check that the processor does not flush subnormal entries to zero.

    Raises:
        ValueError: If it does. The message says how to switch that off.
    """
    if sys.float_info.min / 2 == 0 and bool(_subnormal(tensor.detach()).any()):
        raise ValueError(
            "the kernel has subnormal entries, which this process flushes to zero; call "
            "torch.set_flush_denormal(False) first"
        )


def _subnormal(tensor: Tensor) -> Tensor:
    """Find subnormal entries by their bits, because comparisons may flush them to zero."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    least = torch.tensor(torch.finfo(tensor.dtype).tiny, dtype=tensor.dtype).view(kind).item()
    size = tensor.contiguous().view(kind) & torch.iinfo(kind).max
    return (size > 0) & (size < least)


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a non-negative float64 number, rounding up; zero stays zero. Differentiable."""
    cast = value.to(dtype)
    with torch.no_grad():
        above = torch.nextafter(cast, torch.full_like(cast, math.inf))
        # Neighbouring floats differ exactly; an infinite bound has no neighbour above.
        step = torch.where((value > 0) & torch.isfinite(cast), above - cast, 0.0)
    return cast + step


def normalised(tensor: Tensor) -> tuple[Tensor, float]:
    """The tensor in float64, divided by a power of two near its largest entry, and that power.

    Squares of its entries do not overflow, and underflow only where they are negligible.
    """
    wide = double(tensor.detach())
    largest = float(wide.abs().amax()) if wide.numel() else 0.0
    if not 0 < largest < math.inf:
        return wide, 1.0
    exponent = math.frexp(largest)[1] - 1
    half = exponent // 2  # 2^-e overflows for the smallest subnormals
    return wide / 2.0**half / 2.0 ** (exponent - half), 2.0**exponent


def products_above(numbers: Tensor, factor: float) -> Tensor:
    """Return numbers ≥ 0 times a factor ≥ 0, rounded up; 0 only if one of them is 0.

    Example:
        >>> products_above(torch.tensor([0.0, 1e-200], dtype=torch.float64), 1e-200) > 0
        tensor([False,  True])
    """
    product = (factor * numbers).nan_to_num(math.inf, math.inf)
    above = torch.nextafter(product, torch.full_like(product, math.inf))
    return torch.where((numbers == 0) | (factor == 0), 0.0, above)


def norms_above(rows: Tensor) -> Tensor:
    """Bound ‖x‖₂ along the last axis from above, for entries of any size; 0 only for zeros.

    Example:
        >>> norms_above(torch.full((2, 4), 1e-170, dtype=torch.float64)) >= 2e-170
        tensor([True, True])
    """
    wide = double(rows.detach())
    exponent = wide.abs().amax(-1, keepdim=True).frexp().exponent
    half = exponent // 2  # 2^-e overflows for the smallest subnormals
    powers = [torch.ldexp(torch.ones_like(wide[..., :1]), e) for e in (half, exponent - half)]
    sizes = torch.linalg.vector_norm(wide / powers[0] / powers[1], dim=-1, keepdim=True)
    sizes = sizes * (1 + gamma(wide.shape[-1] + 8)) * powers[0] * powers[1]
    above = torch.nextafter(sizes, torch.full_like(sizes, math.inf)).nan_to_num(math.inf, math.inf)
    return torch.where((wide == 0).all(-1, keepdim=True), 0.0, above).squeeze(-1)


def norm_above(tensor: Tensor) -> float:
    """Bound the Euclidean norm of all entries from above."""
    return float(norms_above(tensor.reshape(1, -1))) if tensor.numel() else 0.0


def spectral_norm_above(matrices: Tensor) -> Tensor:
    r"""Bound σ1 of each float64 or complex128 matrix from above, by a Cholesky factorization.

    With A n×N, n ≤ N, and G = AA*: an eigensolver suggests t near λ1(G); if B = tI − G has a
    Cholesky factor in floating point, then B ⪰ −ε·I, so σ1(A)² ≤ t + ε, where ε adds up

    * the product: :math:`\|\hat G - G\| \leq \gamma^c_N \|A\|_F^2`;
    * the factor L: :math:`LL^* = \hat B + \Delta`, :math:`|\Delta| \leq \gamma^c_{n+1}|L||L|^*`
      (Higham, Theorem 10.3), hence :math:`\|\Delta\| \leq \gamma^c_{n+1}\|L\|_F^2` and
      :math:`\|L\|_F^2 \leq \mathrm{tr}\hat B/(1 - \gamma^c_{n+1})`.

    Where the factorization breaks down, t grows until it succeeds: the suggestion decides how
    tight the bound is, never whether it holds. The gradient is that of u*Av at the suggested
    singular vectors.

    Args:
        matrices: ``(batch, m, n)``.

    Returns:
        ``(batch,)`` float64.

    Example:
        >>> float(spectral_norm_above(torch.diag(torch.tensor([3.0, 4.0])).double()[None])) >= 4
        True
    """
    wide = shorter_side_first(matrices)
    with torch.no_grad():
        gram = wide @ wide.mH
        values, vectors = torch.linalg.eigh(gram)
        left = vectors[..., -1:]  # (batch, n, 1)
        right = wide.mH @ left
        right = right / torch.linalg.vector_norm(right, dim=-2, keepdim=True).clamp_min(1e-300)
        upper = proved_eigenvalue(gram, values[..., -1], inner=wide.shape[-1]).sqrt()
    attained = (left.mH @ wide @ right).squeeze(-1).squeeze(-1).real
    ratio = upper / attained.detach().clamp_min(1e-300)
    return torch.where(attained > 0, attained * ratio, upper)


def proved_eigenvalue(gram: Tensor, suggestion: Tensor, inner: int) -> Tensor:
    """Bound λ1 of computed Gram matrices of inner length ``inner`` from above."""
    size = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)  # ‖A‖_F², up to rounding
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    factor = cholesky_error(size) + 2 * UNIT
    product = gamma_complex(inner + size) * trace  # + size: the trace's own rounding
    level = suggestion.clamp_min(0.0) + product + 1e-300
    if not bool(torch.isfinite(level).all()) or not bool(torch.isfinite(trace).all()):
        return torch.full_like(level, math.inf)
    growth = 4 * size * UNIT
    while True:
        level = level * (1 + growth)
        gap = level[..., None, None] * identity - gram
        failed = torch.linalg.cholesky_ex(gap).info != 0
        if not bool(failed.any()):
            gap_trace = gap.diagonal(dim1=-2, dim2=-1).real.sum(-1)
            return (level + factor * gap_trace * (1 + size * 2 * UNIT) + product) * (1 + 8 * UNIT)
        growth *= 8
