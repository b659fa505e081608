"""Delivers the rows of an outbox in memory that are due: splits them, runs the handlers, and settles each row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from holdfast.handlers import Handler, HandlerRegistry
from holdfast.ids import uuid7
from holdfast.outcome import Done, Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.testing.memory_batches import Item, batches, halving
from holdfast.testing.memory_clock import MemoryClock
from holdfast.testing.memory_flow import MemoryFlow
from holdfast.testing.memory_rows import Row, Rows
from holdfast.testing.memory_transaction import MemoryTransaction
from holdfast.testing.records import MOST_FOLLOWING, MOST_FOR_EACH, Drained, without_end
from holdfast.testing.running import run_batch, run_once
from holdfast.worker.decoding import decode
from holdfast.worker.settlements import Fail, Falter, Judge, Retry, Settlement, Snooze


class MemoryDelivering:
    """Delivers the rows of one outbox. Handlers that it was told of once are owed their events from then on."""

    def __init__(self, rows: Rows, clock: MemoryClock, *, archives: bool, tx: Callable[[], Any] | None) -> None:
        self._rows = rows
        self._clock = clock
        self._archives = archives
        self._make_tx = tx
        self._subscriptions: dict[str, Handler] = {}
        self.inbox: dict[tuple[str, str], Row] = {}
        self._judge = Judge()
        self._flow = MemoryFlow()

    def subscribe(self, registry: HandlerRegistry) -> None:
        """Remember the handlers of a registry."""
        for handler in registry:
            if handler.via == "outbox":
                self._subscriptions[handler.name] = handler

    def next_due(self, registry: HandlerRegistry) -> tuple[datetime, Row] | None:
        """Return the time at which the next pending row of these handlers may begin, and that row."""
        now = self._clock.now
        waiting = (
            (max(row.available_at, self._flow.ready_at(handler, now)), row)
            for row in self._rows.pending()
            for handler in self._owed(row)
            if handler.name in registry and self._in_order(row, handler)
        )
        return min(waiting, key=lambda each: each[0], default=None)

    def _owed(self, row: Row) -> list[Handler]:
        """Return the handlers that a row is owed to."""
        if row.handler_name is not None:
            found = self._subscriptions.get(row.handler_name)
            return [] if found is None else [found]
        return [
            handler
            for handler in self._subscriptions.values()
            if row.target in (None, handler.domain_context) and handler.wants(row.event_type)
        ]

    async def deliver(self, registry: HandlerRegistry) -> Drained:
        """Deliver until nothing is due."""
        counts = Counter[str]()
        most = max(MOST_FOLLOWING, MOST_FOR_EACH * len(self._rows))
        while True:
            if counts["delivered"] > most:
                raise AssertionError(without_end(row.event_type for row in self._rows.events()))
            self._split()
            due = [
                row
                for row in self._rows.pending()
                if row.available_at <= self._clock.now
                and row.handler_name in registry
                and self._in_order(row, registry[str(row.handler_name)])
                and self._flow.allowance(registry[str(row.handler_name)], self._clock.now)
            ]
            if not due:
                return Drained(**counts)  # type: ignore[arg-type]
            for handler, rows in batches(sorted(due, key=lambda row: row.place), registry):
                begun = self._flow.begin(handler, rows, self._clock.now)
                if len(begun) == 1:
                    counts[await self._attempt(begun[0], handler)] += 1
                elif begun:
                    counts.update(await self._attempt_batch(begun, handler))

    def _in_order(self, row: Row, handler: Handler) -> bool:
        """Return whether nothing of the same ordering key keeps a row back, for this handler."""
        return not any(self._keeps_back(each, handler) for each in self._rows.before(row))

    def _keeps_back(self, row: Row, handler: Handler) -> bool:
        """Return whether the rows behind one wait for it, because it is owed to the handler and not over."""
        if row.handler_name != handler.name and (row.handler_name is not None or handler not in self._owed(row)):
            return False
        if row.status == "failed":
            return handler.on_failed_head == "block" and row.failure_reason not in ("cancelled", "expired")
        return row.status in ("pending", "in_flight")

    def _split(self) -> None:
        """Give the events that are due to the handlers that want them: a row for each, if there are several."""
        for row in [each for each in self._rows.pending() if each.handler_name is None]:
            owed = self._owed(row) if row.available_at <= self._clock.now else []
            if len(owed) == 1:
                row.handler_name = owed[0].name
            elif owed:
                row.split, row.status, row.handler_name = True, "delivered", "*"
                for handler in owed:
                    sibling = replace(
                        row, id=uuid4(), origin=row, handler_name=handler.name, status="pending", split=False
                    )
                    self._rows.add(sibling)

    async def _attempt(self, row: Row, handler: Handler) -> str:
        """Run a handler once, and settle; return the name of the count that goes up."""
        begun = self._begin(row, handler)
        if not isinstance(begun, Item):
            return begun
        tx = self._transaction(handler)
        try:
            outcome = await run_once(
                handler,
                begun.event,
                tx=tx if handler.transactional else None,
                attempt=row.attempts,
                headers=begun.context.headers,
            )
        except Exception as error:
            return self._settle(row, self._judge.settlement(begun.delivery, error))
        if isinstance(outcome, Done) and isinstance(tx, MemoryTransaction):
            tx.commit()
        return self._settle_result(begun, outcome)

    async def _attempt_batch(self, rows: list[Row], handler: Handler) -> Counter[str]:
        """Run a batch handler with several events, and settle each; return the names of the counts that go up."""
        begun = [self._begin(row, handler) for row in rows]
        counts = Counter(each for each in begun if isinstance(each, str))

        async def call(items: list[Item]) -> list[Outcome | Exception]:
            tx = self._transaction(handler)
            events, contexts = [each.event for each in items], [each.context for each in items]
            results = await run_batch(handler, events, contexts, tx=tx if handler.transactional else None)
            if isinstance(tx, MemoryTransaction) and any(isinstance(each, Done) for each in results):
                tx.commit()
            return results

        items = [each for each in begun if isinstance(each, Item)]
        for item, result in await halving(items, call) if items else ():
            counts[self._settle_result(item, result)] += 1
        return counts

    def _begin(self, row: Row, handler: Handler) -> Item | str:
        """Return the arguments of the handler for a row; if it is not called, the name of the count that goes up."""
        if (handler.name, row.idempotency_key) in self.inbox:
            row.status = "delivered"
            return "duplicates"
        row.attempts += 1
        delivery = self._delivery(row, handler)
        if delivery.expired:
            return self._settle(row, self._judge.fail(delivery, "expired", "expired before it could be delivered"))
        row.status = "in_flight"
        try:
            return Item(row, delivery, *decode(delivery))
        except Exception as error:
            return self._settle(row, self._judge.settlement(delivery, error))

    def _transaction(self, handler: Handler) -> Any:
        tx = MemoryTransaction(self._rows.commit) if self._make_tx is None else self._make_tx()
        if isinstance(tx, MemoryTransaction):
            tx.asynchronous = handler.asynchronous
        return tx

    def _settle_result(self, item: Item, result: Outcome | Exception) -> str:
        if not isinstance(result, Done):
            return self._settle(item.row, self._judge.settlement(item.delivery, result))
        item.row.status = "delivered"
        self.inbox[item.delivery.key] = item.row
        self._flow.succeeded(item.delivery.handler, item.row)
        return "delivered"

    def _settle(self, row: Row, settlement: Settlement) -> str:
        row.status = "pending"
        match settlement:
            case Falter():
                return self._settle(row, self._flow.settlement(row, settlement, self._clock.now))
            case Retry():
                row.first_failed_at = row.first_failed_at or self._clock.now
                row.available_at, row.last_error = (
                    self._clock.now + timedelta(seconds=settlement.delay),
                    settlement.report.stored,
                )
                return "retried"
            case Snooze():
                row.attempts -= 1
                row.available_at = self._clock.now + timedelta(seconds=settlement.delay)
                return "snoozed"
            case Fail():
                row.status, row.failure_reason = "failed", settlement.reason
                row.last_error = None if settlement.report is None else settlement.report.stored
                row.archived = self._archives and settlement.reason != "expired"
                return "failed"
        raise AssertionError(settlement)

    def _delivery(self, row: Row, handler: Handler) -> Delivery:
        """Return the row as a worker claims it."""
        failing = None if row.first_failed_at is None else (self._clock.now - row.first_failed_at).total_seconds()
        expired = row.expires_at is not None and row.expires_at <= self._clock.now
        record = (
            row.id, handler.name, row.priority, row.available_at, row.origin and row.origin.id,
            row.event_type, row.event_version, row.occurred_at, row.source, row.target, row.domain_id,
            row.payload, row.idempotency_key, row.trace_context, row.headers,
            row.attempts, failing, expired, False, False,
        )  # fmt: skip
        return Delivery(record, uuid7(), {handler.name: handler}, time.monotonic())
