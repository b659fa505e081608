"""What Sentry is told of dead letters, by a worker in the test and by `holdfast worker`."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    RetryPolicy,
    TerminalHandlerError,
    Worker,
    WorkerSettings,
)
from holdfast.errors import ConfigurationError
from holdfast.integrations.sentry import SentryObserver
from tests.worker.support import PATIENCE, Facts, drained, publish, publish_many, row, until

CANARY = "canary-2718281828"
DSN = "http://key@127.0.0.1:1/1"


class Recorder(Transport):
    """Keeps envelopes in memory, as they would travel."""

    def __init__(self) -> None:
        super().__init__()
        self.envelopes: list[bytes] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope.serialize())

    @property
    def events(self) -> list[dict[str, Any]]:
        parsed = [Envelope.deserialize(each) for each in self.envelopes]
        return [item.payload.json for each in parsed for item in each.items if item.type == "event"]  # type: ignore[misc]


class Broken(Transport):
    """Sentry at its worst: every call of it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def capture_envelope(self, envelope: Envelope) -> None:
        self.calls += 1
        raise RuntimeError("no line to Sentry")

    def flush(self, timeout: float, callback: Any = None) -> None:
        raise RuntimeError("no line to Sentry")

    def kill(self) -> None:
        raise RuntimeError("no line to Sentry")


@asynccontextmanager
async def telling(dsn: str, registry: HandlerRegistry, transport: Transport, **options: Any) -> AsyncIterator[Worker]:
    facts = Facts()
    with SentryObserver(DSN, transport=transport, **options) as sentry:
        async with Worker(dsn, registry, WorkerSettings(), observers=(sentry, facts.append)) as worker:
            yield worker
    assert not facts.notices("loop_failed")


async def test_one_event_for_each_dead_letter(dsn: str, conn: asyncpg.Connection) -> None:
    """With what names it, grouped by handler and cause; retries and successes are not told, nor payloads (DLQ-6,
    S7).
    """
    registry, transport = HandlerRegistry(), Recorder()
    policy = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        kept = dict(event.payload)  # a local variable, for a stack to show
        raise ConnectionError(f"no line for {event.event_id}, {len(kept)} fields\nsecond line")

    @registry.handler("order.placed", name="billing.thank")
    async def thank(event: EventEnvelope) -> None:
        pass

    @registry.handler("order.placed", name="mail.send")
    async def send(event: EventEnvelope) -> None:
        raise TerminalHandlerError("no address")

    payload = {"secret": CANARY, CANARY: 1}
    identities = [await publish(conn, "order.placed", payload) for _ in range(2)]
    # An application's wish for stacks must not send the local variables of the worker.
    async with telling(dsn, registry, transport, attach_stacktrace=True, include_local_variables=True):
        await drained(conn)
        await until(lambda: len(transport.events) >= 4, what="every dead letter is told")
    events = transport.events
    assert sorted((event["tags"]["event_id"], event["tags"]["handler_name"]) for event in events) == sorted(
        (str(identity), handler) for identity in identities for handler in ("billing.charge", "mail.send")
    )
    (charged,) = [
        event
        for event in events
        if (event["tags"]["event_id"], event["tags"]["handler_name"]) == (str(identities[0]), "billing.charge")
    ]
    assert charged["level"] == "error"
    tags = {"event_type": "order.placed", "source": "shop", "attempts": "2", "failure_reason": "retry_terminal"}
    assert {name: charged["tags"].get(name) for name in tags} == tags
    extra = {
        "event_id": str(identities[0]),
        "event_type": "order.placed",
        "source": "shop",
        "target": None,
        "handler_name": "billing.charge",
        "attempts": 2,
        "last_error": f"ConnectionError: no line for {identities[0]}, 2 fields\nsecond line",
    }
    assert {name: charged["extra"][name] for name in extra} == extra
    assert "\n" not in charged["message"]
    prints = {tuple(event["fingerprint"]) for event in events}
    assert len(prints) == 2, "two events of a handler that failed alike are one issue"
    assert {handler for _, handler, _ in prints} == {"billing.charge", "mail.send"}
    assert CANARY.encode() not in b"".join(transport.envelopes)
    assert not any({"threads", "stacktrace"} & set(event) for event in events)
    (crumb,) = charged["breadcrumbs"]["values"]
    assert crumb["message"] == f"attempt 1: ConnectionError: no line for {identities[0]}, 2 fields"
    assert (crumb["category"], crumb["data"]["attempts"]) == ("holdfast.retry", 1)
    assert not any("breadcrumbs" in event for event in events if event["tags"]["handler_name"] == "mail.send")
    frames = [event["exception"]["values"][0]["stacktrace"]["frames"] for event in events]
    assert not any("vars" in frame for each in frames for frame in each)
    assert {(each[-1]["filename"].rpartition("/")[2], each[-1]["in_app"]) for each in frames} == {
        ("test_worker_sentry.py", True)
    }
    assert {event["tags"]["correlation_id"] for event in events} == {
        event["contexts"]["delivery"]["correlation_id"] for event in events
    }


