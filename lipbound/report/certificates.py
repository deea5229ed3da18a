"""Print certified accuracies, or write them as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lipbound import __version__
from lipbound.report.figures import certificate_axes, encoded
from lipbound.report.terminal import Record, Screen, echo, titled
from lipbound.results import digits
from lipbound.robust.attacks.evaluation import title_of

HEADINGS = (
    "L2 radius", "certified accuracy", "95 % interval", "worst class", "attacked", "proved",
)  # fmt: skip

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .3rem .7rem; white-space: nowrap; }
th, td { border-bottom: 1px solid #8884; }
svg { background: #fff; max-width: 100%; height: auto; border-radius: 6px; }
footer { color: #888; font-size: .85rem; }
</style>
</head>
<body>
<h1>Certified accuracy</h1>
<p>{{ title }}</p>
<table>
<tr>{% for name in headings %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% for sentence in words %}
<p>{{ sentence }}</p>
{% endfor %}
{{ picture }}
<footer>lipbound {{ version }}, {{ record.device }}, seed {{ record.seed }}</footer>
</body>
</html>
"""


def certificate_table(record: Record, radii: Iterable[float]) -> None:
    """Print certified accuracies with intervals, beside the accuracy under attack."""
    table = titled(title_of(record))
    for name in _headings(record):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in certificate_rows(record, radii):
        table.add_row(*cells)
    Screen().show(table)
    for sentence in certificate_words(record):
        echo(sentence)


def _headings(record: Record) -> tuple[str, ...]:
    return HEADINGS if record.get("attacked") else HEADINGS[:-2]


def certificate_rows(record: Record, radii: Iterable[float]) -> list[list[str]]:
    """Return radius, certified accuracy, interval, worst class, and both for attacked images."""
    names = {f"{radius:.6f}": radius_name(radius) for radius in radii}
    count = len(_headings(record))
    rows = [_certified("0 (clean)", record["clean"], "", "", "")[:count]]
    for radius, found in record["certified"].items():
        worst = min(share for share in found["by_class"] if share is not None)
        attack = record.get("attacked", {}).get(radius)
        both = [f"{100 * attack[k]:.1f} %" if attack else "" for k in ("accuracy", "proved")]
        rows.append(_certified(names[radius], found, f"{100 * worst:.1f} %", *both)[:count])
    return rows


def radius_name(radius: float) -> str:
    """Name a radius, as a number of grey levels if it is one.

    Example:
        >>> radius_name(36 / 255), radius_name(0.25)
        ('36/255 (0.1412)', '0.2500')
    """
    levels = round(255 * radius)
    whole = levels > 0 and abs(radius - levels / 255) <= 1e-9
    return f"{levels}/255 ({radius:.4f})" if whole else f"{radius:.4f}"


def _certified(name: str, found: Record, *others: str) -> list[str]:
    low, high = found["interval"]
    ends = f"{100 * low:.1f} to {100 * high:.1f} %"
    return [name, f"{100 * found['accuracy']:.1f} %", ends, *others]


def certificate_words(record: Record) -> list[str]:
    """Say what the bound is, what was certified, and what the attack shows."""
    said = (
        f"The network has no Lipschitz bound, so nothing is certified: {record['reason']}"
        if record["lipschitz"] is None
        else f"The network's Lipschitz constant is at most {digits(record['lipschitz'], 4, 'up')}."
    )
    words = [
        said,
        f"Certified on {record['images']} images: {record['arithmetic']}. Worst class: the lowest "
        f"certified accuracy of a class.",
    ]
    if record.get("rounding") is not None:
        words.append(
            f"Rounding changes the logits by at most {record['rounding']:.1e} (L2, median over the "
            f"images). {_lost(record['lost_to_rounding'])}"
        )
    if record["arithmetic"].startswith("the network as it runs"):
        words.append(
            "This holds for PyTorch's ordinary kernels: no cuDNN, no NNPACK, no TF32, no autocast."
        )
    attacked = record.get("attacked", {})
    if attacked:
        count = next(iter(attacked.values()))["images"]
        words.append(
            f"Attacked: accuracy of the first {count} images under PGD in L2. Proved: certified "
            f"accuracy of the same images, which can never be larger."
        )
    return words


def _lost(count: int) -> str:
    if not count:
        return "No correct image lost its certificate to rounding."
    return f"{count} correct images have the radius 0 only because of rounding."


def certificate_page(record: dict[str, Any], radii: Iterable[float]) -> str:
    """Return the HTML page of a record of :func:`lipbound.robust.certification.certification`."""
    from jinja2 import Environment
    from markupsafe import Markup

    drawn = encoded(certificate_axes(record), "svg").decode()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=title_of(record),
        headings=_headings(record),
        record=record,
        rows=certificate_rows(record, radii),
        words=certificate_words(record),
        picture=Markup(drawn[drawn.index("<svg") :]),  # made by Matplotlib, without user's text
        version=__version__,
    )
