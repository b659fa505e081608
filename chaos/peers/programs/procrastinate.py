"""procrastinate: run by its own command, with the task that its documentation gives for jobs of dead workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from procrastinate import App, PsycopgConnector, RetryStrategy

from chaos.peers import story
from chaos.peers.story import ATTEMPTS, CONCURRENCY, DSN, POISON_ATTEMPTS, Effects, Payload

app = App(connector=PsycopgConnector(conninfo=DSN, min_size=1, max_size=CONCURRENCY + 1))
effects = Effects()


@app.task(name="order", retry=RetryStrategy(max_attempts=ATTEMPTS, wait=1))
async def order(**payload: Any) -> None:
    await story.handle(payload, effects.write)


@app.task(name="poison", retry=RetryStrategy(max_attempts=POISON_ATTEMPTS, wait=1))
async def poison(**payload: Any) -> None:
    await story.handle(payload, effects.write)


# As "Retry stalled jobs" has it, and sixty times as often. The sixth field counts seconds.
@app.periodic(cron="* * * * * */10")
@app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
async def retry_stalled_jobs(context: Any, timestamp: int) -> None:
    for job in await app.job_manager.get_stalled_jobs():
        await app.job_manager.retry_job(job)


class Transaction:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def business(self, key: str) -> None:
        await self._connection.execute("INSERT INTO business (key) VALUES (%s)", [key])

    async def publish(self, payload: Payload) -> None:
        task = poison if payload["kind"] == "exit" else order
        await task.configure(connection=self._connection).defer_async(**payload)


class Producer:
    async def connect(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(DSN)

    @asynccontextmanager
    async def transaction(self, connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[Transaction]:
        async with connection.transaction():
            yield Transaction(connection)


async def install() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


if __name__ == "__main__":
    story.main(install, Producer())
