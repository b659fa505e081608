"""Live pages: one reader for all browsers, small messages, and an outage that passes by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from holdfast.access.principal import Role
from holdfast.console import Console, create_console
from holdfast.console.live import LARGEST_MESSAGE, MOST_OF_ONE
from holdfast.console.pages.plans import PlansFeed
from holdfast.console.pages.workers import WorkersFeed
from holdfast.embedded import EmbeddedPostgres
from holdfast.operator import Operator, ReadTimeout, Refused
from tests.console.conftest import Browser, as_role, fill

Consoles = Callable[..., Console]


async def messages(stream: AsyncIterator[str], seen: list[dict[str, Any]]) -> None:
    async for text in stream:
        assert len(text.encode()) <= LARGEST_MESSAGE
        if text.startswith("data: "):
            seen.append(json.loads(text[6:]))


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def reads_of(console: Console, browsers: int, rounds: int) -> int:
    """How often the database was asked while so many browsers saw so many snapshots."""
    reads = 0
    acting = console.operators.acting

    def counting(actor: str) -> Any:
        nonlocal reads
        reads += 1
        return acting(actor)

    console.operators.acting = counting  # type: ignore[method-assign]
    seen: list[list[dict[str, Any]]] = [[] for _ in range(browsers)]
    tasks = [asyncio.create_task(messages(console.hub.watch("overview", "UTC", ""), each)) for each in seen]
    await until(lambda: all(sum("at" in message for message in each) >= rounds for each in seen))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    console.operators.acting = acting  # type: ignore[method-assign]
    assert all(any(message.get("id") == "verdict" for message in each) for each in seen)
    return reads


async def test_twenty_browsers_cost_as_much_as_one(filled: str, consoles: Consoles) -> None:
    """Reads are counted, not timed. One snapshot is for everybody (OPS-2)."""
    alone = await reads_of(consoles(filled, interval=0.2), 1, 4)
    together = await reads_of(consoles(filled, interval=0.2), 20, 4)
    assert together <= alone + 1


async def test_nobody_watching_costs_nothing(filled: str, consoles: Consoles) -> None:
    """The reader ends with the last browser (OPS-2)."""
    console = consoles(filled, interval=0.2)
    await reads_of(console, 2, 2)
    assert console.hub.watchers == 0
    reader = console.hub._reader
    assert reader is not None
    await until(reader.done)


async def test_loading_a_page_shares_the_snapshot(filled: str, consoles: Consoles) -> None:
    """Many who load a page at once cause one read (OPS-2)."""
    console = consoles(filled, interval=30.0)
    reads = 0
    acting = console.operators.acting

    def counting(actor: str) -> Any:
        nonlocal reads
        reads += 1
        return acting(actor)

    console.operators.acting = counting  # type: ignore[method-assign]
    async with Browser(console) as browser:
        answers = await asyncio.gather(*(browser.get("/") for _ in range(20)))
    assert {each.status_code for each in answers} == {200} and reads == 1


async def test_only_what_changed_is_sent(fresh: str, consoles: Consoles) -> None:
    """A quiet database sends nothing but its age; a change sends the part that it concerns (OPS-2)."""
    console = consoles(fresh, interval=0.2)
    seen: list[dict[str, Any]] = []
    task = asyncio.create_task(messages(console.hub.watch("overview", "UTC", "", parts={"states"}), seen))
    await until(lambda: sum("at" in each for each in seen) >= 3)
    before = [each for each in seen if each.get("id") == "states"]
    conn = await asyncpg.connect(fresh)
    await conn.execute("INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')")
    await conn.close()
    await until(lambda: len([each for each in seen if each.get("id") == "states"]) > len(before))
    assert {each["id"] for each in seen if "id" in each} == {"states"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a mistake"),
        asyncpg.InsufficientPrivilegeError("no"),
        asyncpg.CharacterNotInRepertoireError("no"),
        Refused("no", "no"),
        ReadTimeout("it took too long", "ask for less"),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_one_feed_that_fails_silences_no_other(filled: str, consoles: Consoles, error: Exception) -> None:
    """Whoever watches it sees the last value, and everybody else new ones (S9, OPS-2)."""
    console = consoles(filled, interval=0.2)
    reads = 0

    class Failing(PlansFeed):
        async def read(self, operator: Operator, argument: str, before: Any) -> Any:
            nonlocal reads
            reads += 1
            raise error

    console.hub._feeds = {"plans": Failing(), "workers": WorkersFeed()}
    seen: list[dict[str, Any]] = []
    tasks = [asyncio.create_task(messages(console.hub.watch("plans", "UTC", ""), []))]
    await until(lambda: console.hub.watchers == 1)
    tasks.append(asyncio.create_task(messages(console.hub.watch("workers", "UTC", ""), seen)))
    await until(lambda: sum("at" in each for each in seen) >= 4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert console.hub.outage is None and not any("away" in each for each in seen)
    assert reads == 1 if isinstance(error, ReadTimeout) else reads > 1, "a slow one is not read in every round"


@pytest.mark.parametrize(
    "feed",
    [
        "nothing", "overview:2h", "plans:1", "plan:", "plan:987654321", "plan:x", "handler:", "handler:nobody.at_all",
        "handler:billing.charge_card/x1", "handler:billing.charge_card/1h/", "handler:%00", "workers:" + "x" * 300,
    ],
)  # fmt: skip
async def test_there_is_no_feed_of_what_does_not_exist(filled: str, consoles: Consoles, feed: str) -> None:
    """And asking for it leaves nothing that would be read (S9)."""
    console = consoles(filled)
    async with asyncio.timeout(10), Browser(console) as browser:  # a stream would not end
        assert (await browser.get(f"/live?feed={feed}")).status_code == 404
        assert (await browser.get(f"/fragment?feed={feed}&id=x")).status_code == 404
    assert console.hub.watchers == 0 and console.hub.outage is None


def test_a_feed_has_one_name(filled: str) -> None:
    """What is the same is read once, however it is asked for (OPS-2)."""
    hub = create_console(filled, provider=as_role(Role.VIEWER)).hub
    asked = ("overview", "overview:", "overview:1h", "overview:6h", "plan:007", "handler:a.b/1h", "handler:a.b/24h")
    assert [hub.named(each) for each in asked] == [
        "overview", "overview", "overview", "overview:6h", "plan:7", "handler:a.b", "handler:a.b/24h",
    ]  # fmt: skip


async def test_one_principal_leaves_places_for_others(filled: str, consoles: Consoles) -> None:
    """Twenty of two hundred; what ends makes room again (S9)."""
    console = consoles(filled, interval=30.0)
    hub = console.hub
    streams = [hub.watch("overview", "UTC", "", who="ada@example.com") for _ in range(MOST_OF_ONE + 1)]
    begun = [await anext(each, None) for each in streams]
    assert begun.count(None) == 1 and begun[-1] is None and hub.watchers == MOST_OF_ONE
    async with asyncio.timeout(10), Browser(console) as browser:
        refused = await browser.get("/live?feed=overview")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert not hub.is_full("bob@example.com")
    await streams[0].aclose()  # type: ignore[attr-defined]
    assert not hub.is_full("ada@example.com")
    for each in streams:
        await each.aclose()  # type: ignore[attr-defined]
    assert not hub._watching


@pytest.mark.slow
async def test_the_database_goes_away_and_comes_back(
    own_server: EmbeddedPostgres, own_dsn: str, consoles: Consoles
) -> None:
    """Pages keep the last snapshot, say so, and go on by themselves (OPS-2)."""
    await fill(own_dsn)
    console = consoles(own_dsn, interval=0.2)
    seen: list[dict[str, Any]] = []
    task = asyncio.create_task(messages(console.hub.watch("overview", "UTC", ""), seen))
    await until(lambda: any("at" in each for each in seen))
    await asyncio.to_thread(own_server.kill)
    await until(lambda: any("away" in each for each in seen))
    async with Browser(console) as browser:
        assert "billing.charge_card" in (await browser.get("/")).text
        away = await browser.get("/failures")
        assert away.status_code == 503 and "does not answer" in away.text and "tries again by itself" in away.text
        await asyncio.to_thread(own_server.start)
        await until(lambda: any("back" in each for each in seen))
        assert (await browser.get("/failures")).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
