"""What producers and writers of a broker can put in its way: neither delays nor names events of others."""

from __future__ import annotations

import json
from dataclasses import replace

import asyncpg
import pytest

from holdfast import EventEnvelope, Operator
from tests.brokers.double import Broker
from tests.brokers.messages import outgoing
from tests.brokers.test_signing import CHANNEL, OPTIONS, moved, registry_of
from tests.worker.support import Facts, publish, running, until

pytestmark = pytest.mark.trust

INSERT = (
    "INSERT INTO core.outbox (event_type, source, payload, headers) VALUES ('order.placed', 'evil', '{}', $1::jsonb)"
)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    double = Broker()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: double)
    return double


@pytest.mark.parametrize("headers", [f'{{"a": {"[" * 250}1{"]" * 250}}}', '{"a": 1e5000}'])
async def test_headers_that_nobody_can_read_cost_their_own_event(
    dsn: str, conn: asyncpg.Connection, broker: Broker, headers: str
) -> None:
    """They fail at once and alone, and neither halve the relay's batches nor open its breaker (SEC-1)."""
    got: list[EventEnvelope] = []
    facts = Facts()
    async with running(dsn, registry_of(got), facts, **OPTIONS):
        await moved(conn, broker)
        async with conn.transaction():
            for number in range(5):
                await conn.execute(INSERT, headers)
                await publish(conn, "order.placed", {"number": number})
        await until(lambda: len(got) == 5, what="the events of others are handled")
        query = "SELECT count(*) = 5 FROM core.failed WHERE handler_name = 'relay.nats' AND attempts = 1"
        await until(lambda: conn.fetchval(query), what="the dead letters")
    assert not facts.notices("batch_halved")
    assert await conn.fetchval("SELECT bool_and(resumed_at IS NULL AND distrusted = '{}') FROM core.handler_flow")


async def test_a_foreign_event_has_no_source_of_this_database(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """Who may write to a broker cannot send as a source that belongs to a role, nor take the turns of one (SEC-1)."""
    got: list[EventEnvelope] = []
    await conn.execute("INSERT INTO core.sources (source, role_name) VALUES ('shop', current_user)")
    lie = {"specversion": "1.0", "id": "1", "source": "shop", "type": "order.placed", "data": {"bad": True}}
    async with running(dsn, registry_of(got), **OPTIONS):
        await moved(conn, broker)
        broker.put(replace(outgoing(), channel=CHANNEL, body=json.dumps(lie).encode()))
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), what="the dead letter")
        await publish(conn, "order.placed", {"number": 1})
        await until(lambda: got[-1].payload == {"number": 1}, what="the real one")
    assert {each.source for each in got} == {"foreign:shop", "shop"}
    assert [row["source"] for row in await conn.fetch("SELECT source FROM core.failed")] == ["foreign:shop"]


MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("waiting", "weaknesses"),
    [(0, '["x"]'), (0, "[[]]"), (0, "[{}]"), (0, '[{"subject": 1, "problem": "a", "remedy": "b"}]'), (MOST, "[]")],
)
async def test_a_report_cannot_hide_the_state_from_operators(
    dsn: str, conn: asyncpg.Connection, waiting: int, weaknesses: str
) -> None:
    """What a worker says of a broker is refused where nobody could read it, or add it up (SEC-1)."""
    await conn.execute("SELECT core.subscribe('billing', 'billing.charge_card', ARRAY['order.placed'])")
    await conn.execute("UPDATE core.subscriptions SET via = 'nats'")
    handlers = ["", "billing.charge_card"]
    for channel in ("hot", "cold"):
        await conn.execute("SELECT core.broker_report_due('nats', $1, $2, interval '1 second')", channel, handlers)
    report = "SELECT core.broker_report('nats', $1, $2, ARRAY[$3, $3]::bigint[], '{0,0}', '{0,0}', $4::jsonb)"
    for channel in ("hot", "cold"):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await conn.execute(report, channel, handlers, waiting, weaknesses)
    async with Operator(dsn, actor="ann@example.com") as operator:
        assert (await operator.status()).weaknesses == ()
        weak = '[{"subject": "stream", "problem": "is kept in memory", "remedy": "use a disk"}]'
        await conn.execute(report, "hot", handlers, 7, weak)
        assert [each.subject for each in (await operator.status()).weaknesses] == ["stream"]


async def test_a_refused_message_reaches_no_handler_by_a_replay(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """An operator who replays all dead letters of a handler does not run it with what somebody has forged (SEC-1)."""
    got: list[EventEnvelope] = []
    failed = "SELECT id FROM core.failed WHERE event_type = 'holdfast.unreadable'"
    async with running(dsn, registry_of(got), **OPTIONS):
        await moved(conn, broker)
        broker.put(replace(outgoing(1), channel=CHANNEL))
        await until(lambda: conn.fetchval(failed), what="the dead letter")
        async with Operator(dsn, actor="ann@example.com") as operator:
            assert (await operator.failed.replay([await conn.fetchval(failed)])).count == 1
        await until(lambda: conn.fetchval(f"{failed} AND last_error LIKE '%it is no event%'"), what="it failed again")
    assert got == []
