"""Certified accuracy: the share of images whose correct prediction is proved not to change."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lipbound.modules import bake, in_eval
from lipbound.network.certificates import certify
from lipbound.network.findings import Audit
from lipbound.runtime import first_line

COMPARED = 4  # inputs that are also run alone, to see whether a batch mixes them


@dataclass(frozen=True)
class CertifiedAccuracy:
    """Certified radii of a set of images, and the accuracies that follow.

    Attributes:
        radii: The radii asked for.
        accuracy: For each radius, the share of images that are classified correctly at every point
            within it. Real arithmetic, from float64 logits.
        clean: Share of images that are classified correctly.
        certified: Radius of each image, ``(images,)`` float64; 0 if its prediction is wrong.
        labels: Class of each image.
        predictions: Predicted class of each image.
    """

    radii: tuple[float, ...]
    accuracy: tuple[float, ...]
    clean: float
    certified: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    predictions: Tensor = field(repr=False)

    def by_class(self, radius: float) -> list[float]:
        """Return the certified accuracy of every class; NaN for a class without images."""
        counts = torch.bincount(self.labels)
        kept = self.labels[self.certified > radius]
        return (torch.bincount(kept, minlength=len(counts)).double() / counts).tolist()


@torch.no_grad()
def certified_accuracy(
    model: nn.Module,
    audit: Audit,
    loader: Iterable[tuple[Tensor, Tensor]],
    radii: Sequence[float] = (36 / 255, 72 / 255, 108 / 255),
) -> CertifiedAccuracy:
    """Certify every image of a data set, and return the share that stays correct in each L2 ball.

    The logits are computed in float64 by a copy of the network, image by image independent of the
    batch. The certificates hold for the network in real arithmetic, without the rounding of these
    logits.

    Args:
        model: The network, with its input normalization inside.
        audit: Audit of that network with its current weights, see :func:`lipbound.audit`.
        loader: Batches of inputs and labels.
        radii: L2 radii.

    Raises:
        ValueError: If the network mixes the images of a batch, cannot run in float64, or does not
            fit the audit, or if there are no images.

    Example:
        >>> from lipbound import audit
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> batch = torch.tensor([[3.0, 1.0], [1.0, 1.1]]), torch.tensor([0, 1])
        >>> certified_accuracy(model, audit(model, (2,)), [batch], [0.5, 0.01]).accuracy
        (0.5, 1.0)
    """
    if not isinstance(radii, Sequence):
        raise ValueError(f"radii={radii!r} must be a list of radii, for example [36 / 255]")
    if not all(radius >= 0 for radius in radii):
        raise ValueError(f"radii={radii!r} must be 0 or larger")
    exact = in_float64(model)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with in_eval(exact):
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ValueError(
                    "the loader must yield pairs (inputs, labels); for one batch pass "
                    "[(inputs, labels)]"
                )
            inputs, labels = batch
            if labels.shape != inputs.shape[:1] or labels.is_floating_point():
                raise ValueError(
                    f"labels must be one class number for each of {len(inputs)} inputs, got "
                    f"{labels.dtype} of shape {tuple(labels.shape)}"
                )
            wide = inputs.double()
            try:
                if not found:
                    certify(exact, audit, wide[:COMPARED])
                logits = exact(wide)
            except RuntimeError as error:
                raise ValueError(
                    f"{type(model).__name__} cannot run in float64 ({first_line(error)}); "
                    f"certificates need float64 logits"
                ) from None
            predictions = logits.argmax(1)
            certified = certify(logits, audit).where(predictions == labels, 0.0)
            found.append((certified.cpu(), labels.cpu(), predictions.cpu()))
    if not found:
        raise ValueError("there are no images to certify; the loader is empty")
    certified, labels, predictions = (torch.cat(part) for part in zip(*found, strict=True))
    shares = [float((certified > radius).double().mean()) for radius in radii]
    clean = float((predictions == labels).double().mean())
    return CertifiedAccuracy(tuple(radii), tuple(shares), clean, certified, labels, predictions)


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
    for module in list(exact.modules()):
        bake(module)
    return exact.double()
