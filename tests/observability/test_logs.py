"""The log: an entry for each event that is published and handled, its fields, and which of them are written."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import structlog

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reactions, RetryPolicy, Worker
from holdfast.cli import environment, logs
from holdfast.cli.environment import LogLevel, LogSuccesses
from holdfast.context import HandlerContext, current_context
from holdfast.errors import ConfigurationError
from holdfast.observability.logging import LogObserver
from holdfast.observing import is_sampled
from holdfast.telemetry import Fired, Handled, LostLease, Notice, Published, Released, Snoozed
from tests.docs.support import read, sections, table
from tests.worker.support import PATIENCE, drained, until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
DOMAIN = UUID("01a1e480-b491-7cac-937f-428a764ae347")
CANONICAL = {"service", "environment", "version", "generation", "context", "correlation_id", "trace_id"}
OF_PUBLISH = {"event_id", "event_type", "source", "target", "domain_id"}
OF_HANDLE = OF_PUBLISH | {"attempts", "duration_ms", "status_result", "handler_name"}
NAMED = {"service": "shop", "environment": "test", "version": "1.4.2"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """What `holdfast worker` would write: JSON lines, or lines for a terminal."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream

    @property
    def text(self) -> str:
        return ANSI.sub("", self.stream.getvalue())

    def entries(self, *names: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [entry for entry in found if not names or entry["event"] in names]


@pytest.fixture
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    stream, was = (
        (Terminal if getattr(request, "param", "json") == "terminal" else io.StringIO)(),
        structlog.get_config(),
    )
    structlog.reset_defaults()
    logs.configure(stream, "debug")
    monkeypatch.setattr("holdfast.observability.logging.logger", lambda: structlog.get_logger("holdfast"))
    yield Log(stream)
    structlog.configure(**was)


def a_delivery(kind: type[Any], **fields: Any) -> Any:
    identity = uuid4()
    return kind(identity, identity, "order.placed", "shop", None, "billing.charge", 2, "c-1", **fields)


# --- entries ---


def test_an_entry_for_each_publish(log: Log) -> None:
    """The seven canonical fields and those of the seed, with their values (OBS-1)."""
    event_id = uuid4()
    observer = LogObserver(**NAMED, successes="info")  # type: ignore[arg-type]
    observer(Published(event_id, "order.placed", "shop", "billing", DOMAIN, 7, "c-1", TRACE_ID))
    (entry,) = log.entries()
    assert entry["event"] == "event_published" and entry["level"] == "info"
    assert {name: entry[name] for name in CANONICAL | OF_PUBLISH} == {
        **NAMED,
        "generation": 7,
        "context": "shop",
        "correlation_id": "c-1",
        "trace_id": TRACE_ID,
        "event_id": str(event_id),
        "event_type": "order.placed",
        "source": "shop",
        "target": "billing",
        "domain_id": str(DOMAIN),
    }


def test_an_entry_for_each_handle(log: Log) -> None:
    """Adds attempts, duration_ms, status_result and handler_name (OBS-1)."""
    observer = LogObserver(**NAMED, successes="debug")  # type: ignore[arg-type]
    observer(a_delivery(Handled, took=0.0123456, domain_id=DOMAIN, generation=0, trace_id=TRACE_ID))
    observer(a_delivery(Handled, result="duplicate"))
    first, second = log.entries("delivery_handled")
    assert set(first) == CANONICAL | OF_HANDLE | {"delivery_id", "event", "level", "timestamp"}
    assert (first["attempts"], first["duration_ms"], first["status_result"]) == (2, 12.346, "delivered")
    assert (first["handler_name"], first["context"], first["level"]) == ("billing.charge", "billing", "debug")
    assert (second["status_result"], second["duration_ms"], second["trace_id"]) == ("duplicate", None, None)


def test_other_outcomes_are_entries_too(log: Log) -> None:
    """At the level of successes, but a lost lease is a warning whatever that is (OBS-1)."""
    for successes, expected in (("info", ["info", "info", "info", "warning"]), ("never", ["warning"])):
        log.stream.truncate(log.stream.seek(0))
        observer = LogObserver(successes=successes)  # type: ignore[arg-type]
        for fact in (
            a_delivery(Snoozed, due_in=2.0),
            a_delivery(Released),
            Fired("shop.daily", (datetime(2026, 1, 1, tzinfo=UTC),)),
            a_delivery(LostLease, took=1.0),
        ):
            if type(fact) in observer.facts:
                observer(fact)
        assert [entry["level"] for entry in log.entries()] == expected
    (lost,) = log.entries("lease_lost")
    assert (lost["status_result"], lost["duration_ms"]) == ("lost_lease", 1000.0)


def test_the_application_is_named_in_every_entry_and_left_out_where_it_is_not_given(log: Log) -> None:
    """A value that structlog's context has is not covered by an empty one (OBS-1)."""
    LogObserver(service="shop")(Notice("info", "worker_started", {"generation": 3}))
    LogObserver()(Notice("info", "worker_started", {"generation": 3}))
    first, second = log.entries()
    assert first["service"] == "shop" and first["generation"] == 3
    assert not {"service", "environment", "version"} & set(second) and "environment" not in first


def test_what_a_handler_writes_names_its_delivery(log: Log) -> None:
    """With structlog and with the standard library; what it says itself stands, and another event's too (OBS-1)."""
    logger = structlog.get_logger("shop")
    identity = uuid4()
    context = HandlerContext(identity, identity, "shop.note", 2, {"correlation_id": "c-1"}, TRACE)
    token = current_context.set(context)
    try:
        logger.info("noted", attempts=7)
        logger.info("event_published", event_id="another")
    finally:
        current_context.reset(token)
    logger.info("later")
    noted, published, later = log.entries()
    expected = {"event_id": str(identity), "handler_name": "shop.note", "correlation_id": "c-1", "trace_id": TRACE_ID}
    assert noted.items() >= {**expected, "attempts": 7}.items()
    assert published["event_id"] == "another" and "handler_name" not in published and "event_id" not in later


@pytest.mark.parametrize("log", ["terminal"], indirect=True)
def test_a_terminal_shows_the_same_fields_on_one_line(log: Log) -> None:
    """Hostile values included (OBS-1)."""
    hostile = 'x\r\n{"event": "forged"}\x1b[31m'
    identity = uuid4()
    fact = Handled(identity, identity, hostile, hostile, hostile, "billing.charge", 1, hostile, took=0.1)
    LogObserver(**NAMED, successes="info")(fact)  # type: ignore[arg-type]
    (line,) = log.text.splitlines()
    assert "\x1b" not in line and "\r" not in line
    assert all(f" {name}=" in line for name in CANONICAL | OF_HANDLE)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"successes": "loud"}, "successes"),
        ({"sample": 1.5}, "sample"),
        ({"sample": "all"}, "sample"),
        ({"service": ""}, "service"),
        ({"environment": "a\nb"}, "environment"),
        ({"version": 1.4}, "version"),
        ({"service": "x" * 201}, "service"),
        ({"service": "\ud800"}, "service"),
    ],
)
def test_a_log_that_cannot_be_written_so_is_refused(arguments: dict[str, Any], field: str) -> None:
    """With the field, the problem and a remedy (OBS-1)."""
    with pytest.raises(ConfigurationError, match=rf"LogObserver\.{field}"):
        LogObserver(**arguments)


