"""Deliveries that come from a broker, and the statements of a worker that has such deliveries beside rows.

A message is settled by its inbox row. What is to be tried again, or has failed, becomes a row in the lane of its
handler first, as if this worker had claimed it, and is settled as a row. The functions stand with their reasons in
`sql/functions/brokers.sql`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.ids import uuid7
from holdfast.postgres.connection import LOCK_TIMEOUT, own_transaction
from holdfast.postgres.deliveries import Deliveries
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.statements import ApplicationConnection, NamedStatements


class Message(Delivery):
    """One event that a broker has delivered: in flight until the broker is told that it is settled, or gets it back."""

    channel: str
    details: Mapping[str, object]  # what its row would have besides what the envelope says
    received: Any  # as the broker's client knows it
    returned: bool  # not settled: the broker delivers it again
    refused: str | None  # not settled, and never will be: why the database does not take what it contains

    __slots__ = ("_on_end", "channel", "details", "received", "refused", "returned")

    def __init__(
        self,
        event: EventEnvelope,
        headers: Mapping[str, str],
        handler: Handler,
        channel: str,
        details: Mapping[str, object],
        *,
        size: int,
        expired: bool,
        received: Any,
        on_end: Callable[[Message], None],
    ) -> None:
        id = uuid7()
        # The event is decoded: its payload as text is only weighed.
        record = (
            id, handler.name, 1, event.occurred_at, event.event_id,
            event.event_type, event.event_version, event.occurred_at, event.source, event.target, event.domain_id,
            " " * size, event.idempotency_key, event.trace_context, json.dumps(dict(headers)) if headers else None,
            1, None, expired, False, False,
        )  # fmt: skip
        # Its token is nobody's until it is a row, and its id never is a row's.
        super().__init__(record, id, {handler.name: handler}, time.monotonic())
        context = HandlerContext(event.event_id, id, handler.name, 1, headers, event.trace_context)
        self.carried = (event, context)
        self.channel = channel
        self.details = details
        self.received = received
        self.returned = False
        self.refused = None
        self._on_end: Callable[[Message], None] | None = on_end

    def end(self) -> None:
        """Say once that it is in flight no longer."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def as_row(self) -> str:
        """Return the event as JSON, as broker_park reads it."""
        event = self.carried[0] if self.carried is not None else None
        fields: dict[str, object] = {
            "event_id": self.event_id,
            "event_type": self.event_type,
            "event_version": self.event_version,
            "occurred_at": self.occurred_at,
            "source": self.source,
            "target": self.target,
            "domain_id": self.domain_id,
            "payload": None if event is None else event.payload,
            "headers": None if self.headers is None else json.loads(self.headers),
            "idempotency_key": self.idempotency_key,
            "trace_context": self.trace_context,
            **self.details,
        }
        return to_json(fields, inf_nan_mode="constants").decode()


