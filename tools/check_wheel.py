"""Build the wheel, check its files, and run the README's example in a fresh environment.

    python tools/check_wheel.py

The fresh environment gets the locked versions. A failure prints its reason and exits with code 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"py.typed", *(f"data/{path.name}" for path in (ROOT / "lipbound" / "data").iterdir())}
EXAMPLE = """
import doctest, sys, lipbound
print("imported", lipbound.__file__)
failed, tried = doctest.testfile(sys.argv[1], module_relative=False)
sys.exit(f"{failed} of {tried} examples of the README failed" if failed or not tried else 0)
"""


def run(*command: str, folder: Path) -> str:
    """Run a command in a folder, without the checkout on its path; exit if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{said}")
    return done.stdout.strip()


def build(folder: Path) -> Path:
    """Build the wheel from this checkout."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "."]
    run(*pip, str(ROOT), folder=folder)
    (wheel,) = folder.glob("lipbound-*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """Check that the wheel has the package and its data, and nothing else (verify, tests)."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = {f"lipbound/{name}" for name in NEEDED} - names
    foreign = {name for name in names if not name.startswith(("lipbound/", "lipbound-"))}
    hunts = {name for name in names if "verify" in Path(name).parts}
    if missing or foreign or hunts:
        wrong = sorted(foreign | hunts)
        raise SystemExit(f"{wheel.name} lacks {sorted(missing)} and must not hold {wrong}")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "elsewhere"
        folder.mkdir()
        wheel = build(folder)
        check_content(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB, contains only the package")
        venv.create(f"{place}/fresh", with_pip=True)
        python = f"{place}/fresh/bin/python"
        lock = str(ROOT / "requirements.lock")
        pip = [python, "-m", "pip", "install", "--quiet", "-c", lock, f"{wheel}[cli]"]
        run(*pip, folder=folder)
        said = run(python, "-c", EXAMPLE, str(ROOT / "README.md"), folder=folder)
        if place not in said:
            raise SystemExit(f"the fresh environment does not use the wheel: {said}")
        print(run(python, "-m", "lipbound", "--version", folder=folder))
        run(python, "-m", "lipbound", "audit", "demo", folder=folder)
        print("the README's example and `lipbound audit demo` run in a fresh environment")


if __name__ == "__main__":
    main()
