"""The bounds by name, and ``bound(layer, method)``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lipbound.bounds.certified import spectral
from lipbound.bounds.energies import frobenius, lipbound
from lipbound.bounds.gram_iteration import gram
from lipbound.bounds.reshapes import fantastic_four
from lipbound.geometry import Layer
from lipbound.registry import call

BOUNDS: dict[str, Callable[..., Tensor]] = {
    "spectral": spectral,
    "lipbound": lipbound,
    "frobenius": frobenius,
    "fantastic_four": fantastic_four,
    "gram": gram,
}
"""Bounds by name. The tests and the command line read this table."""


def bound(layer: Layer, method: str = "spectral", **options: object) -> Tensor:
    """Bound the layer's largest singular value from above; proved for every input size.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, or a weight tensor with the options
            ``stride``, ``dilation``, ``groups``, ``padding``, ``padding_mode``, ``transposed``.
        method: A name in ``BOUNDS``. ``'spectral'`` is within 0.1 % of sup σ1(F), the limit of
            σ1 for large inputs; ``'lipbound'`` is the paper's bound, cheaper and looser.
        options: Options of the method. ``input_shape``, if the size is known, gives tighter
            bounds for circular, reflect and replicate padding.

    Returns:
        A scalar in the weights' precision (float32 at least), differentiable.

    Raises:
        ValueError, TypeError: If the layer cannot be bounded. The message names the fix.

    Example:
        >>> import torch
        >>> kernel = torch.tensor([[[1.0, -1.0]]])  # a difference: |F(ω)| = 2|sin(ω/2)|
        >>> 2 <= float(bound(kernel)) <= 2.01
        True
    """
    return call(BOUNDS, "bound", method, layer, options)
