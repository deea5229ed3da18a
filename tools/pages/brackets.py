"""The section on the speed of certified brackets, and its line in the index of results."""

from __future__ import annotations

from typing import Any

from lipbound.report.markdown import filled_table
from tools.pages import lines

Record = dict[str, Any]


def measured(device: str) -> list[list[Record]]:
    """The records of the ``"cpu"`` or the ``"gpu"``, those of one network and its weights together.

    A later record of the same search replaces an earlier one, but for what only that one measured.
    """
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in lines(f"brackets-{device}"):
        same = found.setdefault((record["network"], record["weights"]), {})
        search = record.get("search", "plain")
        same[search] = same.get(search, {}) | record
    return [list(same.values()) for same in found.values()]


def quickest(records: list[Record]) -> Record:
    """The record of the faster search."""
    return min(records, key=lambda r: r["bracket_seconds"])


def summary() -> str:
    """Say in how many cases brackets are faster than Gram iteration without a certificate."""
    cpu, gpu = (_share(ratios(measured(device))) for device in ("cpu", "gpu"))
    return (
        f"Certified brackets are faster than Gram iteration without a certificate in {cpu} cases "
        f"on a CPU, and in {gpu} cases on a GPU."
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
        f" On the GPU, Gram iteration that proves the same upper end takes {spread(guaranteed, 0)} "
        f"times as long as the faster search, in the {len(guaranteed)} cases where it was timed."
        if guaranteed
        else ""
    )
    return f"""## Certified brackets

{summary()}{like}

A bracket is a lower and an upper end, both proved, here at most 0.1 % apart (`rtol` = 1e-3). A case is a network with initial or trained weights. All convolutions of the network are bracketed. The command is `python -m benchmarks.brackets --network NAME [--weights FILE]`, or `--run` with a network of `lipbound train`; times are wall time, medians of the calls of one run. {_about_calls(cpu + gpu)}

Gram iteration (*Gram*: float32, five iterations, a 10×10 grid) runs in the same run. *Range* is from the fastest to the slowest call. A ratio above 1 means that the brackets are faster. An *evaluation* computes a layer's matrix at one frequency; the table has the median over the layers. A 1×1 layer needs one, and in ResNet-50 and its larger relatives more than half of the layers are 1×1. *Operations* are the tensor operations that one call starts; the replay of a CUDA graph counts as none, and starts many kernels.

{_table([record for records in cpu for record in records])}

The file of the trained ResNet-18 lacks four of its layers. In ResNet-18, layers with initial weights need several times as many evaluations as trained ones, because their matrices have no clear peak over the frequencies.

{_table([record for records in gpu for record in records])}

{_about_searches(gpu)}
"""


def _about_calls(groups: list[list[Record]]) -> str:
    found = [record for records in groups for record in records]
    if not any("bracket_range" in record for record in found):
        return "Every call has the same weights."
    new = "Every call gets new weights (trained ones with 1 % of noise)"
    if all("bracket_range" in record for record in found):
        return f"{new}."
    return (
        f"{new}, except in rows without a range: they were measured earlier, with the same weights "
        "in every call."
    )


def _about_searches(gpu: list[list[Record]]) -> str:
    cells = (
        "The search cell by cell makes many small steps, one after another. The GPU waits most of the "
        "time for the CPU to start them: it is busy only for the time in the last column."
    )
    if not any(record.get("search") == "levels" for records in gpu for record in records):
        return cells
    return (
        f"{cells} The search by levels treats all layers side by side, and reads the GPU once for "
        "each *level*, which treats all cells that are still open. Its kernels run at the same time, so "
        "the sum of their times in the last column may exceed the time of the call. "
        f"{_first_calls(gpu)}"
        "*Sound* Gram iteration is in float64, with a grid and a number of iterations that are fine "
        "enough for `rtol`, so that it proves as much as the upper end of a bracket; it was timed "
        "once in each row that shows it."
    )


def _first_calls(groups: list[list[Record]]) -> str:
    first = [r["first_bracket_seconds"] for records in groups for r in records
             if r.get("search") == "levels"]  # fmt: skip
    return (
        f"Times by levels are those of repeated calls, which replay CUDA graphs. The first call for "
        f"a network takes {spread(first, 1)} s. "
    )


def _table(records: list[Record]) -> str:
    times, work = [], []
    for r in records:
        low, high = r.get("bracket_range", (None, None))
        guaranteed = r.get("sound_gram_seconds")
        known = "initial" if r["weights"].startswith("he-normal") else "trained"
        case = f"{r['network']}, {known}"
        search = "by levels" if r.get("search") == "levels" else "cell by cell"
        times.append([
            case, search, f"{r['bracket_seconds']:.3f}",
            "" if low is None else f"{low:.3f} to {high:.3f}",
            f"{r['gram_seconds']:.3f}", f"{r['gram_over_bracket']:.2f}",
            "" if guaranteed is None else f"{guaranteed:.2f}",
            "" if guaranteed is None else f"{guaranteed / r['bracket_seconds']:.1f}",
        ])  # fmt: skip
        work.append([
            case, search, str(r["layers"]), str(r["median_evaluations"]),
            str(r.get("dispatched", "")),
            f"{r['busy_seconds']:.3f}" if "busy_seconds" in r else "",
        ])  # fmt: skip
    first = ["case", "search", "brackets, s", "range, s", "Gram, s", "ratio", "sound Gram, s",
             "sound ratio"]  # fmt: skip
    second = ["case", "search", "layers", "evaluations, median", "operations", "GPU busy, s"]
    devices = " and ".join(dict.fromkeys(r["device"] for r in records))
    return f"On {devices}:\n\n{filled_table(first, times)}\n\n{filled_table(second, work)}"
