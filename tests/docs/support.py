"""The documents as tests see them: fenced blocks, sections, tables and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Pages whose commands tell a story: a test runs each of them as a whole, in its order.
STORIES = {
    "deploying.md": "tests/docs/test_deploying.py",
    "installation.md": "tests/docs/test_first_hour.py",
    "upgrading.md": "tests/docs/test_deploying.py",
}

# Folders whose programs are whole applications, which tests/adoption runs.
ADOPTION = ("coming-from", "frameworks")

_SAVED = re.compile(r"Save\s+this as `([\w/]+\.py)`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None = None  # what the text before it says to save it as

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def is_story(page: Path) -> bool:
    """Whether a page's commands are run as a whole.

    That is so for runbooks (tests/operator/test_runbooks.py), guides (tests/adoption/test_guides.py), frameworks
    (tests/adoption/test_frameworks.py) and `STORIES`.
    """
    return page.parent.name in ("runbooks", *ADOPTION) or page.name in STORIES


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(*languages: str, pages: list[Path] | None = None) -> list[Block]:
    return [block for page in pages or PAGES for block in _blocks(page) if block.language in languages]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    end = 0
    for match in _FENCE.finditer(text):
        saved = _SAVED.search(text[end : match.start()])
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2], saved[1] if saved else None)
        end = match.end()


def parameters(found: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def sections(text: str, level: int = 2) -> dict[str, str]:
    """The text below each heading of a level."""
    _, *parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def table(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, but for their headings."""
    rows: list[list[str]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        heading = number + 1 < len(lines) and re.match(r"\|[-|: ]+\|$", lines[number + 1])
        if line.startswith("|") and not re.match(r"\|[-|: ]+\|$", line) and not heading:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names(rows: list[list[str]], column: int = 0) -> list[str]:
    """What stands between backquotes at the start of each row's cell."""
    return [found[1] for row in rows if (found := re.match(r"`([^`]+)`", row[column]))]
