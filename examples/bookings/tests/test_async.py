"""Asynchronous tests: handlers run on the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from examples.bookings.partners import Partners
from examples.bookings.tests.conftest import Book
from holdfast import EventEnvelope, HandlerRegistry
from holdfast.testing import AsyncOutbox


@pytest.mark.parametrize("seats", [["A1"], ["B1", "B2"]], ids="+".join)
async def test_paid_seats_become_tickets(
    async_outbox: AsyncOutbox, book: Book, pay: Callable[..., None], partners: Partners, seats: list[str]
) -> None:
    pay(book(*seats))
    await async_outbox.drain()
    async_outbox.assert_published("tickets.issued", {"seats": seats})
    assert partners.mail.sent == [f"Your tickets: {', '.join(seats)}"]


async def test_handlers_share_the_loop_of_the_test(async_outbox: AsyncOutbox) -> None:
    registry, arrived = HandlerRegistry(), asyncio.Queue[str]()

    @registry.handler("seat.sold", name="board.show")
    async def show(event: EventEnvelope) -> None:
        arrived.put_nowait(event.payload["seat"])

    async_outbox.publish("seat.sold", {"seat": "A1"})
    await async_outbox.drain(registry)
    assert await asyncio.wait_for(arrived.get(), 1) == "A1"


@pytest.mark.parametrize("minutes, released", [(14, 0), (16, 1)])
async def test_time_passes(
    async_outbox: AsyncOutbox, book: Book, partners: Partners, minutes: int, released: int
) -> None:
    book("A1")
    await async_outbox.advance(minutes=minutes)
    assert sum(each.event_type == "booking.released" for each in async_outbox.published()) == released


@pytest.mark.parametrize("fault", ["crash_after_effect", "expire_lease"])
async def test_faults(
    async_outbox: AsyncOutbox, book: Book, pay: Callable[..., None], partners: Partners, fault: str
) -> None:
    pay(book("A1"))
    getattr(async_outbox, fault)("tickets.issue")
    await async_outbox.drain()
    assert len(async_outbox.fetch("SELECT FROM tickets")) == 1
