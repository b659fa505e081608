"""What a request does: the order, the event, the answer that is kept, and the reaction in the API's own process."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.testing import AsyncOutbox

ORDER = {"customer": "Ada", "total_cents": 4_200}


async def place(client: httpx.AsyncClient, key: str, order: dict[str, Any] = ORDER) -> httpx.Response:
    return await client.post("/orders", json=order, headers={"Idempotency-Key": key})


async def test_an_order_is_stored_and_published(client: httpx.AsyncClient, async_outbox: AsyncOutbox) -> None:
    placed = await place(client, str(uuid4()))
    assert placed.status_code == 201
    order = placed.json()["order_id"]
    async_outbox.assert_published("order.placed", {"order_id": order, **ORDER}, source="orders", times=1)
    stored = async_outbox.fetch("SELECT id, customer FROM orders")
    assert [(str(row["id"]), row["customer"]) for row in stored] == [(order, "Ada")]


@pytest.mark.parametrize("times", [2, 3])
async def test_a_request_that_is_repeated_orders_once(
    client: httpx.AsyncClient, async_outbox: AsyncOutbox, times: int
) -> None:
    answers = [await place(client, "k-1") for _ in range(times)]
    assert {answer.text for answer in answers} == {answers[0].text}
    request = async_outbox.request("k-1")
    assert (request.status_code, request.json) == (201, answers[0].json())
    assert [event.event_type for event in request.events] == ["order.placed"]
    async_outbox.assert_published("order.placed", times=1)


@pytest.mark.parametrize("order", [{}, {**ORDER, "total_cents": 0}, {**ORDER, "customer": ""}], ids=str)
async def test_what_is_no_order_publishes_nothing(
    client: httpx.AsyncClient, async_outbox: AsyncOutbox, order: dict[str, Any]
) -> None:
    assert (await place(client, "k-1", order)).status_code == 422
    assert async_outbox.published() == [] and not async_outbox.fetch("SELECT FROM orders")


async def test_the_window_counts_orders(client: httpx.AsyncClient, async_outbox: AsyncOutbox) -> None:
    """A reaction: it runs in the API, after the commit, and the response does not wait for it."""
    for number in range(3):
        await place(client, f"k-{number}")
    await async_outbox.assert_reacted("storefront.count_order", {"customer": "Ada"}, times=3)
    assert async_outbox.fetch("SELECT orders FROM orders_by_day")[0]["orders"] == 3


async def test_an_order_shows_its_sale(client: httpx.AsyncClient, async_outbox: AsyncOutbox, letters: Any) -> None:
    order = (await place(client, "k-1")).json()["order_id"]
    assert (await client.get(f"/orders/{order}")).json()["ledger_entries"] == 0
    await async_outbox.drain()
    assert (await client.get(f"/orders/{order}")).json()["ledger_entries"] == 1
    assert order in letters.read_text()
