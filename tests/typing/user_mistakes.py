"""Mistakes of applications. Both type checkers report each line that ends with the comment `mistake`, and no other."""

from __future__ import annotations

from typing import Any

import asyncpg
import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from holdfast import HandlerRegistry, NewEvent, Publisher

publisher = Publisher("shop")
event = NewEvent("order.placed", {})


async def a_typo_in_an_option(connection: asyncpg.Connection, session: Session) -> None:
    await publisher.publish(connection, "order.placed", {}, dealy=60)  # mistake
    publisher.publish(session, "order.placed", {}, dealy=60)  # mistake
    await publisher.reschedule(connection, "k-1", dealy=60)  # mistake
    NewEvent("order.placed", {}, dealy=60)  # mistake
    HandlerRegistry(context="billing")  # mistake


async def an_option_of_another_type(connection: asyncpg.Connection, session: Session) -> None:
    await publisher.publish(connection, "order.placed", {}, delay="60")  # mistake
    await publisher.publish(connection, "order.placed", {}, on_duplicate="replace")  # mistake
    publisher.publish(session, "order.placed", {}, event_id="o-1")  # mistake
    publisher.publish(session, "order.placed", {}, headers={"attempt": 1})  # mistake
    publisher.publish(session, "order.placed", ["o-1"])  # mistake


async def a_forgotten_await(
    connection: asyncpg.Connection,
    awaited: psycopg.AsyncConnection[Any],
    session: AsyncSession,
    of_sqlalchemy: AsyncConnection,
    pool: asyncpg.Pool,
) -> None:
    publisher.publish(connection, "order.placed", {})  # mistake
    publisher.publish_event(connection, event)  # mistake
    publisher.publish_many(connection, [event])  # mistake
    publisher.cancel(connection, "k-1")  # mistake
    publisher.reschedule(connection, "k-1", delay=60)  # mistake
    publisher.publish(awaited, "order.placed", {})  # mistake
    publisher.publish(session, "order.placed", {}, delay=60)  # mistake
    publisher.publish(of_sqlalchemy, "order.placed", {})  # mistake
    async with pool.acquire() as of_pool:
        publisher.publish(of_pool, "order.placed", {})  # mistake
    publisher.publish(connection, "order.placed", {}).event_id  # mistake  # noqa: B018


async def an_await_too_many(connection: psycopg.Connection[Any], session: Session) -> None:
    await publisher.publish(connection, "order.placed", {})  # mistake
    await publisher.publish_many(session, [event])  # mistake
    await publisher.cancel(session, "k-1")  # mistake


def no_transaction(dsn: str, pool: asyncpg.Pool) -> None:
    publisher.publish(dsn, "order.placed", {})  # mistake
    publisher.publish(None, "order.placed", {})  # mistake
    publisher.publish(pool, "order.placed", {})  # mistake
    publisher.bind(dsn)  # mistake
