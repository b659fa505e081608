"""Publishing beside other producers, workers and two-phase commits; what every driver shares is in tests/contract."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import EventEnvelope, EventPublisher, NewEvent, Publisher
from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import ConfigurationError, FieldError, PublishError
from holdfast.ids import uuid7
from tests.outbox import CHANNEL, HANDLER, InFlight, Lane, Outbox, connect
from tests.servers import SessionServer, apply_schema

pytestmark = pytest.mark.both_postgres

SHOP = Publisher("shop")
REMIND = Lane("*/order.remind")


@pytest.fixture
async def other(shared_dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(shared_dsn)
    yield Outbox(connection)
    await connection.close()


async def published(outbox: Outbox, **options: Any) -> EventEnvelope:
    async with outbox.connection.transaction():
        return await SHOP.publish(outbox.connection, "order.remind", {}, **options)


async def cancelled(outbox: Outbox, key: str, publisher: Publisher = SHOP) -> bool:
    async with outbox.connection.transaction():
        return await publisher.cancel(outbox.connection, key)


async def rescheduled(outbox: Outbox, key: str, **time: Any) -> bool:
    async with outbox.connection.transaction():
        return await SHOP.reschedule(outbox.connection, key, **time)


# --- publishers ---


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("source", {"source": ""}),
        ("source", {"source": "my shop"}),
        ("source", {"source": "a/b"}),
        ("source", {"source": None}),
        ("generation", {"generation": -1}),
        ("generation", {"generation": 2**63}),
        ("generation", {"generation": "1"}),
        ("channel", {"channel": "Slow!"}),
        ("channel", {"channel": "c" * 64}),
        ("schema", {"schema": 'core"; DROP SCHEMA core; --'}),
        ("schema", {"schema": "c" * 49}),
        ("schema", {"schema": "pg_catalog"}),
    ],
)
def test_a_bad_publisher_is_refused_when_it_is_made(field: str, options: dict[str, Any]) -> None:
    """At the start of the program, and not with the first order (PUB-3, S5)."""
    with pytest.raises((FieldError, ConfigurationError)) as refused:
        Publisher(**({"source": "shop"} | options))
    assert refused.value.field == field
    assert refused.value.remedy


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=70))
@settings(max_examples=200, deadline=None)
def test_only_plain_names_become_identifiers(name: str) -> None:
    """Quotes, NUL and names that Postgres would cut never reach a statement (S5)."""
    plain = set(string.ascii_lowercase + string.digits + "_")
    try:
        Publisher("shop", schema=name)
    except ConfigurationError:
        pass
    else:
        assert set(name) <= plain
        assert 1 <= len(name) <= 48
    try:
        Publisher("shop", channel=name or "!")
    except FieldError:
        pass
    else:
        assert set(name) <= plain
        assert 1 <= len(name) <= 63


async def test_a_publisher_stamps_its_generation(outbox: Outbox) -> None:
    """And publishes on the channel of that generation, unless another was chosen (GEN-1)."""
    async with outbox.connection.transaction():
        await Publisher("shop", generation=7).publish(outbox.connection, "order.placed", {})
        await Publisher("shop", generation=7, channel="outbox_slow").publish_many(
            outbox.connection, [NewEvent("order.placed", {}), NewEvent("order.placed", {}, channel="outbox_hot")]
        )
    rows = await outbox.connection.fetch("SELECT generation, channel FROM core.outbox ORDER BY seq")
    assert [tuple(row) for row in rows] == [(7, "outbox_gen_7"), (7, "outbox_slow"), (7, "outbox_hot")]


async def test_a_bound_publisher_takes_envelopes(outbox: Outbox) -> None:
    """Code that knows only the protocol publishes in the caller's transaction (ENV-2)."""
    envelope = EventEnvelope(
        event_id=uuid7(),
        event_type="order.placed",
        event_version=2,
        occurred_at=datetime(2024, 1, 2, tzinfo=UTC),
        source="shop",
        target="billing",
        domain_id=uuid.uuid4(),
        payload={"n": 1},
        idempotency_key="k",
        trace_context="00-1",
    )
    async with outbox.connection.transaction():
        bound: EventPublisher = SHOP.bind(outbox.connection)
        await bound.publish(envelope)
        with pytest.raises(FieldError) as refused:
            await bound.publish(envelope.model_copy(update={"source": "somebody.else"}))
        assert refused.value.field == "source"
    row = await outbox.row(envelope.event_id)
    assert EventEnvelope.model_validate(dict(row) | {"event_id": row["id"]}) == envelope


