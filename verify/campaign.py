"""Search for a layer or a network whose bound is wrong, for a given time.

    python -m verify campaign --minutes 10 --workers 4 --out campaign.jsonl

There are six parts: ``layers`` (every bound on random layers), ``levels`` (the search shaped for a
GPU against the search on a processor), ``search`` (ascent on truth/bound over kernels),
``networks`` (the audit of random architectures against Jacobian norms), ``lipsdp`` (the same with
effort='high') and ``rounding`` (what networks compute against arithmetic of 256 bits). All cases
come from consecutive seeds, and a record is appended for every few seeds. A run may therefore be
killed at any moment; the next run with the same file continues with the remaining seeds. The exit
code is 1 after a violation. ``--merge`` joins the records of a file, one per part and device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from lipbound import files
from lipbound.bounds.supremum import levels
from lipbound.runtime import pick_device
from verify.layer_checks import check_layers
from verify.network_checks import check_networks
from verify.tally import Tally
from verify.worst_cases import search_kernels

LAYERS = 64  # kernels per stack; changing it changes the meaning of a seed
PROVENANCE = ("device", "torch", "lipbound", "threads")


@dataclass(frozen=True)
class Task:
    """The seeds of one part that one worker checks."""

    part: str
    seeds: range
    device: str
    weights: tuple[Path, ...]


@dataclass(frozen=True)
class Part:
    """The function to run, the number of seeds per task, and the share of the time."""

    run: Callable[[Task], Tally]
    seeds: int
    share: float


def _rounding(task: Task) -> Tally:
    from verify.rounding_checks import check_rounding  # needs gmpy2, as no other part does

    return check_rounding(task.seeds, task.device)


PARTS = {
    "layers": Part(lambda task: check_layers(task.seeds, LAYERS, task.device), 8, 0.55),
    "levels": Part(lambda task: check_layers(task.seeds, LAYERS, task.device, ["levels"]), 8, 0.05),
    "search": Part(lambda task: search_kernels(task.seeds, task.weights, task.device), 2, 0.08),
    "networks": Part(lambda task: check_networks(task.seeds, task.device), 20, 0.12),
    "lipsdp": Part(lambda task: check_networks(task.seeds, task.device, "high"), 20, 0.1),
    "rounding": Part(_rounding, 20, 0.1),
}


def run_task(task: Task) -> dict[str, Any]:
    """Run one task and return its record."""
    start = time.perf_counter()
    tally = PARTS[task.part].run(task)
    return {
        "experiment": "campaign",
        "part": task.part,
        "seeds": [[task.seeds.start, task.seeds.stop]],
        **tally.record(),
        "seconds": round(time.perf_counter() - start, 3),
        **{k: v for k, v in files.provenance(task.device).items() if k in PROVENANCE},
    }


class Schedule:
    """Chooses the next seeds: unused ones of the part that is furthest behind its share."""

    def __init__(self, parts: Sequence[str], done: Sequence[dict[str, Any]], first: int):
        self.spent = dict.fromkeys(parts, 0.0)
        self.next = {part: _free(done, part, first) for part in parts}

    def task(self, device: str, weights: tuple[Path, ...]) -> Task:
        part = min(self.spent, key=lambda name: self.spent[name] / PARTS[name].share)
        start, stop = next(self.next[part])
        self.spent[part] += 1e-3  # the time is not known yet; workers start on different parts
        return Task(part, range(start, stop), device, weights)


def _free(done: Sequence[dict[str, Any]], part: str, first: int) -> Iterator[tuple[int, int]]:
    used = [tuple(s) for record in done if record["part"] == part for s in record["seeds"]]
    step = PARTS[part].seeds
    while True:
        later = [stop for start, stop in used if start < first + step and stop > first]
        if later:
            first = max(later)
        else:
            yield first, first + step
            first += step


def merged(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge records into one per part, device and version: sums, margins and ranges of seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in found:
        key = tuple(record[name] for name in ("part", *PROVENANCE))
        groups.setdefault(key, []).append(record)
    result = []
    for same in groups.values():
        tally = Tally()
        for record in same:
            tally.add(Tally.of(record))
        seconds = round(sum(record["seconds"] for record in same), 1)
        ranges = _joined([tuple(s) for record in same for s in record["seeds"]])
        result.append({**same[0], "seeds": ranges, **tally.record(), "seconds": seconds})
    return result


def _joined(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    result: list[list[int]] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1][1] = max(stop, result[-1][1])
        else:
            result.append([start, stop])
    return result


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Return a text with the checks, the smallest margins and the violations."""
    lines = []
    for record in merged(found):
        wrong = len(record["violations"])
        head = f"{record['part']}: {record['count']:,} in {record['seconds']:,.0f} s of one worker"
        lines += [f"{head}, {record['device']}, torch {record['torch']}: {wrong} violations"]
        for name, claim in record["claims"].items():
            margin = "" if claim["margin"] is None else f"{claim['margin']:.3e} at {claim['at']}"
            lines += [f"  {name:32} {claim['count']:>10,}  {margin}"]
        if "outcomes" in record["counts"]:
            lines += [f"  {record['counts']['outcomes']}"]
        for violation in record["violations"][:5]:
            lines += ["", f"VIOLATION {violation['claim']} at {violation['at']}:"]
            lines += [violation["message"], violation.get("reproduction", "")]
    return "\n".join(lines)


