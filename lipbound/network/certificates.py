"""Compute the radius within which a network's prediction cannot change, from its bound."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipbound.bounds.rounding import norms_above, products_above
from lipbound.modules import fingerprint, in_eval, in_float64
from lipbound.network.findings import Audit
from lipbound.network.jacobian import alike
from lipbound.network.kernels import check_kernels, check_runs, ordinary_kernels
from lipbound.network.rounding import (
    Errors,
    Executed,
    Measured,
    check_recomputed,
    check_same_factors,
)
from lipbound.network.rules.rounding import FORMATS, NotProved
from lipbound.registry import unknown
from lipbound.runtime import first_line

TOGETHER = {"cpu": 16}  # inputs that run together; on a processor few, so that its cache is enough
MOST = 512  # on other devices
ARITHMETIC = {
    "logits": "real arithmetic, without the rounding of the logits",
    "real": "real arithmetic, after subtracting the rounding of float64 logits",
    "float64": "the network as it runs in float64",
    "float32": "the network as it runs in float32",
}
"""What a certificate speaks of: logits alone, or a network in an arithmetic."""


@dataclass(frozen=True)
class Certificates:
    """Radii within which predictions are proved not to change.

    Attributes:
        radii: Radius of each input, ``(inputs,)`` float64.
        logits: The logits from which the radii follow.
        arithmetic: What the certificates speak of, as a phrase.
        errors: Bound on the L2 error of each input's logits in its ball; ``None`` if unknown.
        lost: For each input, whether only rounding makes its radius 0.
    """

    radii: Tensor
    logits: Tensor
    arithmetic: str
    errors: Tensor | None
    lost: Tensor


@torch.no_grad()
def certify(
    source: Tensor | nn.Module,
    audit: Audit,
    inputs: Tensor | None = None,
    arithmetic: str = "real",
) -> Tensor:
    r"""Certify L2 radii around inputs within which the predicted class cannot change.

    If i is the prediction, the radius is :math:`\min_j (f_i - f_j - E_{ij}) / L_{ij}`. If the
    network ends in a Linear layer with rows w, :math:`L_{ij} = L_{features} \|w_i - w_j\|`.
    Otherwise :math:`L_{ij} = \sqrt2\,L`, because the difference of two entries is √2-Lipschitz. An
    audit with ``effort='high'`` may have proved smaller constants, ``audit.pairs``. E bounds
    everything else that can change the difference of two logits: their rounding, and small jumps
    of an operation such as PyTorch's softplus.

    Args:
        source: The network. Or logits in eval mode, ``(batch, classes)``, whose rounding is then
            not part of the certificate.
        audit: Audit of that network with its current weights. Its bound refers to the network's
            input: for radii in pixels, make the normalization of the pixels part of the network.
            If the audit has a domain, the certificate is for changed inputs that lie in it.
        inputs: The batch, if ``source`` is a network. The network runs in eval mode. What it
            computes for each input alone, as it was audited, follows from its captured graph.
        arithmetic: ``'real'`` for the network in real arithmetic, without any rounding,
            ``'float64'`` for the network ``model.double()`` as it runs, ``'float32'`` for a float32
            network as it runs. The last two need :func:`lipbound.ordinary_kernels`. If the rounding
            of an operation is not known, ``'real'`` leaves out the rounding of the logits and
            warns. It also warns if an operation has no batched form, because the inputs then run
            one by one.

    Returns:
        ``(batch,)`` float64. The radius is 0 for a tie, an infinite bound, logits that are not
        finite, or a margin smaller than the rounding.

    Raises:
        ValueError: If the logits are not ``(batch, classes)`` with at least two classes, if the
            audited network has another number of classes, if the inputs and the audit differ in
            size, if inputs are outside the audit's domain, if inputs of the batch change each
            other's logits, or if the rounding cannot be bounded in this arithmetic.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> from lipbound import audit
        >>> certify(model, audit(model, (2,)), torch.tensor([[3.0, 1.0]]))  # √2 from the diagonal
        tensor([1.4142], dtype=torch.float64)
    """
    if not isinstance(source, nn.Module):
        if inputs is not None or arithmetic != "real":
            raise ValueError(
                f"arithmetic={arithmetic!r} and inputs need the network, because logits do not say "
                f"how they were rounded; call certify(model, audit, inputs, {arithmetic!r})"
            )
        return _radii(_checked(source), audit)
    if inputs is None:
        raise ValueError("certify(model, audit) needs the inputs; add inputs=batch")
    certifier = Certifier(source, audit, arithmetic)
    _check_inputs(inputs, audit)
    certifier.add(inputs)
    proved = certifier.finish()
    if proved.errors is None and bool((proved.radii > 0).any()):
        warnings.warn(f"the radii hold in {proved.arithmetic}", stacklevel=3)
    return proved.radii


class Certifier:
    """Certifies batches of inputs of one network.

    Args:
        model: The network.
        audit: Its audit.
        arithmetic: See :func:`certify`.

    Raises:
        ValueError: If the arithmetic is unknown, or the network does not run in it.
    """

    def __init__(self, model: nn.Module, audit: Audit, arithmetic: str = "real"):
        if arithmetic not in ("real", *FORMATS):
            raise unknown("arithmetic", arithmetic, ("real", *FORMATS))
        check_runs(model, arithmetic)
        if audit.weights and audit.weights != fingerprint(model):
            raise ValueError(
                f"the weights of this {type(model).__name__} have changed since the audit, or it "
                f"is another network; audit it again"
            )
        self.source, self.audit, self.arithmetic = model, audit, arithmetic
        self.model = model if arithmetic == "float32" else in_float64(model).eval()
        self.why = ""  # why the rounding is not bounded
        self._single = False  # whether the inputs run one by one
        self._executed: Executed | None = None
        self._found: list[Measured] = []
        self._logits: list[Tensor] = []  # as the network computes them, for the whole batch
        self._centres: list[Tensor] = []  # of each input alone

    @torch.no_grad()
    def add(self, inputs: Tensor) -> Tensor:
        """Run the network on a batch; return its logits, in real arithmetic those of each alone.

        Each input's logits are compared with those of the captured graph of a single input, which
        ``torch.func.vmap`` maps over the batch: no input can affect another one there. The radii
        follow from these.
        """
        _check_inputs(inputs, self.audit)
        kernels = ordinary_kernels() if self.arithmetic == "real" else nullcontext()
        parts = inputs.split(TOGETHER.get(inputs.device.type, MOST))
        with in_eval(self.model), kernels:
            return torch.cat([self._added(part) for part in parts])

    def _added(self, inputs: Tensor) -> Tensor:
        try:
            given, logits = self._run(inputs)
        except RuntimeError as error:
            wide = "float32" if self.arithmetic == "float32" else "float64"
            failed = NotProved(
                f"{type(self.source).__name__} cannot run in {wide} ({first_line(error)})"
            )
            self._give_up(failed)
            self.model = self.source
            with in_eval(self.model):
                given, logits = self._run(inputs)
        if len(given) == 1 and len(logits) != 1:
            raise ValueError(
                f"the network returns {tuple(logits.shape)} for a single input; certify needs one "
                f"row of logits for each input"
            )
        alone = logits
        if len(given):
            alone = self._alone(given)
            _check_apart(logits, alone, close=self.arithmetic == "real")
        self._centres.append(alone.double())
        self._logits.append(logits)
        # No certificate follows from the logits of a batch, because its inputs may be mixed.
        return alone if self.arithmetic == "real" else logits

    def _run(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs in the network's format, and its logits."""
        own = self.arithmetic == "float32" or self.model is self.source
        given = inputs if own else inputs.double()
        if self.arithmetic == "float32" and given.dtype != torch.float32:
            raise ValueError(
                f"the inputs are {given.dtype}, but arithmetic='float32' certifies a network that "
                f"runs on float32 inputs; use inputs.float()"
            )
        return given, _checked(self.model(given.clone()))  # it may write to its input

    def _alone(self, given: Tensor) -> Tensor:
        """Return the logits of each input by itself, and keep the sizes of all its values."""
        if self._single:
            return torch.cat([_checked(self.model(x[None].clone())) for x in given])
        try:
            executed = self._executed or Executed(self.model, self.audit.layers, given[:1])
            # Real arithmetic only counts the rounding of float64 logits: a looser bound suffices.
            self._found.append(executed.measure(given, sums=self.arithmetic != "real"))
        except (RuntimeError, TypeError, ValueError) as error:
            if self.arithmetic != "real":
                raise
            self._give_up(NotProved(f"the captured graph cannot run: {first_line(error)}"))
            self._single = True
            warnings.warn(f"the inputs run one by one, because {self.why}", stacklevel=4)
            return self._alone(given)
        if self._executed is None:
            self._executed = executed
            try:
                self._check(executed, given[:1])
            except NotProved as error:
                self._give_up(error)
        return self._found[-1].logits

    def _check(self, executed: Executed, example: Tensor) -> None:
        """Check that the rounding of this network can be bounded."""
        check_kernels(executed.graph, example)
        if self.arithmetic == "float64":
            check_recomputed(self.source, self.model)
        if self.arithmetic != "float32":
            own = next(self.source.parameters(), example).dtype
            check_same_factors(self.source, executed.graph, example.to(own))

    def _give_up(self, error: NotProved) -> None:
        """Do without the rounding in real arithmetic; fail in any other."""
        if self.arithmetic != "real":
            raise error
        self.why = str(error)

    def finish(self) -> Certificates:
        """Return the certificates of all inputs that were added."""
        ran, logits = torch.cat(self._logits), torch.cat(self._centres)
        plain = _radii(logits, self.audit)
        errors = None
        if self._found and not self.why:
            try:
                errors = self._errors(ran, plain)
            except NotProved as error:
                self._give_up(error)
        kind = self.arithmetic if errors is not None else "logits"
        said = ARITHMETIC[kind]
        if self.audit.domain is not None:
            low, high = self.audit.domain
            said = f"{said}, for changed inputs in [{low:g}, {high:g}]"
        if errors is None:
            said = f"{said}: {self.why}" if self.why else said
            return Certificates(plain, logits, said, None, plain < 0)
        shares = 1 if self.arithmetic == "real" else 2  # at the input, and where it is moved to
        radii = _radii(logits, self.audit, shares * errors.pairs(logits.argmax(1)))
        if self.arithmetic != "real":  # what ran is the prediction
            radii = torch.where(ran.argmax(1) == logits.argmax(1), radii, 0.0)
            logits = ran
        size = torch.from_numpy(errors.logits)
        lost = (plain > 0) & (radii == 0)
        return Certificates(radii, logits, said, size, lost)

    def _errors(self, logits: Tensor, plain: Tensor) -> Errors:
        """Bound the rounding within the largest radius that a certificate could have."""
        assert self._executed is not None
        measured = Measured.joined(self._found)
        reach = torch.zeros_like(plain) if self.arithmetic == "real" else plain
        errors = self._executed.errors(measured, reach.cpu().numpy())
        if errors.why and self.audit.upper < math.inf:  # ranges do not bound rounding
            raise NotProved(f"its rounding is not bounded: {errors.why}")
        apart = (logits.double() - measured.logits).norm(dim=1).cpu()
        if bool((apart > 2 * torch.from_numpy(errors.logits)).any()):  # False for NaN
            raise ValueError(
                f"the network's logits differ by {float(apart.nan_to_num().max()):.1e} from those "
                f"of its operations, more than rounding can explain: it mixes the inputs of a "
                f"batch, or runs in a lower precision; certify one input at a time, without TF32"
            )
        return errors


