"""Programs from their start to their first event, and while nothing happens."""

import argparse
from typing import Any

from benchmarks.systems.idling import idled
from benchmarks.systems.starting import started
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, PAYLOAD
from holdfast import NewEvent, Publisher

LEFT = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"
COMMAND = ("-m", "holdfast", "worker", "benchmarks.programs.holdfast:registry")


async def start(options: argparse.Namespace) -> dict[str, Any]:
    """A program with a `Worker`; with `--kind command`, `holdfast worker`."""
    observer = await prepare(options.dsn, due=0)
    publisher = Publisher("shop")

    async def publish(count: int) -> None:
        async with observer.transaction():
            await publisher.publish_many(observer, [NewEvent(EVENT_TYPE, PAYLOAD)] * count)

    command = COMMAND if options.kind == "command" else ()
    return await started(options.dsn, options.count, observer, publish, LEFT, "holdfast", command)


async def idle(options: argparse.Namespace) -> dict[str, Any]:
    return await idled(options, await prepare(options.dsn, due=0), "holdfast")
