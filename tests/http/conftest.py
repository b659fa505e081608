"""One database for all tests of a module, emptied before each: many servers are started here, and each is quick."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.http.shop import TABLES
from tests.http.support import Client, Zygote, client, reserved_port
from tests.servers import SessionServer

SHARED = "shared-shop"  # the name of the connections of servers that outlive a test


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
    faults = postgres_server.faults_left(database, pooled=SHARED)
    if faults:
        pytest.fail("left behind by the test:\n  " + "\n  ".join(faults), pytrace=False)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    servers = Zygote()
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def ports(zygote: Zygote, postgres_server: SessionServer, database: str) -> Iterator[Callable[..., int]]:
    """The port of so many servers of an application, which are started when they are first asked for."""
    started: dict[str, int] = {}
    pids: list[int] = []
    with contextlib.ExitStack() as reserved:

        def port_of(count: int, app: str, options: list[Any], **settings: Any) -> int:
            name = repr((count, app, options, settings))
            if name not in started:
                port = started[name] = reserved.enter_context(reserved_port())
                wanted = {"app": app, "port": port, "dsn": postgres_server.dsn(database)}
                for _ in range(count):
                    pids.append(zygote._start(**wanted, options=options, settings=settings))
            return started[name]

        yield port_of
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, "a server did not end"
            time.sleep(0.005)


@pytest.fixture
def shop(ports: Callable[..., int], dsn: str) -> Callable[..., Client]:
    """Clients of shops that are shared: two processes for each driver, isolation level and settings."""

    def opened(driver: str, isolation: str, **settings: Any) -> Client:
        settings = {"response_limit": 2000} | settings
        return client(ports(2, "shop", [driver, isolation, SHARED, 3], **settings))

    return opened
