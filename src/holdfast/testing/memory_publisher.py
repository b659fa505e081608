"""Publishes to an outbox in memory: a publisher whose statements are carried out there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.postgres.publisher import Publisher
from holdfast.postgres.publishing import Command, Payload, Steps
from holdfast.testing.memory_clock import MemoryClock
from holdfast.testing.memory_rows import Row, Rows
from holdfast.testing.memory_transaction import MemoryTransaction

T = TypeVar("T")


class MemoryPublisher(Publisher):
    """A publisher whose statements are carried out in memory: everything before them is the real one's."""

    def __init__(self, rows: Rows, clock: MemoryClock, source: str) -> None:
        super().__init__(source, generation=0)
        self._rows = rows
        self._clock = clock

    def _run_plain(self, tx: Any, event_type: str, payload: Payload, *, alone: bool = False) -> Any:
        return self._run(tx, self._steps.publish_plain(event_type, payload), alone=alone)

    def _run(self, tx: Any, steps: Steps[T], method: str = "publish", *, alone: bool = False) -> Any:
        if not isinstance(tx, MemoryTransaction):
            remedy = "pass what memory.transaction() gives, or the tx of a handler that a MemoryOutbox runs"
            raise ConfigurationError("tx", f"is {type(tx).__name__}, not a transaction of a MemoryOutbox", remedy)
        tx.require_open()
        if not tx.asynchronous:
            return self._carry_out(tx, steps)

        async def publish() -> T:
            return self._carry_out(tx, steps)

        return publish()

    def _carry_out(self, tx: MemoryTransaction, steps: Steps[T]) -> T:
        answer: object = None
        while True:
            try:
                command = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._answer(tx, command)

    def _answer(self, tx: MemoryTransaction, command: Command) -> object:
        values = command.values
        match command.statement:
            case "publish_one" | "publish_plain":
                tx.write_row(self._row(values))
            case "publish_many" | "publish_many_plain" | "publish_given":
                rows = [self._row(each) for each in _each(values)]
                rows = [row for row in rows if not self._rows.taken(row.id)]
                for row in rows:
                    tx.write_row(row)
                return len(rows)
            case "hold_key":
                holder = tx.held(self.source, str(values["key"])) or self._rows.find_key(
                    self.source, str(values["key"])
                )
                if holder is None:
                    return values["id"]
                if values["reschedule"] == "true":
                    holder.available_at = self._when(values)
                return str(holder.id)
            case "outbox_cancel":
                return self._move(values, cancel=True)
            case "reschedule_key":
                return self._move(values, cancel=False)
            case other:
                raise LookupError(f"a MemoryOutbox cannot carry out {other}")
        return None

    def _move(self, values: Any, *, cancel: bool) -> int:
        row = self._rows.find_key(self.source, str(values["key"]))
        if row is None:
            return 0
        if cancel:
            row.status, row.failure_reason, row.last_error = "failed", "cancelled", "cancelled by its producer"
        else:
            row.available_at = self._when(values)
        return 1

    def _row(self, values: Any) -> Row:
        get = values.get
        expires_in = get("expires_in")
        return Row(
            id=UUID(str(values["id"])),
            event_type=str(values["event_type"]),
            event_version=int(get("event_version") or 1),
            occurred_at=datetime.fromisoformat(str(values["occurred_at"])),
            source=str(values["source"]),
            target=get("target"),
            domain_id=UUID(str(values["domain_id"])) if get("domain_id") else None,
            payload=str(values["payload"]),
            headers=get("headers"),
            idempotency_key=str(get("idempotency_key") or values["id"]),
            trace_context=get("trace_context"),
            available_at=self._when(values),
            expires_at=(
                self._clock.now + timedelta(seconds=float(expires_in))
                if expires_in is not None
                else datetime.fromisoformat(str(values["expires_at"]))
                if get("expires_at")
                else None
            ),
            priority=int(get("priority") or 1),
            dedupe_key=get("dedupe_key"),
            ordering_key=get("ordering_key"),
        )

    def _when(self, values: Any) -> datetime:
        if values.get("available_at"):
            return max(datetime.fromisoformat(str(values["available_at"])), self._clock.now)
        return self._clock.now + timedelta(seconds=float(values.get("delay") or 0))


def _each(columns: Any) -> Iterable[dict[str, Any]]:
    """Yield rows from columns, as `publish_many` unnests them."""
    lists = {name: column for name, column in columns.items() if isinstance(column, list)}
    common = {"source": columns["source"], "generation": columns["generation"], "occurred_at": columns["now"]}
    for values in itertools.zip_longest(*lists.values()):
        row = dict(zip(lists, values, strict=True))
        yield {**common, **{name: value for name, value in row.items() if value is not None}}
