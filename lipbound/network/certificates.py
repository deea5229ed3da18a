"""From a network's bound to the radius in which its answer cannot change."""

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
    r"""L2 radii around the inputs within which the predicted class cannot change.

    With i the prediction, :math:`\min_j (f_i - f_j - 2 E_{ij}) / L_{ij}`. Where the network ends in
    a Linear layer with rows w, :math:`L_{ij} = L_{features} \|w_i - w_j\|`; else, the difference of
    two entries being √2-Lipschitz, :math:`L_{ij} = \sqrt2\,L`. E is the same with the audit's error
    in place of L: how far the network may be from a function that has the constant L, once at the
    input and once where it has moved to. It is 0 unless an operation jumps, as softplus does.

    Args:
        source: Logits, ``(batch, classes)``, or the network that computes them.
        audit: Of that network with the weights it has now. Its bound is on the input as the network
            takes it: put a normalization of the pixels inside it to have radii in pixels.
        inputs: The batch, if ``source`` is a network; it is run in eval mode, on each input alone
            too, as it was audited. Of many inputs the logits are sooner there, if none of them
            changes another's.

    Returns:
        ``(batch,)`` float64. 0 where nothing can be said: a tie, an infinite bound, logits that
        are no finite numbers. The radii
        hold for the real-arithmetic network; the logits' own rounding is not part of them.

    Raises:
        ValueError: If the logits are not ``(batch, classes)`` with at least two classes, or with
            others than the audited network has; if the inputs are of another size than the audit's,
            or change each other's answers.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> from lipbound import audit
        >>> certify(model, audit(model, (2,)), torch.tensor([[3.0, 1.0]]))  # √2 from the diagonal
        tensor([1.4142], dtype=torch.float64)
    """
    if isinstance(source, nn.Module):
        if inputs is None:
            raise ValueError("certify(model, audit) needs the inputs; or pass the logits")
        if tuple(inputs.shape) == audit.input_shape:
            raise ValueError(f"{tuple(inputs.shape)} is one input; pass a batch, inputs[None]")
        if audit.input_shape is not None and tuple(inputs.shape[1:]) != audit.input_shape:
            raise ValueError(
                f"the inputs are {tuple(inputs.shape[1:])} each, the audit is of "
                f"{audit.input_shape}; audit the network at their size"
            )
        if not inputs.is_floating_point():
            raise ValueError(f"the inputs are {inputs.dtype}; the network takes floating point")
        with in_eval(source):
            source = _logits(source, inputs)
    if not isinstance(source, Tensor) or source.ndim != 2 or source.shape[1] < 2:
        shape = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
        raise ValueError(f"logits must be (batch, classes) with two classes or more, got {shape}")
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
    """What the network says of each input alone, if it says about the same of them together.

    Raises:
        ValueError: If it does not.
    """
    answers, same = alone_and_together(model, inputs)
    if len(answers) != 1 or answers[0].ndim != 2:
        raise ValueError(
            f"certify needs a network that gives logits (batch, classes); this one gives "
            f"{', '.join(str(tuple(t.shape)) for t in answers) or 'nothing'}"
        )
    (logits,) = answers
    apart = len(logits) == len(inputs)  # one answer for all is a mixture, too
    if len(inputs) > 1 and not (
        apart and bool((same.to(logits.device) | ~logits.isfinite().all(1)).all())
    ):
        raise ValueError(
            f"the network mixes the inputs of a batch: its answers to these {len(inputs)} differ "
            f"from those to each alone, and the audit is of one input; certify inputs[i : i + 1]"
        )
    return logits


def _pairs(audit: Audit, classes: int) -> tuple[Tensor, Tensor]:
    """For every pair a Lipschitz constant of f_i − f_j, and how far from it that may be."""
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
    if audit.head_error:  # rows that rounding made equal need not be
        pairs = _above(1.0, pairs + math.sqrt(2) * audit.head_error)
    return (
        torch.minimum(gains, _above(audit.features, pairs)),
        torch.minimum(errors, _above(audit.features_error, pairs)),
    )


def _above(factor: float, numbers: Tensor) -> Tensor:
    """The product, rounded up where it is not zero times something."""
    product = (factor * numbers).nan_to_num(math.inf, math.inf)
    higher = torch.nextafter(product, torch.full_like(product, math.inf))
    return torch.where((numbers == 0) | (factor == 0), 0.0, higher)
