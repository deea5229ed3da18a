"""Look for violations of what lipbound promises: ``python -m verify NAME [options]``.

Each hunt is a module with ``options(parser)``, ``hunt(chosen)``, which returns a record and the
violations it saw, and perhaps ``check(chosen)``, which refuses wrong options. This file adds
provenance, writes the record and sets the exit code: 0 without a violation, 1 with one, 2 for a
wrong command line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

HUNTS = {
    "campaign": "random layers, kernels that an ascent made hard, and random networks",
    "damaged": "mutated files of every kind, read by the command line",
    "hostile": "kernels that break careless numerics, at every public entry",
    "kills": "processes killed while they write, then run again",
    "neighbours": "elementwise operations at neighbouring floats around every breakpoint",
    "planted": "known faults planted in the bounds, which the campaign must see",
    "trained": "brackets of trained kernels against dense eigenvalues",
}


def main(given: Sequence[str] | None = None) -> int:
    """Run one hunt."""
    words = list(sys.argv[1:] if given is None else given)
    if not words or words[0] not in HUNTS:
        lines = [f"  {name:12} {text}" for name, text in HUNTS.items()]
        print("\n".join(["usage: python -m verify NAME [options]", *lines]), file=sys.stderr)
        return 2
    name = words[0]
    module = importlib.import_module(f"verify.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m verify {name}",
        description=module.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    module.options(parser)
    chosen = parser.parse_args(words[1:])
    try:
        getattr(module, "check", lambda chosen: None)(chosen)
    except ValueError as error:
        parser.error(str(error))
    from lipbound.files import provenance, write

    record, wrong = module.hunt(chosen)
    if chosen.out and record:
        whole = {"experiment": name, **record, **provenance(seed=chosen.seed)}
        write(chosen.out, (json.dumps(whole, indent=1) + "\n").encode())
    for line in wrong:
        print(f"VIOLATION {line}")
    print(f"{len(wrong)} violations" if wrong else "no violation")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
