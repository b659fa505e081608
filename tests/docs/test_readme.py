"""The README: short, and its program does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.orders import unattended
from tests.docs.support import ROOT, blocks, read

PROGRAM = blocks("python", pages=[ROOT / "README.md"])[0]


def test_it_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 120
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_no_address_is_given_that_nobody_reads(page: str) -> None:
    """A report that is sent to a domain for examples is lost (RFC 2606)."""
    assert re.findall(r"[\w.+-]+@[\w.-]*\b(?:example(?:\.\w+)?|invalid|test|localhost)\b", read(page)) == []


def test_a_vulnerability_can_be_reported_in_private() -> None:
    assert "*Report a vulnerability*" in read("SECURITY.md")


def test_the_two_commands_stand_at_the_top() -> None:
    """What to type first is seen first (RUN-1, RUN-2)."""
    top = "\n".join(read("README.md").splitlines()[:20])
    assert "./dev demo" in top
    assert "./dev test" in top


def test_the_recording_is_what_the_demo_prints() -> None:
    """The lines of `./dev demo --for`, in their order; only the figures are those of one run (RUN-1)."""
    [recorded] = blocks("text", pages=[ROOT / "README.md"])
    figures = ("orders", "kills", "delivered", "lost", "effect_duplicates", "confirmation_duplicates", "reacted")
    others = ("books_closed", "slots_fired", "next_slot", "p50_ms", "p99_ms", "latency_sample")
    printed = iter(map(masked, unattended.summary(dict.fromkeys((*figures, *others), 1), sound=True).splitlines()))
    command, *lines = recorded.text.splitlines()
    assert command.startswith("$ ./dev demo --for ")
    assert [line for line in map(masked, lines) if line not in printed] == []
    assert lines[-1] == "All is well."


def masked(line: str) -> str:
    return re.sub(r"[\d.]+\b", "#", line).strip()


@pytest.mark.timeout(120)
def test_the_program_publishes_and_handles_one_event(tmp_path: Path) -> None:
    """As it stands, in a directory of its own (RUN-1)."""
    assert len([line for line in PROGRAM.text.splitlines() if line.strip()]) <= 15
    (tmp_path / "program.py").write_text(PROGRAM.text)
    run = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if "charging" in line] == ["charging order 17"]


def test_the_worker_of_an_application_is_explained_once() -> None:
    """Pages of frameworks link to the paragraph, so that it cannot differ between them."""
    pages = sorted((ROOT / "docs" / "frameworks").glob("*.md"))
    assert [each.stem for each in pages if "`worker_lifespan` starts" in each.read_text()] == ["starlette"]
