"""Records the results of reactions in the database: done ones in the inbox, failed ones as dead letters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from uuid import UUID

import asyncpg

from holdfast.envelope import EventEnvelope
from holdfast.event_data import EventData
from holdfast.failure import Redactor, describe, state
from holdfast.handlers import Handler, HandlerRegistry
from holdfast.observability.observers import Observers
from holdfast.outcome import Done, Outcome, Reject, Retry
from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.reactions import FailedReaction, ReactionStatements
from holdfast.reactions.attempts import Result
from holdfast.telemetry import Notice

# Seconds between tries to record results: half a minute together, as long as a failover may take.
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Recorded(NamedTuple):
    """The reactions to one event: the names of those that are done, and the failed ones with the ids of their rows."""

    done: list[str]
    failed: list[tuple[FailedReaction, UUID]]


class Recorder:
    """Reads and writes the results of reactions, on one connection for all of them."""

    def __init__(
        self,
        statements: ReactionStatements,
        connection: ReservedConnection,
        registry: HandlerRegistry,
        observe: Observers,
        redact: Redactor | None,
    ) -> None:
        self._statements = statements
        self._connection = connection
        self._lock = asyncio.Lock()  # for the connection
        self._registry = registry
        self._observe = observe
        self._redact = redact

    async def unhandled(self, event: EventEnvelope, names: list[str]) -> set[str]:
        """Return which of the handlers have not handled the event's key."""
        async with self._connected() as connection:
            return await self._statements.unhandled(connection, names, event)

    async def record(
        self, event: EventEnvelope, headers: dict[str, str], results: Mapping[str, Result], *, alone: bool
    ) -> Recorded:
        """Record the results, and try again while the server is away; what cannot be recorded is reported.

        `alone`: no worker is to deliver the event as well.
        """
        done = [name for name, result in results.items() if result is None or isinstance(result, Done)]
        data = EventData.of(event, headers)
        failed = [
            self._failure(self._registry[name], result, data)
            for name, result in results.items()
            if result is not None and not isinstance(result, Done)
        ]
        ids = None
        for pause in (*_PAUSES, None):
            try:
                async with self._connected() as connection:
                    ids = await self._statements.settle(connection, event, headers, done, failed, alone=alone)
                break
            except (*CONNECTION_FAULTS, *PASSING_FAULTS) as fault:
                if pause is None:
                    self._unrecorded(event, done, failed, fault)
                    break
                await asyncio.sleep(pause)
            except asyncpg.PostgresError as fault:
                self._unrecorded(event, done, failed, fault)
                break
        identities = ids or [event.event_id] * len(failed)
        return Recorded(done, list(zip(failed, identities, strict=True)))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[asyncpg.Connection]:
        async with self._lock:
            try:
                yield await self._connection.use()
            except CONNECTION_FAULTS:
                self._connection.drop()
                raise

    def _failure(self, handler: Handler, result: Outcome | BaseException, event: EventData) -> FailedReaction:
        reason = "rejected" if handler.on_error == "reject" else "retry_terminal"
        if isinstance(result, BaseException):
            report = describe(result, self._redact, event, handler.package)
        elif isinstance(result, Reject):
            reason = "rejected"
            if not result.reason:
                return FailedReaction(handler.name, reason, result.reason, reason)
            report = state(str(result.reason), reason, self._redact, event)
        else:
            asked = (result.reason if isinstance(result, Retry) else None) or "the reaction asked to be run again later"
            report = state(str(asked), type(result).__name__, self._redact, event)
        return FailedReaction(handler.name, reason, report.text, report.signature, report.traceback)

    def _unrecorded(
        self, event: EventEnvelope, done: list[str], failed: list[FailedReaction], fault: BaseException
    ) -> None:
        details: dict[str, object] = {
            "event_id": str(event.event_id),
            "event_type": event.event_type,
            "done": done,
            "failed": [each.handler_name for each in failed],
            # Without DETAIL, which may quote a row.
            "error": str(fault.args[0])
            if isinstance(fault, asyncpg.PostgresError)
            else describe(fault, self._redact).text,
            "remedy": "the result could not be recorded: failures of this event are listed only here",
        }
        self._observe(Notice("error", "reaction_unrecorded", details))
