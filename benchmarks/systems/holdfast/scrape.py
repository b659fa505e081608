"""What `holdfast metrics` does when it is scraped, and `holdfast status` when it is called."""

import argparse
from typing import Any

from benchmarks.systems.harness import looked
from benchmarks.systems.tables import prepare_once
from holdfast.handler_tally import BUCKETS
from holdfast.observability import prometheus
from holdfast.operator import Operator
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.operations.metrics import snapshot


async def scrape(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare_once(options.dsn, due=options.open)
    # Without a limit: a machine that stands still for a while must not end a run of minutes.
    connection = await connect(Address(options.dsn), "metrics", statement_timeout=0)

    async def scraped() -> str:
        found = await snapshot(connection)
        return prometheus.exposition(lambda: prometheus.outbox_metrics(found))[0]

    result = await looked(options.count, scraped)
    await connection.close()
    await observer.close()
    return result


# Two hours of minutes, of which the status reads one, of handlers that are always busy, and two weeks of hours.
ROLLUP = """
INSERT INTO core.rollup (
    period_start, hourly, handler_name, generation, begun, delivered, handler_buckets, outbox_buckets)
SELECT now() - n * CASE WHEN hourly THEN interval '1 hour' ELSE interval '1 minute' END, hourly,
       'bench.handle_' || h, 0, 60, 60, array_fill(3, ARRAY[$2::int]), array_fill(3, ARRAY[$2::int])
FROM generate_series(1, $1::int) h
CROSS JOIN (SELECT false AS hourly, n FROM generate_series(0, 119) n
            UNION ALL SELECT true, n FROM generate_series(24, 335) n) periods
"""


async def status(options: argparse.Namespace) -> dict[str, Any]:
    """The status and what handlers did in the last minute, five minutes and hour."""
    observer = await prepare_once(options.dsn, due=options.open)
    await observer.execute(ROLLUP, options.handlers, BUCKETS)
    await observer.execute("VACUUM ANALYZE core.rollup")
    async with Operator(options.dsn, actor="bench") as operator:

        async def looked_at() -> object:
            return await operator.status(), [await operator.rates(minutes) for minutes in (1, 5, 60)]

        result = await looked(options.count, looked_at)
        signals = await looked(3, operator.signals)
    await observer.execute("TRUNCATE core.rollup")  # the database is others' too
    await observer.close()
    return result | {"signals_ms": signals["ms"]}
