"""Chapters of docs/trust.md on hostile numbers, damaged files, faults, security and installation.

Each is a function that makes Markdown from records; ``CHAPTERS`` lists them in the order of the
page.
"""

from __future__ import annotations

from lipbound.report.markdown import table
from tools.pages import ROOT, record


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
    return f"""## Hostile numbers

**{len(said)} calls with kernels that break careless numerics: {wrong} wrong answers, {len(refused)} refusal.**

The command is `python -m verify hostile --large`. It calls {len(entries)} functions ({"; ".join(entries)}) with {len(outcomes)} kernels ({", ".join(outcomes)}). Each call must return a number that is at least σ1 of the layer's matrix, or refuse with one line. A lower end must be at most σ1, and a constrained layer at most its limit. σ1 comes from a dense float64 SVD of the kernel divided by a power of two.

{table(["kernel", "function", "reason for the refusal"], refused)}

- `Penalty.bounds()` returns ∞ where the squares of the weights overflow float32. After `.double()` it returns a number.
- Complex, integer, quantized, float8, meta, sparse, mkldnn, nested and empty tensors, NaN and ∞ are refused everywhere. One line names the tensor, its layer and what to do. The other tensors of a weights file are audited, and the audit names those it left out.
- Views, channels_last, `requires_grad`, `inference_mode` and inference tensors do not change an answer.

Large layers finish, with a memory that does not grow with the amount of work. The table is for one thread ({found["device"]}, torch {found["torch"]}). The interpreter and torch need about {min(r["peak_mb"] for r in found["large"])} MiB, which is the smallest number in it.

{table(["layer", "function", "time", "peak memory"], large)}

A bracket of a layer with 4096×4096 channels and 3×3 taps is too much for one CPU core: it needs, at each of hundreds of frequencies, what the whole 1×1 layer of that size needs. Use `bound(layer, "lipbound")` there. When a device runs out of memory, the work is split into smaller pieces, down to one matrix. After that one line says to use `device='cpu'`.
"""


def neighbours() -> str:
    found = record("neighbours")
    operations = found["operations"]
    pairs = sum(one["pairs"] for one in operations.values())
    wrong = sum(one["violations"] for one in operations.values())
    rows = [
        [f"`{name}`", f"{one['lipschitz']:.7g}", f"{one['error']:.2g}", f"{one['pairs']:,}"]
        for name, one in operations.items()
        if one["error"] > 0
    ]
    return f"""## Neighbouring floats

**{pairs:,} pairs of floats in {len(operations)} elementwise operations: {wrong} violations.**

The command is `python -m verify neighbours`. It tests every elementwise rule in float32 and float64, around every place where its formula changes or is steepest, and over the whole range of numbers. Two floats a and b that are 1 to 2^40 units in the last place apart must satisfy |f(a) − f(b)| ≤ L·|a − b| + error + 2·k·ulp(f). L and the error are what `audit` says about the operation, and k is the documented error of the library's function in units in the last place.

These operations jump, so their error is not zero (softplus with its β and threshold):

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
    count = sum(one["count"] for one in found["kinds"].values())
    wrong = sum(len(one["wrong"]) for one in found["kinds"].values())
    return f"""## Damaged files

**{count:,} damaged files were read, and {wrong} of them ended in a traceback.**

The command is `python -m verify damaged --count 500`. It takes valid files of every kind, changes them (bytes replaced, removed, doubled or cut off) and reads them as the command line does. A file may still be readable, if only a number changed. Otherwise it must be refused with one line and exit code 2.

{table(["file", "damaged", "refused", "read", "wrong", "longest"], rows)}

({found["device"]}, torch {found["torch"]}, seed {found["seed"]}.) Valid files that take long (20,000 kernels, or a kernel of 301×301 or 64×64×4001 taps) report their progress every 30 seconds and stop after `--minutes`.
"""


def checkpoints() -> str:
    found = record("checkpoints")
    combined, kinds = found["combinations"], found["kinds"]
    rows = [
        [
            name,
            one["outcome"],
            one["said"]
            .replace("lipbound: ", "")
            .replace("\n", "; ")
            .replace("|", "/")
            .replace("*", "\\*"),
        ]
        for name, one in kinds.items()
    ]
    names = ", ".join(f"`{name}`" for name in combined["files"])
    prefixes = ", ".join(f"`{prefix}`" for prefix in combined["prefixes"] if prefix)
    return f"""## Checkpoints of every kind

**{found["count"]} kinds of checkpoints were audited: {len(found["wrong"])} silently wrong, {found["outcomes"]["right"]} right, {found["outcomes"]["refused"]} refused with what to do.**

The command is `python -m verify checkpoints`. *Right* means that all numbers of the audit are those of the audit of the same network in memory. A refusal is one line and exit code 2. Code inside a file must not run.

