"""Makes the event and the handler context from a claimed row."""

from typing import cast

from pydantic_core import from_json

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError
from holdfast.event_data import EventData
from holdfast.postgres.delivery import Delivery
from holdfast.worker.unreadable import UNREADABLE

_new_tuple = tuple.__new__


def decode(delivery: Delivery) -> tuple[EventEnvelope, HandlerContext]:
    """Return the event of a delivery and the handler's context. A row that cannot be decoded fails alone."""
    if delivery.carried is not None:
        return delivery.carried
    if delivery.handler.raw:
        return cast("EventEnvelope", delivery), _new_tuple(
            HandlerContext,
            (delivery.event_id, delivery.id, delivery.handler.name, delivery.attempts, {}, delivery.trace_context),
        )
    if delivery.event_type == UNREADABLE:
        # The handler has never wanted it. What it says was written by whoever can write to the broker.
        raise TerminalHandlerError("it is no event, but what was kept of a message that was refused; discard it")
    try:
        payload = from_json(delivery.payload)
        headers = from_json(delivery.headers) if delivery.headers else {}
    except (ValueError, TypeError) as error:
        raise TerminalHandlerError(f"the row cannot be decoded: {type(error).__name__}") from None
    if not isinstance(payload, dict):
        raise TerminalHandlerError(f"the row cannot be decoded: its payload is {type(payload).__name__}")
    event_id, trace_context = delivery.origin_id or delivery.id, delivery.trace_context
    event = EventEnvelope.trusted(
        {
            "event_id": event_id,
            "event_type": delivery.event_type,
            "event_version": delivery.event_version,
            "occurred_at": delivery.occurred_at,
            "source": delivery.source,
            "target": delivery.target,
            "domain_id": delivery.domain_id,
            "payload": payload,
            "idempotency_key": delivery.idempotency_key,
            "trace_context": trace_context,
        }
    )
    headers = headers if isinstance(headers, dict) else {}
    # Without the call of a named tuple's own constructor, which takes twice as long.
    context = (event_id, delivery.id, delivery.handler.name, delivery.attempts, headers, trace_context)
    return event, _new_tuple(HandlerContext, context)


def data_of(delivery: Delivery) -> EventData:
    """The data of a row that an error may quote, as far as it can be decoded."""
    if delivery.carried is not None:
        event, context = delivery.carried
        return EventData(event.payload, dict(context.headers), delivery.idempotency_key, delivery.event_id)
    headers = _decoded(delivery.headers)
    return EventData(
        _decoded(delivery.payload),
        headers if isinstance(headers, dict) else None,
        delivery.idempotency_key,
        delivery.event_id,
    )


def _decoded(text: str | None) -> object:
    try:
        return None if text is None else from_json(text)
    except (ValueError, TypeError):
        return None
