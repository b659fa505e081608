"""Reads the messages that a broker delivers: as an event, as a dead letter, or as one that the handler is not owed."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from holdfast.brokers.attributes import CloudEventError
from holdfast.brokers.cloudevents import HEAD, CarriedEvent, read, read_signed, undivided
from holdfast.brokers.engine import Interest, Received
from holdfast.brokers.interests import Wanted
from holdfast.brokers.signing import Signatures, Verdict
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.observing import ObserverGroup
from holdfast.postgres.messages import Message, details_of
from holdfast.telemetry import Notice
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.unreadable import UNREADABLE, kept, stub

_MISLABELLED = "its type or target is not the one it was sent under"


class MessageReader:
    """Reads the messages of one handler on one channel of a broker."""

    def __init__(
        self,
        broker: str,
        handler: Handler,
        interest: Interest,
        signatures: Signatures,
        observe: ObserverGroup,
    ) -> None:
        self.broker = broker
        self.handler = handler
        self._interest = interest
        self._signatures = signatures
        self._wanted = Wanted(interest)
        self._observe = observe
        self._hourly = HourlyLimit()

    def verdicts(self, received: Sequence[Received]) -> list[Verdict]:
        """Return what the signatures of messages say, with the secrets that are known now."""
        return [self._signatures.verdict(each.body, self._interest.channel) for each in received]

    def read(
        self, received: Received, verdict: Verdict, now: datetime, on_end: Callable[[Message], None]
    ) -> tuple[Message | None, str | None]:
        """Return a message to handle; or one to fail, and why; or neither for an event that is not for this handler.

        `on_end` is called when the message is in flight no longer.
        """
        try:
            carried = self._carried(received, verdict, now)
        except CloudEventError as error:
            return self.unreadable(received, now, on_end), str(error)
        event = carried.envelope
        if not self._wanted(event.event_type, event.target) or event.event_type == UNREADABLE:
            if not received.routed:
                return None, None
            return self.unreadable(received, now, on_end), _MISLABELLED
        if not (carried.foreign or verdict is Verdict.OURS):
            self._report_refused(verdict)
            return self.unreadable(received, now, on_end), verdict.value
        details = details_of(
            carried.ordering_key, carried.fairness_key, carried.priority, carried.content_class, carried.expires_at
        )
        expired = carried.expires_at is not None and carried.expires_at <= now
        return self._message(received, event, on_end, headers=carried.headers, details=details, expired=expired), None

    def unreadable(
        self, received: Received, now: datetime, on_end: Callable[[Message], None], *, in_short: bool = False
    ) -> Message:
        """Return a message that keeps the bytes of one that is no event, or only a few of them `in_short`.

        Its id is made from these bytes, so that a second delivery is a duplicate.
        """
        payload: dict[str, Any] = stub(received) if in_short else kept(received)
        event_id = uuid5(NAMESPACE_OID, self.broker + json.dumps(payload, sort_keys=True))
        event = EventEnvelope.trusted(
            {
                "event_id": event_id,
                "event_type": UNREADABLE,
                "event_version": 1,
                "occurred_at": now,
                "source": self.broker,
                "target": None,
                "domain_id": None,
                "payload": payload,
                "idempotency_key": str(event_id),
                "trace_context": None,
            }
        )
        return self._message(received, event, on_end)

    def _carried(self, received: Received, verdict: Verdict, now: datetime) -> CarriedEvent:
        if verdict is Verdict.OURS:  # only its body is signed, so no header decides how it is read
            return read_signed(received.body)
        return read(received.body, received.headers, now=now, apart=self._signatures.apart)

    def _message(
        self,
        received: Received,
        event: EventEnvelope,
        on_end: Callable[[Message], None],
        *,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
        expired: bool = False,
    ) -> Message:
        return Message(
            event,
            headers or {},
            self.handler,
            self._interest.channel,
            details or {},
            size=len(received.body),
            expired=expired,
            received=received,
            on_end=on_end,
        )

    def _report_refused(self, verdict: Verdict) -> None:
        if self._hourly.due("message_refused", verdict.name):
            details: dict[str, object] = {
                "handler_name": self.handler.name,
                "broker": self.broker,
                "error": verdict.value,
                "action": "kept as a dead letter, and not handled",
                "remedy": "see who may write to the broker, and whether relays and workers have the same secrets",
            }
            self._observe(Notice("error", "message_refused", details))


def whole(received: Received) -> Received:
    """Return a relay's message of the binary mode in the form that was signed; any other message as it is."""
    if HEAD not in received.headers:
        return received
    body, headers = undivided(received.body, received.headers)
    return received._replace(body=body, headers=headers)
