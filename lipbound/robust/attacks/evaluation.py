"""The result of an evaluation under attack: a record that prints and shows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar

from lipbound.results import Result, digits, within


def title_of(record: Mapping[str, Any]) -> str:
    """Name the network and the data of a record of ``attack`` or ``certify``."""
    parts = (record["model"], record["arm"], record["checkpoint"])
    return f"{', '.join(filter(None, parts))} on {record['data']}"


def in_balls(record: Mapping[str, Any]) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Yield name, norm and radius of each attack of a record, and what was found there."""
    plan = record["plan"]
    for name in plan["attacks"]:
        found = record[name]
        if "accuracy" in found:
            yield name, plan["ball"], plan["radius"], found
        else:
            yield from ((name, "l2", float(r), f) for r, f in found.items() if isinstance(f, dict))
    for radius, found in record.get("against_radius", {}).items():
        yield "pgd with one restart", plan["ball"], float(radius), found


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

    rounding: ClassVar[Mapping[str, str]] = {"low": "down", "high": "up", "certified": "down"}
    shares: ClassVar[frozenset[str]] = frozenset({"accuracy", *rounding})

    def __repr__(self) -> str:
        attacked = [row for row in self.rows() if row["accuracy"] is not None]
        parts = [f"{row['attack']}={row['accuracy']:.4g}" for row in attacked]
        return f"Evaluation({', '.join(parts)}, doubts={len(self.get('doubts', []))})"

    def title(self) -> str:
        if "data" in self:
            return title_of(self)
        return f"Accuracy under attack of {self['clean']['images']:,} images"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for the clean accuracy, for each attack and radius, and what is certified.

        If the network was certified, the last column is the share of the images that are proved to
        keep their right class in the same ball, which no attack can lower.
        """
        proved = "certified" in self
        found = [_row("clean", self["clean"], proved)]
        plan = self["plan"]
        for name, ball, radius, one in in_balls(self):
            if name in plan["attacks"]:
                budget = f", {plan['iterations']}×{plan['restarts']}" if name == "pgd" else ""
                found.append(
                    _row(f"{name} {ball} {digits(radius, 4, 'down')}{budget}", one, proved)
                )
        for radius, one in self.get("certified", {}).items():
            name = f"no attack, l2 {within(float(radius))}"
            row = dict.fromkeys(found[0])
            found.append(row | {"attack": name, "certified": one["accuracy"]})
        return found

    def summary(self) -> list[str]:
        """Describe the evidence, and say each doubt in a sentence that begins with "doubt"."""
        said = ["low and high: ends of the 95 % confidence interval of the accuracy"]
        if "certified" in self:
            said.append(
                "certified: share of the images proved to keep their right class in the same ball"
            )
            said += [f"contradiction: {text}" for text in self["contradictions"]]
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

    def _page(self) -> str:
        try:  # the report imports the evaluation
            page = import_module("lipbound.report.attacks").attack_page
            return str(page([self]))
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lipbound[report]'") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a plain dictionary."""
        return dict(self)


def _row(name: str, found: dict[str, Any], proved: bool) -> dict[str, Any]:
    low, high = found["interval"]
    row = {"attack": name, "accuracy": found["accuracy"], "low": low, "high": high}
    row["images"] = found["images"]
    return row | {"certified": found.get("certified")} if proved else row


EVIDENCE = ("pgd 10", "pgd 50", "pgd 250", "white box"), ("margin", "random search", "transfer")
