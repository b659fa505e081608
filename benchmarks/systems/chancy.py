"""Chancy 0.26: jobs name a function to import; their ends are written in batches of single updates, and kept."""

import argparse
import importlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
from chancy import Chancy, Job, Queue, Worker
from chancy.plugins.leadership import Leadership
from chancy.plugins.pruner import Pruner
from chancy.plugins.recovery import Recovery
from psycopg.rows import dict_row

from benchmarks.systems.harness import (
    BUSINESS,
    Tally,
    delivered,
    drained,
    fill,
    observe,
    published,
    published_many,
    quiet,
)
from benchmarks.systems.process import main, on_uvloop
from benchmarks.workload import PAYLOAD

# The executor on the event loop starts no thread or process per job. From 500 to 2,000 jobs at once, and from 10 to
# 50 ms between writes of what ended, rates cannot be told apart. Of the default plugins those that recover and prune
# jobs are on; those for metrics and workflows look at every job, and with all five it took twice as long.
CONCURRENCY = 1_000
FLUSH_SECONDS = 0.01
MODULE = "benchmarks.systems.chancy"
QUEUE = Queue(
    "bench",
    concurrency=CONCURRENCY,
    executor=Chancy.Executor.Async,
    eager_polling=True,
    polling_interval=1,
)
STORED = "SELECT count(*) FROM chancy_jobs"
LEFT = "SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')"


# What the handler does. Chancy imports the handler by its name, so this process has the module twice: as the
# program that it runs, and as the one that it imports.
reactions: list[Callable[[dict[str, Any]], None]] = []


async def handle(**payload: Any) -> None:
    reactions[0](payload)


def react(to: Callable[[dict[str, Any]], None]) -> None:
    importlib.import_module(MODULE).reactions.append(to)


def job(payload: dict[str, Any]) -> Job:
    return Job(func=f"{MODULE}.handle", queue=QUEUE.name, kwargs=payload)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[Chancy, asyncpg.Connection]]:
    plugins = [Leadership(), Pruner(), Recovery()]
    async with Chancy(dsn, plugins=plugins, no_default_plugins=True, min_connection_pool_size=4) as app:
        await app.migrate()
        await app.declare(QUEUE)
        yield app, await observe(dsn)


def bulk(app: Chancy) -> Any:
    async def publish(count: int) -> None:
        async for _ in app.push_many([job(PAYLOAD) for _ in range(count)]):
            pass

    return publish


@asynccontextmanager
async def worker(app: Chancy) -> AsyncIterator[None]:
    running = Worker(app, register_signal_handlers=False)
    running.send_outgoing_interval = FLUSH_SECONDS
    async with running:
        yield


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (app, observer):
        await fill(options.count, bulk(app))
        tally = Tally(options.count)
        react(lambda _: tally.seen())
        return await drained(options, observer, lambda: worker(app), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error and kept, which is the default."""
    async with opened(options.dsn) as (app, observer):
        await fill(options.count, bulk(app))
        tally = Tally(options.count)

        def fail(_: dict[str, Any]) -> None:
            tally.seen()
            raise ValueError("no")

        react(fail)
        return await drained(options, observer, lambda: worker(app), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (app, observer):
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]

        async def commit(connection: psycopg.AsyncConnection) -> None:
            async with connection.cursor(row_factory=dict_row) as cursor:
                await cursor.execute(BUSINESS)
                await app.push_ex(cursor, job(PAYLOAD))
            await connection.commit()

        return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (app, observer):
        return await published_many(options, observer, bulk(app), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (app, observer):
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]
        handled: dict[int, float] = {}
        react(lambda payload: handled.setdefault(payload["n"], time.perf_counter()) and None)

        async def commit(connection: psycopg.AsyncConnection, number: int) -> float:
            async with connection.cursor(row_factory=dict_row) as cursor:
                await cursor.execute(BUSINESS)
                await app.push_ex(cursor, job({"n": number}))
            at = time.perf_counter()
            await connection.commit()
            return at

        return await delivered(options, observer, connections, commit, lambda: worker(app), handled)


VERBS = {"drain": drain, "failures": failures, "publish": publish, "publish_many": publish_many, "latency": latency}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
