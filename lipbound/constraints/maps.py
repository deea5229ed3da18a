r"""Maps from free parameters to kernels of norm at most 1, by name in ``MAPS``.

For matrices, and for convolutions whose patches do not overlap (every kernel side is at most the
stride), an orthogonal matrix does: ``cayley``, ``bjorck`` and ``exponential``. For any convolution:

* ``bcop`` (Li et al. 2019) composes kernels of two taps :math:`[P, I - P]`, with P a projection.
  Each is orthogonal, and so is their product: all singular values are 1.
* ``aol`` (Prach & Lampert 2022) divides every input channel by the root of the absolute sum of its
  correlations, :math:`\sum_{j,k} |(K^T K)_{ij,k}|`, so that Gershgorin's theorem gives a norm of at
  most 1.
* ``sll`` (Araujo et al. 2023) does the same for the output channels, with trained weights q.
* ``parseval`` (Cissé et al. 2017) makes the flattened kernel orthogonal and divides it by the root
  of the number of patches that contain a pixel.

Cayley's transform of a convolution in the frequency domain (Trockman & Kolter 2021) is not offered:
its kernel is as large as the image, it fits one input size only, and it is orthogonal for circular
padding, which almost no network has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipbound.constraints.orthogonal import newton_schulz
from lipbound.geometry import Convolution

ROUNDS = 30  # of Björck's iteration


class KernelMap(nn.Module):
    """Map of free parameters to the weight of a layer.

    Args:
        conv: Geometry of the layer, with its weight.

    Raises:
        ValueError: If the method does not fit the layer; the message names methods that do.
    """

    def __init__(self, conv: Convolution):
        super().__init__()
        self.conv = replace(conv, kernel=conv.kernel[:0])
        self.shape, self.groups = conv.kernel.shape, conv.groups

    def start(self, weight: Tensor) -> Tensor:
        """Return free parameters for a weight: where training starts."""
        return weight

    def forward(self, free: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def _near_one(free: Tensor) -> Tensor:
        """Divide by the largest entry, for maps that do not depend on the size of their input."""
        largest = free.detach().abs().amax()
        return free / torch.where(largest > 0, largest, 1.0)

    def _matrices(self, free: Tensor) -> Tensor:
        """Return the weight as one matrix for every group."""
        return free.reshape(self.groups, free.shape[0] // self.groups, -1)


class OrthogonalMap(KernelMap):
    """A matrix with orthonormal rows or columns from a free matrix, one for every group."""

    def __init__(self, conv: Convolution, matrix: Callable[[Tensor], Tensor]):
        super().__init__(conv)
        self.matrix = matrix
        sides, name = conv.kernel.shape[2:], matrix.__name__
        overlaps = any(k > s for k, s in zip(sides, conv.stride, strict=True))
        if overlaps or (any(d > 1 for d in conv.dilation) and math.prod(sides) > 1):
            raise ValueError(
                f"method {name!r} needs a Linear layer, or a convolution whose kernel is at most "
                f"its stride; for the kernel {'×'.join(map(str, sides))} with stride "
                f"{conv.stride[0]} use 'bcop', 'aol', 'sll' or 'parseval'"
            )

    def forward(self, free: Tensor) -> Tensor:
        matrices = self._matrices(self._near_one(free) if self.matrix is bjorck else free)
        if matrices.shape[1] > matrices.shape[2]:
            return self.matrix(matrices.mT).mT.reshape(self.shape)
        return self.matrix(matrices).reshape(self.shape)


def bjorck(free: Tensor) -> Tensor:
    """The polar factor by Björck's iteration, from a matrix scaled to a norm of at most 1."""
    ends = free.abs().sum(-1).amax(-1) * free.abs().sum(-2).amax(-1)
    return newton_schulz(free / ends.sqrt().clamp_min(1e-30)[..., None, None], ROUNDS)


