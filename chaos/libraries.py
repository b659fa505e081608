"""The handlers' transactions in the library that CHAOS_LIBRARY names; without it, asyncpg on the worker's sessions.

`holdfast worker chaos.app:registry --transactions chaos.libraries:transactions`
"""

import asyncio
import contextlib
import os
import select
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast import EventEnvelope, HandlerContext, Publisher

LIBRARIES = ("async_session", "session", "psycopg_async", "psycopg", "django")
LIBRARY = os.environ.get("CHAOS_LIBRARY", "")
SYNCHRONOUS = LIBRARY in ("session", "psycopg", "django")
_PLACES = 10
# What a line that is dead must not hold for longer.
_LIMITS = {"connect_timeout": 5, "tcp_user_timeout": 5000, "keepalives_idle": 3, "keepalives_interval": 2}
_EFFECT = "INSERT INTO chaos.effects (handler, key) VALUES ({}, {})"

Body = Callable[[EventEnvelope, Any, HandlerContext], Awaitable[None]]


def _source(dsn: str) -> tuple[Any, Any]:
    """What makes the transactions, and the class of `tx`."""
    match LIBRARY:
        case "async_session":
            from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

            address = dsn.partition("?")[0].replace("postgresql://", "postgresql+asyncpg://", 1)
            engine = create_async_engine(address, pool_size=_PLACES, connect_args={"timeout": 5})
            return async_sessionmaker(engine), AsyncSession
        case "session":
            from sqlalchemy import create_engine
            from sqlalchemy.orm import Session, sessionmaker

            address = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
            return sessionmaker(create_engine(address, pool_size=_PLACES, connect_args=_LIMITS)), Session
        case "psycopg_async":
            import psycopg
            from psycopg_pool import AsyncConnectionPool

            pool: Any = AsyncConnectionPool(
                dsn,
                min_size=1,
                max_size=_PLACES,
                open=False,
                kwargs=_LIMITS,
                check=AsyncConnectionPool.check_connection,
            )
            return pool, psycopg.AsyncConnection
        case "psycopg":
            import psycopg
            from psycopg_pool import ConnectionPool

            pool = ConnectionPool(
                dsn, min_size=1, max_size=_PLACES, open=False, kwargs=_LIMITS, check=ConnectionPool.check_connection
            )
            return pool, psycopg.Connection
        case "django":
            return _django(dsn)
    import asyncpg

    return None, asyncpg.Connection


def _django(dsn: str) -> tuple[Any, Any]:
    import django
    from django.conf import settings

    parts = urlsplit(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": parts.port,
        "OPTIONS": _LIMITS,
    }
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
    django.setup()
    from django.db import connection
    from django.db.backends.base.base import BaseDatabaseWrapper

    return connection, BaseDatabaseWrapper


transactions, _annotation = _source(os.environ.get("HOLDFAST_DSN", ""))


def in_transaction(body: Body) -> Callable[..., Any]:
    """A handler that does what the body does, with a transaction of the library; in a thread if that blocks."""
    handle: Callable[..., Any]
    if SYNCHRONOUS:

        def handle(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
            with contextlib.suppress(StopIteration):
                body(event, tx, context).__await__().__next__()  # to its end: it never suspends
    else:

        async def handle(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
            await body(event, tx, context)

    handle.__annotations__ = {"event": EventEnvelope, "tx": _annotation, "context": HandlerContext}
    return handle


def in_batch(body: Callable[[list[EventEnvelope], Any, list[HandlerContext]], Awaitable[None]]) -> Callable[..., Any]:
    """A batch handler that does what the body does, with a transaction of the library."""
    handle = in_transaction(body)  # type: ignore[arg-type]
    handle.__annotations__ |= {"event": list[EventEnvelope], "context": list[HandlerContext]}
    return handle


async def write(tx: Any, handler: str, key: str) -> None:
    """Write an effect."""
    match LIBRARY:
        case "async_session" | "session":
            from sqlalchemy import text

            await _do(tx.execute(text(_EFFECT.format(":handler", ":key")), {"handler": handler, "key": key}))
        case "psycopg_async" | "psycopg":
            await _do(tx.execute(_EFFECT.format("%s", "%s"), [handler, key]))
        case "django":
            with tx.cursor() as cursor:
                cursor.execute(_EFFECT.format("%s", "%s"), [handler, key])
        case _:
            await tx.execute(_EFFECT.format("$1", "$2"), handler, key)


async def publish(publisher: Publisher, tx: Any, event_type: str, key: str) -> None:
    """Publish an event with the effect."""
    await _do(publisher.publish(tx, event_type, {}, idempotency_key=key))


async def pause(seconds: float) -> None:
    """Wait, in the way that the handler may."""
    if SYNCHRONOUS:
        select.select([], [], [], seconds)  # time.sleep fails under a library that moves the clock
    else:
        await asyncio.sleep(seconds)


async def _do(result: Any) -> None:
    if not SYNCHRONOUS:
        await result
