"""What a handler may answer or raise, and what the worker makes of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from holdfast import (
    Done,
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
)
from holdfast.telemetry import Failed, Retried
from tests.worker.support import (
    Facts,
    drained,
    effects,
    make_tables,
    publish,
    publish_many,
    row,
    running,
    settled,
    until,
)

QUICK = RetryPolicy(base_delay=0.001, max_delay=0.001)


async def test_done_and_nothing_are_the_same(dsn: str, conn: asyncpg.Connection) -> None:
    """Returning Done acknowledges as returning nothing does, from a coroutine and from a thread (LSN-8)."""
    registry = HandlerRegistry()

    @registry.handler("order.one", name="billing.nothing")
    async def nothing(event: EventEnvelope) -> None: ...

    @registry.handler("order.two", name="billing.done")
    async def done(event: EventEnvelope) -> Done:
        return Done()

    @registry.handler("order.three", name="billing.threaded")
    def threaded(event: EventEnvelope) -> Done:
        return Done()

    identities = [await publish(conn, f"order.{name}") for name in ("one", "two", "three")]
    async with running(dsn, registry) as worker:
        for identity in identities:
            assert (await settled(conn, identity))["attempts"] == 1
        await until(lambda: worker.counters.delivered == 3, what="all are counted")


@pytest.mark.parametrize("transactional", [False, True])
async def test_retry_comes_back_after_its_delay(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """Retry(delay) waits on the database's clock, counts an attempt and undoes a transaction's writes (LSN-8)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    async def answer(context: HandlerContext) -> Retry | None:
        return Retry(timedelta(milliseconds=400), "the card is locked") if context.attempt == 1 else None

    if transactional:

        @registry.handler("order.placed", name="billing.charge", retry=QUICK)
        async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> Retry | None:
            await tx.execute("INSERT INTO ledger (n) VALUES ($1)", context.attempt)
            return await answer(context)

    else:

        @registry.handler("order.placed", name="billing.charge", retry=QUICK)
        async def look(event: EventEnvelope, context: HandlerContext) -> Retry | None:
            return await answer(context)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, poll_interval=3600):

        async def postponed() -> asyncpg.Record | None:
            found = await row(conn, identity)
            return found if found["status"] == "pending" and found["attempts"] == 1 else None

        waiting = await until(postponed, what="the event waits for its retry")
        assert waiting["last_error"] == "the card is locked"
        assert waiting["first_failed_at"] is not None
        delay = (waiting["available_at"] - waiting["first_failed_at"]).total_seconds()
        assert 0.4 <= delay <= 0.41
        delivered = await settled(conn, identity)
    assert delivered["attempts"] == 2
    assert delivered["delivered_at"] >= waiting["available_at"]
    assert await effects(conn) == ([2] if transactional else [])


async def test_retry_is_bounded_by_the_budget(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that only ever answers Retry fails after its attempts (LSN-8, RTY-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=3))
    async def charge(event: EventEnvelope) -> Retry:
        return Retry(0)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        failed = await settled(conn, identity, "failed")
    assert (failed["attempts"], failed["failure_reason"]) == (3, "retry_terminal")
    assert failed["last_error"] == "the handler asked for a retry"


@pytest.mark.parametrize("transactional", [False, True])
async def test_snooze_burns_no_attempt(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """Seven snoozes with a budget of one attempt; every run is the first (LSN-8)."""
    await make_tables(conn)
    registry, attempts = HandlerRegistry(), []
    once = RetryPolicy(max_attempts=1)

    def answer(context: HandlerContext) -> Snooze | None:
        attempts.append(context.attempt)
        return Snooze(0.02) if len(attempts) <= 7 else None

    if transactional:

        @registry.handler("order.placed", name="billing.charge", retry=once)
        async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> Snooze | None:
            await tx.execute("INSERT INTO ledger (n) VALUES ($1)", len(attempts))
            return answer(context)

    else:

        @registry.handler("order.placed", name="billing.charge", retry=once)
        def look(event: EventEnvelope, context: HandlerContext) -> Snooze | None:
            return answer(context)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, poll_interval=3600) as worker:
        delivered = await settled(conn, identity)
        assert worker.counters.snoozed == 7
    assert attempts == [1] * 8
    assert (delivered["attempts"], delivered["last_error"], delivered["first_failed_at"]) == (1, None, None)
    assert await effects(conn) == ([7] if transactional else [])


