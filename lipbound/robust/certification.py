"""Certify the networks of a training run on a data set: accuracies, a curve, and an attack."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipbound.files import provenance
from lipbound.network.accuracy import CertifiedAccuracy, certified_accuracy
from lipbound.network.audits import audit
from lipbound.network.kernels import ordinary_kernels
from lipbound.results import finite, key
from lipbound.robust.attacks.evaluate import accuracy
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.training.trained import Trained
from lipbound.runtime import Progress, silent, wide


def certification(
    network: Trained,
    images: tuple[Tensor, Tensor],
    radii: Sequence[float],
    device: torch.device,
    *,
    arithmetic: str = "real",
    effort: str = "normal",
    attacked: int = 0,
    batch: int = 250,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Audit a network, certify images, and attack some of them at the same radii.

    Args:
        network: The network.
        images: uint8 pixels and labels.
        radii: L2 radii.
        device: Device to compute on. The audit runs on the CPU.
        arithmetic: What to certify, see :func:`lipbound.certify`.
        effort: How tightly to bound the network, see :func:`lipbound.audit`.
        attacked: Number of images to attack by PGD in L2, at every radius; 0 for none.
        batch: Number of images at a time.
        say: Called with the name of each stage when it begins.
        progress: Shows the progress.

    Returns:
        The record: accuracies with their intervals and by class (``None`` for a class without
        images), a curve, a histogram of the radii, the bound of the network, and the seconds that
        audit and certificates took.

    Raises:
        ValueError: If the images or the arithmetic do not fit the network, or a radius is not
            positive.
    """
    pixels, labels = images
    if tuple(pixels.shape[1:]) != network.input_shape:
        raise ValueError(
            f"the images are {tuple(pixels.shape[1:])}, but the network takes {network.input_shape}"
        )
    for radius in radii:
        if not 0 < radius < math.inf:
            raise ValueError(f"radius={radius!r} must be positive and finite")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    dtype = wide(next(network.model.parameters(), torch.zeros(())).dtype)
    if arithmetic == "float32" and dtype != torch.float32:
        raise ValueError(
            f"arithmetic {arithmetic!r} does not fit the network's weights, which are {dtype}; use "
            f"'float64' or 'real'"
        )
    began = time.perf_counter()
    say("audit")
    bounds = audit(
        network.model.cpu(), network.input_shape, search=0, effort=effort, progress=progress,
        domain=(0.0, 1.0),  # of pixels; it is used only if there is no bound for every input
    )  # fmt: skip
    model = network.model.to(device)
    say("certificates")
    starts = range(0, len(labels), batch)
    batches = (
        _batch(images, start, batch, device, dtype)
        for start in progress(starts, "batches of images")
    )
    with ordinary_kernels():
        found = certified_accuracy(model, bounds, batches, radii, arithmetic)
    record = {
        "experiment": "certify",
        **network.names,
        "arithmetic": found.arithmetic,
        "effort": effort,
        "rounding": None if found.errors is None else finite(float(found.errors.median())),
        "lost_to_rounding": found.lost,
        "lipschitz": finite(bounds.upper),
        "features": bounds.features if bounds.head is not None else None,
        "reason": bounds.reason,
        "seconds": round(time.perf_counter() - began, 1),
        **_accuracies(found),
    }
    if attacked:
        say("attack")
        first = _batch(images, 0, attacked, device, dtype)
        record["attacked"] = {
            key(radius): {
                **_attacked(model, first, radius, batch, progress),
                "proved": float((found.certified[:attacked] > radius).double().mean()),
            }
            for radius in radii
        }
    return {**record, **provenance(str(device))}


def _batch(
    images: tuple[Tensor, Tensor], start: int, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    pixels, labels = (part[start : start + count].to(device) for part in images)
    return pixels.to(dtype) / 255, labels


def _accuracies(found: CertifiedAccuracy) -> dict[str, Any]:
    right = found.predictions == found.labels
    return {
        "images": len(right),
        "clean": accuracy(right),
        "certified": {
            key(radius): {
                **accuracy(found.certified > radius),
                "by_class": [None if math.isnan(s) else s for s in found.by_class(radius)],
            }
            for radius in found.radii
        },
        "median_radius": finite(found.median_radius),
        "curve": found.curve(),
        "histogram": found.histogram(),
    }


def _attacked(
    model: torch.nn.Module,
    images: tuple[Tensor, Tensor],
    radius: float,
    batch: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return the accuracy under PGD within an L2 ball."""
    pixels, labels = images
    broken = strongest_pgd(
        model, pixels, labels, radius=radius, step=0.25 * radius, iterations=50, restarts=2,
        ball="l2", loss="alternate", width=batch, progress=progress,
    ).broken  # fmt: skip
    return accuracy(~broken)