def work(pipe: Any, workers: int) -> None:
    """Run one of so many workers: receive tasks and send records until the pipe closes."""
    levels.KEPT /= workers  # they share a GPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch warns about unusual layers
    try:
        while True:
            task = pipe.recv()
            try:
                pipe.send(run_task(task))
            except Exception as error:
                pipe.send(f"{task.part}, seeds {task.seeds[0]} to {task.seeds[-1]}: {error!r}")
                if isinstance(error, torch.AcceleratorError):
                    break  # this process can no longer use its GPU
    except (EOFError, BrokenPipeError):
        pass


def campaign(path: Path, chosen: argparse.Namespace) -> list[str]:
    """Run until the time is up, and return the failures. The next run repeats their seeds."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, before they import torch
    context = multiprocessing.get_context("spawn")
    schedule = Schedule(chosen.parts.split(","), files.read(path), chosen.seed)
    end = time.monotonic() + 60 * chosen.minutes
    status = Status(end)
    busy: dict[Any, Any] = {}
    failed: list[str] = []
    try:
        for _ in range(chosen.workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, chosen.workers), daemon=True)
            process.start()
            theirs.close()
            busy[mine] = process
            mine.send(schedule.task(chosen.device, tuple(chosen.weights)))
        while busy:
            pipe: Any
            for pipe in wait(list(busy), timeout=1.0):
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = f"worker {busy.pop(pipe).pid} died"
                if isinstance(answer, str):
                    failed.append(answer)
                    status.say(f"FAILED {answer}")
                else:
                    files.append(path, answer)
                    schedule.spent[answer["part"]] += answer["seconds"]
                    status.saw(answer)
                if pipe in busy and time.monotonic() < end:
                    pipe.send(schedule.task(chosen.device, tuple(chosen.weights)))
                elif pipe in busy:
                    busy.pop(pipe).terminate()
            status.show()
    finally:
        for process in busy.values():
            process.terminate()
        status.close()
    return failed


class Status:
    """A status line, rewritten in place on a terminal and printed every half minute elsewhere."""

    def __init__(self, end: float):
        self.end, self.counts, self.violations = end, dict.fromkeys(PARTS, 0), 0
        self.live = sys.stderr.isatty()
        self.last = time.monotonic()

    def saw(self, record: dict[str, Any]) -> None:
        self.counts[record["part"]] += record["count"]
        self.violations += len(record["violations"])
        for violation in record["violations"]:
            said = f"VIOLATION {violation['claim']} at {violation['at']}: {violation['message']}"
            self.say(f"{said}\n{violation.get('reproduction', '')}")

    def say(self, text: str) -> None:
        print(f"\n{text}" if self.live else text, file=sys.stderr, flush=True)

    def show(self) -> None:
        if not self.live and time.monotonic() - self.last < 30:
            return
        self.last = time.monotonic()
        left = max(0.0, self.end - self.last)
        seen = ", ".join(f"{count:,} {part}" for part, count in self.counts.items() if count)
        text = f"{seen or 'starting'}; {self.violations} violations; {left / 60:.1f} min left"
        print(f"\r{text:78}" if self.live else text, end="" if self.live else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    def close(self) -> None:
        if self.live:
            print(file=sys.stderr)


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--minutes",
        type=float,
        default=10.0,
        help="time after which no new task begins (default 10)",
    )
    add(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 1) - 1),
        help="number of processes (default: all cores but one)",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--parts", default=",".join(PARTS), help=f"parts to run, with commas: {', '.join(PARTS)}")
    add("--weights", type=Path, nargs="*", default=[], help="weights files with trained kernels")
    add("--merge", action="store_true", help="only join the records of --out")


def check_options(chosen: argparse.Namespace) -> None:
    for part in chosen.parts.split(","):
        if part not in PARTS:
            raise ValueError(f"--parts: {part!r} is not one of {', '.join(PARTS)}")
    if chosen.workers < 1 or not chosen.minutes >= 0:
        raise ValueError(
            f"--workers {chosen.workers} --minutes {chosen.minutes}: both must be positive"
        )
    pick_device(chosen.device)
    for path in chosen.weights:
        if not path.is_file():
            raise ValueError(f"--weights: there is no file {str(path)!r}")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    path, failed = chosen.out or Path("campaign.jsonl"), []
    if chosen.merge:
        files.rewrite(path, merged(files.read(path)))
    else:
        failed = campaign(path, chosen)
    found = files.read(path)
    print(summary(found))
    seen = [f"{v['claim']} at {v['at']}" for record in found for v in record["violations"]]
    return {}, [*seen, *failed]
