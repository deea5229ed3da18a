"""Convert the reST in our docstrings into Markdown, for mkdocstrings.

The docstrings use syntax that Markdown does not have: ``.. math::``, ``:math:``, roles such as
``:func:``, a plain star for the adjoint, and ``Example:`` as a section title (griffe expects
``Examples:``).
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

import lipbound

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([^`]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
DISPLAY = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
KEPT = re.compile(  # code, formulas, doctests, bullets and bold text keep their stars
    r"(``?[^`]*``?|\\\(.*?\\\)|\\\[.*?\\\]|^\s*(?:>>>|\.\.\.)[^\n]*|^\s*\* |\*\*)", re.M | re.S
)
PUBLIC = {name: f"lipbound.{name}" for name in lipbound.__all__}


def markdown(text: str) -> str:
    """Return the docstring in Markdown."""
    text = DISPLAY.sub(_display, text)
    text = INLINE.sub(lambda match: rf"\({match[1]}\)", text)
    text = ROLE.sub(_reference, text)
    text = "".join(p if i % 2 else p.replace("*", r"\*") for i, p in enumerate(KEPT.split(text)))
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)


def _display(match: re.Match[str]) -> str:
    indent, formula = match[1], " ".join(match[2].split())
    return f"{indent}\\[ {formula} \\]"


def _reference(match: re.Match[str]) -> str:
    """Return a link to the page of a public name, and other names as code."""
    name = match[1].rsplit(".", 1)[-1]
    private = match[1].lstrip(".")
    return f"[`{name}`][{PUBLIC[name]}]" if name in PUBLIC else f"`{private}`"


class Markdown(Extension):
    """Rewrites every docstring before griffe parses it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = markdown(obj.docstring.value)
