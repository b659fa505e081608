"""Plans in the console: the preview, the run in this process, and what the page says meanwhile."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.console.plan_view import PlanView
from holdfast.operator import Operator, Plan
from tests.console import fleet, shop
from tests.console.asking import ask, confirm, last_line
from tests.console.conftest import BASE, Browser

Consoles = Callable[..., Console]
ADA = "ada@example.com"


@pytest.fixture
async def db(staffed: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(staffed)
    yield connection
    await connection.close()


@asynccontextmanager
async def handled(dsn: str, fails: int = 0) -> AsyncIterator[None]:
    """What is replayed is handled meanwhile."""
    done = asyncio.Event()
    task = asyncio.create_task(fleet.settle(dsn, done, fails=fails))
    try:
        yield
    finally:
        done.set()
        await task


async def becomes(dsn: str, plan: int, *states: str) -> Plan:
    """Wait for a state of a plan."""
    async with asyncio.timeout(20), Operator(dsn, actor="test") as operator:
        while True:
            found = await operator.plans.read(plan)
            if PlanView(found).state in states:
                return found
            await asyncio.sleep(0.05)


async def the_plan(db: asyncpg.Connection) -> int:
    return int(await db.fetchval("SELECT max(id) FROM core.plans"))


async def test_a_plan_is_made_of_what_was_counted(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """The preview keeps nothing; what fails after it is not in the plan (OPS-3, DLQ-3)."""
    async with Browser(consoles(staffed, environment="production")) as browser:
        before = await db.fetchval("SELECT count(*) FROM core.plans")
        shown = await browser.get("/plans/new", params={"handler": shop.FAILING})
        assert "exactly <b>31 events</b>" in shown.text and "Make the plan of 31 in production" in shown.text
        assert f"holdfast plans create --handler {shop.FAILING}" in shown.text
        assert await db.fetchval("SELECT count(*) FROM core.plans") == before
        await db.execute(
            "UPDATE core.outbox SET failed_at = now() + interval '1 hour' WHERE id = (SELECT id FROM core.outbox "
            "WHERE handler_name = $1 AND status = 'failed' LIMIT 1)", shop.FAILING,
        )  # fmt: skip
        form = shown.text.partition('action="/plans/new" aria-labelledby="how"')[2].partition("</form>")[0]
        data = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))
        data = {name: html.unescape(value) for name, value in data.items()}
        made = await browser.post(
            "/plans/new",
            data={**data, "step": "make", "canary": "3", "rate": "20", "max-failure-percent": "25", "reason": "fixed"},
            headers={"origin": BASE},
        )
        number = await the_plan(db)
        assert made.headers["location"] == f"/plans/{number}"
        page = (await browser.get(f"/plans/{number}")).text
        assert "30 were counted" not in page and "31 were counted before" in html.unescape(page)
        assert "Start 30" in page and "3, drawn from all" in page and "stops above 25 %" in page
    assert await last_line(db, "plan.create") == (ADA, "fixed")


async def test_a_plan_runs_in_the_console(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """It is started from its dry run, under the user's name; five kinds are the total, and a report is left (OPS-3)."""
    number = await the_plan(db)
    async with Browser(consoles(staffed, environment="production")) as browser, handled(staffed, fails=2):
        assert "The line begins with the canary." in (await browser.get(f"/plans/{number}")).text
        asked = await ask(browser, "plans.run", plan=str(number))
        assert "Replay 31 in production" in asked.text and f"holdfast plans run {number}" in asked.text
        assert (await db.fetchval("SELECT count(*) FROM core.audit WHERE action = 'plan.run'")) == 0
        done = await confirm(browser, asked, reason="the terminal is back")
        assert done.headers["location"] == f"/plans/{number}"
        await becomes(staffed, number, "stopped")
        assert await last_line(db, "plan.run") == (ADA, "the terminal is back")
        page = (await browser.get(f"/plans/{number}")).text
        assert "Stopped by its guard" in page and "Resume" in page
        assert page.count("</svg>new cause</span>") == 2 and "/events/" in page
        await confirm(
            browser, await ask(browser, "plans.resume", plan=str(number)), reason="only [two](http://x) cards"
        )
        plan = await becomes(staffed, number, "done")
        assert await last_line(db, "plan.resume") == (ADA, "only [two](http://x) cards")
        assert sum(kind.count for kind in PlanView(plan).kinds) == plan.total == 31
        browser.console.hub.expire(f"plan:{number}")
        page = (await browser.get(f"/plans/{number}")).text
        assert "29 of 31 delivered" in page and f"/plans/{number}/again" in page
        assert 'aria-label="29 delivered and 2 failed again of 31, by when they were replayed."' in page
        assert 'class="f-again"' in page and "Outcomes by when the rows were replayed" in page
        report = html.unescape((await browser.get(f"/plans/{number}/report")).text)
        assert "- Failed again: 2" in report and "CardDeclined: do_not_honour" in report and "in production" in report
        assert "plan.resume `only [two](http://x) cards`" in report  # in Markdown it is no link
        again = (await browser.get(f"/plans/{number}/again")).text
        assert again.count("CardDeclined: do_not_honour") == 2


