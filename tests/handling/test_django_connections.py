"""Connections that handlers without `tx` open through Django, in threads that live as long as the worker (LSN-13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from asgiref.sync import sync_to_async

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from tests.handling.kinds import NAME, django
from tests.worker.support import publish, running, settled, until


def plain(ask: Callable[[], None]) -> tuple[Any, int]:
    def look(event: EventEnvelope) -> None:
        ask()

    return look, 1


def asynchronous(ask: Callable[[], None]) -> tuple[Any, int]:
    async def look(event: EventEnvelope) -> None:
        await sync_to_async(ask)()

    return look, 2  # the first finds out


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_a_broken_connection_is_opened_again(dsn: str, conn: asyncpg.Connection, kind: Any) -> None:
    """An outage does not fail whatever comes to the thread after it; at the end nothing is left open (LSN-2)."""
    async with django(dsn) as connection:

        def ask() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")

        registry = HandlerRegistry()
        handler, attempts = kind(ask)
        retry = RetryPolicy(max_attempts=attempts, base_delay=0.05)
        registry.add("ledger.look", ("order.placed",), handler, retry=retry)
        sessions = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
        async with running(dsn, registry):
            await settled(conn, await publish(conn, "order.placed"))
            assert await conn.fetchval(sessions, NAME) == 1
            await until(lambda: _gone(conn), what="the session is gone")
            await settled(conn, await publish(conn, "order.placed"))
        if kind is plain:
            await until(lambda: _gone(conn), what="the thread has closed its connection")
        else:
            await sync_to_async(lambda: connection.close())()


async def _gone(conn: asyncpg.Connection) -> bool:
    return not await conn.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", NAME)
