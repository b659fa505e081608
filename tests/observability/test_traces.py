"""Traces: a publish, every attempt of every handler and what settles it, in one trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from holdfast import (
    EventEnvelope,
    HandlerRegistry,
    NewEvent,
    Operator,
    Publisher,
    Reactions,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    Worker,
    WorkerSettings,
)
from holdfast.context import current_context
from holdfast.errors import ConfigurationError
from holdfast.observability.otel import OpenTelemetry
from holdfast.observability.otel.spans import HandleSpan
from holdfast.telemetry import Fact, Fired
from tests.contract.test_publish_contract import DRIVERS, done
from tests.observability.spans import Spans, attributes
from tests.worker.support import Facts, drained, insert, make_tables, settled, until

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
AT_ONCE = RetryPolicy(base_delay=0.01)


@contextlib.asynccontextmanager
async def working(
    dsn: str, registry: HandlerRegistry, spans: Spans, facts: Facts | None = None, **settings: Any
) -> AsyncIterator[Worker]:
    observers = () if facts is None else (facts.append,)
    async with Worker(dsn, registry, WorkerSettings(**settings), observers=observers, tracing=spans.tracing) as worker:
        yield worker


async def publish(conn: asyncpg.Connection, spans: Spans, **options: Any) -> uuid.UUID:
    async with conn.transaction():
        event = await Publisher("shop", tracing=spans.tracing).publish(conn, "order.placed", {"n": 1}, **options)
    return event.event_id


async def outcome(spans: Spans, name: str = "process billing.charge", number: int = 1) -> ReadableSpan:
    """The span of an attempt, once it was exported."""
    return (await until(lambda: (found := spans.named(name))[number - 1 :] and found, what=name))[number - 1]


# --- publishing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_publish_is_a_producer_span_whose_context_the_event_carries(
    dsn: str, conn: asyncpg.Connection, driver: str
) -> None:
    """With every driver, of one event and of many (OBS-2)."""
    spans = Spans()
    publisher = Publisher("shop", tracing=spans.tracing)
    async with DRIVERS[driver](dsn) as caller:
        with spans.tracer.start_as_current_span("request") as request:
            event = await done(publisher.publish(caller.tx, "order.placed", {"n": 1}))
            await done(publisher.publish_many(caller.tx, [NewEvent("order.paid", {}), NewEvent("order.sent", {})]))
        await caller.commit()
    one, many = spans.one("publish order.placed"), spans.one("publish events")
    assert (one.kind, one.parent and one.parent.span_id) == (SpanKind.PRODUCER, request.get_span_context().span_id)
    assert attributes(one) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "order.placed",
        "messaging.message.id": str(event.event_id),
    }
    assert attributes(many)["messaging.batch.message_count"] == 2
    rows = await conn.fetch("SELECT event_type, trace_context FROM core.outbox ORDER BY seq")
    written = {"order.placed": one, "order.paid": many, "order.sent": many}
    for row in rows:
        own = written[row["event_type"]].context
        assert row["trace_context"] == f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
    assert len(rows) == 3 and event.trace_context == rows[0]["trace_context"]


async def test_a_trace_context_that_the_caller_gives_is_kept_and_linked(dsn: str, conn: asyncpg.Connection) -> None:
    """The span of the publish is linked to it, as the conventions advise (OBS-2)."""
    spans = Spans()
    identity = await publish(conn, spans, trace_context=GIVEN)
    assert await conn.fetchval("SELECT trace_context FROM core.outbox WHERE id = $1", identity) == GIVEN
    [link] = spans.one("publish order.placed").links
    assert f"{link.context.span_id:016x}" == "00f067aa0ba902b7"


async def test_the_state_of_a_trace_travels_where_it_fits(dsn: str, conn: asyncpg.Connection) -> None:
    """A tracestate stands after the traceparent; one that is too long is left out (OBS-2)."""
    seen: list[str] = []
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_state.to_header())

    spans = Spans()
    for state in ("vendor=abc,other=1", "vendor=" + "x" * 200):
        parent = trace.NonRecordingSpan(
            trace.SpanContext(1, 2, True, trace.TraceFlags(1), trace.TraceState.from_header([state]))
        )
        with trace.use_span(parent):
            await publish(conn, spans)
    async with working(dsn, registry, spans):
        await drained(conn)
    stored = await conn.fetch("SELECT trace_context FROM core.outbox ORDER BY seq")
    assert [len(row["trace_context"]) for row in stored] == [55 + 1 + len("vendor=abc,other=1"), 55]
    assert sorted(seen) == ["", "vendor=abc,other=1"]


async def test_a_publish_that_fails_is_an_error_without_what_the_database_quotes(
    dsn: str, conn: asyncpg.Connection
) -> None:
    """Neither values nor DETAIL lines are in a span (OBS-2)."""
    spans = Spans()
    await conn.execute(
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'no card %', new.payload->>'card'
                USING DETAIL = 'row 4111-1111', ERRCODE = 'check_violation';
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON core.outbox FOR EACH ROW EXECUTE FUNCTION refuse();
        """
    )
    with pytest.raises(asyncpg.CheckViolationError):
        async with conn.transaction():
            await Publisher("shop", tracing=spans.tracing).publish(conn, "order.placed", {"card": "4111-1111"})
    span = spans.one("publish order.placed")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "asyncpg.exceptions.CheckViolationError"
    assert "4111-1111" not in span.to_json() and "row" not in (span.status.description or "")
    assert span.status.description == "asyncpg.exceptions.CheckViolationError: no card <payload.card>"


