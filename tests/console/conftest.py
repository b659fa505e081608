"""Consoles on a database, asked in this process, and the shop that has something on every page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking, Embedded
from holdfast.console import Console, ConsoleSettings, create_console
from tests.console import fleet, shop
from tests.servers import SessionServer, run_coroutine

BASE = "http://127.0.0.1:8424"


class Browser(httpx.AsyncClient):
    """A browser without script: it keeps cookies, names its origin, and brings tokens back."""

    def __init__(self, console: Console, base: str = BASE, **options: Any) -> None:
        self.console = console
        transport = httpx.ASGITransport(console, client=(options.pop("client", "127.0.0.1"), 50_000))
        headers = {"accept": "text/html", **options.pop("headers", {})}
        super().__init__(transport=transport, base_url=base, headers=headers, **options)

    async def token(self, path: str = "/preferences") -> str:
        """Return the token of the forms of a page."""
        page = await self.get(path)
        found = re.search(r'name="_token" value="([^"]+)"', page.text)
        assert found, page.text[:2000]
        return found[1]

    async def send(self, *args: Any, **options: Any) -> httpx.Response:
        return await super().send(*args, **options)

    async def submit(self, path: str, form_on: str = "/preferences", **fields: Any) -> httpx.Response:
        """Send a form as a browser does."""
        data = {"_token": await self.token(form_on), **fields}
        return await self.post(path, data=data, headers={"origin": str(self.base_url).rstrip("/")})


def as_role(role: Role, name: str = "ada@example.com") -> Embedded:
    async def who(_: Asking) -> Principal | None:
        return Principal(name, role)

    return Embedded(who)


@pytest.fixture
async def consoles() -> AsyncIterator[Callable[..., Console]]:
    """Makes consoles, and closes them."""
    made: list[Console] = []

    def make(dsn: str, provider: Any = None, role: Role = Role.ADMIN, **settings: Any) -> Console:
        made.append(create_console(dsn, provider=provider or as_role(role), settings=ConsoleSettings(**settings)))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def fill(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    try:
        await shop.fill(conn, failing=30, others=(5, 3, 2), delivered=20, minutes=60)
    finally:
        await conn.close()


async def fill_all(dsn: str) -> None:
    await fill(dsn)
    await fleet.fill(dsn)


@pytest.fixture(scope="session")
def filled(postgres_server: SessionServer) -> Iterator[str]:
    """A database with the shop in it, for tests that only look."""
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: fill_all(postgres_server.dsn(name)))
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.fixture
async def fresh(dsn: str) -> str:
    """A database with the shop in it, for one test."""
    await fill(dsn)
    return dsn


@pytest.fixture
async def staffed(fresh: str) -> str:
    """A database with the shop, plans, schedules, limits and all else that pages show, for one test."""
    await fleet.fill(fresh)
    return fresh
