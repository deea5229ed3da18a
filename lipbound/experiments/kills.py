"""Kill a training run at random moments, resume it, and compare with one left alone.

    python -m lipbound.experiments.kills --count 20 --out FILE

Every kill is SIGKILL, after a random time from the start of the process: while it loads, trains or
writes. The final weights and checkpoint must be those of the run that was left alone, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lipbound.records import provenance
from lipbound.robust import checkpoints

OPTIONS = ["--arm", "at+spectral", "--preset", "digits", "--device", "cpu", "--resume",
           "--save-every", "3", "--set", "ema=0.99"]  # fmt: skip


def command(out: Path, epochs: int) -> list[str]:
    return [sys.executable, "-m", "lipbound", "train", *OPTIONS,
            "--epochs", str(epochs), "--out", str(out)]  # fmt: skip


def kills(count: int, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """The record; ``different`` lists what was not equal."""
    draw = random.Random(seed)
    start = time.perf_counter()
    process = subprocess.Popen(
        command(folder / "whole", epochs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begun = 0.0
    while process.poll() is None:
        if not begun and list(folder.glob("whole/checkpoints/step-*")):
            begun = time.perf_counter() - start
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"the run left alone ended with {process.returncode}")
    share = (time.perf_counter() - start - begun) / count  # of the training, for each kill
    steps: list[int] = []
    for _ in range(count):
        process = subprocess.Popen(
            command(folder / "killed", epochs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(begun + draw.uniform(-0.5, 1.5) * share)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        saved = checkpoints.Folder(folder / "killed" / "checkpoints").newest()
        steps.append(0 if saved is None else saved[1]["step"])
    subprocess.run(command(folder / "killed", epochs), check=True, capture_output=True)
    last = max((folder / "whole" / "checkpoints").iterdir()).name
    different = [
        f"{file}: {name}"
        for file in ("best.safetensors", "final.safetensors", f"checkpoints/{last}")
        for name in _differences(folder / "whole" / file, folder / "killed" / file)
    ]
    left = [p.name for p in folder.rglob(".*.part")]
    return {
        "experiment": "kills",
        "kills": count,
        "epochs": epochs,
        "steps_after_each": steps,
        "different": different,
        "left_behind": left,
        "options": OPTIONS,
        **provenance(seed=seed),
    }


def _differences(one: Path, other: Path) -> list[str]:
    mine, yours = checkpoints.load(one)[0], checkpoints.load(other)[0]
    names = mine.keys() | yours.keys()
    return [n for n in names if n not in mine or n not in yours or not mine[n].equal(yours[n])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = kills(chosen.count, chosen.seed, chosen.epochs, Path(folder))
    print(json.dumps(record, indent=1))
    if chosen.out:
        checkpoints.write(chosen.out, (json.dumps(record, indent=1) + "\n").encode())
    if record["different"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
