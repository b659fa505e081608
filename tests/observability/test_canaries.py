"""Payloads, keys, headers, tokens and passwords leave the process nowhere: a canary of each, looked for in all output.

An output is one entry of `Watched.outputs`. A new exporter is added there, and where the scenario makes it work.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import structlog
from pydantic import BaseModel

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    NewEvent,
    Publisher,
    Reactions,
    Reject,
    Retry,
    RetryPolicy,
    TerminalHandlerError,
    Worker,
    WorkerSettings,
)
from holdfast.cli import logs
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor
from holdfast.idempotency import IdempotencyMiddleware, exchange_of
from holdfast.integrations.sentry import SentryObserver
from holdfast.observability import prometheus
from holdfast.observability.logging import LogObserver
from holdfast.postgres.operations.metrics import snapshot
from holdfast.redact import unredacted
from holdfast.telemetry import Failed, Handled, Notice, Requested, Retried
from tests.observability.test_logs import Terminal
from tests.observability.test_otel_metrics import Metrics
from tests.observability.test_worker_sentry import DSN as SENTRY_DSN
from tests.observability.test_worker_sentry import Recorder
from tests.worker.support import Observed, drained, until

PAYLOAD, NESTED, KEY, DEDUPE, HEADER = (
    f"canary-{name}-2718281828" for name in ("payload", "nested", "key", "dedupe", "hdr")
)
TOKEN, SECRET, PASSWORD, REQUEST_KEY, BODY, TRACE = (
    f"canary-{name}-3141592653" for name in ("token", "secret", "password", "request", "body", "trace")
)
TENANT, ADDRESS, CARD = "canary-tenant-1618033988", "canary-address@1618033988.example", 4111111111111111
CANARIES = (
    *(PAYLOAD, NESTED, KEY, DEDUPE, HEADER, TOKEN, SECRET, PASSWORD, REQUEST_KEY, BODY, TRACE),
    *(TENANT, ADDRESS, str(CARD)),
)  # fmt: skip
QUICKLY = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)


class Order(BaseModel):
    number: int
    customer: str


# --- what is watched ---


class Sessions:
    """What `pg_stat_activity` shows of every session, looked at again and again."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.seen: set[str] = set()

    async def watch(self) -> None:
        conn = await asyncpg.connect(self._dsn)
        try:
            while True:
                for row in await conn.fetch("SELECT application_name, query FROM pg_stat_activity"):
                    self.seen.update(map(str, row))
                await asyncio.sleep(0.005)
        finally:
            await conn.close()


class Watched:
    """Everything through which something can leave the process, and the texts that did."""

    def __init__(self, dsn: str, conn: asyncpg.Connection, log: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
        self.facts, self.sentry, self.sessions, self.measured = Observed(), Recorder(), Sessions(dsn), Metrics()
        self.spans = self.measured.spans
        self.workers: list[Worker] = []
        self.notifications: list[str] = []
        self.errors: list[str] = []  # of what is raised to the caller
        self._conn, self._log, self._caplog = conn, log, caplog

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self.sessions.watch())
        await self._conn.add_listener("outbox_default", lambda *heard: self.notifications.append(str(heard[1:])))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def stored(self) -> list[str]:
        """What is stored beside the event itself."""
        hidden = "'{payload,headers,idempotency_key,dedupe_key,trace_context}'::text[]"
        rows = await self._conn.fetch(f"SELECT (to_jsonb(row) - {hidden})::text FROM core.deliveries AS row")
        failed = await self._conn.fetch(f"SELECT (to_jsonb(row) - {hidden})::text FROM core.failed AS row")
        return [each[0] for each in (*rows, *failed)]

    async def outputs(self) -> dict[str, list[str]]:
        found, stored = await snapshot(self._conn), await self.stored()
        page, _ = prometheus.exposition(lambda: prometheus.outbox_metrics(found))
        own, _ = prometheus.exposition(prometheus.Collector(*self.workers).collect)
        return {
            "log": self._log.getvalue().splitlines(),
            "log of the standard library": [record.getMessage() for record in self._caplog.records],
            "facts": [repr(fact) for fact in self.facts],
            "notices": [json.dumps(fact.details, default=repr) for fact in self.facts.of(Notice)],
            "metrics": page.splitlines(),
            "metrics of a worker": own.splitlines(),
            "metrics of OpenTelemetry": [repr(each) for each in self.measured.collect().items()],
            "spans": [span.to_json() for span in self.spans.all],
            "sentry": [envelope.decode(errors="replace") for envelope in self.sentry.envelopes],
            "stored errors": stored,
            "pg_stat_activity": sorted(self.sessions.seen),
            "errors": self.errors,
        }


