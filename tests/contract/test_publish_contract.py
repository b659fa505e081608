"""One contract, every driver: what publishing promises does not depend on the library that runs the transaction."""

from __future__ import annotations

import inspect
import json
import math
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from itertools import product
from typing import Any, Protocol

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row, namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from holdfast import EventEnvelope, HandlerContext, NewEvent, Publisher
from holdfast.context import current_context
from holdfast.errors import FieldError, PayloadError, PublishError
from tests.servers import SessionServer

pytestmark = pytest.mark.both_postgres


class Transaction(Protocol):
    """The caller's side of one open transaction."""

    tx: Any

    async def execute(self, sql: str) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def savepoint(self) -> Callable[[], Awaitable[None]]:
        """Set a savepoint; what is returned rolls back to it."""
        ...


async def done(value: Any) -> Any:
    """The result of a call, whether the driver is asynchronous or not."""
    return await value if inspect.isawaitable(value) else value


class AsyncpgTransaction:
    def __init__(self, connection: Any) -> None:
        self.tx = connection
        self._transaction = connection.transaction()

    async def execute(self, sql: str) -> None:
        await self.tx.execute(sql)

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def savepoint(self) -> Callable[[], Awaitable[None]]:
        savepoint = self.tx.transaction()
        await savepoint.start()
        return savepoint.rollback  # type: ignore[no-any-return]

    async def start(self) -> AsyncpgTransaction:
        await self._transaction.start()
        return self


class PsycopgTransaction:
    """Both kinds; a transaction begins with the first statement."""

    def __init__(self, connection: Any) -> None:
        self.tx = connection

    async def execute(self, sql: str) -> None:
        await done(self.tx.execute(sql))

    async def commit(self) -> None:
        await done(self.tx.commit())

    async def rollback(self) -> None:
        await done(self.tx.rollback())

    async def savepoint(self) -> Callable[[], Awaitable[None]]:
        await self.execute("SAVEPOINT here")
        return lambda: self.execute("ROLLBACK TO SAVEPOINT here")


class SqlalchemyTransaction:
    """Sessions and connections of both kinds."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    async def execute(self, sql: str) -> None:
        await done(self.tx.execute(sqlalchemy.text(sql)))

    async def commit(self) -> None:
        await done(self.tx.commit())

    async def rollback(self) -> None:
        await done(self.tx.rollback())

    async def savepoint(self) -> Callable[[], Awaitable[None]]:
        nested = self.tx.begin_nested()
        if inspect.isawaitable(nested):
            await nested

        async def back() -> None:
            await done(nested.rollback())

        return back


Opener = Callable[[str], Any]


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Transaction]:
    connection = await asyncpg.connect(dsn)
    try:
        yield await AsyncpgTransaction(connection).start()
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[Transaction]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield await AsyncpgTransaction(connection).start()


@asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Transaction]:
    connection = psycopg.connect(dsn)
    try:
        yield PsycopgTransaction(connection)
    finally:
        connection.close()


@asynccontextmanager
async def psycopg_dict_rows(dsn: str) -> AsyncIterator[Transaction]:
    connection = psycopg.connect(dsn, row_factory=dict_row, cursor_factory=psycopg.ClientCursor)
    try:
        yield PsycopgTransaction(connection)
    finally:
        connection.close()


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Transaction]:
    connection = await psycopg.AsyncConnection.connect(dsn, row_factory=namedtuple_row)
    try:
        yield PsycopgTransaction(connection)
    finally:
        await connection.close()


def _url(dsn: str, dialect: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{dialect}://", 1)


@asynccontextmanager
async def sqlalchemy_session(dsn: str) -> AsyncIterator[Transaction]:
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    try:
        with Session(engine) as session:
            yield SqlalchemyTransaction(session)
    finally:
        engine.dispose()


@asynccontextmanager
async def sqlalchemy_scoped_session(dsn: str) -> AsyncIterator[Transaction]:
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    session = scoped_session(sessionmaker(engine))
    try:
        yield SqlalchemyTransaction(session)
    finally:
        session.remove()
        engine.dispose()


@asynccontextmanager
async def sqlalchemy_connection(dsn: str) -> AsyncIterator[Transaction]:
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    try:
        with engine.connect() as connection:
            yield SqlalchemyTransaction(connection)
    finally:
        engine.dispose()


def async_session(dialect: str) -> Opener:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[Transaction]:
        engine = create_async_engine(_url(dsn, dialect))
        try:
            async with AsyncSession(engine) as session:
                yield SqlalchemyTransaction(session)
        finally:
            await engine.dispose()

    return opened


def async_connection(dialect: str) -> Opener:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[Transaction]:
        engine = create_async_engine(_url(dsn, dialect))
        try:
            async with engine.connect() as connection:
                yield SqlalchemyTransaction(connection)
        finally:
            await engine.dispose()

    return opened


DRIVERS: dict[str, Opener] = {
    "asyncpg": asyncpg_connection,
    "asyncpg pool": asyncpg_pool,
    "psycopg": psycopg_sync,
    "psycopg client cursor, dict rows": psycopg_dict_rows,
    "psycopg async, tuple rows": psycopg_async,
    "sqlalchemy Session": sqlalchemy_session,
    "sqlalchemy scoped_session": sqlalchemy_scoped_session,
    "sqlalchemy Connection": sqlalchemy_connection,
    "sqlalchemy AsyncSession on asyncpg": async_session("asyncpg"),
    "sqlalchemy AsyncSession on psycopg": async_session("psycopg"),
    "sqlalchemy AsyncConnection on asyncpg": async_connection("asyncpg"),
    "sqlalchemy AsyncConnection on psycopg": async_connection("psycopg"),
}


# --- fixtures ---


@pytest.fixture(scope="module")
def contract_dsn(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    try:
        yield postgres_server.dsn(name)
        faults = postgres_server.faults_left(name)
    finally:
        postgres_server.drop(name)
    assert faults == []


class Reader:
    """What everybody else sees of one test's source."""

    def __init__(self, connection: asyncpg.Connection, source: str) -> None:
        self._connection = connection
        self._source = source

    async def rows(self) -> list[asyncpg.Record]:
        """In the order of publishing."""
        return await self._connection.fetch("SELECT * FROM core.outbox WHERE source = $1 ORDER BY seq", self._source)

    async def columns(self, *expressions: str) -> list[tuple[Any, ...]]:
        sql = f"SELECT {', '.join(expressions)} FROM core.outbox WHERE source = $1 ORDER BY seq"
        return [tuple(row) for row in await self._connection.fetch(sql, self._source)]

    async def row(self) -> asyncpg.Record:
        [row] = await self.rows()
        return row

    async def types(self) -> list[str]:
        return [row["event_type"] for row in await self.rows()]


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(f"shop{uuid.uuid4().hex}")


