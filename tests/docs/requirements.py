"""Which tests name a requirement, for docs/requirements.md: `./dev docs requirements` writes the page anew.

The promises on the page are written by hand. The line below each is made here, of the test files that name its id.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "requirements.md"
NOT_YET = "not yet"

_ID = re.compile(r"\b[A-Z]{3}-[1-9][0-9]*\b")
_PROMISE = re.compile(r"^- \*\*([A-Z]{3}-[1-9][0-9]*)\*\* ")


def proofs() -> dict[str, list[Path]]:
    """The test files that name an id, by id."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for identity in sorted(set(_ID.findall(file.read_text(encoding="utf-8")))):
            found[identity].append(file.relative_to(ROOT))
    return found


def promised(text: str) -> list[str]:
    """The ids of a page, in its order."""
    return [match[1] for line in text.splitlines() if (match := _PROMISE.match(line))]


def renewed(text: str) -> str:
    """The page with what the tests prove today."""
    found = proofs()

    def lines() -> Iterator[str]:
        identity = ""
        for line in text.splitlines():
            if match := _PROMISE.match(line):
                identity = match[1]
            if identity and line.startswith("  Proven by: "):
                yield f"  Proven by: {_links(found.get(identity, []))}"
                identity = ""
            else:
                yield line

    return "\n".join(lines()) + "\n"


def _links(files: list[Path]) -> str:
    names = (file.relative_to("tests").with_suffix("") for file in files)
    links = [f"[{name}](../{file})" for name, file in zip(names, files, strict=True)]
    return ", ".join(links) or NOT_YET


def main(arguments: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    if arguments == ["--write"]:
        PAGE.write_text(renewed(text), encoding="utf-8")
        return 0
    if arguments:
        print("usage: python -m tests.docs.requirements [--write]", file=sys.stderr)
        return 2
    return 0 if renewed(text) == text else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
