"""The relay: a handler of Holdfast's own, which is owed each event of the handlers behind a broker once.

It sends a batch, and the broker answers for each row. A confirmed row is delivered. A row that the broker will never
take fails alone, with an error signature that begins with `relay:`. A row without an answer is due again, without an
attempt being counted. If half of a batch has no answer, or the broker cannot be reached, the relay's breaker opens: no
more rows are claimed, except one that probes now and then.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from pydantic_core import from_json

from holdfast.batch import Batch, EventResult, alone
from holdfast.brokers.attributes import CloudEventError
from holdfast.brokers.cloudevents import Binding, CarriedEvent, divided, structured
from holdfast.brokers.engine import Answer, BrokerUnavailable, Confirmed, Engine, Outgoing, Refused, Unanswered
from holdfast.brokers.signing import Signatures
from holdfast.envelope import EventEnvelope
from holdfast.errors import RelayFault, TransientHandlerError
from holdfast.flow import Pause
from holdfast.handlers import Handler
from holdfast.outcome import Snooze
from holdfast.postgres.brokers import BrokerStatements, RelayDetails
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.retry import RetryPolicy
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.relay_secrets import RelaySecrets
from holdfast.worker.shared_connection import SharedConnection

_BATCH: Final = 500
# Batches on their way at the same time: while one waits for its answers, the next is written.
_AT_ONCE: Final = 4
# Longer than brokers take to elect a leader, and shorter than a lease.
_PATIENCE: Final = 10.0
# Seconds after which a row without an answer is sent again, if others of its batch were answered.
_AGAIN: Final = 1.0
_FEW: Final = 20
# What fails soon after a breaker has closed is counted, in case it fails by its own fault. Of the relay's rows the
# broker says so (Refused), and one that comes and goes for hours must not make dead letters of all the others.
_RETRY: Final = RetryPolicy(max_attempts=1000, max_delay=30.0)
_BREAKER: Final = Pause(after=1, first_probe=1.0, longest_wait=30.0)


def relay_name(broker: str) -> str:
    """Return the handler name of the relay to a broker, like `relay.nats`."""
    return f"relay.{broker}"


class Relay:
    """Sends claimed rows to one broker."""

    def __init__(
        self,
        engine: Engine,
        statements: BrokerStatements,
        database: SharedConnection,
        secrets: RelaySecrets,
        observe: Observer,
        *,
        lease: float,
    ) -> None:
        self._observe = observe
        self._secrets = secrets
        self._hourly = HourlyLimit()
        self._broker = engine.name
        self._binding = engine.binding
        self._statements = statements
        self._database = database
        self._sink = engine.sink(lease=lease)
        self._patience = min(_PATIENCE, lease / 2)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._name = relay_name(engine.name)
        self._confirmed_at = float("-inf")

    @property
    def handler(self) -> Handler:
        """The relay as a handler among those of the worker."""
        return Handler(
            name=self._name,
            domain_context="relay",
            event_types=("*",),
            function=alone(self._name, self.send, asynchronous=True),
            timeout=6 * self._patience,
            retry=_RETRY,
            breaker=_BREAKER,
            batch=Batch(self.send, _BATCH, 0.0),
            raw=True,
        )

    async def open(self) -> None:
        """Connect to the broker, or raise BrokerUnavailable."""
        await self._sink.open()

    async def close(self) -> None:
        await self._sink.close()

    async def send(self, deliveries: Sequence[Delivery]) -> list[EventResult]:
        """Send deliveries, and return the outcome of each."""
        async with self._turns:
            try:
                await self._secrets.require()
                details = await self._details(deliveries)
            except (*PASSING_FAULTS, *CONNECTION_FAULTS):
                self._database.drop()
                return [Snooze(_AGAIN) for _ in deliveries]
            results: dict[Delivery, EventResult] = {}
            batch: dict[Delivery, Outgoing] = {}
            for each in deliveries:
                found = details.get(each.id)
                if found is None:  # the row was removed meanwhile, so its lease is lost
                    results[each] = Snooze(_AGAIN)
                    continue
                try:
                    batch[each] = outgoing(each, found, self._secrets.signatures, self._binding)
                except CloudEventError as error:
                    results[each] = RelayFault(str(error))
            if batch:
                try:
                    answers = await self._sink.send(list(batch.values()), timeout=self._patience)
                    self._report(answers)
                    results.update(zip(batch, self._results(answers), strict=True))
                except BrokerUnavailable as error:
                    problem = f"{error}; {error.remedy}" if error.remedy else str(error)
                    results.update(dict.fromkeys(batch, TransientHandlerError(problem)))
        return [results[each] for each in deliveries]

    def _results(self, answers: Sequence[Answer]) -> list[EventResult]:
        now = time.monotonic()
        unanswered = sum(not isinstance(each, Confirmed | Refused) for each in answers)
        # A few rows without an answer are no outage if the broker has confirmed others lately.
        few = unanswered < _FEW and now - self._confirmed_at < _PATIENCE
        outage = 2 * unanswered >= len(answers) and not few
        if any(isinstance(each, Confirmed) for each in answers):
            self._confirmed_at = now

        def result(answer: Answer) -> EventResult:
            if isinstance(answer, Confirmed):
                return None
            if isinstance(answer, Refused):
                return RelayFault(answer.error)
            return TransientHandlerError(answer.error) if outage else Snooze(_AGAIN)

        return [result(each) for each in answers]

    def _report(self, answers: Sequence[Answer]) -> None:
        """Report the errors with which the broker itself says that it takes no events now."""
        for error in {each.error for each in answers if isinstance(each, Unanswered) and each.told}:
            if self._hourly.due("broker_unavailable", error):
                details: dict[str, object] = {
                    "handler_name": self._name,
                    "broker": self._broker,
                    "error": error[:500],
                    "action": "sending again; holdfast doctor names what is wrong with the broker's settings",
                }
                self._observe(Notice("warning", "broker_unavailable", details))

    async def _details(self, deliveries: Sequence[Delivery]) -> dict[UUID, RelayDetails]:
        async with self._database.lent() as connection:
            return await self._statements.details(connection, [each.id for each in deliveries])


def outgoing(
    delivery: Delivery, details: RelayDetails, signatures: Signatures, binding: Binding | None = None
) -> Outgoing:
    """Return a row as a signed message; raise CloudEventError if it cannot be written as one."""
    event = EventEnvelope.trusted(
        {
            "event_id": delivery.event_id,
            "event_type": delivery.event_type,
            "event_version": delivery.event_version,
            "occurred_at": delivery.occurred_at,
            "source": delivery.source,
            "target": delivery.target,
            "domain_id": delivery.domain_id,
            "payload": {},  # as text, below
            "idempotency_key": delivery.idempotency_key,
            "trace_context": delivery.trace_context,
        }
    )
    try:
        headers = from_json(delivery.headers) if delivery.headers else {}
    except ValueError:
        # A producer in another language may have written JSON that Postgres stores and Python cannot read.
        raise CloudEventError("its headers are no JSON that can be read", "publish text for each header") from None
    carried = CarriedEvent(
        event,
        headers if isinstance(headers, dict) else {},
        details.ordering_key,
        details.fairness_key,
        details.priority,
        details.content_class,
        details.expires_at,
        details.cycle,
    )
    body, mark = signatures.signed(structured(carried, delivery.payload), details.channel)
    attributes: dict[str, str] = {}
    if binding is not None:
        attributes, body = divided(body, carried, binding, delivery.payload)
    return Outgoing(
        event_id=event.event_id,
        # The mark keeps others from guessing the id: a message that they sent first under it would make the broker
        # drop the event as a duplicate.
        message_id=f"{event.event_id}:{details.cycle}:{mark}",
        channel=details.channel,
        event_type=event.event_type,
        target=event.target,
        key=details.ordering_key,
        body=body,
        headers=attributes,
    )
