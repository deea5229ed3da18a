"""Run every command of docs/tutorial.md, and write its outputs and pictures anew.

    python -m tools.tutorial

The page is its own script. A block of Python with a title is a file that the reader writes. Blocks
of shell commands run in order, in one folder; the first one sets the variables of the others. A
block of text after them shows what they print.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
PICTURES = ROOT / "docs" / "tutorial"
FILE = re.compile(r'```python title="([\w.]+)"\n(.*?)```\n', re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
MADE = re.compile(r"(?m)^The outputs on this page .*$")
PROGRESS = re.compile(r"(?m)^(lipbound: .* of [\d,]+ after .*|[\w ,.&]+ \.\.\.)\n")
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?(e[+-]\d+)?")
WIDTH = 100  # columns of the terminal
SETUP = "pip install"  # the reader's first command; the tool runs where it has been done
SHOTS = {"plain": (1100, 1180), "certified": (1100, 1000)}


def run(text: str, folder: Path) -> list[str]:
    """Write the page's files, run its commands, and return what each block printed."""
    for name, content in FILE.findall(text):
        (folder / name).write_text(content)
    commands = folder / ".bin"  # the commands that the reader types, from this environment
    commands.mkdir()
    for name, call in (("python", ""), ("lipbound", "-m lipbound ")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call}"$@"\n')
        (commands / name).chmod(0o755)
    surroundings = {
        **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "COLUMNS": str(WIDTH), "NO_COLOR": "1",
    }  # fmt: skip
    blocks = [block for block, _ in SHELL.findall(text) if not block.startswith(SETUP)]
    printed = []
    for place, block in enumerate(blocks):
        script = f"set -e\n{blocks[0] if place else ''}{block}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=surroundings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{block}failed with {done.returncode}:\n{done.stdout}")
        printed.append(cleaned(done.stdout))
        print(f"{block}{printed[-1]}", flush=True)
    return printed


def cleaned(output: str) -> str:
    """Return an output without lines of progress, wrapped as a terminal does."""
    lines = [
        part.rstrip()
        for line in PROGRESS.sub("", output).splitlines()
        for part in textwrap.wrap(line, WIDTH) or [""]
    ]
    return "".join(f"{line}\n" for line in lines)


def shown(text: str) -> list[str]:
    """Return the outputs that the page shows, one for each block; empty where it shows none."""
    return [output for block, output in SHELL.findall(text) if not block.startswith(SETUP)]


def renewed(text: str, printed: list[str]) -> str:
    """Return the page with these outputs."""
    outputs = iter(printed)

    def block(match: re.Match[str]) -> str:
        if match[1].startswith(SETUP):
            return match[0]
        output = next(outputs)
        return match[0] if match[2] is None else f"```sh\n{match[1]}```\n\n```text\n{output}```\n"

    return SHELL.sub(block, text)


def stable(output: str) -> str:
    """Return an output without its numbers and line ends, and with one line for all epochs."""
    lines = [" ".join(NUMBER.sub("#", line).split()) for line in output.splitlines()]
    kept = [line for line, before in zip(lines, [None, *lines], strict=False) if line != before]
    return " ".join(kept)


def photograph(page: Path, out: Path, size: tuple[int, int]) -> None:
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("the pictures of pages need a browser: apt-get install chromium")
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={out}",
         f"--window-size={size[0]},{size[1]}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with Image.open(out) as picture:
        picture.convert("RGB").quantize(128).save(out, optimize=True)


def main() -> None:
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        printed = run(text, folder)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        PICTURES.mkdir(exist_ok=True)
        for name, size in SHOTS.items():
            photograph(folder / f"{name}.html", PICTURES / f"{name}.png", size)
        shutil.copy(folder / "certified.svg", PICTURES / "certified.svg")
    minutes = (used.ru_utime + used.ru_stime) / 60
    made = (
        f"The outputs on this page are from a run on the digits with seed 0. It took {minutes:.1f} "
        f"minutes of one CPU core ({platform.machine()}, PyTorch {torch.__version__})."
    )
    PAGE.write_text(MADE.sub(made, renewed(text, printed)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
