"""What docs/testing.md shows is a project whose tests pass, alone and in several processes (TST-1, TST-2)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import ROOT, blocks

PAGE = ROOT / "docs" / "testing.md"


@pytest.mark.nightly("project with the testing kit")
@pytest.mark.parametrize("processes", [0, 2])
def test_the_page_is_a_project(tmp_path: Path, processes: int) -> None:
    (ini,) = blocks("ini", pages=[PAGE])
    (tmp_path / "pytest.ini").write_text(ini.text + "filterwarnings = error\n")
    files = [block for block in blocks("python", pages=[PAGE]) if block.file is not None]
    assert len(files) == len(blocks("python", pages=[PAGE])) > 5
    for block in files:
        (tmp_path / str(block.file)).write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_message_on_the_page_is_the_one_that_is_shown(outbox: object) -> None:
    """Failure messages show what was there instead."""
    from holdfast.testing import Outbox

    assert isinstance(outbox, Outbox)
    outbox.publish("order.placed", {"order_id": "o-1", "cents": 900}, source="shop")
    with pytest.raises(AssertionError) as failure:
        outbox.assert_published("order.placed", {"order_id": "o-2"})
    shown = [block.text for block in blocks("text", pages=[PAGE]) if block.text.startswith("AssertionError")]
    assert shown == [f"AssertionError: {failure.value}\n"]
