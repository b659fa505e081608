"""The same transactions with a plain INSERT into the same table, without the bell."""

import argparse
import json
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems import together
from benchmarks.systems.harness import BUSINESS
from benchmarks.systems.process import database_of
from benchmarks.systems.raw.statements import INSERT, INSERT_MANY
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, PAYLOAD
from holdfast.ids import uuid7

NO_BELL = "ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell"


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    return await together.publish("raw", options, lambda observer: observer.execute(NO_BELL))


async def produce(options: argparse.Namespace) -> dict[str, Any]:
    async def commit(connection: asyncpg.Connection) -> None:
        async with connection.transaction():
            if not options.bare:
                await connection.execute(BUSINESS)
            if options.kind == "without":
                return
            identity = uuid7()
            await connection.execute(INSERT, identity, json.dumps(PAYLOAD), str(identity))

    return await together.produce(options, commit)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    """The same rows by one INSERT ... SELECT FROM unnest (`--kind copy`: by COPY), bell on."""
    observer = await prepare(options.dsn, due=0)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    for start in range(0, options.count, 5_000):
        ids = [uuid7() for _ in range(min(5_000, options.count - start))]
        bodies = [json.dumps(PAYLOAD) for _ in ids]
        async with observer.transaction():
            if options.kind == "copy":
                records = [
                    (identity, EVENT_TYPE, "shop", body, str(identity), "outbox_default", 0)
                    for identity, body in zip(ids, bodies, strict=True)
                ]
                columns = ["id", "event_type", "source", "payload", "idempotency_key", "channel", "generation"]
                await observer.copy_records_to_table("outbox", schema_name="core", records=records, columns=columns)
            else:
                await observer.execute(INSERT_MANY, ids, bodies, [str(each) for each in ids])
    result = await difference(observer, before, await snapshot(observer, database), options.count)
    await observer.close()
    return result
