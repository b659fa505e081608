"""No producer suppresses, forges or learns of the events of another source (SEC-1, T2, T3, T4)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher
from holdfast.idempotency import Commands, job_key
from holdfast.ids import uuid7
from holdfast.operator import Operator
from tests.logins import PRODUCER, WORKER, Logins
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, Outbox, connect
from tests.worker.support import drained, running, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

SQUAT = "INSERT INTO core.outbox (id, event_type, source, payload) VALUES ($1, 'junk.thing', 'bank', '{}')"


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


@asynccontextmanager
async def session(logins: Logins, role: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(logins.dsn_of(logins.names[role]))
    try:
        yield connection
    finally:
        await connection.close()


async def own(outbox: Outbox, logins: Logins) -> None:
    """The shop's login owns the source shop; bank belongs to nobody."""
    await outbox.connection.execute(
        "INSERT INTO core.sources (source, role_name) VALUES ('shop', $1)", logins.names[PRODUCER]
    )


async def publish(connection: asyncpg.Connection, source: str, **options: object) -> UUID:
    async with connection.transaction():
        event = NewEvent(EVENT, {}, **options)  # type: ignore[arg-type]
        return (await Publisher(source).publish_event(connection, event)).event_id


# --- siblings ---


@pytest.mark.parametrize("handlers", [2, 3])
@pytest.mark.parametrize("delay", [0, 0.2])
async def test_a_siblings_id_cannot_be_taken_before_the_split(
    outbox: Outbox, logins: Logins, handlers: int, delay: float
) -> None:
    """Whatever of an event's id a producer knows, every handler still gets the event (SEC-1, T2)."""
    names = ["billing.charge_card", "mail.thank", "stock.reserve"][:handlers]
    for name in names:
        await outbox.subscribe(name, EVENT)
    event = uuid7()
    async with session(logins, PRODUCER) as shop, session(logins, "bank") as bank:
        for name in names:
            guess = await outbox.value("SELECT core.sibling_id($1, $2, '')", event, name)
            await bank.execute(SQUAT, guess)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await bank.fetchval("SELECT core.sibling_id($1, $2, '')", event, name)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await bank.fetchval("SELECT secret FROM core.secrets")
        await publish(shop, "shop", event_id=event, delay=delay)
    await until(lambda: outbox.split(LANE), what="it is due and split")
    siblings = await outbox.connection.fetch("SELECT handler_name FROM core.outbox WHERE origin_id = $1", event)
    assert sorted(row[0] for row in siblings) == names
    # The squatter's rows stand where they were put, as rows of its own, and are no part of the event.
    rows = {row[0] for row in await outbox.connection.fetch("SELECT core.event_rows($1)", event)}
    assert len(rows) == handlers + 1
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE source = 'bank'") == handlers


