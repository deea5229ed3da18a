"""Results of an audit: for each layer, for each operation and for the network."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lipbound import __version__
from lipbound.bounds import Bracket
from lipbound.geometry import Convolution, convolution
from lipbound.results import Result, digits, exponent_of_ten, finite


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
        inputs: Names of the network's inputs and of the earlier operations that it reads.
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


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """Result of an audit of a network.

    ``print`` shows the layers and a summary, :meth:`to_dict` and :meth:`to_frame` return the
    numbers, and :meth:`save_html` writes a page with pictures.

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
        at_one: Bound of the network if every convolution and Linear layer had a norm of at most 1
            and nothing else changed; ∞ if it is not known.
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
    at_one: float = math.inf

    @property
    def log10_upper(self) -> float:
        """Return log10 of ``upper``, rounded up; also if ``upper`` is above the largest float64."""
        if not self.upper < math.inf:
            return self.above
        return math.nextafter(math.log10(self.upper), math.inf) if self.upper else -math.inf

    @property
    def within(self) -> str:
        """Return for which inputs the bounds hold, as a phrase; empty if for all."""
        if self.domain is None:
            return ""
        low, high = self.domain
        return f" for inputs in [{low:g}, {high:g}]"

    def title(self) -> str:
        shape = "" if self.input_shape is None else f" of a network on inputs {self.input_shape}"
        return f"Audit{shape}"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each layer."""
        return [
            {
                "layer": row.name,
                "geometry": geometry(row.layer),
                "lower": row.bracket.lower,
                "upper": row.bracket.upper,
                "LipBound": row.lipbound,
            }
            for row in self.layers
        ]

    def summary(self) -> list[str]:
        """Return a summary of the network in a few lines."""
        lines = []
        if self.steps and self.upper < math.inf:
            lines.append(
                f"network: certified Lipschitz constant at most "
                f"{digits(self.upper, 4, 'up')} "
                f"(10^{exponent_of_ten(self.upper, 2, 'up')}){self.within}"
            )
        elif self.steps:
            lines.append(f"network: no bound, because {self.reason}")
            part = self.bounded_part
            if part is not None:
                place = f" ({part.module})" if part.module else ""
                lines.append(
                    f"bound up to operation {part.name}{place}: {digits(part.lipschitz, 4, 'up')}"
                )
        else:
            lines.append(f"network: no bound; {self.reason}")
        if self.error > 0 and self.upper < math.inf:
            most = digits(self.error, 2, "up")
            lines.append(
                f"the network differs by at most {most} from a function with this constant; "
                f"certify subtracts this difference"
            )
        lines += filter(None, self.note.split("; "))
        if self.floor > 0:
            lines.append(
                f"a method that knows only lipbound's limits of the slopes cannot prove less than "
                f"{digits(self.floor, 4, 'down')} (10^{exponent_of_ten(self.floor, 2, 'down')})"
            )
        if self.lower > 0:
            lower = digits(self.lower, 4, "down")
            lines.append(f"lower bound, the largest Jacobian norm found: {lower}")
        lines.append(
            f"product of the layers' bounds, for comparison: "
            f"{digits(self.product, 4, 'up')} "
            f"(10^{exponent_of_ten(self.product, 2, 'up')})"
        )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain data; infinite numbers become ``None``."""
        return {
            "input_shape": self.input_shape,
            "upper": finite(self.upper),
            "log10_upper": finite(self.log10_upper),
            "error": finite(self.error),
            "lower": self.lower,
            "floor": self.floor,
            "product": finite(self.product),
            "at_one": finite(self.at_one),
            "domain": self.domain,
            "reason": self.reason,
            "note": self.note,
            "layers": [
                {
                    "name": row.name,
                    "geometry": geometry(row.layer),
                    **row.bracket.to_dict(),
                    "lipbound": row.lipbound,
                }
                for row in self.layers
            ],
            "steps": [
                {**vars(step), "lipschitz": finite(step.lipschitz), "gain": finite(step.gain)}
                for step in self.steps
            ],
        }

    def save_html(self, path: str | Path) -> None:
        """Write the audit with pictures as a self-contained HTML page.

        Raises:
            ImportError: If the packages of the extra ``report`` are missing.
            OSError: If the file cannot be written.
        """
        super().save_html(path)

    def _page(self) -> str:
        try:  # the report imports the audit
            page = import_module("lipbound.report.page").page
            return str(page(self, self.title()))
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lipbound[report]'") from None

    def __repr__(self) -> str:
        bound = f"upper={digits(self.upper, 5, 'up')}, lower={digits(self.lower, 5, 'down')}"
        return f"Audit({bound}, layers={len(self.layers)}, input_shape={self.input_shape})"

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


def log10(number: float) -> float:
    """Return the decimal logarithm, −∞ for 0."""
    return math.log10(number) if number > 0 else -math.inf


def geometry(layer: Any) -> str:
    """Describe a layer: ``16→32 3×3``, ``/2`` for stride, ``·2`` dilation, ``g4`` groups."""
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features}→{layer.out_features} linear"
    if not isinstance(layer, _ConvNd | Convolution):
        return type(layer).__name__
    layer = convolution(layer)
    size = layer.kernel.shape[2:]
    parts = [f"{layer.in_channels}→{layer.out_channels}", "×".join(map(str, size))]
    for mark, values in (("/", layer.stride), ("·", layer.dilation)):
        if any(value != 1 for value in values):
            parts.append(mark + "×".join(map(str, sorted(set(values)))))
    if layer.groups > 1:
        parts.append(f"g{layer.groups}")
    if layer.transposed:
        parts.append("transposed")
    if layer.padding_mode != "zeros":
        parts.append(layer.padding_mode)
    return " ".join(parts)


def audit_json(audit: Audit, title: str) -> str:
    """Return the audit as JSON; infinite numbers become ``null``."""
    return json.dumps({"source": title, "lipbound": __version__, **audit.to_dict()}, indent=1)
