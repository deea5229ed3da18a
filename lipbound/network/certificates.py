"""Compute the radius within which a network's prediction cannot change, from its bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipbound.bounds.rounding import norms_above
from lipbound.modules import in_eval
from lipbound.network.findings import Audit
from lipbound.network.jacobian import alone_and_together


@torch.no_grad()
def certify(source: Tensor | nn.Module, audit: Audit, inputs: Tensor | None = None) -> Tensor:
    r"""Certify L2 radii around inputs within which the predicted class cannot change.

    If i is the prediction, the radius is :math:`\min_j (f_i - f_j - 2 E_{ij}) / L_{ij}`. If the
    network ends in a Linear layer with rows w, :math:`L_{ij} = L_{features} \|w_i - w_j\|`.
    Otherwise :math:`L_{ij} = \sqrt2\,L`, because the difference of two entries is √2-Lipschitz. E
    is the same with the audit's error in place of L. The error bounds how far the network is from
    a function with the constant L. It counts twice: at the input and at the perturbed input. It
    is 0 unless an operation jumps, as softplus does.

    Args:
        source: Logits in eval mode, ``(batch, classes)``, or the network that computes them.
        audit: Audit of that network with its current weights. Its bound refers to the network's
            input: for radii in pixels, make the normalization of the pixels part of the network.
        inputs: The batch, if ``source`` is a network. The network runs in eval mode, also on each
            input alone, as it was audited. Passing logits is faster for large batches, and valid
            if no input changes the logits of another.

    Returns:
        ``(batch,)`` float64. The radius is 0 for a tie, an infinite bound or logits that are not
        finite. The radii hold for the real-arithmetic network, without the rounding of the logits.

    Raises:
        ValueError: If the logits are not ``(batch, classes)`` with at least two classes, if the
            audited network has another number of classes, if the inputs and the audit differ in
            size, or if inputs of the batch change each other's logits.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> from lipbound import audit
        >>> certify(model, audit(model, (2,)), torch.tensor([[3.0, 1.0]]))  # √2 from the diagonal
        tensor([1.4142], dtype=torch.float64)
    """
    if isinstance(source, nn.Module):
        if inputs is None:
            raise ValueError("certify(model, audit) needs the inputs; add inputs=batch")
        if tuple(inputs.shape) == audit.input_shape:
            raise ValueError(f"{tuple(inputs.shape)} is a single input; pass a batch: inputs[None]")
        if audit.input_shape is not None and tuple(inputs.shape[1:]) != audit.input_shape:
            raise ValueError(
                f"each input has shape {tuple(inputs.shape[1:])}, but the audit is for "
                f"{audit.input_shape}; audit the network with the shape of the inputs"
            )
        if not inputs.is_floating_point():
            raise ValueError(f"the inputs are {inputs.dtype}; convert them to floating point")
        with in_eval(source):
            source = _logits(source, inputs)
    if not isinstance(source, Tensor) or source.ndim != 2 or source.shape[1] < 2:
        shape = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
        raise ValueError(f"logits must be (batch, classes) with two or more classes, got {shape}")
    logits = source.double()
    best = logits.argmax(1)
    gains, errors = (table.to(logits.device)[best] for table in _pairs(audit, logits.shape[1]))
    gaps = logits.amax(1, keepdim=True) - logits - 2 * errors  # (batch, classes)
    radii = torch.where(gains > 0, gaps / gains, math.inf)
    radii = torch.where((gaps > 0) & (gains < math.inf), radii, 0.0)
    others = torch.arange(logits.shape[1], device=best.device) != best[:, None]
    radii = torch.where(others, radii, math.inf).amin(1) * (1 - 1e-12)
    return torch.where(logits.isfinite().all(1), radii, 0.0)


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits of each input alone.

    Raises:
        ValueError: If the logits of the whole batch differ from them by more than 1 %
            of the largest logit.
    """
    answers, same = alone_and_together(model, inputs)
    if len(answers) != 1 or answers[0].ndim != 2:
        raise ValueError(
            f"certify needs a network that returns logits (batch, classes); this one returns "
            f"{', '.join(str(tuple(t.shape)) for t in answers) or 'nothing'}"
        )
    (logits,) = answers
    apart = len(logits) == len(inputs)  # one row for the whole batch mixes the inputs
    if len(inputs) > 1 and not (
        apart and bool((same.to(logits.device) | ~logits.isfinite().all(1)).all())
    ):
        raise ValueError(
            f"the network mixes the inputs of a batch: its logits for these {len(inputs)} differ "
            f"from those for each input alone; certify one at a time: inputs[i : i + 1]"
        )
    return logits


def _pairs(audit: Audit, classes: int) -> tuple[Tensor, Tensor]:
    """Return a Lipschitz constant of f_i − f_j and its error for every pair of classes."""
    whole = torch.full((classes, classes), math.sqrt(2) * (1 + 1e-15), dtype=torch.float64)
    gains, errors = _above(audit.upper, whole), _above(audit.error, whole)
    if audit.head is None:
        return gains, errors
    if len(audit.head) != classes:
        raise ValueError(
            f"the logits have {classes} classes, the audited network has {len(audit.head)}; pass "
            f"the audit of this network"
        )
    rows = audit.head.double().cpu()
    pairs = torch.stack([norms_above(row - rows) for row in rows])
    if audit.head_error:  # rows may be equal only because of rounding
        pairs = _above(1.0, pairs + math.sqrt(2) * audit.head_error)
    return (
        torch.minimum(gains, _above(audit.features, pairs)),
        torch.minimum(errors, _above(audit.features_error, pairs)),
    )


def _above(factor: float, numbers: Tensor) -> Tensor:
    """Return the product, rounded up unless a factor is zero."""
    product = (factor * numbers).nan_to_num(math.inf, math.inf)
    higher = torch.nextafter(product, torch.full_like(product, math.inf))
    return torch.where((numbers == 0) | (factor == 0), 0.0, higher)
