"""A subscriber as a handler: it gets events as messages, and its acknowledgement becomes the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

from faststream_outbox.message import CORRELATION_ID_HEADER, Ack, OutboxInnerMessage, Retry

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError, TransientHandlerError
from holdfast.integrations.faststream.body import bytes_of
from holdfast.outcome import Done, Outcome, Reject, Snooze

# Seconds until an event is offered again if its subscriber has stopped in this process; another worker may get it.
_STOPPED = timedelta(seconds=5)


class SubscriberHandler:
    """Hands the events of one subscriber to FastStream, and makes outcomes of its acknowledgements."""

    def __init__(self, subscriber: Any, queues: Mapping[str, str]) -> None:
        self._subscriber = subscriber
        self._queues = queues

    async def __call__(self, event: EventEnvelope, context: HandlerContext) -> Outcome:
        if not self._subscriber.running:  # it has raised StopConsume, or called exit()
            return Snooze(_STOPPED)
        row = self._row(event, context)
        if not row.allow_delivery(max_deliveries=self._subscriber._config.max_deliveries, logger=None):
            raise TerminalHandlerError(f"more than {self._subscriber._config.max_deliveries} deliveries")
        await self._subscriber.consume(row)
        await row.assert_state_set(None)
        return _outcome(row)

    def _row(self, event: EventEnvelope, context: HandlerContext) -> OutboxInnerMessage:
        headers = dict(context.headers)
        headers.setdefault(CORRELATION_ID_HEADER, context.correlation_id)
        body = bytes_of(event.payload, headers)
        return OutboxInnerMessage(
            id=event.event_id.int,
            queue=self._queues[event.event_type],
            payload=body,
            headers=headers,
            attempts_count=context.attempt - 1,
            deliveries_count=context.attempt,
            created_at=event.occurred_at,
            next_attempt_at=event.occurred_at,
            first_attempt_at=None if context.attempt == 1 else event.occurred_at,
            last_attempt_at=None,
            acquired_at=event.occurred_at,
            acquired_token=uuid4(),
            retry_strategy=self._subscriber._config.retry_strategy,
        )


def _outcome(row: OutboxInnerMessage) -> Outcome:
    """Return the outcome that the subscriber has recorded, or raise the error that operators are to see."""
    error, outcome = row.last_exception, row.outcome
    if isinstance(outcome, Ack):
        return Done()
    stated = ("nack",) if error is None else ()
    if isinstance(outcome, Retry):
        raise TransientHandlerError(*stated, retry_after=outcome.delay_seconds) from error
    if row.terminal_failure_reason == "rejected" and error is None:
        return Reject()
    raise TerminalHandlerError(*stated) from error
