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

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar, Unpack, cast
from uuid import UUID

from pydantic_core import from_json

from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry, require_registry
from holdfast.new_event import EventOptions, NewEvent
from holdfast.postgres.publisher import Publisher
from holdfast.schedules import due as due_slots
from holdfast.testing.assertions import OutboxAssertions
from holdfast.testing.loop import in_event_loop, kit_loop
from holdfast.testing.memory_clock import MemoryClock
from holdfast.testing.memory_delivering import MemoryDelivering
from holdfast.testing.memory_publisher import MemoryPublisher
from holdfast.testing.memory_rows import Rows
from holdfast.testing.memory_transaction import MemoryTransaction
from holdfast.testing.records import (
    DeliveryRecord,
    Drained,
    PublishedEvent,
)
from holdfast.typed_events import TypedEvent

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
        self._rows = Rows()
        self._clock = MemoryClock()
        self._delivering = MemoryDelivering(self._rows, self._clock, archives=dead_letters == "archive", tx=tx)
        self._slots: dict[str, datetime] = {}  # up to where the slots of each schedule have been fired

    # --- publishing -----------------------------------------------------------------------------------

    def publisher(self, source: str) -> Publisher:
        """Return a publisher that writes to this outbox, within its transactions."""
        return MemoryPublisher(self._rows, self._clock, source)

    def transaction(self) -> MemoryTransaction:
        """Return a transaction: `with` or `async with`. Its events exist if it ends without an error."""
        return MemoryTransaction(self._rows.commit)

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

    # --- the clock ------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the outbox's clock."""
        return self._clock.now

    def freeze(self, at: datetime | str | None = None) -> datetime:
        """Stop the clock, at a moment or where it is. `advance` and `drain` still move it."""
        self._clock.freeze(datetime.fromisoformat(at) if isinstance(at, str) else at or self.now)
        return self.now

    def move_clock(self, **by: float) -> datetime:
        """Move the clock and deliver nothing, as if no worker had run. Takes what timedelta takes."""
        return self._clock.move_to(self.now + timedelta(**by))

    # --- reading --------------------------------------------------------------------------------------

    def published(self) -> list[PublishedEvent]:
        """Return every event that was published and committed, in that order."""
        return [
            PublishedEvent(row.envelope(), from_json(row.headers or "{}"), row.available_at)
            for row in self._rows.events()
        ]

    def deliveries(self) -> list[DeliveryRecord]:
        """Return the deliveries: each event at each of its handlers, with its state."""
        return [
            DeliveryRecord(
                row.envelope(), row.handler_name, row.status, row.attempts, row.failure_reason, row.last_error,
                row.available_at, row.archived,
            )
            for row in self._rows
            if not row.split
        ]  # fmt: skip

    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Return the pairs of a handler and an event that it has handled."""
        return [(handler, row.envelope()) for (handler, _), row in self._delivering.inbox.items()]

    # --- delivering -----------------------------------------------------------------------------------

    def drain(self, registry: HandlerRegistry | None = None, *, due_only: bool = False) -> Any:
        """Deliver all events: those that are due, and, moving the clock, those that wait for a retry or a delay.

        With `due_only`, only what is due now. In code that runs in an event loop, write `await memory.drain()`.
        """
        return _run(self._drain(self._handlers(registry), due_only))

    def advance(self, *, registry: HandlerRegistry | None = None, **by: float) -> Any:
        """Let time pass, as in `advance(hours=3)`: deliver each event when it is due, and fire schedules."""
        return _run(self._advance(self._handlers(registry), timedelta(**by)))

    def _handlers(self, registry: HandlerRegistry | None) -> HandlerRegistry:
        registry = self._registry if registry is None else registry
        if registry is None:
            remedy = "pass drain(registry), or MemoryOutbox(registry)"
            raise ConfigurationError("registry", "is not known", remedy)
        self._delivering.subscribe(require_registry(registry))
        for schedule in registry.schedules:
            self._slots.setdefault(schedule.name, self.now)
        self._registries = (*self._registries, registry)
        return registry

    async def _drain(self, registry: HandlerRegistry, due_only: bool) -> Drained:
        done, returns = await self._deliver(registry), Counter[UUID]()
        while not due_only and (due := self._delivering.next_due(registry)) is not None:
            at, row = due
            returns[row.id] += 1
            if returns[row.id] > _MOST_RETURNS:
                raise AssertionError(
                    "A delivery was put off a hundred times, and still is; use drain(due_only=True), or "
                    f"advance(...).\n{self.describe()}"
                )
            before = self.now
            done += Drained(moved=self._clock.move_to(at) - before)
            done += await self._deliver(registry)
        return done

    async def _advance(self, registry: HandlerRegistry, by: timedelta) -> Drained:
        if by < timedelta(0):
            raise ConfigurationError("advance", f"is {by}", "give a positive time: the clock goes forward only")
        until = self.now + by
        done = await self._deliver(registry)
        while True:
            due = self._delivering.next_due(registry)
            moments = [next(each.timing.after(self._slots[each.name])) for each in registry.schedules]
            moments += [] if due is None else [due[0]]
            at = min(moments, default=until)
            self._clock.move_to(min(at, until))
            done += await self._deliver(registry)
            if at >= until:
                return replace(done, moved=by)

    async def _deliver(self, registry: HandlerRegistry) -> Drained:
        """Fire the slots that are due, and deliver until nothing is due."""
        fired = Drained(fired=self._fire(registry))
        return fired + await self._delivering.deliver(registry)

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


def _run(coroutine: Any) -> Any:
    return coroutine if in_event_loop() else kit_loop().run(coroutine)
