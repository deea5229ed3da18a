"""The section on the speed of certified brackets, and its line in the index of results."""

from __future__ import annotations

from typing import Any

from lipbound.report.markdown import filled_table
from tools.pages import lines

Record = dict[str, Any]


def measured(device: str) -> list[list[Record]]:
    """The records of the ``"cpu"`` or the ``"gpu"``, those of one network and its weights together.

    A later record of the same search replaces an earlier one.
    """
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in lines(f"brackets-{device}"):
        same = found.setdefault((record["network"], record["weights"]), {})
        same[record.get("search", "plain")] = record
    return [list(same.values()) for same in found.values()]


def quickest(records: list[Record]) -> Record:
    """The record of the faster search."""
    return min(records, key=lambda r: r["bracket_seconds"])


def summary() -> str:
    """Say on how many networks brackets are faster than Gram iteration without a certificate."""
    cpu, gpu = (_share(ratios(measured(device))) for device in ("cpu", "gpu"))
    return (
        f"Certified brackets are faster than Gram iteration without a certificate on {cpu} networks "
        f"on a CPU, and on {gpu} networks on a GPU."
    )


def _share(found: list[float]) -> str:
    ahead = sum(ratio >= 1 for ratio in found)
    return f"all {len(found)}" if ahead == len(found) else f"{ahead or 'none'} of {len(found)}"


def ratios(groups: list[list[Record]]) -> list[float]:
    """How many times as long Gram iteration takes on each network, without a certificate."""
    return [quickest(records)["gram_over_bracket"] for records in groups]


def sound(groups: list[list[Record]]) -> list[float]:
    """How many times as long Gram iteration takes with the guarantee of a bracket."""
    fastest = [quickest(records) for records in groups]
    return [
        r["sound_gram_seconds"] / r["bracket_seconds"] for r in fastest if "sound_gram_seconds" in r
    ]


def spread(values: list[float], places: int = 2) -> str:
    return f"{min(values):.{places}f} to {max(values):.{places}f}"


def claim() -> list[str]:
    """The line of the index."""
    cpu, gpu = (spread(ratios(measured(device))) for device in ("cpu", "gpu"))
    return [summary(), f"{cpu} × and {gpu} ×", "[speed](speed.md#certified-brackets)"]


def section() -> str:
    cpu, gpu = measured("cpu"), measured("gpu")
    guaranteed = sound(gpu)
    like = (
        f" Gram iteration with the same guarantee takes {spread(guaranteed, 0)} times as long there."
        if guaranteed
        else ""
    )
    return f"""## Certified brackets

{summary()}{like}

The command is `python -m benchmarks.brackets --network NAME [--weights FILE]`, or `--run` with a network of `lipbound train`. It brackets all convolutions of a network to `rtol` = 1e-3. Gram iteration (float32, five products, a 10×10 grid) runs on the same weights in the same run. A ratio above 1 means that the brackets are faster. The operations are the tensor operations of one call, about as many as a GPU launches kernels. On the CPU, `--clock process` counts CPU seconds, for a machine that others use too.

{_table([record for records in cpu for record in records])}

Trained weights are fast on a CPU: their symbols have peaks, and a few evaluations exclude most frequencies. Wide layers with initial weights are slow: their symbols are flat to a few per cent, so the proof needs Cholesky factorizations on a fine grid. These are slower, operation for operation, than the matrix products of Gram iteration.

{_table([record for records in gpu for record in records])}

{_about_searches(gpu)}
"""


def _about_searches(gpu: list[list[Record]]) -> str:
    cells = (
        "A search cell by cell, as on a CPU, is many small steps that wait for each other on a GPU. "
        "Most of its time goes into launching them; the last column shows how long the GPU is busy."
    )
    if not any(record.get("search") == "levels" for records in gpu for record in records):
        return cells
    return (
        f"{cells} A search by levels treats all layers side by side, and reads the GPU once for "
        "each level. Every call gets new weights; the graphs of earlier calls are used again. "
        "*Sound* Gram iteration is in float64, with a grid and a number of products that are fine "
        "enough for `rtol`, so that it proves as much as the upper end of a bracket."
    )


def _table(records: list[Record]) -> str:
    rows = []
    for r in records:
        low, high = r.get("bracket_range", (None, None))
        guaranteed = r.get("sound_gram_seconds")
        rows.append([
            r["network"], r["weights"], str(r["layers"]), r["device"],
            {"levels": "by levels", "plain": "cell by cell"}[r["search"]] if "search" in r else "",
            f"{r['bracket_seconds']:.3f}",
            "" if low is None else f"{low:.3f} to {high:.3f}",
            f"{r['gram_seconds']:.3f}", f"{r['gram_over_bracket']:.2f}",
            "" if guaranteed is None else f"{guaranteed:.2f}",
            "" if guaranteed is None else f"{guaranteed / r['bracket_seconds']:.1f}",
            str(r["median_evaluations"]), str(r.get("dispatched", "")),
            f"{r['busy_seconds']:.3f}" if "busy_seconds" in r else "",
        ])  # fmt: skip
    header = [
        "network", "weights", "layers", "device", "search", "brackets, s", "fastest to slowest, s",
        "Gram iteration, s", "ratio", "sound Gram iteration, s", "sound ratio",
        "median evaluations", "operations", "GPU busy, s",
    ]  # fmt: skip
    return filled_table(header, rows)
