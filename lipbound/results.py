"""Results that print as a short table, show in a notebook and convert to plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from lipbound.files import check_writable, printable, write

Row = Mapping[str, Any]
LONGEST = 20  # rows of a printed table

STYLE = "text-align:right;padding:.2rem .6rem;white-space:nowrap"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
body {{ padding: 0 1rem; }}
div {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


class Result:
    """A result with a title, rows and a summary.

    ``print`` shows it as a table of at most 20 rows, a notebook as HTML.
    """

    rounding: ClassVar[Mapping[str, str]] = {"lower": "down", "upper": "up", "LipBound": "up"}
    """How to round the numbers of a column that is shown, so that they stay valid."""
    shares: ClassVar[frozenset[str]] = frozenset()
    """Columns that hold shares between 0 and 1, which are shown in percent."""

    def title(self) -> str:
        """Return the name of the result."""
        return type(self).__name__

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, each with the same names."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """Return the main results, one sentence each."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain data that JSON can hold: numbers, texts, lists and dicts."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise ImportError("to_frame needs pandas; pip install pandas, or use rows()") from None
        return pandas.DataFrame(self.rows())

    def save_html(self, path: str | Path) -> None:
        """Write the whole result as a self-contained HTML page.

        Raises:
            OSError: If the file cannot be written.
        """
        check_writable(Path(path))
        write(Path(path), self._page().encode())

    def _page(self) -> str:
        body = _html(self.texts(self.rows()), self.summary())
        return PAGE.format(title=escape(printable(self.title())), body=body)

    def __str__(self) -> str:
        rows = self.rows()
        lines = [printable(self.title()), *_table(self.texts(rows[:LONGEST]))]
        if len(rows) > LONGEST:
            lines.append(f"... and {len(rows) - LONGEST:,} more rows; rows() returns all")
        return "\n".join([*lines, *map(printable, self.summary())])

    def _repr_html_(self) -> str:
        rows = self.rows()
        said = self.summary()
        if len(rows) > LONGEST:
            said = [f"{len(rows) - LONGEST:,} more rows are not shown; rows() returns all", *said]
        heading = f"<strong>{escape(printable(self.title()))}</strong>"
        return heading + _html(self.texts(rows[:LONGEST]), said)

    def texts(self, rows: Sequence[Row]) -> list[dict[str, str]]:
        """Return the rows as texts."""

        def text(name: str, value: Any) -> str:
            rounding = self.rounding.get(name, "nearest")
            whole = name in self.shares and value is not None
            return percent(value, rounding) if whole else shown(value, rounding)

        return [{name: text(name, value) for name, value in row.items()} for row in rows]


ROUNDINGS = {"nearest": ROUND_HALF_EVEN, "up": ROUND_CEILING, "down": ROUND_FLOOR}


def digits(value: float, count: int = 5, rounding: str = "nearest") -> str:
    """Format a number with some digits, rounded to the nearest, up or down.

    The number is the shortest decimal that a computer reads as the same float, so that 0.3 rounded
    down is 0.3, although the float is slightly below.

    Example:
        >>> digits(1.00004999), digits(1.00004999, 4, "up"), digits(2e7 - 1, 3, "down")
        ('1', '1.001', '1.99e+07')
    """
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = scientific(value, count, rounding)
    if not -4 <= exponent < count:
        return f"{mantissa.normalize():f}e{exponent:+03d}"
    return f"{mantissa.scaleb(exponent).normalize():f}"


def scientific(value: float, count: int, rounding: str = "nearest") -> tuple[Decimal, int]:
    """Return a finite number, rounded to some digits, as ``(a, b)`` with the value a·10^b.

    Example:
        >>> scientific(1234.5, 3, "up"), scientific(5e-324, 3, "down")
        ((Decimal('1.24'), 3), (Decimal('5.00'), -324))
    """
    exact = Context(prec=count, rounding=ROUNDINGS[rounding]).create_decimal(repr(float(value)))
    exponent = exact.adjusted() if exact else 0
    return exact.scaleb(-exponent).quantize(Decimal(1).scaleb(1 - count)), exponent


