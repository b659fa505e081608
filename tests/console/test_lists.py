"""Lists that do not jump, parts that took too long, and what a page says when it has nothing."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from holdfast.console import Console
from holdfast.console.handler_view import HandlerView
from holdfast.operator import Operator, ReadTimeout
from holdfast.operator.events import Events
from holdfast.operator.failed import FailedEvents
from tests.console import shop
from tests.console.conftest import Browser
from tests.console.test_live import messages, until

Consoles = Callable[..., Console]
ADD = "INSERT INTO core.outbox (event_type, source, payload) VALUES ($1, 'shop', '{}') RETURNING id"


def places(seen: list[dict[str, Any]]) -> list[str]:
    """The newest places that a browser was sent."""
    sent = [each["html"] for each in seen if each.get("id") == "newest"]
    return re.findall(r'data-places="([^"]*)"', sent[-1])[0].split() if sent else []


async def test_a_list_learns_what_is_new(fresh: str, consoles: Consoles) -> None:
    """A feed for each filter has the newest rows, and only those that match (OPS-2)."""
    console = consoles(fresh, interval=0.2)
    conn = await asyncpg.connect(fresh)
    everything: list[dict[str, Any]] = []
    filtered: list[dict[str, Any]] = []
    watched = (("events", everything), ("events:event-type=refund.issued", filtered))
    tasks = [asyncio.create_task(messages(console.hub.watch(name, "UTC", ""), seen)) for name, seen in watched]
    try:
        await until(lambda: bool(everything and filtered and places(everything)))
        before = places(filtered)
        id = str(await conn.fetchval(ADD, shop.ORDER))
        await until(lambda: places(everything)[0] == id)
        assert places(filtered) == before
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await conn.close()


async def test_one_feed_for_one_filter(filled: str, consoles: Consoles) -> None:
    """However it is written; what is no filter is no feed, and one that is too long is not watched (OPS-2)."""
    hub = consoles(filled).hub
    assert hub.named("events:source=shop&event-type=a") == hub.named("events:event-type=a&source=shop")
    assert hub.named("events:status=never") is None and hub.named("failures:since=yesterday") is None
    async with Browser(consoles(filled)) as browser:
        assert 'data-feed="events:source=shop"' in (await browser.get("/events?source=shop")).text
        assert 'data-feed="overview"' in (await browser.get(f"/events?source={'x' * 200}")).text


async def test_counts_of_the_navigation_are_live_on_every_page(fresh: str, consoles: Consoles) -> None:
    """Also where the page has live parts of its own (OPS-2)."""
    console = consoles(fresh, interval=0.2)
    seen: list[dict[str, Any]] = []
    task = asyncio.create_task(messages(console.hub.watch("plans", "UTC", "", parts={"nav-counts"}), seen))
    await until(lambda: any(each.get("id") == "nav-counts" for each in seen))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (sent,) = [each for each in seen if each.get("id") == "nav-counts"]
    part = sent.get("html") or console.hub.fragment("plans", "nav-counts", "UTC", "")
    assert part is not None and re.search(r'data-nav="failures".*?<b class="n bad">41</b>', part, re.DOTALL)


async def too_long(*_: Any, **__: Any) -> Any:
    raise ReadTimeout("the read took longer than 2 s", "narrow it, by time for example")


async def test_a_list_that_took_too_long_can_be_narrowed(
    filled: str, consoles: Consoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same filter of the last hour is one click away, once (OPS-2)."""
    monkeypatch.setattr(Events, "search", too_long)
    async with Browser(consoles(filled)) as browser:
        page = await browser.get("/events?source=shop&until=2h&before=x")
        assert page.status_code == 503 and "That took too long" in page.text
        assert '<a class="button primary" href="/events?source=shop&amp;since=1h">' in page.text
        assert "Narrow to" not in (await browser.get("/events?source=shop&since=1h")).text


