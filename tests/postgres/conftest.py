"""A database that the tests of one file share: a fresh one for each would take most of their time.

shared_dsn  a database with Holdfast's schema, made once per file and server
outbox      an `Outbox` on a connection to it, empty at the start of each test
make_source a release of a few migrations, as in tests/migrations
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.migrations.conftest import make_source
from tests.outbox import Outbox, connect
from tests.servers import SessionServer

__all__ = ["make_source", "outbox", "shared_dsn"]


@pytest.fixture(scope="module")
def shared_dsn(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    try:
        yield postgres_server.dsn(name)
        faults = postgres_server.faults_left(name, leases=False)
    finally:
        postgres_server.drop(name)
    if faults:
        pytest.fail("left behind by the tests of this file:\n  " + "\n  ".join(faults), pytrace=False)


@pytest.fixture
async def outbox(shared_dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(shared_dsn)
    shared = Outbox(connection)
    await shared.clear()
    yield shared
    await connection.close()
