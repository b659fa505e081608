"""What operators see of brokers and decide about them: moving handlers, checking, repairing, sending again."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import Operator, Refused
from servers.nats import NatsServer
from servers.processes import free_port
from servers.valkey import ValkeyServer
from tests.brokers.double import Broker
from tests.worker.support import PUBLISHER, Facts, drained, effects, make_tables, publish_many, running, until

HANDLER = "billing.charge_card"
RELAYED = "SELECT count(*) = 1 FROM core.outbox WHERE handler_name = 'relay.nats' AND status = 'delivered'"
OPTIONS: dict[str, Any] = {"substrate": "nats://double", "lease": 2.0, "poll_interval": 0.2}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    double = Broker()
    for module in ("holdfast.worker.substrate", "holdfast.cli.handlers", "holdfast.cli.relay"):
        monkeypatch.setattr(f"{module}.engine_of", lambda _address: double)
    return double


def registry_of(done: list[int]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        done.append(event.payload["n"])

    return registry


async def holdfast(dsn: str, *words: str) -> tuple[int, str]:
    """Run a command as a person does, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from holdfast.cli import main; main()", *words, "--dsn", dsn),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def via_of(conn: asyncpg.Connection) -> str | None:
    found: str | None = await conn.fetchval("SELECT via FROM core.subscriptions WHERE handler_name = $1", HANDLER)
    return found


