"""The database sessions of transactional handlers: a bounded number, reserved for them, reset before each use."""

import asyncio
import contextlib
import functools
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from holdfast.errors import TerminalHandlerError
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS

# Seconds after which an unused session is reset without waiting for the next handler.
_TIDY_AFTER = 1.0
_RESET_PATIENCE = 2.0

_ENDS = re.compile(r"\s*(COMMIT|END|ABORT|ROLLBACK(?!\s+(WORK\s+|TRANSACTION\s+)?TO\b)|PREPARE\s+TRANSACTION)\b", re.I)

# DISCARD ALL would do all of this, but cannot run inside a transaction, and drops the driver's prepared statements too.
# RESET ALL is early, so that a short statement_timeout does not outlive it.
_RESET = """
RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; CLOSE ALL; DISCARD TEMP; DISCARD SEQUENCES;"""
# The first statement of a handler's transaction does this too, for less than a statement of its own would cost.
_UNLOCK = " SELECT pg_catalog.pg_advisory_unlock_all();"
# Two statements need messages of their own: DEALLOCATE needs the names, and UNLISTEN the end of a transaction.
_DEALLOCATE = """
SELECT pg_catalog.string_agg(pg_catalog.format('DEALLOCATE %I', name), '; ')
FROM pg_catalog.pg_prepared_statements WHERE from_sql OR NOT pg_catalog.starts_with(name, '__asyncpg_')"""

_SAVEPOINT = "SAVEPOINT holdfast_handler"

T = TypeVar("T")

# How long a transaction may stay silent beyond the handler's own limit before the server ends it.
SILENCE = 5.0


def _reset() -> str:
    # RESET ALL does not change the seed of random(), and whoever knows the seed can predict its values.
    return f"{_RESET} SET seed TO {2 * random.random() - 1:.15f};"


class NoSession(Exception):
    """No session became free in time."""


