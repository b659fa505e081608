"""The sums: over a run of faults, what was begun is delivered, a duplicate, failed, expired, cancelled or open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from chaos.balance import problems
from holdfast import NewEvent, Publisher
from holdfast.observability.prometheus import Collector
from holdfast.operator import Balance
from tests.observability.scraping import Scrape, command, scrape, scraped
from tests.worker.support import until

ROOT = Path(__file__).parents[2]

# --- the pages that Prometheus scrapes ---

ENDS = ("delivered", "duplicate", "failed", "expired", "cancelled")
OPEN = ("pending", "delayed", "in_flight")
HANDLERS = """
import asyncio
from holdfast import HandlerRegistry, Reject, RetryPolicy

registry, tried = HandlerRegistry(), set()

@registry.handler("order.placed", name="shop.note", retry=RetryPolicy(base_delay=0.05, max_delay=0.2))
async def note(event):
    n = event.payload["n"]
    await asyncio.sleep(0.001 * (n % 30))
    if n % 7 == 0 and event.event_id not in tried:
        tried.add(event.event_id)
        raise ConnectionError("away")
    return Reject("no") if n % 31 == 0 else None
"""
STRIKE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'holdfast %' AND application_name NOT LIKE '%metrics%'
ORDER BY random() LIMIT 1
"""


@asynccontextmanager
async def struck(dsn: str) -> AsyncIterator[list[bool]]:
    """The sessions of workers are ended, one after the other, while the block runs."""
    strikes: list[bool] = []

    async def strike() -> None:
        while True:
            strikes.extend(row[0] for row in await conn.fetch(STRIKE))
            await asyncio.sleep(0.1)

    conn = await asyncpg.connect(dsn)
    striking = asyncio.create_task(strike())
    try:
        yield strikes
        assert not striking.done(), striking
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await conn.close()


@pytest.mark.slow
async def test_the_pages_of_metrics_add_up_over_a_run_of_faults(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """Published = delivered + duplicates + failed + expired + open, and no query of the database for it (OBS-2)."""
    (tmp_path / "shop.py").write_text(HANDLERS)
    publisher, mine, number, rounds = Publisher("shop"), Collector(), 0, 0
    already = scrape(mine).of("holdfast_events_published_total")
    serving = ("worker", "shop:registry", "--processes", "2", "--lease", "5", "--metrics", "127.0.0.1:0")
    async with (
        command(dsn, tmp_path, *serving) as worker,
        command(dsn, tmp_path, "metrics", "--listen", "0") as outbox,
    ):
        ports = await worker.port(), await outbox.port()

        async def pages() -> tuple[Scrape, Scrape]:
            return await scraped(ports[0]), await scraped(ports[1])

        async def listening() -> bool:
            return (await scraped(ports[0])).of("holdfast_worker_listening") == 2

        await until(listening, what="two workers that listen")
        async with struck(dsn) as strikes, asyncio.timeout(60):
            while len(strikes) < 12:
                rounds += 1
                events = [NewEvent("order.placed", {"n": number + n}) for n in range(40)]
                events += [NewEvent("order.placed", {"n": 1}, idempotency_key=f"k-{number}") for _ in range(2)]
                events += [NewEvent("order.placed", {"n": 1}, expires_in=0.001)]
                events += [NewEvent("order.placed", {"n": 1}, delay=3600)]
                number += 40
                async with conn.transaction():
                    await publisher.publish_many(conn, events)
                await asyncio.sleep(0.1)
        published = scrape(mine).of("holdfast_events_published_total") - already
        assert published == rounds * 44

        async def even() -> bool:
            done, state = await pages()
            ended = sum(done.of("holdfast_deliveries_total", outcome=each) for each in ENDS)
            waiting = sum(state.of(f"holdfast_outbox_{each}") for each in OPEN)
            return ended + waiting == published and waiting == rounds

        await until(even, what="everything has ended but what is delayed, and the sums are even")
        done, _ = await pages()
        outcomes = done.by("outcome", "holdfast_deliveries_total")
        assert {"delivered", "duplicate", "failed", "expired", "retried"} <= set(outcomes), outcomes
        assert outcomes["duplicate"] >= rounds and done.of("holdfast_dlq_written_total") == outcomes["failed"]


# --- the counts in the database ---


@pytest.mark.nightly("mix of faults")
@pytest.mark.timeout(120)
def test_counts_add_up_over_a_run_of_faults() -> None:
    """From the counts alone, and against the rows; handlers end their process, fail, are retried and published
    twice (OBS-2).
    """
    command = [sys.executable, "-m", "chaos", "--scenario", "exit_poison", "--seed", "11", "--for", "6", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    found = json.loads(run.stdout.splitlines()[-1])
    counted = found["counted"]
    assert not [each for each in found["problems"] if "counted" in each or "counts" in each], found["problems"]
    assert counted["begun"] == sum(counted.values()) - counted["begun"]
    assert found["struck"] and counted["failed"] and counted["duplicate"] and counted["delivered"] > 500
    assert found["lost"] == found["effect_duplicates"] == 0


def test_a_delivery_that_is_counted_twice_or_not_at_all_is_a_problem() -> None:
    """OBS-2."""
    even = Balance(begun=10, delivered=6, duplicate=1, failed=1, expired=1, cancelled=0, open=1)
    assert problems(even, 10) == []
    assert len(problems(even, 11)) == 1
    assert "+1" in problems(Balance(10, 6, 1, 1, 1, 0, 0), 10)[0]
    assert "-1" in problems(Balance(10, 7, 1, 1, 1, 0, 1), 10)[0]
