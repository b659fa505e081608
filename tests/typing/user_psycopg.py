"""An application with psycopg: connections that block, and connections that are awaited."""

from __future__ import annotations

from typing import Any, assert_type
from uuid import UUID

import psycopg

from holdfast import EventEnvelope, NewEvent, Publisher

publisher = Publisher("shop")


def blocking(connection: psycopg.Connection[Any]) -> None:
    assert_type(publisher.publish(connection, "order.placed", {"n": 1}, delay=60), EventEnvelope)
    assert_type(publisher.publish_event(connection, NewEvent("order.placed", {})), EventEnvelope)
    assert_type(publisher.publish_many(connection, [NewEvent("order.placed", {})]), list[UUID])
    assert_type(publisher.cancel(connection, "k-1"), bool)
    assert_type(publisher.reschedule(connection, "k-1", delay=60), bool)


def with_rows_as_dicts(connection: psycopg.Connection[dict[str, Any]]) -> None:
    assert_type(publisher.publish(connection, "order.placed", {}).event_id, UUID)


async def awaited(connection: psycopg.AsyncConnection[Any]) -> None:
    assert_type(await publisher.publish(connection, "order.placed", {"n": 1}, delay=60), EventEnvelope)
    assert_type(await publisher.publish_event(connection, NewEvent("order.placed", {})), EventEnvelope)
    assert_type(await publisher.publish_many(connection, [NewEvent("order.placed", {})]), list[UUID])
    assert_type(await publisher.cancel(connection, "k-1"), bool)
    assert_type(await publisher.reschedule(connection, "k-1", delay=60), bool)