# --- keys ---


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("bank_owned", [False, True])
async def test_a_foreign_event_with_the_same_key_suppresses_nothing(
    dsn: str, outbox: Outbox, logins: Logins, transactional: bool, bank_owned: bool
) -> None:
    """Before and after the real event; the real one is handled, and handled once (SEC-1, PUB-5, T3)."""
    await own(outbox, logins)
    if bank_owned:
        await outbox.connection.execute("INSERT INTO core.sources VALUES ('bank', $1)", logins.names["bank"])
    registry, handled = HandlerRegistry(), []

    if transactional:

        @registry.handler(EVENT, name=HANDLER)
        async def charge_in_transaction(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            handled.append(event.source)
    else:

        @registry.handler(EVENT, name=HANDLER)
        async def charge(event: EventEnvelope) -> None:
            handled.append(event.source)

    async with session(logins, PRODUCER) as shop, session(logins, "bank") as bank, running(dsn, registry):
        for source, connection in (("bank", bank), ("shop", shop), ("bank", bank), ("shop", shop)):
            await publish(connection, source, idempotency_key="order-17")
            await drained(outbox.connection)
    assert handled.count("shop") == 1, handled
    assert handled.count("bank") == 1, handled
    pairs = "SELECT count(*), count(DISTINCT (handler_name, idempotency_key)) FROM core.event_handled"
    assert await outbox.connection.fetchrow(pairs) == (2, 2)


async def test_an_id_can_be_a_key_of_nobody_else(outbox: Outbox, logins: Logins) -> None:
    """An event whose own id is the key that another source will use (SEC-1, T3)."""
    await own(outbox, logins)
    await outbox.subscribe(HANDLER, EVENT)
    key = uuid.uuid4()
    async with session(logins, PRODUCER) as shop, session(logins, "bank") as bank:
        await publish(bank, "bank", event_id=key)
        assert await outbox.deliver(*await outbox.hold()) == []
        await publish(shop, "shop", idempotency_key=str(key))
        await publish(shop, "shop", idempotency_key=str(key))
    first, second = await outbox.claim()
    assert (first["handled"], second["handled"]) == (False, False)


async def test_without_an_owner_a_key_is_one_for_all(outbox: Outbox) -> None:
    """A key that two sources use is handled once. (PUB-5)"""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.insert(idempotency_key="k")
    assert await outbox.deliver(*await outbox.hold()) == []
    await outbox.insert(idempotency_key="k", source="bank")
    assert [row["handled"] for row in await outbox.claim()] == [True]


# --- sources ---


async def test_an_owned_source_is_written_to_by_its_role_alone(outbox: Outbox, logins: Logins) -> None:
    """By the library, by a plain INSERT and by COPY; sources that nobody owns stay open (SEC-1, OBX-2, T4)."""
    await own(outbox, logins)
    insert = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', $1, '{}')"
    async with session(logins, PRODUCER) as shop, session(logins, "bank") as bank:
        await shop.execute(insert, "shop")
        await bank.execute(insert, "bank")
        await bank.execute(insert, "open")
        refusals = [
            lambda: bank.execute(insert, "shop"),
            lambda: publish(bank, "shop"),
            lambda: Publisher("shop").publish_many(bank, [NewEvent(EVENT, {})]),
            lambda: bank.copy_records_to_table(
                "outbox", schema_name="core", columns=["event_type", "source", "payload", "idempotency_key"],
                records=[("a.b", "shop", "{}", "k")],
            ),
        ]  # fmt: skip
        for refused in refusals:
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source shop belongs to another role"):
                async with bank.transaction():
                    await refused()
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE source = 'shop'") == 1


async def test_schedules_and_the_archive_write_for_owned_sources(outbox: Outbox, logins: Logins) -> None:
    """What functions insert for others is not refused; their own checks stand (OBX-2, T4)."""
    await outbox.connection.execute("INSERT INTO core.sources VALUES ('shop', $1)", logins.names[WORKER])
    values = {
        "name": "shop.hourly", "cron": None, "timezone": None, "every": timedelta(hours=1), "missed": "latest",
        "event_type": EVENT, "source": "shop", "target": None, "priority": 1, "payload": "{}", "generation": 0,
        "force": True,
    }  # fmt: skip
    async with session(logins, WORKER) as worker:
        await Outbox(worker).call("schedule_declare", **values)
        seen = await outbox.connection.fetchrow("SELECT * FROM core.schedules")
        until_ = datetime.now(UTC)
        fire = {"name": "shop.hourly", "version": seen["version"], "slots": [until_], "until": until_,
                "next": until_ + timedelta(hours=1), "generation": 0, "trace_context": None}  # fmt: skip
        await outbox.connection.execute("UPDATE core.schedules SET owed_after = owed_after - interval '1 day'")
        assert (await Outbox(worker).call("schedule_fire", **fire))[0][0]
    async with session(logins, "holdfast_operator") as operator:
        assert await operator.fetchval("SELECT core.schedule_trigger('shop.hourly', 'ann@example.org')") is not None
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe("mail.thank", EVENT)
    assert await outbox.split(LANE) == 2


async def test_doctor_names_sources_without_an_owner(dsn: str, outbox: Outbox, logins: Logins) -> None:
    """Where several logins publish (T4)."""
    await own(outbox, logins)
    await outbox.insert()
    await outbox.insert(source="bank")
    async with Operator(dsn, actor="ann@example.org") as operator:
        report = await operator.doctor()
    assert [each.object for each in report.findings if each.code == "source-unowned"] == ["bank"]


# --- keys of commands ---


@pytest.mark.parametrize("line", ["job:jobs", "job:"])
async def test_an_owned_scope_is_closed_to_others(outbox: Outbox, logins: Logins, line: str) -> None:
    """No login uses up the key of another service's job; logins of one role share their keys (SEC-1, IDM-1)."""
    await outbox.connection.execute("INSERT INTO core.sources VALUES ($1, $2)", line, logins.names[PRODUCER])
    commands = Commands({1: "a secret of the shop"})
    key = job_key("2026-03-01", "send-reminder", 17)

    async def work() -> int:
        return 1

    async with session(logins, "bank") as bank, session(logins, PRODUCER) as shop:
        squat = "SELECT core.idempotency_begin($1, $2, '{x}', 1, '36500 days', 2000, NULL)"
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="belongs to another role"):
            await bank.fetchval(squat, "job:jobs", key)
        for _ in range(2):
            async with shop.transaction():
                assert await commands.run(shop, key, {"order": 17}, work) == 1
        assert await bank.fetchval(squat, "http:alice", key) is None, "what no role owns is open"
        hashed = await outbox.value("SELECT core.idempotency_begin('job-sha256:0', 'k', '{x}', 1, '1 day', 2000, NULL)")
        assert hashed is None
        if line == "job:":
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await bank.fetchval(squat, "job-sha256:1", key)


# --- notifications ---


async def test_a_notification_says_nothing_about_events(outbox: Outbox, dsn: str) -> None:
    """Every login may listen; it learns that something happened, and not to which event (SEC-1, S6)."""
    await outbox.connection.execute(
        "DROP TRIGGER outbox_bell ON core.outbox; CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION core.outbox_notify('always')"
    )
    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener(CHANNEL, lambda *arguments: heard.append(arguments[3]))
    ids = [await outbox.insert(), await outbox.failed(), (await outbox.held()).id]
    await outbox.replay(ids[1])
    for id in ids:
        await outbox.cancel_event(id)
    await outbox.connection.execute(f"NOTIFY {CHANNEL}, 'last'")
    await until(lambda: "last" in heard)
    await listener.close()
    assert {"", "rescan"} < set(heard)
    assert not [text for text in heard for id in ids if str(id)[9:] in text]