class NoConnection(Exception):
    """A new session could not be opened, because of `fault`."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__(str(fault))
        self.fault = fault


class EndedByHand(TerminalHandlerError):
    """A handler tried to end its transaction, or has ended it, perhaps by a commit."""

    def __init__(self, savepoint: str = "tx.transaction()", *, has_ended: bool = False) -> None:
        super().__init__(
            "the handler ended its transaction by hand; it commits with the delivery: raise or return Retry, Snooze or "
            f"Reject to roll back, and use {savepoint} for a part that may fail"
        )
        self.has_ended = has_ended


def _marking(name: str) -> Callable[..., Any]:
    """Wrap a method of the connection: a handler that uses it marks the session, which is then not used again."""
    method = getattr(asyncpg.Connection, name)

    @functools.wraps(method)
    def marked(session: "Session", *args: Any, **options: Any) -> Any:
        session.marked = session.marked or session.lent
        return method(session, *args, **options)

    return marked


class Session(asyncpg.Connection):  # type: ignore[misc]
    """A connection that refuses to end its transaction while it is lent to a handler.

    It is reset together with the BEGIN of the next transaction: what a handler has set, locked, created or prepared for
    its session must not reach the next one, and a reset of its own would cost every event a round trip.
    """

    used = False  # by a handler, since it was opened or cleaned
    lent = False  # to a handler, now
    refused = False  # to end the transaction, since it was lent
    pooled = False
    marked = False  # a handler has changed the driver's side of the session, where no reset reaches
    ended = ""  # how the server ended the last COMMIT: with ROLLBACK, if a statement had failed before
    released_at = 0.0
    _carried = ""  # what the next BEGIN or COMMIT takes along
    _patience: float | None = None  # how many seconds that BEGIN may take
    _refusal: asyncpg.PostgresError | None = None  # of that by a BEGIN

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        if self.lent:
            if _ENDS.match(query):
                self.refused = True
                raise EndedByHand()
        elif (self.used or self._carried) and query.startswith("BEGIN"):
            return await self._begin(query)
        elif self._carried and query.startswith("COMMIT"):
            query = f"{self._carried} {query}"
        status: str = await super().execute(query, *args, timeout=timeout)
        if not self.lent and query.startswith("COMMIT"):
            self.ended = status
        return status

    async def close(self, *, timeout: float | None = None) -> None:
        """Close the connection; refused to a handler, whose transaction would be lost with it."""
        if self.lent:
            self.refused = True
            raise EndedByHand()
        await super().close(timeout=timeout)

    @property
    def leftovers(self) -> bool:
        """Whether the last handler may have left something that a reset inside a transaction cannot remove."""
        return self.used and not self.pooled

    async def enter_at_once(self, statement: str, patience: float) -> asyncpg.transaction.Transaction | None:
        """Begin a transaction with a statement and the savepoint of `set_savepoint`, all in one message.

        Returns None when the statement was refused: then nothing has begun, and `enter` finds out why. Raises
        TimeoutError after `patience` seconds; the session is of no use then.
        """
        transaction = self.transaction(isolation="read_committed")
        # The driver's own timeout costs a third of asyncio's.
        self._carried, self._patience, self._refusal = f"{statement}; {_SAVEPOINT};", patience, None
        try:
            await transaction.start()
        finally:
            self._carried, self._patience = "", None
        if self._refusal is None:
            return transaction
        async with asyncio.timeout(patience):
            await transaction.rollback()
        if isinstance(self._refusal, asyncpg.LockNotAvailableError):
            raise self._refusal
        return None

    async def set_savepoint(self) -> None:
        """Set the point to which `undo` returns."""
        await super().execute(_SAVEPOINT)

    async def undo(self) -> None:
        """Take back everything since the savepoint."""
        await super().execute(f"ROLLBACK TO {_SAVEPOINT}")

    async def commit_instead(self, transaction: asyncpg.transaction.Transaction, statement: str) -> None:
        """Take back everything since the savepoint, run the statement and commit, all in one message."""
        self._carried = f"ROLLBACK TO {_SAVEPOINT}; {statement};"
        try:
            await transaction.commit()
        finally:
            self._carried = ""

    async def enter(
        self, first: Callable[["Session", bool], Awaitable[T | None]]
    ) -> tuple[asyncpg.transaction.Transaction, T]:
        """Begin a transaction with the statement of `first`; return it and the statement's result.

        The statement is told whether the session was used. Then it gives up the locks of the last handler, and returns
        None if it finds what a reset within a transaction leaves: the session is cleaned, and all begins again. Behind
        a pooler a session is not the last handler's.
        """
        for look in (self.leftovers, False):
            transaction = self.transaction(isolation="read_committed")
            await transaction.start()
            try:
                result = await first(self, look)
            except asyncpg.LockNotAvailableError:
                await transaction.rollback()  # others need the session
                raise
            if result is not None:
                return transaction, result
            await transaction.rollback()
            await self.clean()
        raise AssertionError("a statement that need not look has found something")

    async def _begin(self, begin: str) -> str:
        """Begin a transaction, and reset the session in the same message."""
        reset = _reset() + (_UNLOCK if self.pooled else "") if self.used else ""
        try:
            # The transaction would be read-only or deferrable if the last handler had made that its session's default.
            message = f"{begin.rstrip(';')} READ WRITE NOT DEFERRABLE;{reset} {self._carried}"
            return str(await super().execute(message, timeout=self._patience))
        except asyncpg.PostgresError as refusal:
            if self._carried and self.is_in_transaction():
                self._refusal = refusal  # the driver knows of the transaction, and ends it
                return ""
            raise ConnectionResetError(f"the session could not be reset: {refusal}") from refusal

    async def clean(self) -> None:
        """Reset the session outside of a transaction, which alone can drop prepared statements and channels."""
        await super().execute(f"{_reset()}{_UNLOCK} UNLISTEN *;")
        if deallocate := await self.fetchval(_DEALLOCATE):
            await super().execute(deallocate)
        self.used = False

    add_listener = _marking("add_listener")
    add_log_listener = _marking("add_log_listener")
    add_query_logger = _marking("add_query_logger")
    add_termination_listener = _marking("add_termination_listener")
    reset_type_codec = _marking("reset_type_codec")
    set_builtin_type_codec = _marking("set_builtin_type_codec")
    set_type_codec = _marking("set_type_codec")


class Sessions:
    """At most `most` sessions, opened when they are needed; those beyond `size` are closed after use."""

    def __init__(
        self, address: Address, *, size: int, most: int | None = None, patience: float, statement_timeout: float
    ) -> None:
        self._address = address
        self._size = size
        self._patience = patience
        # The server's limit for idle transactions does not end a client that is gone while a statement runs or is sent.
        self._statement_timeout = statement_timeout
        self._free = asyncio.Semaphore(max(size, most or 0))
        self._unused: list[Session] = []
        self._open: dict[Session, float] = {}  # since when
        self._tidying: asyncio.Task[None] | None = None
        self.drops = 0

    async def take(self) -> Session:
        """Borrow a session until `release`."""
        if self._free.locked():
            await self._wait_for_turn()
        else:
            await self._free.acquire()  # does not wait
        try:
            while self._unused:
                session = self._unused.pop()
                if not session.is_closed():
                    return session
                self._open.pop(session, None)
            return await self.open()
        except BaseException as fault:
            self._free.release()
            if isinstance(fault, asyncpg.TooManyConnectionsError) and len(self._open) >= self._size:
                raise NoSession from fault
            if isinstance(fault, CONNECTION_FAULTS):
                raise NoConnection(fault) from fault
            raise

    def release(self, session: Session) -> None:
        """Give a session back. One that was terminated, or that a handler has changed, is not used again."""
        if session.marked or session.is_closed():
            self.discard(session)
        else:
            session.used, session.released_at = True, time.monotonic()
            self._unused.append(session)
            if self._tidying is None or self._tidying.done():
                self._tidying = asyncio.create_task(self._tidy())
        self._free.release()

    async def _wait_for_turn(self) -> None:
        """Wait until a session may be taken."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise NoSession from None

    async def open(self) -> Session:
        """Open a session for a caller that already holds one of the `most` places; the caller ends the session."""
        opened: Session = await connect(
            self._address, "handler", statement_timeout=self._statement_timeout, lent=True, connection_class=Session
        )
        opened.pooled = self._address.pooled
        self._open[opened] = time.monotonic()
        return opened

    def drop(self, silence: float) -> None:
        """Terminate sessions older than `silence`, the time without an answer from the server, also those in use."""
        self.drops += 1
        for session, opened_at in tuple(self._open.items()):
            if time.monotonic() - opened_at > silence:
                terminate(session)

    def discard(self, session: Session) -> None:
        """Terminate a session that is not used again."""
        terminate(session)
        self._open.pop(session, None)

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        unused, self._unused = self._unused, []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*(session.close() for session in unused), return_exceptions=True)
        for session in tuple(self._open):
            terminate(session)

    async def _tidy(self) -> None:
        """Reset the unused sessions, one after the other, until all are clean."""
        while used := [session for session in self._unused if session.used]:
            longest = min(used, key=lambda session: session.released_at)
            wait = longest.released_at + _TIDY_AFTER - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            self._unused.remove(longest)
            if len(self._open) > self._size:
                self.discard(longest)
                continue
            if self._free.locked():
                self._unused.insert(0, longest)
                await asyncio.sleep(_TIDY_AFTER)
                continue
            await self._free.acquire()  # does not wait
            try:
                async with asyncio.timeout(_RESET_PATIENCE):
                    await longest.clean()
                self._unused.insert(0, longest)
            except Exception:
                self.discard(longest)
            finally:
                self._free.release()


def terminate(session: Session | None) -> None:
    """Cut the connection of a session; the server rolls its transaction back."""
    if session is not None:
        with contextlib.suppress(asyncpg.InterfaceError):  # it was already
            session.terminate()
