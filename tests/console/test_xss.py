"""What producers write is shown as text, on every page, in every field that they control (S13)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser

import asyncpg
import pytest

from holdfast.console import Console
from holdfast.console.formatting import visible
from holdfast.console.pages import PAGES
from tests.console import fleet
from tests.console.conftest import Browser
from tests.console.examples import address_of
from tests.console.vectors import VECTORS
from tests.servers import SessionServer, run_coroutine

Consoles = Callable[..., Console]
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\u200b-\u200f]")

ADD = """
INSERT INTO core.outbox (event_type, source, target, payload, headers, idempotency_key, dedupe_key, status,
                         handler_name, attempts, last_error, traceback, error_signature, failure_reason,
                         first_failed_at, failed_at, settled_at, trace_context, failure_history, domain_id, channel)
SELECT v, v, CASE WHEN s = 'pending' THEN v END, jsonb_build_object(v, v, 'deep', jsonb_build_array(v)),
       jsonb_build_object(v, v), v || n || s, v, s, CASE WHEN s = 'failed' THEN v END, 1, v, v,
       CASE WHEN s = 'failed' THEN v END, CASE WHEN s = 'failed' THEN 'rejected' END,
       CASE WHEN s = 'failed' THEN now() END, CASE WHEN s = 'failed' THEN now() END,
       CASE WHEN s = 'failed' THEN now() END, v,
       jsonb_build_array(jsonb_build_object('attempts', 1, 'last_error', v, 'failed_at', now(), 'generation', 0,
                                            'replayed_by', v, 'replayed_at', now(), 'failure_reason', v)),
       '00000000-0000-7000-8000-000000000001', 'outbox_default'
FROM unnest($1::text[]) WITH ORDINALITY AS t (v, n), unnest(ARRAY['failed', 'pending']) AS s
"""


async def poison(dsn: str) -> None:
    """Write every vector into every column of text that a producer, a handler or a worker can fill."""
    conn = await asyncpg.connect(dsn)
    await conn.execute("SET session_replication_role = replica")  # the triggers would refuse some of them
    await conn.execute(ADD, list(VECTORS))
    for number, vector in enumerate(VECTORS):
        await conn.execute(
            """INSERT INTO core.workers (id, name, host, pid, version, generation, channels, handlers)
               VALUES ($1, $2, $2, 1, $2, 0, ARRAY[$2], ARRAY[$2])""",
            f"00000000-0000-7000-8000-{number:012d}", vector,
        )  # fmt: skip
        await conn.execute(
            """INSERT INTO core.failure_notes (handler_name, error_signature, note, noted_by) VALUES ($1, $1, $1, $1)
               ON CONFLICT DO NOTHING""",
            vector,
        )
        await conn.execute(
            "INSERT INTO core.audit (actor, action, reason, arguments) VALUES ($1, $1, $1, $2::text::jsonb)",
            vector, json.dumps({vector: vector}),
        )  # fmt: skip
    await conn.close()


@pytest.fixture(scope="session")
def poisoned(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: poison(postgres_server.dsn(name)))
    run_coroutine(lambda: fleet.poison(postgres_server.dsn(name), VECTORS))
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


class Reader(HTMLParser):
    """Reads a page as a browser does, and notices what is not ours."""

    OURS = frozenset(
        re.findall(
            r"\w+",
            """html head meta title link script body svg defs pattern rect circle symbol path use a header div b span
            nav form input kbd button i main section p h1 h2 h3 ul ol li table caption thead tbody tr th td code pre
            details summary dl dt dd dialog footer small time text line polygon polyline label select option textarea
            aside q del ins br strong em""",
        )
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.OURS:
            self.faults.append(f"<{tag}>")
        found = {name: value or "" for name, value in attrs}
        self.faults += [f"{tag} {name}" for name in found if name.startswith("on") or name in ("style", "srcdoc")]
        if tag == "script" and not found.get("src", "").startswith("/static/"):
            self.faults.append("script")
        for name in ("href", "src", "action", "formaction"):
            value = found.get(name, "")
            if value and not value.startswith(("/", "#", "https://traces.example/")):
                self.faults.append(f"{tag} {name}={value[:60]}")
        self.text += found.values()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def faults_of(page: str) -> list[str]:
    reader = Reader()
    reader.feed(page)
    return reader.faults


def test_there_are_fifty() -> None:
    """S13."""
    assert len(set(VECTORS)) == len(VECTORS) >= 50


@pytest.mark.parametrize("page", [page for page in PAGES if page.get is not None], ids=lambda page: page.name)
async def test_every_page_shows_them_as_text(poisoned: str, consoles: Consoles, page: object) -> None:
    """No element, attribute or address of a page is a producer's, and nothing hides in it (S13)."""
    async with Browser(consoles(poisoned, trace_url="https://traces.example/{trace_id}")) as browser:
        answer = await browser.get(await address_of(page, poisoned))
        assert answer.status_code in (200, 303, 400, 404), answer.text[:300]
        if not answer.headers["content-type"].startswith(("application/json", "text/plain")):
            assert faults_of(answer.text) == []
        assert not HIDDEN.search(answer.text)