def test_the_page_names_every_entry_and_field() -> None:
    """docs/logging.md and the observer say the same (OBS-1)."""
    page = sections(read("docs/logging.md"))
    documented = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in table(page["The entries"]))))
    source = Path(sys.modules[LogObserver.__module__].__file__ or "").read_text()
    written = set(re.findall(r'"((?:event|delivery|schedule|lease)_(?:published|[a-z]+ed|lost))"', source))
    assert documented == written | {"worker_summary"}
    fields = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in table(page["The fields"]))))
    assert fields == CANONICAL | OF_HANDLE | {"delivery_id"}


# --- of a publisher, a worker, reactions ---


async def test_publish_and_handle_of_one_event(dsn: str, conn: asyncpg.Connection, log: Log) -> None:
    """Through a database, with the fields that come from the event; also for a fan-out (OBS-1, RTY-3)."""
    observer = LogObserver(**NAMED, successes="info")  # type: ignore[arg-type]
    registry, publisher = HandlerRegistry(), Publisher("shop", observers=(observer,))
    once = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None: ...

    @registry.handler("order.placed", name="mail.thank", retry=once)
    async def thank(event: EventEnvelope) -> None:
        raise ConnectionError("no line")

    worker = Worker(dsn, registry, observers=(observer,))
    async with worker:  # it subscribes before the event is published
        async with conn.transaction():
            event = await publisher.publish(
                conn, "order.placed", {}, domain_id=DOMAIN, trace_context=TRACE, correlation_id="c-17"
            )
            plain = await publisher.publish(conn, "order.other", {})
        await until(lambda: len(log.entries("delivery_failed")) == 1, what="the failure is logged")
        await until(lambda: len(log.entries("delivery_handled")) == 1, what="the success is logged")
    first, second = log.entries("event_published")
    assert (first["event_id"], second["event_id"]) == (str(event.event_id), str(plain.event_id))
    assert (second["correlation_id"], second["trace_id"], second["domain_id"]) == (str(plain.event_id), None, None)
    (handled,), (retried,), (failed,) = (
        log.entries(name) for name in ("delivery_handled", "delivery_retried", "delivery_failed")
    )
    for entry in (first, handled, retried, failed):
        assert {name: entry[name] for name in NAMED} == NAMED
        assert (entry["correlation_id"], entry["trace_id"], entry["domain_id"]) == ("c-17", TRACE_ID, str(DOMAIN))
        assert (entry["event_id"], entry["event_type"], entry["generation"]) == (str(event.event_id), "order.placed", 0)
    assert (handled["status_result"], handled["context"], handled["attempts"]) == ("delivered", "billing", 1)
    assert handled["duration_ms"] > 0 and handled["delivery_id"] != handled["event_id"]
    assert (retried["operation"], retried["attempts"], retried["status_result"]) == ("mail.thank", 1, "retried")
    assert datetime.fromisoformat(retried["next_attempt_at"]) < datetime.now(UTC) + timedelta(seconds=1)
    assert (failed["attempts"], failed["status_result"], failed["level"]) == (2, "failed", "error")


