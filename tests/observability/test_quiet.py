"""No alert fires while all is well (OBS-3): a real Prometheus with the rules that ship, and workers under a quiet load.

A usual run looks for some seconds, with rules that wait for nothing; `--nightly` for ten minutes, with the rules as
they are. The minutes are those of the load: what stops the machine in between makes the run longer.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import asyncpg
import pytest

from tests.observability.alerting import OUTBOX, RULES, WORKERS
from tests.observability.prometheus_server import ask, prometheus
from tests.observability.scraping import command, scraped
from tests.worker.support import drained, publish_many, until

pytestmark = [pytest.mark.nightly("alerts of a Prometheus server"), pytest.mark.timeout(1_800)]

PAUSE, EACH = 0.5, 10  # twenty events a second, each for two handlers

HANDLERS = """
import asyncio, random
from holdfast import HandlerRegistry, RetryPolicy

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge_card", retry=RetryPolicy(base_delay=0.2))
async def charge_card(event):
    await asyncio.sleep(random.uniform(0.001, 0.02))
    if random.random() < 0.02:
        raise ConnectionError("away for a moment")

@registry.handler("order.placed", name="stock.reserve")
async def reserve(event, tx):
    await tx.execute("SELECT 1")
"""


@pytest.mark.slow
async def test_nothing_fires(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """OBS-3."""
    seconds, rules = 600.0, RULES.read_text()
    if not request.config.option.nightly:
        seconds, rules = 12.0, re.sub(r"for: \w+", "for: 0s", rules)
    (tmp_path / "shop.py").write_text(HANDLERS)
    arguments = ("worker", "shop:registry", "--processes", "2", "--metrics", "127.0.0.1:0")
    async with (
        command(dsn, tmp_path, *arguments) as worker,
        command(dsn, tmp_path, "metrics", "--listen", "0") as outbox,
    ):
        ports = {WORKERS: await worker.port(), OUTBOX: await outbox.port()}

        async def ready() -> bool:
            found = await scraped(ports[WORKERS])
            return found.of("holdfast_worker_listening") == 2

        await until(ready, what="two workers that listen")
        async with prometheus(tmp_path, ports, rules) as address:

            def firing() -> set[str]:
                return {each["labels"]["alertname"] for each in ask(address, "alerts") if each["state"] == "firing"}

            def seen(job: str) -> bool:
                return bool(ask(address, "query", query=f'up{{job="{job}"}} == 1'))

            await until(lambda: all(map(seen, ports)), what="both are scraped")
            await until(lambda: not firing(), what="nothing fires that was not there at the start")
            rounds = round(seconds / PAUSE)
            for _ in range(rounds):
                await publish_many(conn, "order.placed", EACH)
                await asyncio.sleep(PAUSE)
                assert await asyncio.to_thread(firing) == set()
            await drained(conn)

            def delivered() -> bool:
                query = 'sum(holdfast_deliveries_total{outcome="delivered"})'
                return [float(each["value"][1]) for each in ask(address, "query", query=query)] == [2 * rounds * EACH]

            await until(delivered, what="Prometheus has counted every delivery")
