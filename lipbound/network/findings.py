"""What an audit says: of each layer, of each operation, of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lipbound.bounds import Bracket


@dataclass(frozen=True)
class LayerReport:
    """One layer as it stands, alone.

    Attributes:
        name: As in ``model.named_modules()``.
        layer: The module, or the weight tensor where there is no module.
        bracket: Certified interval of its norm, for every input size.
        lipbound: The paper's bound beside it; ``None`` for BatchNorm and Linear.
    """

    name: str
    layer: Any
    bracket: Bracket
    lipbound: float | None


@dataclass(frozen=True)
class StepReport:
    """One operation of the graph: what the bound is after it.

    Attributes:
        name: Of its result.
        op: The operation.
        module: Path of the module it belongs to.
        inputs: Names of what it reads.
        shape: Of its result, without the batch axis.
        lipschitz: Bound on the map from the network's input to its result.
        gain: That over the largest of its inputs'.
        reason: Why it is unbounded.
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
    """What is known of a network.

    Attributes:
        layers: Its layers, alone.
        upper: A bound on its L2 Lipschitz constant, proved; ∞ with ``reason`` if there is none.
        lower: The largest Jacobian norm that was found; 0 if none was looked for.
        reason: Why ``upper`` is infinite, or why there is no graph.
        steps: The graph, operation by operation; empty if it could not be captured.
        product: The product of the layers' own bounds, BatchNorm apart, for comparison.
        input_shape: Of one input.
        features: Where the network ends in a Linear layer, the bound up to that layer's input.
        head: That layer's matrix.
        note: How the bound was lowered below what the steps say, what was assumed and left out.
        error: How far the network may be, everywhere, from a function with the constant ``upper``,
            in the L2 norm; 0 unless an operation jumps a little, as torch's softplus does.
        features_error: The same up to the last layer's input.
        head_error: Bounds the norm of what rounding did to ``head``, where it was computed.
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

    @property
    def bounded_part(self) -> StepReport | None:
        """The last operation before the first unbounded one."""
        last = None
        for step in self.steps:
            if step.lipschitz == math.inf:
                break
            last = step
        return last


def joined(*notes: str) -> str:
    """Notes as one, without the empty ones."""
    return "; ".join(filter(None, notes))
