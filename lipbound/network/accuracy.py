"""Certified accuracy: the share of images whose correct prediction is proved not to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lipbound.modules import in_eval
from lipbound.network.certificates import Certifier
from lipbound.network.findings import Audit
from lipbound.results import Result, finite


@dataclass(frozen=True)
class CertifiedAccuracy(Result):
    """Certified radii of a set of images, and the accuracies that follow.

    ``print`` shows a row for each radius, and :meth:`to_dict` returns the numbers.

    Attributes:
        radii: The radii asked for.
        accuracy: For each radius, the share of images that are classified correctly at every point
            within it.
        clean: Share of images that are classified correctly.
        certified: Radius of each image, ``(images,)`` float64; 0 if its prediction is wrong.
        labels: Class of each image.
        predictions: Predicted class of each image.
        arithmetic: What the certificates speak of, as a phrase.
        errors: Bound on the rounding of each image's logits (L2), ``None`` if it is unknown.
        lost: Number of correct images whose radius is 0 only because of rounding.
        classes: Number of classes.
    """

    radii: tuple[float, ...]
    accuracy: tuple[float, ...]
    clean: float
    certified: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    predictions: Tensor = field(repr=False)
    arithmetic: str = ""
    errors: Tensor | None = field(default=None, repr=False)
    lost: int = 0
    classes: int = 0

    def title(self) -> str:
        return f"Certified accuracy of {len(self.labels):,} images"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each radius, and first one for the clean accuracy."""
        clean = {"L2 radius": "0 (clean)", "accuracy": self.clean, "worst class": None}
        found = [clean]
        for radius, share in zip(self.radii, self.accuracy, strict=True):
            classes = [one for one in self.by_class(radius) if not math.isnan(one)]
            found.append({"L2 radius": radius, "accuracy": share, "worst class": min(classes)})
        return found

    shares: ClassVar[frozenset[str]] = frozenset({"accuracy", "worst class"})
    rounding: ClassVar[Mapping[str, str]] = dict.fromkeys(("L2 radius", *shares), "down")

    def summary(self) -> list[str]:
        """Say what is certified, and for how many images only rounding prevents it."""
        said = [f"proved: {self.arithmetic}"] if self.arithmetic else []
        if self.lost:
            said.append(f"{self.lost:,} correct images have the radius 0 because of rounding")
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain data, with the radius of every image."""
        return {
            "clean": self.clean,
            "radii": list(self.radii),
            "accuracy": list(self.accuracy),
            "certified": [finite(radius) for radius in self.certified.tolist()],
            "labels": self.labels.tolist(),
            "predictions": self.predictions.tolist(),
            "arithmetic": self.arithmetic,
            "errors": None if self.errors is None else [finite(e) for e in self.errors.tolist()],
            "lost": self.lost,
            "classes": self.classes,
        }

    @property
    def median_radius(self) -> float:
        """Return the median radius of the images that are classified correctly; 0 without any.

        It is ∞ if the network is constant.
        """
        right = self.certified[self.predictions == self.labels]
        return float(right.median()) if len(right) else 0.0

    def curve(self, points: int = 60) -> list[list[float]]:
        """Return pairs of a radius and its certified accuracy, up to the largest finite radius.

        Where no radius is finite and positive, it goes up to 1.
        """
        radii = [self._most * (place / points) for place in range(points + 1)]
        return [[radius, float((self.certified > radius).double().mean())] for radius in radii]

    def histogram(self, bins: int = 30) -> dict[str, Any]:
        """Count the images of each class by their radius, without those of radius 0 or ∞.

        Returns:
            ``edges`` of the bins, ``by_class``, the counts of each class, and ``infinite``, the
            number of images with the radius ∞, which those of a constant network have.
        """
        edges = torch.linspace(0, self._most, bins + 1, dtype=torch.float64)
        places = (torch.bucketize(self.certified.double(), edges) - 1).clamp(0, bins - 1)
        finite = self.certified.isfinite()
        kept = finite & (self.certified > 0)
        cells = (self.labels * bins + places)[kept]
        counts = torch.bincount(cells, minlength=bins * self.classes).reshape(-1, bins)
        infinite = int((~finite).sum())
        return {"edges": edges.tolist(), "by_class": counts.tolist(), "infinite": infinite}

    @property
    def _most(self) -> float:
        """Return the largest finite radius; 1 if none is positive."""
        return max((r for r in self.certified.tolist() if r < math.inf), default=0.0) or 1.0

    def by_class(self, radius: float) -> list[float]:
        """Return the certified accuracy of every class; NaN for a class without images."""
        counts = torch.bincount(self.labels, minlength=self.classes)
        kept = self.labels[self.certified > radius]
        return (torch.bincount(kept, minlength=len(counts)).double() / counts).tolist()


@torch.no_grad()
def certified_accuracy(
    model: nn.Module,
    audit: Audit,
    loader: Iterable[tuple[Tensor, Tensor]],
    radii: Sequence[float] = (36 / 255, 72 / 255, 108 / 255),
    arithmetic: str = "real",
) -> CertifiedAccuracy:
    """Certify every image of a data set, and return the share that stays correct in each L2 ball.

    The logits are computed by a copy of the network in float64, or by the network itself with
    ``arithmetic='float32'``.

    Args:
        model: The network, with its input normalization inside.
        audit: Audit of that network with its current weights, see :func:`lipbound.audit`.
        loader: Batches of inputs and labels.
        radii: L2 radii.
        arithmetic: What to certify: ``'real'``, ``'float64'`` or ``'float32'``, see
            :func:`lipbound.certify`.

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
    if not all(isinstance(radius, int | float) and 0 <= radius < math.inf for radius in radii):
        raise ValueError(f"radii={radii!r} must be finite numbers, 0 or larger")
    certifier = Certifier(model, audit, arithmetic)
    found: list[tuple[Tensor, Tensor]] = []
    with in_eval(certifier.model):
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ValueError(
                    "the loader must yield pairs (inputs, labels); for one batch pass "
                    "[(inputs, labels)]"
                )
            inputs, labels = batch
            if not (isinstance(inputs, Tensor) and isinstance(labels, Tensor)):
                raise ValueError(
                    f"inputs and labels must be tensors, got {type(inputs).__name__} and "
                    f"{type(labels).__name__}"
                )
            if labels.shape != inputs.shape[:1] or labels.is_floating_point():
                raise ValueError(
                    f"labels must be one class number for each of {len(inputs)} inputs, got "
                    f"{labels.dtype} of shape {tuple(labels.shape)}"
                )
            logits = certifier.add(inputs)
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
                raise ValueError(
                    f"the labels are {int(labels.min())} to {int(labels.max())}, but the network "
                    f"has {logits.shape[1]} classes; use the data set of this network"
                )
            found.append((labels.cpu(), logits.argmax(1).cpu()))
    if not sum(len(labels) for labels, _ in found):
        raise ValueError("there are no images to certify; the loader is empty")
    labels, predictions = (torch.cat(part) for part in zip(*found, strict=True))
    proved, right = certifier.finish(), predictions == labels
    certified = proved.radii.cpu().where(right, 0.0)
    shares = [float((certified > radius).double().mean()) for radius in radii]
    return CertifiedAccuracy(
        tuple(radii), tuple(shares), float(right.double().mean()), certified, labels, predictions,
        proved.arithmetic, proved.errors, int((proved.lost.cpu() & right).sum()),
        proved.logits.shape[1],
    )  # fmt: skip
