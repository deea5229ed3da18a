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
"""Name → function of a layer. The tests and the command line read this table."""


def bound(layer: Layer, method: str = "spectral", **options: object) -> Tensor:
    """A number proved to be at least the layer's largest singular value, whatever the input size.

    Args:
        layer: ``nn.Conv*d``, ``nn.ConvTranspose*d``, or a weight tensor with the options
            ``stride``, ``dilation``, ``groups``, ``padding``, ``padding_mode``, ``transposed``.
        method: A name in ``BOUNDS``. ``'spectral'`` is within 0.1 % of sup σ1(F), the limit of
            σ1 for large inputs; ``'lipbound'`` is the paper's, cheaper and looser.
        options: The method's own options; ``input_shape`` where the size is known, which
            tightens circular, reflect and replicate padding.

    Returns:
        A scalar in the weights' precision (float32 at least), differentiable.

    Raises:
        ValueError, TypeError: Naming the input that cannot be bounded and what to do.

    Example:
        >>> import torch
        >>> kernel = torch.tensor([[[1.0, -1.0]]])  # a difference: |F(ω)| = 2|sin(ω/2)|
        >>> 2 <= float(bound(kernel)) <= 2.01
        True
    """
    return call(BOUNDS, "bound", method, layer, options)
