"""Handlers behind a broker: the same registry, with one setting. Each test runs on Postgres alone and on brokers."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    Reject,
    RetryPolicy,
    Snooze,
    TerminalHandlerError,
    Worker,
    WorkerSettings,
)
from holdfast.brokers.engine import Interest, Received, Source
from holdfast.brokers.engines import engine_of
from holdfast.brokers.signing import Signatures, Verdict
from holdfast.handler_tally import DeliveryOutcome
from servers.kafka import kafka_server
from servers.nats import NatsServer
from servers.rabbitmq import RabbitmqServer
from servers.valkey import DURABLE, ValkeyServer
from tests.brokers.messages import outgoing, sent
from tests.worker.support import Facts, drained, effects, make_tables, publish, publish_many, running, until

DEFAULTS = WorkerSettings()
QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, max_delay=0.05)


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    """One for all tests: it takes many seconds to start."""
    with RabbitmqServer(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


@pytest.fixture(params=["outbox", "nats", "redis", "rabbitmq", "kafka"])
def substrate(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """The address of a broker that carries the events; None for Postgres alone."""
    match request.param:
        case "outbox":
            yield None
        case "nats":
            with NatsServer(tmp_path / "nats") as server:
                yield server.address
        case "redis":
            with ValkeyServer(tmp_path / "valkey", *DURABLE) as valkey:
                yield valkey.address
        case "rabbitmq":
            node = request.getfixturevalue("rabbitmq")
            host = f"t{uuid.uuid4().hex}"
            node.control("add_vhost", host)
            node.control("set_permissions", "-p", host, "guest", ".*", ".*", ".*")
            yield f"{node.address}{host}"
            node.control("delete_vhost", host)
        case "kafka":
            with kafka_server() as kafka:
                yield kafka.address


async def carried(conn: asyncpg.Connection, substrate: str | None) -> None:
    """Wait until the handlers get their events by the broker, if there is one."""
    if substrate is not None:
        query = "SELECT bool_and(via <> 'outbox') FROM core.subscriptions WHERE retired_at IS NULL"
        await until(lambda: conn.fetchval(query), what="the handlers have moved")


async def through_broker(conn: asyncpg.Connection, substrate: str | None, count: int) -> None:
    """Require that so many events went through the broker."""
    if substrate is not None:
        query = "SELECT count(*) FROM core.outbox WHERE handler_name LIKE 'relay.%' AND status = 'delivered'"
        assert await conn.fetchval(query) == count


@pytest.mark.slow
async def test_events_reach_handlers(dsn: str, conn: asyncpg.Connection, substrate: str | None) -> None:
    """One setting, and the same handlers get the same envelopes from the broker, each once (SCL-2)."""
    registry, got = HandlerRegistry(), []
    contexts: list[HandlerContext] = []

    @registry.handler("order.*", name="billing.charge_card")
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        got.append(event)
        contexts.append(context)

    @registry.handler("order.placed", name="mail.confirm")
    def confirm(event: EventEnvelope) -> None:
        got.append(event)

    async with running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        ids = await publish_many(conn, "order.placed", 300)
        await until(lambda: len(got) >= 600, what="all events handled")
        await until(lambda: conn.fetchval("SELECT count(*) = 600 FROM core.event_handled"), what="the inbox")
    assert sorted(event.event_id for event in got) == sorted([*ids, *ids])
    assert {context.handler_name for context in contexts} == {"billing.charge_card"}
    assert {context.attempt for context in contexts} == {1}
    await through_broker(conn, substrate, 300)


@pytest.mark.slow
async def test_transaction_of_a_handler_commits_with_its_event(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """What a handler writes in `tx` and the inbox commit together, and a retry writes once (LSN-5, SCL-2)."""
    await make_tables(conn)
    registry, runs = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        number = event.payload["n"]
        runs.append(number)
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", number)
        if number % 10 == 0 and context.attempt == 1:
            raise ConnectionError("the partner is away")

    async with running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        await publish_many(conn, "order.placed", 50)
        await until(lambda: conn.fetchval("SELECT count(*) = 50 FROM core.event_handled"), what="all handled")
        await drained(conn)
    assert sorted(await effects(conn)) == list(range(50))
    assert len(runs) == 55


@pytest.mark.slow
async def test_failures_are_dead_letters_and_replayed(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """Terminal failures stand in the outbox as dead letters, and a replay runs them (SCL-2)."""
    registry, broken, done = HandlerRegistry(), True, []

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK)
    async def charge(event: EventEnvelope) -> Reject | None:
        if broken:
            if event.payload["n"] == 0:
                return Reject("not ours")
            if event.payload["n"] == 1:
                raise TerminalHandlerError("no such card")
            raise ConnectionError("down")
        done.append(event.payload["n"])
        return None

    failed = "SELECT array_agg(failure_reason ORDER BY (payload ->> 'n')::int) FROM core.failed"
    async with running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        ids = await publish_many(conn, "order.placed", 3)
        reasons = ["rejected", "retry_terminal", "retry_terminal"]
        await until(lambda: _equal(conn, failed, reasons), what="three dead letters")
        attempts = "SELECT array_agg(attempts ORDER BY (payload ->> 'n')::int) FROM core.failed"
        assert await conn.fetchval(attempts) == [1, 1, 3]
        broken = False
        for id in ids:
            assert await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann@example.com')", id) == 1
        await until(lambda: sorted(done) == [0, 1, 2], what="replayed")
        await drained(conn)


@pytest.mark.slow
async def test_an_event_is_snoozed_and_retried_after_a_timeout(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK, timeout=0.2)
    async def charge(event: EventEnvelope, context: HandlerContext) -> Snooze | None:
        number = event.payload["n"]
        seen.append((number, context.attempt))
        if seen.count((number, context.attempt)) == 1 and number == 0:
            return Snooze(0.05)
        if number == 1 and context.attempt == 1:
            await asyncio.sleep(60)
        return None

    async with running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        await publish_many(conn, "order.placed", 2)
        await until(lambda: conn.fetchval("SELECT count(*) = 2 FROM core.event_handled"), what="both handled")
    assert sorted(seen) == [(0, 1), (0, 1), (1, 1), (1, 2)]


@pytest.mark.slow
async def test_events_of_one_key_are_handled_in_order(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """Events of one key are handled in order, whatever carries the others (LSN-9)."""
    registry = HandlerRegistry()
    got: dict[str, list[int]] = {}

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        if event.payload["n"] % 7 == 0 and context.attempt == 1:
            raise ConnectionError("down")
        got.setdefault(event.payload["key"], []).append(event.payload["n"])

    async with running(dsn, registry, substrate=substrate), running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        for number in range(40):
            key = f"k{number % 4}"
            await publish(conn, "order.placed", {"n": number, "key": key}, ordering_key=key)
        await until(lambda: sum(map(len, got.values())) == 40, what="all handled")
    assert all(numbers == sorted(numbers) for numbers in got.values())


@pytest.mark.slow
async def test_stopping_gives_back_what_has_not_begun(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """A worker that stops finishes what runs, and another one handles the rest (LSN-4)."""
    registry, done, gate = HandlerRegistry(), [], asyncio.Event()

    @registry.handler("order.placed", name="billing.charge_card", concurrency=5)
    async def charge(event: EventEnvelope) -> None:
        await gate.wait()
        done.append(event.payload["n"])

    async with running(dsn, registry, substrate=substrate) as worker:
        await carried(conn, substrate)
        await publish_many(conn, "order.placed", 30)
        await until(lambda: worker.in_flight >= 5, what="some run")
        worker.stop()
        gate.set()
    async with running(dsn, registry, substrate=substrate):
        await until(lambda: conn.fetchval("SELECT count(*) = 30 FROM core.event_handled"), what="all handled")
    assert sorted(done) == list(range(30))


@pytest.mark.slow
async def test_what_a_dead_worker_had_taken_is_handled_once(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """What was delivered and never acknowledged comes again, and its attempts are counted in the lane (SCL-2,
    LSN-3).
    """
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    async with running(dsn, registry, substrate=substrate, lease=2.0):
        await carried(conn, substrate)
    await publish_many(conn, "order.placed", 20)
    if substrate is None:
        claimed = """
            UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = gen_random_uuid(),
                lease_token = gen_random_uuid(), lease_expires_at = now(), handler_name = 'billing.charge_card'
            WHERE payload ->> 'n' < '5'
        """
        await conn.execute(claimed)
    else:
        relayed = "SELECT count(*) = 20 FROM core.outbox WHERE handler_name LIKE 'relay.%' AND status = 'delivered'"
        async with running(dsn, HandlerRegistry(), substrate=substrate, lease=2.0):
            await until(lambda: conn.fetchval(relayed), what="all relayed")
        found = await conn.fetchrow(
            "SELECT * FROM core.broker_interests((SELECT min(via) FROM core.subscriptions WHERE via <> 'outbox'), NULL)"
        )
        interest = Interest(
            found["handler_name"],
            DEFAULTS.served_channels[0],
            found["domain_context"],
            tuple(found["event_types"]),
            found["since"],
        )
        source = engine_of(substrate).source(interest, lease=2.0)
        taken: list[Received] = []
        await until(lambda: _taken(source, taken), what="some taken")
        await source.close()
    async with running(dsn, registry, substrate=substrate, lease=2.0, poll_interval=0.1):
        await until(lambda: conn.fetchval("SELECT count(*) = 20 FROM core.event_handled"), what="all handled")
        await drained(conn)
    assert sorted(await effects(conn)) == list(range(20))
    in_lane = "SELECT count(*) FROM core.outbox WHERE handler_name = 'billing.charge_card' AND attempts > 0"
    assert await conn.fetchval(in_lane) >= 5


async def _taken(source: Source, taken: list[Received]) -> bool:
    taken += await source.take(5 - len(taken), wait=0.5)
    return len(taken) >= 5


@pytest.mark.slow
async def test_events_for_a_limited_handler_wait_in_its_lane(
    dsn: str, conn: asyncpg.Connection, substrate: str | None
) -> None:
    """Limits of the fleet hold behind a broker: the database keeps them (LSN-10)."""
    registry, at_once, most, done = HandlerRegistry(), 0, 0, []

    @registry.handler("order.placed", name="billing.charge_card", fleet_concurrency=2)
    async def charge(event: EventEnvelope) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        done.append(event.payload["n"])

    async with running(dsn, registry, substrate=substrate), running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        await publish_many(conn, "order.placed", 30)
        await until(lambda: len(done) == 30, what="all handled")
    assert most <= 2


@pytest.mark.slow
async def test_batches(dsn: str, conn: asyncpg.Connection, substrate: str | None) -> None:
    await make_tables(conn)
    registry, sizes = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge_cards", batch=20, within="20ms", retry=QUICK)
    async def charge(events: list[EventEnvelope], tx: asyncpg.Connection, context: list[HandlerContext]) -> list[Any]:
        sizes.append(len(events))
        await tx.executemany("INSERT INTO ledger (n) VALUES ($1)", [(event.payload["n"],) for event in events])
        return [
            ConnectionError("down") if event.payload["n"] == 7 and each.attempt == 1 else None
            for event, each in zip(events, context, strict=True)
        ]

    async with running(dsn, registry, substrate=substrate):
        await carried(conn, substrate)
        await publish_many(conn, "order.placed", 100)
        await until(lambda: conn.fetchval("SELECT count(*) = 100 FROM core.event_handled"), what="all handled")
        await drained(conn)
    assert max(sizes) > 1
    assert set(await effects(conn)) == set(range(100))


def counts(worker: Worker) -> Mapping[DeliveryOutcome, int]:
    return worker.tally()["billing.charge_card"].counts


async def _equal(conn: asyncpg.Connection, query: str, expected: object) -> bool:
    return bool(await conn.fetchval(query) == expected)


@pytest.mark.parametrize("substrate", ["nats"], indirect=True)
async def test_what_is_no_event_is_a_dead_letter_with_its_bytes(
    dsn: str, conn: asyncpg.Connection, substrate: str
) -> None:
    """A message that cannot be read is kept, and stops nothing (SCL-2)."""
    import nats

    registry, got, facts = HandlerRegistry(), [], Facts()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge(event: EventEnvelope) -> None:
        got.append(event.payload["n"])

    client = await nats.connect(substrate)
    try:
        async with running(dsn, registry, facts, substrate=substrate):
            await carried(conn, substrate)
            [stream] = await client.jetstream().streams_info()
            [subject] = stream.config.subjects or []
            await client.jetstream().publish(
                subject.replace("*", "_").replace(">", "order.placed"), b"\x00\xffno event"
            )
            await publish_many(conn, "order.placed", 3)
            await until(lambda: len(got) == 3, what="the events handled")
            await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), what="the dead letter")
    finally:
        await client.close()
    letter = await conn.fetchrow("SELECT * FROM core.failed")
    assert letter["handler_name"] == "billing.charge_card"
    assert letter["error_signature"].startswith("relay:")
    assert "no event" in letter["payload"]


@pytest.mark.slow
@pytest.mark.parametrize("substrate", ["nats", "redis", "rabbitmq", "kafka"], indirect=True)
async def test_who_writes_to_the_broker_can_neither_forge_nor_suppress_an_event(
    dsn: str, conn: asyncpg.Connection, substrate: str
) -> None:
    """What no relay has signed is kept, not handled, and keeps no real event from being handled (SEC-1, SCL-2)."""
    registry, got, facts, channel = HandlerRegistry(), [], Facts(), DEFAULTS.served_channels[0]

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge(event: EventEnvelope) -> None:
        got.append((event.idempotency_key, event.payload["number"]))

    relay, stranger = Signatures(), Signatures()
    relay.use(await conn.fetchval("SELECT signing FROM core.relay_keys()"), (), b"")
    stranger.use(b"not the secret", (), b"")
    unsigned, tampered, wrong, foreign, real = (outgoing(number, channel=channel) for number in range(5))
    other = outgoing(5, channel="another").body
    signed, _ = relay.signed(real.body, channel)
    attributes = {"specversion": "1.0", "id": "42", "source": "shop", "type": "order.placed", "data": {"number": 3}}
    bodies = [
        (unsigned, unsigned.body),
        (tampered, relay.signed(tampered.body, channel)[0].replace(b'"number":1', b'"number":9')),
        (wrong, stranger.signed(wrong.body, channel)[0]),
        (outgoing(5, channel=channel), relay.signed(other, "another")[0]),
        (foreign, json.dumps(attributes).encode()),
        (real, signed),
    ]
    sink = engine_of(substrate).sink(lease=30)
    async with running(dsn, registry, facts, substrate=substrate) as worker:
        await carried(conn, substrate)
        await sink.open()
        await sent(sink, [replace(event, body=body) for event, body in bodies])
        await until(lambda: len(got) == 2, what="the foreign one and the signed one are handled")
        await until(lambda: conn.fetchval("SELECT count(*) = 4 FROM core.failed"), what="the others are kept")
        for number, key in ((10, "k-0"), (11, "k-1"), (12, "k-2"), (13, "shop 42"), (15, "k-5")):
            await publish(conn, "order.placed", {"number": number}, idempotency_key=key)
        await until(lambda: len(got) == 7, what="no real event is suppressed")
        await until(lambda: conn.fetchval("SELECT count(*) = 7 FROM core.event_handled"), what="the inbox")
        # The same bytes again, under another id at the broker.
        await sent(sink, [replace(real, body=signed, message_id="again")])
        await until(lambda: counts(worker)["duplicate"] == 1, what="a signed message that comes again is a duplicate")
        await sink.close()
        failed = counts(worker)["failed"]
    assert sorted(number for _, number in got) == [3, 4, 10, 11, 12, 13, 15]
    assert {key for key, _ in got} >= {"k-0", "k-1", "k-2", "k-4", "k-5", "shop 42"}
    errors = await conn.fetch("SELECT last_error, error_signature FROM core.failed")
    expected = [Verdict.UNSIGNED, Verdict.FORGED, Verdict.UNKNOWN, Verdict.FORGED]
    assert sorted(str(each["last_error"]).partition(": ")[2] or str(each["last_error"]) for each in errors) == sorted(
        each.value for each in expected
    )
    assert all(each["error_signature"].startswith("relay:") for each in errors)
    assert failed == 4
    secret = await conn.fetchval("SELECT signing FROM core.relay_keys()")
    told = [*map(repr, facts), *(str(dict(each)) for each in await conn.fetch("SELECT * FROM core.failed"))]
    assert not any(secret.hex() in each or repr(secret)[2:-1] in each for each in told)