async def test_operator_decides_and_workers_follow(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """What an operator has decided outlives restarts of workers that are started with a broker (SCL-2)."""
    done: list[int] = []
    async with Operator(dsn, actor="ann@example.com") as operator, running(dsn, registry_of(done), **OPTIONS):
        await until(lambda: _is(conn, "nats"), what="moved by the worker")
        [carried] = await operator.relay.show()
        assert (carried.via, carried.decided_by, carried.draining) == ("nats", None, None)
        await until(lambda: _seen(operator), what="the worker is seen")
        dry = await operator.handlers.via([HANDLER], "outbox", dry_run=True)
        assert (dry.changed, await via_of(conn)) == (1, "nats")
        with pytest.raises(Refused):
            await operator.handlers.drained(HANDLER, "nats")
        assert (await operator.handlers.via([HANDLER], "outbox", reason="back")).changed == 1
        assert (await operator.handlers.via([HANDLER], "outbox")).changed == 0
        [carried] = await operator.relay.show()
        assert (carried.via, carried.decided_by, carried.draining) == ("outbox", "ann@example.com", "nats")
        await publish_many(conn, "order.placed", 5)
        await until(lambda: len(done) == 5, what="handled from the outbox")
        assert not broker.sent
        assert await operator.handlers.drained(HANDLER, "nats")
        assert not await operator.handlers.drained(HANDLER, "nats")
        assert await operator.relay.show() == []
    async with running(dsn, registry_of(done), **OPTIONS):
        await publish_many(conn, "order.placed", 5)
        await until(lambda: len(done) == 10, what="handled from the outbox again")
    assert await via_of(conn) == "outbox" and not broker.sent


async def test_what_cannot_be_meant_is_refused(dsn: str, conn: asyncpg.Connection) -> None:
    async with Operator(dsn, actor="ann@example.com") as operator:
        with pytest.raises(ConfigurationError):
            await operator.handlers.via([HANDLER], "pigeons")
        with pytest.raises(NotFound):
            await operator.handlers.via(["nobody.there"], "nats")
        with pytest.raises(NotFound, match=r"nobody\.there is unknown"):
            await operator.handlers.drained("nobody.there", "nats")
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0
    code, out = await holdfast(dsn, "handlers", "drained", "nats://127.0.0.1:1", "nobody.there", "--yes")
    assert code == 2 and "nobody.there is unknown" in out, out
    async with Operator(dsn, actor="ann@example.com") as operator:
        with pytest.raises(ConfigurationError):
            await operator.relay.check("pigeons")
        with pytest.raises(ConfigurationError):
            now = datetime.now(UTC)
            await operator.relay.check("nats", since=now, until=now - timedelta(hours=1))


@pytest.mark.slow
async def test_a_broker_that_refuses_the_login_is_not_called_away(dsn: str, tmp_path: Path) -> None:
    """A changed password is told from a server that is gone, with what to do about it (SCL-4, OPS-1)."""
    login = "authorization { user: app, password: secret }"
    with NatsServer(tmp_path / "nats", login) as nats, ValkeyServer(tmp_path / "valkey") as valkey:
        async with valkey.client() as client:
            await client.config_set("requirepass", "secret")
        for address in (nats.address, valkey.address):
            wrong = address.replace("://", "://app:wrong@" if address == nats.address else "://:wrong@")
            code, out = await holdfast(dsn, "relay", "show", "--substrate", wrong)
            assert code == 1 and "check the user and the password in its address" in out, out
            assert "can be reached" not in out and "wrong" not in out
        gone = f"nats://127.0.0.1:{free_port()}"
        code, out = await holdfast(dsn, "relay", "show", "--substrate", gone)
        assert code == 1 and f"no connection to {gone.removeprefix('nats://')}: Connection refused" in out
        assert "check that the broker runs" in out


@pytest.mark.slow
async def test_a_check_says_how_much_it_has_looked_at(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Nothing in the range is not nothing lost; a broker that was never used is refused (SCL-1)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS):
        await until(lambda: _is(conn, "nats"), what="moved")
        await publish_many(conn, "order.placed", 3)
        await until(lambda: len(done) == 3, what="handled")
        await drained(conn)
    code, out = await holdfast(dsn, "relay", "check", "nats", "--since", "2h")
    assert code == 0 and "0 relayed events before" in out and "--until now looks at the rest" in out, out
    code, out = await holdfast(dsn, "relay", "check", "nats", "--since", "2h", "--until", "now")
    assert code == 0 and "nothing that nats has confirmed is missing: 3 relayed events before" in out, out
    code, out = await holdfast(dsn, "relay", "check", "kafka", "--since", "2h")
    assert code == 2 and "kafka has never had an event from this database" in out, out


async def test_moving_away_from_a_broker_that_is_gone_tells_what_stays(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """Only new events go by the outbox; those that the relay is owed wait for the broker (SCL-2)."""
    owed = "SELECT count(*) = 2 FROM core.outbox WHERE handler_name = 'relay.nats' AND status = 'pending'"
    async with running(dsn, registry_of([]), **OPTIONS):
        await until(lambda: _is(conn, "nats"), what="moved")
        broker.down = True
        await publish_many(conn, "order.placed", 2)
        await until(lambda: conn.fetchval(owed), what="owed to the relay")
    code, out = await holdfast(dsn, "handlers", "via", "outbox", HANDLER, "--yes")
    assert code == 0 and "1 handler moved to outbox" in out, out
    assert "2 events wait for nats and go when it is back" in out, out


async def test_doctor_misses_relays_and_takers(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """A broker that nobody sends to, or takes from, is a problem with a remedy (OPS-5)."""
    async with running(dsn, registry_of([]), **OPTIONS):
        await until(lambda: _is(conn, "nats"), what="moved")
    async with Operator(dsn, actor="ann@example.com") as operator:
        codes = {finding.code for finding in (await operator.doctor("health")).findings}
        assert "broker-unrelayed" in codes
        facts = Facts()
        async with running(dsn, registry_of([]), facts):  # without the broker
            await publish_many(conn, "order.placed", 1)
            await until(lambda: _unserved(operator), what="the relay is missed")
            remedy = await _unserved(operator)
        assert remedy is not None and "--substrate" in remedy and "cancel" not in remedy
        assert "an empty server takes what waits" in remedy  # to move the handlers is not enough
        [starved] = facts.notices("handler_starved")
        assert starved.details["cause"] == f"{HANDLER} is carried by nats, and this worker does not take from there"
        assert f"handlers via outbox {HANDLER}" in str(starved.details["remedy"])
    async with (
        running(dsn, HandlerRegistry(), **OPTIONS),
        Operator(dsn, actor="ann@example.com") as operator,
    ):

        async def found() -> bool:
            codes = {finding.code for finding in (await operator.doctor("health")).findings}
            return "broker-untaken" in codes and "broker-unrelayed" not in codes

        await until(found, what="a relay without a taker is seen")


async def test_lost_events_are_found_repaired_and_sent_again(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """By the verbs of an operator, with a line in the audit for each (SCL-1)."""
    done: list[int] = []
    broker.keep = lambda event: b'"n":3}' not in event.body.replace(b" ", b"")
    span = {"since": datetime.now(UTC) - timedelta(hours=1), "until": datetime.now(UTC) + timedelta(hours=1)}
    async with Operator(dsn, actor="ann@example.com") as operator, running(dsn, registry_of(done), **OPTIONS):
        await until(lambda: _is(conn, "nats"), what="moved")
        ids = await publish_many(conn, "order.placed", 5)
        await until(lambda: conn.fetchval("SELECT count(*) = 4 FROM core.event_handled"), what="the others handled")
        found = await operator.relay.check("nats", **span)
        assert [(each.event_id, each.handler_name) for each in found.lost] == [(ids[3], HANDLER)]
        assert (await operator.relay.repair("nats", **span, dry_run=True)).count == 1
        assert len((await operator.relay.check("nats", **span)).lost) == 1
        assert (await operator.relay.repair("nats", **span, reason="power cut")).count == 1
        assert (await operator.relay.check("nats", **span)).lost == []
        await until(lambda: sorted(done) == list(range(5)), what="the lost one handled")
        assert (await operator.relay.again("nats", **span, event_type="order.paid")).count == 0
        assert (await operator.relay.again("nats", **span)).count == 5
        await until(lambda: len(broker.sent) == 10, what="sent again")
    assert sorted(done) == list(range(5))
    actions = [row[0] for row in await conn.fetch("SELECT action FROM core.audit ORDER BY id")]
    assert actions == ["handler.via", "relay.repair", "relay.again", "relay.again"]


async def test_relay_alone_sends_what_others_want(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """A service whose events are handled elsewhere needs no handler of its own; order per key is kept (SCL-1)."""
    async with running(dsn, HandlerRegistry(), **OPTIONS, relayed=("order.*",)):
        wanted = "SELECT count(*) = 1 FROM core.subscriptions WHERE handler_name = 'relay.nats' AND retired_at IS NULL"
        await until(lambda: conn.fetchval(wanted), what="the relay subscribes")
        await publish_many(conn, "order.placed", 20)
        await publish_many(conn, "order.moved", 20, ordering_key="k")
        await until(lambda: len(broker.sent) == 40, what="all sent")
        await drained(conn)
    keyed = [event.body for event in broker.sent if event.key == "k"]
    assert keyed == sorted(keyed, key=lambda body: int(body.rpartition(b'"n":')[2].strip(b" }")))
    assert len(keyed) == 20


@pytest.mark.slow
async def test_what_a_broker_forgot_comes_back_by_relaying_again(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """A Valkey that keeps nothing on disk confirms events, is killed, and handlers get each of them once (SCL-1)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=HANDLER)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    confirmed = "SELECT count(*) = 50 FROM core.outbox WHERE handler_name = 'relay.redis' AND status = 'delivered'"
    with ValkeyServer(tmp_path / "valkey", "--appendonly", "no") as server:
        async with running(dsn, registry, substrate=server.address):
            await until(lambda: _is(conn, "redis"), what="moved")
            await publish_many(conn, "order.placed", 10)
            await until(lambda: conn.fetchval("SELECT count(*) = 10 FROM ledger"), what="the first handled")
        async with running(dsn, HandlerRegistry(), substrate=server.address):
            events = [NewEvent("order.placed", {"n": n}) for n in range(10, 50)]
            async with conn.transaction():
                await PUBLISHER.publish_many(conn, events)
            await until(lambda: conn.fetchval(confirmed), what="the broker has confirmed all of them")
        server.restart()
        async with running(dsn, registry, substrate=server.address), Operator(dsn, actor="ann@example.com") as operator:
            check = await operator.relay.check("redis", until=datetime.now(UTC))
            assert len(check.lost) == 40
            code, out = await holdfast(dsn, "relay", "again", "redis", "--since", "1h", "--yes", "--reason", "killed")
            assert code == 0, out
            await until(lambda: conn.fetchval("SELECT count(DISTINCT n) = 50 FROM ledger"), what="all handled")
            await drained(conn)
            assert not (await operator.relay.check("redis", until=datetime.now(UTC))).lost
    assert await effects(conn) == list(range(50))


@pytest.mark.slow
async def test_moving_a_running_service_there_and_back(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """By the guide's commands, under load, nothing is lost and no effect is doubled (SCL-2)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=HANDLER)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    async with Operator(dsn, actor="ann@example.com") as operator, running(dsn, registry):
        await until(lambda: operator.handlers.known(HANDLER), what="subscribed")
        await operator.handlers.via([HANDLER], "outbox", reason="nothing is to move by itself")
    publishing = asyncio.Event()
    published = 0

    async def load() -> None:
        nonlocal published
        connection = await asyncpg.connect(dsn)
        try:
            while not publishing.is_set():
                async with connection.transaction():
                    for _ in range(10):
                        await PUBLISHER.publish(connection, "order.placed", {"n": published})
                        published += 1
                await asyncio.sleep(0.01)
        finally:
            await connection.close()

    sent = "SELECT count(*) FROM core.outbox WHERE handler_name = 'relay.nats'"
    with NatsServer(tmp_path / "nats") as server:
        loading = asyncio.create_task(load())
        async with running(dsn, registry), running(dsn, registry, substrate=server.address):
            await until(lambda: conn.fetchval("SELECT count(*) > 50 FROM ledger"), what="handled from the outbox")
            code, out = await holdfast(dsn, "handlers", "via", server.address, HANDLER, "--yes", "--reason", "there")
            assert code == 0, out
            await until(lambda: conn.fetchval(f"SELECT ({sent}) > 100"), what="relayed")
            code, out = await holdfast(dsn, "relay", "show", "--substrate", server.address)
            assert code == 0 and HANDLER in out and "nats" in out, out
            code, out = await holdfast(dsn, "handlers", "via", "outbox", HANDLER, "--yes", "--reason", "back")
            assert code == 0, out
            relayed = await conn.fetchval(sent)
            handled = await conn.fetchval("SELECT count(*) FROM ledger")
            await until(lambda: conn.fetchval(f"SELECT count(*) > {handled + 100} FROM ledger"), what="handled again")
            publishing.set()
            await loading
            await drained(conn)
            everything = f"SELECT count(DISTINCT n) = {published} FROM ledger"
            await until(lambda: conn.fetchval(everything), what="every event handled")

            async def is_drained() -> bool:
                code, _ = await holdfast(dsn, "handlers", "drained", server.address, HANDLER, "--yes")
                return code == 0

            await until(is_drained, what="nothing is left at the broker")
            code, out = await holdfast(dsn, "relay", "show")
            assert "no handler" in out, out
    assert await effects(conn) == list(range(published))
    assert relayed > 100


@pytest.mark.slow
async def test_a_handler_that_runs_once_in_the_fleet_is_shown_and_drained(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """Its consumer at NATS is another one than without the limit, and commands find it all the same (SCL-2)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=HANDLER, fleet_concurrency=1)
    async def charge(event: EventEnvelope) -> None: ...

    with NatsServer(tmp_path / "nats") as server:
        async with running(dsn, registry, substrate=server.address):
            await until(lambda: _is(conn, "nats"), what="behind the broker")
        await publish_many(conn, "order.placed", 1)
        # A relay alone: nobody takes what it sends.
        async with running(dsn, HandlerRegistry(), substrate=server.address):
            await until(lambda: conn.fetchval(RELAYED), what="relayed")
        code, out = await holdfast(dsn, "relay", "show", "--substrate", server.address, "--json")
        assert code == 0, out
        (backlog,) = json.loads(out[out.index("{") :])["broker"]["backlogs"]  # behind what a log says
        assert (code, backlog["handler_name"], backlog["waiting"]) == (0, HANDLER, 1), out
        code, out = await holdfast(dsn, "handlers", "via", "outbox", HANDLER, "--yes", "--reason", "back")
        assert code == 0, out
        code, out = await holdfast(dsn, "handlers", "drained", server.address, HANDLER, "--yes")
        assert code != 0 and "1 message left" in out, out


async def test_a_handler_is_not_drained_while_the_relay_has_events_for_it(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """Its consumer stays until what was published before the move is sent and taken (SCL-2)."""
    done: list[int] = []

    async def note(event: EventEnvelope) -> None: ...

    waiting = "SELECT count(*) = 2 FROM core.outbox WHERE route = 'relay.nats' AND settled_at IS NULL"
    with NatsServer(tmp_path / "nats") as server:
        command = ("handlers", "drained", server.address, HANDLER, "--yes")
        async with running(dsn, registry_of(done), substrate=server.address):
            await until(lambda: _is(conn, "nats"), what="behind the broker")
        await publish_many(conn, "order.placed", 2)
        # Somebody starts the workers without the broker, and another handler takes the events from the outbox: what is
        # for the first one is owed to a relay that does not run.
        beside = registry_of(done)
        beside.add("ledger.note", ("order.placed",), note)
        async with running(dsn, beside):
            await until(lambda: conn.fetchval(waiting), what="owed to the relay")
        async with Operator(dsn, actor="ann@example.com") as operator:
            assert (await operator.handlers.via([HANDLER], "outbox")).changed == 1
            with pytest.raises(Refused, match=f"2 events wait to be sent to nats for {HANDLER}"):
                await operator.handlers.drained(HANDLER, "nats")
        code, out = await holdfast(dsn, *command)
        assert code == 1 and "2 events wait to be sent to nats" in out and "--substrate" in out, out
        async with running(dsn, registry_of(done), substrate=server.address):
            await until(lambda: len(done) == 2, what="taken from the broker")

            async def is_drained() -> bool:
                return (await holdfast(dsn, *command))[0] == 0

            await until(is_drained, what="nothing is left")
    assert sorted(done) == [0, 1]


async def _unserved(operator: Operator) -> str | None:
    found = (await operator.doctor("health")).findings
    return next((each.remedy for each in found if (each.code, each.object) == ("handler-unserved", "relay.nats")), None)


async def _is(conn: asyncpg.Connection, via: str) -> bool:
    return await via_of(conn) == via


async def _seen(operator: Operator) -> bool:
    return bool((await operator.relay.show())[0].taken_by)
