"""What a producer says about reactions says nothing about the events and the handlers of others (SEC-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.ids import uuid7
from holdfast.observing import DirectObservers
from holdfast.telemetry import Fact, Notice
from holdfast.worker.outage import Outages
from tests.logins import PRODUCER, Logins
from tests.outbox import EVENT, HANDLER, LANE, Outbox, connect
from tests.worker.support import drained, running

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

OTHER = "mail.thank"


@pytest.fixture
async def outbox(dsn: str, logins: Logins) -> AsyncIterator[Outbox]:
    """Two handlers want the orders of the shop, whose login owns its source."""
    connection = await connect(dsn)
    outbox = Outbox(connection)
    for name in (HANDLER, OTHER):
        await outbox.subscribe(name, EVENT)
    await connection.execute("INSERT INTO core.sources VALUES ('shop', $1)", logins.names[PRODUCER])
    yield outbox
    await connection.close()


@pytest.fixture
async def bank(logins: Logins) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(logins.dsn_of(logins.names["bank"]))
    yield connection
    await connection.close()


def envelope(event: UUID, source: str = "bank", event_type: str = EVENT) -> str:
    return json.dumps(
        {
            "event_id": str(event),
            "event_type": event_type,
            "event_version": 1,
            "source": source,
            "payload": {"n": 666},
            "occurred_at": "2026-01-01T00:00:00Z",
            "idempotency_key": "k",
        }
    )


async def settle(
    connection: asyncpg.Connection, event: str, *, done: tuple[str, ...] = (), failed: tuple[str, ...] = ()
) -> list[UUID]:
    said = [[word] * len(failed) for word in ("rejected", "no", "signature")]
    call = "SELECT core.reaction_settle($1, $2, $3, $4, $5, $6, false)"
    return await connection.fetchval(call, event, list(done), list(failed), *said)


# --- events of others ---


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_an_old_snapshot_proves_nothing(outbox: Outbox, bank: asyncpg.Connection, isolation: str) -> None:
    """A transaction that began before the event was published does not see whose it is."""
    transaction = bank.transaction(isolation=isolation)
    await transaction.start()
    await bank.fetchval("SELECT count(*) FROM core.my_outbox")
    event = await outbox.insert()
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="not in the outbox as this transaction sees"):
        await settle(bank, envelope(event), failed=(HANDLER, OTHER))
    await transaction.rollback()
    assert await outbox.split(LANE) == 1
    assert await delivered_to(outbox, event) == {HANDLER: "shop", OTHER: "shop"}


async def test_what_is_said_of_an_unknown_event_takes_no_id_of_its_siblings(
    dsn: str, outbox: Outbox, bank: asyncpg.Connection
) -> None:
    """Nor is it told one: the event is published later, and every handler gets it from its source."""
    event = uuid7()
    told = await settle(bank, envelope(event), failed=(HANDLER, OTHER))
    assert told == await settle(bank, envelope(event), failed=(HANDLER, OTHER)), "sent again, it is said once"
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 2
    secret = "SELECT core.sibling_id($1, $2, core.secret())"
    assert not {await outbox.value(secret, event, name) for name in (HANDLER, OTHER)} & set(told)
    await outbox.insert(id=event)
    handled: list[tuple[str, str]] = []
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        handled.append((HANDLER, event.source))

    @registry.handler(EVENT, name=OTHER)
    async def thank(event: EventEnvelope) -> None:
        handled.append((OTHER, event.source))

    async with running(dsn, registry):
        await drained(outbox.connection)
    assert sorted(handled) == [(HANDLER, "shop"), (OTHER, "shop")]


async def test_a_taken_id_takes_no_delivery(outbox: Outbox) -> None:
    """Whoever has learned the secret: the split looks at what stands under the id, and goes around it."""
    event = await outbox.insert()
    squat = """INSERT INTO core.outbox (id, origin_id, handler_name, event_type, source, payload)
               VALUES (core.sibling_id($1, $2, core.secret()), $1, $2, $3, 'bank', '{}')"""
    await outbox.connection.execute(squat, event, HANDLER, EVENT)
    assert await outbox.split(LANE) == 1
    rows = await outbox.connection.fetch(
        "SELECT handler_name, source FROM core.outbox WHERE origin_id = $1 ORDER BY 1, 2", event
    )
    assert [tuple(row) for row in rows] == [(HANDLER, "bank"), (HANDLER, "shop"), (OTHER, "shop")]
    assert len(await outbox.connection.fetch("SELECT core.event_rows($1)", event)) == 4


async def test_an_open_reaction_holds_up_no_other_split(outbox: Outbox, bank: asyncpg.Connection) -> None:
    """Siblings that stand uncommitted are not waited for: their own event is split later, the others now."""
    own = await outbox.insert(source="bank", idempotency_key="k")
    transaction = bank.transaction()
    await transaction.start()
    await settle(bank, envelope(own), failed=(HANDLER,))
    other = await outbox.insert()
    await outbox.connection.execute("SET lock_timeout = '1s'")
    assert await outbox.split(LANE) == 1
    assert await delivered_to(outbox, other) == {HANDLER: "shop", OTHER: "shop"}
    await transaction.commit()
    assert await outbox.split(LANE) == 1
    assert await delivered_to(outbox, own) == {HANDLER: "bank", OTHER: "bank"}


# --- handlers of others ---


async def test_a_line_that_a_producer_names_is_no_wish_of_the_handler(outbox: Outbox, bank: asyncpg.Connection) -> None:
    """No dead letter of a type that no worker has subscribed the handler to, whatever was said of it before."""
    for event_type in ("*", "bank.*", "bank made", "a/b"):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await settle(bank, envelope(uuid7(), event_type=event_type), done=(HANDLER,))
    event = envelope(uuid7(), event_type="bank.made")
    assert await settle(bank, event, done=("bank.react",)) == []
    await outbox.connection.execute(  # written by hand
        """INSERT INTO core.subscriptions (domain_context, handler_name, event_type, retired_at)
           VALUES ('billing', $1, '*', now())""",
        HANDLER,
    )
    for said in ("failed", "done"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=r"has never wanted bank\.made"):
            await settle(bank, event, **{said: (HANDLER,)})
    assert len(await settle(bank, event, failed=("bank.react",))) == 1
    lines = await outbox.connection.fetch("SELECT handler_name FROM core.subscriptions WHERE named_by IS NOT NULL")
    assert [line["handler_name"] for line in lines] == ["bank.react"]
    assert await outbox.value("SELECT array_agg(handler_name) FROM core.failed") == ["bank.react"]


async def test_nothing_is_said_of_a_key_that_an_event_of_others_will_have(
    outbox: Outbox, bank: asyncpg.Connection
) -> None:
    """A slot of a schedule is not silenced in advance, nor is a handler by an event that it does not want."""
    slot = "schedule:reports.tick:2030-01-01T12:00:00Z"
    enter = "SELECT core.reaction_enter($1, $2, 'bank', $3, interval '10 seconds')"
    for key, event_type, match in ((slot, EVENT, "belong to schedules"), ("k", "bank.made", "has never wanted")):
        event = await outbox.insert(source="bank", event_type=event_type, idempotency_key=key)
        said = json.loads(envelope(event, event_type=event_type)) | {"idempotency_key": key}
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=match):
            await settle(bank, json.dumps(said), done=(HANDLER,))
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=match):
            await bank.fetchval(enter, HANDLER, event, key)
    assert await outbox.value("SELECT count(*) FROM core.event_handled") == 0


async def test_one_producer_does_not_use_up_the_subscriptions_of_others(
    outbox: Outbox, logins: Logins, bank: asyncpg.Connection
) -> None:
    """What is kept of reactions is counted for each login."""
    for n in range(20):
        handlers = tuple(f"bank.react{n}_{m}" for m in range(1000))
        await settle(bank, envelope(uuid7(), event_type=f"bank.made{n}"), done=handlers)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="login_bank have 20000 subscriptions"):
        await settle(bank, envelope(uuid7(), event_type="bank.more"), done=("bank.react",))
    assert await settle(bank, envelope(uuid7(), event_type="bank.made0"), done=("bank.react0_0",)) == []
    shop = await asyncpg.connect(logins.dsn_of(logins.names[PRODUCER]))
    try:
        assert len(await settle(shop, envelope(uuid7(), "shop", "shop.paid"), failed=("shop.react",))) == 1
    finally:
        await shop.close()


async def delivered_to(outbox: Outbox, event: UUID) -> dict[str, str]:
    rows = await outbox.connection.fetch("SELECT handler_name, source FROM core.outbox WHERE origin_id = $1", event)
    return {row["handler_name"]: row["source"] for row in rows}


# --- workers that start ---


async def test_what_a_producer_has_named_keeps_no_handler_from_starting(
    outbox: Outbox, bank: asyncpg.Connection
) -> None:
    """Its open transaction has a line of the same name, and no worker waits for it (SEC-1)."""
    transaction = bank.transaction()
    await transaction.start()
    await settle(bank, envelope(uuid7(), event_type="bank.made"), done=("new.handler",))
    async with asyncio.timeout(10):
        await outbox.subscribe("new.handler", "bank.made")
    await transaction.commit()
    assert await settle(bank, envelope(uuid7(), event_type="bank.made"), done=("new.handler",)) == []
    lines = "SELECT line_of <> '', retired_at IS NULL FROM core.subscriptions WHERE handler_name = $1 ORDER BY 1"
    assert [tuple(line) for line in await outbox.connection.fetch(lines, "new.handler")] == [
        (False, True),
        (True, False),
    ]
    assert await outbox.value("SELECT count(*) FROM core.subscriptions_read() WHERE handler_name = 'new.handler'") == 1


async def test_who_keeps_handlers_from_being_subscribed_is_named(outbox: Outbox, dsn: str) -> None:
    """By its pid, instead of a database that does not answer (SEC-1)."""
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute("UPDATE core.subscriptions_version SET version = version")
            pid = await other.fetchval("SELECT pg_backend_pid()")
            facts: list[Fact] = []
            with pytest.raises(asyncpg.LockNotAvailableError, match=f"pid {pid} keeps handlers") as refusal:
                await outbox.subscribe("new.handler", "bank.made")
            Outages(DirectObservers((facts.append,))).begin("start", refusal.value, 1)
            [blocked] = [fact for fact in facts if isinstance(fact, Notice)]
            assert blocked.name == "delivery_blocked"
            assert blocked.details["remedy"] == f"as an administrator: SELECT pg_terminate_backend({pid});"
    finally:
        await other.close()
