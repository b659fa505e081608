"""What a relay and takers do when the broker, the database or an event misbehaves."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Worker, WorkerSettings
from holdfast.brokers.engine import Answer, Confirmed, Outgoing, Refused, Unanswered
from tests.brokers.double import Broker
from tests.brokers.messages import outgoing
from tests.worker.support import PUBLISHER, Facts, effects, make_tables, publish_many, running, terminate, until

OPTIONS = {"substrate": "nats://double", "lease": 2.0, "poll_interval": 0.2}
QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, max_delay=0.05)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    double = Broker()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: double)
    return double


def registry_of(done: list[int], **options: object) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK, **options)  # type: ignore[arg-type]
    async def charge(event: EventEnvelope) -> None:
        done.append(event.payload["n"])

    return registry


async def moved(conn: asyncpg.Connection) -> None:
    query = "SELECT bool_and(via = 'nats') FROM core.subscriptions WHERE retired_at IS NULL"
    await until(lambda: conn.fetchval(query), what="the handlers have moved")


async def put(broker: Broker, **changes: object) -> None:
    """Give the broker a message that no relay has sent."""
    await until(lambda: broker.interests, within=10, what="somebody takes")
    [interest] = broker.interests.values()
    broker.put(outgoing(channel=interest.channel, **changes))


@pytest.mark.slow
async def test_outage_burns_no_attempt(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """While the broker is down events wait with their attempts, and it is not hammered (SCL-1)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        await publish_many(conn, "order.placed", 10)
        await until(lambda: broker.acknowledged == 10, what="events before the outage")
        done.clear()
        broker.sent.clear()
        broker.down = True
        await publish_many(conn, "order.placed", 1_000)
        opened = "SELECT opened_at IS NOT NULL FROM core.handler_flow WHERE handler_name = 'relay.nats'"
        await until(lambda: conn.fetchval(opened), what="the breaker is open")
        await asyncio.sleep(1.5)  # long enough for the first probe, which fails
        tries = broker.tries
        await asyncio.sleep(2.0)
        # Probes after 1, 2, 4 s, and a taker that backs off to 10 s.
        assert broker.tries - tries < 10
        waiting = await conn.fetchrow("SELECT count(*), max(attempts) FROM core.outbox WHERE settled_at IS NULL")
        assert waiting["count"] == 1_000
        assert waiting["max"] <= 1, "at most the one that probes"
        broker.down = False
        await until(lambda: len(done) == 1_000, what="all handled")
        await until(lambda: conn.fetchval("SELECT count(*) >= 1000 FROM core.event_handled"), what="the inbox")
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0
    assert len(broker.sent) == 1_000
    attempts = "SELECT max(attempts) FROM core.outbox WHERE handler_name = 'relay.nats'"
    assert await conn.fetchval(attempts) == 1


