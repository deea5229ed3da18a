"""Update the lock file with the versions of all packages that ``make test`` would install today.

    python tools/lock.py requirements.lock

It makes a fresh environment in a temporary folder; the packages in ``KEPT`` keep their versions.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "# What `make test` installs, to the last package; CPython 3.11. `make lock` writes it anew.\n"
)
KEPT = ("torch", "triton")  # a new version must first be tested on a GPU


def main(path: Path) -> None:
    held = [line for line in path.read_text().splitlines() if line.split("==")[0] in KEPT]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        limits = Path(folder) / "held.txt"
        limits.write_text("\n".join(held) + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "-c", str(limits), f"{ROOT}[dev]"]
        subprocess.run(install, check=True)
        freeze = [python, "-m", "pip", "freeze", "--exclude", "lipbound"]
        found = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    lines = [line.split("+")[0] for line in found.splitlines() if "==" in line]
    path.write_text(HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
