"""A worker process for the tests: says in JSON lines what it is told to observe, and stops on signals."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict

from holdfast import Worker, WorkerSettings
from holdfast.telemetry import Fact, Notice
from tests.worker.apps import registries


def tell(fact: Fact) -> None:
    if isinstance(fact, Notice):
        line = {"told": fact.name, "level": fact.level, **fact.details}
    else:
        line = {"told": type(fact).__name__, **asdict(fact)}
    registries.say(**line)


async def main(dsn: str, order: dict[str, object]) -> None:
    registry = getattr(registries, str(order["registry"]))(dsn)
    settings = dict(order["settings"])  # type: ignore[call-overload]
    if "channels" in settings:
        settings["channels"] = tuple(settings["channels"])
    await Worker(dsn, registry, WorkerSettings(**settings), observers=(tell,)).run(signals=True)


if __name__ == "__main__":
    asyncio.run(main(os.environ["HOLDFAST_TEST_DSN"], json.loads(sys.argv[1])))