class MessageDeliveries(Deliveries):
    """The statements of a worker that has messages beside rows, and a relay among its handlers.

    What the relay has sent is delivered without an inbox row: it may be sent again.
    """

    def __init__(
        self, statements: NamedStatements, *, worker: UUID, generation: int, lease: float, relays: frozenset[str]
    ) -> None:
        super().__init__(statements, worker=worker, generation=generation, lease=lease)
        self._relays = relays

    async def extend(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        rows, _ = _divided(batch)
        return await super().extend(connection, rows) if rows else []

    async def blocked(
        self, connection: asyncpg.Connection, batch: Sequence[Delivery], *, record: bool, delete: bool = False
    ) -> list[UUID]:
        rows, _ = _divided(batch)
        return await super().blocked(connection, rows, record=record, delete=delete) if rows else []

    # --- settling ---------------------------------------------------------------------------------------

    async def deliver(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        outcome: Literal["delivered", "duplicate"],
        *,
        record: bool,
        delete: bool = True,
    ) -> list[UUID]:
        rows, messages = _divided(batch)
        sent = [each for each in rows if each.handler.name in self._relays]
        handled = [each for each in rows if each.handler.name not in self._relays]
        lost: list[UUID] = []
        async with _together(connection, bool(sent) + bool(handled) + bool(messages) > 1):
            if handled:
                lost += await super().deliver(connection, handled, outcome, record=record, delete=delete)
            if sent:
                # In place: what is sent may have to be sent again, as long as retention keeps it.
                lost += await super().deliver(connection, sent, outcome, record=False, delete=False)
            if messages:
                await self._fetch(
                    connection,
                    "broker_deliver",
                    handlers=[each.handler.name for each in messages],
                    sources=[each.source for each in messages],
                    keys=[each.idempotency_key for each in messages],
                    generation=self._generation,
                    record=record,
                    outcome=outcome,
                )
        return lost

    async def retry(
        self, connection: asyncpg.Connection, batch: Sequence[Delivery], delays: Iterable[float], errors: Sequence[str]
    ) -> list[UUID]:
        waits = list(delays)
        async with self._as_rows(connection, batch) as rows:
            if not rows.kept:
                return []
            return rows.originals(await super().retry(connection, rows.rows, rows.of(waits), rows.of(errors)))

    async def fail(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        async with self._as_rows(connection, batch) as rows:
            if not rows.kept:
                return []
            values = rows.of(reasons), rows.of(errors), rows.of(signatures)
            return rows.originals(await super().fail(connection, rows.rows, *values))

    async def archive(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        async with self._as_rows(connection, batch) as rows:
            if not rows.kept:
                return []
            values = rows.of(reasons), rows.of(errors), rows.of(signatures)
            return rows.originals(await super().archive(connection, rows.rows, *values))

    async def release(
        self, connection: asyncpg.Connection, batch: Sequence[Delivery], delays: Iterable[float]
    ) -> list[UUID]:
        waits = list(delays)
        for each, wait in zip(batch, waits, strict=True):
            if isinstance(each, Message) and wait <= 0:
                each.returned = True  # for any worker, as if it had not been taken
        left = [index for index, each in enumerate(batch) if not (isinstance(each, Message) and waits[index] <= 0)]
        if not left:
            return []
        async with self._as_rows(connection, [batch[index] for index in left]) as rows:
            later = rows.of([waits[index] for index in left])
            return rows.originals(await super().release(connection, rows.rows, later)) if rows.kept else []

    @contextlib.asynccontextmanager
    async def _as_rows(self, connection: Any, batch: Sequence[Delivery]) -> AsyncIterator[_Rows]:
        """Make rows of the messages in a batch, in the transaction in which they are then settled."""
        _, messages = _divided(batch)
        async with _together(connection, bool(messages)):
            made = dict(zip(messages, await self.park(connection, messages), strict=True)) if messages else {}
            yield _Rows(batch, made)

    async def park(
        self, connection: asyncpg.Connection, messages: Sequence[Message], *, claimed: bool = True
    ) -> list[UUID | None]:
        """Make a row in the lane of its handler from each message; None for what is there already.

        With `claimed` the row is as if this worker had claimed it, otherwise it waits for whoever does.
        """
        made: dict[Message, UUID | None] = {}
        for (handler, channel), some in groupby(sorted(messages, key=_lane), _lane):
            parked = list(some)
            rows = await self._fetch(
                connection,
                "broker_park",
                handler=handler,
                channel=channel,
                generation=self._generation,
                worker=self._worker,
                lease=self._lease,
                events=[each.as_row() for each in parked],
                tokens=[each.token if claimed else None for each in parked],
            )
            made.update(zip(parked, rows[0][0], strict=True))
        return [made[each] for each in messages]

    async def look(self, connection: asyncpg.Connection, handler: str, messages: Sequence[Message]) -> list[bool]:
        """Return of each message whether it is to run: it is neither handled nor in the outbox."""
        rows = await self._fetch(connection, "broker_look", handler=handler, **_named(messages))
        return [answer == "run" for answer in rows[0][0]]

    # --- in the transaction of a handler ----------------------------------------------------------------

    async def enter(self, connection: asyncpg.Connection, look: bool, *, delivery: Delivery, idle: float) -> str | None:
        if not isinstance(delivery, Message):
            return await super().enter(connection, look, delivery=delivery, idle=idle)
        rows = await self._fetch(
            connection,
            "enter_message" if look else "broker_enter",
            handler=delivery.handler.name,
            event=delivery.event_id,
            source=delivery.source,
            key=delivery.idempotency_key,
            generation=self._generation,
            idle=timedelta(seconds=idle),
        )
        entered: str | None = rows[0][0]
        return entered

    def entering(self, delivery: Delivery, idle: float, look: bool) -> str:
        if not isinstance(delivery, Message):
            return super().entering(delivery, idle, look)
        return self._filled_in(
            "enter_message_at_once",
            {
                "handler": delivery.handler.name,
                "event": delivery.event_id,
                "source": delivery.source.encode().hex(),
                "key": delivery.idempotency_key.encode().hex(),
                "generation": self._generation,
                "idle": f"{idle} s",
                "look": look,
            },
        )

    async def enter_batch(
        self, connection: asyncpg.Connection, look: bool, *, batch: Sequence[Delivery], idle: float
    ) -> list[str] | None:
        rows, messages = _divided(batch)
        found: dict[Delivery, str] = {}
        if rows:
            entered = await super().enter_batch(connection, look, batch=rows, idle=idle)
            if entered is None:
                return None
            found.update(zip(rows, entered, strict=True))
        if messages:
            records = await self._fetch(
                connection,
                "enter_messages" if look and not rows else "broker_enter_batch",
                handler=messages[0].handler.name,
                **_named(messages),
                generation=self._generation,
                idle=timedelta(seconds=idle),
            )
            if records[0][0] is None:
                return None
            found.update(zip(messages, records[0][0], strict=True))
        return [found[each] for each in batch]

    async def reopen(self, connection: asyncpg.Connection, delivery: Delivery) -> bool:
        if isinstance(delivery, Message):
            return await self._leave(connection, [delivery])
        return await super().reopen(connection, delivery)

    async def reopen_batch(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> bool:
        rows, messages = _divided(batch)
        if messages and not await self._leave(connection, messages):
            return False
        return not rows or await super().reopen_batch(connection, rows)

    async def _leave(self, connection: asyncpg.Connection, messages: Sequence[Message]) -> bool:
        rows = await self._fetch(
            connection,
            "broker_leave",
            handler=messages[0].handler.name,
            sources=[each.source for each in messages],
            keys=[each.idempotency_key for each in messages],
            generation=self._generation,
        )
        return bool(rows[0][0])

    async def delete_delivered(self, connection: asyncpg.Connection, delivery: Delivery) -> None:
        if not isinstance(delivery, Message):
            await super().delete_delivered(connection, delivery)

    async def delete_delivered_batch(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> None:
        await super().delete_delivered_batch(connection, _divided(batch)[0])

    def retrying(self, delivery: Delivery, delay: float, error: str) -> str | None:
        return None if isinstance(delivery, Message) else super().retrying(delivery, delay, error)

    def has_committed(self, delivery: Delivery, entered: str) -> bool:
        if isinstance(delivery, Message):
            return entered == "duplicate"
        return super().has_committed(delivery, entered)


class _Rows:
    """A batch as rows: what was a message stands for the row that was made of it, unless that was there already."""

    def __init__(self, batch: Sequence[Delivery], made: Mapping[Message, UUID | None]) -> None:
        self.kept: list[int] = []
        self.rows: list[Delivery] = []
        self._messages: dict[UUID, UUID] = {}
        for index, each in enumerate(batch):
            if isinstance(each, Message):
                id = made[each]
                if id is None:
                    continue
                row = copy.copy(each)
                row.id = id
                self._messages[id] = each.id
                self.rows.append(row)
            else:
                self.rows.append(each)
            self.kept.append(index)

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return those of the values that belong to the rows."""
        return [values[index] for index in self.kept]

    def originals(self, ids: Iterable[UUID]) -> list[UUID]:
        """Return the ids as the batch has them."""
        return [self._messages.get(id, id) for id in ids]


# Of nearly every message.
PLAIN: Mapping[str, object] = MappingProxyType(
    {"ordering_key": None, "fairness_key": None, "priority": 1, "content_class": "operations", "expires_at": None}
)
_PLAIN_VALUES = tuple(PLAIN.values())


def details_of(
    ordering_key: str | None,
    fairness_key: str | None,
    priority: int,
    content_class: str,
    expires_at: datetime | None,
) -> Mapping[str, object]:
    """Return what a message says about its row besides what the envelope does."""
    if (ordering_key, fairness_key, priority, content_class, expires_at) == _PLAIN_VALUES:
        return PLAIN
    return {
        "ordering_key": ordering_key,
        "fairness_key": fairness_key,
        "priority": priority,
        "content_class": content_class,
        "expires_at": expires_at,
    }


def _divided(batch: Sequence[Delivery]) -> tuple[list[Delivery], list[Message]]:
    return (
        [each for each in batch if not isinstance(each, Message)],
        [each for each in batch if isinstance(each, Message)],
    )


def _lane(message: Message) -> tuple[str, str]:
    return message.handler.name, message.channel


def _named(messages: Sequence[Message]) -> dict[str, object]:
    return {
        "events": [each.event_id for each in messages],
        "sources": [each.source for each in messages],
        "keys": [each.idempotency_key for each in messages],
    }


@contextlib.asynccontextmanager
async def _together(connection: Any, several: bool) -> AsyncIterator[None]:
    """Run several statements in one transaction: the one that is open, or a new one."""
    if not several or isinstance(connection, ApplicationConnection) or connection.is_in_transaction():
        yield
    else:
        async with own_transaction(connection, lock_timeout=LOCK_TIMEOUT):
            yield
