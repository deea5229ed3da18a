"""Entry point of ``lipbound``: errors are one line and exit code 2, interruption 130, bugs 3."""

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
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from lipbound import __version__
from lipbound.files import printable


def main() -> None:
    """Run the command line."""
    with _interruptible():
        _main()


def _main() -> None:
    version = sys.argv[1:] == ["--version"]  # the core alone can say it
    try:
        if not version:
            import typer  # noqa: F401
    except ImportError:
        _stop("commands need an extra: pip install 'lipbound[cli]'", 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without arrows gets their names
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

        if not ran_out(error):  # an exit code of its own: 1 is what --fail-above says
            traceback.print_exc()
            _stop("this is a bug in lipbound; please report it with the lines above", 3)
        first = str(error).strip().splitlines()[0]
        _stop(f"{first} Use a smaller batch (--set batch=N, --batch N) or --device cpu", 2)
    if code == 130:
        _stop("interrupted", code)
    raise SystemExit(code)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once while PyTorch is imported, and is late when it is unloaded.

    That import goes on after an interruption, without what it was about to import. At the end
    everything is written, and taking PyTorch apart takes a while.
    """

    def end(number: int, frame: FrameType | None) -> None:
        torch = sys.modules.get("torch")
        if torch is None or getattr(torch.__spec__, "_initializing", False):
            try:
                os.write(2, b"lipbound: interrupted\n")
            finally:  # whoever reads it may be interrupted too
                os._exit(130)
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # no background job
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(gc.freeze)  # a last look for garbage takes most of a second
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the last is called first


def _stop(message: str, code: int) -> NoReturn:
    print(f"lipbound: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code) from None
