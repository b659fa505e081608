"""What happens, whoever delivers it: an order is written and an event published beside it; a handler writes one effect.

It runs in the peers' environments: the standard library and asyncpg are all there is.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import asyncpg

DSN = os.environ.get("CHAOS_DSN", "")
NOTES = Path(os.environ.get("CHAOS_NOTES", "."))
CONCURRENCY = 10  # handlers at once, in each worker
ATTEMPTS = 10
POISON_ATTEMPTS = 3
HOSTILE = "a null \x00 in a text"
TABLES = """
    CREATE TABLE business (key text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
    CREATE TABLE effects (key text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
    CREATE INDEX ON effects (key);
"""
EFFECT = "INSERT INTO effects (key) VALUES ($1)"
_PATIENCE = 5.0

Payload = dict[str, Any]


# --- handlers ---------------------------------------------------------------------------------------------


def note(what: str, key: str) -> None:
    """A line in a file of this process, at once: a SIGKILL leaves it there. Times are the machine's monotonic clock."""
    file = os.open(NOTES / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(file, f"{what} {key} {time.monotonic():.4f}\n".encode())
    os.close(file)


async def die(key: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def handle(
    payload: Payload, effect: Callable[[str], Awaitable[None]], die: Callable[[str], Awaitable[None]] = die
) -> None:
    """`die` is called once for an event of that kind, when its effect is written and it is not acknowledged yet."""
    key = payload["key"]
    note("begin", key)
    if payload["kind"] == "exit":
        os._exit(137)
    await asyncio.sleep(payload["seconds"])
    await effect(key)
    if payload["kind"] == "die" and _first_time(key):
        await die(key)
    if "text" in payload:
        note("whole" if payload["text"] == HOSTILE else "broken", key)
    note("end", key)


def _first_time(key: str) -> bool:
    try:
        os.close(os.open(NOTES / f"died-{key}", os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True


class Effects:
    """For libraries that offer a handler no transaction of theirs: each effect commits by itself."""

    def __init__(self) -> None:
        self._pool: asyncpg.Pool | None = None
        self._opening = asyncio.Lock()

    async def write(self, key: str) -> None:
        async with self._opening:
            self._pool = self._pool or await asyncpg.create_pool(
                DSN, min_size=0, max_size=CONCURRENCY, server_settings={"application_name": "effects"}
            )
        await self._pool.execute(EFFECT, key)


# --- producers --------------------------------------------------------------------------------------------


class Transaction(Protocol):
    """The caller's own, on a connection of the driver that the library publishes with."""

    async def business(self, key: str) -> None: ...

    async def publish(self, payload: Payload) -> None: ...


class Producer(Protocol):
    """How a library's users connect, and what they publish in."""

    async def connect(self) -> Any:
        """A connection with `close()`."""

    def transaction(self, connection: Any) -> AbstractAsyncContextManager[Transaction]:
        """Commits when it is left, rolls back when it is left by an error."""


class Client:
    """Keeps one connection, and opens another one when that is broken."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._connection: Any = None

    async def run(self) -> None:
        """One command per line, one answer per line. An order is there if and only if its transaction committed."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if "hostile" in command:
                answer = await self._hostile(command["hostile"] | {"text": HOSTILE})
            else:
                answer = await self._orders(command["publish"])
            print(json.dumps(answer), flush=True)

    async def _orders(self, payloads: Sequence[Payload]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_PATIENCE), self._transaction() as transaction:
                for payload in payloads:
                    await transaction.business(payload["key"])
                    await transaction.publish(payload)
        except Exception as error:
            return {"error": described(error)}
        return {"error": None}

    async def _hostile(self, payload: Payload) -> dict[str, Any]:
        """Publish what cannot be stored as JSON in Postgres, and go on with the transaction."""
        error, usable = None, False
        with contextlib.suppress(Exception):
            async with self._transaction() as transaction:
                await transaction.business(payload["key"])
                try:
                    await transaction.publish(payload)
                except Exception as refusal:
                    error = described(refusal)
                await transaction.business("hello afterwards")
                usable = True
        return {"error": error, "usable": usable}

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Transaction]:
        try:
            self._connection = self._connection or await self._producer.connect()
            async with self._producer.transaction(self._connection) as transaction:
                yield transaction
        except BaseException:
            broken, self._connection = self._connection, None
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1):
                    await broken.close()
            raise


def described(error: BaseException) -> str:
    """The class, and that of the error behind it."""
    names = [type(error).__name__]
    while (cause := error.__cause__) is not None and len(names) < 3:
        names.append(type(cause).__name__)
        error = cause
    return " from ".join(names)


# --- the shell --------------------------------------------------------------------------------------------


async def create_tables() -> None:
    connection = await asyncpg.connect(DSN)
    await connection.execute(TABLES)
    await connection.close()


def main(
    install: Callable[[], Awaitable[None]],
    producer: Producer,
    work: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """`work` is only for a library that brings no command for its worker."""

    async def prepare() -> None:
        await create_tables()
        await install()

    verbs = {"install": prepare, "produce": Client(producer).run} | ({"work": work} if work else {})
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=sorted(verbs))
    asyncio.run(verbs[parser.parse_args().verb]())