async def test_without_a_provider_an_event_carries_what_it_inherits(dsn: str, conn: asyncpg.Connection) -> None:
    """With the API alone nothing is recorded and nothing is lost (OBS-2)."""
    facts, registry = Facts(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await Publisher("shop", tracing=OpenTelemetry()).publish(tx, "order.charged", {})

    await Publisher("shop", tracing=OpenTelemetry()).publish_alone(conn, "order.placed", {}, trace_context=GIVEN)
    assert await Publisher("shop", tracing=OpenTelemetry()).publish_alone(conn, "order.other", {}) is not None
    async with Worker(dsn, registry, observers=(facts.append,), tracing=OpenTelemetry()):
        stored = "SELECT trace_context FROM core.outbox WHERE event_type = $1"
        assert await until(lambda: conn.fetchval(stored, "order.charged")) == GIVEN
        await until(lambda: facts.notices("tracing_inactive"), what="the notice")
    assert await conn.fetchval(stored, "order.other") is None


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [(OpenTelemetry, "is the class OpenTelemetry"), (Spans().provider, "is TracerProvider"), (True, "is bool")],
)
def test_what_cannot_trace_is_refused_at_once(wrong: Any, problem: str) -> None:
    """With what to pass (OBS-2)."""
    registry = HandlerRegistry()
    registry.add("billing.charge", ["order.placed"], lambda event: None)
    makers: list[Callable[[], object]] = [
        lambda: Publisher("shop", tracing=wrong),
        lambda: Worker("postgresql://", registry, tracing=wrong),
        lambda: Reactions("postgresql://", registry, tracing=wrong),
        lambda: Operator("postgresql://", actor="ada", tracing=wrong),
    ]
    for make in makers:
        with pytest.raises(ConfigurationError, match=f"tracing {problem}; pass OpenTelemetry"):
            make()
    with pytest.raises(ConfigurationError, match="consumer"):
        OpenTelemetry(consumer="parent")  # type: ignore[arg-type]


