"""What `holdfast metrics` does when it is scraped."""

import argparse
from typing import Any

from benchmarks.systems.harness import looked
from benchmarks.systems.tables import prepare
from holdfast.observability import prometheus
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.operations.metrics import snapshot


async def scrape(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.open, kept=options.kept)
    connection = await connect(Address(options.dsn), "metrics", statement_timeout=8)

    async def scraped() -> str:
        return prometheus.render(await snapshot(connection))

    result = await looked(options.count, scraped)
    await connection.close()
    await observer.close()
    return result
