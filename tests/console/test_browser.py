"""The console in a real browser: every page in both themes and at two widths, the keyboard alone, live parts."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from holdfast import EventEnvelope, HandlerRegistry, Worker
from holdfast.console.pages import PAGES
from holdfast.embedded import EmbeddedPostgres
from tests.console.examples import address_of
from tests.console.serving import served
from tests.servers import SessionServer, run_coroutine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = ((1440, 900), (390, 844))
# Rows of a list are made by one template: of each list axe reads the first three.
EXAMINED = {"exclude": [["tbody tr:nth-child(n+4)"], [".checks li:nth-child(n+4)"], [".finding:nth-of-type(n+3)"]]}
NOT_HTML = ("palette", "failures.hand-over")
SHOWN = [page for page in PAGES if page.get is not None and page.name not in NOT_HTML]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of this module; that it is missing is a failure, and not a reason to skip.

    Playwright keeps an event loop running in this thread, in which no other module's tests could run theirs.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("Chromium is not on this machine: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shown(postgres_server: SessionServer, staffed_original: str) -> Iterator[tuple[str, str]]:
    """The address of a console, and that of its database."""
    name = postgres_server.copy(staffed_original)
    dsn = postgres_server.dsn(name)
    with served(dsn) as address:
        yield address, dsn
    postgres_server.drop(name)


@contextlib.contextmanager
def opened(browser: Browser, base: str, theme: str = "light", width: int = 1440, height: int = 900) -> Iterator[Page]:
    """A page whose complaints are collected, and end the test."""
    context = browser.new_context(
        base_url=base,
        viewport={"width": width, "height": height},
        color_scheme=theme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        yield page
        assert complaints == []
    finally:
        context.close()


def execute(dsn: str, statement: str, *values: Any) -> Any:
    async def run() -> Any:
        conn = await asyncpg.connect(dsn)
        try:
            return await conn.fetchval(statement, *values)
        finally:
            await conn.close()

    return run_coroutine(run)


def without_ages(text: str) -> str:
    """A row without how long ago things were, which goes on by itself."""
    return re.sub(r"\b(now|in \d+ \w+|\d+ \w+ ago)\b", "", text)


FAIL_ANOTHER = """
INSERT INTO core.outbox (event_type, source, payload, idempotency_key, channel, generation, status, handler_name,
       attempts, last_error, error_signature, failure_reason, first_failed_at, failed_at, settled_at)
SELECT event_type, source, payload, 'another-' || gen_random_uuid(), channel, generation, status, handler_name,
       attempts, last_error, error_signature, failure_reason, first_failed_at, clock_timestamp(), settled_at
