"""The envelope that publish returns has the payload that was committed, as handlers get it (PUB-6)."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reactions

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")


@pytest.mark.parametrize("options", [{}, {"priority": 0}], ids=["plain", "options"])
async def test_a_reaction_gets_what_was_committed(dsn: str, conn: asyncpg.Connection, options: dict[str, Any]) -> None:
    """What the caller changes after publish is not part of the event."""
    registry = HandlerRegistry()
    seen: list[dict[str, Any]] = []

    @registry.handler("order.placed", name="shop.ship", via="in_process")
    async def ship(event: EventEnvelope) -> None:
        seen.append(event.payload)

    payload: dict[str, Any] = {"n": 1, "lines": [{"sku": "a"}], "place": (1, 2)}
    async with Reactions(dsn, registry) as reactions:
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, "order.placed", payload, **options)
        payload["n"] = 999
        payload["lines"][0]["sku"] = "b"
        reactions.react(event)
        await reactions.drain(30)
    assert seen == [event.payload] == [{"n": 1, "lines": [{"sku": "a"}], "place": [1, 2]}]


async def test_an_event_that_was_made_before(conn: asyncpg.Connection) -> None:
    payload: dict[str, Any] = {"n": 1}
    async with conn.transaction():
        event = await PUBLISHER.publish_event(conn, NewEvent("order.placed", payload))
    payload["n"] = 999
    assert event.payload == {"n": 1}