{combined["right"]} of {combined["count"]} combinations of a file name, what programs save around the weights, and a prefix of the names are right. The files are `.safetensors`, {names}, in the format of today and in the one before PyTorch 1.6. The weights are saved as {", ".join(combined["wrappers"])}. The prefixes are {prefixes}. The table shows the other {len(kinds)} kinds.

{table(["checkpoint", "outcome", "what lipbound says"], rows)}

({found["device"]}, torch {found["torch"]}.)
"""


KILLED = {
    "train": "`lipbound train`, resumed each time: the final weights and checkpoint equal those of a run without kills, bit for bit",
    "checkpoint": "a process that saves checkpoints without a pause: the newest is complete",
    "records": "a process that appends records without a pause: all are complete, and the next process continues",
    "report": "`lipbound audit --html`: the page is complete, or the earlier one is still there",
    "bench": "`lipbound bench --out`: the next run continues after what was measured",
}
"""Name in the record → what was killed, and what must hold afterwards."""


def faults() -> str:
    found = record("kills")
    rows = [
        [KILLED[name], str(kind["kills"]), str(len(kind["wrong"])), str(len(kind["left_behind"]))]
        for name, kind in found["kinds"].items()
    ]
    wrong = sum(len(kind["wrong"]) for kind in found["kinds"].values())
    return f"""## Killed processes and full disks

**{found["kills"]} processes were killed while they were writing, with {wrong} wrong results.**

The command is `python -m verify kills --count {found["kills"]}`. It sends SIGKILL at random moments.

{table(["what was killed, and what must hold", "kills", "wrong", "files left behind"], rows)}

({found["device"]}, torch {found["torch"]}, seed {found["seed"]}.) This is how it works, and the tests check each point:

- Files are written under another name, flushed and renamed. A record is a line: an incomplete line is not a record, and the next append removes it. Two processes may append to one file.
- After SIGINT or SIGTERM, a training finishes its batch, writes a checkpoint and exits. The resumed run ends with the same bits as one that was not interrupted. A second SIGINT exits at once.
- A full disk, or a folder that cannot be written, gives an error of one line, and existing files stay as they were. Commands check this before they start.
- Only the monotonic clock decides anything. Checkpoints are ordered by their step.
- A second run in the same folder is refused.
"""


PROMISES = {
    "Nothing in the package evaluates text, loads pickles, unpacks archives or calls a shell": "test_no_call_that_executes_or_unpacks",
    "Nothing in the package opens a connection": "test_no_part_of_the_package_reaches_for_the_network",
    "What a network's file says about itself is checked even if its checksum is right": "test_what_a_checkpoint_says_of_itself_is_checked",
    "Objects of other classes beside the weights become placeholders, and a file with one in place of a weight is refused": "test_objects_beside_the_weights_are_placeholders",
    "Archives are read by exact names; links and outside paths are ignored": "test_archives_are_read_by_whole_names_and_never_unpacked",
    "Weights that unpack to more than the file, or claim more, are refused": "test_weights_that_grow",
    "Pictures are refused by the size they announce": "test_pictures_that_grow",
    "Packed data sets are refused if they are too large, contain pickles or are damaged": "test_packed_files_that_grow_execute_or_break",
    "Names cannot send control codes to the terminal": "test_names_do_not_speak_to_the_terminal",
    "The HTML page runs only its own script, named by its hash, and fetches nothing": "test_the_page_runs_its_own_script_and_fetches_nothing",
    "Names in a run cannot leave its folder": "test_a_folder_name_does_not_leave_the_folder",
}
"""Promise → its test."""


def security() -> str:
    rows = [[promise, f"`{test}`"] for promise, test in PROMISES.items()]
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    packages = [line for line in lock if "==" in line]
    return f"""## Security

**Files are data. The only code that runs is what you name with `--model package.module:factory`.**

lipbound reads `.safetensors`, `.pt` with `weights_only`, ONNX programs whose names it replaces (onnx2torch would write them into Python code), JSON, idx, and CIFAR's pickles with an unpickler that knows only arrays of bytes.

{table(["promise", "test"], rows)}

`pyproject.toml` gives ranges for the dependencies. `requirements.lock` pins all {len(packages)} packages that `make test` installs, and `make lock` writes it again. `make audit-deps` asks the advisory database about each package with `pip-audit`. It fails if the database lists a vulnerability, cannot be reached, or does not know a package.
"""


def outside() -> str:
    found = record("outside")
    rows = [
        [
            f"`examples/{name}.py`",
            run["outcome"],
            "; ".join(run.get("output", [run.get("why", "")])),
        ]
        for name, run in found["examples"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    ran = sum(run["outcome"] == "ran" for run in found["examples"].values())
    return f"""## Installed from the wheel

**{ran} of {len(rows)} examples run with the built wheel in a fresh environment.**

The command is `make outside`. It runs the examples from another folder.

{table(["example", "outcome", "output"], rows)}

({found["wheel"]}; Python {found["python"]}, {versions}; {found["device"]}.)
"""


CHAPTERS = (hostility, neighbours, damaged, checkpoints, faults, security, outside)
"""In the order of the page."""
