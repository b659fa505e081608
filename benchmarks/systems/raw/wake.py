"""From commit to handler with a NOTIFY in every producer's transaction, and one loop that it wakes."""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from benchmarks.systems.harness import BUSINESS, ORDERS, delivered
from benchmarks.systems.raw.deliver import START, connect
from benchmarks.systems.raw.publish import NO_BELL
from benchmarks.systems.raw.statements import BATCH, CLAIM, INSERT, SETTLE
from benchmarks.systems.tables import prepare
from holdfast.ids import uuid7


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS)
    await observer.execute(NO_BELL)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    handled: dict[int, float] = {}

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        identity = uuid7()
        await connection.execute(INSERT, identity, json.dumps({"n": number}), str(identity))
        await connection.execute("SELECT pg_notify('raw', '')")
        at = time.perf_counter()
        await transaction.commit()
        return at

    @asynccontextmanager
    async def worker() -> AsyncIterator[None]:
        listening, claiming = await asyncpg.connect(options.dsn), await connect(options.dsn)
        woken = asyncio.Event()
        await listening.add_listener("raw", lambda *_: woken.set())
        claim, settle = await claiming.prepare(CLAIM), await claiming.prepare(SETTLE)

        async def loop() -> None:
            identity = uuid.uuid4()
            while True:
                woken.clear()
                token = uuid.uuid4()
                rows = await claim.fetch(BATCH, identity, token, *START)
                if not rows:
                    await woken.wait()
                    continue
                for row in rows:
                    handled[json.loads(row["payload"])["n"]] = time.perf_counter()
                await settle.fetch([row["id"] for row in rows], token)

        running = asyncio.create_task(loop())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await listening.close()
        await claiming.close()

    return await delivered(options, observer, connections, commit, worker, handled)
