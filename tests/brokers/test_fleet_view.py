"""What operators see of a broker by the database alone: its lag, what is taken, and settings that lose events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.brokers.engine import BrokerUnavailable, Received, Weakness
from holdfast.measurements import Measurements
from holdfast.observability.prometheus import ProcessFamilies, exposition, outbox_metrics
from holdfast.operator import Operator
from holdfast.postgres.operations.metrics import snapshot
from servers.nats import NatsServer
from tests.brokers.double import Broker, _Source
from tests.brokers.test_operating import holdfast
from tests.worker.support import Facts, publish_many, until

WEAK = "SELECT max(jsonb_array_length(weaknesses)) = 1 FROM core.broker_reports"
MOVED = "SELECT via = 'nats' FROM core.subscriptions WHERE handler_name = 'shop.note'"
FORGETFUL = (
    "SELECT bool_or(weaknesses::text LIKE '%the inbox knows what was handled for 5 days%') FROM core.broker_reports"
)
HELD = "SELECT sum(waiting + unacknowledged) = 5 FROM core.broker_reports WHERE handler_name = 'shop.note'"


@pytest.mark.slow
async def test_operators_see_what_a_broker_holds(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the status, the metrics and the findings of the doctor (SCL-2, OBS-2)."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.3)
    registry, going = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None:
        await going.wait()

    with NatsServer(tmp_path) as nats:
        settings = WorkerSettings(substrate=nats.address, concurrency=1)
        async with Worker(dsn, registry, settings, observers=()) as worker:
            await until(lambda: conn.fetchval(MOVED), what="a handler behind the broker")
            await publish_many(conn, "order.placed", 5)
            await until(lambda: conn.fetchval(HELD), what="a report of five messages")
            # The first look may have been before the stream was made.
            await until(lambda: conn.fetchval(WEAK), what="a report of the stream")
            found = await snapshot(conn)
            own = worker.measurements() + Measurements()
            monkeypatch.setattr("holdfast.worker.broker_reports._LATELY", 0.0)
            outage, _ = exposition(lambda: ProcessFamilies().of(worker.measurements()))
            # The stream keeps events for a week.
            await conn.execute("UPDATE core.retention_policies SET active_ttl_days = 5 WHERE entity = 'event_handled'")
            await until(lambda: conn.fetchval(FORGETFUL), what="a report of an inbox that forgets too early")
            going.set()
            await until(lambda: conn.fetchval("SELECT count(*) = 5 FROM core.event_handled"), what="five effects")
    labels = '{broker="nats",handler="shop.note"}'
    # Of the outbox, and of the worker itself, also where it is one of several processes.
    loaded = Measurements.loaded(own.dumped())
    for collect in (lambda: outbox_metrics(found), lambda: ProcessFamilies().of(loaded)):
        text, _ = exposition(collect)
        held = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
        assert held[f"holdfast_broker_waiting{labels}"] + held[f"holdfast_broker_unacknowledged{labels}"] == 5
        assert held[f"holdfast_broker_report_age_seconds{labels}"] < 60
    # Of an answer that has grown old its age is told, for the alert, and not what the broker held then.
    assert f"holdfast_broker_report_age_seconds{labels}" in outage and f"broker_waiting{labels}" not in outage
    text, _ = exposition(lambda: outbox_metrics(found))
    held = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert held['holdfast_broker_weaknesses{broker="nats"}'] == 1
    async with Operator(dsn, actor="ann") as operator:
        assert {each.subject for each in (await operator.status()).weaknesses} == {"stream HF_outbox_default"}
        await conn.execute("UPDATE core.broker_reports SET waiting = 20000 WHERE handler_name <> ''")
        assert {"broker-lag", "broker-weak"} <= {each.code for each in (await operator.doctor()).findings}
        await conn.execute("UPDATE core.broker_reports SET reported_at = now() - interval '2 minutes'")
        # No worker asks it any more, which says nothing about the broker.
        codes = {each.code for each in (await operator.doctor()).findings}
        assert "broker-unrelayed" in codes and "broker-silent" not in codes


@pytest.mark.slow
async def test_what_a_broker_carries_is_shown_until_it_carries_nothing(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists name the broker; when all has moved back, neither it nor its relay is spoken of (SCL-2, OPS-1)."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.3)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    with NatsServer(tmp_path) as nats:
        async with (
            Operator(dsn, actor="ann@example.com") as operator,
            Worker(dsn, registry, WorkerSettings(substrate=nats.address), observers=()),
        ):
            await until(lambda: conn.fetchval(MOVED), what="a handler behind the broker")
            await until(lambda: conn.fetchval(WEAK), what="a report of the stream")
            assert (await operator.handlers.show("shop.note")).via == "nats"
            _, listed = await holdfast(dsn, "handlers", "list")
            _, shown = await holdfast(dsn, "handlers", "show", "shop.note")
            assert re.search(r"^shop\.note .* nats +-", listed, re.MULTILINE), listed
            assert "via nats" in " ".join(shown.split()), shown
            await operator.handlers.via(["shop.note"], "outbox")
            assert (await operator.handlers.show("shop.note")).draining == "nats"
            assert "relay.nats" in {each.handler_name for each in await operator.handlers.all()}
            assert (await operator.status()).weaknesses
            await operator.handlers.drained("shop.note", "nats")
            assert not (await operator.status()).weaknesses
            assert "broker-weak" not in {each.code for each in (await operator.doctor()).findings}
        async with Operator(dsn, actor="ann@example.com") as operator:
            found = await operator.handlers.all()
            assert ([each.handler_name for each in found], found.left_out) == (["shop.note"], 0)
            assert (await operator.handlers.show("relay.nats")).retired
    _, listed = await holdfast(dsn, "handlers", "list")
    assert "via" not in listed.split(), listed


async def test_reports_go_on_after_an_error(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an answer of the broker raises is told, and the next report is made (SCL-2, OBS-3)."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.1)
    broker, facts = Broker(), Facts()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: broker)
    answers = iter([ValueError("half an answer"), KeyError("the other half")])

    async def strange(*_: object, **__: object) -> list[Weakness]:
        if (error := next(answers, None)) is not None:
            raise error
        return [Weakness("stream double", "is back", "-")]

    monkeypatch.setattr(broker, "weaknesses", strange)
    async with Worker(dsn, HandlerRegistry(), WorkerSettings(substrate="nats://double"), observers=(facts.append,)):
        await until(lambda: conn.fetchval(WEAK), what="a report after two errors")
    (told,) = facts.notices("broker_report_failed")
    assert "half an answer" in str(told.details["error"])


@pytest.mark.slow
async def test_doctor_sees_a_queue_that_gives_nothing(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RabbitMQ's without a leader, which still tells how much it holds (OPS-5)."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.1)
    broker, registry, taken = Broker(), HandlerRegistry(), asyncio.Event()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: broker)
    taking = _Source.take

    async def without_leader(self: _Source, most: int, *, wait: float) -> Sequence[Received]:
        if taken.is_set():
            raise BrokerUnavailable("the queue has no leader")
        return await taking(self, most, wait=0.05)

    monkeypatch.setattr(_Source, "take", without_leader)

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="shop.ship")
    async def ship(event: EventEnvelope) -> None: ...

    answered = "SELECT count(reported_at) = 2 FROM core.broker_reports WHERE handler_name <> ''"
    silent = """SELECT bool_and(asked_at > reported_at + interval '0.5 seconds') FROM core.broker_reports
                WHERE handler_name <> ''"""
    async with Worker(dsn, registry, WorkerSettings(substrate="nats://double"), observers=()):
        await until(lambda: conn.fetchval(answered), what="a report")
        taken.set()
        await until(lambda: conn.fetchval(silent), what="no more reports of the handler")
        await conn.execute("UPDATE core.broker_reports SET reported_at = reported_at - interval '2 minutes'")
        async with Operator(dsn, actor="ann") as operator:
            (found,) = [each for each in (await operator.doctor()).findings if each.code == "broker-silent"]
            assert found.object == "nats" and "the workers of shop.note, shop.ship;" in found.what
            _, shown = await holdfast(dsn, "relay", "show")
            assert re.search("nats: last answer 1[0-9]{2} s ago", shown), shown
            await operator.handlers.via(["shop.note", "shop.ship"], "outbox")
            assert "broker-silent" not in {each.code for each in (await operator.doctor()).findings}
