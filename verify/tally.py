"""What a campaign has seen: counts, smallest margins, violations. Tallies add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Sums over any number of seeds.

    Attributes:
        count: Layers, networks, or kernels searched from.
        claims: Per claim: how often it was checked, its smallest margin, and where that was.
        counts: Per axis (kinds, dtypes, ...): how many of each.
        violations: What was wrong, with its seed and a reproduction.
    """

    count: int = 0
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[dict[str, Any]] = field(default_factory=list)

    def saw(self, name: str, margins: Iterable[float], place: list[int]) -> None:
        """Margins of one claim; ``place`` and the index say where. Infinite ones say nothing."""
        known = self.claims.setdefault(name, {"count": 0, "margin": None, "at": None})
        for index, margin in enumerate(margins):
            known["count"] += 1
            if math.isfinite(margin) and (known["margin"] is None or margin < known["margin"]):
                known.update(margin=margin, at=[*place, index])

    def add(self, other: Tally) -> None:
        """Take another's in."""
        self.count += other.count
        for name, theirs in other.claims.items():
            mine = self.claims.setdefault(name, {"count": 0, "margin": None, "at": None})
            mine["count"] += theirs["count"]
            margin = theirs["margin"]
            if margin is not None and (mine["margin"] is None or margin < mine["margin"]):
                mine.update(margin=margin, at=theirs["at"])
        for axis, each in other.counts.items():
            self.counts.setdefault(axis, Counter()).update(each)
        self.violations += other.violations

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "count": self.count,
            "claims": dict(sorted(self.claims.items())),
            "counts": {axis: dict(sorted(each.items())) for axis, each in self.counts.items()},
            "violations": self.violations,
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> Tally:
        """Back from a record."""
        counts = {axis: Counter(each) for axis, each in record["counts"].items()}
        claims = {name: dict(claim) for name, claim in record["claims"].items()}
        return cls(record["count"], claims, counts, list(record["violations"]))
