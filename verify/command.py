"""Call the command line in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code of ``lipbound WORDS``, its output and its messages."""
    from lipbound.cli import main as cli

    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["lipbound", *words]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli._main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()
