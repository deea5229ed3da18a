"""Hooks of the documentation site: MathML, an audit page, and a check of the API reference.

``mkdocs.yml`` names this file under ``hooks``.
"""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
AUDIT = "gallery/audit-demo.html"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
BAR = re.compile(r'<mo(?: stretchy="false")?>(&#x0007C;|&#x02016;)</mo>')


def on_files(files: Files, config: Any) -> Files:
    """Check that the API reference is complete, and add the audit of the embedded network."""
    missing = sorted(public() - documented(files))
    if missing:
        raise PluginError(f"no page in docs/api documents {', '.join(missing)}")
    files.append(File.generated(config, AUDIT, content=audit_page()))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers draw without a script."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    # The converter leaves no space between a function and its argument.
    spaced = re.sub(r"\\(log|cos)(?![a-z(])", r"\\\1\\,", html.unescape(match[3]).strip())
    formula = convert(spaced, display=display)
    # A bar is a fence here, not a relation, so it has no space around it.
    return BAR.sub(r'<mo lspace="0" rspace="0" stretchy="false">\1</mo>', formula)


def public() -> set[str]:
    """Return the names in ``lipbound.__all__`` and ``lipbound.robust.__all__``, with package."""
    return {
        f"{package}.{name}"
        for package in ("lipbound", "lipbound.robust")
        for name in _all(ROOT / package.replace(".", "/") / "__init__.py")
    }


def _all(path: Path) -> list[str]:
    """Return ``__all__`` of a file, without importing it."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


def documented(files: Files) -> set[str]:
    """Return the names that ``::: NAME`` on a page of the API reference shows."""
    pages = [f for f in files if f.src_uri.startswith("api/") and f.src_uri.endswith(".md")]
    return {n for f in pages for n in re.findall(r"^::: (\S+)", f.content_string, re.MULTILINE)}


def audit_page() -> str:
    """Return the page that ``lipbound audit demo --html FILE`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.html"
        command = [sys.executable, "-m", "lipbound", "audit", "demo", "--html", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise PluginError(f"{' '.join(command[1:])} failed: {done.stderr[-500:]}")
        return path.read_text(encoding="utf-8")
