"""``python -m verify NAME [options]``."""

from __future__ import annotations

import importlib
import sys

HUNTS = {
    "damaged": "mutated files of every kind, read by the command line",
    "neighbours": "elementwise operations at neighbouring floats around every breakpoint",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in HUNTS:
        lines = [f"  {name:12} {text}" for name, text in HUNTS.items()]
        print("\n".join(["usage: python -m verify NAME [options]", *lines]), file=sys.stderr)
        return 2
    return importlib.import_module(f"verify.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
