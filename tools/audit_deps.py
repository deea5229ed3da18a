"""Look up every package of the lock file in the advisory database.

    python tools/audit_deps.py requirements.lock

It needs ``pip install pip-audit`` and internet access. The exit code is 0 if no vulnerability is
known, 1 if one is known, and 2, with a reason, if the packages could not be audited.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys


def main(lock: str) -> int:
    if importlib.util.find_spec("pip_audit") is None:
        return stop("pip-audit is not installed; run: pip install pip-audit")
    run = [sys.executable, "-m", "pip_audit", "--requirement", lock, "--no-deps", "--disable-pip",
           "--progress-spinner", "off", "--format", "json"]  # fmt: skip
    done = subprocess.run(run, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return stop(f"pip-audit failed with {done.returncode}: {last[:300]}")
    return verdict(found)


def verdict(found: list[dict]) -> int:
    """Return the exit code for pip-audit's list; pip-audit succeeds even if all lookups fail."""
    known = [(d["name"], d["version"], v) for d in found for v in d.get("vulns", [])]
    for name, version, entry in known:
        fixed = ", ".join(entry.get("fix_versions", [])) or "no version yet"
        print(f"{name} {version}: {entry['id']}, fixed in {fixed}")
    skipped = [d["name"] for d in found if "skip_reason" in d]
    if known:
        print(f"audit-deps: {len(known)} known vulnerabilities", file=sys.stderr)
        return 1
    if skipped or not found:
        few = ", ".join(skipped[:3])
        return stop(
            f"the service has no data on {len(skipped)} of {len(found)} packages ({few} ...)"
        )
    print(f"audit-deps: no known vulnerabilities in {len(found)} packages")
    return 0


def stop(reason: str) -> int:
    print(f"audit-deps: NOT audited: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
