"""The alert rules that ship (OBS-3): every alert fires when its fault is caused, and none while all is well.

The faults are real, and so are the scrapes; promtool evaluates the rules on them, with time passing as the rules want
it. Where a limit cannot be reached in a test, millions of rows or half an hour, the limit is made smaller.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import HandlerRegistry, RetryPolicy, Snooze, Worker, WorkerSettings
from holdfast.embedded import EmbeddedPostgres
from tests.docs.support import ROOT
from tests.observability.alerting import OUTBOX, RULES, WORKERS, Step, Watch, firing, scraped_outbox
from tests.observability.scraping import command, get, scraped
from tests.outbox import Outbox, connect
from tests.servers import SessionServer, apply_schema
from tests.worker.support import drained, publish, publish_many, until

ALERTS = {text.partition("\n")[0]: text for text in RULES.read_text().split("- alert: ")[1:]}

DELIVERED = """
INSERT INTO core.outbox (event_type, source, payload, status, settled_at, delivered_at, handler_name)
SELECT 'order.placed', 'shop', '{}', 'delivered', now(), now(), 'a.b' FROM generate_series(1, $1)
"""


class Refused(Exception):
    pass


@asynccontextmanager
async def watched(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry | None = None, observers: Any = (), **settings: Any
) -> AsyncIterator[Watch]:
    """A worker, and quiet before the fault."""
    worker = Worker(dsn, registry or shop(), WorkerSettings(**settings), observers=observers)
    async with worker:
        if settings.get("listen_dsn") is None:
            await until(lambda: worker.listening, what="a worker that listens")
        watch = Watch(conn, worker)
        await watch.take()
        yield watch


def shop() -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: Any) -> None: ...

    @registry.handler("order.bad", name="shop.fail", retry=RetryPolicy(terminal_errors=(Refused,)))
    async def fail(event: Any) -> None:
        raise Refused("no")

    return registry


# --- the files ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [["check", "rules", "alerts.yml"], ["test", "rules", "tests.yml"], ["check", "config", "prometheus.yml"]]
)
def test_promtool_accepts_the_rules(check: list[str]) -> None:
    """Their syntax, and their own tests (OBS-3)."""
    run = subprocess.run(["promtool", *check], cwd=RULES.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_is_tested_with_promtool_and_by_its_fault() -> None:
    """In the rules' own tests, and below (OBS-3)."""
    tests = (RULES.parent / "tests.yml").read_text()
    assert re.findall(r"^  - name: (\w+)$", tests, re.MULTILINE) == list(ALERTS)
    faults = Path(__file__).read_text()
    assert [name for name in ALERTS if f'"{name}"' not in faults] == []


def test_every_alert_leads_to_a_section_of_the_runbook() -> None:
    """That says what it means; and has a severity and a summary (OBS-3)."""
    page = ROOT / "docs" / "runbooks" / "alerts.md"
    sections = [line.removeprefix("### ") for line in page.read_text().splitlines() if line.startswith("### ")]
    assert len(ALERTS) > 20 and sections == list(ALERTS)
    for name, rule in ALERTS.items():
        assert f"runbook_url: docs/runbooks/alerts.md#{name.lower()}\n" in rule
        assert re.search(r"severity: (critical|warning|info)}", rule) and "summary: " in rule


# --- nothing fires while all is well ---


async def test_nothing_fires_under_a_quiet_load(dsn: str, conn: asyncpg.Connection) -> None:
    """With events, handlers and a retry now and then. test_quiet.py does it with a Prometheus (OBS-3)."""
    registry, tried = HandlerRegistry(), set()

    @registry.handler("order.*", name="shop.note", retry=RetryPolicy(base_delay=0.01))
    async def note(event: Any) -> Snooze | None:
        if event.payload["n"] % 20 == 0 and event.event_id not in tried:
            tried.add(event.event_id)
            raise ConnectionError("away")
        return None

    async with watched(dsn, conn, registry) as watch:
        for _ in range(6):
            await publish_many(conn, "order.placed", 40)
            await drained(conn)
            await watch.take(minutes=10)
        assert await watch.firing() == set()
        assert watch.steps[-1].jobs[WORKERS].of("holdfast_deliveries_total", outcome="retried") == 12  # type: ignore[union-attr]


