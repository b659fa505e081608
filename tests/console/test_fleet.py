"""Handlers, workers and generations in the console: each action with its dry run, its line in the audit, its role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.console.pages import PAGES
from tests.console import shop
from tests.console.asking import acted, ask, confirm, last_line
from tests.console.conftest import Browser
from tests.console.examples import address_of

Consoles = Callable[..., Console]
ADA = "ada@example.com"
LEDGER = "ledger.record_sale"


@pytest.fixture
async def db(staffed: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(staffed)
    yield connection
    await connection.close()


async def test_handlers_are_paused_limited_and_retired(
    staffed: str, db: asyncpg.Connection, consoles: Consoles
) -> None:
    """The page shows what holds a handler back, and every change is the user's (OPS-3)."""
    async with Browser(consoles(staffed, environment="production")) as browser:
        listed = (await browser.get("/handlers")).text
        assert "4 at once" in listed and "20 a second" in listed and "1 is paused" in listed and shop.FAILING in listed
        page = await acted(browser, db, "handlers.pause", "handler.pause", handler=LEDGER)
        assert f"It is paused by {ADA}" in page and "Resume" in page
        page = await acted(browser, db, "handlers.resume", "handler.resume", handler=LEDGER)
        assert "It is paused" not in page
        asked = await ask(browser, "handlers.limit", handler=LEDGER, fleet_concurrency="3", rate="90/min")
        assert "3 at once, 1.5 a second" in asked.text and "no limit" in asked.text
        page = await acted(browser, db, "handlers.limit", "handler.limit", handler=LEDGER, fleet_concurrency="3")
        assert "3 at once" in page
        page = await acted(browser, db, "handlers.limit", "handler.limit", handler=LEDGER, clear="fleet_concurrency")
        assert "3 at once" not in page
        page = await acted(browser, db, "handlers.retire", "handler.retire", handler=LEDGER)
        assert "It has no subscription any more" in page
        refused = await ask(browser, "handlers.open", handler=shop.FAILING)
        assert refused.status_code == 409 and "has no breaker" in refused.text
        wrong = await ask(browser, "handlers.limit", handler=LEDGER, fleet_concurrency="many")
        assert wrong.status_code == 400
        assert (await browser.get("/handlers/no.such_handler")).status_code == 404


async def test_one_handler_has_its_numbers_and_charts(staffed: str, consoles: Consoles) -> None:
    """Rates, durations as p50 and p99, what failed by cause, and three windows (OPS-2)."""
    async with Browser(consoles(staffed)) as browser:
        for window in ("1h", "6h", "24h"):
            page = (await browser.get(f"/handlers/{shop.FAILING}", params={"window": window})).text
            assert "CardTerminalTimeout" in page and 'class="chart chart-wide"' in page and "99 %" in page
            assert f"holdfast handlers show {shop.FAILING}" in page


async def test_workers_are_released(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """Of a silent worker at once; of one that lives only by force, with a reason and the number typed (OPS-3)."""
    living, silent = await db.fetch("SELECT id, name FROM core.workers ORDER BY name LIMIT 2")
    await db.execute("UPDATE core.workers SET heartbeat_at = now() - interval '5 min' WHERE id = $1", silent["id"])
    await db.execute(
        "UPDATE core.outbox SET status = 'in_flight', claimed_by = $1, lease_token = $1, attempts = 1, "
        "lease_expires_at = now() + interval '1 h' WHERE id IN "
        "(SELECT id FROM core.outbox WHERE status = 'pending' LIMIT 3)",
        living["id"],
    )
    async with Browser(consoles(staffed, environment="production")) as browser:
        listed = (await browser.get("/workers")).text
        assert "2 workers live; 1 is silent." in listed and "holdfast workers list" in listed
        page = (await browser.get(f"/workers/{silent['id']}")).text
        assert "It is silent for 5 min" in page and "holdfast workers release" in page
        by_force = await ask(browser, "workers.release", worker=str(living["id"]))
        assert "It is refused without force" in by_force.text and "by force in production" in by_force.text
        assert (await confirm(browser, by_force, reason="")).status_code == 400
        assert (await confirm(browser, by_force, reason="it hangs", typed="4")).status_code == 400
        assert (await confirm(browser, by_force, reason="it hangs", typed="3")).status_code == 303
        assert await last_line(db, "worker.release") == (ADA, "it hangs")
        asked = await ask(browser, "workers.release", worker=str(silent["id"]))
        assert "leaves the list" in asked.text
        assert (await confirm(browser, asked, reason="it was killed")).headers["location"] == "/workers"
        assert (await browser.get(f"/workers/{silent['id']}")).status_code == 404
        assert (await browser.get("/workers/nonsense")).status_code in (400, 404)


async def test_generations_begin_move_and_retire(staffed: str, db: asyncpg.Connection, consoles: Consoles) -> None:
    """The page says which one may go, and why not (GEN-2)."""
    async with Browser(consoles(staffed, environment="production")) as browser:
        page = (await browser.get("/generations")).text
        assert "it is the current one" in page and "events are open" in page
        page = await acted(browser, db, "generations.begin", "generation.begin", label="1.4.3")
        assert "Generation 2 has begun" in page and "1.4.3" in page
        page = await acted(browser, db, "generations.move", "generation.move", generation="0", to="1")
        assert "52 events moved from generation 0 to 1" in page
        refused = await ask(browser, "generations.retire", generation="0")
        assert "It is refused without force" in refused.text
        assert (await confirm(browser, refused, reason="")).status_code == 400
        unknown = await ask(browser, "generations.move", generation="1", to="77")
        assert "not a known deployment" in unknown.text and "Type 52 to go on" in unknown.text
        wrong = await confirm(browser, unknown, reason="for later", typed="51")
        assert wrong.status_code == 400 and "type 52" in wrong.text
        moved = await confirm(browser, unknown, reason="for later", typed="52")
        assert moved.status_code == 303
        assert await last_line(db, "generation.move") == (ADA, "for later")
        page = (await browser.get("/generations")).text
        assert "Events wait in 77, which no living worker serves" in page


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.ADMIN])
async def test_every_action_asks_for_its_role(filled: str, consoles: Consoles, role: Role) -> None:
    """Who may not do something does not see it either (S11)."""
    actions = [page for page in PAGES if page.path.startswith("/do/")]
    assert len(actions) >= 10
    offered = ""
    async with Browser(consoles(filled, role=role)) as browser:
        for page in actions:
            answer = await browser.submit(page.path)
            assert (answer.status_code == 403) == (role < page.post_role), page.path
        examples = [await address_of(page, filled) for page in PAGES if page.example in ("plan", "worker", "schedule")]
        for path in (
            *examples,
            "/handlers",
            f"/handlers/{shop.FAILING}",
            "/workers",
            "/generations",
            "/plans",
            "/retention",
            "/archive",
        ):
            offered += (await browser.get(path)).text
    for page in actions:
        if role < page.post_role:
            assert f'action="{page.path}"' not in offered, page.path
