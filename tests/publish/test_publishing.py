"""Publishing into a database that is not ready, one envelope twice, and an event without a change (PUB-6)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import django
import psycopg
import pytest
from django.conf import settings
from django.db import connections, transaction
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import EventEnvelope, NewEvent, Publisher
from holdfast.errors import FieldError, NotPermitted, SchemaMismatch

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")
Work = Callable[[Publisher, Any], Any]


async def _asyncpg(dsn: str, work: Work) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await work(PUBLISHER, connection)
    finally:
        await connection.close()


async def _psycopg(dsn: str, work: Work) -> None:
    with psycopg.connect(dsn) as connection:
        await _settled(work(PUBLISHER, connection))


async def _psycopg_async(dsn: str, work: Work) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await work(PUBLISHER, connection)


async def _sqlalchemy(dsn: str, work: Work) -> None:
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    try:
        with Session(engine) as session, session.begin():
            await _settled(work(PUBLISHER, session))
    finally:
        engine.dispose()


async def _sqlalchemy_async(dsn: str, work: Work) -> None:
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with AsyncSession(engine) as session, session.begin():
            await work(PUBLISHER, session)
    finally:
        await engine.dispose()


async def _django(dsn: str, work: Work, *, atomic: bool = True) -> None:
    parts = urlsplit(dsn)
    options = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": parts.port or "",
    }

    def inside() -> None:
        if not settings.configured:
            settings.configure(DATABASES={})
            django.setup()
        alias = f"newcomer_{uuid4().hex}"
        connections.settings[alias] = connections.configure_settings({"default": {}, alias: options})[alias]
        try:
            with transaction.atomic(using=alias) if atomic else contextlib.nullcontext():
                work(PUBLISHER, connections[alias])
        finally:
            connections[alias].close()

    await asyncio.to_thread(inside)


async def _settled(result: Any) -> None:
    if isinstance(result, Awaitable):
        await result


DRIVERS = [_asyncpg, _psycopg, _psycopg_async, _sqlalchemy, _sqlalchemy_async, _django]
every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=lambda each: each.__name__[1:])


def one(publisher: Publisher, tx: Any) -> Any:
    return publisher.publish(tx, "order.placed", {})


def keyed(publisher: Publisher, tx: Any) -> Any:
    return publisher.publish(tx, "order.placed", {}, key="k-1")


def many(publisher: Publisher, tx: Any) -> Any:
    return publisher.publish_many(tx, [NewEvent("order.placed", {})])


def given(publisher: Publisher, tx: Any) -> Any:
    return publisher.publish(tx, "order.placed", {}, event_id=uuid4())


@every_driver
@pytest.mark.parametrize("work", [one, keyed, many, given])
async def test_a_database_without_the_schema_names_the_command(empty_dsn: str, driver: Any, work: Work) -> None:
    """With every driver, for every way to publish (PUB-6)."""
    with pytest.raises(SchemaMismatch, match=r"no schema \w+ \(not installed\); run holdfast migrate apply") as refused:
        await driver(empty_dsn, work)
    assert refused.value.remedy == "holdfast migrate apply"
    assert refused.value.__cause__ is not None


async def test_another_schema_is_named_in_the_command(empty_dsn: str) -> None:
    connection = await asyncpg.connect(empty_dsn)
    try:
        async with connection.transaction():
            with pytest.raises(SchemaMismatch, match="holdfast migrate apply --schema events"):
                await Publisher("shop", schema="events").publish(connection, "order.placed", {})
    finally:
        await connection.close()


@every_driver
async def test_a_schema_of_another_release_names_the_command(dsn: str, conn: asyncpg.Connection, driver: Any) -> None:
    """PUB-6."""
    await conn.execute("ALTER TABLE core.outbox RENAME COLUMN channel TO was_channel")
    with pytest.raises(SchemaMismatch, match=r"another release.*holdfast migrate apply"):
        await driver(dsn, one)


@pytest.fixture
async def stranger(dsn: str, conn: asyncpg.Connection) -> AsyncIterator[str]:
    """A login that was granted nothing."""
    name = f"stranger_{uuid4().hex[:12]}"
    await conn.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2]
    yield urlunsplit(parts._replace(netloc=f"{name}:x@{place}"))
    with contextlib.suppress(asyncpg.PostgresError):
        await conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@every_driver
async def test_a_missing_privilege_names_the_role(
    dsn: str, stranger: str, conn: asyncpg.Connection, driver: Any
) -> None:
    """And with that role, it publishes (PUB-6)."""
    for work in (one, given):
        with pytest.raises(NotPermitted, match="GRANT holdfast_producer") as refused:
            await driver(stranger, work)
        assert refused.value.problem and refused.value.remedy
    await conn.execute(f"GRANT holdfast_producer TO {urlsplit(stranger).username}")
    for work in (one, keyed, many, given):
        await driver(stranger, work)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 4


@every_driver
async def test_one_envelope_twice_leaves_the_transaction_usable(
    dsn: str, conn: asyncpg.Connection, driver: Any
) -> None:
    """A typed error, no error of the driver; what else the transaction does is committed (PUB-6)."""
    event = NewEvent("order.placed", {"n": 1}, event_id=uuid4())
    await driver(dsn, lambda publisher, tx: publisher.publish_event(tx, event))

    def again(publisher: Publisher, tx: Any) -> Any:
        published = publisher.publish(tx, "order.shipped", {})
        if not isinstance(published, Awaitable):
            with pytest.raises(FieldError, match="published before") as refused:
                publisher.publish_event(tx, event)
            assert refused.value.field == "event_id"
            with pytest.raises(FieldError, match="event_id is taken for 1 of 2 events, and the others"):
                publisher.publish_many(tx, [event, NewEvent("order.paid", {})])
            return None

        async def awaited() -> None:
            await published
            with pytest.raises(FieldError, match="published before"):
                await publisher.publish_event(tx, event)
            with pytest.raises(FieldError, match="event_id is taken for 1 of 2 events, and the others"):
                await publisher.publish_many(tx, [event, NewEvent("order.paid", {})])

        return awaited()

    await driver(dsn, again)
    types = await conn.fetch("SELECT event_type FROM core.outbox ORDER BY seq")
    assert [row[0] for row in types] == ["order.placed", "order.shipped", "order.paid"]


async def test_an_envelope_that_is_published_again(conn: asyncpg.Connection) -> None:
    """Through the protocol, in the same transaction; and twice in one call, before any SQL (PUB-6)."""
    async with conn.transaction():
        envelope = await PUBLISHER.publish(conn, "order.placed", {})
        with pytest.raises(FieldError, match=r"event_id .* is taken"):
            await PUBLISHER.bind(conn).publish(envelope)
        twice = NewEvent("order.placed", {}, event_id=uuid4())
        with pytest.raises(FieldError, match=str(twice.event_id)):
            await PUBLISHER.publish_many(conn, [twice, twice])
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


async def test_ids_that_are_given_are_written_like_others(conn: asyncpg.Connection) -> None:
    """The statement for given ids writes the same row (PUB-6)."""
    options: dict[str, Any] = {
        "event_version": 3,
        "target": "billing",
        "domain_id": uuid4(),
        "idempotency_key": "k",
        "trace_context": "00-t",
        "channel": "hot",
        "headers": {"tenant": "acme"},
        "priority": 0,
        "delay": 60,
        "expires_in": 3600,
    }
    async with conn.transaction():
        await PUBLISHER.publish(conn, "order.placed", {"n": 1}, **options)
        await PUBLISHER.publish(conn, "order.placed", {"n": 1}, **options, event_id=uuid4())
        await PUBLISHER.publish_many(conn, [NewEvent("order.placed", {"n": 1}, **options, event_id=uuid4())])
    first, *others = (
        {name: value for name, value in row.items() if name not in ("id", "seq", "occurred_at")}
        for row in await conn.fetch("SELECT * FROM core.outbox ORDER BY seq")
    )
    assert others == [first, first]


# --- an event alone ---


async def test_an_event_alone_is_one_statement_that_commits(dsn: str, conn: asyncpg.Connection) -> None:
    """Connections without a transaction, and a pool (PUB-6)."""
    assert isinstance(await PUBLISHER.publish_alone(conn, "a.b", {"n": 1}), EventEnvelope)
    await PUBLISHER.publish_alone(conn, "a.b", {"n": 1}, delay=60)
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await PUBLISHER.publish_alone(pool, "a.b", {"n": 1})
    with psycopg.connect(dsn, autocommit=True) as connection:
        PUBLISHER.publish_alone(connection, "a.b", {"n": 1})
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as awaited:
        await PUBLISHER.publish_alone(awaited, "a.b", {"n": 1})
    await _django(dsn, lambda publisher, tx: publisher.publish_alone(tx, "a.b", {"n": 1}), atomic=False)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 6
    with pytest.raises(FieldError, match="open transaction"):
        await _django(dsn, lambda publisher, tx: publisher.publish_alone(tx, "a.b", {}))
    async with conn.transaction():
        with pytest.raises(FieldError, match="open transaction"):
            await PUBLISHER.publish_alone(conn, "a.b", {})
    with pytest.raises(FieldError, match="key"):
        await PUBLISHER.publish_alone(conn, "a.b", {}, key="k")
    with psycopg.connect(dsn) as connection, pytest.raises(FieldError, match="opens one"):
        PUBLISHER.publish_alone(connection, "a.b", {})
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as of_sqlalchemy, pytest.raises(FieldError, match="SQLAlchemy"):
        PUBLISHER.publish_alone(of_sqlalchemy, "a.b", {})
    engine.dispose()
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        with pytest.raises(FieldError, match="publish_alone"):
            await PUBLISHER.publish(pool, "a.b", {})  # type: ignore[call-overload]
    with pytest.raises(FieldError, match="publish_alone"):
        await PUBLISHER.publish(conn, "a.b", {})
