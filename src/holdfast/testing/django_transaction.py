"""The outbox inside the transaction of a Django `TestCase`: uncommitted events, read on Django's own connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import Handler, HandlerRegistry, require_registry
from holdfast.installing import require_extra

require_extra("django", "django", "psycopg")

from django.db import connections, transaction

from holdfast.outcome import Done, Reject, Snooze
from holdfast.postgres.queries import for_psycopg
from holdfast.testing.assertions import OutboxAssertions
from holdfast.testing.databases import statement_text
from holdfast.testing.loop import CallingThread, kit_loop
from holdfast.testing.outbox import published_event
from holdfast.testing.records import (
    DeliveryRecord,
    Drained,
    PublishedEvent,
    Status,
    without_end,
)
from holdfast.testing.running import run_once

__all__ = ["TransactionOutbox"]

_MOST = 1_000  # deliveries in one drain


class TransactionOutbox(OutboxAssertions):
    """The events that were published in the open transaction. `drain` calls handlers in it, each in a savepoint.

    There is no worker: a handler that raises raises out of `drain`, and one that asks for a retry is called again by
    the next `drain`. Retries, dead letters and time are for `HoldfastTestCase`.
    """

    def __init__(self, registry: HandlerRegistry | None, using: str, schema: str) -> None:
        self._registry = registry
        self._registries = () if registry is None else (registry,)
        self._using = using
        self._schema = schema
        self._deliveries: dict[tuple[UUID, str], DeliveryRecord] = {}

    def published(self) -> list[PublishedEvent]:
        """Every event that was published in the transaction, in that order."""
        with connections[self._using].cursor() as cursor:
            cursor.execute(for_psycopg(statement_text("published", self._schema)), {})
            names = [column.name for column in cursor.description]
            return [published_event(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]

    def deliveries(self) -> list[DeliveryRecord]:
        """What became of each event at each handler that `drain` has called, and the events that none has got."""
        found = list(self._deliveries.values())
        known = {event_id for event_id, _ in self._deliveries}
        return found + [
            DeliveryRecord(each.envelope, None, "pending", 0) for each in self.published() if each.event_id not in known
        ]

    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Which handlers have handled which events."""
        return [
            (str(each.handler_name), each.event) for each in self._deliveries.values() if each.status == "delivered"
        ]

    def drain(self, registry: HandlerRegistry | None = None) -> Drained:
        """Call handlers with the published events, and with those that they publish, until none is left."""
        chosen = registry or self._registry
        if chosen is None:
            raise ConfigurationError("registry", "is not known", "pass it to drain, or set it in the test case")
        self._registries = (require_registry(chosen),)
        done, tried = Drained(), set[tuple[UUID, str]]()
        while waiting := [each for each in self._waiting(chosen) if (each[0].event_id, each[1].name) not in tried]:
            for published, handler in waiting:
                tried.add((published.event_id, handler.name))
                done += self._deliver(published, handler)
            if len(tried) > _MOST:
                raise AssertionError(without_end(each.event_type for each in self.published()))
        return done

    def _waiting(self, registry: HandlerRegistry) -> list[tuple[PublishedEvent, Handler]]:
        return [
            (published, handler)
            for published in self.published()
            for handler in registry
            if handler.via == "outbox"
            and handler.wants(published.event_type)
            and published.envelope.target in (None, handler.domain_context)
            and ((published.event_id, handler.name) not in self._deliveries or self._open(published, handler))
        ]

    def _open(self, published: PublishedEvent, handler: Handler) -> bool:
        return self._deliveries[published.event_id, handler.name].open

    def _deliver(self, published: PublishedEvent, handler: Handler) -> Drained:
        if handler.transactional and handler.asynchronous:
            remedy = "use HoldfastTestCase for it: it is not a handler of Django's transaction"
            raise ConfigurationError(handler.name, "takes a tx that is not Django's connection", remedy)
        before = self._deliveries.get((published.event_id, handler.name))
        attempts = 1 if before is None else before.attempts + 1
        options: Mapping[str, Any] = {"headers": dict(published.headers), "attempt": attempts}
        tx = connections[self._using] if handler.transactional else None
        with transaction.atomic(using=self._using):
            # In this thread, even without `tx`: in another thread Django would use another connection.
            caller = CallingThread()
            run = run_once(handler, published.envelope, tx=tx, call=caller.call, **options)
            outcome = kit_loop().run(run, caller)
            taken_back = outcome is not None and not isinstance(outcome, Done)
            if taken_back:
                transaction.set_rollback(True, using=self._using)
            else:
                connections[self._using].validate_no_broken_transaction()
        status: Status = "pending" if taken_back else "delivered"
        reason = None
        if isinstance(outcome, Reject):
            status, reason = "failed", "rejected"
        record = DeliveryRecord(published.envelope, handler.name, status, attempts, reason)
        self._deliveries[published.event_id, handler.name] = record
        if status == "delivered":
            return Drained(delivered=1)
        if status == "failed":
            return Drained(failed=1)
        return Drained(snoozed=1) if isinstance(outcome, Snooze) else Drained(retried=1)
