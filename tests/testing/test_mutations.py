"""Deliberate bugs in the outbox in memory, and in the one in Postgres, are found by the contract of both (TST-1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from holdfast.retry import Verdict
from holdfast.testing import MemoryOutbox, Outbox, OutboxContract
from holdfast.testing.calls import Calls
from holdfast.testing.databases import TestDatabase
from holdfast.testing.loop import kit_loop
from holdfast.testing.memory_delivering import MemoryDelivering
from holdfast.testing.memory_publisher import MemoryPublisher
from holdfast.testing.memory_transaction import MemoryTransaction
from holdfast.worker import settlements


def promises() -> Iterator[tuple[str, Callable[..., None], dict[str, Any]]]:
    """Every test of the contract, with the parameters it takes beside the outbox."""
    for name, test in inspect.getmembers(OutboxContract, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        marks = getattr(test, "pytestmark", [])
        if not marks:
            yield name, test, {}
        for mark in marks:
            for value in mark.args[1]:
                yield name, test, {mark.args[0]: value}


def broken(make: Callable[[], Any], only: str | None = None) -> list[str]:
    """The promises that an outbox does not keep."""
    found = []
    for name, test, parameters in promises():
        if only is None or name == only:
            try:
                test(OutboxContract(), make(), Calls(), **parameters)
            except Exception:
                found.append(name)
    return found


def test_without_a_bug_every_promise_is_kept() -> None:
    assert broken(MemoryOutbox) == []


def _forget_handled(self: MemoryDelivering, row: Any, handler: Any) -> Any:
    self.inbox.clear()
    return _attempt(self, row, handler)


def _count_snoozes(self: MemoryDelivering, row: Any, settlement: Any) -> str:
    count = _settle(self, row, settlement)
    row.attempts += count == "snoozed"
    return count


def _never_fail(self: MemoryDelivering, row: Any, settlement: Any) -> str:
    count = _settle(self, row, settlement)
    if count == "failed":
        row.status = "delivered"
    return count


def _ignore_target(self: MemoryDelivering, row: Any) -> Any:
    row.target = None
    return _owed(self, row)


def _everything_now(self: MemoryPublisher, values: Any) -> Any:
    return self._clock.now


def _never_expire(self: MemoryDelivering, row: Any, handler: Any) -> Any:
    row.expires_at = None
    return _delivery(self, row, handler)


def _commit_anyway(self: MemoryTransaction) -> None:
    self.rollback_at_end = False
    self.commit()


def _retry_at_once(self: MemoryDelivering, row: Any, settlement: Any) -> str:
    count = _settle(self, row, settlement)
    if count == "retried":
        row.available_at = self._clock.now
    return count


def _fire_twice(self: MemoryOutbox, registry: Any) -> int:
    fired = _fire(self, registry)
    if fired:
        *_, last = self._rows
        self._rows.add(replace(last, id=uuid4(), idempotency_key=str(uuid4())))
    return fired


_attempt, _settle, _owed = MemoryDelivering._attempt, MemoryDelivering._settle, MemoryDelivering._owed
_delivery, _fire = MemoryDelivering._delivery, MemoryOutbox._fire

IN_MEMORY = {
    "handled events are forgotten": (MemoryDelivering, "_attempt", _forget_handled),
    "a snooze counts": (MemoryDelivering, "_settle", _count_snoozes),
    "a failure counts as delivered": (MemoryDelivering, "_settle", _never_fail),
    "a retry does not wait": (MemoryDelivering, "_settle", _retry_at_once),
    "every context is the target": (MemoryDelivering, "_owed", _ignore_target),
    "delays are ignored": (MemoryPublisher, "_when", _everything_now),
    "expiry is ignored": (MemoryDelivering, "_delivery", _never_expire),
    "a rollback commits": (MemoryTransaction, "rollback", _commit_anyway),
    "priorities are ignored": (MemoryDelivering, "_attempt", None),
    "slots fire twice": (MemoryOutbox, "_fire", _fire_twice),
}


@pytest.mark.parametrize("bug", IN_MEMORY)
def test_bugs_in_memory_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    owner, name, replacement = IN_MEMORY[bug]
    if replacement is None:
        from holdfast.testing.memory_rows import Row

        monkeypatch.setattr(Row, "place", property(lambda row: (row.available_at, row.id)))
    elif bug == "a rollback commits":
        monkeypatch.setattr(MemoryTransaction, "__exit__", lambda self, *error: _commit_anyway(self))
    else:
        monkeypatch.setattr(owner, name, replacement)
    assert broken(MemoryOutbox)


# The function of Holdfast's schema, what stands in it, what stands there instead, and the promise that is broken.
IN_POSTGRES = {
    "handled events are forgotten": (
        "outbox_deliver", "FROM done d WHERE p_record", "FROM done d WHERE false",
        "test_one_key_has_one_effect_for_each_handler",
    ),
    "a snooze counts": (
        "outbox_release", "greatest(o.attempts - 1, 0)", "o.attempts", "test_a_snooze_counts_no_attempt",
    ),
    "a retry does not wait": (
        "outbox_retry", "statement_timestamp() + mine.delay", "statement_timestamp()",
        "test_a_retry_waits_for_its_time",
    ),
    "siblings are lost": (
        "outbox_split", "FROM wanted o\n        ON CONFLICT", "FROM wanted o LIMIT 1\n        ON CONFLICT",
        "test_every_handler_that_wants_an_event_gets_it_once",
    ),
    "what is cancelled is delivered": (
        "outbox_cancel", "o.status = 'pending'", "o.status = 'delivered'", "test_a_cancelled_event_is_not_delivered",
    ),
    "delays are ignored": (
        "outbox_reschedule", "core.outbox_retime(holder, p_source, p_available_at)",
        "core.outbox_retime(holder, p_source, now())", "test_a_rescheduled_event_comes_at_its_new_time",
    ),
}  # fmt: skip


def test_a_bug_in_the_worker_is_found(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that last are retried."""
    monkeypatch.setattr(settlements, "classify", lambda error, policy: Verdict(terminal=False))
    assert broken(lambda: outbox, only="test_a_lasting_error_is_not_retried")


@pytest.mark.parametrize("bug", IN_POSTGRES)
def test_bugs_in_postgres_are_found(outbox: Outbox, holdfast_database: TestDatabase, bug: str) -> None:
    function, right, wrong, promise = IN_POSTGRES[bug]
    (definition,) = outbox.fetch(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p "
        "WHERE p.proname = $1 AND p.pronamespace = 'core'::regnamespace",
        function,
    )[0]
    assert right in definition, definition
    assert broken(lambda: outbox, only=promise) == []
    kit_loop().run(holdfast_database.reset())
    outbox.execute(definition.replace(right, wrong))
    assert broken(lambda: outbox, only=promise) == [promise]
