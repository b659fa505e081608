"""Every command on a page can be copied as a request to the HTTP API, which does the same."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from holdfast.console import Console
from holdfast.console.curl import curl_of, request_of
from holdfast.console.pages import PAGES
from tests.console.asking import ask
from tests.console.conftest import Browser
from tests.console.examples import address_of

Consoles = Callable[..., Console]
NOT_HTML = ("palette", "failures.hand-over")
SHOWN = [page for page in PAGES if page.get is not None and page.name not in NOT_HTML]
ALONE = ("worker", "plans.new", "go", "preferences")  # pages without a command, or with one that no request is


def curls(page: str) -> list[str]:
    """The requests that a page lets people copy."""
    return [html.unescape(each) for each in re.findall(r'class="copy curl" data-copy="([^"]+)"', page)]


async def sent(browser: Browser, line: str) -> httpx.Response:
    """Send a request as curl would, with a token."""
    words = shlex.split(line.replace("$HOLDFAST_TOKEN", "hft_any"))
    assert words[0] == "curl" and "Authorization: Bearer hft_any" in words
    headers = {"authorization": "Bearer hft_any", "content-type": "application/json", "accept": "*/*"}
    body = words[words.index("-d") + 1] if "-d" in words else None
    return await browser.request("POST" if "-X" in words else "GET", words[-1], content=body, headers=headers)


@pytest.mark.parametrize(
    ("command", "name", "given"),
    [
        ("holdfast status", "status", {}),
        ("holdfast plans show 7 --json", "plans.show", {"plan": 7}),
        ('holdfast plans pause 7 --reason "…"', "plans.pause", {"plan": 7, "reason": "…", "dry_run": True}),
        ("holdfast failed list --discarded --event-type a.b", "failed.list", {"discarded": True, "event_type": "a.b"}),
        ("holdfast audit --actor ada --steps", "audit.list", {"actor": "ada", "steps": True}),
        (
            "holdfast generations move 3 --to 4 --force --reason why",
            "generations.move",
            {"generation": 3, "to": 4, "force": True, "reason": "why", "dry_run": True},
        ),
        (
            "holdfast retention set outbox_row --class logs --active-days 3 --reason why",
            "retention.set",
            {"entity": "outbox_row", "content_class": "logs", "active_days": 3, "reason": "why", "dry_run": True},
        ),
        ("holdfast requests show tenant checkout-1", "requests.show", {"scope": "tenant", "key": "checkout-1"}),
    ],
)
def test_a_command_is_a_request(command: str, name: str, given: dict[str, Any]) -> None:
    """Options are arguments, words without one are what the verb needs; a change is a dry run first (OPS-3)."""
    found = request_of(command)
    assert found is not None and (found[0].name, found[1]) == (name, given)


@pytest.mark.parametrize(
    "command", ["holdfast console", "holdfast plans show", "holdfast plans show x", "holdfast 'open", "ls", ""]
)
def test_what_no_request_does_has_none(command: str) -> None:
    """Nothing is guessed (OPS-3)."""
    assert curl_of(command, "http://127.0.0.1/api/v1") is None


def test_times_that_are_relative_become_absolute() -> None:
    """A line that is kept means the same tomorrow (OPS-3)."""
    found = request_of("holdfast failed groups --since 2h")
    assert found is not None and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d.*\+00:00", found[1]["since"])


async def test_every_page_has_its_request(filled: str, consoles: Consoles) -> None:
    """Each of them is answered by the API of the same console (OPS-3)."""
    async with Browser(consoles(filled)) as browser:
        for page in SHOWN:
            found = curls((await browser.get(await address_of(page, filled))).text)
            assert found or page.name in ALONE, page.name
            for line in found:
                answer = await sent(browser, line)
                assert answer.status_code == 200, (line, answer.text)


async def test_a_question_has_its_request(filled: str, consoles: Consoles) -> None:
    """What is copied from a dialog is a dry run of the same change, and changes nothing (OPS-3)."""
    async with Browser(consoles(filled)) as browser:
        page = await ask(browser, "plans.cancel", plan="1")
        (line,) = curls(page.text)
        answer = await sent(browser, line)
        assert answer.status_code == 200 and answer.json()["dry_run"] is True, answer.text
        assert json.loads(shlex.split(line)[-2]) == {"plan": 1, "reason": "…", "dry_run": True}
        shown = await sent(browser, curls((await browser.get("/plans/1/report")).text)[0])
        assert shown.json()["plan"]["state"] == "open"
