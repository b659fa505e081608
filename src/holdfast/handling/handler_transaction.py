"""The transaction of one handler, in any library: the steps that the runner of a handler needs.

    BEGIN, and the statement that enters; SAVEPOINT; handler; COMMIT
                                          or: ROLLBACK TO SAVEPOINT, statements that settle; COMMIT

`OwnTransaction` is on a session that Holdfast has opened.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import asyncpg

from holdfast.handlers import Handler
from holdfast.handling.sessions import Session, terminate
from holdfast.postgres.faults import CONNECTION_FAULTS

T = TypeVar("T")

# Runs the statement that enters the transaction, on the given connection. If it is told to check what the last handler
# has left in the session, it may return None: the session has to be cleaned, and the transaction begun again.
Entry = Callable[[Any, bool], Awaitable[T | None]]

# A COMMIT that ends with one of these may have been carried out.
_UNANSWERED = (*CONNECTION_FAULTS, asyncio.CancelledError)


class HandlerTransaction(ABC):
    """One transaction, from its begin to its end. `connection` runs Holdfast's statements, `tx` is the handler's."""

    connection: Any
    tx: Any
    forbidden = False  # to commit: the handler is past its time limit
    savepoint = "tx.transaction()"  # how a handler writes a part that may fail

    async def enter_at_once(self, statement: Callable[[bool], str], patience: float) -> bool:
        """Begin with a statement and the savepoint in one message, if the library can do that.

        The statement is told whether to look for what the last handler has left. False: nothing has begun. It fails as
        if the connection had broken when it takes longer than `patience` seconds.
        """
        return False

    @abstractmethod
    async def enter(self, first: Entry[T]) -> T:
        """Begin with the statement of `first`, and return its result; if a lock stops it, end the transaction."""

    @abstractmethod
    async def set_savepoint(self) -> None:
        """Set the point to which `undo` returns."""

    @abstractmethod
    def lend(self) -> None:
        """Refuse to end the transaction from now on, while the handler has it."""

    @property
    @abstractmethod
    def refused(self) -> bool:
        """Whether the handler has tried to end the transaction."""

    @abstractmethod
    def take_back(self) -> bool:
        """Allow the end again; return False if the handler has ended the transaction all the same."""

    @abstractmethod
    async def finish(self) -> None:
        """Write what the library still holds back, such as the changes of a session."""

    @abstractmethod
    async def commit(self, handler: Handler) -> None:
        """Commit, and raise if a failed statement has made the server roll back."""

    async def commit_instead(self, statement: str) -> bool:
        """Undo, run the statement and commit in one message; return False if the library cannot do that."""
        return False

    @abstractmethod
    async def undo(self) -> None:
        """Take back everything since the savepoint."""

    @abstractmethod
    async def commit_undone(self) -> None:
        """Commit after `undo`, without anything of the handler's."""

    @abstractmethod
    async def rollback(self) -> None:
        """Roll the whole transaction back."""

    @abstractmethod
    def terminate(self) -> None:
        """Cut the connection: the server rolls back, and what waits for it fails."""

    @abstractmethod
    def within(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Limit the time of the steps within: one that takes longer fails as if the connection had broken."""

    @abstractmethod
    def is_fault(self, error: BaseException) -> bool:
        """Return whether the connection or the server has failed, and not the statement."""

    @abstractmethod
    def is_unanswered(self, error: BaseException) -> bool:
        """Return whether a COMMIT that ended with this error may have been carried out."""


class OwnTransaction(HandlerTransaction):
    """A transaction on a session of Holdfast's own."""

    def __init__(self, session: Session) -> None:
        self.connection = self.tx = session

    async def enter_at_once(self, statement: Callable[[bool], str], patience: float) -> bool:
        self._transaction = await self.tx.enter_at_once(statement(self.tx.leftovers), patience)
        return self._transaction is not None

    async def enter(self, first: Entry[T]) -> T:
        self._transaction, result = await self.tx.enter(first)
        return result  # type: ignore[no-any-return]

    async def set_savepoint(self) -> None:
        await self.tx.set_savepoint()

    def lend(self) -> None:
        self.tx.lent, self.tx.refused = True, False

    @property
    def refused(self) -> bool:
        return bool(self.tx.refused)

    def take_back(self) -> bool:
        self.tx.lent = False
        return bool(self.tx.is_in_transaction())

    async def finish(self) -> None:
        """Nothing: asyncpg keeps no writes back."""

    async def commit(self, handler: Handler) -> None:
        self.tx.ended = ""
        await self._transaction.commit()  # and with it the savepoint
        if self.tx.ended != "COMMIT":
            raise asyncpg.InFailedSQLTransactionError(
                f"{handler.name} went on after a statement had failed, and nothing could be committed; use "
                f"{self.savepoint} for a part that may fail"
            )

    async def commit_instead(self, statement: str) -> bool:
        await self.tx.commit_instead(self._transaction, statement)
        return True

    async def undo(self) -> None:
        await self.tx.undo()

    async def commit_undone(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    def terminate(self) -> None:
        terminate(self.tx)

    def within(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)

    def is_fault(self, error: BaseException) -> bool:
        return isinstance(error, CONNECTION_FAULTS)

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, _UNANSWERED)