@pytest.mark.slow
async def test_broker_that_comes_and_goes_costs_no_event(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """What fails soon after a breaker has closed counts as attempts, and is no dead letter of the relay (SCL-1)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        # As an outage leaves it in which one source's event was confirmed before those of the other.
        distrust = (
            "UPDATE core.handler_flow SET resumed_at = clock_timestamp(), distrusted = '{shop}',"
            " distrusted_until = clock_timestamp() + interval '1 minute' WHERE handler_name = 'relay.nats'"
        )
        assert await conn.execute(distrust) == "UPDATE 1"
        broker.down = True
        async with conn.transaction():
            await PUBLISHER.publish(conn, "order.placed", {"n": 1})
            await conn.execute("UPDATE core.outbox SET attempts = 20")
        tried = "SELECT bool_and(attempts > 20) FROM core.outbox WHERE handler_name = 'relay.nats'"
        await until(lambda: conn.fetchval(tried), what="it was tried")
        failed = "SELECT count(*) FROM core.outbox WHERE last_error IS NOT NULL AND status = 'failed'"
        await until(lambda: conn.fetchval("SELECT bool_and(last_error IS NOT NULL) FROM core.outbox"), what="it failed")
        assert await conn.fetchval(failed) == 0
        broker.down = False
        await until(lambda: done == [1], what="it is handled")


async def test_what_the_broker_never_takes_fails_alone(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """A relay failure is told apart from a handler failure, and costs one event (SCL-1)."""
    done: list[int] = []

    def answer(event: Outgoing) -> Answer:
        return Refused("it is too large") if b'"n":7}' in event.body.replace(b" ", b"") else Confirmed()

    broker.answer = answer
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        await publish_many(conn, "order.placed", 20)
        await until(lambda: len(done) == 19, what="the others handled")
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), what="the dead letter")
    letter = await conn.fetchrow("SELECT * FROM core.failed")
    assert letter["handler_name"] == "relay.nats"
    assert letter["failure_reason"] == "retry_terminal"
    assert letter["error_signature"].startswith("relay:")
    assert letter["last_error"] == "it is too large"
    assert 7 not in done


async def test_what_is_no_event_is_a_dead_letter_whatever_it_contains(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """Its bytes are cut to what the database takes, and the broker is done with it (SCL-2)."""
    unreadable: list[tuple[bytes, dict[str, str]]] = [
        (b"\x01" * 100_000, {}),
        (b"\xff" * 300_000, {}),
        (b"no event", {"h": "a\x00b", "\x00": "n"}),
        (b"no event", {"big": "x" * 3_000_000, "h": "1"}),
        (b"no event", {f"h{n}": "\x01" * 100 for n in range(1_000)}),
    ]
    async with running(dsn, registry_of([]), Facts(), **OPTIONS):  # it requires that no settle is refused
        await moved(conn)
        for body, headers in unreadable:
            await put(broker, body=body, headers=headers)
        await until(lambda: broker.acknowledged == len(unreadable), within=10, what="all are acknowledged")
    letters = [json.loads(row["payload"]) for row in await conn.fetch("SELECT payload FROM core.failed")]
    assert sorted(letter["body"][:2] for letter in letters) == ["\x01\x01", "\\x", "no", "no", "no"]
    assert {"h": "a\\x00b", "\\x00": "n"} in [letter["headers"] for letter in letters]


async def test_an_event_of_another_type_than_it_was_sent_under(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """No handler gets what it has not subscribed to by a message that lies about its type or target (SCL-2)."""
    done: list[int] = []
    lies = [
        outgoing(event_type="payment.refund").body,
        outgoing(target="shipping").body,
        outgoing(event_type="holdfast.unreadable").body,
    ]
    async with running(dsn, registry_of(done), Facts(), **OPTIONS):
        await moved(conn)
        for body in lies:
            await put(broker, body=body)
        await publish_many(conn, "order.placed", 1)
        await until(lambda: broker.acknowledged == len(lies) + 1, within=10, what="all are acknowledged")
    assert done == [0]
    letters = await conn.fetch("SELECT event_type, last_error FROM core.failed")
    assert [letter["event_type"] for letter in letters] == ["holdfast.unreadable"] * len(lies)
    assert all("the one it was sent under" in letter["last_error"] for letter in letters)


async def test_an_event_of_others_that_nobody_routed_is_passed_over(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """A topic may have more than the handler is owed (SCL-2)."""
    done: list[int] = []
    broker.routed = False
    async with running(dsn, registry_of(done), Facts(), **OPTIONS):
        await moved(conn)
        await put(broker, body=outgoing(event_type="payment.refund").body)
        await until(lambda: broker.acknowledged == 1, within=10, what="it is acknowledged")
    assert not done
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_what_the_database_refuses_all_the_same_is_kept_in_short(
    dsn: str, conn: asyncpg.Connection, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message never comes again for ever because its dead letter is refused (SCL-2)."""
    monkeypatch.setattr("holdfast.worker.reading.kept", lambda _received: {"body": "\x00"})
    facts = Facts()
    async with Worker(dsn, registry_of([]), WorkerSettings(**OPTIONS), observers=(facts.append,)):  # type: ignore[arg-type]
        await moved(conn)
        for n in range(3):
            await put(broker, body=b"no event %d" % n)
        await until(lambda: broker.acknowledged == 3, within=10, what="the messages are acknowledged")
    letters = [json.loads(row["payload"]) for row in await conn.fetch("SELECT payload FROM core.failed")]
    beginnings = sorted(base64.b64decode(letter["beginning_base64"]) for letter in letters)
    assert beginnings == [b"no event 0", b"no event 1", b"no event 2"]
    assert {letter["size"] for letter in letters} == {10}
    assert len(facts.notices("settle_refused") + facts.notices("archive_refused")) == 1


async def test_what_the_broker_says_against_an_event_is_told(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """A channel does not stop without a word (SCL-1)."""
    facts = Facts()
    broker.answer = lambda _event: Unanswered("the stream has exhausted its ids", told=True)
    async with running(dsn, registry_of([]), facts, **OPTIONS):
        await moved(conn)
        await publish_many(conn, "order.placed", 3)
        await until(lambda: facts.notices("broker_unavailable"), within=10, what="the refusal is told")
        (notice,) = facts.notices("broker_unavailable")
        assert (notice.details["handler_name"], notice.details["error"]) == (
            "relay.nats",
            "the stream has exhausted its ids",
        )


@pytest.mark.slow
async def test_unanswered_rows_are_sent_again(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Confirmed rows are settled at once, whatever becomes of the others; no attempt is counted (SCL-1)."""
    done: list[int] = []
    asked: Counter[str] = Counter()

    def answer(event: Outgoing) -> Answer:
        asked[event.message_id] += 1
        first_tenth = b'"n":1' in event.body.replace(b" ", b"")
        return Unanswered("silence") if first_tenth and asked[event.message_id] < 3 else Confirmed()

    broker.answer = answer
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        await publish_many(conn, "order.placed", 100)
        await until(lambda: len(done) == 100, what="all handled")
    assert sorted(done) == list(range(100))
    assert max(asked.values()) == 3
    attempts = "SELECT max(attempts) FROM core.outbox WHERE handler_name = 'relay.nats'"
    assert await conn.fetchval(attempts) == 1


@pytest.mark.slow
async def test_doubles_and_lost_acknowledgements_have_one_effect(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """However often a broker delivers, an effect in the handler's transaction happens once (LSN-6)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    broker.doubles, broker.deaf = 2, True
    async with (
        running(dsn, registry, **{**OPTIONS, "lease": 1.0}),
        running(dsn, registry, **{**OPTIONS, "lease": 1.0}),
    ):
        await moved(conn)
        await publish_many(conn, "order.placed", 100)
        await until(lambda: broker.acknowledged >= 500, what="everything delivered several times")
        broker.deaf = False
        await until(lambda: not any(broker.consumers.values()), what="the broker is empty")
    assert await effects(conn) == list(range(100))


async def test_nothing_is_taken_while_the_database_is_away(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Connections that are cut lose no message, and no message is acknowledged before it is in the inbox (SCL-2)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        for _ in range(5):
            await publish_many(conn, "order.placed", 50)
            await terminate(conn)
            await asyncio.sleep(0.1)
        await until(lambda: conn.fetchval("SELECT count(*) = 250 FROM core.event_handled"), what="all in the inbox")
        await until(lambda: not any(broker.consumers.values()), what="the broker is empty")
    assert broker.acknowledged >= 250


async def test_redelivered_message_goes_through_the_lane(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """A message that a worker took and never settled is handled from a row, where attempts are counted (SCL-2)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS) as worker:
        await moved(conn)
        for stored in broker.consumers.values():
            assert not stored
        broker_put = broker.put

        def taken_before(event: Outgoing) -> None:
            broker_put(event)
            for some in broker.consumers.values():
                for each in some:
                    each.deliveries = 1  # a worker that died had it

        broker.put = taken_before  # type: ignore[method-assign]
        await publish_many(conn, "order.placed", 5)
        await until(lambda: len(done) == 5, what="handled")
        await until(lambda: worker.in_flight == 0, what="settled")
    rows = "SELECT count(*) FROM core.outbox WHERE handler_name = 'billing.charge_card' AND status = 'delivered'"
    assert await conn.fetchval(rows) == 5


async def test_worker_starts_without_its_broker(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Until the broker answers, handlers get their events from the outbox as before (SCL-2)."""
    done: list[int] = []
    facts = Facts()
    broker.down = True
    async with running(dsn, registry_of(done), facts, **OPTIONS):
        await publish_many(conn, "order.placed", 10)
        await until(lambda: len(done) == 10, what="handled from the outbox")
        notice = (await until(lambda: facts.notices("broker_unavailable"), what="the broker is missed"))[0]
        assert notice.details["address"] == "nats://double" and "holdfast relay show" in str(notice.details["remedy"])
        broker.down = False
        await moved(conn)
        await publish_many(conn, "order.placed", 10)
        await until(lambda: len(done) == 20, what="handled from the broker")
    assert len(broker.sent) == 10


async def test_lost_messages_are_found_and_repaired(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """An event that the broker acknowledged and lost comes back (SCL-1)."""
    done: list[int] = []
    broker.keep = lambda event: b'"n":3}' not in event.body.replace(b" ", b"")
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        await publish_many(conn, "order.placed", 5)
        await until(lambda: len(done) == 4, what="the others handled")
        await until(lambda: conn.fetchval("SELECT count(*) = 4 FROM core.event_handled"), what="the inbox")
        repaired = "SELECT core.relay_repair('nats', '-infinity', 'infinity', 100, 'ann@example.com')"
        assert await conn.fetchval(repaired) == 1
        await until(lambda: sorted(done) == list(range(5)), what="the lost one handled")


async def test_relay_again_reaches_the_broker_as_a_new_message(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """What is sent again within the broker's memory is no duplicate to it, and none is handled twice (SCL-1)."""
    done: list[int] = []
    async with running(dsn, registry_of(done), **OPTIONS):
        await moved(conn)
        [event] = await publish_many(conn, "order.placed", 1)
        await until(lambda: done and conn.fetchval("SELECT count(*) = 1 FROM core.event_handled"), what="handled")
        again = "SELECT core.relay_again('nats', '-infinity', 'infinity', NULL, NULL, 100, 'ann@example.com')"
        assert await conn.fetchval(again) == 1
        await until(lambda: len(broker.sent) == 2, what="sent again")
        await until(lambda: broker.acknowledged == 2, what="acknowledged again")
    assert [each.message_id.rpartition(":")[0] for each in broker.sent] == [f"{event}:0", f"{event}:1"]
    assert done == [0]
