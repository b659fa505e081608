"""What a process that reacts to its own events sends to the database. One method calls one function.

The functions stand with their reasons in `sql/functions/reactions.sql`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.envelope import EventEnvelope
from holdfast.failure import with_traceback
from holdfast.postgres.statements import NamedStatements


@dataclass(frozen=True, slots=True)
class FailedReaction:
    """A reaction that becomes a dead letter."""

    handler_name: str
    reason: str  # retry_terminal or rejected
    error: str | None
    signature: str
    traceback: str | None = None


class ReactionStatements:
    """The statements of reactions. Every method takes the connection it runs on."""

    def __init__(self, statements: NamedStatements) -> None:
        self._statements = statements

    async def unhandled(
        self, connection: asyncpg.Connection, handlers: Sequence[str], event: EventEnvelope
    ) -> set[str]:
        """Return those of the handlers that have not handled the key of the event."""
        values = {"handlers": list(handlers), "key": event.idempotency_key, "source": event.source}
        return set(await self._value(connection, "reaction_unhandled", **values))

    async def enter(
        self, connection: asyncpg.Connection, look: bool, *, handler: str, event: EventEnvelope, idle: float
    ) -> bool | None:
        """Record the event as handled, in the open transaction; False when the handler has handled it already.

        None: with `look`, another handler has left prepared statements or channels in the session.
        """
        values = {
            "handler": handler,
            "event": event.event_id,
            "source": event.source,
            "key": event.idempotency_key,
            "idle": timedelta(seconds=idle),
        }
        name = "enter_reaction" if look else "reaction_enter"
        entered: bool | None = await self._value(connection, name, **values)
        return entered

    async def settle(
        self,
        connection: asyncpg.Connection,
        event: EventEnvelope,
        headers: Mapping[str, str],
        done: Sequence[str],
        failed: Sequence[FailedReaction],
        *,
        alone: bool,
    ) -> list[UUID]:
        """Record the outcome of the reactions to an event, and return the ids of the dead letters among them.

        `alone`: this application has no handler that gets the event from the outbox.
        """
        values = {
            "event": json.dumps(event.model_dump(mode="json") | {"headers": dict(headers) or None}),
            "done": list(done),
            "failed": [each.handler_name for each in failed],
            "reasons": [each.reason for each in failed],
            "errors": [each.error and with_traceback(each.error, each.traceback) for each in failed],
            "signatures": [each.signature for each in failed],
            "alone": alone,
        }
        return list(await self._value(connection, "reaction_settle", **values))

    async def _value(self, connection: asyncpg.Connection, name: str, **values: object) -> Any:
        return (await self._statements.fetch(connection, name, **values))[0][0]