@pytest.mark.parametrize("transactional", [False, True])
async def test_reject_fails_at_once(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """Reject is failure_reason rejected after one attempt; a bare one has no error text (LSN-8, DLQ-1)."""
    await make_tables(conn)
    registry, facts = HandlerRegistry(), Facts()

    if transactional:

        @registry.handler("order.*", name="billing.charge")
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> Reject:
            await tx.execute("INSERT INTO ledger (n) VALUES (1)")
            return Reject("the customer is gone" if event.payload else None)

    else:

        @registry.handler("order.*", name="billing.charge")
        async def look(event: EventEnvelope) -> Reject:
            return Reject("the customer is gone" if event.payload else None)

    told = await publish(conn, "order.placed", {"told": True})
    bare = await publish(conn, "order.placed")
    async with running(dsn, registry, facts) as worker:
        rejected, silent = await settled(conn, told, "failed"), await settled(conn, bare, "failed")
        await until(lambda: worker.counters.failed == 2, what="both are counted")
    assert (rejected["failure_reason"], rejected["last_error"]) == ("rejected", "the customer is gone")
    assert (silent["failure_reason"], silent["last_error"]) == ("rejected", None)
    assert rejected["attempts"] == silent["attempts"] == 1
    assert {fact.failure_reason for fact in facts.of(Failed)} == {"rejected"}
    assert await effects(conn) == []
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_errors_can_mean_reject(dsn: str, conn: asyncpg.Connection) -> None:
    """With on_error="reject" any error is a rejection, transient or not (LSN-8)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", on_error="reject")
    async def charge(event: EventEnvelope) -> None:
        raise ConnectionError("no line")

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        failed = await settled(conn, identity, "failed")
    assert (failed["failure_reason"], failed["attempts"]) == ("rejected", 1)
    assert failed["last_error"] == "ConnectionError: no line"
    assert failed["error_signature"].startswith("ConnectionError:")


@pytest.mark.parametrize(
    "answer",
    [True, False, 0, "done", Done, Retry, {"ok": 1}],
    ids=repr,
)
async def test_wrong_answers_fail_alone(dsn: str, conn: asyncpg.Connection, answer: object) -> None:
    """An answer that means nothing fails its own event at once, and the others flow (LSN-8, P6)."""
    registry = HandlerRegistry()

    @registry.handler("order.wrong", name="billing.wrong", retry=QUICK)
    async def wrong(event: EventEnvelope) -> Any:
        return answer

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    bad = await publish(conn, "order.wrong")
    async with running(dsn, registry, concurrency=1) as worker:
        failed = await settled(conn, bad, "failed")
        assert failed["last_error"]
        good = await publish(conn, "order.placed")
        await settled(conn, good)
        await until(lambda: worker.in_flight == 0, what="nothing is held")


def _group() -> BaseException:
    return ExceptionGroup("several", [ConnectionError("one"), OSError("two")])


_ERRORS: list[Callable[[], BaseException]] = [
    lambda: SystemExit(3),
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    MemoryError,
    RecursionError,
    StopIteration,
    StopAsyncIteration,
    _group,
    lambda: BaseExceptionGroup("worse", [SystemExit(1)]),
]


@pytest.mark.parametrize("kind", ["async", "sync", "tx"])
async def test_every_kind_of_error_is_an_attempt(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """Whatever is raised, the row is classified, never acknowledged, and the worker lives on (A12)."""
    registry, facts = HandlerRegistry(), Facts()
    policy = RetryPolicy(max_attempts=2, base_delay=0.001, max_delay=0.001)

    def fail(event: EventEnvelope) -> None:
        if (number := event.payload.get("error")) is not None:
            raise _ERRORS[number]()

    if kind == "async":

        @registry.handler("order.placed", name="billing.charge", retry=policy)
        async def charge(event: EventEnvelope) -> None:
            fail(event)

    elif kind == "sync":

        @registry.handler("order.placed", name="billing.charge", retry=policy)
        def block(event: EventEnvelope) -> None:
            fail(event)

    else:

        @registry.handler("order.placed", name="billing.charge", retry=policy)
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            fail(event)

    bad = [await publish(conn, "order.placed", {"error": number}) for number in range(len(_ERRORS))]
    async with running(dsn, registry, facts, concurrency=2) as worker:
        for identity in bad:
            failed = await settled(conn, identity, "failed")
            assert (failed["attempts"], failed["failure_reason"]) == (2, "retry_terminal"), failed["last_error"]
        good = await publish_many(conn, "order.placed", 5)
        for identity in good:
            await settled(conn, identity)
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    assert facts.notices("runner_failed") == []
    assert len(facts.of(Retried)) == len(facts.of(Failed)) == len(bad)


@pytest.mark.parametrize("kind", ["plain", "sync", "transactional", "batch"])
async def test_what_a_failed_handler_held_is_freed_without_the_garbage_collector(
    dsn: str, conn: asyncpg.Connection, kind: str
) -> None:
    """What a handler holds when it raises may be large: it must not wait until the collector finds it."""

    class Held:
        pass

    left = weakref.WeakSet[Held]()

    def fail() -> None:
        held = Held()  # in a frame to which the error refers
        left.add(held)
        raise ValueError("no such order")

    async def plain(event: EventEnvelope) -> None:
        fail()

    def sync(event: EventEnvelope) -> None:
        fail()

    async def transactional(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        fail()

    async def batch(events: list[EventEnvelope]) -> None:
        fail()

    registry, handlers = HandlerRegistry(), {each.__name__: each for each in (plain, sync, transactional, batch)}
    options: dict[str, Any] = {"batch": 2, "within": "1ms"} if kind == "batch" else {}
    registry.add("billing.raising", ("order.bad",), handlers[kind], retry=RetryPolicy(max_attempts=1), **options)

    async with running(dsn, registry):
        gc.disable()
        try:
            identity = await publish(conn, "order.bad")
            await settled(conn, identity, "failed")
            await until(lambda: not left, what="nothing of the handler is left")
        finally:
            gc.enable()


async def test_runner_that_ends_is_replaced(dsn: str, conn: asyncpg.Connection) -> None:
    """A future that carries GeneratorExit tears through every coroutine above it; the worker goes on (A12)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        if "bad" in event.payload:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(future.set_exception, GeneratorExit())
            await future

    bad = await publish(conn, "order.placed", {"bad": True})
    async with running(dsn, registry, facts, concurrency=1):
        await settled(conn, bad, "failed")
        good = await publish(conn, "order.placed")
        await settled(conn, good)
    assert len(facts.notices("runner_failed")) == 1


async def test_handler_that_cancels_itself(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that cancels the coroutine it runs in fails its attempt and takes nothing with it (A12)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        if "cancel" in event.payload:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    bad = [await publish(conn, "order.placed", {"cancel": True}) for _ in range(3)]
    async with running(dsn, registry, concurrency=1) as worker:
        for identity in bad:
            await settled(conn, identity, "failed")
        good = await publish(conn, "order.placed")
        await settled(conn, good)
        await until(lambda: worker.in_flight == 0, what="nothing is held")


async def test_observer_that_raises_harms_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """A broken log handler costs neither the event nor the worker (P6)."""
    from holdfast import Worker, WorkerSettings

    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        if "bad" in event.payload:
            raise ValueError("bad")

    def broken(fact: object) -> None:
        raise OSError("the disk with the logs is full")

    bad = [await publish(conn, "order.placed", {"bad": True}) for _ in range(3)]
    async with Worker(dsn, registry, WorkerSettings(concurrency=1), observers=(broken,)):
        for identity in bad:
            await settled(conn, identity, "failed")
        await publish(conn, "order.placed")
        await drained(conn)