async def test_an_event_that_is_rolled_back_has_its_entry(conn: asyncpg.Connection, log: Log) -> None:
    """It is recorded when it is published, and nobody knows then whether that commits (OBS-1)."""
    publisher = Publisher("shop", observers=(LogObserver(successes="info"),))
    with pytest.raises(ZeroDivisionError):
        async with conn.transaction():
            await publisher.publish(conn, "order.placed", {})
            raise ZeroDivisionError
    assert len(log.entries("event_published")) == 1
    with pytest.raises(Exception, match=r"payload"):
        async with conn.transaction():
            await publisher.publish(conn, "order.placed", {"x": object()})
    async with conn.transaction():
        await publisher.publish(conn, "order.placed", {}, key="k", delay=60)
        await publisher.publish(conn, "order.placed", {}, key="k", delay=60)
    assert len(log.entries("event_published")) == 2, "what is refused, and what a pending event stands for, is not new"


async def test_what_a_request_has_bound_is_in_its_entry(conn: asyncpg.Connection, log: Log) -> None:
    """A publisher calls its observers in the caller's context (OBS-1)."""
    publisher = Publisher("shop", observers=(LogObserver(successes="info"),))
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        async with conn.transaction():
            await publisher.publish(conn, "order.placed", {})
    assert [entry["request_id"] for entry in log.entries()] == ["r-1"]


async def test_a_publisher_s_observer_that_raises(conn: asyncpg.Connection) -> None:
    """Costs the event nothing (OBS-1)."""

    class Raises:
        facts = frozenset((Published,))

        def __call__(self, fact: object) -> None:
            raise OSError("no")

    async with conn.transaction():
        await Publisher("shop", observers=(Raises(),)).publish(conn, "order.placed", {})
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


async def test_a_sample_keeps_both_entries_of_an_event_or_none(dsn: str, conn: asyncpg.Connection, log: Log) -> None:
    """And every failure (OBS-1)."""
    observer = LogObserver(successes="info", sample=0.3)
    registry, publisher = HandlerRegistry(), Publisher("shop", observers=(observer,))

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        if event.payload["n"] % 10 == 0:
            raise TypeError("no")

    async with conn.transaction():
        ids = await publisher.publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(200)])
    await Worker(dsn, registry, observers=(observer,)).drain()
    kept = {str(each) for each in ids if is_sampled(each, 0.3)}
    failing = {str(each) for n, each in enumerate(ids) if n % 10 == 0}
    assert 0 < len(kept) < 200
    assert {entry["event_id"] for entry in log.entries("event_published")} == kept
    assert {entry["event_id"] for entry in log.entries("delivery_handled")} == kept - failing
    assert {entry["event_id"] for entry in log.entries("delivery_failed")} == failing


async def test_a_storm_of_failures_is_counted(dsn: str, conn: asyncpg.Connection, log: Log) -> None:
    """A few entries stand for all of it, and the last ones are written before the worker has stopped (OBS-1)."""
    registry, publisher = HandlerRegistry(), Publisher("shop")

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        raise TypeError(f"no card for order {event.payload['n']}")

    async with conn.transaction():
        await publisher.publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(1_000)])
    await Worker(dsn, registry).drain()
    entries = log.entries("delivery_failed")
    assert sum(entry.get("repeated", 1) for entry in entries) == 1_000 and len(entries) < 1_000
    assert all("raise TypeError(" in entry["exception"] for entry in entries)
    assert len({entry["error_signature"] for entry in entries}) == 1


