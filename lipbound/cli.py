"""Entry point of ``lipbound``: errors are one line and exit code 2, interruption 130."""

from __future__ import annotations

import io
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:  # the core alone can say it
        from lipbound import __version__

        print(f"lipbound {__version__}")
        return
    try:
        import typer  # noqa: F401
    except ImportError:
        _stop("commands need an extra: pip install 'lipbound[cli]'", 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without arrows gets their names
            stream.reconfigure(errors="backslashreplace")
    try:
        from lipbound.commands import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # piped into `head`
        sys.stderr.close()
        code = 0
    except (ValueError, TypeError, OSError, MemoryError) as error:
        _stop(str(error), 2)
    except RuntimeError as error:
        from lipbound.memory import ran_out

        if not ran_out(error):
            raise
        first = str(error).strip().splitlines()[0]
        _stop(f"{first} Use a smaller batch (--set batch=N, --batch N) or --device cpu", 2)
    if code == 130:
        _stop("interrupted", code)
    raise SystemExit(code)


def _stop(message: str, code: int) -> NoReturn:
    from lipbound.text import printable

    print(f"lipbound: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code) from None
