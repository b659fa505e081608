"""The client of the broker: it writes events of Holdfast instead of rows of faststream-outbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from faststream_outbox.client import AbstractOutboxClient
from faststream_outbox.message import CORRELATION_ID_HEADER
from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.errors import FieldError
from holdfast.ids import uuid7
from holdfast.integrations.faststream.body import payload_of
from holdfast.new_event import NewEvent
from holdfast.postgres.publisher import Publisher


class EventClient(AbstractOutboxClient):
    """Publishes the messages of the broker as events; a worker claims and settles them."""

    def __init__(
        self, engine: AsyncEngine | None, table: Table, publisher: Publisher, event_type: Callable[[str], str]
    ) -> None:
        self._engine = engine
        self._table = table
        self._publisher = publisher
        self._event_type = event_type

    @property
    def engine(self) -> AsyncEngine | None:
        return self._engine

    @property
    def table(self) -> Table:
        return self._table

    async def insert(
        self,
        session: Any,
        *,
        queue: str,
        payload: bytes,
        headers: dict[str, str] | None,
        activate_in: timedelta | None = None,
        activate_at: datetime | None = None,
        timer_id: str | None = None,
        timer_conflict: Any = "ignore",
    ) -> int | None:
        """Publish an event; return None if a pending one has the same `timer_id`."""
        if timer_conflict != "ignore":
            remedy = "leave it out; Publisher.reschedule moves a pending event to another time"
            raise FieldError("timer_conflict", f"is {timer_conflict!r}, which Holdfast does not know", remedy)
        key = None if timer_id is None else _key(queue, timer_id)
        new = self._event(queue, payload, headers, activate_in, activate_at, key)
        published = await self._publisher.publish_event(session, new)
        return published.event_id.int if published.event_id == new.event_id else None

    async def insert_batch(
        self,
        session: Any,
        *,
        queue: str,
        rows: Sequence[tuple[bytes, dict[str, str] | None]],
        activate_in: timedelta | None = None,
        activate_at: datetime | None = None,
    ) -> None:
        """Publish several events in one statement."""
        events = [self._event(queue, payload, headers, activate_in, activate_at, None) for payload, headers in rows]
        await self._publisher.publish_many(session, events)

    async def cancel_timer(self, *, queue: str, timer_id: str, session: Any) -> bool:
        cancelled: bool = await self._publisher.cancel(session, _key(queue, timer_id))
        return cancelled

    async def ping(self) -> bool:
        """Return whether the application's engine connects."""
        if self._engine is None:
            return True
        try:
            async with self._engine.connect():
                return True
        except Exception:
            return False

    def _event(
        self,
        queue: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        activate_in: timedelta | None,
        activate_at: datetime | None,
        key: str | None,
    ) -> NewEvent:
        kept = dict(headers or {})
        correlation_id = kept.pop(CORRELATION_ID_HEADER, None)
        body = payload_of(payload, kept)
        return NewEvent(
            self._event_type(queue),
            body,
            event_id=uuid7(),
            headers=kept,
            correlation_id=correlation_id,
            delay=activate_in,
            available_at=activate_at,
            key=key,
        )

    # --- what a worker does in place of the loops of faststream-outbox -----------------------------------------

    async def fetch(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("events are claimed by a worker of Holdfast")

    async def delete_with_lease(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("events are settled by a worker of Holdfast")

    async def delete_batch_with_lease(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("events are settled by a worker of Holdfast")

    async def mark_pending_with_lease(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("events are settled by a worker of Holdfast")

    async def fetch_unprocessed(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("pending events are shown by holdfast events list, and by Operator.events")

    async def validate_schema(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the schema is checked by holdfast doctor, and by each worker when it starts")


def _key(queue: str, timer_id: str) -> str:
    return f"{queue}/{timer_id}"
