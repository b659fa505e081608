"""Decisions about dead letters: the question is the dry run, and acts on exactly what was counted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable

import asyncpg
import httpx
import pytest

from holdfast.access.principal import Role
from holdfast.console import Console
from tests.console import shop
from tests.console.conftest import Browser, as_role
from tests.operator.support import actions, states

Consoles = Callable[..., Console]


@pytest.fixture
async def db(fresh: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(fresh)
    yield connection
    await connection.close()


async def group_of(db: asyncpg.Connection, handler: str = shop.FAILING) -> str:
    query = "SELECT error_signature FROM core.outbox WHERE handler_name = $1 AND status = 'failed' LIMIT 1"
    found = await db.fetchval(query, handler)
    return f"{handler}/{found}"


def fields_of(answer: httpx.Response) -> dict[str, str]:
    """The hidden fields of the form that confirms."""
    form = answer.text.partition('action="/failures/act"')[2].partition("</form>")[0]
    return dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))


async def confirm(browser: Browser, asked: httpx.Response, **more: str) -> httpx.Response:
    fields = {name: value.replace("&#39;", "'") for name, value in fields_of(asked).items()} | more
    return await browser.post("/failures/act", data=fields, headers={"origin": "http://127.0.0.1:8424"})


async def test_a_group_is_replayed_from_its_dry_run(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """Asking changes nothing; what was counted is replayed, and the audit says by whom and why (OPS-3, DLQ-3)."""
    async with Browser(consoles(fresh, environment="production")) as browser:
        before = await states(db)
        asked = await browser.submit("/failures/ask", "/failures", verb="replay", chosen=await group_of(db))
        assert await states(db) == before and await actions(db) == []
        assert "Replay 31 in production" in asked.text and "holdfast failed replay --group" in asked.text
        done = await confirm(browser, asked, reason="the terminals are back")
        assert "31 events replayed" in done.text
    line = await db.fetchrow("SELECT actor, action, reason, arguments FROM core.audit")
    assert (line["actor"], line["action"], line["reason"]) == ("ada@example.com", "replay", "the terminals are back")
    assert shop.FAILING in line["arguments"]
    assert (await states(db))["failed"] == before["failed"] - 31


async def test_what_fails_meanwhile_is_left_out(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """The ids that were counted, and no others (OPS-3)."""
    async with Browser(consoles(fresh)) as browser:
        asked = await browser.submit("/failures/ask", "/failures", verb="replay", chosen=await group_of(db))
        await db.execute("UPDATE core.outbox SET status = 'failed' WHERE false")
        await db.execute(
            """INSERT INTO core.outbox (event_type, source, payload, idempotency_key, status, handler_name, attempts,
                                        last_error, error_signature, failure_reason, failed_at, settled_at)
               SELECT event_type, source, payload, 'later', status, handler_name, attempts, last_error,
                      error_signature, failure_reason, now(), now()
               FROM core.outbox WHERE handler_name = $1 AND status = 'failed' LIMIT 1""",
            shop.FAILING,
        )
        assert "31 events replayed" in (await confirm(browser, asked)).text
    assert await db.fetchval("SELECT status FROM core.outbox WHERE idempotency_key = 'later'") == "failed"


async def test_discarding_needs_a_reason_and_can_be_undone(
    fresh: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """The answer has the button that restores (OPS-3)."""
    async with Browser(consoles(fresh)) as browser:
        group = await group_of(db, "ledger.record_sale")
        asked = await browser.submit("/failures/ask", "/failures", verb="discard", chosen=group)
        assert "Discard 3" in asked.text and "can be restored until" in asked.text
        assert (await confirm(browser, asked)).status_code == 400
        done = await confirm(browser, asked, reason="a backfill")
        assert "3 events discarded" in done.text and "Restore 3" in done.text
        assert (await states(db))["discarded"] == 3
        assert "Set aside" in (await browser.get("/failures?tab=aside")).text
        undone = await confirm(browser, done)
        assert "3 events restored" in undone.text
    assert "discarded" not in await states(db)
    assert await actions(db) == ["discard", "restore"]


async def test_chosen_events_and_everything_that_matches(
    fresh: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """An empty choice means nothing, and never everything (OPS-3)."""
    rows = await db.fetch("SELECT id FROM core.outbox WHERE handler_name = 'webhooks.deliver'")
    async with Browser(consoles(fresh)) as browser:
        assert (await browser.submit("/failures/ask", "/failures", verb="replay")).status_code == 400
        one = await browser.submit("/failures/ask", "/failures", verb="replay", chosen=str(rows[0]["id"]))
        assert "Replay 1" in one.text and "1 event replayed" in (await confirm(browser, one)).text
        rest = await browser.submit(
            "/failures/ask", "/failures", verb="replay", whole="yes", handler="webhooks.deliver"
        )
        assert "Replay 1" in rest.text and "1 event replayed" in (await confirm(browser, rest)).text


async def test_two_people_decide_about_one_group(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """Each is told of the other; each row moves once, and both answers add up (OPS-3)."""
    first = consoles(fresh)
    second = consoles(fresh, as_role(Role.OPERATOR, "bob@example.com"))
    second.deciding = first.deciding
    group = await group_of(db)
    async with Browser(first) as ada, Browser(second) as bob:
        his = await bob.submit("/failures/ask", "/failures", verb="replay", chosen=group)
        hers = await ada.submit("/failures/ask", "/failures", verb="replay", chosen=group)
        assert "bob@example.com is deciding about the same" in hers.text
        assert "is deciding about this group" in (await bob.get(f"/failures?group={group}")).text
        answers = await asyncio.gather(confirm(ada, hers), confirm(bob, his))
    moved = [int(re.search(r"<h1>(\d+) events? replayed", each.text)[1]) for each in answers]  # type: ignore[index]
    assert sum(moved) == 31
    assert await db.fetchval("SELECT count(*) FROM core.outbox WHERE handler_name = $1", shop.FAILING) >= 31


async def test_a_note_is_seen_by_everybody(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """And goes with an empty text (OPS-3)."""
    group = await group_of(db)
    async with Browser(consoles(fresh)) as browser:
        await browser.submit("/failures/note", group=group, text="Terminal gateway is down")
        assert "Terminal gateway is down" in (await browser.get("/failures")).text
        handed = (await browser.get("/failures/hand-over", params={"group": group})).text
        assert "- Events: 31" in handed and "Terminal gateway is down" in handed
        trap = "[reset](https://evil.example) ``` @all <img src=x>"
        await browser.submit("/failures/note", group=group, text=trap)
        await db.execute("UPDATE core.outbox SET last_error = $1 WHERE status = 'failed'", f"Boom: {trap}\n{trap}")
        handed = (await browser.get("/failures/hand-over", params={"group": group})).text
        assert f"- Note: ```` {trap} ````" in handed
        assert f"````text\nBoom: {trap}\n{trap}\n````" in handed
        await browser.submit("/failures/note", group=group, text="")
        assert "Terminal gateway is down" not in (await browser.get("/failures")).text


async def test_an_edit_publishes_the_corrected_event(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """For the handler that failed, and discards the failed one (OPS-3)."""
    id = await db.fetchval("SELECT id FROM core.outbox WHERE handler_name = 'ledger.record_sale' AND status = 'failed'")
    async with Browser(consoles(fresh)) as browser:
        assert (await browser.submit(f"/events/{id}/edit", payload="{nope")).status_code == 400
        done = await browser.submit(f"/events/{id}/edit", payload='{"order_id": 7}', reason="the sku was wrong")
        assert done.status_code == 303
        assert "order_id" in (await browser.get(done.headers["location"])).text
    assert "edit" in await actions(db)


async def test_many_become_a_plan(fresh: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """More than a thousand are not replayed at once; the plan has the rows that were counted (OPS-3)."""
    await db.execute(
        """INSERT INTO core.outbox (event_type, source, payload, idempotency_key, status, handler_name, attempts,
                                    last_error, error_signature, failure_reason, failed_at, settled_at)
           SELECT event_type, source, payload, 'many-' || n, status, handler_name, attempts, last_error,
                  error_signature, failure_reason, now(), now()
           FROM (SELECT * FROM core.outbox WHERE handler_name = $1 AND status = 'failed' LIMIT 1) o,
                generate_series(1, 1000) n""",
        shop.FAILING,
    )
    async with Browser(consoles(fresh)) as browser:
        asked = await browser.submit("/failures/ask", "/failures", verb="replay", chosen=await group_of(db))
        assert "Replay 1,031 as a plan?" in asked.text and "10 as a canary" in asked.text
        assert await db.fetchval("SELECT count(*) FROM core.plans") == 0
        made = await confirm(browser, asked, reason="after the fix")
        assert re.fullmatch(r"/plans/\d+", made.headers["location"])
    assert await db.fetchval("SELECT count(*) FROM core.plan_rows") == 1031
