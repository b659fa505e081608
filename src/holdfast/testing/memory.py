"""An outbox in memory, for tests without a server: same publisher, same handlers, same verdicts on what fails.

    memory = MemoryOutbox(registry)
    service = Orders(publisher=memory.publisher("shop"))

    with memory.transaction() as tx:
        service.place_order(tx, "o-1")
    memory.drain()
    memory.assert_handled("mail.confirm_order")

It has one process, no SQL and no leases. What it promises beyond that is in `OutboxContract`, which runs against it and
against Postgres.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, Unpack, cast
from uuid import UUID, uuid4

from pydantic_core import from_json

from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import Handler, HandlerRegistry, pattern_of, require_registry
from holdfast.ids import uuid7
from holdfast.new_event import EventOptions, NewEvent
from holdfast.outcome import Done, Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.publisher import Publisher
from holdfast.schedules import due as due_slots
from holdfast.testing.assertions import OutboxAssertions
from holdfast.testing.loop import in_event_loop, kit_loop
from holdfast.testing.memory_batches import Item, batches, halving
from holdfast.testing.memory_flow import MemoryFlow
from holdfast.testing.memory_publisher import MemoryPublisher
from holdfast.testing.memory_rows import Row
from holdfast.testing.memory_transaction import MemoryTransaction
from holdfast.testing.records import (
    MOST_FOLLOWING,
    MOST_FOR_EACH,
    DeliveryRecord,
    Drained,
    PublishedEvent,
    without_end,
)
from holdfast.testing.running import run_batch, run_once
from holdfast.typed_events import TypedEvent
from holdfast.worker.decoding import decode
from holdfast.worker.settlements import Fail, Falter, Judge, Retry, Settlement, Snooze

T = TypeVar("T")

_MOST_RETURNS = 100


class MemoryOutbox(OutboxAssertions):
    """Events of one test, and what became of them. It is made empty, and is not shared between threads."""

    def __init__(
        self,
        registry: HandlerRegistry | None = None,
        *,
        dead_letters: str = "in_place",
        tx: Callable[[], Any] | None = None,
    ) -> None:
        self._registry = registry
        self._registries = () if registry is None else (registry,)
        self._archives = dead_letters == "archive"
        self._make_tx = tx
        self._rows: list[Row] = []
        self._ordered: dict[str, list[Row]] = {}  # by ordering key
        self._ids: set[UUID] = set()
        self._open: list[Row] = []  # what may be pending: a drain is not to look at all that was delivered
        self._inbox: dict[tuple[str, str], Row] = {}
        self._subscriptions: dict[str, Handler] = {}
        self._slots: dict[str, datetime] = {}
        self._shift = timedelta(0)
        self._frozen: datetime | None = None
        self._judge = Judge()
        self._flow = MemoryFlow()

    # --- publishing -----------------------------------------------------------------------------------

    def publisher(self, source: str) -> Publisher:
        """Return a publisher that writes to this outbox, within its transactions."""
        return MemoryPublisher(self, source)

    def transaction(self) -> MemoryTransaction:
        """Return a transaction: `with` or `async with`. Its events exist if it ends without an error."""
        return MemoryTransaction(self._commit)

    def publish(
        self,
        event: str | NewEvent | TypedEvent,
        payload: Any = None,
        *,
        source: str = "test",
        committed: bool = True,
        **options: Unpack[EventOptions],
    ) -> EventEnvelope:
        """Publish an event in a transaction of its own, as another service would; if not `committed`, roll it back."""
        publisher: Any = self.publisher(source)
        with self.transaction() as tx:
            if not committed:
                tx.rollback_at_end = True
            if isinstance(event, NewEvent):
                envelope = publisher.publish_event(tx, event)
            elif isinstance(event, str):
                envelope = publisher.publish(tx, event, {} if payload is None else payload, **options)
            else:
                envelope = publisher.publish(tx, event, **options)
        return cast(EventEnvelope, envelope)

    def cancel(self, key: str, *, source: str = "test") -> bool:
        """Cancel the pending event that was published with `key`; false when there is none."""
        with self.transaction() as tx:
            return cast(Any, self.publisher(source)).cancel(tx, key)  # type: ignore[no-any-return]

    def reschedule(self, key: str, *, delay: float, source: str = "test") -> bool:
        """Move the pending event that was published with `key`; false when there is none."""
        with self.transaction() as tx:
            return cast(Any, self.publisher(source)).reschedule(tx, key, delay=delay)  # type: ignore[no-any-return]

    def _commit(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        if row.ordering_key is not None:
            row.seq = len(self._rows) if row.origin is None else row.seq
            self._ordered.setdefault(row.ordering_key, []).append(row)
        self._rows.append(row)
        self._ids.add(row.id)
        self._open.append(row)

    def _pending(self) -> list[Row]:
        """Return what is not settled, and forget what is: nothing opens a settled row again."""
        self._open = [row for row in self._open if row.status in ("pending", "in_flight")]
        return [row for row in self._open if row.status == "pending"]

    def find_key(self, source: str, key: str) -> Row | None:
        """Return the pending event that holds a producer's key."""
        found = (row for row in self._rows if row.origin is None and (row.source, row.dedupe_key) == (source, key))
        return next((row for row in found if row.status == "pending"), None)

    def taken(self, identity: UUID) -> bool:
        """Return whether an event with this id was published before."""
        return identity in self._ids

    # --- the clock ------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the outbox's clock."""
        return self._frozen or datetime.now(UTC) + self._shift

    def freeze(self, at: datetime | str | None = None) -> datetime:
        """Stop the clock, at a moment or where it is. `advance` and `drain` still move it."""
        self._frozen = datetime.fromisoformat(at) if isinstance(at, str) else at or self.now
        return self._frozen

    def move_clock(self, **by: float) -> datetime:
        """Move the clock and deliver nothing, as if no worker had run. Takes what timedelta takes."""
        return self._move_to(self.now + timedelta(**by))

    def _move_to(self, to: datetime) -> datetime:
        if self._frozen is not None:
            self._frozen = max(self._frozen, to)
        else:
            self._shift = max(self._shift, to - datetime.now(UTC))
        return self.now

    # --- reading --------------------------------------------------------------------------------------

    def published(self) -> list[PublishedEvent]:
        """Every event that was published and committed, in that order."""
        return [
            PublishedEvent(row.envelope(), from_json(row.headers or "{}"), row.available_at)
            for row in self._rows
            if row.origin is None
        ]

    def deliveries(self) -> list[DeliveryRecord]:
        """What became of each event at each of its handlers."""
        return [
            DeliveryRecord(
                row.envelope(), row.handler_name, row.status, row.attempts, row.failure_reason, row.last_error,
                row.available_at, row.archived,
            )
            for row in self._rows
            if not row.split
        ]  # fmt: skip

    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Which handlers have handled which events."""
        return [(handler, row.envelope()) for (handler, _), row in self._inbox.items()]

    # --- delivering -----------------------------------------------------------------------------------

    def drain(self, registry: HandlerRegistry | None = None, *, due_only: bool = False) -> Any:
        """Deliver everything: what is due, and what waits for a retry or a delay, with the clock moved on to it.

        With `due_only`, only what is due now. In code that runs in an event loop, write `await memory.drain()`.
        """
        return _run(self._drain(self._handlers(registry), due_only))

    def advance(self, *, registry: HandlerRegistry | None = None, **by: float) -> Any:
        """Let time pass, as `advance(hours=3)`: deliver what becomes due when it is due, and fire schedules."""
        return _run(self._advance(self._handlers(registry), timedelta(**by)))

    def _handlers(self, registry: HandlerRegistry | None) -> HandlerRegistry:
        registry = self._registry if registry is None else registry
        if registry is None:
            remedy = "pass drain(registry), or MemoryOutbox(registry)"
            raise ConfigurationError("registry", "is not known", remedy)
        for handler in require_registry(registry):
            if handler.via == "outbox":
                self._subscriptions[handler.name] = handler
        for schedule in registry.schedules:
            self._slots.setdefault(schedule.name, self.now)
        self._registries = (*self._registries, registry)
        return registry

    async def _drain(self, registry: HandlerRegistry, due_only: bool) -> Drained:
        done, returns = await self._deliver(registry), Counter[UUID]()
        while not due_only and (due := self._next_due(registry)) is not None:
            at, row = due
            returns[row.id] += 1
            if returns[row.id] > _MOST_RETURNS:
                raise AssertionError(
                    "A delivery was put off a hundred times, and still is; use drain(due_only=True), or "
                    f"advance(...).\n{self.describe()}"
                )
            before = self.now
            done += Drained(moved=self._move_to(at) - before)
            done += await self._deliver(registry)
        return done

    async def _advance(self, registry: HandlerRegistry, by: timedelta) -> Drained:
        if by < timedelta(0):
            raise ConfigurationError("advance", f"is {by}", "give a positive time: the clock goes forward only")
        until = self.now + by
        done = await self._deliver(registry)
        while True:
            due = self._next_due(registry)
            moments = [next(each.timing.after(self._slots[each.name])) for each in registry.schedules]
            moments += [] if due is None else [due[0]]
            at = min(moments, default=until)
            self._move_to(min(at, until))
            done += await self._deliver(registry)
            if at >= until:
                return replace(done, moved=by)

    def _next_due(self, registry: HandlerRegistry) -> tuple[datetime, Row] | None:
        """Return when a pending row of these handlers may begin, and which it is. What could begin is delivered."""
        now = self.now
        waiting = (
            (max(row.available_at, self._flow.ready_at(handler, now)), row)
            for row in self._pending()
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
            if row.target in (None, handler.domain_context)
            and any(pattern_of(each).fullmatch(row.event_type) for each in handler.event_types)
        ]

    async def _deliver(self, registry: HandlerRegistry) -> Drained:
        """Fire the slots that are due, and deliver until nothing is due."""
        counts = Counter[str](fired=self._fire(registry))
        most = max(MOST_FOLLOWING, MOST_FOR_EACH * len(self._rows))
        while True:
            if counts["delivered"] > most:
                raise AssertionError(without_end(row.event_type for row in self._rows if row.origin is None))
            self._split()
            due = [
                row
                for row in self._pending()
                if row.available_at <= self.now
                and row.handler_name in registry
                and self._in_order(row, registry[str(row.handler_name)])
                and self._flow.allowance(registry[str(row.handler_name)], self.now)
            ]
            if not due:
                return Drained(**counts)  # type: ignore[arg-type]
            for handler, rows in batches(sorted(due, key=lambda row: row.place), registry):
                begun = self._flow.begin(handler, rows, self.now)
                if len(begun) == 1:
                    counts[await self._attempt(begun[0], handler)] += 1
                elif begun:
                    counts.update(await self._attempt_batch(begun, handler))

    def _in_order(self, row: Row, handler: Handler) -> bool:
        """Return whether no event of the same ordering key stands before a row, for this handler."""
        if row.ordering_key is None:
            return True
        return not any(
            not each.split
            and each.seq < row.seq
            and (each.handler_name == handler.name or (each.handler_name is None and handler in self._owed(each)))
            and (
                each.status in ("pending", "in_flight")
                or (
                    each.status == "failed"
                    and handler.on_failed_head == "block"
                    and each.failure_reason not in ("cancelled", "expired")
                )
            )
            for each in self._ordered[row.ordering_key]
        )

    def _fire(self, registry: HandlerRegistry) -> int:
        fired = 0
        for schedule in registry.schedules:
            due = due_slots(schedule.timing, schedule.missed, self._slots[schedule.name], self.now)
            for slot in due.fire:
                event = NewEvent(
                    schedule.event_type,
                    dict(schedule.payload),
                    occurred_at=slot,
                    target=schedule.target,
                    priority=schedule.priority,
                    headers={"schedule": schedule.name},
                    idempotency_key=f"schedule:{schedule.name}:{slot.isoformat()}",
                )
                self.publish(event, source=schedule.source)
                fired += 1
            self._slots[schedule.name] = due.until
        return fired

    def _split(self) -> None:
        """Give the events that are due to the handlers that want them: a row for each, if there are several."""
        for row in [each for each in self._pending() if each.handler_name is None]:
            owed = self._owed(row) if row.available_at <= self.now else []
            if len(owed) == 1:
                row.handler_name = owed[0].name
            elif owed:
                row.split, row.status, row.handler_name = True, "delivered", "*"
                for handler in owed:
                    sibling = replace(
                        row, id=uuid4(), origin=row, handler_name=handler.name, status="pending", split=False
                    )
                    self._add(sibling)

    async def _attempt(self, row: Row, handler: Handler) -> str:
        """Run a handler once, and settle. Returns which count goes up."""
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
        """Run a batch handler with several events, and settle each. Returns which counts go up."""
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
        """Return what the handler gets of a row; of one that it does not get, which count goes up."""
        if (handler.name, row.idempotency_key) in self._inbox:
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
        tx = self.transaction() if self._make_tx is None else self._make_tx()
        if isinstance(tx, MemoryTransaction):
            tx.asynchronous = handler.asynchronous
        return tx

    def _settle_result(self, item: Item, result: Outcome | Exception) -> str:
        if not isinstance(result, Done):
            return self._settle(item.row, self._judge.settlement(item.delivery, result))
        item.row.status = "delivered"
        self._inbox[item.delivery.key] = item.row
        self._flow.succeeded(item.delivery.handler, item.row)
        return "delivered"

    def _settle(self, row: Row, settlement: Settlement) -> str:
        row.status = "pending"
        match settlement:
            case Falter():
                return self._settle(row, self._flow.settlement(row, settlement, self.now))
            case Retry():
                row.first_failed_at = row.first_failed_at or self.now
                row.available_at, row.last_error = (
                    self.now + timedelta(seconds=settlement.delay),
                    settlement.report.stored,
                )
                return "retried"
            case Snooze():
                row.attempts -= 1
                row.available_at = self.now + timedelta(seconds=settlement.delay)
                return "snoozed"
            case Fail():
                row.status, row.failure_reason = "failed", settlement.reason
                row.last_error = None if settlement.report is None else settlement.report.stored
                row.archived = self._archives and settlement.reason != "expired"
                return "failed"
        raise AssertionError(settlement)

    def _delivery(self, row: Row, handler: Handler) -> Delivery:
        """Return the row as a worker claims it."""
        failing = None if row.first_failed_at is None else (self.now - row.first_failed_at).total_seconds()
        expired = row.expires_at is not None and row.expires_at <= self.now
        record = (
            row.id, handler.name, row.priority, row.available_at, row.origin and row.origin.id,
            row.event_type, row.event_version, row.occurred_at, row.source, row.target, row.domain_id,
            row.payload, row.idempotency_key, row.trace_context, row.headers,
            row.attempts, failing, expired, False, False,
        )  # fmt: skip
        return Delivery(record, uuid7(), {handler.name: handler}, time.monotonic())


def _run(coroutine: Any) -> Any:
    return coroutine if in_event_loop() else kit_loop().run(coroutine)
