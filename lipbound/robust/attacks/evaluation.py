"""The result of an evaluation under attack: a record that prints and shows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lipbound.results import Result


def title_of(record: Mapping[str, Any]) -> str:
    """Name the network and the data of a record of ``attack`` or ``certify``."""
    parts = (record["model"], record["arm"], record["checkpoint"])
    return f"{', '.join(filter(None, parts))} on {record['data']}"


class Evaluation(Result, dict[str, Any]):
    """Accuracies of a network under attack, with intervals, evidence and doubts.

    It is the dictionary that :func:`lipbound.robust.evaluate` describes, so
    ``found["pgd"]["accuracy"]`` is a number. ``print`` shows a row for each attack and each radius,
    and then the doubts.

    Example:
        >>> clean = {"accuracy": 0.9, "interval": [0.85, 0.94], "images": 200}
        >>> print(Evaluation({"plan": {"attacks": []}, "clean": clean}))
        Accuracy under attack of 200 images
        attack  accuracy     low    high  images
        clean     90.0 %  85.0 %  94.0 %     200
        low and high: ends of the 95 % confidence interval of the accuracy
    """

    rounding: ClassVar[Mapping[str, str]] = {"low": "down", "high": "up"}
    shares: ClassVar[frozenset[str]] = frozenset({"accuracy", "low", "high"})

    def __repr__(self) -> str:
        parts = [f"{row['attack']}={row['accuracy']:.4g}" for row in self.rows()]
        return f"Evaluation({', '.join(parts)}, doubts={len(self.get('doubts', []))})"

    def title(self) -> str:
        if "data" in self:
            return title_of(self)
        return f"Accuracy under attack of {self['clean']['images']:,} images"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for the clean accuracy, and one for each attack and radius."""
        return [
            {
                "attack": name,
                "accuracy": found["accuracy"],
                "low": found["interval"][0],
                "high": found["interval"][1],
                "images": found["images"],
            }
            for name, found in self._accuracies()
        ]

    def _accuracies(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "clean", self["clean"]
        plan = self["plan"]
        for name in plan["attacks"]:
            found = self[name]
            if "accuracy" in found:
                budget = f", {plan['iterations']}×{plan['restarts']}" if name == "pgd" else ""
                yield f"{name} {plan['ball']} {plan['radius']:.4g}{budget}", found
                continue
            for radius, one in found.items():
                if isinstance(one, dict):
                    yield f"{name} l2 {radius}", one
        for radius, found in self.get("certified", {}).items():
            yield f"certified l2 {radius}", found

    def summary(self) -> list[str]:
        """Describe the evidence, and say each doubt in a sentence that begins with "doubt"."""
        said = ["low and high: ends of the 95 % confidence interval of the accuracy"]
        median = self.get("cw", {}).get("median_norm")
        if median is not None:
            said.append(f"median L2 norm of C&W perturbations: {median:.4g}")
        if "jacobian_norms" in self:
            norms = self["jacobian_norms"]
            largest = norms["quantiles"][-1]
            said.append(f"Jacobian norm: mean {norms['mean']:.3g}, largest {largest:.3g}")
        if "evidence" in self:
            seen = self["evidence"]
            largest = list(seen["against_radius"].values())[-1]
            seen = {name.replace("_", " "): share for name, share in seen.items()}
            plain, others = (
                ", ".join(f"{name} {seen[name]:.3f}" for name in names if name in seen)
                for names in EVIDENCE
            )
            said.append(f"accuracy on {seen['images']} images: {plain}")
            said.append(f"by other attacks on them: {others}, largest radius {largest:.3f}")
        said += [f"doubt: {text}" for text in self.get("doubts", [])]
        if "doubts" in self and not self["doubts"]:
            said.append("no doubts: gradients, iterations, radii and a gradient-free attack agree")
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a plain dictionary."""
        return dict(self)


EVIDENCE = ("pgd 10", "pgd 50", "pgd 250", "white box"), ("margin", "random search", "transfer")