@pytest.fixture(params=["json", "terminal"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream, was = Terminal() if request.param == "terminal" else io.StringIO(), structlog.get_config()
    structlog.reset_defaults()
    logs.configure(stream, "debug")
    monkeypatch.setattr("holdfast.observability.logging.logger", lambda: structlog.get_logger("holdfast"))
    yield stream
    structlog.configure(**was)


def spoken(canary: str) -> Iterable[str]:
    """The forms in which a text could be written."""
    return {
        canary,
        canary[:15],
        canary[5:20],
        canary.upper(),
        canary[::-1],
        canary.encode().hex(),
        canary.replace("-", "\\u002d"),
    }


# --- what happens ---


def raising(event: EventEnvelope) -> Exception:
    """An error that quotes all that a handler has at hand."""
    details = event.payload["details"]
    return ConnectionError(
        f"no line for {event.payload['customer']} {details!r}; Authorization: Bearer {TOKEN}; password={SECRET}; "
        f"could not reach postgresql://shop:{PASSWORD}@db.example/shop?password={PASSWORD}"
    )


def quoting(event: EventEnvelope, context: HandlerContext) -> str:
    """A text with what does not look like a secret: the key, the headers, numbers, keys, and parts of strings."""
    customer = str(event.payload["customer"])
    return (
        f"conflict for key {event.idempotency_key} with {dict(context.headers)}: card {event.payload['card']} of "
        f"{customer[:16]}…, {customer[5:21]!r}, {customer.upper()}, {[*event.payload['by_address']]}"
    )


def registry_of() -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.done")
    async def done(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="shop.in_thread", retry=QUICKLY)
    def in_thread(event: EventEnvelope) -> None:
        kept = dict(event.payload)
        raise raising(event) from KeyError(kept["customer"])

    @registry.handler("order.placed", name="shop.retried", retry=QUICKLY)
    async def retried(event: EventEnvelope) -> None:
        raise raising(event)

    @registry.handler("order.placed", name="shop.group", retry=RetryPolicy(strategy="none"))
    async def group(event: EventEnvelope) -> None:
        raise ExceptionGroup(f"several for {event.payload['customer']}", [raising(event), ValueError(PAYLOAD)])

    @registry.handler("order.placed", name="shop.rejected")
    async def rejected(event: EventEnvelope) -> Reject:
        return Reject(f"{event.payload['customer']} is not welcome, token={TOKEN}")

    @registry.handler("order.placed", name="shop.quoting", retry=QUICKLY)
    async def quoted(event: EventEnvelope, context: HandlerContext) -> None:
        raise ValueError(quoting(event, context))

    @registry.handler("order.placed", name="shop.postponed", retry=QUICKLY)
    async def postponed(event: EventEnvelope, context: HandlerContext) -> Retry:
        return Retry(0.01, quoting(event, context))

    @registry.handler("order.placed", name="shop.reacted_quoting", via="in_process")
    async def reacted_quoting(event: EventEnvelope, context: HandlerContext) -> None:
        raise ValueError(quoting(event, context))

    @registry.handler("order.placed", name="shop.unique", retry=QUICKLY)
    async def unique(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO customers (name) VALUES ($1)", event.payload["customer"])

    @registry.handler("order.placed", name="shop.cast", retry=QUICKLY)
    async def cast(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.fetchval("SELECT $1::text::integer", event.payload["customer"])

    @registry.handler("order.placed", name="shop.typed", retry=QUICKLY)
    async def typed(event: EventEnvelope[Order]) -> None: ...

    @registry.handler("order.placed", name="shop.reacted", via="in_process")
    async def reacted(event: EventEnvelope) -> None:
        raise TerminalHandlerError(f"no reaction for {event.payload['customer']}, api_key={SECRET}")

    return registry


async def endpoint(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    tx = await exchange_of(scope).begin("tenant-1")
    if json.loads(body)["customer"] == BODY:
        await tx.execute("INSERT INTO customers (name) VALUES ($1)", BODY)
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def request(app: Any, body: dict[str, str], answers: list[int | None], key: str = REQUEST_KEY) -> None:
    """POST it with a key; an error of the application counts as None."""
    text = json.dumps(body).encode()
    headers = [(b"idempotency-key", f'"{key}"'.encode()), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    try:
        await app(scope, receive, send)
    except asyncpg.UniqueViolationError:
        answers.append(None)


async def publish_and_handle(
    dsn: str, conn: asyncpg.Connection, watched: Watched, redact: Redactor | None = None
) -> None:
    """Success, retry, failure, a unique violation in a transaction, rejection, validation; a reaction."""
    registry, log = registry_of(), LogObserver(service="shop", successes="info")
    publisher = Publisher("shop", observers=(log, watched.facts), tracing=watched.spans.tracing)
    payload: dict[str, Any] = {"customer": PAYLOAD, "number": PAYLOAD, "details": {"address": [NESTED]}}
    payload |= {"card": CARD, "by_address": {ADDRESS: 1}}
    headers = {"x-token": HEADER, "tenant": TENANT}
    options: dict[str, Any] = {"headers": headers, "idempotency_key": KEY}
    with SentryObserver(SENTRY_DSN, transport=watched.sentry) as sentry:
        observers = (log, watched.facts, sentry)
        worker = Worker(
            dsn,
            registry,
            WorkerSettings(poll_interval=0.1),
            observers=observers,
            redact=redact,
            tracing=watched.spans.tracing,
        )
        watched.workers.append(worker)
        async with worker, Reactions(dsn, registry, observers=observers, redact=redact) as reactions:
            async with conn.transaction():
                event = await publisher.publish(conn, "order.placed", payload, **options)
                await publisher.publish(conn, "order.placed", payload, key=DEDUPE, trace_context=TRACE)
                await publisher.publish_many(conn, [NewEvent("order.placed", payload, **options)])
            reactions.react(event, headers)
            await reactions.drain()
            await drained(conn)
            await until(lambda: len(watched.facts.of(Retried)) >= 4, what="the retries are told")
            await until(lambda: len(watched.sentry.events) >= 11, what="the dead letters are told")
    assert {fact.handler_name for fact in watched.facts.of(Handled)} >= {"shop.done"}
    assert len({fact.handler_name for fact in watched.facts.of(Failed)}) == 11


async def refuse_publishing(conn: asyncpg.Connection, watched: Watched) -> None:
    """Input that is refused, and a statement of the caller's that fails."""
    publisher = Publisher("shop", observers=(watched.facts,))
    for wrong in ({"customer": PAYLOAD, "at": object()}, {"customer": PAYLOAD * 40_000}):
        with pytest.raises(Exception) as caught:
            async with conn.transaction():
                await publisher.publish(conn, "order.placed", wrong, idempotency_key=KEY, headers={"x-token": HEADER})
        watched.errors.append(f"{caught.value!r} {caught.value}")


async def answer_requests(dsn: str, watched: Watched) -> None:
    """The first request, its duplicate, another body under its key, and a unique violation."""
    answers: list[int | None] = []

    def observe(fact: Any) -> None:
        watched.facts(fact)
        LogObserver(successes="info")(fact)

    observe.facts = watched.facts.facts  # type: ignore[attr-defined]
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        app = IdempotencyMiddleware(endpoint, pool.acquire, {1: "x" * 32}, observe=observe)
        for customer in ("ann", "ann", "ben", BODY):
            await request(app, {"customer": customer}, answers)
        await request(app, {"customer": BODY}, answers, key=f"{REQUEST_KEY}-2")
    assert answers[:4] == [201, 201, 409, 409] and answers[4] != 201
    assert {fact.result for fact in watched.facts.of(Requested)} >= {"completed", "replayed", "refused"}


async def refuse_login(dsn: str, watched: Watched) -> None:
    """A worker with a wrong password, at its start."""
    parts = urlsplit(dsn)
    wrong = urlunsplit(parts._replace(netloc=f"postgres:{PASSWORD}@{parts.hostname}:{parts.port}"))
    worker = Worker(wrong, registry_of(), observers=(watched.facts, LogObserver()))
    with contextlib.suppress(ConfigurationError, asyncpg.PostgresError):
        try:
            async with worker:
                await until(lambda: watched.facts.notices("database_unavailable"), what="the refusal is told")
        except Exception as error:
            watched.errors.append(f"{error!r} {error}")
            raise
    for address in (f"postgresql://x:{PASSWORD}@[", f"host=x password={PASSWORD}", f"mysql://x:{PASSWORD}@db/x"):
        try:
            async with Worker(address, registry_of(), observers=(watched.facts,)):
                pass
        except Exception as error:
            watched.errors.append(f"{error!r} {error}")


def canaries_in(outputs: Mapping[str, Iterable[str]]) -> list[tuple[str, str, str]]:
    """Output, canary and text."""
    return [
        (name, canary, text)
        for name, texts in outputs.items()
        for text in texts
        for canary in CANARIES
        if any(form in text for form in spoken(canary))
    ]


@pytest.fixture
async def watched(
    dsn: str, conn: asyncpg.Connection, log: io.StringIO, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Watched]:
    caplog.set_level(logging.INFO, "holdfast")
    await conn.execute("CREATE TABLE customers (name text UNIQUE)")
    await conn.execute("INSERT INTO customers VALUES ($1), ($2)", PAYLOAD, BODY)
    found = Watched(dsn, conn, log, caplog)
    async with found.watching():
        yield found


async def test_the_canaries_are_there_to_be_found(dsn: str, conn: asyncpg.Connection, watched: Watched) -> None:
    """Without redaction they are in everything that tells of an error, and this looks for them there (OBS-1)."""
    await publish_and_handle(dsn, conn, watched, unredacted)
    found = {name for name, _, _ in canaries_in(await watched.outputs())}
    assert found == {"log", "facts", "spans", "sentry", "stored errors"}


async def test_no_canary_leaves_the_process(
    dsn: str, conn: asyncpg.Connection, watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not in logs, facts, traces, metrics, Sentry, stored errors, sessions, or errors that are raised (OBS-1,
    SEC-1).
    """
    await publish_and_handle(dsn, conn, watched)
    await refuse_publishing(conn, watched)
    await answer_requests(dsn, watched)
    await refuse_login(dsn, watched)
    outputs = await watched.outputs()
    outputs["standard output and error"] = list(capfd.readouterr())
    outputs["notifications"] = watched.notifications
    found = canaries_in(outputs)
    assert not found, "\n".join(f"{canary} in {name}: {text[:2000]}" for name, canary, text in found)
    silent = [name for name, texts in outputs.items() if not any(texts)]
    assert set(silent) <= {"standard output and error", "notifications", "log of the standard library"}, silent
    for name in ("log", "facts", "metrics of a worker", "spans", "sentry", "stored errors"):
        assert any("shop.unique" in text for text in outputs[name]), f"{name} tells of the unique violation"
    assert any("core." in text for text in outputs["pg_stat_activity"])
