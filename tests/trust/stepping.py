"""A server whose clock can be set."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.embedded import EmbeddedPostgres
from tests.servers import SessionServer, apply_schema

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))), None)


class SteppingServer:
    """A server of the test's own; `set` sets its clock, and no other."""

    def __init__(self, server: EmbeddedPostgres, file: Path) -> None:
        self._file = file
        self.dsn = server.create_database("holdfast")
        apply_schema(self.dsn)

    def set(self, offset: str) -> None:
        set_clock(self._file, offset)


def set_clock(file: Path, offset: str) -> None:
    partial = file.with_suffix(".new")
    partial.write_text(offset + "\n")
    partial.chmod(0o644)
    partial.replace(file)


@contextlib.contextmanager
def stepping_server(postgres_server: SessionServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppingServer]:
    if FAKETIME is None:
        pytest.skip("libfaketime is not installed (apt-get install faketime)")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "clock"
        set_clock(file, "+0")
        environment = {
            "PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
        monkeypatch.setattr("holdfast.embedded.server.server_environment", lambda: environment)
        with EmbeddedPostgres(binaries=postgres_server.binaries, settings={"fsync": "off"}) as server:
            yield SteppingServer(server, file)
