"""One database for all tests of a module, emptied before each: many servers are started here, and each is quick."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.http.shop import TABLES
from tests.http.support import Zygote
from tests.servers import SessionServer


@pytest.fixture(scope="module")
def database(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    with psycopg.connect(postgres_server.dsn(name), autocommit=True) as connection:
        connection.execute(TABLES)
    yield name
    postgres_server.drop(name)


@pytest.fixture
def dsn(postgres_server: SessionServer, database: str) -> Iterator[str]:
    with psycopg.connect(postgres_server.dsn(database), autocommit=True) as connection:
        connection.execute("TRUNCATE effects, runs, seats, core.outbox, core.idempotency_records")
        connection.execute("UPDATE counters SET value = 0")
    yield postgres_server.dsn(database)
    faults = postgres_server.faults_left(database)
    if faults:
        pytest.fail("left behind by the test:\n  " + "\n  ".join(faults), pytrace=False)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    servers = Zygote()
    yield servers
    servers.close()
