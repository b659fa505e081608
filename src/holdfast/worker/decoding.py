"""Makes the event and the handler context, and the fields of facts, from a claimed row."""

import contextlib
from uuid import UUID

from pydantic_core import from_json

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError
from holdfast.postgres.delivery import Delivery


def decode(delivery: Delivery) -> tuple[EventEnvelope, HandlerContext]:
    """Return the event of a delivery and the handler's context. A row that cannot be decoded fails alone."""
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
    return event, HandlerContext(
        event_id, delivery.id, delivery.handler.name, delivery.attempts, headers, trace_context
    )


def payload_of(delivery: Delivery) -> object:
    """The payload of a row; None if it cannot be decoded."""
    try:
        return from_json(delivery.payload)
    except (ValueError, TypeError):
        return None


def facts(delivery: Delivery) -> tuple[UUID, UUID, str, str, str | None, str, int, str]:
    """The fields of every `DeliveryFact`, also for a row that cannot be decoded."""
    correlation = str(delivery.event_id)
    if delivery.headers:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            correlation = str(from_json(delivery.headers).get("correlation_id") or correlation)
    return (
        delivery.event_id,
        delivery.id,
        delivery.event_type,
        delivery.source,
        delivery.target,
        delivery.handler.name,
        delivery.attempts,
        correlation,
    )