# --- every alert fires when its fault is caused ---


async def test_no_database(dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    """The endpoint says 503, as it does while its database is away (OBS-3)."""
    async with command(empty_dsn, tmp_path, "metrics", "--listen", "0") as outbox:
        assert (await get(await outbox.port()))[0] == 503
    assert firing(Step({OUTBOX: None}, minutes=8)) == {"HoldfastMetricsMissing", "HoldfastTargetDown"}


async def test_no_worker(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        pass
    watch.worker = None
    await watch.take()
    assert await watch.firing() == {"HoldfastNoWorkers"}


async def test_a_worker_that_was_killed(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        beat = "SELECT core.worker_beat(gen_random_uuid(), 'dead', 'host', 1, '1.0', 0, '{outbox_default}', '{a.b}')"
        await conn.execute(beat)
        await conn.execute("UPDATE core.workers SET heartbeat_at = now() - interval '61 s' WHERE name = 'dead'")
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastWorkerSilent"}


@pytest.mark.slow
async def test_worker_processes_that_die(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n"
        "@registry.handler('order.placed', name='shop.note')\nasync def note(event): ...\n"
    )
    arguments = ("worker", "shop:registry", "--metrics", "127.0.0.1:0", "--processes", "3")
    async with command(dsn, tmp_path, *arguments) as worker:
        port = await worker.port()

        async def counted(processes: int, deaths: int) -> bool:
            found = await scraped(port)
            return all(
                found.of(f"holdfast_worker_{name}") == count
                for name, count in (("processes", processes), ("listening", processes), ("deaths_total", deaths))
            )

        await until(lambda: counted(3, 0), what="three processes")
        steps = [Step({OUTBOX: await scraped_outbox(conn), WORKERS: await scraped(port)})]
        for pid in worker.children()[:2]:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: counted(3, 2), what="two deaths, and all there again")
        await conn.execute(
            "DELETE FROM core.workers WHERE stopped_at IS NULL AND heartbeat_at < now() - interval '1 s'"
        )
        steps.append(Step({OUTBOX: await scraped_outbox(conn), WORKERS: await scraped(port)}))
    assert firing(*steps) == {"HoldfastWorkerDies"}


async def test_events_that_wait(dsn: str, conn: asyncpg.Connection) -> None:
    """Their workers are there, and have no room for them."""
    registry, entered, go = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="shop.slow")
    async def slow(event: Any) -> None:
        entered.set()
        await go.wait()

    async with watched(dsn, conn, registry, concurrency=1, batch=1) as watch:
        await publish_many(conn, "order.placed", 5)
        await entered.wait()
        await conn.execute("UPDATE core.outbox SET available_at = now() - interval '2 min' WHERE status = 'pending'")
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastEventsLate"}
        go.set()
        await drained(conn)


async def test_a_channel_without_a_worker(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await publish(conn, "order.placed", channel="hot")
        await watch.take(minutes=15)
        assert await watch.firing() == {"HoldfastChannelUnserved", "HoldfastHandlerUnserved"}


async def test_a_handler_that_is_not_deployed(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await Outbox(conn).subscribe("mail.send", "order.paid")
        await publish(conn, "order.paid")
        await watch.take(minutes=15)
        assert await watch.firing() == {"HoldfastHandlerUnserved"}


async def test_an_event_that_nobody_wants(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await publish(conn, "order.lost")
        await watch.take(minutes=15)
        assert await watch.firing() == {"HoldfastEventsUnrouted"}


@pytest.mark.abandons_leases("nobody takes them: that is the fault")
async def test_leases_that_nobody_takes(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker lives, on another channel."""
    outbox = Outbox(await connect(dsn))
    async with watched(dsn, conn, channels=("other",)) as watch:
        await outbox.subscribe("billing.charge_card", "order.placed")
        held = await outbox.held()
        await outbox.expire_lease(held.id)
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastLeasesExpired", "HoldfastChannelUnserved"}
    await outbox.connection.close()


async def test_leases_that_are_lost(dsn: str, conn: asyncpg.Connection) -> None:
    registry, go, entered = HandlerRegistry(), asyncio.Event(), []

    @registry.handler("order.placed", name="shop.slow")
    async def slow(event: Any) -> None:
        entered.append(event)
        await go.wait()

    async with watched(dsn, conn, registry, concurrency=20) as watch:
        await publish_many(conn, "order.placed", 15)
        await until(lambda: len(entered) == 15)
        await conn.execute("UPDATE core.outbox SET lease_token = gen_random_uuid() WHERE status = 'in_flight'")
        go.set()
        await until(lambda: watch.worker is not None and watch.worker.counters.lost_leases == 15)
        await conn.execute("DELETE FROM core.outbox")
        await watch.take()
        assert await watch.firing() == {"HoldfastLeasesLost"}


async def test_a_schedule_that_is_not_fired(dsn: str, conn: asyncpg.Connection) -> None:
    registry = shop()
    registry.schedule("order.placed", name="shop.nightly", every=timedelta(hours=1))
    async with watched(dsn, conn, registry):
        pass
    async with watched(dsn, conn) as watch:
        await conn.execute(
            "UPDATE core.schedules SET owed_after = now() - interval '2 h', last_slot = NULL,"
            " next_slot = now() - interval '10 min', attended_at = now() - interval '10 min'"
        )
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastScheduleOverdue"}


async def test_dead_letters(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await publish_many(conn, "order.placed", 20)
        await publish(conn, "order.bad")
        await drained(conn)
        await watch.take()
        assert await watch.firing() == {"HoldfastDeadLetters"}


async def test_dead_letters_that_cannot_be_written(dsn: str, conn: asyncpg.Connection) -> None:
    """The archive is not as it was: nothing can be moved there, and the rows come back."""
    async with watched(dsn, conn, dead_letters="archive") as watch:
        await conn.execute("ALTER TABLE core.archive RENAME COLUMN failure_reason TO reason")
        await publish_many(conn, "order.bad", 1)
        await until(lambda: watch.worker is not None and watch.worker.counters.lost_leases >= 1)
        await watch.take(minutes=5)
        await publish_many(conn, "order.bad", 4)
        await until(lambda: watch.worker is not None and watch.worker.counters.lost_leases >= 5)
        await conn.execute("DELETE FROM core.outbox")
        await watch.take(minutes=10)
        assert await watch.firing() == {"HoldfastDeadLettersNotWritten"}


async def test_a_handler_that_fails(dsn: str, conn: asyncpg.Connection) -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.call", retry=RetryPolicy(base_delay=600, max_delay=600))
    async def call(event: Any) -> None:
        raise ConnectionError("away")

    async with watched(dsn, conn, registry) as watch:
        for n in range(1, 7):
            await publish_many(conn, "order.placed", 5)
            await until(lambda n=n: watch.worker is not None and watch.worker.counters.retried == 5 * n)
            await watch.take()
        assert await watch.firing() == {"HoldfastHandlerFailing"}


async def test_a_partner_that_is_away(dsn: str, conn: asyncpg.Connection) -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.call", on_outage="pause", retry=RetryPolicy(base_delay=0.01))
    async def call(event: Any) -> None:
        raise ConnectionError("away")

    async with watched(dsn, conn, registry) as watch:
        await publish_many(conn, "order.placed", 10)
        opened = "SELECT opened_at IS NOT NULL FROM core.handler_flow WHERE handler_name = 'shop.call'"
        await until(lambda: conn.fetchval(opened), what="an open breaker")
        await watch.take(minutes=15)
        assert "HoldfastBreakerOpen" in await watch.firing()


async def test_keys_that_wait_behind_a_dead_letter(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await publish(conn, "order.bad", ordering_key="order-17")
        await publish(conn, "order.bad", ordering_key="order-17")
        await until(lambda: watch.worker is not None and watch.worker.counters.failed == 1)
        await watch.take(minutes=15)
        found = watch.steps[-1].jobs[OUTBOX]
        assert found is not None and found.by("handler", "holdfast_handler_blocked_keys") == {"shop.fail": 1}
        assert await watch.firing() == {"HoldfastKeysBlocked", "HoldfastDeadLetters"}


async def test_many_failures_in_a_week(dsn: str, conn: asyncpg.Connection) -> None:
    """They happened an hour ago, so that no other alert is left."""
    async with watched(dsn, conn) as watch:
        await publish_many(conn, "order.bad", 11)
        await drained(conn)
        await watch.take(minutes=60)
        assert await watch.firing() == {"HoldfastFailuresOfTheWeek"}


async def test_a_worker_that_hears_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """Its address for LISTEN leads nowhere."""
    async with watched(dsn, conn, listen_dsn="postgresql://nobody@127.0.0.1:9/none") as watch:
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastNotListening"}


async def test_a_trigger_that_is_gone(dsn: str, conn: asyncpg.Connection) -> None:
    async with watched(dsn, conn) as watch:
        await conn.execute("DROP TRIGGER outbox_bell ON core.outbox")
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastWakeupTriggerMissing"}


@pytest.fixture(scope="module")
def small_dsn(postgres_server: SessionServer) -> Iterator[str]:
    """A database on a server with a small queue and few connections."""
    settings = {"max_notify_queue_pages": "64", "max_connections": "25", "superuser_reserved_connections": "3"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        dsn = server.create_database("holdfast")
        apply_schema(dsn)
        yield dsn


async def test_a_queue_that_fills(small_dsn: str) -> None:
    """A session listens, and stays in a transaction: its server keeps every notification."""
    async with AsyncExitStack() as stack:
        conn, listening = [await asyncpg.connect(small_dsn) for _ in range(2)]
        stack.push_async_callback(conn.close)
        stack.push_async_callback(listening.close)
        await listening.execute("LISTEN anything")
        async with watched(small_dsn, conn) as watch:
            await listening.execute("BEGIN")
            await conn.execute("SELECT pg_notify('anything', repeat('x', 7900) || n) FROM generate_series(1, 30) n")
            await watch.take()
            assert await watch.firing() == {"HoldfastNotificationQueueFills"}


async def test_connections_that_run_out(small_dsn: str) -> None:
    async with AsyncExitStack() as stack:
        conn = await asyncpg.connect(small_dsn)
        stack.push_async_callback(conn.close)
        async with watched(small_dsn, conn) as watch:
            used = int(watch.steps[0].jobs[OUTBOX].of("holdfast_server_connections"))  # type: ignore[union-attr]
            for _ in range(19 - used):
                stack.push_async_callback((await asyncpg.connect(small_dsn)).close)
            await watch.take(minutes=8)
            assert await watch.firing() == {"HoldfastConnectionsScarce"}


async def test_a_transaction_that_is_left_open(dsn: str, conn: asyncpg.Connection) -> None:
    """The limit is a tenth of a second here."""
    async with watched(dsn, conn) as watch:
        holding = await asyncpg.connect(dsn)
        await holding.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await holding.execute("SELECT count(*) FROM core.outbox")
        await asyncio.sleep(0.2)
        await watch.take(minutes=8)
        await holding.close()
        assert await watch.firing(replace={"age_seconds > 1800": "age_seconds > 0.1"}) == {"HoldfastHorizonHeld"}


async def test_the_limit_of_connections_without_pg_monitor(dsn: str, conn: asyncpg.Connection) -> None:
    """A login that may not see other sessions has no horizon rather than a wrong one (OBS-3)."""
    await conn.execute("SET ROLE holdfast_operator")
    found = await scraped_outbox(conn)
    await conn.execute("RESET ROLE")
    assert found.of("holdfast_server_connections") >= 1
    assert [name for name, _ in found if "horizon" in name] == []


async def test_dead_rows(dsn: str, conn: asyncpg.Connection) -> None:
    """The limit is 100 here."""
    async with watched(dsn, conn, sweep=False) as watch:
        await conn.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
        await conn.execute(DELIVERED, 500)
        await conn.execute("DELETE FROM core.outbox")
        await conn.execute("SELECT pg_stat_force_next_flush()")
        await watch.take(minutes=70)
        assert await watch.firing(replace={"dead_rows > 100000": "dead_rows > 100"}) == {"HoldfastDeadRows"}


async def test_a_large_outbox(dsn: str, conn: asyncpg.Connection) -> None:
    """The limits are 5,000 and 20,000 rows here, and a day is an hour."""
    limits = {"> 5000000": "> 5000", "> 20000000": "> 20000", "for: 1d": "for: 1h"}
    async with watched(dsn, conn) as watch:
        await conn.execute(DELIVERED, 6_000)
        await conn.execute("ANALYZE core.outbox")
        await watch.take(minutes=80)
        assert await watch.firing(replace=limits) == {"HoldfastOutboxLarge"}
        await conn.execute(DELIVERED, 15_000)
        await conn.execute("ANALYZE core.outbox")
        await watch.take(minutes=80)
        assert await watch.firing(replace=limits) == {"HoldfastOutboxLarge", "HoldfastOutboxVeryLarge"}


async def test_a_slow_week(dsn: str, conn: asyncpg.Connection) -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.slow")
    async def slow(event: Any) -> None:
        await asyncio.sleep(0.6)

    async with watched(dsn, conn, registry) as watch:
        await publish_many(conn, "order.placed", 3)
        await drained(conn)
        await watch.take(minutes=90)
        assert await watch.firing() == {"HoldfastSlowForAWeek"}


async def test_counts_that_are_not_folded(dsn: str, conn: asyncpg.Connection) -> None:
    """A session has begun to fold the lines of the journal, and does not end."""
    line = """INSERT INTO core.rollup_journal (counted_at, handler_name, generation, outcome, n)
              VALUES (now() - interval '7 min', 'a.b', 0, 'begun', 1)"""
    holding = await asyncpg.connect(dsn)
    await conn.execute(line)
    await holding.execute("BEGIN; SELECT core.rollup_fold(10)")
    async with watched(dsn, conn) as watch:
        await watch.take(minutes=8)
        assert await watch.firing() == {"HoldfastRollupBehind"}
    await holding.close()


async def test_a_broker_that_lags_and_one_that_is_silent(dsn: str, conn: asyncpg.Connection) -> None:
    """tests/brokers/test_fleet_view.py has reports of a real one."""
    async with watched(dsn, conn) as watch:
        await conn.execute("UPDATE core.subscriptions SET via = 'nats', via_by = 'ann'")
        await conn.execute(
            """INSERT INTO core.broker_reports (broker, channel, handler_name, reported_at, waiting)
               VALUES ('nats', 'outbox_default', 'shop.note', now(), 20000)"""
        )
        await watch.take(minutes=20)
        assert await watch.firing() == {"HoldfastBrokerLag"}
        await conn.execute("UPDATE core.broker_reports SET waiting = 0, reported_at = now() - interval '4 minutes'")
        await watch.take(minutes=20)
        assert await watch.firing() == {"HoldfastBrokerSilent"}


async def test_an_observer_that_raises(dsn: str, conn: asyncpg.Connection) -> None:
    def broken(fact: object) -> None:
        raise RuntimeError("no")

    async with watched(dsn, conn, observers=(broken,)) as watch:
        dropped = watch.worker.facts_dropped if watch.worker else 0
        await publish(conn, "order.bad")
        await until(lambda: watch.worker is not None and watch.worker.facts_dropped > dropped)
        await drained(conn)
        await watch.take()
        assert await watch.firing() == {"HoldfastReportsDropped", "HoldfastDeadLetters"}