async def test_a_part_that_took_too_long_leaves_the_rest(
    filled: str, consoles: Consoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A banner in its place, and the page is whole otherwise (OPS-2)."""
    monkeypatch.setattr(FailedEvents, "histogram", too_long)
    monkeypatch.setattr(Events, "children", too_long)
    monkeypatch.setattr(Events, "search", too_long)
    async with Browser(consoles(filled)) as browser:
        groups = await browser.get("/failures")
        assert groups.status_code == 200 and "billing.charge_card" in groups.text
        assert "When they failed took too long" in groups.text and "Try again" in groups.text
        conn = await asyncpg.connect(filled)
        id = await conn.fetchval(shop.FAILED_TWICE)
        await conn.close()
        event = await browser.get(f"/events/{id}")
        assert event.status_code == 200 and "gave up" in event.text
        assert event.text.count("took too long to read") == 2


async def test_the_story_has_replays_that_the_audit_forgot(filled: str, consoles: Consoles) -> None:
    """Who replayed an event stands between its failures; the latest is first, also within one moment (OPS-2)."""
    conn = await asyncpg.connect(filled)
    twice = await conn.fetchval(shop.FAILED_TWICE)
    delivered = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'delivered' LIMIT 1")
    await conn.close()
    async with Browser(consoles(filled)) as browser:
        page = (await browser.get(f"/events/{twice}")).text
        told = re.findall(r'<li class="m-(\w+)">', page)
        assert told == ["failed", "operator", "failed", "published"] and "ada@example.com replayed it" in page
        page = (await browser.get(f"/events/{delivered}")).text
        assert re.findall(r'<li class="m-(\w+)">', page) == ["delivered", "published"]


async def test_one_word_for_one_state(filled: str, consoles: Consoles) -> None:
    """What is delayed is called so in every list, and what is paused is not healthy; routes are words (OPS-2)."""
    conn = await asyncpg.connect(filled)
    id = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'pending' AND available_at > now() LIMIT 1")
    await conn.close()
    async with Browser(consoles(filled)) as browser:
        event = (await browser.get(f"/events/{id}")).text
        table = event.partition('<caption class="sr">Deliveries')[2].partition("</table>")[0]
        assert "Delayed" in table and "Pending" not in table and "all of its handlers" in table
        listed = (await browser.get("/events?status=delayed")).text
        assert "Delayed</span>" in listed and "*/order.shipped</td>" not in listed
        overview = (await browser.get("/")).text
        row = overview.partition('href="/handlers/webhooks.deliver"')[2].partition("</tr>")[0]
        assert "Paused" in row and "Healthy" not in row


@pytest.mark.parametrize(
    ("delivered", "retried", "failed", "state"),
    [
        (3_960, 4, 1, "some"),
        (60, 30, 10, "failing"),
        (0, 0, 1, "failing"),
        (90, 10, 0, "retrying"),
        (9, 0, 0, "healthy"),
    ],
)
def test_a_handler_that_fails_now_and_then_is_not_failing(
    delivered: int, retried: int, failed: int, state: str
) -> None:
    """Colour is spent on exceptions: one of a thousand is said, and does not look like an outage (OPS-2)."""
    counts = {"delivered": delivered, "retried": retried, "failed": failed}
    handler: Any = SimpleNamespace(handler_name="a.b", flow=None, retired=False, unserved=False)
    rates: Any = SimpleNamespace(tally=SimpleNamespace(counts=counts), seconds=timedelta(hours=1).total_seconds())
    assert HandlerView(handler, rates, {}).state == state


async def test_nothing_says_what_it_means_and_what_next(dsn: str, consoles: Consoles) -> None:
    """Each empty list leads on, and names the filter when that is why (OPS-2)."""
    async with Browser(consoles(dsn)) as browser:
        for path, says, leads in (
            ("/failures", "Nothing waits for a decision", "Look at all events"),
            ("/failures?tab=events", "No event has failed", "Look at all events"),
            ("/failures?tab=aside", "can be restored until", "Look at the failures"),
            ("/failures?tab=aside&handler=a.b", "Nothing matches", "Clear the filter"),
        ):
            page = html.unescape((await browser.get(path)).text)
            assert says in page and leads in page, path


async def test_a_choice_of_many_is_a_command_of_all(fresh: str, consoles: Consoles) -> None:
    """The command of a dialog has every id that was chosen, and not the first few (OPS-3)."""
    async with Operator(fresh, actor="ada") as operator:
        chosen = [str(each.id) for each in await operator.failed.page(limit=7)]
    async with Browser(consoles(fresh)) as browser:
        data = {"_token": await browser.token(), "verb": "replay", "chosen": chosen}
        page = await browser.post("/failures/ask", data=data, headers={"origin": str(browser.base_url).rstrip("/")})
        assert f"holdfast failed replay {' '.join(chosen)} --reason" in page.text


async def test_a_cause_is_named_once(filled: str, consoles: Consoles) -> None:
    """The line below the name of an error has what the error says, which would be cut otherwise (OPS-2)."""
    async with Browser(consoles(filled)) as browser:
        page = (await browser.get("/failures")).text
        (said,) = re.findall(r'one-line">(terminal T-[^<]*)<', page)
        assert said.endswith("did not answer within 8000 ms")
