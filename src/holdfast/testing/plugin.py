"""The pytest plugin. It is loaded wherever Holdfast is installed beside pytest: it imports nothing before it is used.

holdfast_dsn       the address of the database of this process, for a session; each test that uses it finds it clean
outbox             the outbox of a plain test
async_outbox       the outbox of an `async def` test, for any plugin that runs those
holdfast_registry  the handlers that `drain` runs; override it, or name them in the ini option of the same name
holdfast_settings  the settings of the workers that deliver; override it where they matter
holdfast_transactions  where handlers get a tx of SQLAlchemy, psycopg or Django from; override it where they take one
holdfast_setup     what makes the application's own tables, as a list; override it, or use the ini option
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.handlers import HandlerRegistry
    from holdfast.settings import WorkerSettings
    from holdfast.testing.databases import Setup, TestDatabase
    from holdfast.testing.outbox import AsyncOutbox, Outbox, PostgresOutbox

_DATABASE: pytest.StashKey[TestDatabase] = pytest.StashKey()
_OUTBOX: pytest.StashKey[PostgresOutbox] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast")
    group.addoption(
        "--holdfast-dsn",
        metavar="URL",
        help="a Postgres server for tests, in place of an embedded one: a superuser's URL",
    )
    parser.addini("holdfast_dsn", "the same; HOLDFAST_TEST_DSN goes before it")
    parser.addini("holdfast_registry", "the handlers of the application: module:registry")
    parser.addini(
        "holdfast_setup", "what makes its tables: .sql files, or module:function of an address", type="linelist"
    )
    parser.addini("holdfast_schema", "the schema of Holdfast's tables", default="core")


@pytest.fixture(scope="session")
def holdfast_registry(pytestconfig: pytest.Config) -> HandlerRegistry | None:
    """The handlers that `drain` runs."""
    target = str(pytestconfig.getini("holdfast_registry"))
    if not target:
        return None
    from holdfast.testing.finding import find_registry

    return find_registry(target)


@pytest.fixture(scope="session")
def holdfast_settings() -> WorkerSettings:
    """The settings of the workers that deliver."""
    from holdfast.settings import WorkerSettings

    return WorkerSettings()


@pytest.fixture(scope="session")
def holdfast_transactions() -> Any:
    """The sources of `tx` for SQLAlchemy, psycopg or Django, as `Worker(transactions=...)` takes them."""
    return None


@pytest.fixture(scope="session")
def holdfast_setup(pytestconfig: pytest.Config) -> list[Setup]:
    """SQL, or functions of an address, plain or asynchronous, that make the application's tables in the template."""
    from holdfast.testing.finding import find_setup

    return find_setup(pytestconfig.getini("holdfast_setup"), pytestconfig.rootpath)


@pytest.fixture(scope="session")
def holdfast_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, holdfast_setup: list[Setup]
) -> Iterator[TestDatabase]:
    """The database of this process, made from a template that all processes of the session share."""
    from holdfast.testing.databases import TestDatabase
    from holdfast.testing.loop import kit_loop
    from holdfast.testing.outbox import Outbox
    from holdfast.testing.session import test_server

    config = request.config
    dsn = config.getoption("--holdfast-dsn") or os.environ.get("HOLDFAST_TEST_DSN") or config.getini("holdfast_dsn")
    schema = str(config.getini("holdfast_schema"))
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    shared = tmp_path_factory.getbasetemp().parent / "holdfast" if worker else None
    with test_server(dsn or None, shared, holdfast_setup, schema) as (server, template):
        name = f"{template.removesuffix('_template')}_{worker or 'main'}"
        database = TestDatabase(server, name, template, schema)
        kit_loop().run(database.open())
        config.stash[_DATABASE] = database
        try:
            yield database
        finally:
            del config.stash[_DATABASE]
            kit_loop().run(Outbox.warm.close())
            kit_loop().run(database.close())


@pytest.fixture(scope="session")
def holdfast_dsn(holdfast_database: TestDatabase) -> str:
    """The address of the database of this process. It is cleaned after every test that uses it, even indirectly."""
    return holdfast_database.dsn


@pytest.fixture
def outbox(
    request: pytest.FixtureRequest,
    holdfast_database: TestDatabase,
    holdfast_registry: HandlerRegistry | None,
    holdfast_settings: WorkerSettings,
    holdfast_transactions: Any,
) -> Iterator[Outbox]:
    """The outbox of a plain test: `outbox.drain()`, `outbox.assert_published(...)`."""
    from holdfast.testing.outbox import Outbox

    yield from _given(request, Outbox(holdfast_database, holdfast_registry, holdfast_settings, holdfast_transactions))


@pytest.fixture
def async_outbox(
    request: pytest.FixtureRequest,
    holdfast_database: TestDatabase,
    holdfast_registry: HandlerRegistry | None,
    holdfast_settings: WorkerSettings,
    holdfast_transactions: Any,
) -> Iterator[AsyncOutbox]:
    """The outbox of an asynchronous test: `await async_outbox.drain()`."""
    from holdfast.testing.outbox import AsyncOutbox

    yield from _given(
        request, AsyncOutbox(holdfast_database, holdfast_registry, holdfast_settings, holdfast_transactions)
    )


def _given(request: pytest.FixtureRequest, outbox: Any) -> Iterator[Any]:
    request.node.stash[_OUTBOX] = outbox
    try:
        yield outbox
    finally:
        outbox.close()
    if outbox.faults_left:
        pytest.fail(f"no delivery has met the fault: {', '.join(outbox.faults_left)}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the contents of the outbox to the report of a failed test."""
    report = yield
    outbox = item.stash.get(_OUTBOX, None)
    if outbox is not None and report.when == "call" and report.failed:
        try:
            shown = outbox.describe()
        except Exception as error:  # whatever it is, it must not hide the failure of the test
            shown = f"cannot be read: {error!r}"
        report.sections.append(("holdfast outbox", shown))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Clean the database after a test that could have used it, when its other fixtures have ended or failed."""
    used = _uses_database(item)
    try:
        yield
    finally:
        if used:
            _clean(item)


def _uses_database(item: pytest.Item) -> bool:
    # The request of the test knows the fixtures that were asked for while it ran, too: request.getfixturevalue(...)
    asked: Any = getattr(item, "_request", None)
    names = {*getattr(item, "fixturenames", ()), *getattr(asked, "fixturenames", ())}
    return "holdfast_database" in names


def _clean(item: pytest.Item) -> None:
    database = item.config.stash.get(_DATABASE, None)
    if database is not None:
        from holdfast.testing.loop import kit_loop

        problem = kit_loop().run(database.reset())
        if problem:
            pytest.fail(problem, pytrace=False)
