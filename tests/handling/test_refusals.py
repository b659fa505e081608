"""What no worker can serve is refused when it is registered, or when the worker is made or starts, with the remedy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.ext.asyncio import create_async_engine as async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from holdfast import EventEnvelope, HandlerRegistry, Reactions, Worker
from holdfast.errors import ConfigurationError
from holdfast.transaction_kinds import (
    ASYNCPG,
    DJANGO,
    PSYCOPG,
    PSYCOPG_ASYNC,
    SQLALCHEMY_ASYNC_CONNECTION,
    SQLALCHEMY_ASYNC_SESSION,
    SQLALCHEMY_CONNECTION,
    SQLALCHEMY_SESSION,
    TransactionKind,
)
from tests.handling.kinds import KINDS, Kind
from tests.servers import SessionServer

if TYPE_CHECKING:
    from psycopg import AsyncConnection as Elsewhere


ADDRESS = "postgresql://app@127.0.0.1:1/app"


def kind_of(function: Any) -> TransactionKind | None:
    return HandlerRegistry().add("ledger.book", ("order.booked",), function).parameters.transaction


def coroutine(annotation: Any) -> Any:
    async def handle(event: EventEnvelope, tx: Any) -> None: ...

    handle.__annotations__["tx"] = annotation
    return handle


def function(annotation: Any) -> Any:
    def handle(event: EventEnvelope, tx: Any) -> None: ...

    handle.__annotations__["tx"] = annotation
    return handle


class OwnSession(AsyncSession):
    """An application's own class."""


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (coroutine(asyncpg.Connection), ASYNCPG),
        (coroutine(Any), ASYNCPG),
        (coroutine(AsyncSession), SQLALCHEMY_ASYNC_SESSION),
        (coroutine(OwnSession), SQLALCHEMY_ASYNC_SESSION),
        (coroutine(AsyncConnection), SQLALCHEMY_ASYNC_CONNECTION),
        (coroutine(psycopg.AsyncConnection), PSYCOPG_ASYNC),
        (coroutine(psycopg.AsyncConnection[dict[str, Any]]), PSYCOPG_ASYNC),
        (coroutine(AsyncSession | Session), SQLALCHEMY_ASYNC_SESSION),
        (coroutine("AsyncSession"), SQLALCHEMY_ASYNC_SESSION),
        (function(Session), SQLALCHEMY_SESSION),
        (function(AsyncSession | Session), SQLALCHEMY_SESSION),
        (function(sqlalchemy.Connection), SQLALCHEMY_CONNECTION),
        (function(psycopg.Connection), PSYCOPG),
        (function(BaseDatabaseWrapper), DJANGO),
    ],
)
def test_the_annotation_decides(handler: Any, kind: TransactionKind) -> None:
    """The class that `tx` is annotated with says which transaction the handler gets (LSN-13)."""
    assert kind_of(handler) is kind


async def undefined(event: EventEnvelope, tx: Elsewhere) -> None: ...


def unannotated(event: EventEnvelope, tx) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (function(AsyncSession), "make it async def: sqlalchemy.ext.asyncio.AsyncSession is used with await; or"),
        (coroutine(Session), "make it a plain def, which runs in a thread: sqlalchemy.orm.Session blocks; or"),
        (coroutine(BaseDatabaseWrapper), "make it a plain def, which runs in a thread"),
        (function(asyncpg.Connection), "make it async def: asyncpg.Connection is used with await"),
        (coroutine(asyncpg.Pool), "is annotated with asyncpg.pool.Pool, which it is not; annotate it with asyncpg.Con"),
        (coroutine(sqlalchemy.Engine), "which it is not"),
        (coroutine(dict), "which it is not"),
        (undefined, "is annotated with Elsewhere, which is not defined"),
        (unannotated, "has no annotation that says which library it is of"),
    ],
)
def test_an_annotation_that_cannot_be_served(handler: Any, words: str) -> None:
    """Refused at registration; the text says what to write (LSN-13)."""
    with pytest.raises(ConfigurationError) as refusal:
        kind_of(handler)
    assert refusal.value.field == "ledger.book.tx"
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.source.__name__ not in ("none", "django")], ids=str)
def test_a_kind_that_the_worker_was_not_given(kind: Kind) -> None:
    """Refused when the worker, or the reactions, are made (LSN-13)."""
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), kind.handler(_nothing), via="in_process")
    for make in (Worker, Reactions):
        with pytest.raises(ConfigurationError, match=r"ledger\.book\.tx is annotated with .* nothing that makes one"):
            make(ADDRESS, registry)


def test_what_the_worker_was_given_is_named() -> None:
    """An engine makes connections, and a handler takes a session (LSN-13)."""
    registry = HandlerRegistry()

    async def book(event: EventEnvelope, tx: AsyncSession) -> None: ...

    registry.add("ledger.book", ("order.booked",), book)
    engine = async_engine(ADDRESS.replace("postgresql:", "postgresql+asyncpg:"))
    with pytest.raises(
        ConfigurationError, match=r"was given an AsyncEngine, which makes sqlalchemy\.ext\.asyncio\.Asy"
    ):
        Worker(ADDRESS, registry, transactions=engine)