def _checked(logits: object) -> Tensor:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be (batch, classes) with two or more classes, got {shape}")
    return logits


def _radii(source: Tensor, audit: Audit, rounding: Tensor | float = 0.0) -> Tensor:
    """Return the radii that follow from logits, whose differences are reduced by ``rounding``."""
    logits = source.double()
    best = logits.argmax(1)
    gains, errors = (table.to(logits.device)[best] for table in _pairs(audit, logits.shape[1]))
    gaps = logits.amax(1, keepdim=True) - logits - 2 * errors - rounding  # (batch, classes)
    radii = torch.where(gains > 0, gaps / gains, math.inf)
    radii = torch.where((gaps > 0) & (gains < math.inf), radii, 0.0)
    others = torch.arange(logits.shape[1], device=best.device) != best[:, None]
    radii = torch.where(others, radii, math.inf).amin(1) * (1 - 1e-12)
    return torch.where(logits.isfinite().all(1), radii, 0.0)


def _check_inputs(inputs: Tensor, audit: Audit) -> None:
    """Check that a batch fits the audit."""
    if not isinstance(audit, Audit):
        raise ValueError(
            f"audit must be what lipbound.audit returns, got {type(audit).__name__}; call "
            f"certify(model, lipbound.audit(model, shape), inputs)"
        )
    if not isinstance(inputs, Tensor):
        raise ValueError(f"inputs must be a tensor (batch, ...), got {type(inputs).__name__}")
    if tuple(inputs.shape) == audit.input_shape:
        raise ValueError(f"{tuple(inputs.shape)} is a single input; pass a batch: inputs[None]")
    if audit.input_shape is not None and tuple(inputs.shape[1:]) != audit.input_shape:
        raise ValueError(
            f"each input has shape {tuple(inputs.shape[1:])}, but the audit is for "
            f"{audit.input_shape}; audit the network with the shape of the inputs"
        )
    if not inputs.is_floating_point():
        raise ValueError(f"the inputs are {inputs.dtype}; convert them to floating point")
    if audit.domain is not None:
        low, high = audit.domain
        exact = inputs.double()  # a limit such as 0.1 is another number in float32
        if not bool(((exact >= low) & (exact <= high)).all()):
            raise ValueError(
                f"the inputs reach from {float(inputs.min()):g} to {float(inputs.max()):g}, but "
                f"the audit is for inputs in [{low:g}, {high:g}]; audit with a larger domain"
            )


