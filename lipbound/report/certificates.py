"""Print certified accuracies, or write them as one self-contained HTML file."""

from __future__ import annotations

import json
from typing import Any

from lipbound.report.figures import certificate_axes, class_radii_axes, radii_axes
from lipbound.report.html import picture, render, table
from lipbound.report.terminal import Record, Screen, echo, titled
from lipbound.results import digits, percent, within
from lipbound.robust.attacks.evaluation import title_of

HEADINGS = (
    "L2 radius", "certified accuracy", "95 % interval", "worst class", "attacked", "proved",
)  # fmt: skip


def certificate_table(record: Record) -> None:
    """Print certified accuracies with intervals, beside the accuracy under attack."""
    table = titled(title_of(record))
    for name in _headings(record):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in certificate_rows(record):
        table.add_row(*cells)
    Screen().show(table)
    for sentence in certificate_words(record):
        echo(sentence)


def _headings(record: Record) -> tuple[str, ...]:
    return HEADINGS if record.get("attacked") else HEADINGS[:-2]


def certificate_rows(record: Record) -> list[list[str]]:
    """Return radius, certified accuracy, interval, worst class, and both for attacked images."""
    count = len(_headings(record))
    rows = [_row("0 (clean)", record["clean"], "nearest", "", "", "")[:count]]
    for radius, found in record["certified"].items():
        worst = min(share for share in found["by_class"] if share is not None)
        attack = record.get("attacked", {}).get(radius)
        both = ["", ""]
        if attack:
            both = [percent(attack["accuracy"]), percent(attack["proved"], "down")]
        worst = percent(worst, "down")
        rows.append(_row(radius_name(float(radius)), found, "down", worst, *both)[:count])
    return rows


def radius_name(radius: float) -> str:
    """Name a radius, as a number of grey levels if it is one, else rounded down.

    Example:
        >>> radius_name(36 / 255), radius_name(0.25)
        ('36/255 (0.1411)', '0.2500')
    """
    levels = round(255 * radius)
    whole = levels > 0 and 0 <= radius - levels / 255 <= 1e-9
    return f"{levels}/255 ({within(radius)})" if whole else within(radius)


def _row(name: str, found: Record, rounding: str, *others: str) -> list[str]:
    low, high = found["interval"]
    ends = f"{percent(low, 'down').removesuffix(' %')} to {percent(high, 'up')}"
    return [name, percent(found["accuracy"], rounding), ends, *others]


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
            f"Rounding changes the logits by at most {digits(record['rounding'], 2, 'up')} (L2, "
            f"median over the images). {_lost(record['lost_to_rounding'])}"
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
        for radius, one in attacked.items():
            if one["accuracy"] < one["proved"]:
                words.append(
                    f"contradiction: at the radius {digits(float(radius), 4, 'down')} the attack "
                    f"left {percent(one['accuracy'])} of the images right, but "
                    f"{percent(one['proved'], 'down')} are proved, so the bound or the attack is "
                    f"wrong, or the rounding of float32 misclassified them"
                )
    return words


def _lost(count: int) -> str:
    if not count:
        return "No correct image lost its certificate to rounding."
    return f"{count} correct images have the radius 0 only because of rounding."


def certificate_page(record: dict[str, Any]) -> str:
    """Return the HTML page of a record of :func:`lipbound.robust.certification.certification`."""
    names, shares = _headings(record), record["certified"]
    rows = [dict(zip(names, row, strict=True)) for row in certificate_rows(record)]
    said = certificate_words(record)
    folded = {}
    pictures = {"Accuracy over the radius": picture(certificate_axes(record))}
    if "histogram" in record:
        said.append(_without(record))
        pictures["Certified radii of all images"] = picture(radii_axes(record))
        folded["Certified radii of each class"] = picture(class_radii_axes(record))
    section = {
        "title": "Certified accuracy",
        "rows": rows,
        "said": said,
        "pictures": pictures,
        "folded": folded,
    }
    files = {
        "certificates.json": json.dumps(record, indent=1),
        "certificates.csv": table([_numbers(radius, one) for radius, one in shares.items()]),
    }
    return render("sheet", title_of(record), files, sections=[section], device=record["device"])


def _numbers(radius: str, found: Record) -> dict[str, Any]:
    classes = {f"class {label}": share for label, share in enumerate(found.get("by_class", []))}
    low, high = found["interval"]
    share = {"accuracy": found["accuracy"], "low": low, "high": high}
    return {"radius": float(radius), **share, **classes}


def _without(record: Record) -> str:
    positive = sum(map(sum, record["histogram"]["by_class"]))
    infinite = record["histogram"]["infinite"]
    more = f"{infinite} have an infinite radius and are left out, and " if infinite else ""
    return (
        f"The histograms show the {positive} images with a {'finite ' if infinite else ''}radius "
        f"above 0; {more}the other {record['images'] - positive - infinite} are misclassified or "
        f"have the radius 0."
    )
