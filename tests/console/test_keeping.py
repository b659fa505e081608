"""Schedules, retention, archive, requests, audit and doctor in the console."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.operator import Operator
from tests.console import fleet, shop
from tests.console.asking import acted, ask, confirm
from tests.console.conftest import Browser
from tests.operator.support import HANDLER, block, fail

Consoles = Callable[..., Console]
ADA = "ada@example.com"


@pytest.fixture
async def db(staffed: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(staffed)
    yield connection
    await connection.close()


async def test_schedules_are_triggered_paused_and_removed(
    staffed: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """Five slots, the event of a trigger, and a pause that the page names (IDM-4, OPS-3)."""
    async with Browser(consoles(staffed, environment="production")) as browser:
        listed = (await browser.get("/schedules")).text
        assert fleet.REPORT in listed and "2 schedules" in listed and "holdfast schedules list" in listed
        page = (await browser.get(f"/schedules/{fleet.REPORT}")).text
        assert page.partition('class="slots"')[2].partition("</ol>")[0].count("<li>") == 5
        page = await acted(browser, db, "schedules.trigger", "schedule.trigger", schedule=fleet.REPORT)
        assert "day.ended" in page and "this is its event" in page
        page = await acted(browser, db, "schedules.pause", "schedule.pause", schedule=fleet.REPORT)
        assert f"Paused by {ADA}" in page
        page = await acted(browser, db, "schedules.resume", "schedule.resume", schedule=fleet.REPORT)
        assert "Paused by" not in page and "schedules.remove" not in page
        assert (await ask(browser, "schedules.remove", schedule=fleet.REPORT)).status_code == 409
        await db.execute("UPDATE core.schedules SET attended_at = now() - interval '1 day'")
        assert (
            await confirm(browser, await ask(browser, "schedules.remove", schedule=fleet.REPORT))
        ).status_code == 400
        page = await acted(browser, db, "schedules.remove", "schedule.remove", schedule=fleet.REPORT)
        assert "1 schedule," in page
        assert (await browser.get(f"/schedules/{fleet.REPORT}")).status_code == 404


async def test_an_admin_changes_how_long_events_are_kept(
    staffed: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """The question says what it is now and then; the verb's refusals come through; it can be removed (OBX-5, OPS-3)."""
    wanted = {
        "entity": "outbox_row",
        "class": "logs",
        "active-days": "3",
        "grace-days": "1",
        "disposal": "STRIP_PAYLOAD",
    }
    async with Browser(consoles(staffed, environment="production")) as browser:
        asked = html.unescape((await ask(browser, "retention.set", **wanted)).text)
        assert "no policy of its own" in asked and "3 days, 1 day of grace, then kept without payload" in asked
        assert "holdfast retention set outbox_row --class logs --active-days 3 --grace-days 1" in asked
        page = await acted(browser, db, "retention.set", "retention.set", **wanted)
        assert "Delivered events of logs: 3 days" in page and '<span class="tag">logs</span>' in page
        again = await ask(browser, "retention.set", **wanted)
        assert "Nothing would change" in again.text
        refused = await ask(browser, "retention.set", **{**wanted, "active-days": "900"})
        assert refused.status_code == 400 and "900" in refused.text
        assert (await ask(browser, "retention.set", **{**wanted, "disposal": "BURN"})).status_code == 400
        gone = {"entity": "outbox_row", "class": "logs", "remove": "yes"}
        page = await acted(browser, db, "retention.set", "retention.set", **gone)
        assert '<span class="tag">logs</span>' not in page
    async with Browser(consoles(staffed, role=Role.OPERATOR)) as browser:
        assert "Change a policy" not in (await browser.get("/retention")).text
        assert (await ask(browser, "retention.set", **wanted)).status_code == 403