def _check_apart(logits: Tensor, alone: Tensor, close: bool) -> None:
    """Check that the logits of a batch are those of each input alone.

    Args:
        logits: Logits of the batch.
        alone: Logits of each input alone.
        close: Whether to compare their values too: they may differ by 1 % of the largest logit.
            Otherwise the bound on the rounding decides.

    Raises:
        ValueError: If they are not.
    """
    apart = logits.shape == alone.shape  # one row for the whole batch mixes the inputs
    if apart and close:
        apart = bool((alike(alone, logits.to(alone)) | ~alone.isfinite().all(1)).all())
    if not apart:
        raise ValueError(
            f"the network mixes the inputs of a batch: its logits for these {len(alone)} differ "
            f"from those for each input alone; certify one at a time: inputs[i : i + 1]"
        )


def _pairs(audit: Audit, classes: int) -> tuple[Tensor, Tensor]:
    """Return a Lipschitz constant of f_i − f_j and its error for every pair of classes."""
    whole = torch.full((classes, classes), math.sqrt(2) * (1 + 1e-15), dtype=torch.float64)
    gains, errors = (products_above(whole, number) for number in (audit.upper, audit.error))
    for table in (audit.head, audit.pairs):
        if table is not None and len(table) != classes:
            raise ValueError(
                f"the logits have {classes} classes, the audited network has {len(table)}; pass "
                f"the audit of this network"
            )
    if audit.pairs is not None:
        gains = torch.minimum(gains, audit.pairs)
    if audit.head is None:
        return gains, errors
    rows = audit.head.double().cpu()
    pairs = torch.stack([norms_above(row - rows) for row in rows])
    if audit.head_error:  # rows may be equal only because of rounding
        pairs = products_above(pairs + math.sqrt(2) * audit.head_error, 1.0)
    return (
        torch.minimum(gains, products_above(pairs, audit.features)),
        torch.minimum(errors, products_above(pairs, audit.features_error)),
    )
