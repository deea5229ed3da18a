"""Two audits side by side: what changed between two checkpoints, or two architectures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from lipbound.network.advice import blocks
from lipbound.network.findings import Audit, log10
from lipbound.results import Result, digits, finite

MOST = 3  # changes to name


@dataclass(frozen=True)
class Comparison(Result):
    """The audits A and B of two networks, with their layers and blocks matched by name.

    ``print`` shows the intervals of each layer side by side and what changed most.

    Attributes:
        a: The audit of the network in question.
        b: The audit of the network that it is compared with, for example an earlier checkpoint.
        names: Names of the two networks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lipbound import audit
        >>> small, large = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> _ = small.weight.data.copy_(0.5 * torch.eye(2)), large.weight.data.copy_(torch.eye(2))
        >>> found = Comparison(audit(small, (2,)), audit(large, (2,)), ("new", "old"))
        >>> found.summary()[2]
        'the bound of A is 0.5 times that of B'
    """

    a: Audit
    b: Audit
    names: tuple[str, str] = ("A", "B")

    rounding: ClassVar[Mapping[str, str]] = {
        f"{end} {side}": way for end, way in (("lower", "down"), ("upper", "up")) for side in "AB"
    }

    def title(self) -> str:
        return f"{self.names[0]} (A) against {self.names[1]} (B)"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each layer of A, then the layers that only B has.

        ``A / B`` is the ratio of the upper ends, ``None`` for a layer that only one network has.
        """
        a, b = ({row["layer"]: row for row in audit.rows()} for audit in (self.a, self.b))
        return [_side_by_side(name, a.get(name), b.get(name)) for name in a | b]

    def blocks(self) -> list[dict[str, Any]]:
        """Return the gains of the residual blocks of both networks, matched by name."""
        a, b = ({one["block"]: one["gain"] for one in blocks(audit)} for audit in (self.a, self.b))
        return [
            {
                "block": name,
                "gain A": a.get(name),
                "gain B": b.get(name),
                "A / B": _ratio(a.get(name), b.get(name)),
            }
            for name in a | b
        ]

    def changed(self) -> list[dict[str, Any]]:
        """Return the rows of layers whose intervals do not overlap, the largest change first."""
        found = [row for row in self.rows() if row["A / B"] is not None and not _overlap(row)]
        return sorted(found, key=lambda row: -_size(row["A / B"]))

    def summary(self) -> list[str]:
        """Say what the bounds are, what changed most, and which layers only one network has."""
        both = ("A", self.a), ("B", self.b)
        lines = [f"{side}: {audit.summary()[0]}" for side, audit in both]
        ratio = _ratio(self.a.upper, self.b.upper)
        if ratio is not None and self.a.steps and self.b.steps:
            lines.append(f"the bound of A is {digits(ratio, 4)} times that of B")
        product = _ratio(self.a.product, self.b.product)
        if product is not None:
            lines.append(
                f"the product of the layers' bounds of A, {digits(self.a.product, 4, 'up')}, is "
                f"{digits(product, 4)} times that of B"
            )
        rows, changed = self.rows(), self.changed()
        shared = sum(row["A / B"] is not None for row in rows)
        lines.append(f"{len(changed)} of {shared} layers with the same name have another norm")
        if changed:
            top = [f"{row['layer']} (×{digits(row['A / B'], 3)})" for row in changed[:MOST]]
            lines.append(f"what changed most, from B to A: {', '.join(top)}")
        gains = [one for one in self.blocks() if one["A / B"] is not None]
        if gains:
            block = max(gains, key=lambda one: _size(one["A / B"]))
            a, b = (digits(block[f"gain {side}"], 4, "up") for side in "AB")
            lines.append(
                f"the residual block that changed most: {block['block']}, with the gain {a} in A "
                f"and {b} in B"
            )
        for side, other in ("AB", "BA"):
            alone = [row["layer"] for row in rows if row[f"upper {other}"] is None]
            if alone:
                more = f" and {len(alone) - MOST} more" if len(alone) > MOST else ""
                lines.append(f"only in {side}: {', '.join(alone[:MOST])}{more}")
        notes = {side: [one for one in audit.note.split("; ") if one] for side, audit in both}
        alike = [one for one in notes["A"] if one in notes["B"]]
        own = [f"{side}: {one}" for side in notes for one in notes[side] if one not in alike]
        return [*lines, *alike, *own]

    def to_dict(self) -> dict[str, Any]:
        """Return both audits, and their layers and blocks side by side, as plain data."""
        return {
            "names": list(self.names),
            "A": self.a.to_dict(),
            "B": self.b.to_dict(),
            "ratio": _ratio(self.a.upper, self.b.upper),
            "layers": [_finite(row) for row in self.rows()],
            "blocks": [_finite(row) for row in self.blocks()],
        }

    def _page(self) -> str:
        try:  # the report imports the comparison
            page = import_module("lipbound.report.page").comparison_page
            return str(page(self))
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lipbound[report]'") from None


def _side_by_side(
    name: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None
) -> dict[str, Any]:
    shapes = dict.fromkeys(row["geometry"] for row in (a, b) if row)
    ends: dict[str, Any] = {
        f"{end} {side}": None if row is None else row[end]
        for side, row in (("A", a), ("B", b))
        for end in ("lower", "upper")
    }
    ratio = _ratio(ends["upper A"], ends["upper B"])
    return {"layer": name, "geometry": ", ".join(shapes), **ends, "A / B": ratio}


def _ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or ``None`` if it is not a finite number."""
    if a is None or b is None or not b > 0 or not math.isfinite(a / b):
        return None
    return a / b if math.isfinite(b) else None


def _overlap(row: Mapping[str, Any]) -> bool:
    return bool(row["lower A"] <= row["upper B"] and row["lower B"] <= row["upper A"])


def _size(ratio: float) -> float:
    """Return how large a change is, equal for a ratio and its inverse."""
    return abs(log10(ratio))


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: finite(v) if isinstance(v, float) else v for k, v in row.items()}