FROM core.outbox WHERE status = 'failed' AND handler_name = 'webhooks.deliver' LIMIT 1
RETURNING id
"""


@pytest.fixture(scope="module")
def addresses(shown: tuple[str, str]) -> list[str]:
    """An address of every page."""

    async def found() -> list[str]:
        return [await address_of(each, shown[1]) for each in SHOWN]

    return list(run_coroutine(found))


@pytest.mark.nightly("pages under axe")
@pytest.mark.parametrize(("theme", "examined"), [("light", 1440), ("dark", 390)])
def test_every_page_in_every_view(
    browser: Browser, shown: tuple[str, str], addresses: list[str], theme: str, examined: int
) -> None:
    """Nothing is complained about, nothing is wider than the screen, and axe finds nothing serious.

    Colours and structure are the same at the other width, where axe need not read them again: it takes a second
    (OPS-2).
    """
    axe = Axe()
    found: list[str] = []
    with opened(browser, shown[0], theme) as page:
        for path in addresses:
            page.set_viewport_size({"width": 1440, "height": 900})
            answer = page.goto(path)
            assert answer is not None and answer.status == 200, path
            for width, height in SIZES:
                page.set_viewport_size({"width": width, "height": height})
                wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                if wide > 0:
                    found.append(f"{path} is {wide} px too wide at {width}")
                if width == examined:
                    found += serious(path, axe.run(page, EXAMINED, {"resultTypes": ["violations"]}).response)
    assert found == []


def serious(path: str, answer: dict[str, Any]) -> list[str]:
    """What axe holds to be serious."""
    return [
        f"{path}: {problem['id']} ({problem['help']}): {problem['nodes'][0]['html'][:160]}"
        for problem in answer["violations"]
        if problem["impact"] in ("serious", "critical")
    ]


def test_the_keyboard_alone(browser: Browser, shown: tuple[str, str]) -> None:
    """Going, choosing, asking for a replay and not doing it, and the palette (OPS-2)."""
    base, _ = shown
    with opened(browser, base) as page:
        page.goto("/")
        page.keyboard.press("g")
        page.keyboard.press("f")
        expect(page.locator("h1")).to_have_text("Failures")
        page.keyboard.press("j")
        page.keyboard.press("x")
        expect(page.locator(".bulk")).to_contain_text("1 chosen · exactly 31 events")
        page.keyboard.press("x")
        expect(page.locator(".bulk")).to_be_hidden()
        page.keyboard.press("r")
        dialog = page.locator("#dialog")
        expect(dialog).to_contain_text("Replay 31 in production")
        expect(page.locator("#dialog [name=reason]")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(page.locator("[data-key=r]")).to_be_focused()
        page.keyboard.press("Control+k")
        page.keyboard.type("ledger")
        expect(page.locator("#palette li").first).to_contain_text("ledger.record_sale")
        page.keyboard.press("Enter")
        expect(page.locator("body")).to_contain_text("ledger.record_sale")
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("t")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_pages_are_live_and_can_be_paused(browser: Browser, shown: tuple[str, str]) -> None:
    """A new event is counted without loading the page; a pause freezes everything (OPS-2)."""
    base, dsn = shown
    add = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('live.test', 'shop', '{}') RETURNING id"
    with opened(browser, base) as page:
        page.goto("/")
        pending = page.locator("#states .cell b").first
        before = int(pending.inner_text().replace(",", ""))
        execute(dsn, add)
        expect(pending).to_have_text(str(before + 1), timeout=20_000)
        page.keyboard.press(" ")
        expect(page.locator("[data-live-toggle]")).to_have_attribute("aria-pressed", "true")
        execute(dsn, add)
        page.wait_for_timeout(1_500)
        expect(pending).to_have_text(str(before + 1))
        page.keyboard.press(" ")
        expect(pending).to_have_text(str(before + 2), timeout=20_000)


@pytest.mark.parametrize(
    ("path", "row"), [("/events", "tbody tr"), ("/failures?tab=events", "tbody tr"), ("/failures", ".group")]
)
def test_new_rows_announce_themselves(browser: Browser, shown: tuple[str, str], path: str, row: str) -> None:
    """ "2 new, show" instead of rows that jump; who asks for them sees them (OPS-2)."""
    base, dsn = shown
    with opened(browser, base) as page:
        page.goto(path)
        new = page.locator("#newest a")
        expect(new).to_have_count(1)
        expect(new).to_be_hidden()
        before = page.locator(row).all_inner_texts()
        for _ in range(2):
            execute(dsn, FAIL_ANOTHER)
        expect(new).to_have_text("2 new, show", timeout=20_000)
        after = page.locator(row).all_inner_texts()
        assert [each.split() for each in map(without_ages, after)] == [
            each.split() for each in map(without_ages, before)
        ]
        new.click()
        expect(page.locator("#newest a")).to_be_hidden()
        expect(page.locator(row).first).to_contain_text("webhooks.deliver" if "tab" in path else re.compile("[a-z]"))
        assert page.locator(row).all_inner_texts() != before
    execute(dsn, "DELETE FROM core.outbox WHERE idempotency_key LIKE 'another-%'")


def test_a_phone_has_every_page_behind_more(browser: Browser, shown: tuple[str, str]) -> None:
    """A sheet that opens and closes, also without a script; names in lists are not broken in the middle (OPS-2)."""
    base, _ = shown
    with opened(browser, base, "dark", 390, 844) as page:
        page.goto("/events")
        expect(page.locator("#more")).to_be_hidden()
        page.locator("[data-more]").click()
        page.locator("#more").get_by_role("link", name="Audit").click()
        expect(page.locator("h1")).to_have_text("Audit")
        expect(page.locator("#more")).to_be_hidden()
        page.locator("[data-more]").click()
        page.keyboard.press("Escape")
        expect(page.locator("#more")).to_be_hidden()
        expect(page.locator(".badge")).to_have_text(re.compile("[0-9]+"))
        broken = "links => links.filter(each => each.getClientRects().length > 1).map(each => each.textContent)"
        for path in ("/", "/events", "/failures?tab=events", "/handlers", "/plans"):
            page.goto(path)
            assert page.locator("table.rows td:first-child a").evaluate_all(broken) == [], path
    context = browser.new_context(base_url=base, java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto("/events")
    page.locator("[data-more]").click()
    expect(page.locator("#more")).to_be_visible()
    page.get_by_role("link", name="Close").click()
    expect(page.locator("#more")).to_be_hidden()
    context.close()


def test_a_group_is_replayed_from_the_browser(browser: Browser, shown: tuple[str, str]) -> None:
    """From the group to the answer, with the number in every question (OPS-3)."""
    base, dsn = shown
    with opened(browser, base) as page:
        page.goto("/failures")
        page.get_by_role("link", name=re.compile("webhooks.deliver")).click()
        page.get_by_role("button", name=re.compile("Replay 2…")).click()
        page.locator("#dialog [name=reason]").fill("the hook is back")
        page.get_by_role("button", name="Replay 2 in production").click()
        expect(page.locator("h1")).to_have_text("2 events replayed")
    assert execute(dsn, "SELECT reason FROM core.audit WHERE action = 'replay'") == "the hook is back"


def test_pages_work_without_a_script(browser: Browser, shown: tuple[str, str]) -> None:
    """The same forms, as pages of their own (OPS-2)."""
    base, _ = shown
    context = browser.new_context(base_url=base, java_script_enabled=False)
    page = context.new_page()
    page.goto("/failures")
    page.locator("input[name=chosen]").last.check()
    page.locator(".bulk button[value=discard]").click()
    expect(page.locator("h1")).to_contain_text("Discard")
    page.locator("[name=reason]").fill("not needed")
    page.locator("#confirm .button.danger").click()
    expect(page.locator("h1")).to_contain_text("discarded")
    page.get_by_role("button", name=re.compile("Restore")).click()
    expect(page.locator("h1")).to_contain_text("restored")
    context.close()


class TerminalDown(Exception):
    """What the handler of the next test raises until it is fixed."""


def till(*, fixed: bool) -> HandlerRegistry:
    """A handler before and after its fix."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card", on_error="reject")
    async def charge(event: EventEnvelope) -> None:
        if not fixed:
            raise TerminalDown("terminal T-0412 did not answer")

    return registry


