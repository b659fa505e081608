"""Asks for actions as a browser without script does: the form of a page, then the form of its question."""

from __future__ import annotations

import html
import re

import asyncpg
import httpx

from tests.console.conftest import BASE, Browser


async def ask(browser: Browser, action: str, **fields: str) -> httpx.Response:
    """Send the form of a page; the answer is the question."""
    return await browser.submit(f"/do/{action}", **fields)


async def confirm(browser: Browser, asked: httpx.Response, **more: str) -> httpx.Response:
    """Send the form of a question."""
    found = re.search(r'<form method="post" action="(/do/[^"]+)">(.*?)</form>', asked.text, re.DOTALL)
    assert found, asked.text[-3000:]
    hidden = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', found[2])
    data = {name: html.unescape(value) for name, value in hidden} | more
    return await browser.post(found[1], data=data, headers={"origin": BASE})


async def last_line(db: asyncpg.Connection, action: str) -> tuple[str, str | None]:
    """Who did something last, and why."""
    row = await db.fetchrow("SELECT actor, reason FROM core.audit WHERE action = $1 ORDER BY id DESC LIMIT 1", action)
    assert row is not None, f"the audit has no {action}"
    return row["actor"], row["reason"]


async def acted(browser: Browser, db: asyncpg.Connection, action: str, audited: str, **fields: str) -> str:
    """Ask, confirm, and check the line of the audit; what the page says then."""
    before = await db.fetchval("SELECT count(*) FROM core.audit")
    asked = await ask(browser, action, **fields)
    assert asked.status_code == 200 and 'id="confirm"' in asked.text, asked.text[-1500:]
    assert "in production</button>" in asked.text and "holdfast " in asked.text
    assert await db.fetchval("SELECT count(*) FROM core.audit") == before, "the dry run has left something"
    done = await confirm(browser, asked, reason=f"because of {action}")
    assert done.status_code == 303, done.text[-1500:]
    assert await last_line(db, audited) == ("ada@example.com", f"because of {action}")
    return (await browser.get(done.headers["location"])).text