def fixed(value: float, places: int, rounding: str = "nearest") -> str:
    """Format a number with some decimals, rounded to the nearest, up or down.

    Example:
        >>> fixed(0.301, 2, "up"), fixed(-0.301, 2, "up"), fixed(0.3, 2, "up"), fixed(math.inf, 1)
        ('0.31', '-0.30', '0.30', 'inf')
    """
    if not math.isfinite(value):
        return str(value)
    return _fixed(Decimal(repr(float(value))), places, rounding)


def exponent_of_ten(value: float, places: int = 2, rounding: str = "nearest") -> str:
    """Format the decimal logarithm of a number, with some decimals.

    The logarithm is rounded only once: that of a number slightly above 100 is above 2.

    Example:
        >>> exponent_of_ten(100, 2, "up"), exponent_of_ten(math.nextafter(100, math.inf), 2, "up")
        ('2.00', '2.01')
    """
    if not 0 < value < math.inf:
        return str(value if value else -math.inf)
    return _fixed(Decimal(repr(float(value))).log10(Context(prec=50)), places, rounding)


def _fixed(exact: Decimal, places: int, rounding: str) -> str:
    unit = Decimal(1).scaleb(-places)
    return f"{exact.quantize(unit, ROUNDINGS[rounding], Context(prec=999)):f}"


def percent(share: float, rounding: str = "nearest") -> str:
    """Format a share in percent with one decimal.

    Example:
        >>> percent(0.3, "down"), percent(0.99996), percent(0.99996, "down"), percent(0.29, "down")
        ('30.0 %', '100.0 %', '99.9 %', '29.0 %')
    """
    return f"{fixed(float(100 * Decimal(repr(float(share)))), 1, rounding)} %"


def shown(value: Any, rounding: str = "nearest") -> str:
    """Format a number with five digits; ``None`` becomes an empty text.

    Example:
        >>> shown(0.123456789), shown(0.123456789, "up"), shown(None), shown(12), shown("conv")
        ('0.12346', '0.12346', '', '12', 'conv')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return digits(value, 5, rounding)
    if isinstance(value, list | tuple):
        return ", ".join(shown(one, rounding) for one in value)
    return printable(str(value))


def within(radius: float) -> str:
    """Format a radius within which something is proved, with four decimals, rounded down.

    Example:
        >>> within(72 / 255), within(0.3), within(1.99999e-7)
        ('0.2823', '0.3000', '1.999e-07')
    """
    small = 0 < radius < 1e-3
    return digits(radius, 4, "down") if small else fixed(radius, 4, "down")


def key(number: float) -> str:
    """Name a number so that it can be read back exactly; different numbers have different names.

    Example:
        >>> key(0.3), key(0.3000001), key(1.0), key(1 / 3)
        ('0.3', '0.3000001', '1', '0.3333333333333333')
    """
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def finite(number: float) -> float | None:
    """Return a number, or ``None`` for an infinite one, which JSON does not have."""
    return float(number) if math.isfinite(number) else None


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a plain table; columns of numbers are on the right."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    left = [not all(_is_number(row[name]) for row in rows) for name in names]
    return [
        "  ".join(
            text.ljust(width) if side else text.rjust(width)
            for text, width, side in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in cells
    ]


def _is_number(text: str) -> bool:
    try:
        float(text.removesuffix(" %") or 0)
    except ValueError:
        return False
    return True


def _html(rows: Sequence[Mapping[str, str]], said: Sequence[str]) -> str:
    sentences = "".join(f"<p>{escape(printable(text))}</p>" for text in said)
    if not rows:
        return sentences
    head = "".join(f'<th style="{STYLE}">{escape(name)}</th>' for name in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{STYLE}">{escape(value)}</td>' for value in row.values())
        + "</tr>"
        for row in rows
    )
    return f"<div><table><tr>{head}</tr>{body}</table></div>{sentences}"