async def _nothing(event: EventEnvelope, work: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: scoped_session(sessionmaker()), "pass its session_factory"),
        (lambda: async_scoped_session(async_sessionmaker(), int), "pass its session_factory"),
        (lambda: Session(), "pass the sessionmaker"),
        (lambda: "shop.db:Session", "pass a sessionmaker or an engine of SQLAlchemy"),
        (lambda: [sessionmaker(), sessionmaker()], "has two sources of sqlalchemy.orm.Session"),
        (lambda: object(), "pass a sessionmaker or an engine of SQLAlchemy, a pool of psycopg_pool"),
    ],
)
def test_transactions_that_are_none(given: Any, words: str) -> None:
    """What is passed by mistake is named, with what to pass instead (LSN-13)."""
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), coroutine(asyncpg.Connection))
    with pytest.raises(ConfigurationError) as refusal:
        Worker(ADDRESS, registry, transactions=given())
    assert refusal.value.field == "transactions" and words in str(refusal.value)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.source.__name__ != "none"], ids=str)
async def test_another_database_is_refused_at_the_start(postgres_server: SessionServer, dsn: str, kind: Kind) -> None:
    """What a handler writes there could not commit with its event; without this, no event would ever run (LSN-13)."""
    other = postgres_server.create(schema=True)
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), kind.handler(_nothing))
    try:
        async with kind.source(postgres_server.dsn(other)) as transactions:
            with pytest.raises(ConfigurationError, match=r"transactions for .* lead to the database"):
                async with Worker(dsn, registry, observers=(), transactions=transactions):
                    pass
    finally:
        postgres_server.drop(other)


async def test_a_login_without_the_role_is_refused_at_the_start(
    postgres_server: SessionServer, dsn: str, conn: asyncpg.Connection
) -> None:
    """The application's login has to be allowed what happens in its transaction (LSN-13)."""
    await conn.execute("CREATE ROLE shop_without LOGIN PASSWORD 'secret'")
    try:
        address = dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
        user, _, place = address.partition("://")[2].rpartition("@")
        assert user
        engine = async_engine(f"postgresql+asyncpg://shop_without:secret@{place}")
        registry = HandlerRegistry()
        registry.add("ledger.book", ("order.booked",), coroutine(AsyncSession))
        with pytest.raises(ConfigurationError, match="GRANT holdfast_worker TO shop_without"):
            async with Worker(dsn, registry, observers=(), transactions=async_sessionmaker(engine)):
                pass
        await engine.dispose()
    finally:
        await conn.execute("DROP ROLE shop_without")


async def test_an_engine_in_autocommit_mode_is_refused_at_the_start(dsn: str) -> None:
    """It has no transactions (LSN-13)."""
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), coroutine(AsyncSession))
    registry.add("ledger.note", ("order.booked",), function(Session))
    address = dsn.replace("postgresql://", "postgresql+{}://", 1)
    engine = async_engine(address.format("asyncpg"), isolation_level="AUTOCOMMIT")
    blocking = sqlalchemy.create_engine(address.format("psycopg"))
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        async with Worker(
            dsn, registry, observers=(), transactions=[async_sessionmaker(engine), sessionmaker(blocking)]
        ):
            pass
    await engine.dispose()
    blocking = sqlalchemy.create_engine(address.format("psycopg"), isolation_level="AUTOCOMMIT")
    engine = async_engine(address.format("asyncpg"))
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        async with Worker(
            dsn, registry, observers=(), transactions=[async_sessionmaker(engine), sessionmaker(blocking)]
        ):
            pass
    await engine.dispose()
    blocking.dispose()


async def test_a_pool_that_is_not_open_is_opened_and_closed(dsn: str) -> None:
    """One that stands in a module cannot be opened there; one that was open stays so (LSN-13)."""
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), coroutine(psycopg.AsyncConnection))
    pool = psycopg_pool.AsyncConnectionPool(dsn, min_size=1, open=False)
    async with Worker(dsn, registry, observers=(), transactions=pool):
        assert not pool.closed
    assert pool.closed
    async with psycopg_pool.AsyncConnectionPool(dsn, min_size=1, open=False) as pool:
        async with Worker(dsn, registry, observers=(), transactions=pool):
            pass
        assert not pool.closed


APP = """
    from holdfast import EventEnvelope, HandlerRegistry
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session, sessionmaker

    engine = create_engine("{address}")
    Sessions = sessionmaker(engine)
    registry = HandlerRegistry()

    @registry.handler("order.booked", name="ledger.book")
    def book(event: EventEnvelope, tx: Session) -> None:
        tx.execute(text("CREATE TABLE booked ()"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_the_command_names_them_by_module(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, processes: int
) -> None:
    """holdfast worker app:registry --transactions app:Sessions, also with several processes (LSN-13)."""
    from tests.worker.support import publish, settled

    address = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    (tmp_path / "app.py").write_text(textwrap.dedent(APP.format(address=address)))
    command = [sys.executable, "-m", "holdfast", "worker", "app:registry", "--dsn", dsn, "--processes", str(processes)]
    missing = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert missing.returncode == 2 and "--transactions MODULE:Session" in missing.stderr
    worker = subprocess.Popen(
        [*command, "--transactions", "app:Sessions"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        await settled(conn, await publish(conn, "order.booked"))
    finally:
        worker.terminate()
        assert worker.wait(30) == 0
    assert await conn.fetchval("SELECT to_regclass('booked') IS NOT NULL")
