"""What the tests of this folder share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short name: that of a Unix socket has at most 107 bytes, and pytest's own are longer."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
