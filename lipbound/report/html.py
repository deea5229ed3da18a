"""What the HTML pages share: one template, formats of numbers, and files to download."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from lipbound import __version__
from lipbound.files import printable
from lipbound.report.figures import encoded
from lipbound.results import exponent_of_ten, scientific

if TYPE_CHECKING:
    from markupsafe import Markup


def render(template: str, title: str, files: Mapping[str, str], **values: Any) -> str:
    """Return a page, one self-contained file that needs no server and no internet.

    Args:
        template: Name of the page in ``lipbound/data``, without its ending.
        title: The heading.
        files: Name → text of each file that the page offers for download.
        values: What the template shows.
    """
    from jinja2 import Environment, PackageLoader

    script = resources.files("lipbound").joinpath("data", "page.js").read_text("utf-8")
    environment = Environment(
        loader=PackageLoader("lipbound", "data"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    filters = {"number": number, "power": power, "exponent": exponent, "parts": parts}
    environment.filters |= filters
    return environment.get_template(f"{template}.html").render(
        title=printable(title),
        files={name: _address(text) for name, text in files.items()},
        version=__version__,
        torch=torch.__version__,
        script=script,
        # The browser runs only this script, even if a layer's name contains HTML.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def number(value: float | None, rounding: str = "nearest") -> str:
    """Format a number with four digits; ``None`` becomes an empty string.

    Example:
        >>> number(10.7003), number(10.7003, "up"), number(0.02), number(1.5e7)
        ('10.70', '10.71', '0.02000', '1.500e+07')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "∞"
    if not value:
        return "0"
    mantissa, exponent = scientific(value, 4, rounding)
    if not -4 <= exponent < 4:
        return f"{mantissa:f}e{exponent:+03d}"
    return f"{mantissa.scaleb(exponent):f}"


def power(value: float) -> Markup:
    """Format a large or small number as a·10^b, rounded up."""
    from markupsafe import Markup

    if not math.isfinite(value) or 1e-3 <= abs(value) < 1e5 or value == 0:
        return Markup(number(value, "up"))
    mantissa, exponent = scientific(value, 3, "up")
    return Markup(f"{mantissa} · 10<sup>{exponent}</sup>")


def exponent(value: float, places: int = 2, rounding: str = "up") -> Markup:
    """Format a number as a power of ten."""
    from markupsafe import Markup

    return Markup(f"10<sup>{exponent_of_ten(value, places, rounding)}</sup>")


def parts(name: str) -> Markup:
    """Let a long name wrap at its dots, and nowhere else."""
    from markupsafe import Markup, escape

    return Markup(".<wbr>").join(escape(part) for part in printable(name).split("."))


def picture(figure: Any) -> str:
    """Return a figure as the address of an SVG image, and close it."""
    return "data:image/svg+xml;base64," + base64.b64encode(encoded(figure, "svg")).decode()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell of a CSV file; a spreadsheet would compute a text that begins like a formula.

    Example:
        >>> _cell("=1+1"), _cell("conv1"), _cell(-1.5)
        ("'=1+1", 'conv1', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def _address(text: str) -> str:
    """Return a file as the address of a download."""
    return "data:application/octet-stream;base64," + base64.b64encode(text.encode()).decode()
