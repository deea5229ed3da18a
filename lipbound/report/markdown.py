"""Format tables and numbers for the Markdown pages that are generated from records."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns in which no row has a value."""
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    return table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def digits(value: float) -> str:
    """Format a number with three significant digits, or as an integer from 100 on.

    Example:
        >>> digits(0.04321), digits(1234.5)
        ('0.0432', '1234')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