@pytest.mark.parametrize("path", ["/failures?tab=events", "/events?status=pending", "/failures?sample=x", "/"])
async def test_lists_show_them_as_text(poisoned: str, consoles: Consoles, path: str) -> None:
    """And they are there, to be read (S13)."""
    async with Browser(consoles(poisoned)) as browser:
        text = (await browser.get(path)).text
        assert faults_of(text) == [] and not HIDDEN.search(text)
        shown = sum(html.escape(visible(vector)[:40], quote=True)[:30].replace("&#x27;", "&#39;") in text
                    or html.escape(visible(vector)[:40], quote=False)[:20] in text for vector in VECTORS)  # fmt: skip
        assert shown >= (20 if path != "/" else 2)


@pytest.mark.slow
async def test_one_event_shows_them_as_text(poisoned: str, consoles: Consoles) -> None:
    """Type, source, target, handler, keys, payload, headers, errors, traceback, cycles, notes, trace (S13)."""
    conn = await asyncpg.connect(poisoned)
    ids = [row["id"] for row in await conn.fetch("SELECT id FROM core.outbox ORDER BY id")]
    await conn.close()
    async with Browser(consoles(poisoned, trace_url="https://traces.example/{trace_id}")) as browser:
        for id in ids:
            text = (await browser.get(f"/events/{id}")).text
            assert faults_of(text) == [] and not HIDDEN.search(text), id


@pytest.mark.parametrize("vector", VECTORS)
async def test_addresses_show_them_as_text(filled: str, consoles: Consoles, vector: str) -> None:
    """Also in the page of an error, and in what the palette finds (S13)."""
    async with Browser(consoles(filled)) as browser:
        for path, name in (("/failures", "handler"), ("/failures", "group"), ("/events", "key"), ("/go", "q")):
            answer = await browser.get(path, params={name: vector})
            if answer.status_code != 303:
                assert faults_of(answer.text) == [] and not HIDDEN.search(answer.text)
        found = await browser.get("/palette", params={"q": vector})
        assert found.headers["content-type"] == "application/json"
        assert (await browser.get(f"/{vector.replace('/', '')}")).status_code in (404, 400)


async def test_live_parts_show_them_as_text(poisoned: str, consoles: Consoles) -> None:
    """What is sent later is made of the same templates (S13)."""
    console = consoles(poisoned)
    snapshot = await console.hub.latest("overview")
    for id in console.hub._feeds["overview"].fragments(snapshot.value):
        fragment = console.hub.fragment("overview", id, "UTC", "") or ""
        assert fragment and faults_of(fragment) == [] and not HIDDEN.search(fragment)
