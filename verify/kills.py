"""Kill processes that write files at random moments, and check that a second run recovers.

    python -m verify kills --count 100 --out FILE

Every kill is a SIGKILL at a random time after the process, or its writing, has started. Each of the
five kinds gets a fifth of the kills:

* ``train``: a training run that is resumed. Its final weights and checkpoint must be equal, bit for
  bit, to those of an uninterrupted run;
* ``checkpoint``: a process that saves without a pause. The newest file must be complete;
* ``records``: a process that appends lines. All lines except the last must be complete;
* ``report``: ``lipbound audit --html``. The page must be complete, or the previous one;
* ``bench``: ``lipbound bench --out``. The next run must continue from the finished measurements.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lipbound import files
from lipbound.robust.training import checkpoints

OPTIONS = ["--arm", "at+spectral", "--preset", "digits", "--device", "cpu", "--resume",
           "--save-every", "3", "--set", "ema=0.99"]  # fmt: skip
EPOCHS = 30
SAVING = """
import sys, torch
from pathlib import Path
from lipbound.robust.training.checkpoints import Folder
folder = Folder(Path(sys.argv[1]))
start = folder.newest()
step = start[1]["step"] if start else 0
while True:
    step += 1
    folder.save(step, {"a": torch.full((200_000,), float(step))}, {})
"""
APPENDING = """
import sys
from pathlib import Path
from lipbound.files import append, read
path = Path(sys.argv[1])
step = len(read(path))
while True:
    append(path, {"step": step, "long": "x" * 100_000})
    step += 1
"""


def lipbound(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lipbound", *arguments]


def timed(command: list[str]) -> float:
    """Run a command to its end, and return its seconds."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the command failed with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


def killed(command: list[str], seconds: float, written: Callable[[], object] | None = None) -> bool:
    """Kill a command after ``seconds``, and return whether it was still running.

    With ``written``, the seconds count from the moment when its value changes.
    """
    before = written() if written else None
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while written and written() == before and process.poll() is None:
        time.sleep(0.005)
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def train(count: int, draw: random.Random, folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    def command(name: str) -> list[str]:
        return lipbound("train", *OPTIONS, "--epochs", str(epochs), "--out", str(folder / name))

    whole = timed(command("whole"))
    share = whole / count
    steps: list[int] = []
    for _ in range(count):
        # The first one may be killed before anything is saved.
        saving = (lambda: set(folder.glob("killed/checkpoints/*"))) if steps else None
        killed(command("killed"), draw.uniform(0, 1.5) * share, saving)
        saved = checkpoints.Folder(folder / "killed" / "checkpoints").newest()
        steps.append(0 if saved is None else saved[1]["step"])
    timed(command("killed"))
    last = max((folder / "whole" / "checkpoints").iterdir()).name
    different = [
        f"{file}: {name}"
        for file in ("best.safetensors", "final.safetensors", f"checkpoints/{last}")
        for name in _differences(folder / "whole" / file, folder / "killed" / file)
    ]
    return {"epochs": epochs, "steps_after_each": steps, "wrong": different}


def _differences(one: Path, other: Path) -> list[str]:
    mine, yours = checkpoints.load(one)[0], checkpoints.load(other)[0]
    names = mine.keys() | yours.keys()
    return [n for n in names if n not in mine or n not in yours or not mine[n].equal(yours[n])]


def checkpoint(count: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", SAVING, str(folder)]
    steps, wrong = [0], []
    for _ in range(count):
        killed(command, draw.uniform(0, 0.1), lambda: set(folder.glob("step-*")))
        found = checkpoints.Folder(folder).newest()
        if found is None or found[2] or not bool((found[0]["a"] == found[1]["step"]).all()):
            wrong.append(f"after step {steps[-1]}: {found and found[2]}")
        steps.append(found[1]["step"] if found else 0)
    checkpoints.Folder(folder).save(steps[-1] + 1, {}, {})
    return {"steps_after_each": steps[1:], "wrong": wrong}


def appended(count: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    path = folder / "records.jsonl"
    command = [sys.executable, "-c", APPENDING, str(path)]
    lines, wrong = [0], []
    for _ in range(count):
        killed(command, draw.uniform(0, 0.1), lambda: path.exists() and path.stat().st_size)
        found = [r["step"] for r in files.read(path)]
        if found != list(range(len(found))) or len(found) < lines[-1]:
            wrong.append(f"after {lines[-1]} records: {found[-3:]}")
        lines.append(len(found))
    return {"records_after_each": lines[1:], "wrong": wrong}


def report(count: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    page = folder / "page.html"
    command = lipbound("audit", "demo", "--html", str(page))
    whole = timed(command)
    expected, wrong, struck = page.read_bytes(), [], 0
    for index in range(count):
        if index % 2:
            page.unlink()
        struck += killed(command, draw.uniform(0.2, 1.05) * whole)
        if page.exists() and page.read_bytes() != expected:
            wrong.append(f"kill {index}: {page.stat().st_size} bytes of {len(expected)}")
        if not page.exists():
            page.write_bytes(expected)
    timed(command)
    return {"struck": struck, "wrong": wrong}


def bench(count: int, draw: random.Random, folder: Path) -> dict[str, Any]:
    names = ("squeezenet1_0", "squeezenet1_1")
    path = folder / "speed.jsonl"
    chosen = [word for name in names for word in ("--network", name)]
    command = lipbound("bench", *chosen, "--method", "sgd", "--device", "cpu", "--out", str(path))
    whole = timed(command)
    path.unlink()
    wrong, struck, done = [], 0, 0
    for index in range(count):
        if done == len(names):
            path.unlink()
            done = 0
        struck += killed(command, draw.uniform(0.2, 1.05) * whole)
        found = [r["network"] for r in files.read(path)]
        if found != list(names[: len(found)]) or len(found) < done:
            wrong.append(f"kill {index}: {found}")
        done = len(found)
    timed(command)
    found = [r["network"] for r in files.read(path)]
    return {"struck": struck, "wrong": wrong + ([str(found)] if found != list(names) else [])}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "checkpoint": checkpoint,
    "records": appended,
    "report": report,
    "bench": bench,
}
"""Kind → function of the number of kills, a random generator and an empty folder."""


def kills(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Make ``count`` kills of every kind; return a record that lists what was wrong."""
    results = {}
    for name, run in KINDS.items():
        place = folder / name
        place.mkdir()
        results[name] = {"kills": count, **run(count, random.Random(seed), place)}
        results[name]["left_behind"] = [p.name for p in place.rglob(".*.part")]
        print(f"{name}: {count} kills, {len(results[name]['wrong'])} wrong", flush=True)
    return {"kills": count * len(KINDS), "kinds": results, "options": OPTIONS}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100, help="number of kills of all kinds")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        record = kills(max(1, chosen.count // len(KINDS)), chosen.seed, Path(folder))
    wrong = [f"{name}: {said}" for name, one in record["kinds"].items() for said in one["wrong"]]
    return record, wrong
