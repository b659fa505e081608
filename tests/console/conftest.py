"""Consoles on a database, asked in this process, and the shop that has something on every page."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking, Embedded
from holdfast.console import Console, ConsoleSettings, create_console
from tests.console import fleet, shop
from tests.servers import SessionServer, database_of_one_test, run_coroutine

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


async def awake(dsn: str) -> None:
    """Have the workers of a copy heard of now, and its schedules served: a copy is as old as its original."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute("UPDATE core.workers SET heartbeat_at = now()")
        await conn.execute("UPDATE core.schedules SET attended_at = now(), owed_after = now()")
    finally:
        await conn.close()


@pytest.fixture(scope="session")
def shop_original(postgres_server: SessionServer) -> Iterator[str]:
    """The name of a database with the shop in it, of which each test gets a copy: filling one takes seconds."""
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: fill(postgres_server.dsn(name)))
    yield name
    postgres_server.drop(name)


@pytest.fixture(scope="session")
def staffed_original(postgres_server: SessionServer, shop_original: str) -> Iterator[str]:
    """The same, with plans, schedules, limits and all else that pages show."""
    name = postgres_server.copy(shop_original)
    run_coroutine(lambda: fleet.fill(postgres_server.dsn(name)))
    yield name
    postgres_server.drop(name)


@pytest.fixture(scope="session")
def filled(postgres_server: SessionServer, staffed_original: str) -> Iterator[str]:
    """A database with the shop in it, for tests that only look."""
    name = postgres_server.copy(staffed_original)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.fixture
def fresh(request: pytest.FixtureRequest, postgres_server: SessionServer, shop_original: str) -> Iterator[str]:
    """A database with the shop in it, for one test."""
    for dsn in database_of_one_test(request, postgres_server, shop_original):
        run_coroutine(partial(awake, dsn))
        yield dsn


@pytest.fixture
def staffed(request: pytest.FixtureRequest, postgres_server: SessionServer, staffed_original: str) -> Iterator[str]:
    """A database with the shop, plans, schedules, limits and all else that pages show, for one test."""
    for dsn in database_of_one_test(request, postgres_server, staffed_original):
        run_coroutine(partial(awake, dsn))
        yield dsn
