"""Write evaluations under attack as one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lipbound.report.figures import attack_axes
from lipbound.report.html import picture, render, table
from lipbound.robust.attacks.evaluation import Evaluation


def attack_page(found: Sequence[Evaluation]) -> str:
    """Return the HTML page of evaluations, for example of the best and the final network."""
    sections = [
        {
            "title": one.title(),
            "rows": one.texts(one.rows()),
            "said": one.summary(),
            "pictures": {"Iterations, radius and Jacobian": picture(attack_axes([one]))},
            "folded": {},
            "wide": True,
        }
        for one in found
    ]
    rows = [{"network": one.title(), **row} for one in found for row in one.rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    files = {
        "attacks.json": json.dumps([one.to_dict() for one in found], indent=1),
        "attacks.csv": table([dict.fromkeys(names) | row for row in rows]),
    }
    return render("sheet", "Accuracy under attack", files, sections=sections)