# --- what can be in a payload ---

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=20)
    | st.binary(max_size=5)
    | st.decimals()
    | st.datetimes()
    | st.uuids(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(st.integers(), max_size=2)
        | st.dictionaries(st.text(alphabet=st.characters(exclude_categories=()), max_size=8) | st.integers(), inner)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def open_transaction(shared_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_dsn) as connection:
        yield connection
        connection.rollback()


@pytest.mark.slow
@given(payload=st.dictionaries(st.text(max_size=8), anything, max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_payload_is_stored_as_it_is_or_refused_before_sql(
    open_transaction: psycopg.Connection[Any], payload: dict[str, Any]
) -> None:
    """Hundreds of them in one transaction, which no refusal aborts (PUB-3, D1)."""
    try:
        envelope = SHOP.publish(open_transaction, "order.placed", payload)
    except PublishError as refused:
        assert refused.field.startswith("payload")
        assert refused.remedy
        assert open_transaction.execute("SELECT 1").fetchone() == (1,)
    else:
        sql = "SELECT payload::text FROM core.outbox WHERE id = %s"
        found = open_transaction.execute(sql, [envelope.event_id]).fetchone()
        assert found is not None
        assert exactly(found[0]) == exactly(json.dumps(envelope.payload))


def exactly(text: str) -> Any:
    # jsonb keeps numbers as decimals: 1e300 is printed with 300 zeros.
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


# --- the same key twice ---


async def test_one_idempotency_key_published_twice_has_one_effect(outbox: Outbox, other: Outbox) -> None:
    """Two rows, and the second is a duplicate for every handler (E1, PUB-5)."""
    async with outbox.connection.transaction(), other.connection.transaction():
        for each in (outbox, other):
            await SHOP.publish(each.connection, "order.placed", {}, idempotency_key="order 1")
    first, second = await outbox.hold()
    async with outbox.connection.transaction():
        assert await outbox.enter(first) == "run"
    async with outbox.connection.transaction():
        assert await outbox.enter(second) == "duplicate"
    assert await outbox.value("SELECT count(*) FROM core.event_handled") == 1


async def test_of_two_producers_with_one_key_the_second_waits_for_the_first(outbox: Outbox, other: Outbox) -> None:
    """When the first commits, the second is told its id; one event is pending (PUB-2)."""
    transaction = outbox.connection.transaction()
    await transaction.start()
    first = await SHOP.publish(outbox.connection, "order.remind", {"n": 1}, key="k")
    second = asyncio.create_task(published(other, key="k"))
    await outbox.somebody_waits()
    await transaction.commit()
    async with asyncio.timeout(5):
        assert (await second).event_id == first.event_id
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 1


async def test_of_two_producers_with_one_key_the_second_publishes_when_the_first_rolls_back(
    outbox: Outbox, other: Outbox
) -> None:
    """The key was never taken (PUB-2)."""
    transaction = outbox.connection.transaction()
    await transaction.start()
    first = await SHOP.publish(outbox.connection, "order.remind", {"n": 1}, key="k")
    second = asyncio.create_task(published(other, key="k"))
    await outbox.somebody_waits()
    await transaction.rollback()
    async with asyncio.timeout(5):
        envelope = await second
    assert envelope.event_id != first.event_id
    assert await outbox.states(envelope.event_id) == ["pending"]


async def test_a_key_is_free_once_its_event_is_no_longer_pending(outbox: Outbox) -> None:
    """Whatever became of it; the old event is left alone (PUB-2)."""
    settles: list[Callable[[InFlight], Awaitable[Any]] | None] = [
        outbox.deliver,
        outbox.fail,
        lambda held: outbox.cancel_event(held.id),
        None,  # in flight
    ]
    ids = []
    for settle in settles:
        envelope = await published(outbox, key="k")
        ids.append(envelope.event_id)
        [held] = await outbox.hold(REMIND)
        if settle is not None:
            await settle(held)
    last = await published(outbox, key="k")
    assert len({*ids, last.event_id}) == 5
    assert await outbox.states(*ids, last.event_id) == ["delivered", "failed", "failed", "in_flight", "pending"]
    assert await cancelled(outbox, "k")
    assert await outbox.states(*ids, last.event_id) == ["delivered", "failed", "failed", "in_flight", "failed"]


async def test_a_running_event_is_neither_cancelled_nor_moved_but_keeps_its_key(outbox: Outbox) -> None:
    """Once it waits for a retry it is pending again, and can be (PUB-2)."""
    envelope = await published(outbox, key="k")
    [held] = await outbox.hold(REMIND)
    assert not await cancelled(outbox, "k")
    assert not await rescheduled(outbox, "k", delay=60)
    await outbox.retry(held, delay=30)
    assert await rescheduled(outbox, "k", delay=60)
    assert await cancelled(outbox, "k")
    row = await outbox.row(envelope.event_id)
    assert (row["failure_reason"], row["deleted_at"] is not None) == ("cancelled", True)


async def test_keys_belong_to_their_source(outbox: Outbox) -> None:
    """Two sources may use the same key for different events (PUB-2)."""
    shop = await published(outbox, key="k")
    async with outbox.connection.transaction():
        mail = await Publisher("mail").publish(outbox.connection, "order.remind", {}, key="k")
    assert shop.event_id != mail.event_id
    assert await cancelled(outbox, "k", Publisher("mail"))
    assert await outbox.states(shop.event_id, mail.event_id) == ["pending", "failed"]


async def test_a_key_moves_no_event_of_another_source(outbox: Outbox) -> None:
    """A producer may hold a key for any id it likes, but not reach another's event by it (OBX-2)."""
    victim = await outbox.insert(source="bank")
    before = await outbox.row(victim)
    hold = "SELECT core.outbox_hold_key('shop', 'k', $1, $2, now() + interval '1 day')"
    assert await outbox.value(hold, victim, False) == victim
    assert not await cancelled(outbox, "k")
    assert not await rescheduled(outbox, "k", delay=60)
    mine = uuid7()
    assert await outbox.value(hold, mine, True) == mine
    assert await outbox.row(victim) == before


async def test_keys_never_deadlock(outbox: Outbox, shared_dsn: str) -> None:
    """Publish, cancel and reschedule of three keys by six producers, while a worker claims and gives back (B12)."""
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(7)]
    deadline = time.monotonic() + 1.5
    faults: list[str] = []
    done = 0

    async def produce(session: Outbox, choose: random.Random) -> None:
        nonlocal done
        while time.monotonic() < deadline:
            key = f"key {choose.randrange(3)}"
            try:
                async with session.connection.transaction():
                    for _ in range(3):  # the same key, in any order of calls
                        connection = session.connection
                        action = choose.randrange(4)
                        if action == 0:
                            await SHOP.cancel(connection, key)
                        elif action == 1:
                            await SHOP.reschedule(connection, key, delay=0)
                        else:
                            again = "reschedule" if action == 2 else "ignore"
                            await SHOP.publish(connection, "order.remind", {}, key=key, on_duplicate=again)
                done += 1
            except asyncpg.PostgresError as error:
                faults.append(f"{error.sqlstate} {error}")

    async def work(session: Outbox) -> None:
        while time.monotonic() < deadline:
            held = await session.hold(REMIND, version=1)
            await session.release(*held)

    try:
        await asyncio.gather(
            work(sessions[0]), *(produce(session, random.Random(n)) for n, session in enumerate(sessions[1:]))
        )
    finally:
        for session in sessions:
            await session.connection.close()
    assert faults == []
    assert done > 30
    pending = "SELECT count(*) FROM core.outbox WHERE status = 'pending' GROUP BY dedupe_key"
    assert await outbox.value(f"SELECT count(*) FROM ({pending}) AS keys") <= 3


# --- waking workers ---


async def test_an_event_that_is_moved_tells_the_workers(outbox: Outbox, other: Outbox) -> None:
    """It may be due before they meant to look again; silent for two-phase commit (E6) (PUB-2, LSN-1)."""
    heard: list[str] = []
    finished = asyncio.Event()

    def hear(_connection: object, _pid: int, channel: str, text: object) -> None:
        heard.append(str(text))
        if channel == "finish":
            finished.set()

    await published(outbox, key="k", delay=3600)
    for channel in (CHANNEL, "finish"):
        await other.connection.add_listener(channel, hear)
    await rescheduled(outbox, "k", delay=1800)
    await published(outbox, key="k", on_duplicate="reschedule")
    await published(outbox, key="k")  # nothing is moved
    async with outbox.connection.transaction():
        await outbox.connection.execute("SET LOCAL holdfast.notify = 'off'")
        await SHOP.reschedule(outbox.connection, "k", delay=60)
        await SHOP.publish(outbox.connection, "order.remind", {}, key="k", delay=60, on_duplicate="reschedule")
    await outbox.connection.execute("NOTIFY finish")
    async with asyncio.timeout(5):
        await finished.wait()
    await other.connection.reset()
    assert heard == ["rescan", "rescan", ""]


# --- psycopg's pipelines ---


def test_publishing_inside_a_psycopg_pipeline(shared_dsn: str) -> None:
    """Results arrive later there; what publish needs to know is waited for (PUB-1)."""
    source = f"shop{uuid.uuid4().hex}"
    publisher = Publisher(source)
    with psycopg.connect(shared_dsn) as connection:
        with connection.pipeline():
            first = publisher.publish(connection, "order.remind", {}, key="k")
            again = publisher.publish(connection, "order.remind", {}, key="k")
            publisher.publish_many(connection, [NewEvent("order.placed", {})] * 3)
            assert publisher.reschedule(connection, "k", delay=5) is True
            assert publisher.cancel(connection, "k") is True
            assert publisher.cancel(connection, "k") is False
        connection.commit()
        rows = connection.execute("SELECT status FROM core.outbox WHERE source = %s ORDER BY seq", [source]).fetchall()
    assert again.event_id == first.event_id
    assert rows == [("failed",), ("pending",), ("pending",), ("pending",)]


async def test_publishing_inside_an_asynchronous_psycopg_pipeline(shared_dsn: str) -> None:
    """Likewise (PUB-1)."""
    publisher = Publisher(f"shop{uuid.uuid4().hex}")
    async with await psycopg.AsyncConnection.connect(shared_dsn) as connection, connection.pipeline():
        first = await publisher.publish(connection, "order.remind", {}, key="k")
        again = await publisher.publish(connection, "order.remind", {}, key="k")
        assert again.event_id == first.event_id
        assert await publisher.cancel(connection, "k") is True


# --- two-phase commit ---


@pytest.fixture(scope="module")
def two_phase_dsn(postgres_server: SessionServer) -> Iterator[str]:
    options = {"fsync": "off", "full_page_writes": "off", "max_prepared_transactions": "5"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=options) as server:
        dsn = server.create_database("holdfast")
        apply_schema(dsn)
        yield dsn


async def test_a_prepared_transaction_publishes_when_it_is_committed(two_phase_dsn: str) -> None:
    """With the bell off, which PREPARE would refuse; also with keys; and nothing when it is rolled back (E6)."""
    connection = await connect(two_phase_dsn)
    outbox = Outbox(connection)
    sleeper = await asyncpg.connect(two_phase_dsn)
    try:
        await sleeper.execute("SELECT pg_advisory_lock(hashtextextended('core.outbox_default', 0))")
        for end, expected in (("COMMIT", 2), ("ROLLBACK", 2)):
            await connection.execute("BEGIN; SET LOCAL holdfast.notify = 'off'")
            await SHOP.publish(connection, "order.placed", {})
            await SHOP.publish(connection, "order.remind", {}, key=end, delay=60)
            await SHOP.reschedule(connection, end, delay=0)
            await connection.execute(f"PREPARE TRANSACTION '{end}'")
            await connection.execute(f"{end} PREPARED '{end}'")
            assert await outbox.value("SELECT count(*) FROM core.outbox") == expected
        assert len(await outbox.claim(Lane(), REMIND)) == 2
        await connection.execute("BEGIN")
        await SHOP.publish(connection, "order.placed", {})
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="NOTIFY"):
            await connection.execute("PREPARE TRANSACTION 'rings'")
    finally:
        await connection.close()
        await sleeper.close()


async def test_a_publish_inside_a_handlers_transaction_commits_with_it(outbox: Outbox, other: Outbox) -> None:
    """The effects of a transactional handler include what it publishes (LSN-5, PUB-1)."""
    held = await outbox.held()
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await outbox.enter(held) == "run"
    await SHOP.publish(outbox.connection, "order.paid", {})
    await transaction.rollback()
    assert await other.value("SELECT count(*) FROM core.outbox WHERE event_type = 'order.paid'") == 0
    async with outbox.connection.transaction():
        assert await outbox.enter(held) == "run"
        await SHOP.publish(outbox.connection, "order.paid", {}, delay=timedelta(minutes=1))
    assert await other.value("SELECT count(*) FROM core.outbox WHERE event_type = 'order.paid'") == 1
    assert await other.value("SELECT handler_name FROM core.outbox WHERE id = $1", held.id) == HANDLER


async def test_events_without_options_are_rows_like_others(outbox: Outbox) -> None:
    """publish_many writes them in a shorter way, and so does publish; their rows differ in nothing (PUB-1, PUB-4)."""
    async with outbox.connection.transaction():
        short = await SHOP.publish_many(outbox.connection, [NewEvent("order.placed", {"n": 1})] * 2)
        long = await SHOP.publish_many(outbox.connection, [NewEvent("order.placed", {"n": 1}, priority=1)] * 2)
        one = await SHOP.publish(outbox.connection, "order.placed", {"n": 1})
    rows = await outbox.connection.fetch("SELECT * FROM core.outbox ORDER BY id")
    assert [row["id"] for row in rows] == [*short, *long, one.event_id]
    assert [row["idempotency_key"] for row in rows] == [str(row["id"]) for row in rows]
    own = {"id", "seq", "idempotency_key", "occurred_at"}
    first, *others = ({name: value for name, value in row.items() if name not in own} for row in rows)
    assert all(each == first for each in others)
