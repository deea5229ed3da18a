"""Search for violations of lipbound's guarantees: ``python -m verify NAME [options]``.

Each search, or *hunt*, is a module with ``hunt(chosen)``, which returns a record and violations. An
optional ``options(parser)`` adds options, and ``check_options(chosen)`` refuses wrong ones. This
file adds provenance, writes the record and sets the exit code: 0 without a violation, 1 with one, 2
for a wrong command line, 130 after an interruption.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HUNTS = {
    "campaign": "check bounds on random layers and networks, and on their rounding",
    "checkpoints": "audit checkpoints of every kind beside the network in memory",
    "damaged": "read damaged files of every kind with the command line",
    "exact": "compare random networks with their values in real arithmetic",
    "flips": "search float32 predictions that change inside a radius of float32 logits",
    "hostile": "call every public function with numerically difficult kernels",
    "kills": "kill processes while they write files, and run them again",
    "neighbours": "check elementwise operations at neighbouring floats around every breakpoint",
    "planted": "check that the campaign detects known faults planted in the bounds",
    "trained": "compare brackets of trained kernels with dense eigenvalues",
}


def main(given: Sequence[str] | None = None) -> int:
    """Run one hunt."""
    words = list(sys.argv[1:] if given is None else given)
    if not words or words[0] not in HUNTS:
        lines = [f"  {name:12} {text}" for name, text in HUNTS.items()]
        print("\n".join(["usage: python -m verify NAME [options]", *lines]), file=sys.stderr)
        return 0 if words[:1] == ["--help"] else 2
    name = words[0]
    module = importlib.import_module(f"verify.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m verify {name}",
        description=module.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    getattr(module, "options", lambda parser: None)(parser)
    chosen = parser.parse_args(words[1:])
    from lipbound.files import check_writable

    try:
        if getattr(chosen, "count", 1) < 1:
            raise ValueError(f"--count {chosen.count} must be at least 1")
        check_writable(chosen.out)
        getattr(module, "check_options", lambda chosen: None)(chosen)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        return _report(name, chosen, *module.hunt(chosen))
    except KeyboardInterrupt:
        print("verify: interrupted", file=sys.stderr)
        return 130


def _report(name: str, chosen: argparse.Namespace, record: dict[str, Any], wrong: list[str]) -> int:
    """Write the record, print the violations, and return the exit code."""
    from lipbound.files import provenance, write

    if chosen.out and record:
        whole = {"experiment": name, **record, **provenance(seed=chosen.seed)}
        write(chosen.out, (json.dumps(whole, indent=1) + "\n").encode())
    for line in wrong:
        print(f"VIOLATION {line}")
    print(f"{len(wrong)} violations" if wrong else "no violation")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