@pytest.fixture
async def reader(contract_dsn: str, publisher: Publisher) -> AsyncIterator[Reader]:
    connection = await asyncpg.connect(contract_dsn)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    yield Reader(connection, publisher.source)
    if await connection.fetchval("SELECT count(*) FROM core.outbox") > 1000:
        await connection.execute("TRUNCATE core.outbox")  # else the next tests would read past what is left of them
    await connection.close()


@pytest.fixture(params=DRIVERS.values(), ids=DRIVERS)
async def caller(request: pytest.FixtureRequest, contract_dsn: str) -> AsyncIterator[Transaction]:
    async with request.param(contract_dsn) as transaction:
        yield transaction


# --- the event exists if and only if the transaction commits ---


async def test_the_event_exists_once_the_transaction_commits(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """Publishing never commits; nobody sees the event before its transaction ends (PUB-1)."""
    await caller.execute("CREATE TABLE IF NOT EXISTS orders (id int)")
    await done(publisher.publish(caller.tx, "order.placed", {"n": 1}))
    await done(publisher.publish_many(caller.tx, [NewEvent("order.paid", {}), NewEvent("order.sent", {})]))
    assert await reader.types() == []
    await caller.commit()
    assert await reader.types() == ["order.placed", "order.paid", "order.sent"]


async def test_the_event_vanishes_with_its_transaction(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """PUB-1, E6."""
    await done(publisher.publish(caller.tx, "order.placed", {}))
    await done(publisher.publish(caller.tx, "order.placed", {}, key="k"))
    await done(publisher.publish_many(caller.tx, [NewEvent("order.paid", {})]))
    await caller.rollback()
    assert await reader.types() == []


async def test_the_event_vanishes_with_its_savepoint(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """What was published before and after the savepoint stays (PUB-1, E6)."""
    await done(publisher.publish(caller.tx, "order.before", {}))
    back = await caller.savepoint()
    await done(publisher.publish(caller.tx, "order.inside", {}))
    await back()
    await done(publisher.publish(caller.tx, "order.after", {}))
    await caller.commit()
    assert await reader.types() == ["order.before", "order.after"]


# --- what is stored is what is returned ---

PAYLOAD = {
    "text": "a 'quoted' \"text\" with \\ and % and :name and $1 and %s and %(id)s and \u20ac \U0001f4a5 \u2028",
    "numbers": [0, -1, 1.5, 1e-7, 2**63, -(10**30), 0.1],
    "nested": {"list": [{"a": [[]]}, None, True, False], "": {}},
    "looks like a date": "2030-01-01T00:00:00Z",
}


def stored_envelope(row: asyncpg.Record) -> EventEnvelope:
    return EventEnvelope.model_validate(dict(row) | {"event_id": row["id"]})


async def test_the_envelope_is_what_is_stored(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """Every field, whatever characters are in it (PUB-1, ENV-1)."""
    event_id, domain_id = uuid.uuid4(), uuid.uuid4()
    envelope = await done(
        publisher.publish(
            caller.tx,
            "order.placed:%s",
            PAYLOAD,
            event_id=event_id,
            event_version=3,
            occurred_at=datetime(2024, 2, 29, 23, 59, 59, 999999, tzinfo=UTC),
            target="billing",
            domain_id=domain_id,
            idempotency_key="order 'o-1' %s :x",
            trace_context="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            content_class="personal",
            priority=2,
            channel="outbox_slow",
        )
    )
    await caller.commit()
    row = await reader.row()
    assert stored_envelope(row) == envelope
    assert envelope.payload == PAYLOAD
    assert (row["content_class"], row["priority"], row["channel"], row["generation"]) == (
        "personal",
        2,
        "outbox_slow",
        0,
    )
    assert (row["status"], row["attempts"], row["handler_name"], row["headers"]) == ("pending", 0, None, None)


async def test_the_least_envelope_is_what_is_stored(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """Defaults are made before the insert, so the caller knows them (PUB-1)."""
    envelope = await done(publisher.publish(caller.tx, "order.placed", {}))
    await caller.commit()
    row = await reader.row()
    assert stored_envelope(row) == envelope
    assert envelope.event_id.version == 7
    assert envelope.idempotency_key == str(envelope.event_id)
    assert envelope.source == publisher.source
    assert abs(envelope.occurred_at - row["created_at"]) < timedelta(minutes=1)
    assert (row["channel"], row["available_at"], row["expires_at"]) == ("outbox_default", row["created_at"], None)


async def test_many_events_in_one_call(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """None, one, a few or thousands at a time, in order, each with its own options (PUB-2)."""
    expected: list[tuple[Any, ...]] = []
    for count in (0, 1, 7, 12_000):
        options = [{"target": "billing" if n % 2 else None, "priority": n % 3} for n in range(count)]
        events = [NewEvent("order.placed", {"n": n}, **each) for n, each in enumerate(options)]
        ids = await done(publisher.publish_many(caller.tx, iter(events)))
        expected += [
            (id, n, each["target"], each["priority"]) for n, (id, each) in enumerate(zip(ids, options, strict=True))
        ]
    assert await reader.rows() == []
    await caller.commit()
    assert await reader.columns("id", "(payload->>'n')::int", "target", "priority") == expected
    assert len({id for id, *_ in expected}) == 12_008


async def test_many_events_are_stored_like_one(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """With all options, with none, and with the two side by side (PUB-2)."""
    options: dict[str, Any] = {
        "event_id": uuid.uuid4(),
        "event_version": 3,
        "occurred_at": datetime(2024, 2, 29, 23, 59, 59, 999999, tzinfo=UTC),
        "target": "billing",
        "domain_id": uuid.uuid4(),
        "idempotency_key": "k",
        "trace_context": "00-trace",
        "content_class": "personal",
        "channel": "outbox_slow",
        "headers": {"a": "b"},
        "correlation_id": "c",
        "priority": 0,
        "available_at": datetime(2090, 1, 1, tzinfo=UTC),
        "expires_at": datetime(2091, 1, 1, tzinfo=UTC),
    }
    await done(publisher.publish(caller.tx, "order.placed", PAYLOAD, **options))
    await done(publisher.publish(caller.tx, "order.placed", PAYLOAD))
    rich = NewEvent("order.placed", PAYLOAD, **options | {"event_id": None})
    poor = NewEvent("order.placed", PAYLOAD)
    for events in ([rich], [poor], [rich, poor], [poor, rich, rich, poor]):
        await done(publisher.publish_many(caller.tx, events))
    await caller.commit()
    unique = ("id", "seq", "idempotency_key", "occurred_at")
    first, second, *rows = await reader.rows()
    expected = {True: first, False: second}
    for row, is_rich in zip(rows, [True, False, True, False, False, True, True, False], strict=True):
        like = expected[is_rich]
        assert {k: v for k, v in row.items() if k not in unique} == {k: v for k, v in like.items() if k not in unique}
        assert row["idempotency_key"] == ("k" if is_rich else str(row["id"]))
        assert abs(row["occurred_at"] - like["occurred_at"]) < timedelta(minutes=1)


async def test_one_bad_event_of_many_refuses_all(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """All are checked before the first is written (PUB-2, PUB-3)."""
    events = [NewEvent("order.placed", {"n": n}) for n in range(6000)]
    events[-1] = NewEvent("order.placed", {"bad": "\0"})
    with pytest.raises(PayloadError) as refused:
        await done(publisher.publish_many(caller.tx, events))
    assert refused.value.field == "payload.bad"
    with pytest.raises(FieldError) as refused_key:
        await done(publisher.publish_many(caller.tx, [NewEvent("order.placed", {}, key="k")]))
    assert refused_key.value.field == "key"
    await done(publisher.publish_many(caller.tx, events[:2]))
    await caller.commit()
    assert len(await reader.rows()) == 2


# --- time ---


async def test_delays_run_on_the_databases_clock(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """Seconds and timedeltas count from the transaction's now, moments are moments (PUB-2)."""
    later = datetime(2090, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    options: list[dict[str, Any]] = [
        {"delay": 90},
        {"delay": timedelta(days=2, microseconds=5)},
        {"available_at": later},
        {"expires_in": 60.5},
        {"expires_at": later, "delay": 1.25},
        {},
    ]
    for each in options:
        await done(publisher.publish(caller.tx, "order.placed", {}, **each))
    await done(publisher.publish_many(caller.tx, [NewEvent("order.placed", {}, **each) for each in options]))
    await caller.commit()
    rows = await reader.rows()
    found = [
        (row["available_at"] - row["created_at"], row["expires_at"] and row["expires_at"] - row["created_at"])
        for row in rows
    ]
    now = rows[0]["created_at"]
    expected = [
        (timedelta(seconds=90), None),
        (timedelta(days=2, microseconds=5), None),
        (later - now, None),
        (timedelta(0), timedelta(seconds=60.5)),
        (timedelta(seconds=1.25), later - now),
        (timedelta(0), None),
    ]
    assert found == expected * 2


# --- keys ---


async def test_a_key_belongs_to_one_pending_event(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """A second publish with the key changes nothing, and answers the id of the first (PUB-2)."""
    first = await done(publisher.publish(caller.tx, "order.remind", {"n": 1}, key="order 1", delay=60))
    again = await done(publisher.publish(caller.tx, "order.remind", {"n": 2}, key="order 1", delay=99))
    other = await done(publisher.publish(caller.tx, "order.remind", {"n": 3}, key="order 2", delay=60))
    await caller.commit()
    assert again.event_id == first.event_id != other.event_id
    rows = await reader.rows()
    assert [(row["payload"]["n"], row["dedupe_key"]) for row in rows] == [(1, "order 1"), (3, "order 2")]
    assert rows[0]["available_at"] - rows[0]["created_at"] == timedelta(seconds=60)


async def test_a_key_can_reschedule_the_pending_event(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """With on_duplicate="reschedule" the event keeps its content and gets the new time (PUB-2)."""
    later = datetime(2090, 5, 6, tzinfo=UTC)
    for time in ({"delay": 60}, {"delay": 120}, {"available_at": later}, {}, {"delay": 7.5}):
        await done(
            publisher.publish(
                caller.tx, "order.remind", {"first": "delay" in time}, key="k", on_duplicate="reschedule", **time
            )
        )
    await caller.commit()
    row = await reader.row()
    assert row["payload"] == {"first": True}
    assert row["available_at"] - row["created_at"] == timedelta(seconds=7.5)


async def test_a_pending_event_is_rescheduled_by_its_key(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """To a moment or by a delay; false when nothing pending has the key (PUB-2)."""
    later = datetime(2090, 5, 6, tzinfo=UTC)
    await done(publisher.publish(caller.tx, "order.remind", {}, key="k", delay=60))
    assert await done(publisher.reschedule(caller.tx, "k", available_at=later)) is True
    assert await done(publisher.reschedule(caller.tx, "other", delay=5)) is False
    assert await done(Publisher("somebody.else").reschedule(caller.tx, "k", delay=5)) is False
    await caller.commit()
    assert (await reader.row())["available_at"] == later


async def test_a_pending_event_is_cancelled_by_its_key(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """It is kept as cancelled, is no dead letter, and the key is free again (PUB-2)."""
    await done(publisher.publish(caller.tx, "order.remind", {"n": 1}, key="k", delay=60))
    assert await done(Publisher("somebody.else").cancel(caller.tx, "k")) is False
    assert await done(publisher.cancel(caller.tx, "k")) is True
    assert await done(publisher.cancel(caller.tx, "k")) is False
    assert await done(publisher.reschedule(caller.tx, "k", delay=5)) is False
    await done(publisher.publish(caller.tx, "order.remind", {"n": 2}, key="k", delay=60))
    await caller.commit()
    rows = await reader.rows()
    assert [(row["payload"]["n"], row["status"], row["failure_reason"]) for row in rows] == [
        (1, "failed", "cancelled"),
        (2, "pending", None),
    ]
    assert rows[0]["deleted_at"] is not None


# --- headers ---


async def test_headers_and_the_chain_of_causes(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """Beside the envelope, as text (PUB-2)."""
    headers = {"tenant": "acme", "quote": 'it\'s "so" %s \u20ac'}
    await done(
        publisher.publish(caller.tx, "order.placed", {}, headers=headers, correlation_id="c-1", causation_id="e-1")
    )
    await done(publisher.publish_many(caller.tx, [NewEvent("order.paid", {}, headers=headers)]))
    await caller.commit()
    rows = await reader.rows()
    assert rows[0]["headers"] == headers | {"correlation_id": "c-1", "causation_id": "e-1"}
    assert rows[1]["headers"] == headers


async def test_what_a_handler_publishes_inherits_the_chain(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """Correlation and causation ids, headers and trace; what the handler gives wins (PUB-2, OBS-2)."""
    context = HandlerContext(uuid.uuid4(), uuid.uuid4(), "billing.charge", 1, {"tenant": "acme"}, "00-trace")
    token = current_context.set(context)
    try:
        await done(publisher.publish(caller.tx, "order.one", {}))
        await done(
            publisher.publish_many(caller.tx, [NewEvent("order.two", {}, correlation_id="c", headers={"a": "b"})])
        )
    finally:
        current_context.reset(token)
    await done(publisher.publish(caller.tx, "order.three", {}))
    await caller.commit()
    rows = await reader.rows()
    cause = str(context.event_id)
    assert [row["headers"] for row in rows] == [
        {"tenant": "acme", "correlation_id": cause, "causation_id": cause},
        {"tenant": "acme", "a": "b", "correlation_id": "c", "causation_id": cause},
        None,
    ]
    assert [row["trace_context"] for row in rows] == ["00-trace", "00-trace", None]


# --- bad input ---


class Colour(StrEnum):
    RED = "red"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


CYCLE: dict[str, Any] = {}
CYCLE["me"] = CYCLE

BAD_PAYLOADS: dict[str, tuple[str, Any]] = {
    "NUL": ("payload.a", {"a": "x\0y"}),
    "NUL in a key": ("payload", {"x\0y": 1}),
    "NUL deep inside": ("payload.lines[2].text", {"lines": [{}, {}, {"text": "\0"}]}),
    "lone surrogate": ("payload.a", {"a": "\ud800"}),
    "lone surrogate in a key": ("payload", {"\udfff": 1}),
    "NaN": ("payload.a", {"a": math.nan}),
    "infinity": ("payload.a[0]", {"a": [math.inf]}),
    "minus infinity": ("payload.a.b", {"a": {"b": -math.inf}}),
    "bytes": ("payload.a", {"a": b"x"}),
    "bytearray": ("payload.a", {"a": bytearray(b"x")}),
    "set": ("payload.a", {"a": {1}}),
    "frozenset": ("payload.a", {"a": frozenset()}),
    "datetime without a time zone": ("payload.lines[1].at", {"lines": [{}, {"at": datetime(2030, 1, 1)}]}),
    "Decimal that is NaN": ("payload.a", {"a": Decimal("NaN")}),
    "complex": ("payload.a", {"a": 1j}),
    "object": ("payload.a", {"a": object()}),
    "class": ("payload.a", {"a": dict}),
    "generator": ("payload.a", {"a": iter(())}),
    "number of 5,000 digits": ("payload.a", {"a": 10**5000}),
    "key that is a number": ("payload", {1: "a"}),
    "key that is None": ("payload.a", {"a": {None: 1}}),
    "key that is a tuple": ("payload", {("a",): 1}),
    "too deep": ("payload" + ".a" * 100, nested(101)),
    "contains itself": ("payload" + ".me" * 100, CYCLE),
    "too large": ("payload", {"a": "x" * 262_144}),
    "too large in bytes": ("payload", {"a": "\u20ac" * 90_000}),
    "64 MB": ("payload", {"a": "x" * 64_000_000}),
    "list": ("payload", [1]),
    "text": ("payload", "{}"),
    "None": ("payload", None),
}

NAIVE = datetime(2030, 1, 1)
BAD_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty type": ("event_type", {"event_type": ""}),
    "type with a slash": ("event_type", {"event_type": "order/placed"}),
    "type with a star": ("event_type", {"event_type": "order.*"}),
    "type with a space": ("event_type", {"event_type": "order placed"}),
    "type with NUL": ("event_type", {"event_type": "order\0"}),
    "type with a surrogate": ("event_type", {"event_type": "order\ud800"}),
    "type of 201 characters": ("event_type", {"event_type": "e" * 201}),
    "type of 201 bytes": ("event_type", {"event_type": "\u20ac" * 67}),
    "type that is None": ("event_type", {"event_type": None}),
    "type that is bytes": ("event_type", {"event_type": b"order.placed"}),
    "empty target": ("target", {"target": ""}),
    "target with a slash": ("target", {"target": "a/b"}),
    "id that is text": ("event_id", {"event_id": "9f0d6a1e-0000-4000-8000-000000000000"}),
    "domain id that is text": ("domain_id", {"domain_id": "x"}),
    "version 0": ("event_version", {"event_version": 0}),
    "version 2**31": ("event_version", {"event_version": 2**31}),
    "version that is a bool": ("event_version", {"event_version": True}),
    "version that is text": ("event_version", {"event_version": "1"}),
    "priority 3": ("priority", {"priority": 3}),
    "empty idempotency key": ("idempotency_key", {"idempotency_key": ""}),
    "idempotency key with NUL": ("idempotency_key", {"idempotency_key": "a\0"}),
    "idempotency key of 256 characters": ("idempotency_key", {"idempotency_key": "k" * 256}),
    "trace context with a line break": ("trace_context", {"trace_context": "a\r\nb"}),
    "empty content class": ("content_class", {"content_class": ""}),
    "channel of 64 characters": ("channel", {"channel": "c" * 64}),
    "channel in capitals": ("channel", {"channel": "Outbox"}),
    "channel with a quote": ("channel", {"channel": 'a"; DROP TABLE core.outbox; --'}),
    "naive occurred_at": ("occurred_at", {"occurred_at": NAIVE}),
    "occurred_at that is text": ("occurred_at", {"occurred_at": "2030-01-01"}),
    "naive available_at": ("available_at", {"available_at": NAIVE}),
    "available_at in the year 1": ("available_at", {"available_at": datetime.min.replace(tzinfo=UTC)}),
    "available_at in the year 9999": ("available_at", {"available_at": datetime.max.replace(tzinfo=UTC)}),
    "negative delay": ("delay", {"delay": -1}),
    "delay that is NaN": ("delay", {"delay": math.nan}),
    "infinite delay": ("delay", {"delay": math.inf}),
    "delay that is text": ("delay", {"delay": "5"}),
    "delay of 11 years": ("delay", {"delay": timedelta(days=4018)}),
    "delay and available_at": ("delay", {"delay": 1, "available_at": datetime(2090, 1, 1, tzinfo=UTC)}),
    "expired before it is due": ("expires_in", {"expires_in": 5, "delay": 10}),
    "expired already": ("expires_at", {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}),
    "header with NUL": ("headers.a", {"headers": {"a": "\0"}}),
    "header name with NUL": ("headers", {"headers": {"\0": "a"}}),
    "header that is a number": ("headers.a", {"headers": {"a": 1}}),
    "header with a name of its own": ("headers.correlation_id", {"headers": {"correlation_id": "c"}}),
    "headers of 20 KB": ("headers", {"headers": {str(n): "x" * 2000 for n in range(10)}}),
    "65 headers": ("headers", {"headers": {str(n): "x" for n in range(65)}}),
    "headers that are a list": ("headers", {"headers": [("a", "b")]}),
    "correlation id with a surrogate": ("correlation_id", {"correlation_id": "\ud800"}),
    "empty causation id": ("causation_id", {"causation_id": ""}),
    "empty key": ("key", {"key": ""}),
    "key with NUL": ("key", {"key": "a\0"}),
    "unknown on_duplicate": ("on_duplicate", {"key": "k", "on_duplicate": "replace"}),
    "reschedule without a key": ("on_duplicate", {"on_duplicate": "reschedule"}),
    "ordering key of 801 bytes": ("ordering_key", {"ordering_key": "😀" * 200 + "k"}),
    "both keys": ("fairness_key", {"ordering_key": "a", "fairness_key": "b"}),
}


async def test_bad_input_is_refused_before_any_sql(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """A typed error that names the field and the remedy, and a transaction that goes on (PUB-3, D1, D2)."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        *((name, field, {"payload": payload}) for name, (field, payload) in BAD_PAYLOADS.items()),
        *((name, field, arguments) for name, (field, arguments) in BAD_FIELDS.items()),
    ]
    for name, field, arguments in cases:
        arguments = {"event_type": "order.placed", "payload": {}} | arguments
        with pytest.raises(PublishError) as refused:
            await done(publisher.publish(caller.tx, **arguments))
        assert refused.value.field == field, name
        assert refused.value.remedy, name
        assert len(str(refused.value)) < 1000, name
        # Refused by Postgres if anything had reached it: the transaction would be aborted.
        await caller.execute("SELECT 1")
    with pytest.raises(PayloadError):  # with a key there are two statements, and neither is sent
        await done(publisher.publish(caller.tx, "order.placed", {"a": "\0"}, key="k"))
    await done(publisher.publish(caller.tx, "order.placed", {"still": "usable"}, key="k"))
    await caller.commit()
    assert (await reader.row())["payload"] == {"still": "usable"}


async def test_a_bad_key_is_refused_before_any_sql(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """By cancel and reschedule as well (PUB-3)."""
    keys: list[Any] = ["", "a\0", "\ud800", "k" * 256, None, 5]
    times: list[dict[str, Any]] = [
        {"delay": -1},
        {"available_at": NAIVE},
        {"delay": 1, "available_at": datetime(2090, 1, 1, tzinfo=UTC)},
    ]
    cases: list[tuple[str, Callable[[], Any]]] = [
        *(("key", lambda key=key: publisher.cancel(caller.tx, key)) for key in keys),
        *(("key", lambda key=key: publisher.reschedule(caller.tx, key, delay=5)) for key in keys),
        *((next(iter(time)), lambda time=time: publisher.reschedule(caller.tx, "k", **time)) for time in times),
    ]
    await caller.execute("SELECT 1")
    for field, call in cases:
        with pytest.raises(FieldError) as refused:
            await done(call())
        assert refused.value.field == field
        await caller.execute("SELECT 1")
    await done(publisher.publish(caller.tx, "order.placed", {}))
    await caller.commit()
    assert len(await reader.rows()) == 1


async def test_text_of_another_class_is_stored_as_text(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """Drivers would write an enum member's name, or refuse it (PUB-3)."""
    await done(
        publisher.publish(
            caller.tx,
            Colour.RED,
            {"colour": Colour.RED, "tuple": (1, 2)},
            target=Colour.RED,
            idempotency_key=Colour.RED,
            key=Colour.RED,
            headers={"colour": Colour.RED},
        )
    )
    assert await done(publisher.reschedule(caller.tx, Colour.RED, delay=5)) is True
    await caller.commit()
    row = await reader.row()
    assert {row[name] for name in ("event_type", "target", "idempotency_key", "dedupe_key")} == {"red"}
    assert row["payload"] == {"colour": "red", "tuple": [1, 2]}
    assert row["headers"] == {"colour": "red"}


async def test_a_payload_at_the_limit_is_stored(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """256 KiB of JSON text, many bytes a character, and a limit of the publisher's own (D2, D3)."""
    whole = {"a": "\u20ac" * ((262_144 - len('{"a": "x"}')) // 3) + "x"}
    whole["a"] += "x" * (262_144 - len(json.dumps(whole, ensure_ascii=False).encode()))
    await done(publisher.publish(caller.tx, "order.placed", whole))
    small = Publisher(publisher.source, payload_limit=20)
    await done(small.publish(caller.tx, "order.placed", {"a": "x" * 11}))
    with pytest.raises(PayloadError, match="21 bytes of JSON, 20 are allowed"):
        await done(small.publish(caller.tx, "order.placed", {"a": "x" * 12}))
    await caller.commit()
    rows = await reader.rows()
    assert [row["payload"] for row in rows] == [whole, {"a": "x" * 11}]


# --- the transaction itself ---


async def test_without_a_transaction_nothing_is_published(
    contract_dsn: str, publisher: Publisher, reader: Reader
) -> None:
    """An event that commits by itself is tied to no change; drivers that begin by themselves are told apart (PUB-1)."""
    events = [NewEvent("order.placed", {})]

    async def refused(tx: Any) -> None:
        for call in (
            lambda: publisher.publish(tx, "order.placed", {}),
            lambda: publisher.publish_many(tx, events),
            lambda: publisher.cancel(tx, "k"),
            lambda: publisher.reschedule(tx, "k", delay=1),
        ):
            with pytest.raises(FieldError, match="no open transaction") as error:
                await done(call())
            assert error.value.field == "tx"

    connection = await asyncpg.connect(contract_dsn)
    await refused(connection)
    await connection.close()
    async with asyncpg.create_pool(contract_dsn, min_size=1, max_size=1) as pool, pool.acquire() as proxy:
        await refused(proxy)
    with psycopg.connect(contract_dsn, autocommit=True) as sync:
        await refused(sync)
        with sync.transaction():
            publisher.publish(sync, "order.placed", {"n": 1})
    async with await psycopg.AsyncConnection.connect(contract_dsn, autocommit=True) as asynchronous:
        await refused(asynchronous)
        async with asynchronous.transaction():
            await publisher.publish(asynchronous, "order.placed", {"n": 2})
    assert [row["payload"]["n"] for row in await reader.rows()] == [1, 2]


async def test_an_autocommit_engine_publishes_nothing(contract_dsn: str, publisher: Publisher, reader: Reader) -> None:
    """SQLAlchemy commits every statement by itself there; a connection that is set otherwise is accepted (PUB-1)."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    engine = sqlalchemy.create_engine(_url(contract_dsn, "psycopg"), **options)
    try:
        for make in (lambda: Session(engine), engine.connect):
            with make() as tx, pytest.raises(FieldError, match="no open transaction"):
                publisher.publish(tx, "order.placed", {})
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            publisher.publish(connection, "order.placed", {"n": 1})
            connection.commit()
    finally:
        engine.dispose()
    for dialect in ("asyncpg", "psycopg"):
        async_engine = create_async_engine(_url(contract_dsn, dialect), **options)
        try:
            async with AsyncSession(async_engine) as session:
                with pytest.raises(FieldError, match="no open transaction"):
                    await publisher.publish(session, "order.placed", {})
            async with async_engine.connect() as connection:
                with pytest.raises(FieldError, match="no open transaction"):
                    await publisher.publish(connection, "order.placed", {})
        finally:
            await async_engine.dispose()
    assert [row["payload"] for row in await reader.rows()] == [{"n": 1}]


async def test_a_connection_set_to_autocommit_publishes_nothing(
    contract_dsn: str, publisher: Publisher, reader: Reader
) -> None:
    """On an engine that begins transactions, one connection or session may still be set to commit by itself (PUB-1)."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    calls: list[Callable[[Any], Any]] = [
        lambda tx: publisher.publish(tx, "order.placed", {}),
        lambda tx: publisher.publish_many(tx, [NewEvent("order.placed", {})]),
        lambda tx: publisher.cancel(tx, "k"),
        lambda tx: publisher.reschedule(tx, "k", delay=1),
    ]
    engine = sqlalchemy.create_engine(_url(contract_dsn, "psycopg"))
    try:
        with engine.connect().execution_options(**options) as connection, Session(engine) as session:
            session.connection(execution_options=options)
            for tx, call in product((connection, session), calls):
                with pytest.raises(FieldError, match="no open transaction"):
                    call(tx)
                tx.rollback()
                if tx is session:
                    session.connection(execution_options=options)
    finally:
        engine.dispose()
    async_engine = create_async_engine(_url(contract_dsn, "asyncpg"))
    try:
        async with async_engine.connect() as async_connection, AsyncSession(async_engine) as async_session:
            await async_connection.execution_options(**options)
            await async_session.connection(execution_options=options)
            for async_tx, call in product((async_connection, async_session), calls):
                with pytest.raises(FieldError, match="no open transaction"):
                    await call(async_tx)
    finally:
        await async_engine.dispose()
    assert await reader.rows() == []


async def test_each_refusal_is_an_error_of_its_own(contract_dsn: str, publisher: Publisher) -> None:
    """An error that is shared keeps the frames of every call that ever raised it (PUB-1)."""
    refusals: list[FieldError] = []
    with psycopg.connect(contract_dsn, autocommit=True) as connection:
        for _ in range(3):
            with pytest.raises(FieldError, match="no open transaction") as error:
                publisher.publish(connection, "order.placed", {})
            refusals.append(error.value)
    assert len({id(each) for each in refusals}) == 3
    assert len({len(traceback.extract_tb(each.__traceback__)) for each in refusals}) == 1


@pytest.mark.parametrize("tx", [None, object(), "postgresql://host/db", 5], ids=["None", "object", "text", "number"])
async def test_what_is_no_transaction_is_refused(publisher: Publisher, tx: Any) -> None:
    """With the list of what is (PUB-1)."""
    with pytest.raises(FieldError, match="asyncpg, psycopg or Django connection, or a SQLAlchemy session") as refused:
        await done(publisher.publish(tx, "order.placed", {}))
    assert refused.value.field == "tx"


async def test_another_isolation_level_is_no_obstacle(
    caller: Transaction, publisher: Publisher, reader: Reader
) -> None:
    """Serializable and repeatable read transactions publish, also with a key (B13)."""
    if isinstance(caller, AsyncpgTransaction):
        await caller.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    else:
        await caller.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    await done(publisher.publish(caller.tx, "order.placed", {}, key="k"))
    await done(publisher.publish(caller.tx, "order.placed", {}, key="k", on_duplicate="reschedule"))
    assert await done(publisher.cancel(caller.tx, "k")) is True
    await caller.commit()
    assert len(await reader.rows()) == 1


async def test_odd_session_settings_change_nothing(caller: Transaction, publisher: Publisher, reader: Reader) -> None:
    """Time zone, date style and interval style of the caller's session (C2)."""
    for setting in ("TimeZone = 'Asia/Kathmandu'", "DateStyle = 'SQL, DMY'", "IntervalStyle = 'sql_standard'"):
        await caller.execute(f"SET LOCAL {setting}")
    moment = datetime(2090, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
    moments = {"occurred_at": moment, "available_at": moment, "expires_at": moment + timedelta(days=1)}
    await done(publisher.publish(caller.tx, "order.placed", {}, **moments))
    await done(publisher.publish(caller.tx, "order.paid", {}, expires_in=3e8))
    await done(publisher.publish(caller.tx, "order.remind", {}, key="k", delay=90061.5))
    await done(publisher.publish(caller.tx, "order.remind", {}, key="k", delay=7200, on_duplicate="reschedule"))
    await caller.commit()
    placed, paid, remind = await reader.rows()
    assert {name: placed[name] for name in moments} == moments
    assert paid["expires_at"] - paid["created_at"] == timedelta(seconds=3e8)
    assert remind["available_at"] - remind["created_at"] == timedelta(hours=2)
