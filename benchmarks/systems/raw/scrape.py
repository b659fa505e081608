"""The shortest query that answers what is pending, in flight and failed."""

import argparse
from typing import Any

from benchmarks.systems.harness import looked
from benchmarks.systems.raw.statements import STATE
from benchmarks.systems.tables import prepare_once


async def scrape(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare_once(options.dsn, due=options.open)
    await observer.execute("SET enable_seqscan = off")
    result = await looked(options.count, lambda: observer.fetchrow(STATE))
    await observer.close()
    return result
