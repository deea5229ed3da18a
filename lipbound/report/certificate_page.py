"""Write certified accuracies as one self-contained HTML file."""

from __future__ import annotations

import io
from typing import Any

from lipbound import __version__
from lipbound.report.figures import canvas, certificate_axes, numbered
from lipbound.report.terminal import certificate_rows, certificate_words

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
<tr><th>L2 radius</th><th>certified accuracy</th><th>95 % interval</th><th>worst class</th>
<th>attacked</th></tr>
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


def certificate_page(record: dict[str, Any]) -> str:
    """Return the HTML page of a record of :func:`lipbound.robust.certification.certification`."""
    from jinja2 import Environment
    from markupsafe import Markup

    figure = certificate_axes(record)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    canvas().close(figure)
    drawn = numbered(buffer.getvalue()).decode()
    title = f"{record['model']}, {record['arm']}, {record['checkpoint']} on {record['data']}"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=title,
        record=record,
        rows=certificate_rows(record),
        words=certificate_words(record),
        picture=Markup(drawn[drawn.index("<svg") :]),  # made by Matplotlib, without user's text
        version=__version__,
    )
