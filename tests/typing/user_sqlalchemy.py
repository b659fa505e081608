"""An application with SQLAlchemy: sessions and connections, both that block and that are awaited."""

from __future__ import annotations

from typing import assert_type
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session

from holdfast import EventEnvelope, NewEvent, Publisher

publisher = Publisher("shop")


def blocking(session: Session, current: scoped_session[Session], connection: Connection) -> None:
    assert_type(publisher.publish(session, "order.placed", {"n": 1}, delay=60), EventEnvelope)
    assert_type(publisher.publish(current, "order.placed", {}), EventEnvelope)
    assert_type(publisher.publish(connection, "order.placed", {}), EventEnvelope)
    assert_type(publisher.publish_many(session, [NewEvent("order.placed", {})]), list[UUID])
    assert_type(publisher.cancel(session, "k-1"), bool)
    assert_type(publisher.reschedule(session, "k-1", delay=60), bool)


async def awaited(
    session: AsyncSession, current: async_scoped_session[AsyncSession], connection: AsyncConnection
) -> None:
    assert_type(await publisher.publish(session, "order.placed", {"n": 1}, delay=60), EventEnvelope)
    assert_type(await publisher.publish(current, "order.placed", {}), EventEnvelope)
    assert_type(await publisher.publish(connection, "order.placed", {}), EventEnvelope)
    assert_type(await publisher.publish_many(session, [NewEvent("order.placed", {})]), list[UUID])
    assert_type(await publisher.cancel(session, "k-1"), bool)
    assert_type(await publisher.reschedule(session, "k-1", delay=60), bool)


async def with_a_maker(sessions: async_sessionmaker[AsyncSession]) -> None:
    async with sessions.begin() as session:
        assert_type(await publisher.publish(session, "order.placed", {}), EventEnvelope)