async def test_a_target_is_a_tag(dsn: str, conn: asyncpg.Connection) -> None:
    """DLQ-6."""
    registry, transport = HandlerRegistry(), Recorder()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        raise TerminalHandlerError("no card")

    await publish(conn, "order.placed", target="billing")
    async with telling(dsn, registry, transport):
        await until(lambda: transport.events, what="the dead letter is told")
    (event,) = transport.events
    assert (event["tags"]["target"], event["extra"]["target"]) == ("billing", "billing")


async def test_a_lost_lease_is_not_told(dsn: str, conn: asyncpg.Connection) -> None:
    """Whoever has the row now tells what becomes of it (DLQ-6, LSN-3)."""
    registry, transport = HandlerRegistry(), Recorder()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        await other.execute(
            "UPDATE core.outbox SET lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1 hour'"
        )
        raise ValueError("too late")

    other = await asyncpg.connect(dsn)
    identity = await publish(conn, "order.placed")
    async with telling(dsn, registry, transport) as worker:
        await until(lambda: worker.counters.lost_leases, what="the lease is known to be lost")
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    await other.close()
    assert transport.envelopes == []
    assert (await row(conn, identity))["status"] == "in_flight"
    await conn.execute("DELETE FROM core.outbox")


async def test_a_sentry_that_is_broken_hurts_nobody(dsn: str, conn: asyncpg.Connection) -> None:
    """Every dead letter is settled, everything else is delivered, and the worker stops as usual (DLQ-6)."""
    registry, transport = HandlerRegistry(), Broken()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        if event.payload["n"] % 2:
            raise TerminalHandlerError("odd")

    await publish_many(conn, "order.placed", 20)
    async with telling(dsn, registry, transport) as worker:
        await drained(conn)
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    assert (worker.counters.failed, worker.counters.delivered) == (10, 10)
    assert transport.calls == 10


@pytest.mark.parametrize("address", ["nonsense", "http://host/1", "https://s3cret@/1"])
def test_an_address_that_is_none(address: str) -> None:
    """DLQ-6, S8."""
    with pytest.raises(ConfigurationError, match="not a Sentry DSN") as refused:
        SentryObserver(address)
    assert address not in str(refused.value)


APP = """
from holdfast import HandlerRegistry, TerminalHandlerError

registry = HandlerRegistry()


@registry.handler("order.placed", name="billing.charge")
async def charge(event):
    raise TerminalHandlerError("no card")
"""


@pytest.mark.parametrize(
    ("of_sentry", "told"),
    [
        ({}, ("staging", "1.4.2")),
        ({"SENTRY_ENVIRONMENT": "canary", "SENTRY_RELEASE": "shop@1.4.2"}, ("canary", "shop@1.4.2")),
    ],
)
async def test_the_command_tells_sentry(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, of_sentry: dict[str, str], told: tuple[str, str]
) -> None:
    """With SENTRY_DSN, over HTTP, and what is still queued when it is told to stop is sent first.

    It has the environment and the release of the worker, or those of Sentry's own variables (DLQ-6, OBS-1).
    """
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        bodies.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    (tmp_path / "sentry_app.py").write_text(APP)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    identity = await publish(conn, "order.placed", {"secret": CANARY})
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "worker", "sentry_app:registry"]
    command += ["--environment", "staging", "--service-version", "1.4.2"]
    variables = {**os.environ, "HOLDFAST_DSN": dsn, "SENTRY_DSN": f"http://key@127.0.0.1:{port}/1", **of_sentry}
    worker = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=variables)
    try:
        await drained(conn)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.wait(), PATIENCE) == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
        server.close()
        await server.wait_closed()
    events = [item.payload.json for body in bodies for item in unpacked(body).items if item.type == "event"]
    assert [event["tags"]["event_id"] for event in events if event] == [str(identity)]
    assert [(event["environment"], event.get("release")) for event in events if event] == [told]
    assert CANARY.encode() not in b"".join(unpacked(body).serialize() for body in bodies)


def unpacked(body: bytes) -> Envelope:
    return Envelope.deserialize(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
