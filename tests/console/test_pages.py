"""Pages: what each shows, what it costs, and that it works without a script."""

from __future__ import annotations

import re
from collections.abc import Callable

import asyncpg
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.console.pages import PAGES
from tests.console import shop
from tests.console.conftest import Browser
from tests.console.examples import address_of

Consoles = Callable[..., Console]
SHOWN = [page for page in PAGES if page.get is not None and page.name not in ("palette", "failures.hand-over")]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
async def test_every_page_is_whole(filled: str, consoles: Consoles, page: object) -> None:
    """One h1, a title, landmarks, the frame, and at most 150 KB with its style and script (OPS-2)."""
    async with Browser(consoles(filled)) as browser:
        answer = await browser.get(await address_of(page, filled))
        text = answer.text
        assert answer.status_code == 200, text[:500]
        assert len(re.findall(r"<h1[ >]", text)) == 1
        assert '<html lang="en"' in text and "<main" in text and "· Holdfast</title>" in text
        named = re.findall(r'"(/static/[a-z]+\.(?:css|js))\?', text)
        static = {name: len((await browser.get(name)).content) for name in named}
        assert len(static) >= 3 and len(answer.content) + sum(static.values()) <= 150_000
        assert static["/static/console.js"] <= 12 * 1024


async def test_pages_of_an_empty_schema_say_what_to_do(dsn: str, consoles: Consoles) -> None:
    """The first run names three commands; lists say what being empty means (OPS-2, RUN-1)."""
    async with Browser(consoles(dsn)) as browser:
        assert "holdfast worker yourapp.handlers:registry" in (await browser.get("/")).text
        assert "Nothing waits for a decision" in (await browser.get("/failures")).text
        assert "No event" in (await browser.get("/events")).text


async def test_the_overview_says_what_is_wrong(filled: str, consoles: Consoles) -> None:
    """A sentence, with a link to the worst group (OPS-2)."""
    async with Browser(consoles(filled, environment="production")) as browser:
        text = (await browser.get("/")).text
        assert re.search(r"(One handler is|\d handlers are) failing\.", text)
        assert shop.FAILING in text and "CardTerminalTimeout" in text and "production" in text
        assert "holdfast status" in text


async def test_an_event_tells_its_story(filled: str, consoles: Consoles) -> None:
    """The cycles with the words that changed, the same cause, the domain, and its command (OPS-2, DLQ-1)."""
    conn = await asyncpg.connect(filled)
    id = await conn.fetchval("SELECT id FROM core.outbox WHERE failure_history <> '[]'")
    waiting = await conn.fetchval(
        "SELECT id FROM core.outbox WHERE status = 'pending' AND available_at > now() LIMIT 1"
    )
    await conn.close()
    async with Browser(consoles(filled)) as browser:
        text = (await browser.get(f"/events/{id}")).text
        assert "<del>5000</del>" in text and "<ins>8000</ins>" in text and "Same cause as before the replay" in text
        assert f"holdfast events show {id}" in text and "grace@example.com" in text
        assert "Why does it wait?" in (await browser.get(f"/events/{waiting}")).text
        assert (await browser.get("/events/00000000-0000-0000-0000-000000000000")).status_code == 404
        assert (await browser.get("/events/nonsense")).status_code in (400, 404)


async def test_the_trace_leads_to_where_the_operator_said(filled: str, consoles: Consoles) -> None:
    """By a template of https, and only for a well-formed id (OPS-2)."""
    conn = await asyncpg.connect(filled)
    id, context = await conn.fetchrow("SELECT id, trace_context FROM core.outbox WHERE status = 'failed' LIMIT 1")
    await conn.close()
    async with Browser(consoles(filled, trace_url="https://traces.example/t/{trace_id}")) as browser:
        text = (await browser.get(f"/events/{id}")).text
        assert f'href="https://traces.example/t/{context.split("-")[1]}"' in text


async def test_lists_go_on_from_the_last_row(filled: str, consoles: Consoles) -> None:
    """Every event once, the newest first, in pages of 50 (OPS-2)."""
    seen: list[str] = []
    async with Browser(consoles(filled)) as browser:
        path = "/events"
        for _ in range(10):
            text = (await browser.get(path)).text
            seen += re.findall(r'<a href="/events/([0-9a-f-]{36})">', text)
            more = re.search(r'href="(/events\?before=[^"]+)">Older', text)
            if more is None:
                break
            path = more[1].replace("&amp;", "&")
    conn = await asyncpg.connect(filled)
    assert sorted(seen) == sorted(str(row[0]) for row in await conn.fetch("SELECT id FROM core.outbox"))
    await conn.close()
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("status", ["pending", "delayed", "delivered", "failed", "in_flight", "discarded"])
async def test_events_are_filtered_by_the_address(filled: str, consoles: Consoles, status: str) -> None:
    """A link means the same to a colleague (OPS-2)."""
    async with Browser(consoles(filled)) as browser:
        text = (await browser.get(f"/events?status={status}&event-type=order.placed")).text
        assert "order.shipped</a>" not in text
        assert (await browser.get("/events?status=nonsense")).status_code == 400