async def test_a_sweep_takes_what_the_page_says(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """The policies, what is due, and a sweep by an admin (OBX-5, OPS-3)."""
    await db.execute(
        "UPDATE core.idempotency_records SET expires_at = now() - interval '1 day' WHERE scope = 'tenant-1'"
    )
    async with Browser(consoles(staffed, environment="production")) as browser:
        page = html.unescape((await browser.get("/retention")).text)
        assert (
            "45 days" in page
            and "idempotency records, to be forgotten" in page
            and "Failed events have no policy" in page
        )
        asked = await ask(browser, "retention.sweep")
        assert re.search(r"Sweep \d+ in production", asked.text) and "cannot be brought back" in asked.text
        done = await confirm(browser, asked, reason="quarter end")
        assert done.headers["location"] == "/retention"
        assert "A sweep would take nothing now" in (await browser.get("/retention")).text
    assert await db.fetchval("SELECT count(*) FROM core.idempotency_records WHERE scope = 'tenant-1'") == 0
    assert await db.fetchval("SELECT count(*) FROM core.audit WHERE actor = $1 AND reason = 'quarter end'", ADA) > 0


async def test_archived_events_are_replayed_discarded_and_restored(
    staffed: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """Exactly the chosen ones, and a discard can be undone (DLQ-4, OPS-3)."""
    first, second = await db.fetch(
        "SELECT id, original_id FROM core.archive WHERE deleted_at IS NULL ORDER BY id LIMIT 2"
    )
    async with Browser(consoles(staffed, environment="production")) as browser:
        page = (await browser.get("/archive")).text
        assert "6 dead letters wait in the archive" in page and "410 Gone" in page
        assert page.count('name="chosen"') == 6
        page = await acted(browser, db, "archive.discard", "archive.discard", chosen=str(first["id"]))
        assert "1 event discarded" in page and f'value="{first["id"]}"' in page
        page = await acted(browser, db, "archive.restore", "archive.restore", chosen=str(first["id"]))
        assert "1 event restored" in page
        page = await acted(browser, db, "archive.replay", "archive.replay", chosen=str(second["id"]))
        assert "1 event replayed" in page and f'value="{second["id"]}"' not in page
        assert (await ask(browser, "archive.replay")).status_code == 400
        assert (await ask(browser, "archive.replay", chosen="1; DROP")).status_code == 400
        assert "webhooks.deliver" in (await browser.get("/archive", params={"handler": "webhooks.deliver"})).text
        assert "The archive is empty" in (await browser.get("/archive", params={"handler": shop.FAILING})).text
    assert await db.fetchval("SELECT status FROM core.outbox WHERE id = $1", second["original_id"]) == "pending"


async def test_requests_are_shown_without_bodies(filled: str, consoles: Consoles) -> None:
    """State and times, never a body, a hash or a whole key; a key with its scope is looked up (IDM-5, S16)."""
    async with Browser(consoles(filled)) as browser:
        page = (await browser.get("/requests")).text
        assert "tenant-1" in page and "SECRET BODY" not in page and "hmac" not in page and "checkout-11" not in page
        used = (await browser.get("/requests", params={"scope": "tenant-1", "key": "checkout-1"})).text
        assert "The key was used in this scope" in used and "holdfast requests show tenant-1 checkout-1" in used
        unused = (await browser.get("/requests", params={"scope": "tenant-1", "key": "never"})).text
        assert "was not used in this scope" in unused
        failed = (await browser.get("/requests", params={"state": "failed"})).text
        assert "422" in failed and "201" not in failed.partition("<tbody>")[2].partition("</tbody>")[0]
        for wrong in ({"state": "nonsense"}, {"before": "nonsense"}, {"since": "nonsense"}):
            assert (await browser.get("/requests", params=wrong)).status_code == 400


async def test_the_audit_is_filtered_and_goes_on(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """By actor, action and time; every line once; refusals are marked (OPS-3)."""
    await db.executemany(
        "INSERT INTO core.audit (actor, action, reason, arguments) VALUES ($1, 'replay', $2, '{}')",
        [("bob", f"line {n}") for n in range(60)],
    )
    async with Browser(consoles(staffed)) as browser:
        await ask(browser, "plans.resume", plan="1", confirmed="yes", reason="too early")
        page = (await browser.get("/audit")).text
        assert "refused" in page and "too early" in page
        seen: list[str] = []
        path = "/audit?actor=bob"
        while path:
            text = (await browser.get(path)).text
            seen += re.findall(r"“(line \d+)”", text)
            older = re.search(r'href="(/audit\?before=[^"]+)">Older', text)
            path = html.unescape(older[1]) if older else ""
        assert seen == [f"line {n}" for n in range(59, -1, -1)]
        named = (await browser.get("/audit", params={"action": "handler"})).text
        assert "handler.pause" in named and "the partner asked for it" in named and "line 1”" not in named
        assert "holdfast audit --action handler" in named
        assert "No line matches" in (await browser.get("/audit", params={"actor": "nobody"})).text


async def test_the_audit_has_the_head_of_a_released_key(
    staffed: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """What a verb found is an id here, and no number; every skin shows the line (OPS-3, LSN-9)."""
    (head,) = await fail(db)
    await block(db, head, "order-17")
    assert await db.fetchval("SELECT core.key_release($1, 'order-17', $2)", HANDLER, ADA) == head
    async with Browser(consoles(staffed)) as browser:
        answer = await browser.get("/audit")
        assert answer.status_code == 200 and f"head {head}" in answer.text
    async with Operator(staffed, actor=ADA) as operator:
        (line,) = await operator.audit.page(action="key.release")
    assert (line.counts, line.arguments["head"]) == ({}, str(head))


async def test_the_doctor_says_what_to_do(filled: str, consoles: Consoles) -> None:
    """Each finding with its remedy to copy, and the checks that passed (OPS-2)."""
    async with Browser(consoles(filled)) as browser:
        page = (await browser.get("/doctor")).text
        assert "holdfast doctor" in page and "Checks that passed" in page and 'class="checks"' in page


async def test_pages_of_an_empty_schema_say_what_being_empty_means(dsn: str, consoles: Consoles) -> None:
    """In a sentence, with what to do next (OPS-2)."""
    said = {
        "/plans": "No plan was made yet",
        "/handlers": "No handler has subscribed yet",
        "/workers": "No worker is running",
        "/schedules": "No schedule is declared",
        "/retention": "A sweep would take nothing now",
        "/archive": "The archive is empty",
        "/requests": "No request is remembered",
        "/audit": "Nobody has done anything yet",
    }
    async with Browser(consoles(dsn, role=Role.VIEWER)) as browser:
        for path, text in said.items():
            answer = await browser.get(path)
            assert answer.status_code == 200 and text in answer.text, path
        for path in ("/generations", "/doctor"):
            assert (await browser.get(path)).status_code == 200
