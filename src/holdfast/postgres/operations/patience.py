"""Says what an operator's statement waits for: while it waits, and in the error when it has waited too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Final, Self

import asyncpg

from holdfast.errors import RemediedError
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.lock_waits import LockWait
from holdfast.postgres.queries import Queries

PATIENCE: Final = 1.5
_BETWEEN_LOOKS: Final = 0.5
_WAITED: Final = timedelta(seconds=1)
_STATEMENTS_IN_READ: Final = 3  # that may each take as long as they may


class Blocked(RemediedError):
    """A statement waited for a lock until its time was over; nothing was changed."""

    @classmethod
    def by(cls, wait: LockWait) -> Self:
        """Return the error that names the session which is in the way."""
        return cls(
            f"another session is in the way and nothing was changed: {wait.blocker}",
            f"wait for it, or as an administrator: {wait.remedy} and run this again",
        )


class ReadTimeout(RemediedError):
    """A read took longer than it may; it has ended, and nothing was changed."""


class ReadLimit:
    """How long a read of an operator may take: each of its statements, and all of them together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def setting(self) -> str:
        """The limit of one statement, for the server."""
        return f"{max(1, round(self._seconds * 1000))}ms"

    @contextlib.asynccontextmanager
    async def over(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """End the connection when the block takes too long: a server out of reach ends no statement by itself."""
        late = False

        def end() -> None:
            nonlocal late
            late = True
            connection.terminate()

        timer = asyncio.get_running_loop().call_later(_STATEMENTS_IN_READ * self._seconds, end)
        try:
            yield
        except (asyncpg.QueryCanceledError, *CONNECTION_FAULTS) as error:
            if late or isinstance(error, asyncpg.QueryCanceledError):
                raise ReadTimeout(
                    f"the read took longer than {self._seconds:g} s and was ended",
                    "narrow it: fewer rows, a shorter time, another filter; or try again later",
                ) from error
            raise
        finally:
            timer.cancel()


class LockWatch:
    """Looks, from a connection of its own, what a session waits for when it takes longer than a moment."""

    def __init__(self, address: Address, queries: Queries, on_wait: Callable[[str], None]) -> None:
        self._address = address
        self._queries = queries
        self._on_wait = on_wait

    @contextlib.asynccontextmanager
    async def over(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """Watch the statements of a block. One that ends in a timeout for a lock raises `Blocked`."""
        async with self.seen(connection) as waits:
            try:
                yield
            except (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError) as error:
                if waits:
                    raise Blocked.by(waits[-1]) from error
                raise

    @contextlib.asynccontextmanager
    async def seen(self, connection: asyncpg.Connection) -> AsyncIterator[Sequence[LockWait]]:
        """Watch the statements of a block, and list what they have waited for."""
        seen: list[LockWait] = []
        watching = asyncio.create_task(self._watch(connection.get_server_pid(), seen))
        try:
            yield seen
        finally:
            watching.cancel()
            await asyncio.wait((watching,))

    async def _watch(self, pid: int, seen: list[LockWait]) -> None:
        await asyncio.sleep(PATIENCE)
        if self._address.pooled:
            return  # the session that waits has another pid than the one that is known
        statement = self._queries.asyncpg("list_lock_waits")
        values = statement.bind({"pid": pid, "sessions": None, "waited": _WAITED})
        # What cannot be found out is not said: the statement itself reports what is wrong.
        with contextlib.suppress(*CONNECTION_FAULTS, asyncpg.PostgresError):
            connection = await connect(self._address, "watch", statement_timeout=PATIENCE)
            try:
                while True:
                    found = [LockWait(**row) for row in await connection.fetch(statement.sql, *values)]
                    if found and not seen:
                        self._on_wait(f"waiting for a lock: {found[0].blocker}")
                    seen += found[:1]
                    await asyncio.sleep(_BETWEEN_LOOKS)
            finally:
                connection.terminate()
