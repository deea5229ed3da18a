"""Audit many networks with one command, shared among the processes of ``torchrun``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from lipbound import __version__
from lipbound.cli.arguments import say
from lipbound.report.progress import bar
from lipbound.results import Result, digits, finite

if TYPE_CHECKING:
    from lipbound import Audit

Audited = Callable[[str], tuple[str, "Audit", float]]


@dataclass(frozen=True)
class Audits(Result):
    """The audits of several networks, one row each.

    Attributes:
        found: For each network its ``source``, its ``audit`` as plain data, the largest bound
            of a layer (``largest``), the bound to judge (``worst``), ``None`` if it is infinite or
            above the largest float64, and whether it is ``bounded``.
    """

    found: Sequence[dict[str, Any]]

    def title(self) -> str:
        return "1 network" if len(self.found) == 1 else f"{len(self.found)} networks"

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "network": one["source"],
                "layers": len(one["audit"]["layers"]),
                "lower": one["audit"]["lower"],
                "upper": one["audit"]["upper"],
                "largest layer": one["largest"],
            }
            for one in self.found
        ]

    def summary(self) -> list[str]:
        reasons = [(one["source"], one["audit"].get("reason")) for one in self.found]
        return [f"{source}: {reason}" for source, reason in reasons if reason]

    def to_dict(self) -> dict[str, Any]:
        return {"lipbound": __version__, "audits": list(self.found)}


def audit_many(
    sources: Sequence[str],
    audited: Audited,
    device: str | None,
    json_: bool,
    limit: float | None,
) -> None:
    """Audit each network in one of the processes, and print all results in the first one.

    Raises:
        ValueError: If a network could not be read, after the others are shown.
        KeyboardInterrupt: After Ctrl-C, when what the first process has finished is shown.
    """
    from lipbound.robust.training.distributed import team

    with team(device or "cpu") as who:
        mine = sources[who.rank :: who.size]
        own: list[dict[str, Any]] = []
        try:
            for source in bar(mine, "networks") if who.first else mine:
                own.append(_one(source, audited))
            parts = who.gathered(own)
        except KeyboardInterrupt:
            bar.close()
            if who.first:
                _, wrong = _shown(own, json_)
                for line in (*wrong, f"{len(own)} of {len(mine)} networks were finished"):
                    say(line)
            raise
    if not who.first:
        return
    found = [parts[place % len(parts)][place // len(parts)] for place in range(len(sources))]
    audits, wrong = _shown(found, json_)
    for line in wrong[:-1]:
        say(line)
    if wrong:
        raise ValueError(wrong[-1])
    _judge(audits, limit)


def _shown(
    found: Sequence[dict[str, Any]], json_: bool
) -> tuple[Sequence[dict[str, Any]], list[str]]:
    """Print the audits; return them, and what is wrong with the other networks."""
    from lipbound.report.terminal import echo, result_table

    audits = Audits([one for one in found if "failed" not in one])
    wrong = [one for one in found if "failed" in one]
    if json_:
        echo(json.dumps({**audits.to_dict(), "failed": wrong}, indent=1))
    elif audits.found:
        result_table(audits)
    return audits.found, [f"{one['source']}: {one['failed']}" for one in wrong]


def bounded(worst: float, found: Audit) -> bool:
    """Whether there is a bound; one above the largest float64 is known by its logarithm alone."""
    return worst < float("inf") or found.log10_upper < float("inf")


def _one(source: str, audited: Audited) -> dict[str, Any]:
    from lipbound.network.findings import audit_json

    try:
        name, found, worst = audited(source)
    except (ValueError, OSError) as error:
        return {"source": source, "failed": str(error)}
    about: dict[str, Any] = json.loads(audit_json(found, name))
    layers = [row.bracket.upper for row in found.layers]
    return {
        "source": source,
        "audit": about,
        "worst": finite(worst),
        "largest": finite(max(layers)) if layers else None,
        "bounded": bounded(worst, found),
    }


def _judge(found: Sequence[dict[str, Any]], limit: float | None) -> None:
    """Exit with code 1 if a bound is above the limit, or if there is none."""
    over = [one["source"] for one in found if not one["bounded"] or _above(one["worst"], limit)]
    if over:
        asked = "" if limit is None else f" of at most {digits(limit, 6)}"
        say(f"{len(over)} of {len(found)} networks have no bound{asked}: {', '.join(over)}")
        raise typer.Exit(1)


def _above(worst: float | None, limit: float | None) -> bool:
    return limit is not None and (worst is None or worst > limit)
