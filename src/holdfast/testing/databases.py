"""The databases of a test session: one template that is prepared once, and a copy of it for each process.

On a server that is given, nothing but these databases is made and dropped; their names begin with `holdfast_test_`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from asyncpg import PostgresError

from holdfast.errors import ConfigurationError
from holdfast.postgres import migrate
from holdfast.postgres.connection import open_connection
from holdfast.postgres.queries import Queries, Statement, for_asyncpg, parse, render
from holdfast.testing.loop import kit_loop

PREFIX = "holdfast_test_"
_RESET_WAIT = "2s"  # for a transaction that a test has left open
_LOCK_NOT_AVAILABLE = "55P03"

T = TypeVar("T")

# Makes the application's own tables in the template: SQL, or a function of the address.
Setup = str | Callable[[str], Any]


@cache
def statement(name: str, schema: str = "core") -> Statement:
    """Return a statement of sql/statements.sql."""
    return for_asyncpg(statement_text(name, schema))


def statement_text(name: str, schema: str = "core") -> str:
    """Return the text of a statement of sql/statements.sql, with `:name` for its parameters."""
    return render(_statements()[name], schema)


@cache
def _statements() -> dict[str, str]:
    return parse(script("statements"))


def script(name: str) -> str:
    """Return a file of this package's folder sql."""
    return files("holdfast.testing").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def database_address(dsn: str, database: str) -> str:
    """Return the address of another database on the same server."""
    parts = urlsplit(dsn)
    if parts.scheme not in ("postgres", "postgresql"):
        remedy = "write postgresql://user:password@host:port/postgres"
        raise ConfigurationError("holdfast_dsn", "is not a URL of a Postgres server", remedy)
    return urlunsplit(parts._replace(path=f"/{quote(database)}"))


@contextlib.asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    """Connect, and close the connection after the block."""
    connection = await open_connection(dsn)
    try:
        yield connection
    finally:
        await connection.close(timeout=2)


_NO_SUPERUSER = "use a superuser of a server for tests, or leave the address out for an embedded server"


def new_name() -> str:
    """Return a name for the databases of one session."""
    return f"{PREFIX}{os.getpid()}_{secrets.token_hex(4)}"


async def make_template(server: str, name: str, setup: Sequence[Setup], schema: str) -> None:
    """Make the template: a database with a movable clock, Holdfast's schema and the application's tables."""
    dsn = database_address(server, name)
    await _create(server, name)
    try:
        await prepare(dsn, setup, schema)
        await keep_as_it_is(dsn, schema)
    except BaseException:
        await drop(server, name)
        raise


async def prepare(
    dsn: str, setup: Sequence[Setup], schema: str, *, field: str = "holdfast_dsn", remedy: str = _NO_SUPERUSER
) -> None:
    """Put a movable clock, Holdfast's schema and the application's tables into a database that was made for tests.

    `field` is where the login stands, and `remedy` what helps if it is not a superuser.
    """
    async with connected(dsn) as connection:
        if not await connection.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
            raise ConfigurationError(field, "has a login that cannot set up test databases: it is no superuser", remedy)
        await connection.execute(
            "CREATE SCHEMA holdfast_testing; GRANT USAGE ON SCHEMA holdfast_testing TO PUBLIC;" + script("clock")
        )
    # After the clock, so that the defaults and functions made from now on use it.
    await migrate.apply(dsn, schema=schema)
    for each in setup:
        await _set_up(dsn, each)


async def without_schema(dsn: str, schema: str) -> None:
    """Drop Holdfast's schema, if it exists, from a database that was made for tests: it has no movable clock."""
    async with connected(dsn) as connection:
        if await connection.fetchval("SELECT to_regnamespace(quote_ident($1)) IS NOT NULL", schema):
            await connection.execute(Queries(schema).asyncpg("drop_schema").sql)


