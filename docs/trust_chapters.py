"""Chapters of docs/TRUST.md on hostile numbers, faults, security and use from outside.

Each is a function that makes Markdown from the records in benchmarks/records; ``CHAPTERS`` lists them
in the order of the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def hostility() -> str:
    found = record("hostile")
    outcomes = found["outcomes"]
    entries = list(next(iter(outcomes.values())))
    said = [text for row in outcomes.values() for text in row.values()]
    wrong = sum(text.startswith("wrong") for text in said)
    refused = [
        [kernel, f"`{entry}`", text.removeprefix("refused: ")]
        for kernel, row in outcomes.items()
        for entry, text in row.items()
        if text.startswith("refused")
    ]
    large = [
        [r["layer"], f"`{r['method']}`", f"{r['seconds']:g} s", f"{r['peak_mb']:,} MiB"]
        for r in found["large"]
    ]
    return f"""## Numerical hostility

`python -m lipbound.experiments.hostile --large`: {len(outcomes)} kernels ({", ".join(outcomes)})
at {len(entries)} entries ({"; ".join(entries)}). Each answers with a number at least σ1 of the layer's own
matrix (a dense float64 SVD of the kernel divided by a power of two; lower ends at most, constrained layers
at most their limit), or refuses with one line.

**{len(said)} answers: {wrong} wrong, {len(refused)} refused.**

{table(["kernel", "entry", "refused, because"], refused)}

`Penalty.bounds()` says ∞ where the squares of the weights overflow float32; `.double()` gives a number.
Complex, integer, quantized, float8, meta, sparse, mkldnn, nested and empty tensors, NaN and ∞ are refused
everywhere by one line that names the tensor, its layer and the fix; a weights file's other tensors are
audited, and what was left out is said. Views, channels_last, `requires_grad`, `inference_mode` and
inference tensors change no answer (`tests/test_hostile.py`).

What is large ends, with memory that does not grow with the work (one thread, {found["device"]}, torch {found["torch"]};
in the least of these the {min(r["peak_mb"] for r in found["large"])} MiB are the interpreter and torch):

{table(["layer", "entry", "time", "peak memory"], large)}

A bracket of 4096×4096 channels and 3×3 taps needs at every frequency what the whole 1×1 layer of that size does,
and hundreds of them: not a thing for one CPU core, where `bound(layer, "lipbound")` is. When a device runs out of memory, the pieces that are handled
at once become smaller, down to one matrix; after that one line says to use `device='cpu'`.
"""


def faults() -> str:
    found = record("kills")
    what = {
        "train": "`lipbound train`, resumed each time: final weights and checkpoint against a run left alone, bit for bit",
        "checkpoint": "a process that saves checkpoints without a pause: the newest is whole",
        "records": "a process that appends records without a pause: all are whole, and the next goes on",
        "report": "`lipbound audit --html`: the page is whole, or the one before",
        "bench": "`lipbound bench --out`: goes on from what was measured",
    }
    rows = [
        [what[name], str(kind["kills"]), str(len(kind["wrong"])), str(len(kind["left_behind"]))]
        for name, kind in found["kinds"].items()
    ]
    return f"""## Faults

`python -m lipbound.experiments.kills --count {found["kills"]}`: SIGKILL at random moments, {found["kills"]} times.

{table(["what was killed", "kills", "wrong", "files left behind"], rows)}

({found["device"]}, torch {found["torch"]}, seed {found["seed"]}.) How, and what else is tested (`tests/test_faults.py`):

- Files are written under another name, flushed and renamed. Records are lines: one that was cut off is no record,
  and goes when the next is appended; two processes may append to one file.
- SIGINT and SIGTERM finish the batch at hand, write a checkpoint and leave, in a step, in an epoch's check and in
  the final test; the resumed run ends bit for bit where it would have. A second SIGINT leaves at once.
- A full disk and a folder that takes no file end in one line; what was there before stays. Commands look for that
  before they begin to work.
