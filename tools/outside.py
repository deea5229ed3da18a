"""Build the wheel, install it into a fresh environment, and run the examples outside the checkout.

    python tools/outside.py --out benchmarks/records/outside.json

Further packages that an example needs are installed if possible. An example whose packages cannot
be installed or imported is recorded as skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ["-c", str(ROOT / "requirements.lock")]
# Without dependencies: they include torchvision, which does not import with every torch.
EXAMPLES = {
    "plain_loop": [],
    "lightning_module": [["lightning>=2.6,<3"]],
    "factory_model": [["--no-deps", "pytorchcv"]],
}
"""Example → further arguments for pip."""
COMMANDS = {
    "version": ["--version"],
    "audit": ["audit", "demo", "--fail-above", "1e6"],
}
INSIDE = {"py.typed", *(f"data/{path.name}" for path in (ROOT / "lipbound" / "data").iterdir())}


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def must(*command: str, folder: Path) -> str:
    done = run(*command, folder=folder)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def build(folder: Path) -> Path:
    """Build the wheel, and check that it has the package and its data, and nothing else."""
    must(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        ".",
        str(ROOT),
        folder=folder,
    )
    (wheel,) = folder.glob("lipbound-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = {f"lipbound/{name}" for name in INSIDE} - names
    foreign = {n for n in names if not n.startswith(("lipbound/", "lipbound-"))}
    if missing or foreign:
        raise SystemExit(
            f"{wheel.name} lacks {sorted(missing)} and should not hold {sorted(foreign)}"
        )
    return wheel


def example(name: str, python: str, folder: Path) -> dict[str, object]:
    for further in EXAMPLES[name]:
        done = run(python, "-m", "pip", "install", "--quiet", *LOCK, *further, folder=folder)
        if done.returncode:
            return {"outcome": "skipped", "why": done.stderr.strip().splitlines()[-1][:200]}
    start = time.perf_counter()
    done = run(python, str(ROOT / "examples" / f"{name}.py"), folder=folder)
    return {
        "outcome": "ran" if done.returncode == 0 else "failed",
        "seconds": round(time.perf_counter() - start, 1),
        "output": done.stdout.strip().splitlines(),
        **({"error": done.stderr[-2000:]} if done.returncode else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "elsewhere"
        folder.mkdir()
        wheel = build(folder)
        venv.create(f"{place}/fresh", with_pip=True)
        python = f"{place}/fresh/bin/python"
        extras = f"{wheel}[cli,digits]"
        must(python, "-m", "pip", "install", "--quiet", *LOCK, extras, folder=folder)
        home = must(
            python, "-c", "import lipbound; print(lipbound.__file__)", folder=folder
        ).strip()
        if not home.startswith(place):
            raise SystemExit(f"the fresh environment imports {home} instead of the installed wheel")
        record: dict[str, object] = {
            "experiment": "outside",
            "wheel": wheel.name,
            "commands": {
                name: run(python, "-m", "lipbound", *words, folder=folder).returncode
                for name, words in COMMANDS.items()
            },
            "examples": {},
        }
        for name in EXAMPLES:
            record["examples"][name] = found = example(name, python, folder)  # type: ignore[index]
            print(f"{name}: {found['outcome']}", flush=True)
        listed = json.loads(must(python, "-m", "pip", "list", "--format", "json", folder=folder))
        versions = {p["name"]: p["version"] for p in listed}
    shown = ("lipbound", "torch", "numpy", "scipy", "lightning", "pytorchcv", "timm")
    record["versions"] = {name: versions[name] for name in shown if name in versions}
    record |= {"python": platform.python_version(), "device": f"CPU, {platform.machine()}"}
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    failed = [n for n, f in record["examples"].items() if f["outcome"] == "failed"]  # type: ignore[attr-defined]
    failed += [n for n, code in record["commands"].items() if code]  # type: ignore[attr-defined]
    if failed:
        print(json.dumps(record, indent=1))
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
