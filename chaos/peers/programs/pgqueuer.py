"""pgqueuer: run by the function behind its command, with retries in the database, and failed jobs held."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
from pgqueuer import AsyncpgDriver, DatabaseRetryEntrypointExecutor, Job, PgQueuer, Queries, run

from chaos.peers import story
from chaos.peers.story import ATTEMPTS, CONCURRENCY, DSN, POISON_ATTEMPTS, Effects, Payload

effects = Effects()


async def order(job: Job) -> None:
    await story.handle(json.loads(job.payload or b""), effects.write)


@asynccontextmanager
async def worker() -> AsyncIterator[PgQueuer]:
    """On one connection, which the documentation prefers to a pool for the side that listens."""
    connection = await asyncpg.connect(DSN)
    try:
        queuer = PgQueuer.from_asyncpg_connection(connection)
        for name, attempts in (("order", ATTEMPTS), ("poison", POISON_ATTEMPTS)):
            retry = partial(DatabaseRetryEntrypointExecutor, max_attempts=attempts)
            queuer.entrypoint(name, on_failure="hold", executor_factory=retry)(order)
        yield queuer
    finally:
        await connection.close()


class Transaction:
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))

    async def business(self, key: str) -> None:
        await self._connection.execute("INSERT INTO business (key) VALUES ($1)", key)

    async def publish(self, payload: Payload) -> None:
        name = "poison" if payload["kind"] == "exit" else "order"
        await self._queries.enqueue(name, json.dumps(payload).encode())


class Producer:
    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(DSN)

    @asynccontextmanager
    async def transaction(self, connection: asyncpg.Connection) -> AsyncIterator[Transaction]:
        async with connection.transaction():
            yield Transaction(connection)


async def install() -> None:
    connection = await asyncpg.connect(DSN)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def work() -> None:
    """What `pgq run --shutdown-on-listener-failure` does: the command itself does not start with the pinned typer."""
    # It wants room for two batches.
    limits = {"max_concurrent_tasks": CONCURRENCY, "batch_size": CONCURRENCY // 2}
    await run(worker, shutdown_on_listener_failure=True, **limits)


if __name__ == "__main__":
    story.main(install, Producer(), work)