- No clock but the monotonic one decides anything; checkpoints are ordered by their step.
- A second run in the same folder is refused.
"""


PROMISES = {
    "Nothing in the package evaluates text, loads pickles, unpacks archives or calls a shell": "test_no_call_that_executes_or_unpacks",
    "Nothing in the package opens a connection": "test_no_part_of_the_package_reaches_for_the_network",
    "What a network's file says of itself is checked, its checksum being right": "test_what_a_checkpoint_says_of_itself_is_checked",
    "Archives are read by whole names; links and paths outside are passed over": "test_archives_are_read_by_whole_names_and_never_unpacked",
    "Weights that unpack to more than the file, or claim more, are refused": "test_weights_that_grow",
    "Pictures are refused by the size they announce": "test_pictures_that_grow",
    "Packed data sets are refused by size, by pickles, by damage": "test_packed_files_that_grow_execute_or_break",
    "Names cannot speak to the terminal": "test_names_do_not_speak_to_the_terminal",
    "The HTML page runs its own script, named by hash, and fetches nothing": "test_the_page_runs_its_own_script_and_fetches_nothing",
    "Names in a run cannot leave its folder": "test_a_folder_name_does_not_leave_the_folder",
}
"""Promise → its test in tests/test_security.py."""


def security() -> str:
    rows = [[promise, f"`{test}`"] for promise, test in PROMISES.items()]
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    packages = [line for line in lock if "==" in line]
    return f"""## Security

Files are data: `.safetensors`, `.pt` with `weights_only`, JSON, idx, CIFAR's pickles by an unpickler that knows
arrays of bytes only. The one thing that runs is what the user names, `--model package.module:factory`.

{table(["promise", "test in `tests/test_security.py`"], rows)}

Dependencies have ranges in `pyproject.toml`; `requirements.lock` pins all {len(packages)} packages that `make test` installs
(`make lock` writes it anew). `make audit-deps` asks the advisory database about each by `pip-audit`, and fails if it
lists one, cannot be reached, or does not know one: silence is no answer.
"""


def outside() -> str:
    found = record("outside")
    rows = [
        [
            f"[`{name}.py`](../examples/{name}.py)",
            run["outcome"],
            "<br>".join(run.get("output", [run.get("why", "")])),
        ]
        for name, run in found["examples"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"""## From outside

`make outside`: the built wheel in a fresh environment, the [examples](examples.md) run from another folder.

{table(["example", "outcome", "output"], rows)}

({found["wheel"]}; Python {found["python"]}, {versions}; {found["device"]}.)
"""


def neighbours() -> str:
    found = record("neighbours")
    operations = found["operations"]
    pairs = sum(one["pairs"] for one in operations.values())
    wrong = sum(one["violations"] for one in operations.values())
    jumps = {name: one for name, one in operations.items() if one["error"] > 0}
    rows = [
        [f"`{name}`", f"{one['lipschitz']:.7g}", f"{one['error']:.2g}", f"{one['pairs']:,}"]
        for name, one in jumps.items()
    ]
    return f"""## Neighbouring floats

`python -m verify neighbours`: every elementwise rule in float32 and float64, around every place where its formula
changes or is steepest and over the whole range of numbers. Two floats a and b that lie 1 to 2^40 units in the last
place apart must satisfy |f(a) − f(b)| ≤ L·|a − b| + error + 2·k·ulp(f). L and the error are what `audit` says of the
operation, and k is the documented error of the library's functions in units in the last place.

**{len(operations)} operations and precisions, {pairs:,} pairs, {wrong} violations.** Operations that jump (softplus with its β and threshold):

{table(["operation", "L", "error", "pairs"], rows)}

({found["device"]}, torch {found["torch"]}.)
"""


def damaged() -> str:
    found = record("damaged")
    rows = [
        [
            name,
            f"{one['count']:,}",
            str(one["outcomes"].get("refused", 0)),
            str(one["outcomes"].get("read", 0)),
            str(len(one["wrong"])),
            f"{one['longest']:.2f} s",
        ]
        for name, one in found["kinds"].items()
    ]
    return f"""## Damaged files

`python -m verify damaged --count 500`: whole files of every kind, mutated (bytes changed, cut off, removed, doubled,
overwritten), then read as the command line reads them. A file may still be read, where the mutation hit a number, or be
refused by one line with exit code 2. Anything else would be a traceback.

{table(["file", "mutated", "refused", "read", "wrong", "longest"], rows)}

({found["device"]}, torch {found["torch"]}, seed {found["seed"]}.) Whole files that are heavy (20,000 kernels, a kernel of
301×301 or of 64×64×4001 taps) show how far they are every 10 seconds, and stop after `--minutes`.
"""


CHAPTERS = (hostility, neighbours, damaged, faults, security, outside)
"""In the order of the page."""
