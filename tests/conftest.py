"""Fixtures of all tests: real servers, databases, and the checks at the end of each.

postgres_server  the session's server: the newest; tests of SQL (both_postgres) run once per major version
dsn              a database with Holdfast's schema, as after the installation
empty_dsn        a fresh database without it
conn             an asyncpg connection to `dsn`
logins           users that are members of the roles, in `dsn`
other_dsn        a second database with Holdfast's schema
other            an asyncpg connection to it
own_server       a server of the test's own, with fsync on, to restart, stop and kill
own_dsn          a database with Holdfast's schema on `own_server`
logs_of_its_own, faults_of_its_own  for every test: structlog as it was, and what it left open is found
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
import structlog

from holdfast.embedded import EmbeddedPostgres
from tests.logins import Logins
from tests.report import Report
from tests.servers import (
    CHOICES,
    EMPTY,
    SUPPORTED_MAJORS,
    SessionServer,
    apply_schema,
    database_of_one_test,
    servers_by_major,
)
from tests.sharing import Shares, in_order_of_shares

pytest_plugins = ["tests.alone", "tests.nightly"]


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = [*(str(major) for major in CHOICES), "all"]
    parser.addoption("--postgres", choices=choices, default="all", help="the Postgres to test on (default: all found)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config), "holdfast-report")
    # Ten thousand tests and what they import stay until the end: nothing is gained by looking at them again and again.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    return Shares(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = in_order_of_shares(items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres_server" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--postgres")
    found = [major for major in SUPPORTED_MAJORS if major in servers_by_major()]
    majors = found if wanted == "all" else [int(wanted)]
    if not metafunc.definition.get_closest_marker("both_postgres"):
        majors = majors[:1]
    # With no server at all the tests must fail, not vanish: the fixture says which one is missing.
    majors = majors or [SUPPORTED_MAJORS[0]]
    metafunc.parametrize("postgres_server", majors, indirect=True, scope="session", ids=[f"pg{m}" for m in majors])


@pytest.fixture(autouse=True)
def logs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs in its own process sets up structlog: not for the loggers of the tests after it."""
    configure = structlog.configure

    def without_caching(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", without_caching)
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def faults_of_its_own() -> Iterator[None]:
    """What a failed test has left open fails that test, and not the next one: its error keeps it alive until then."""
    yield
    if hasattr(sys, "last_value"):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        gc.collect()


@pytest.fixture(scope="session")
def session_servers() -> Iterator[dict[int, SessionServer]]:
    """Started when first asked for, and kept: where files are shared out, each comes with all versions again."""
    servers: dict[int, SessionServer] = {}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest, session_servers: dict[int, SessionServer]) -> SessionServer:
    if request.param not in session_servers:
        binaries = servers_by_major().get(request.param)
        if binaries is None:
            pytest.fail(f"Postgres {request.param} is not on this machine", pytrace=False)
        server = SessionServer(binaries)
        server.start()
        session_servers[request.param] = server
    return session_servers[request.param]


@pytest.fixture
def dsn(request: pytest.FixtureRequest, postgres_server: SessionServer) -> Iterator[str]:
    yield from database_of_one_test(request, postgres_server)


@pytest.fixture
def empty_dsn(request: pytest.FixtureRequest, postgres_server: SessionServer) -> Iterator[str]:
    yield from database_of_one_test(request, postgres_server, EMPTY, new=True)


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
def logins(postgres_server: SessionServer, dsn: str) -> Iterator[Logins]:
    made = Logins(postgres_server, dsn)
    made.create()
    try:
        yield made
    finally:
        made.drop()


@pytest.fixture
def other_dsn(request: pytest.FixtureRequest, postgres_server: SessionServer) -> Iterator[str]:
    yield from database_of_one_test(request, postgres_server)


@pytest.fixture
async def other(other_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(other_dsn)
    yield connection
    await connection.close()


@pytest.fixture
def own_server(postgres_server: SessionServer) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(binaries=postgres_server.binaries) as server:
        yield server


@pytest.fixture
def own_dsn(own_server: EmbeddedPostgres) -> str:
    dsn = own_server.create_database("holdfast")
    apply_schema(dsn)
    return dsn