async def test_pasting_finds_the_place(filled: str, consoles: Consoles) -> None:
    """An id, a key, an error with other values, a page, a time (OPS-2)."""
    conn = await asyncpg.connect(filled)
    id, key = await conn.fetchrow("SELECT id, idempotency_key FROM core.outbox WHERE status = 'delivered' LIMIT 1")
    await conn.close()
    async with Browser(consoles(filled)) as browser:

        async def leads(text: str) -> str:
            answer = await browser.get("/go", params={"q": text})
            return answer.headers.get("location", answer.text)

        assert await leads(str(id)) == f"/events/{id}"
        assert await leads(key) == f"/events/{id}"
        assert await leads("since=2h") == "/failures?since=2h"
        assert (await leads("CardTerminalTimeout: terminal T-9999 did not answer within 8000 ms")).startswith(
            "/failures?group=billing.charge_card"
        )
        assert "Nothing is known as" in await leads("no such thing at all")
        found = (await browser.get("/palette", params={"q": "charge"})).json()
        assert found and len(found) <= 20 and all(each["url"].startswith("/") for each in found)


@pytest.mark.parametrize("prefix", ["/ops/holdfast", "/x"])
async def test_it_can_be_mounted_under_any_prefix(filled: str, consoles: Consoles, prefix: str) -> None:
    """Every link and form stays under it (OPS-2)."""
    console = consoles(filled)
    app = Starlette(routes=[Mount(prefix, console)])
    async with Browser(app) as browser:  # type: ignore[arg-type]
        for path in ("/", "/failures", "/events", "/preferences"):
            text = (await browser.get(prefix + path)).text
            links = re.findall(r'(?:href|action|src)="(/[^"]*)"', text)
            assert links and all(link.startswith(prefix + "/") for link in links), links
        assert (await browser.get(prefix + "/static/console.css")).status_code == 200
        token = re.search(r'name="_token" value="([^"]+)"', (await browser.get(prefix + "/preferences")).text)
        assert token
        data = {"_token": token[1], "theme": "dark", "zone": "Europe/Berlin", "keys": "off"}
        kept = await browser.post(f"{prefix}/preferences", data=data, headers={"origin": "http://127.0.0.1:8424"})
        assert kept.headers["location"] == f"{prefix}/preferences"
        page = (await browser.get(prefix + "/")).text
        assert 'data-theme="dark"' in page and "CET" in page and 'data-keys="off"' in page


async def test_viewers_see_the_shape_of_payloads(filled: str, consoles: Consoles) -> None:
    """Keys, types and sizes; operators see values (S11)."""
    conn = await asyncpg.connect(filled)
    id = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'failed' LIMIT 1")
    await conn.close()
    async with Browser(consoles(filled, role=Role.VIEWER)) as browser:
        text = (await browser.get(f"/events/{id}")).text
        assert "hidden · text, 12" in text and "Grace" not in text and "customer" in text
        assert "/reveal" not in text and "/failures/ask" not in text and "Edit…" not in text
    async with Browser(consoles(filled, role=Role.OPERATOR)) as browser:
        assert "Grace Hopper" in (await browser.get(f"/events/{id}")).text


async def test_values_are_revealed_for_a_reason(fresh: str, consoles: Consoles) -> None:
    """Where operators do not see them, they ask, and the audit has it (S11, S17)."""
    conn = await asyncpg.connect(fresh)
    id = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'failed' LIMIT 1")
    console = consoles(fresh, role=Role.OPERATOR, values_from=Role.ADMIN)
    async with Browser(console) as browser:
        hidden = (await browser.get(f"/events/{id}")).text
        assert "Grace Hopper" not in hidden and "/reveal" in hidden
        assert (await browser.submit(f"/events/{id}/reveal", reason=" ")).status_code == 400
        shown = await browser.submit(f"/events/{id}/reveal", reason="the customer has called")
        assert "Grace Hopper" in shown.text
    lines = await conn.fetch("SELECT actor, action, reason, arguments FROM core.audit")
    assert [(each["actor"], each["action"], each["reason"]) for each in lines] == [
        ("ada@example.com", "event.reveal", "the customer has called")
    ]
    await conn.close()


async def test_a_redactor_decides_what_is_seen(filled: str, consoles: Consoles) -> None:
    """And one that fails hides everything (S11)."""
    conn = await asyncpg.connect(filled)
    id = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'failed' LIMIT 1")
    await conn.close()

    def redact(principal: object, event_type: str, value: dict[str, object]) -> object:
        return {key: each for key, each in value.items() if key != "customer"}

    def broken(principal: object, event_type: str, value: object) -> object:
        raise RuntimeError("Grace")

    async with Browser(consoles(filled, redact=redact)) as browser:
        text = (await browser.get(f"/events/{id}")).text
        assert "order_id" in text and "grace@example.com" not in text
    async with Browser(consoles(filled, role=Role.VIEWER, redact=redact)) as browser:
        text = (await browser.get(f"/events/{id}")).text
        assert "&#34;order_id&#34;" in text and "&#34;customer&#34;" not in text, "a key may be the secret"
    for role in (Role.VIEWER, Role.ADMIN):
        async with Browser(consoles(filled, role=role, redact=broken)) as browser:
            text = (await browser.get(f"/events/{id}")).text
            assert "withheld" in text and "Grace" not in text and "&#34;customer&#34;" not in text