# --- handling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync", "tx"])
async def test_every_attempt_is_a_span_of_the_producers_trace(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """The current one while the handler runs, also in a thread; a retry is one more in the same trace (OBS-2)."""
    await make_tables(conn)
    spans, registry, seen = Spans(), HandlerRegistry(), []

    def handled() -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)
        if len(seen) == 1:
            raise ConnectionError("the bank does not answer")

    if kind == "async":

        @registry.handler("order.placed", name="billing.charge", retry=AT_ONCE)
        async def charge(event: EventEnvelope) -> None:
            handled()

    elif kind == "sync":

        @registry.handler("order.placed", name="billing.charge", retry=AT_ONCE)
        def block(event: EventEnvelope) -> None:
            handled()

    else:

        @registry.handler("order.placed", name="billing.charge", retry=AT_ONCE)
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            handled()

    with spans.tracer.start_as_current_span("request"):
        identity = await publish(conn, spans)
    async with working(dsn, registry, spans):
        await settled(conn, identity)
    first, second = spans.named("process billing.charge")
    assert seen == [first.context.span_id, second.context.span_id]
    assert len({span.context.trace_id for span in spans.all}) == 1
    assert first.parent == second.parent and first.parent is not None and first.parent.is_remote
    assert first.parent.span_id == spans.one("publish order.placed").context.span_id
    assert first.kind is SpanKind.CONSUMER
    assert attributes(second) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "order.placed",
        "messaging.destination.subscription.name": "billing.charge",
        "messaging.message.id": str(identity),
        "messaging.outbox.source": "shop",
        "messaging.outbox.attempt": 2,
        "messaging.outbox.outcome": "delivered",
    }
    assert second.status.status_code is StatusCode.UNSET
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "ConnectionError: the bank does not answer"
    assert (attributes(first)["messaging.outbox.outcome"], attributes(first)["error.type"]) == (
        "retried",
        "ConnectionError",
    )
    [event] = first.events
    assert event.name == "exception" and dict(event.attributes or {})["exception.type"] == "ConnectionError"
    assert "test_traces.py" in dict(event.attributes or {})["exception.stacktrace"]
    # What commits with a handler's transaction has no settle of its own.
    settles = [] if kind == "tx" else ["  settle billing.charge"]
    assert spans.tree() == [
        "request",
        "  publish order.placed",
        "    process billing.charge *",
        *(f"    {each}" for each in settles),
        "    process billing.charge",
        *(f"    {each}" for each in settles),
    ]


async def test_what_a_handler_publishes_is_in_its_span(dsn: str, conn: asyncpg.Connection) -> None:
    """A chain of events is one trace (OBS-2)."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await Publisher("billing", tracing=spans.tracing).publish(tx, "order.charged", {})

    @registry.handler("order.charged", name="shipping.send")
    async def send(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        pass

    await publish(conn, spans)
    async with working(dsn, registry, spans):
        await drained(conn)
    assert spans.tree() == [
        "publish order.placed",
        "  process billing.charge",
        "    publish order.charged",
        "      process shipping.send",
    ]


ENDINGS: dict[str, tuple[Any, str, str | None]] = {
    "rejected": (Reject("no such card"), "failed", "rejected"),
    "retried": (Retry(60), "retried", "Retry"),
    "snoozed": (Snooze(60), "snoozed", None),
    "failed": (ValueError("no such order"), "failed", "ValueError"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("transactional", [False, True])
async def test_the_status_of_a_span_is_what_became_of_the_attempt(
    dsn: str, conn: asyncpg.Connection, ending: str, transactional: bool
) -> None:
    """OBS-2."""
    spans, registry = Spans(), HandlerRegistry()
    result, became, error_type = ENDINGS[ending]

    async def end() -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    if transactional:

        @registry.handler("order.placed", name="billing.charge", on_error="reject")
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> Any:
            return await end()

    else:

        @registry.handler("order.placed", name="billing.charge", on_error="reject")
        async def charge(event: EventEnvelope) -> Any:
            return await end()

    await publish(conn, spans)
    async with working(dsn, registry, spans):
        span = await outcome(spans)
    assert attributes(span)["messaging.outbox.outcome"] == became
    assert attributes(span).get("error.type") == error_type
    assert span.status.status_code is (StatusCode.UNSET if error_type is None else StatusCode.ERROR)


async def test_a_duplicate_is_a_span_without_an_error(dsn: str, conn: asyncpg.Connection) -> None:
    """In the trace of the publish that was the second one (OBS-2)."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        pass

    async with working(dsn, registry, spans):
        await settled(conn, await publish(conn, spans, idempotency_key="order-1"))
        await settled(conn, await publish(conn, spans, idempotency_key="order-1"))
        second = await outcome(spans, number=2)
    assert attributes(second)["messaging.outbox.outcome"] == "duplicate"
    assert second.status.status_code is StatusCode.UNSET


