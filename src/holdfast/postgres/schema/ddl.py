"""Changing a schema that others are using: one changer at a time, short lock waits, retries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from holdfast.errors import MigrationError, RemediedError
from holdfast.postgres.connection import is_pooled, open_connection
from holdfast.postgres.queries import Queries
from holdfast.retry import CONFLICT_SQLSTATES, LOCK_NOT_AVAILABLE

LOCK_TRIES = 10
LOCK_PATIENCE = 600.0
FOREIGN_PATIENCE = 15.0
_BETWEEN_QUESTIONS = 1.0

# What the scripts raise when somebody who is not trusted owns or may change what a migration would run.
UNTRUSTED = "HF001"

_PASSING = CONFLICT_SQLSTATES | {LOCK_NOT_AVAILABLE}
# Roles belong to the whole cluster, and the lock on migrations to one database: two databases that are set up
# at the same moment meet as duplicate_object, unique_violation or "tuple concurrently updated".
_PASSING_FOR_ROLES = _PASSING | {"42710", "23505", "XX000"}


class MigrationRefused(RemediedError, MigrationError):
    """A migration that the database, as it is, does not allow."""


async def connect(dsn: str) -> Any:
    """An asyncpg connection for schema changes. Every statement runs in one of the transactions below.

    No setting of the login changes what a statement means on it.
    """
    connection = await open_connection(
        dsn,
        statement_cache_size=0,  # nothing here runs twice, and a pooler may not keep statements
        server_settings={"application_name": "holdfast migrate"},
    )
    try:
        if not await is_pooled(connection):
            await connection.execute(Queries().asyncpg("begin_session").sql)
    except BaseException:
        connection.terminate()  # a caller that was cancelled has no connection that it could close
        raise
    return connection


@asynccontextmanager
async def reading(connection: Any, queries: Queries) -> AsyncIterator[None]:
    """A transaction in which no name is looked up in a schema that others can write to; if one is open, that one."""
    if connection.is_in_transaction():
        yield
        return
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(queries.asyncpg("begin_reading").sql)
        yield


@asynccontextmanager
async def one_at_a_time(connection: Any, queries: Queries, on_wait: Callable[[], None]) -> AsyncIterator[bool]:
    """Hold the installation's lock on schema changes. Yields False behind a connection pooler.

    There a session lock could be left on a connection that serves another client next, so only the lock inside
    each transaction is taken. It keeps two runs apart as well, but they may take turns.
    """
    if await is_pooled(connection):
        yield False
        return
    await _wait_for_lock(connection, queries, on_wait)
    try:
        yield True
    finally:
        if not connection.is_closed():
            await connection.fetchval(queries.asyncpg("unlock").sql)


async def _wait_for_lock(connection: Any, queries: Queries, on_wait: Callable[[], None]) -> None:
    lock_wait = _LockWait(connection, queries)
    waited = False
    while not await connection.fetchval(queries.asyncpg("try_lock").sql):
        await lock_wait.missed()
        if not waited:
            on_wait()
            waited = True
        await asyncio.sleep(random.uniform(0.05, 0.25))


class _LockWait:
    """How long the lock on schema changes is waited for.

    Every login of the database can take it. One that may not change the schema is waited for a few seconds, and named.
    """

    def __init__(self, connection: Any, queries: Queries) -> None:
        self._connection = connection
        self._queries = queries
        self._since = time.monotonic()
        self._asked_at = 0.0
        self._holder = "pid unknown"
        self._patience = LOCK_PATIENCE

    async def missed(self) -> None:
        """Raise an error when the lock has been waited for long enough."""
        now = time.monotonic()
        if now - self._asked_at >= _BETWEEN_QUESTIONS:
            self._asked_at = now
            await self._name_the_holder()
        if now - self._since > self._patience:
            raise MigrationRefused(
                f"another session has held the lock on schema changes for {now - self._since:.0f} s: {self._holder}",
                "wait for it, or as an administrator: SELECT pg_terminate_backend(pid); and run this again",
            )

    async def _name_the_holder(self) -> None:
        async with reading(self._connection, self._queries):
            row = await self._connection.fetchrow(self._queries.asyncpg("lock_holder").sql)
        if row is not None:
            self._holder = f"pid {row['pid']}, login {row['login']}, application {row['application']}"
            self._patience = LOCK_PATIENCE if row["entitled"] else FOREIGN_PATIENCE


@asynccontextmanager
async def transaction(connection: Any, queries: Queries) -> AsyncIterator[None]:
    """A transaction that no setting of the database or the login can change the meaning of."""
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(queries.asyncpg("begin_change").sql)
        yield


async def change(
    connection: Any,
    queries: Queries,
    what: str,
    work: Callable[[], Awaitable[None]],
    *,
    roles: bool = False,
    tries: int | None = None,
    on_retry: Callable[[int], None] = lambda _attempt: None,
) -> None:
    """Run `work` in a transaction of its own, again when it could not get a lock in two seconds."""
    passing = _PASSING_FOR_ROLES if roles else _PASSING
    lock_wait = _LockWait(connection, queries)
    attempt = 0
    while True:
        try:
            async with transaction(connection, queries):
                if await connection.fetchval(queries.asyncpg("try_transaction_lock").sql):
                    await work()
                    return
        except asyncpg.PostgresError as error:
            if error.sqlstate not in passing:
                raise refusal(what, error) from error
            attempt += 1
            if attempt >= (tries or LOCK_TRIES):
                raise await _no_lock(connection, queries, what, attempt) from error
            on_retry(attempt)
        await lock_wait.missed()
        # Long enough for those who queued behind the change to go ahead of its next try.
        await asyncio.sleep(random.uniform(0.1, min(4.0, 0.25 * 2**attempt)))


def is_passing(error: asyncpg.PostgresError) -> bool:
    """Whether a step may succeed when it is tried again."""
    return error.sqlstate in _PASSING


def refusal(what: str, error: asyncpg.PostgresError) -> MigrationRefused:
    """The error of a step that the server refused."""
    if error.sqlstate == UNTRUSTED:
        return MigrationRefused(str(error.args[0]), error.hint or "")
    if error.sqlstate == "42501":
        return MigrationRefused(
            f"{what}: {error}",
            "run it as a login that may do this, or let an administrator run `holdfast migrate print`",
        )
    return MigrationRefused(
        f"{what}: {error} ({error.sqlstate})", "nothing of this step was changed; fix it and run again"
    )


async def _no_lock(connection: Any, queries: Queries, what: str, tries: int) -> MigrationRefused:
    async with reading(connection, queries):
        oldest = await connection.fetchrow(queries.asyncpg("oldest_transaction").sql)
    holder = (
        f"; the oldest transaction is {oldest['seconds']} s old: pid {oldest['pid']}, "
        f"login {oldest['login']}, application {oldest['application']}"
        if oldest
        else ""
    )
    return MigrationRefused(
        f"{what}: no lock within 2 s in {tries} tries{holder}",
        "end the long transaction (pg_stat_activity, pg_terminate_backend) or wait for it, and run again",
    )