async def test_reactions_are_logged_like_deliveries(dsn: str, conn: asyncpg.Connection, log: Log) -> None:
    """OBS-1."""
    observer, registry = LogObserver(successes="info"), HandlerRegistry()

    @registry.handler("order.placed", name="mail.thank", via="in_process")
    async def thank(event: EventEnvelope) -> None: ...

    async with Reactions(dsn, registry, observers=(observer,)) as reactions:
        async with conn.transaction():
            event = await Publisher("shop").publish(conn, "order.placed", {}, domain_id=DOMAIN, trace_context=TRACE)
        reactions.react(event)
        await reactions.drain()
    (entry,) = log.entries("delivery_handled")
    assert (entry["event_id"], entry["domain_id"], entry["trace_id"]) == (str(event.event_id), str(DOMAIN), TRACE_ID)
    assert (entry["status_result"], entry["context"]) == ("delivered", "mail") and entry["duration_ms"] > 0


# --- holdfast worker ---


def test_the_settings_come_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what cannot be meant is refused with the name of the variable (OBS-1)."""
    assert environment.log_successes(None, LogLevel.INFO) == "never"
    assert environment.log_successes(None, LogLevel.DEBUG) == "debug"
    assert environment.log_sample(None) == 1.0 and environment.service(None) is None
    variables = {"LOG_SUCCESSES": "INFO", "LOG_SAMPLE": "0.01", "SERVICE": "shop", "ENVIRONMENT": "test"}
    for name, value in (variables | {"SERVICE_VERSION": "1"}).items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    assert environment.log_successes(None, LogLevel.DEBUG) == "info" and environment.log_sample(None) == 0.01
    assert environment.log_successes(LogSuccesses.NEVER, LogLevel.DEBUG) == "never" and environment.log_sample(0.0) == 0
    assert environment.service("x") == "x" and environment.service(None) == "shop"
    assert environment.deployment_environment(None) == "test" and environment.service_version(None) == "1"
    for name, value in (("LOG_SUCCESSES", "loud"), ("LOG_SAMPLE", "all"), ("LOG_SAMPLE", "2"), ("LOG_SAMPLE", "nan")):
        with monkeypatch.context() as patch:
            patch.setenv(f"HOLDFAST_{name}", value)
            with pytest.raises(ConfigurationError, match=f"HOLDFAST_{name}"):
                environment.log_successes(None, LogLevel.INFO)
                environment.log_sample(None)


HANDLERS = """
import logging
import structlog
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge")
async def charge(event):
    structlog.get_logger().info("charged")

@registry.handler("order.shipped", name="mail.send")
def send(event):
    logging.getLogger("mail").warning("sent")
"""


@asynccontextmanager
async def command(dsn: str, directory: Path, *options: str) -> AsyncIterator[list[dict[str, Any]]]:
    """The entries of `holdfast worker`, as they come."""
    (directory / "logged_handlers.py").write_text(HANDLERS)
    holdfast = str(Path(sys.executable).with_name("holdfast"))
    process = await asyncio.create_subprocess_exec(
        *(holdfast, "worker", "logged_handlers:registry", *options),
        cwd=directory,
        env={**os.environ, "HOLDFAST_DSN": dsn},
        stderr=asyncio.subprocess.PIPE,
    )
    entries: list[dict[str, Any]] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            entries.append(json.loads(line))

    reader = asyncio.create_task(read())
    try:
        yield entries
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await reader


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["one", "two"])
async def test_the_command_logs_what_its_options_say(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, processes: tuple[str, ...]
) -> None:
    """Each process of several, too (OBS-1)."""
    options = ("--log-successes", "info", "--service", "shop", "--environment", "test", "--service-version", "1.4.2")
    async with command(dsn, tmp_path, *options, *processes) as entries:
        started = 2 if processes else 1
        await until(lambda: sum(e["event"] == "worker_started" for e in entries) == started, what="all have started")
        async with conn.transaction():
            await Publisher("shop").publish_many(conn, [NewEvent("order.placed", {}) for _ in range(20)])
        await drained(conn)
        await until(lambda: sum(e["event"] == "delivery_handled" for e in entries) == 20, what="every event is logged")
        async with conn.transaction():
            shipped = await Publisher("shop").publish(conn, "order.shipped", {}, trace_context=TRACE)
        await until(lambda: any(e["event"] == "sent" for e in entries), what="the handler in a thread has logged")
    assert all({name: entry[name] for name in NAMED} == NAMED for entry in entries)
    charged = {entry["event_id"] for entry in entries if entry["event"] == "charged"}
    assert charged == {entry["event_id"] for entry in entries if entry["event"] == "delivery_handled"} - {
        str(shipped.event_id)
    }
    (sent,) = [entry for entry in entries if entry["event"] == "sent"]
    assert (sent["event_id"], sent["handler_name"], sent["trace_id"]) == (str(shipped.event_id), "mail.send", TRACE_ID)
