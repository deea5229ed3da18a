"""The results of a campaign, which can be added: counts, smallest margins, violations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """The results over any number of seeds.

    Attributes:
        count: Number of layers, networks, or start kernels of a search.
        claims: Claim → number of checks, smallest margin, and the place of that margin.
        counts: Axis (kinds, dtypes, ...) → number of each value.
        violations: Claims that failed, with their seed and a reproduction.
    """

    count: int = 0
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[dict[str, Any]] = field(default_factory=list)

    def saw(self, name: str, margins: Iterable[float], place: list[int]) -> None:
        """Add the margins of one claim at ``place`` and index. Infinite margins are ignored."""
        for index, margin in enumerate(margins):
            self._saw(name, 1, margin if math.isfinite(margin) else None, [*place, index])

    def _saw(self, name: str, count: int, margin: float | None, place: list[int] | None) -> None:
        known = self.claims.setdefault(name, {"count": 0, "margin": None, "at": None})
        known["count"] += count
        if margin is not None and (known["margin"] is None or margin < known["margin"]):
            known.update(margin=margin, at=place)

    def violated(self, claim: str, place: list[int], message: str, reproduction: str = "") -> None:
        """Add a violation, with Python code that reproduces it if there is any."""
        wrong = {"claim": claim, "at": place, "message": message}
        self.violations.append(wrong | ({"reproduction": reproduction} if reproduction else {}))

    def add(self, other: Tally) -> None:
        """Add another tally."""
        self.count += other.count
        for name, theirs in other.claims.items():
            self._saw(name, theirs["count"], theirs["margin"], theirs["at"])
        for axis, each in other.counts.items():
            self.counts.setdefault(axis, Counter()).update(each)
        self.violations += other.violations

    def record(self) -> dict[str, Any]:
        """Return the tally as a JSON record."""
        return {
            "count": self.count,
            "claims": dict(sorted(self.claims.items())),
            "counts": {axis: dict(sorted(each.items())) for axis, each in self.counts.items()},
            "violations": self.violations,
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> Tally:
        """Return the tally of a record."""
        counts = {axis: Counter(each) for axis, each in record["counts"].items()}
        claims = {name: dict(claim) for name, claim in record["claims"].items()}
        return cls(record["count"], claims, counts, list(record["violations"]))