async def test_an_event_that_expired_is_a_span_without_an_error(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        pass

    identity = await publish(conn, spans, expires_in=timedelta(milliseconds=50))
    await until(lambda: conn.fetchval("SELECT expires_at < now() FROM core.outbox WHERE id = $1", identity))
    async with working(dsn, registry, spans):
        span = await outcome(spans)
    assert attributes(span)["messaging.outbox.outcome"] == "expired"
    assert span.status.status_code is StatusCode.UNSET


async def test_a_timeout_is_an_error(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", timeout=0.05)
    async def charge(event: EventEnvelope) -> None:
        await asyncio.sleep(60)

    await publish(conn, spans)
    async with working(dsn, registry, spans):
        span = await outcome(spans)
    assert attributes(span)["error.type"] == "TimeoutError"
    assert attributes(span)["messaging.outbox.outcome"] == "retried"


async def test_a_lease_that_is_lost_is_an_error(dsn: str, conn: asyncpg.Connection) -> None:
    """While the handler runs, and when the delivery is being settled (OBS-2)."""
    spans, registry = Spans(), HandlerRegistry()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        begun.set()
        await go_on.wait()

    take = "UPDATE core.outbox SET lease_token = gen_random_uuid() WHERE status = 'in_flight'"
    await publish(conn, spans)
    async with working(dsn, registry, spans, lease=0.9):
        await begun.wait()
        await conn.execute(take)
        cancelled = await outcome(spans)
        await conn.execute("UPDATE core.outbox SET lease_expires_at = now() + interval '1 h'")
    assert attributes(cancelled)["messaging.outbox.outcome"] == "lost_lease"
    assert attributes(cancelled)["error.type"] == "lease_lost"
    await conn.execute("DELETE FROM core.outbox")

    begun.clear()
    await publish(conn, spans)
    async with working(dsn, registry, spans, lease=30):
        await begun.wait()
        await conn.execute(take)
        go_on.set()
        settle = await outcome(spans, "settle billing.charge")
        await conn.execute("UPDATE core.outbox SET lease_expires_at = now() + interval '1 h'")
    assert settle.status.status_code is StatusCode.ERROR
    assert attributes(settle)["messaging.outbox.outcome"] == "lost_lease"
    await conn.execute("DELETE FROM core.outbox")


async def test_a_handler_that_is_stopped_is_released_without_an_error(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    spans, registry, begun = Spans(), HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        begun.set()
        await asyncio.sleep(60)

    await publish(conn, spans)
    async with working(dsn, registry, spans, grace=0.1):
        await begun.wait()
    span = spans.one("process billing.charge")
    assert attributes(span)["messaging.outbox.outcome"] == "released"
    assert span.status.status_code is StatusCode.UNSET


async def test_an_attempt_may_be_a_trace_of_its_own_that_is_linked(dsn: str, conn: asyncpg.Connection) -> None:
    """`consumer="link"` (OBS-2)."""
    spans, registry = Spans(consumer="link"), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        pass

    await publish(conn, spans)
    async with working(dsn, registry, spans):
        span = await outcome(spans)
    produced = spans.one("publish order.placed").context
    assert span.parent is None and span.context.trace_id != produced.trace_id
    assert [link.context.span_id for link in span.links] == [produced.span_id]


async def test_nothing_of_a_payload_is_in_a_span(dsn: str, conn: asyncpg.Connection) -> None:
    """Error texts are redacted like those in the database (OBS-2)."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", on_error="reject")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        try:
            await tx.execute(f"SELECT '{event.payload['card']}'::int")
        except asyncpg.PostgresError as error:
            raise ValueError(f"no card {event.payload['card']}, password=hunter2") from error

    async with conn.transaction():
        await Publisher("shop", tracing=spans.tracing).publish(
            conn, "order.placed", {"card": "canary-4711"}, key="canary-key", headers={"tenant": "canary-tenant"}
        )
    async with working(dsn, registry, spans):
        span = await outcome(spans)
        await drained(conn)
    exported = "".join(each.to_json() for each in spans.all)
    assert span.status.status_code is StatusCode.ERROR and "no card" in exported
    assert "canary" not in exported and "hunter2" not in exported


# --- what strangers send --------------------------------------------------------------------------------

HOSTILE = {
    "empty": "",
    "text": "nonsense",
    "zero ids": "00-00000000000000000000000000000000-0000000000000000-01",
    "forbidden version": GIVEN.replace("00-", "ff-", 1),
    "upper case": GIVEN.upper(),
    "too long": GIVEN + "-" + "x" * 900,
    "line breaks": f"{GIVEN}\r\nbaggage: a=b",
    "hostile state": f"{GIVEN} " + "=,;" * 300,
    "flags": GIVEN[:-2] + "zz",
    "unicode digits": GIVEN.replace("4", "٤"),
    "many states": f"{GIVEN} " + ",".join(f"k{n}=v" for n in range(120)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_no_trace_context_of_a_stranger_breaks_a_delivery(dsn: str, conn: asyncpg.Connection, text: str) -> None:
    """What cannot be read begins a trace of its own (OBS-2)."""
    spans, registry, seen = Spans(), HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(dict(baggage.get_all()))

    await insert(conn, "order.placed")
    await conn.execute("UPDATE core.outbox SET trace_context = $1", text)
    async with working(dsn, registry, spans):
        await drained(conn)
        span = await outcome(spans)
    assert span.status.status_code is StatusCode.UNSET
    kept = text.startswith(f"{GIVEN} ")
    assert (span.parent is not None) == kept
    assert seen == [{}]


async def test_baggage_ends_at_the_outbox(dsn: str, conn: asyncpg.Connection) -> None:
    """What a caller has put there reaches no handler (OBS-2)."""
    spans, registry, seen = Spans(), HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(dict(baggage.get_all()))

    token = context.attach(baggage.set_baggage("user", "ada"))
    try:
        await publish(conn, spans)
        async with working(dsn, registry, spans):  # also not by the task that the worker is started in
            await drained(conn)
    finally:
        context.detach(token)
    assert seen == [{}]


class Broken(Sampler):
    def should_sample(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a sampler of the application")

    def get_description(self) -> str:
        return "broken"


async def test_a_broken_sampler_breaks_nothing_else(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    spans, registry = Spans(Broken()), HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        pass

    identity = await publish(conn, spans)
    async with working(dsn, registry, spans):
        assert (await settled(conn, identity))["attempts"] == 1
    assert len(spans) == 0


async def test_a_span_that_cannot_become_the_current_one_leaves_nothing_behind(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt fails, and what follows it in the same task is not taken for a part of the handler (OBS-2)."""
    spans, registry, seen = Spans(ParentBased(ALWAYS_OFF)), HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge", retry=AT_ONCE)
    async def charge(event: EventEnvelope) -> None: ...

    def enter(span: HandleSpan) -> HandleSpan:
        monkeypatch.undo()
        raise RuntimeError("no context")

    def redact(text: str) -> str:
        seen.append(current_context.get())
        return text

    monkeypatch.setattr(HandleSpan, "__enter__", enter)
    async with conn.transaction():  # without a trace context: the worker's own sampler is asked
        identity = (await Publisher("shop").publish(conn, "order.placed", {})).event_id
    async with Worker(dsn, registry, WorkerSettings(), observers=(), redact=redact, tracing=spans.tracing):
        assert (await settled(conn, identity))["attempts"] == 2
    assert seen == [None] * len(seen) != []


@pytest.mark.parametrize("consumer", ["child", "link"])
async def test_a_trace_that_is_not_sampled_goes_on_unsampled(dsn: str, conn: asyncpg.Connection, consumer: str) -> None:
    """The producer has decided for its handlers; those that are only linked decide for themselves (OBS-2)."""
    producer, worker, registry = Spans(ParentBased(ALWAYS_OFF)), Spans(ALWAYS_ON, consumer=consumer), HandlerRegistry()
    seen: list[trace.SpanContext] = []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(trace.get_current_span().get_span_context())

    identity = await publish(conn, producer)
    stored = await conn.fetchval("SELECT trace_context FROM core.outbox WHERE id = $1", identity)
    async with working(dsn, registry, worker):
        await settled(conn, identity)
    assert int(stored[-2:], 16) & 1 == 0 and len(producer) == 0
    if consumer == "child":
        assert (seen[0].trace_flags.sampled, f"{seen[0].trace_id:032x}") == (False, stored[3:35])
        assert len(worker) == 0
    else:
        assert worker.one("process billing.charge").links


@pytest.mark.parametrize("kind", ["loop", "thread", "reaction"])
async def test_what_follows_from_an_event_that_is_not_sampled_is_in_its_trace(
    dsn: str, conn: asyncpg.Connection, kind: str
) -> None:
    """What the handler calls and publishes, and a task that it leaves behind; and nothing after it (OBS-2)."""
    spans, registry = Spans(ParentBased(ALWAYS_OFF)), HandlerRegistry()
    seen: dict[str, list[str]] = {}
    tasks: list[asyncio.Task[None]] = []
    others = asyncio.Event()

    def note(what: str) -> None:
        headers: dict[str, str] = {}
        propagate.inject(headers)
        seen.setdefault(what, []).append(headers.get("traceparent", ""))

    async def later() -> None:
        await others.wait()
        note("later")

    async def in_loop(event: EventEnvelope) -> None:
        note("called")
        tasks.append(asyncio.create_task(later()))

    def in_thread(event: EventEnvelope) -> None:
        note("called")

    handler = in_thread if kind == "thread" else in_loop
    registry.add("billing.charge", ("order.placed",), handler, via="in_process" if kind == "reaction" else "outbox")
    published = []
    async with contextlib.AsyncExitStack() as stack:
        if kind == "reaction":
            reactions = await stack.enter_async_context(Reactions(dsn, registry, observers=(), tracing=spans.tracing))
        else:
            await stack.enter_async_context(working(dsn, registry, spans))
        for _ in range(3):
            async with conn.transaction():
                event = await Publisher("shop", tracing=spans.tracing).publish(conn, "order.placed", {})
            published.append(event.trace_context)
            if kind == "reaction":
                reactions.react(event)
        await until(lambda: len(seen.get("called", ())) == 3, what="three calls")
        others.set()
        await asyncio.gather(*tasks)
    assert sorted(seen["called"]) == sorted(published)
    assert all(int(each[-1], 16) % 2 == 0 for each in published if each) and len(set(published)) == 3
    if kind != "thread":
        assert sorted(seen["later"]) == sorted(published)
    assert not trace.get_current_span().get_span_context().is_valid
    assert len(spans) == 0


# --- the other entry points -----------------------------------------------------------------------------


async def test_reactions_are_in_the_trace_of_their_event(dsn: str, conn: asyncpg.Connection) -> None:
    """With their errors (OBS-2)."""
    spans, registry = Spans(), HandlerRegistry()

    @registry.handler("order.placed", name="shop.count", via="in_process")
    async def count(event: EventEnvelope) -> None:
        pass

    @registry.handler("order.placed", name="shop.fail", via="in_process")
    def fail(event: EventEnvelope) -> None:
        raise ValueError("no")

    async with Reactions(dsn, registry, observers=(), tracing=spans.tracing) as reactions:
        async with conn.transaction():
            event = await Publisher("shop", tracing=spans.tracing).publish(conn, "order.placed", {})
        reactions.react(event)
        await reactions.drain()
    assert sorted(spans.tree()) == ["  process shop.count", "  process shop.fail *", "publish order.placed"]
    assert attributes(spans.one("process shop.fail"))["messaging.outbox.outcome"] == "failed"


async def test_a_schedule_is_a_trace_from_its_slot_to_its_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    spans, registry = Spans(), HandlerRegistry()
    registry.schedule("day.ended", name="ledger.end_of_day", every=timedelta(seconds=1))

    @registry.handler("day.ended", name="ledger.close")
    async def close(event: EventEnvelope) -> None:
        pass

    async with working(dsn, registry, spans):
        closed = await outcome(spans, "process ledger.close")
    fired = next(each for each in spans.named("fire ledger.end_of_day"))
    assert (fired.kind, fired.parent) == (SpanKind.PRODUCER, None)
    assert attributes(fired)["messaging.outbox.schedule"] == "ledger.end_of_day"
    assert closed.context.trace_id == fired.context.trace_id


@pytest.mark.slow
async def test_a_slot_that_several_workers_look_at_is_one_span(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that finds the slot fired leaves no span of it (OBS-2)."""
    spans, fired = Spans(), Facts()
    registry = HandlerRegistry()
    registry.schedule("day.ended", name="ledger.end_of_day", every=timedelta(seconds=1))

    @registry.handler("day.ended", name="ledger.close")
    async def close(event: EventEnvelope) -> None:
        pass

    class Slots:
        facts = frozenset((Fired,))

        def __call__(self, fact: Fact) -> None:
            fired.append(fact)

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(Worker(dsn, registry, observers=(Slots(),), tracing=spans.tracing))
        await until(lambda: len(fired) >= 4, what="four slots")
    # Without one that the end of its worker may have interrupted: whether it was fired is not known there.
    of_slots = [span for span in spans.named("fire ledger.end_of_day") if span.status.is_ok]
    slots = [slot for fact in fired if isinstance(fact, Fired) for slot in fact.slots]
    assert sum(attributes(span)["messaging.batch.message_count"] for span in of_slots) == len(slots) == len(set(slots))


@pytest.mark.parametrize("dead_letters", ["in_place", "archive"])
async def test_a_replay_is_linked_to_what_is_replayed(dsn: str, conn: asyncpg.Connection, dead_letters: str) -> None:
    """And the attempt after it continues the trace of the event (OBS-2)."""
    spans, registry, broken = Spans(), HandlerRegistry(), [True]

    @registry.handler("order.placed", name="billing.charge", on_error="reject")
    async def charge(event: EventEnvelope) -> None:
        if broken:
            raise ValueError("no")

    identity = await publish(conn, spans)
    async with working(dsn, registry, spans, dead_letters=dead_letters):
        await outcome(spans, "settle billing.charge")
        broken.clear()
        async with Operator(dsn, actor="ada", tracing=spans.tracing) as operator:
            verbs = operator.failed if dead_letters == "in_place" else operator.archive
            await verbs.replay([identity], dry_run=True)
            assert spans.named("replay") == []
            await verbs.replay([identity], reason="mended")
        second = await outcome(spans, number=2)
    produced = spans.one("publish order.placed").context
    replay = spans.one("replay")
    assert [link.context.span_id for link in replay.links] == [produced.span_id]
    assert attributes(replay)["messaging.batch.message_count"] == 1
    assert second.context.trace_id == produced.trace_id
    assert attributes(second)["messaging.outbox.outcome"] == "delivered"


async def test_a_forked_process_traces_by_itself(dsn: str, conn: asyncpg.Connection, tmp_path: Any) -> None:
    """The tracer that was made before the fork serves the child, whose spans are its own (OBS-2)."""
    spans = Spans()
    pid = os.fork()
    if pid == 0:
        try:
            with spans.tracing.publish([NewEvent("order.placed", {})]) as span:
                recorded = span.recording
            (tmp_path / "child").write_text(f"{recorded} {len(spans)}")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "child").read_text() == "True 1"
    assert len(spans) == 0