def test_a_handler_is_fixed_and_its_group_replayed(browser: Browser, postgres_server: SessionServer) -> None:
    """A handler fails, its group is shown; it is fixed and replayed, and the pages say delivered (OPS-3, RUN-1)."""
    name = postgres_server.create(schema=True)
    dsn = postgres_server.dsn(name)
    run_coroutine(lambda: Worker(dsn, till(fixed=False)).drain())  # subscribes
    add = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}') RETURNING id"
    ids = [execute(dsn, add) for _ in range(3)]
    run_coroutine(lambda: Worker(dsn, till(fixed=False)).drain())
    try:
        with served(dsn) as base, opened(browser, base) as page:
            page.goto("/failures")
            page.get_by_role("link", name=re.compile("billing.charge_card")).first.click()
            expect(page.locator("main")).to_contain_text("TerminalDown")
            page.get_by_role("button", name=re.compile("Replay 3…")).click()
            page.locator("#dialog [name=reason]").fill("the terminal was exchanged")
            page.get_by_role("button", name="Replay 3 in production").click()
            expect(page.locator("h1")).to_have_text("3 events replayed")
            page.goto("/")
            pending = page.locator("#states .cell.s-pending b").first
            expect(pending).to_have_text("3", timeout=20_000)
            run_coroutine(lambda: Worker(dsn, till(fixed=True)).drain())
            expect(pending).to_have_text("0", timeout=20_000)
            page.goto(f"/events/{ids[0]}")
            expect(page.locator("main")).to_contain_text(re.compile("delivered", re.IGNORECASE))
            expect(page.locator("main")).to_contain_text("the terminal was exchanged")
            page.goto("/failures")
            expect(page.locator("main")).to_contain_text("Nothing waits for a decision")
        assert execute(dsn, "SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 3
    finally:
        postgres_server.drop(name)


def test_the_database_goes_away_under_an_open_page(
    browser: Browser, own_server: EmbeddedPostgres, own_dsn: str
) -> None:
    """The page keeps what it shows and says so, and is live again by itself (OPS-2)."""
    add = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('live.test', 'shop', '{}') RETURNING id"
    execute(own_dsn, add)
    with served(own_dsn) as base, opened(browser, base) as page:
        page.goto("/")
        pending = page.locator("#states .cell b").first
        expect(pending).to_have_text("1")
        own_server.kill()
        expect(page.locator("#away")).to_be_visible(timeout=30_000)
        expect(pending).to_have_text("1")
        own_server.start()
        expect(page.locator("#away")).to_be_hidden(timeout=60_000)
        execute(own_dsn, add)
        expect(pending).to_have_text("2", timeout=20_000)
