"""Tables and numbers of the Markdown pages that are made from records."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for the pages that are made from records."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def digits(value: float) -> str:
    """Three of them, or all before the point.

    Example:
        >>> digits(0.04321), digits(1234.5)
        ('0.0432', '1234')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
