"""What the tests of the contract share: the shop served by a real uvicorn, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import httpx
import pytest
import uvicorn

from tests.http.shop import ISOLATION, Shop
from tests.worker.support import until

ROOT = Path(__file__).parents[2]
ALICE = {"Authorization": "Bearer alice"}
ORDER = {"sku": "tea"}


class Client(httpx.AsyncClient):
    """Sends what the tests send over and over."""

    async def order(
        self,
        key: str | None = "k-1",
        order: dict[str, Any] | None = None,
        path: str = "/orders",
        who: str | None = "alice",
        **options: Any,
    ) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers["Idempotency-Key"] = key
        if who is not None:
            headers["Authorization"] = f"Bearer {who}"
        if "content" not in options:
            options["json"] = {**ORDER, **(order or {})}
        return await self.request(options.pop("method", "POST"), path, headers=headers, **options)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[Client]:
    """The application on a free port, shut down in order at the end."""
    listening = listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started or serving.done(), what="uvicorn started")
        assert server.started, "uvicorn did not start"
        async with client(listening.getsockname()[1]) as http:
            yield http
    finally:
        server.should_exit = True
        await serving
        listening.close()


@asynccontextmanager
async def opened(dsn: str, *arguments: Any, **settings: Any) -> AsyncIterator[tuple[Shop, Client]]:
    """A shop that is open."""
    shop = Shop(dsn, *arguments, **settings)
    async with served(shop.app) as http:
        yield shop, http


def listen() -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    return listening


def client(port: int) -> Client:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return Client(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits)


# Clients of servers that are shared: of a driver, an isolation level and settings.
Open = Callable[..., Client]
Test = TypeVar("Test", bound=Callable[..., Any])


class Zygote:
    """Servers in processes of their own, which share a port: see zygote.py."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.http.zygote"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        with self._process:  # closes its input, which is the end of it
            self._process.terminate()

    def _start(self, **wanted: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        line = ""
        while not line.startswith('{"ready"'):  # what servers log goes the same way
            line = self._process.stdout.readline()
            assert line, "the zygote is gone"
        pid: int = json.loads(line)["ready"]
        return pid

    @asynccontextmanager
    async def serving(self, count: int = 1, **wanted: Any) -> AsyncIterator[list[int]]:
        """So many servers, until the end of the block; those that are still there end in order."""
        pids = [await asyncio.to_thread(self._start, **wanted) for _ in range(count)]
        try:
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            for pid in pids:
                await until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), what=f"the end of {pid}")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that stays ours while servers come and go."""
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserving.bind(("127.0.0.1", 0))
        yield reserving.getsockname()[1]


async def names(conn: asyncpg.Connection, table: str) -> list[str]:
    rows = await conn.fetch(f"SELECT name FROM {table} ORDER BY id")
    return [row["name"] for row in rows]


async def effects(conn: asyncpg.Connection) -> list[str]:
    """What was committed, with an event for each."""
    found = await names(conn, "effects")
    events = await conn.fetchval("SELECT count(*) FROM core.outbox")
    assert events == len([name for name in found if name != "image"]), "an effect without its event, or the reverse"
    return found


async def runs(conn: asyncpg.Connection) -> list[str]:
    return await names(conn, "runs")


async def records(conn: asyncpg.Connection) -> Sequence[asyncpg.Record]:
    return await conn.fetch("SELECT * FROM core.idempotency_records ORDER BY created_at")


async def expire(conn: asyncpg.Connection, but: timedelta = timedelta()) -> None:
    """All keys, by the database's clock."""
    await conn.execute("UPDATE core.idempotency_records SET expires_at = now() + $1", but)


def problem(response: httpx.Response, status: int, name: str) -> dict[str, Any]:
    """The answer is that problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert found["type"] == f"/problems/{name}"
    assert found["status"] == status
    assert response.headers["link"] == f'</problems/{name}>; rel="describedby"'
    return found


def with_every(drivers: Sequence[str], levels: Sequence[str] = ISOLATION) -> Callable[[Test], Test]:
    """Run a test with each driver at each level of isolation. Two processes serve each pair."""

    def marked(test: Test) -> Test:
        for name, values in (("isolation", levels), ("driver", drivers)):
            test = pytest.mark.parametrize(name, values, ids=lambda value: value.replace(" ", "-"))(test)
        return pytest.mark.matrix("driver", "isolation")(test)

    return marked
