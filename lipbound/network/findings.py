"""Results of an audit: for each layer, for each operation and for the network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lipbound.bounds import Bracket


@dataclass(frozen=True)
class LayerReport:
    """Result for a single layer.

    Attributes:
        name: Name in ``model.named_modules()``.
        layer: The module, or the weight tensor if there is no module.
        bracket: Certified interval of its norm, for every input size.
        lipbound: The paper's bound, for comparison; ``None`` for BatchNorm and Linear.
    """

    name: str
    layer: Any
    bracket: Bracket
    lipbound: float | None


@dataclass(frozen=True)
class StepReport:
    """Result for one operation of the graph.

    Attributes:
        name: Name of its result.
        op: Name of the operation.
        module: Path of the module it belongs to.
        inputs: Names of the values it reads.
        shape: Shape of its result, without the batch axis.
        lipschitz: Lipschitz bound of the map from the network's input to its result.
        gain: ``lipschitz`` divided by the largest ``lipschitz`` of its inputs.
        reason: Why there is no bound; empty if there is one.
    """

    name: str
    op: str
    module: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    lipschitz: float
    gain: float
    reason: str


@dataclass(frozen=True)
class Audit:
    """Result of an audit of a network.

    Attributes:
        layers: Results of the single layers.
        upper: Certified bound on the network's L2 Lipschitz constant; ∞ if there is none.
        lower: Largest Jacobian norm that was found; 0 if there was no search.
        reason: Why ``upper`` is infinite, or why there is no graph.
        steps: Results of the graph's operations; empty if the graph could not be captured.
        product: Product of the upper bounds of all layers, BatchNorm included, for comparison.
        input_shape: Shape of one input.
        features: Bound up to the input of the last layer, if that is a Linear layer.
        head: Matrix of that Linear layer.
        note: What was assumed, what was left out, and how ``upper`` was lowered below the steps'.
        error: Bound on the L2 distance, at every input, between the network and a function with
            the constant ``upper``; 0 unless an operation jumps a little, as torch's softplus does.
        features_error: The same error up to the last layer's input.
        head_error: Bound on the norm of the rounding errors in ``head``, if it was computed.
        weights: Fingerprint of the network's weights, by which :func:`lipbound.certify` knows them.
        floor: A number below which no method can go that only knows the same limits of the slopes
            of the activations, as LipSDP does. 0 means that none is known; only
            ``effort='high'`` looks for one.
        pairs: Certified bounds on the Lipschitz constants of the differences of two outputs,
            ``(classes, classes)``, if ``effort='high'`` proved them.
        above: log10 of a bound that is above the largest float64, so that ``upper`` is ∞.
        domain: Limits of the inputs for which the bounds hold; ``None`` if they hold for every
            input.
    """

    layers: tuple[LayerReport, ...]
    upper: float
    lower: float
    reason: str
    steps: tuple[StepReport, ...]
    product: float
    input_shape: tuple[int, ...] | None
    features: float = math.inf
    head: Tensor | None = None
    note: str = ""
    error: float = 0.0
    features_error: float = 0.0
    head_error: float = 0.0
    floor: float = 0.0
    weights: str = ""
    pairs: Tensor | None = None
    domain: tuple[float, float] | None = None
    above: float = math.inf

    @property
    def log10_upper(self) -> float:
        """Return log10 of ``upper``, rounded up; also if ``upper`` is above the largest float64."""
        if not self.upper < math.inf:
            return self.above
        return math.nextafter(math.log10(self.upper), math.inf) if self.upper else -math.inf

    @property
    def bounded_part(self) -> StepReport | None:
        """Return the last operation before the first one without a bound."""
        last = None
        for step in self.steps:
            if step.lipschitz == math.inf:
                break
            last = step
        return last


def joined(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(filter(None, notes))
