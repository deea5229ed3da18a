"""Entry point of ``lipbound``. Exit codes: 2 for a user's error, 3 for a bug, 130 for Ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from lipbound import __version__
from lipbound.files import printable


def main() -> None:
    """Run the command line."""
    with _interruptible(), _plain_warnings():
        _main()


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print a warning as one line, without the place in the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **rest: f"lipbound: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _main() -> None:
    version = sys.argv[1:] == ["--version"]  # works without the cli extra
    try:
        if not version:
            import typer  # noqa: F401
    except ImportError:
        _stop("the command line needs an extra: pip install 'lipbound[cli]'", 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode gets escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        if version:
            print(f"lipbound {__version__}", flush=True)
            return
        from lipbound.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # piped into `head`
        sys.stderr.close()
        code = 0
    except (ValueError, TypeError, OSError, MemoryError) as error:
        _stop(str(error), 2)
    except Exception as error:
        from lipbound.runtime import ran_out

        if not ran_out(error):  # code 3, because 1 belongs to --fail-above
            traceback.print_exc()
            _stop("this is a bug in lipbound; please report it with the traceback above", 3)
        first = str(error).strip().splitlines()[0]
        _stop(f"{first} Use a smaller batch (--set batch=N, --batch N) or --device cpu", 2)
    if code == 130:
        _stop("interrupted", code)
    raise SystemExit(code)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C end the process at once during PyTorch's import, and ignore it at exit.

    PyTorch's import catches an interruption and continues with a part missing. At exit all
    results are written, but unloading PyTorch takes a while.
    """

    def end(number: int, frame: FrameType | None) -> None:
        torch = sys.modules.get("torch")
        if torch is None or getattr(torch.__spec__, "_initializing", False):
            try:
                os.write(2, b"lipbound: interrupted\n")
            finally:  # also if standard error is closed
                os._exit(130)
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not a background job
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(gc.freeze)  # the last garbage collection takes most of a second
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # called first


def _stop(message: str, code: int) -> NoReturn:
    from lipbound.report.progress import bar

    bar.close()
    print(f"lipbound: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code) from None
