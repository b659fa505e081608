"""Logins that end: in other processes, and under streams that are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.operator import ended_sessions
from tests.console.conftest import Browser
from tests.console.test_security import logins

Consoles = Callable[..., Console]
SECRET = "a secret that two consoles share"
ADA = ("ada", Role.OPERATOR, "correct horse battery")
BOB = ("bob", Role.VIEWER, "x" * 12)


class Stream:
    """The answer of /live as a server of ASGI applications gets it, part by part."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = asyncio.Event()

    async def take(self, message: Any) -> None:
        self.text += message.get("body", b"").decode()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.ended.set()


@asynccontextmanager
async def watching(browser: Browser) -> AsyncIterator[Stream]:
    """A stream of a browser, which has begun."""
    request = browser.build_request("GET", "/live?feed=overview")
    stream = Stream()

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/live",
        "raw_path": b"/live",
        "query_string": b"feed=overview",
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8424),
    }
    task = asyncio.create_task(browser.console(scope, receive, stream.take))
    try:
        async with asyncio.timeout(20):
            while '"at"' not in stream.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield stream
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("how", ["removed", "logged out"])
async def test_an_open_stream_ends_with_the_login(filled: str, consoles: Consoles, tmp_path: Path, how: str) -> None:
    """Who was let in and is not any more sees nothing more; others go on (S10, S11)."""
    console = consoles(filled, logins(tmp_path, ADA, BOB), interval=0.2)
    async with Browser(console) as ada, Browser(console) as bob:
        await ada.submit("/login", "/login", name="ada", secret=ADA[2])
        await bob.submit("/login", "/login", name="bob", secret=BOB[2])
        async with watching(ada) as hers, watching(bob) as his:
            if how == "removed":
                file = tmp_path / "people"
                file.write_text(file.read_text().split("\n")[1] + "\n")
            else:
                await ada.submit("/logout")
            async with asyncio.timeout(20):
                await hers.ended.wait()
            seen = len(his.text)
            async with asyncio.timeout(20):
                while len(his.text) == seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert not his.ended.is_set()


async def test_a_log_out_counts_in_every_process(
    fresh: str, consoles: Consoles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that somebody has taken ends in all consoles with the log-out in one (S10, S12)."""
    monkeypatch.setattr(ended_sessions, "ASKED_EVERY", 0.2)
    first, second = (consoles(fresh, logins(tmp_path, ADA), secret=SECRET) for _ in range(2))
    async with Browser(first) as browser, Browser(second, headers={"accept": "text/plain"}) as thief:
        await browser.submit("/login", "/login", name="ada", secret=ADA[2])
        thief.cookies.set("holdfast_session", browser.cookies["holdfast_session"])
        assert (await thief.get("/preferences")).status_code == 200
        assert (await browser.submit("/logout")).status_code == 303
        async with asyncio.timeout(20):
            while (await thief.get("/preferences")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await thief.get("/preferences")).status_code == 401
        # Another session of the same person goes on.
        await browser.submit("/login", "/login", name="ada", secret=ADA[2])
        thief.cookies.set("holdfast_session", browser.cookies["holdfast_session"])
        assert (await thief.get("/preferences")).status_code == 200


async def test_people_stay_logged_in_while_the_database_is_away(consoles: Consoles, tmp_path: Path) -> None:
    """What other processes know cannot be asked, and does not hold up pages for long (S10)."""
    console = consoles("postgresql://nobody@127.0.0.1:1/none", logins(tmp_path, ADA), secret=SECRET)
    async with Browser(console) as browser, asyncio.timeout(20):
        await browser.submit("/login", "/login", name="ada", secret=ADA[2])
        assert (await browser.get("/preferences")).status_code == 200
        await browser.submit("/logout")
        assert (await browser.get("/preferences")).status_code == 303
