"""Looks for known vulnerabilities of the packages in requirements.lock: ./dev release audit

pip-audit asks PyPI for them. Where only a mirror can be reached it finds nothing out, which is an error here: a package
that was not audited is not a safe one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Resolved on purpose: the newest pip-audit, in an environment that uv makes for it.
COMMAND = (
    "uvx",
    "--quiet",
    "pip-audit",
    "--require-hashes",
    "--disable-pip",
    "--progress-spinner=off",
    "--format=json",
)


def verdict(report: dict[str, Any]) -> tuple[list[str], int]:
    """Return a report of pip-audit as lines, and the exit code: 1 for a vulnerability or a package not audited."""
    packages = report["dependencies"]
    found = [
        f"{each['name']} {each['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'no release'}"
        for each in packages
        for one in each.get("vulns", ())
    ]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    lines = [*found, f"{len(packages) - len(skipped)} packages audited, {len(found)} vulnerabilities"]
    if skipped:
        lines.append(f"{len(skipped)} not audited, because their data cannot be reached: {', '.join(skipped[:3])} ...")
    return lines, 1 if found or skipped else 0


def main() -> int:
    """Print the known vulnerabilities, and return the exit code."""
    run = subprocess.run([*COMMAND, "-r", ROOT / "requirements.lock"], capture_output=True, text=True)
    try:
        lines, code = verdict(json.loads(run.stdout))
    except ValueError:
        lines, code = [f"pip-audit could not run: {run.stderr.strip().splitlines()[-1]}"], 1
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