async def keep_as_it_is(dsn: str, schema: str) -> None:
    """Record the contents of a database, to which a reset brings it back."""
    async with connected(dsn) as connection:
        await connection.execute(script("reset"))
        await connection.execute(render(script("notes"), schema))
        await connection.execute("SELECT holdfast_testing.keep()")


async def _set_up(dsn: str, setup: Setup) -> None:
    if isinstance(setup, str):
        async with connected(dsn) as connection:
            await connection.execute(setup)
        return
    made = setup(dsn)
    if inspect.isawaitable(made):
        await made


async def _create(server: str, name: str, template: str | None = None) -> None:
    async with connected(server) as connection:
        copied = f' TEMPLATE "{_known(template)}"' if template else ""
        await connection.execute(f'CREATE DATABASE "{_known(name)}"{copied}')


async def copy_template(server: str, name: str, template: str) -> None:
    """Make a copy of the template, in place of any database of this name."""
    await drop(server, name)
    await _create(server, name, template)


async def drop(server: str, name: str) -> None:
    """Drop a database of the kit's own, with the sessions that are left in it."""
    async with connected(server) as connection:
        await connection.execute(f'DROP DATABASE IF EXISTS "{_known(name)}" WITH (FORCE)')


def _known(name: str) -> str:
    """Refuse to touch a database that is not one of the kit's own."""
    if not re.fullmatch(rf"{PREFIX}[a-z0-9_]+", name):
        raise ConfigurationError(name, "is not a database for tests", f"name it {PREFIX}…")
    return name


class TestDatabase:
    """The database that the tests of one process use, one after the other.

    Its methods may be awaited on any event loop: its one connection is used on the kit's own.
    """

    __test__ = False  # for pytest: not a test, in spite of its name

    def __init__(self, server: str, name: str, template: str, schema: str = "core") -> None:
        self.dsn = database_address(server, name) if server else name
        self.schema = schema
        self._name = name
        self._server = server
        self._template = template
        self._connection: Any = None
        self._lock: asyncio.Lock | None = None

    @classmethod
    def existing(cls, dsn: str, schema: str) -> Self:
        """Return a database that the application's own test runner makes and drops."""
        return cls("", dsn, "", schema)

    async def open(self) -> None:
        """Make the database."""
        if self._server:
            await kit_loop().within(copy_template(self._server, self._name, self._template))

    async def close(self) -> None:
        """Drop the database."""
        await kit_loop().within(self._close())

    async def disconnect(self) -> None:
        """Close the connection, which is opened again when it is needed."""
        await kit_loop().within(self._disconnect())

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close(timeout=2)
            self._connection = None

    async def _close(self) -> None:
        await self._disconnect()
        await drop(self._server, self._name)

    async def use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Call a function with the connection, and return its result."""
        return await kit_loop().within(self._use(work))

    async def _use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await open_connection(
                    self.dsn, server_settings={"application_name": "holdfast testing", "lock_timeout": _RESET_WAIT}
                )
            return await work(self._connection)

    async def fetch(self, name: str, **values: object) -> list[Any]:
        """Return the rows of a statement of sql/statements.sql."""
        found = statement(name, self.schema)
        return await self.use(lambda connection: connection.fetch(found.sql, *found.bind(values)))

    async def value(self, name: str, **values: object) -> Any:
        """Return the one value that a statement returns."""
        rows = await self.fetch(name, **values)
        return rows[0][0] if rows else None

    async def reset(self) -> str | None:
        """Bring the database back to its recorded contents; return the problem that the test has left, if any."""
        try:
            unchanged = await self.value("reset")
        except PostgresError as refusal:
            if refusal.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            sessions = [
                f"\n  session {row['pid']} {row['application_name']!r} is {row['state']}: {row['query']}"
                for row in await self.fetch("blockers")
            ]
            await self.open()
            return f"the test has left a transaction open that is in the way:{''.join(sessions)}"
        if not unchanged:
            if not self._server:
                return "the test has changed the schema of the database, and nothing was cleaned behind it"
            await self.open()
        return None
