"""Names from files, made safe to print."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    r"""The text with control characters spelled out: a name cannot speak to the terminal.

    Example:
        >>> print(printable("conv\x1b[2J"))
        conv\x1b[2J
    """
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, lone surrogates, line ends
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c
        for c in text
    )
