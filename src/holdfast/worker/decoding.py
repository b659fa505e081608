"""From a claimed row to what a handler and an observer see."""

import contextlib
from uuid import UUID

from pydantic_core import from_json

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError
from holdfast.postgres.deliveries import Delivery


def decode(delivery: Delivery) -> tuple[EventEnvelope, HandlerContext]:
    """Row by row, after the claim: a row that cannot be decoded fails alone."""
    record = delivery.record
    try:
        payload = from_json(record["payload"])
        headers = from_json(record["headers"]) if record["headers"] else {}
    except (ValueError, TypeError) as error:
        raise TerminalHandlerError(f"the row cannot be decoded: {type(error).__name__}") from None
    event = EventEnvelope(
        event_id=delivery.event_id,
        event_type=record["event_type"],
        event_version=record["event_version"],
        occurred_at=record["occurred_at"],
        source=record["source"],
        target=record["target"],
        domain_id=record["domain_id"],
        payload=payload,
        idempotency_key=record["idempotency_key"],
        trace_context=record["trace_context"],
    )
    context = HandlerContext(
        event_id=event.event_id,
        delivery_id=delivery.id,
        handler_name=delivery.handler.name,
        attempt=record["attempts"],
        headers=headers if isinstance(headers, dict) else {},
        trace_context=record["trace_context"],
    )
    return event, context


def facts(delivery: Delivery) -> tuple[UUID, UUID, str, str, str | None, str, int, str]:
    """What every `DeliveryFact` names, also of a row that cannot be decoded."""
    record = delivery.record
    correlation = str(delivery.event_id)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        correlation = str(from_json(record["headers"]).get("correlation_id") or correlation)
    return (
        delivery.event_id,
        delivery.id,
        record["event_type"],
        record["source"],
        record["target"],
        delivery.handler.name,
        delivery.attempts,
        correlation,
    )
