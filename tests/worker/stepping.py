"""A server whose clock can be set."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.clock import FAKETIME, MISSING, ServerClock
from holdfast.embedded import EmbeddedPostgres
from tests.servers import SessionServer, apply_schema


class SteppingServer:
    """A server of the test's own; `set` sets its clock, and no other."""

    def __init__(self, server: EmbeddedPostgres, clock: ServerClock) -> None:
        self.set = clock.set
        self.dsn = server.create_database("holdfast")
        apply_schema(self.dsn)


@contextlib.contextmanager
def stepping_server(postgres_server: SessionServer) -> Iterator[SteppingServer]:
    if FAKETIME is None:
        pytest.skip(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        clock = ServerClock(Path(folder) / "clock")
        options = {"settings": {"fsync": "off"}, "environment": clock.environment}
        with EmbeddedPostgres(binaries=postgres_server.binaries, **options) as server:
            yield SteppingServer(server, clock)