def cayley(free: Tensor) -> Tensor:
    """Cayley's transform of a wide matrix: (I + A)⁻¹[I − A, −2V], A = U − Uᵀ + VVᵀ."""
    size = free.shape[-2]
    square, rest = free[..., :size], free[..., size:]
    skew = square - square.mT + rest @ rest.mT
    one = torch.eye(size, dtype=free.dtype, device=free.device)
    return torch.linalg.solve(one + skew, torch.cat([one - skew, -2 * rest], -1))


def exponential(free: Tensor) -> Tensor:
    """The first rows of the exponential of a skew-symmetric matrix."""
    rows, columns = free.shape[-2:]
    square = torch.nn.functional.pad(free, (0, 0, 0, columns - rows))
    return torch.linalg.matrix_exp(square - square.mT)[..., :rows, :]


class Parseval(KernelMap):
    """Orthonormal rows of the flattened kernel, divided by the root of overlapping patches."""

    def __init__(self, conv: Convolution):
        super().__init__(conv)
        sides = zip(conv.kernel.shape[2:], conv.stride, strict=True)
        self.overlap = math.prod(-(-side // stride) for side, stride in sides)

    def forward(self, free: Tensor) -> Tensor:
        matrices = self._matrices(self._near_one(free))
        return bjorck(matrices).reshape(self.shape) / math.sqrt(self.overlap)


class Gershgorin(KernelMap):
    """Divide channels by the root of the absolute sum of their correlations."""

    def __init__(self, conv: Convolution, rows: bool):
        super().__init__(conv)
        self.rows = rows
        # The matrix of a transposed convolution is the transpose of the convolution's.
        self.outer = rows != conv.transposed
        count = conv.kernel.shape[0] if self.outer else conv.kernel.shape[1] * conv.groups
        self.log_weights = nn.Parameter(torch.zeros(count)) if rows else None

    def forward(self, free: Tensor) -> Tensor:
        dims, free = free.ndim - 2, self._near_one(free)
        grouped = free.reshape(self.groups, -1, *free.shape[1:])
        per_group = grouped if self.outer else grouped.transpose(1, 2)  # (groups, c, others, *k)
        sums = torch.stack([_correlations(kernel, dims) for kernel in per_group])  # (groups, c, c)
        if self.log_weights is not None:
            q = self.log_weights.to(sums.dtype).exp().reshape(self.groups, -1)
            sums = sums * q[:, None, :] / q[:, :, None]
        scale = sums.sum(2).clamp_min(1e-30).rsqrt()
        scaled = per_group * scale.reshape(*scale.shape, *[1] * (dims + 1))
        return (scaled if self.outer else scaled.transpose(1, 2)).reshape(self.shape)


def _correlations(kernel: Tensor, dims: int) -> Tensor:
    """Return Σ over lags of |Σ K_a K_b| for each pair of channels a, b of ``(c, others, *k)``."""
    if dims == 0:
        return (kernel @ kernel.mT).abs()
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    lags = conv(kernel, kernel, padding=[k - 1 for k in kernel.shape[2:]])
    return lags.flatten(2).abs().sum(2)


class BlockConvolution(KernelMap):
    """Block-convolution orthogonal parametrization of a k×k kernel (one or two axes)."""

    def __init__(self, conv: Convolution):
        super().__init__(conv)
        sides, stride = conv.kernel.shape[2:], conv.stride
        if conv.transposed or any(d > 1 for d in conv.dilation) or len(sides) not in (1, 2):
            raise ValueError(
                "method 'bcop' needs a convolution over one or two axes, not dilated and not "
                "transposed; use 'aol', 'sll' or 'parseval', or for a Linear layer 'cayley'"
            )
        if any(k % s for k, s in zip(sides, stride, strict=True)):
            larger = [-(-k // s) * s for k, s in zip(sides, stride, strict=True)]
            raise ValueError(
                f"method 'bcop' needs a kernel whose sides are multiples of the stride; for the "
                f"kernel {'×'.join(map(str, sides))} with stride {stride[0]} use 'aol', 'sll' or "
                f"'parseval', or the kernel {'×'.join(map(str, larger))}"
            )
        self.stride = stride
        self.steps = [k // s for k, s in zip(sides, stride, strict=True)]  # taps after unshuffling
        self.outs = conv.kernel.shape[0] // conv.groups
        self.ins = conv.kernel.shape[1] * math.prod(stride)
        self.size = max(self.outs, self.ins)
        self.count = 1 + sum(step - 1 for step in self.steps)

    def start(self, weight: Tensor) -> Tensor:
        """Draw random matrices: one orthogonal matrix, and one for every projection."""
        free = torch.empty(self.groups, self.count, self.size, self.size)
        for matrix in free.view(-1, self.size, self.size):
            nn.init.orthogonal_(matrix)
        return free.to(weight)

    def forward(self, free: Tensor) -> Tensor:
        matrices = bjorck(free)
        kernels = [self._kernel(group) for group in matrices]
        return torch.cat(kernels).reshape(self.shape)

    def _kernel(self, matrices: Tensor) -> Tensor:
        """Return the kernel of one group from its orthogonal matrices, ``(count, n, n)``."""
        kernel = matrices[0].reshape(*matrices[0].shape, *[1] * len(self.steps))
        rest = iter(matrices[1:])
        half = self.size // 2
        for axis, step in enumerate(self.steps):
            for _ in range(step - 1):
                basis = next(rest)[:, :half]
                projection = basis @ basis.mT
                one = torch.eye(self.size, dtype=basis.dtype, device=basis.device)
                kernel = _two_taps(kernel, projection, one - projection, 2 + axis)
        kernel = kernel[: self.outs, : self.ins]
        return self._shuffled(kernel)

    def _shuffled(self, kernel: Tensor) -> Tensor:
        """Turn a kernel on unshuffled channels into one with a stride on the original ones."""
        channels = self.ins // math.prod(self.stride)
        kernel = kernel.reshape(self.outs, channels, *self.stride, *self.steps)
        dims = len(self.steps)
        order = [0, 1] + [part for a in range(dims) for part in (2 + dims + a, 2 + a)]
        sides = [k * s for k, s in zip(self.steps, self.stride, strict=True)]
        return kernel.permute(order).reshape(self.outs, channels, *sides)


def _two_taps(kernel: Tensor, first: Tensor, second: Tensor, axis: int) -> Tensor:
    """Compose a kernel with the kernel [first, second] along an axis."""
    pads = [0] * (2 * (kernel.ndim - 2))
    place = 2 * (kernel.ndim - 1 - axis)
    after, before = [*pads], [*pads]
    after[place + 1], before[place] = 1, 1
    pad = torch.nn.functional.pad
    return pad(torch.einsum("ab,bc...->ac...", first, kernel), after) + pad(
        torch.einsum("ab,bc...->ac...", second, kernel), before
    )


def _orthogonal(matrix: Callable[[Tensor], Tensor]) -> Callable[[Convolution], KernelMap]:
    return lambda conv: OrthogonalMap(conv, matrix)


MAPS: dict[str, Callable[[Convolution], KernelMap]] = {
    "cayley": _orthogonal(cayley),
    "bjorck": _orthogonal(bjorck),
    "exponential": _orthogonal(exponential),
    "bcop": BlockConvolution,
    "aol": lambda conv: Gershgorin(conv, rows=False),
    "sll": lambda conv: Gershgorin(conv, rows=True),
    "parseval": Parseval,
}
"""Methods of ``constrain`` that make a weight from free parameters: name → map for a geometry."""
ORTHOGONAL = ("cayley", "bjorck", "exponential", "bcop")
"""Maps whose kernels have singular values of 1 only; Björck's if its input is not near-singular."""
