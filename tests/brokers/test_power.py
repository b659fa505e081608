"""What brokers have left of what they confirmed when the power fails: the table of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent
from holdfast.brokers.engine import Confirmed
from holdfast.brokers.engines import engine_of
from holdfast.operator import Operator
from servers.nats import NatsServer
from servers.power import POSSIBLE, Disk
from servers.processes import ServerProcess
from servers.valkey import ValkeyServer
from tests.brokers.messages import interest, numbers, outgoing, sent, taken
from tests.worker.support import PUBLISHER, drained, effects, make_tables, publish_many, running, until

pytestmark = [
    pytest.mark.nightly("power cut"),
    pytest.mark.skipif(not POSSIBLE, reason="a disk that loses its power needs root and mkfs.ext4"),
]

COUNT = 500
RELAYED = "SELECT count(*) = 60 FROM core.outbox WHERE handler_name = 'relay.nats' AND status = 'delivered'"


def _valkey(folder: Path, *settings: str) -> ServerProcess:
    return ValkeyServer(folder, "--appendonly", "yes", *settings)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path) as disk:
        yield disk


@pytest.mark.parametrize(
    ("make", "options", "keeps_all"),
    [
        pytest.param(NatsServer, "", False, id="nats-2m"),
        pytest.param(lambda folder: NatsServer(folder, sync="always"), "", True, id="nats-always"),
        pytest.param(lambda folder: _valkey(folder, "--appendfsync", "no"), "", False, id="valkey-no"),
        pytest.param(lambda folder: _valkey(folder, "--appendfsync", "always"), "", True, id="valkey-always"),
        pytest.param(lambda folder: _valkey(folder, "--appendfsync", "always"), "?fsync=1", True, id="valkey-waitaof"),
    ],
)
async def test_what_is_left_after_a_power_cut(
    disk: Disk, make: Callable[[Path], ServerProcess], options: str, keeps_all: bool
) -> None:
    """Confirmed events are lost with the defaults, and none with the settings that the doctor asks for (OPS-5)."""
    with make(disk.folder / "data") as server:
        engine = engine_of(f"{server.address}{options}")
        source, sink = engine.source(interest(), lease=30), engine.sink(lease=30)
        await source.open()
        await sent(sink, [outgoing(0)])
        await source.close()
        disk.sync()
        batch = [outgoing(number) for number in range(1, COUNT + 1)]
        assert set(await sink.send(batch, timeout=10)) == {Confirmed()}
        await sink.close()
        disk.cut(server)
        source = engine.source(interest(), lease=30)
        if keeps_all:
            assert set(numbers(await taken(source, COUNT + 1))) == set(range(COUNT + 1))
        else:
            (left,) = await engine.backlogs([interest()], timeout=5)
            assert left.waiting is None or left.waiting < COUNT
        await source.close()


async def test_what_nats_lost_with_the_power_comes_back(dsn: str, conn: asyncpg.Connection, disk: Disk) -> None:
    """Confirmed, gone, found by `relay check`, and handled once each after it was relayed again (SCL-1, SCL-2)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    with NatsServer(disk.folder / "data") as server:
        async with running(dsn, registry, substrate=server.address):
            moved = "SELECT bool_and(via = 'nats') FROM core.subscriptions WHERE retired_at IS NULL"
            await until(lambda: conn.fetchval(moved), what="moved")
            await publish_many(conn, "order.placed", 10)
            await until(lambda: conn.fetchval("SELECT count(*) = 10 FROM ledger"), what="the first handled")
        disk.sync()
        async with conn.transaction():
            await PUBLISHER.publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(10, 60)])
        async with running(dsn, HandlerRegistry(), substrate=server.address):
            await until(lambda: conn.fetchval(RELAYED), what="all confirmed")
        disk.cut(server)
        async with running(dsn, registry, substrate=server.address), Operator(dsn, actor="ann@example.com") as operator:
            await until(
                lambda: conn.fetchval("SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"), what="-"
            )
            lost = (await operator.relay.check("nats", until=datetime.now(UTC))).lost
            assert lost
            await operator.relay.again("nats", since=datetime(2026, 1, 1, tzinfo=UTC), reason="the power failed")
            await until(lambda: conn.fetchval("SELECT count(DISTINCT n) = 60 FROM ledger"), what="all handled")
            await drained(conn)
            assert not (await operator.relay.check("nats", until=datetime.now(UTC))).lost
    assert await effects(conn) == list(range(60))