async def test_a_runner_that_died_is_replaced(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """The page says that nobody runs the plan, and another console goes on after the last step (OPS-3)."""
    number = await the_plan(db)
    await db.execute("UPDATE core.plans SET rate = 10 WHERE id = $1", number)
    first, second = consoles(staffed), consoles(staffed)
    async with Browser(first) as browser, handled(staffed):
        await confirm(browser, await ask(browser, "plans.run", plan=str(number)))
        await becomes(staffed, number, "running")
        await first.close()
        await db.execute("UPDATE core.plans SET rate = 1000 WHERE id = $1", number)
        async with Browser(second) as other:
            page = (await other.get(f"/plans/{number}")).text
            assert "No process runs this plan" in page and "Run here" in page
            await confirm(other, await ask(other, "plans.run", plan=str(number)))
            assert (await becomes(staffed, number, "done")).delivered == 31


async def test_a_plan_is_paused_resumed_and_cancelled(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """Each with its line in the audit; what cannot be done any more is refused, and not offered (OPS-3)."""
    number = await the_plan(db)
    await db.execute("UPDATE core.plans SET rate = 5, canary = 0 WHERE id = $1", number)
    async with Browser(consoles(staffed)) as browser, handled(staffed):
        await confirm(browser, await ask(browser, "plans.run", plan=str(number)))
        await confirm(browser, await ask(browser, "plans.pause", plan=str(number)), reason="lunch")
        assert await last_line(db, "plan.pause") == (ADA, "lunch")
        assert "Resume" in (await browser.get(f"/plans/{number}")).text
        await confirm(browser, await ask(browser, "plans.resume", plan=str(number)))
        await becomes(staffed, number, "running")
        await confirm(browser, await ask(browser, "plans.cancel", plan=str(number)), reason="not today")
        assert await last_line(db, "plan.cancel") == (ADA, "not today")
        page = (await browser.get(f"/plans/{number}")).text
        assert "/do/plans." not in page and "Cancelled" in page
        assert (await ask(browser, "plans.pause", plan=str(number))).status_code == 409
        assert (await browser.get("/plans/987654321")).status_code == 404
        assert (await browser.get("/plans/nonsense")).status_code in (400, 404)


async def test_viewers_watch_plans_and_touch_nothing(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """What a viewer may not do is absent, and refused (S11)."""
    number = await the_plan(db)
    async with Browser(consoles(staffed, role=Role.VIEWER)) as browser:
        page = (await browser.get(f"/plans/{number}")).text
        assert "/do/" not in page and "Report" in page
        assert "/plans/new" not in (await browser.get("/plans")).text
        assert (await browser.get("/plans/new")).status_code == 403
        for verb in ("run", "pause", "resume", "cancel"):
            asked = await ask(browser, f"plans.{verb}", plan=str(number), confirmed="yes")
            assert asked.status_code == 403
    assert await db.fetchval("SELECT state FROM core.plans WHERE id = $1", number) == "open"


async def test_a_plan_that_is_unknown_stops_no_other_live_part(staffed: str, consoles: Consoles) -> None:
    """Whoever watches what does not exist disturbs nobody (S9)."""
    hub = consoles(staffed, interval=0.2).hub
    wrong, right = hub.watch("plan:987654321", "UTC", ""), hub.watch("plans", "UTC", "")
    async with asyncio.timeout(20):
        assert "retry" in await anext(wrong)
        assert [await anext(right) for _ in range(6)][-1].startswith("data:")
    await wrong.aclose()  # type: ignore[attr-defined]
    await right.aclose()  # type: ignore[attr-defined]
