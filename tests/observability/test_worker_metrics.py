"""What each handler did, for Prometheus (OBS-2): counts, tags, several processes, both formats."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from prometheus_client import CollectorRegistry, make_asgi_app

from holdfast import HandlerRegistry, Reject, RetryPolicy, Snooze, Worker, WorkerSettings, installing
from holdfast.cli import main
from holdfast.measurements import published
from holdfast.observability.prometheus import Collector
from tests.observability.scraping import OPENMETRICS, command, get, read, read_openmetrics, scrape, scraped
from tests.worker.support import drained, insert, publish, publish_many, running, until


class CardRefused(Exception):
    pass


def registry_of_outcomes() -> HandlerRegistry:
    registry = HandlerRegistry()
    snoozed: set[object] = set()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: Any) -> None: ...

    @registry.handler("order.late", name="shop.retry", retry=RetryPolicy(base_delay=0.01, max_attempts=3))
    async def retry(event: Any) -> None:
        raise ConnectionError("away")

    @registry.handler("order.bad", name="shop.fail", retry=RetryPolicy(terminal_errors=(CardRefused,)))
    async def fail(event: Any) -> None:
        raise CardRefused("no")

    @registry.handler("order.no", name="shop.reject")
    async def reject(event: Any) -> Reject:
        return Reject()

    @registry.handler("order.soon", name="shop.snooze")
    async def snooze(event: Any) -> Snooze | None:
        if event.event_id in snoozed:
            return None
        snoozed.add(event.event_id)
        return Snooze(0.01)

    return registry


async def test_every_outcome_is_counted_once(dsn: str, conn: asyncpg.Connection) -> None:
    """By handler and outcome; histograms have every attempt (OBS-2)."""
    async with running(dsn, registry_of_outcomes()) as worker:
        collector = Collector(worker)
        assert scrape(collector).of("holdfast_deliveries_total") == 0, "all handlers are there before anything happens"
        assert len(scrape(collector).by("handler", "holdfast_handler_duration_seconds_count")) == 0
        await publish_many(conn, "order.placed", 5)
        await publish(conn, "order.placed", idempotency_key="one")
        await drained(conn)
        await publish(conn, "order.placed", idempotency_key="one")
        for event_type in ("order.late", "order.bad", "order.no", "order.soon"):
            await publish(conn, event_type)
        await drained(conn)
        found = scrape(collector)
    outcomes = {
        name: found.by("outcome", "holdfast_deliveries_total", handler=f"shop.{name}")
        for name in ("note", "retry", "fail", "reject", "snooze")
    }
    assert outcomes == {
        "note": {"delivered": 6, "duplicate": 1},
        "retry": {"retried": 2, "failed": 1},
        "fail": {"failed": 1},
        "reject": {"failed": 1},
        "snooze": {"snoozed": 1, "delivered": 1},
    }
    assert found.of("holdfast_deliveries_total") == found.of("holdfast_events_claimed_total")
    for histogram in ("handler_duration", "time_in_outbox"):
        assert found.of(f"holdfast_{histogram}_seconds_count", handler="shop.note") == 6
        assert found.of(f"holdfast_{histogram}_seconds_bucket", handler="shop.note", le="+Inf") == 6
        assert found.of(f"holdfast_{histogram}_seconds_count", handler="shop.retry") == 3
    assert found.families["holdfast_handler_duration_seconds"].type == "histogram"
    assert found.families["holdfast_deliveries"].type == "counter"
    kinds = {("shop.retry", "retry_terminal", "ConnectionError"), ("shop.reject", "rejected", "")}
    for name in ("nacked_terminal", "dlq_written"):
        assert found.of(f"holdfast_{name}_total") == 3
        for handler, reason, exception_type in kinds:
            labels = {"handler": handler, "reason": reason, "exception_type": exception_type}
            assert found.of(f"holdfast_{name}_total", **labels) == 1
        assert found.of(f"holdfast_{name}_total", handler="shop.fail", reason="retry_terminal") == 1
    assert found.of("holdfast_worker_processes") == found.of("holdfast_worker_listening") == 1


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_lost_lease_writes_no_dead_letter(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """It was judged, and is not written: the two differ by one (OBS-2, DLQ-6)."""
    registry, entered, go = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        entered.set()
        await go.wait()
        raise ValueError("no")

    retry = RetryPolicy(terminal_errors=(ValueError,))
    if transactional:

        @registry.handler("order.bad", name="shop.fail", retry=retry)
        async def fail_within(event: Any, tx: asyncpg.Connection) -> None:
            await fails()
    else:

        @registry.handler("order.bad", name="shop.fail", retry=retry)
        async def fail(event: Any) -> None:
            await fails()

    async with running(dsn, registry, lease=60) as worker:
        collector = Collector(worker)
        await insert(conn, "order.bad")
        await asyncio.wait_for(entered.wait(), 20)
        if transactional:  # the row is locked: only an end of the session can take the lease away
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'holdfast handle%'"
                " AND datname = current_database()"
            )
        await conn.execute(
            "UPDATE core.outbox SET lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1 h'"
            " WHERE status = 'in_flight'"
        )
        go.set()
        await until(lambda: scrape(collector).of("holdfast_deliveries_total", outcome="lost_lease") == 1)
        found = scrape(collector)
        assert found.of("holdfast_nacked_terminal_total", handler="shop.fail") == 1
        assert found.of("holdfast_dlq_written_total") == 0
        assert found.of("holdfast_deliveries_total", outcome="failed") == 0
        await conn.execute("DELETE FROM core.outbox")


async def test_expired_and_cancelled_events_are_no_dead_letters(dsn: str, conn: asyncpg.Connection) -> None:
    """They are counted as what they are (OBS-2)."""
    await publish(conn, "order.placed", expires_in=0.01)
    await asyncio.sleep(0.05)
    async with running(dsn, registry_of_outcomes()) as worker:
        await drained(conn)
        found = scrape(Collector(worker))
    assert found.by("outcome", "holdfast_deliveries_total") == {"expired": 1}
    assert found.of("holdfast_nacked_terminal_total") == found.of("holdfast_dlq_written_total") == 0


async def test_what_a_process_has_published(dsn: str, conn: asyncpg.Connection) -> None:
    """By type, and without a worker; what a forked process does is its own (OBS-2)."""
    published.reset()
    nothing = ("holdfast_events_published_total", frozenset({("event_type", "other")}))
    assert scrape(Collector())[nothing] == 0, "a chart shows zero, and not that there are no data"
    await publish(conn, "order.placed")
    await publish(conn, "order.placed", key="a")
    await publish(conn, "order.placed", key="a")  # the pending one stays
    await publish_many(conn, "order.paid", 5)
    found = scrape(Collector())
    assert found.by("event_type", "holdfast_events_published_total") == {"order.placed": 2, "order.paid": 5}
    assert found.of("holdfast_worker_processes") == 0
    for n in range(300):
        published.add(f"t{n}")
    counted = scrape(Collector()).by("event_type", "holdfast_events_published_total")
    assert len(counted) == 101 and counted["other"] == 300 - 98
    pid = os.fork()
    if pid == 0:
        os._exit(len(published.snapshot()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_a_program_of_ones_own_serves_them(dsn: str, conn: asyncpg.Connection) -> None:
    """The collector in a registry, behind prometheus_client's own ASGI application (OBS-2)."""
    registry = CollectorRegistry(auto_describe=True)
    async with running(dsn, registry_of_outcomes()) as worker:
        registry.register(Collector(worker))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(Collector())
        app, body = make_asgi_app(registry), b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any]) -> None:
            nonlocal body
            body += message.get("body", b"")

        await app({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}, receive, send)
        assert read(body.decode()).of("holdfast_worker_processes") == 1


async def test_a_worker_that_has_stopped_keeps_its_counts(dsn: str, conn: asyncpg.Connection) -> None:
    """And has no state (OBS-2)."""
    worker = Worker(dsn, registry_of_outcomes(), WorkerSettings(), observers=())
    collector = Collector(worker)
    await publish_many(conn, "order.placed", 3)
    await worker.drain()
    found = scrape(collector)
    assert found.of("holdfast_deliveries_total", outcome="delivered") == 3
    assert found.of("holdfast_worker_processes") == found.of("holdfast_worker_listeners") == 0


# --- the command ---

HANDLERS = """
import os, time
from holdfast import HandlerRegistry, RetryPolicy

registry = HandlerRegistry()

@registry.handler("order.placed", name="shop.note")
async def note(event):
    pass

@registry.handler("order.slow", name="shop.block")
async def block(event):
    open("blocked", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(HANDLERS)
    return tmp_path


WORKER = ("worker", "shop:registry", "--metrics", "127.0.0.1:0")


async def test_the_command_serves_both_formats(dsn: str, conn: asyncpg.Connection, app: Path) -> None:
    """Before the first event, while the loop is blocked, and in the format that is asked for (OBS-2)."""
    async with command(dsn, app, *WORKER, "--grace", "1") as worker:
        port = await worker.port()
        status, head, body = await get(port)
        assert status == 200 and "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert read(body).of("holdfast_deliveries_total") == 0
        await publish_many(conn, "order.placed", 20)
        await drained(conn)
        _, head, body = await get(port, accept=f"{OPENMETRICS},text/plain;version=0.0.4;q=0.5")
        assert "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8" in head
        assert read_openmetrics(body).of("holdfast_deliveries_total", outcome="delivered") == 20
        assert (await get(port, accept="application/openmetrics-text;version=\xff"))[0] == 200
        await insert(conn, "order.slow")
        await until(lambda: (app / "blocked").exists(), what="a handler that blocks the loop")
        assert (await scraped(port)).of("holdfast_worker_in_flight") == 1
        worker.process.kill()
    assert '"pages_served"' in worker.said and '"/metrics"' in worker.said


@pytest.mark.slow
async def test_one_endpoint_for_several_processes(dsn: str, conn: asyncpg.Connection, app: Path) -> None:
    """One target has the sums of all processes, and no counter goes back when one of them dies (OBS-2)."""
    async with command(dsn, app, *WORKER, "--processes", "3", "--lease", "2") as worker:
        port = await worker.port()

        async def counted(**expected: float) -> bool:
            found = await scraped(port)
            seen = {
                "delivered": found.of("holdfast_deliveries_total", outcome="delivered"),
                "processes": found.of("holdfast_worker_processes"),
                "deaths": found.of("holdfast_worker_deaths_total"),
            }
            return seen == {**seen, **expected}

        await until(lambda: counted(processes=3), what="three workers that report")
        await publish_many(conn, "order.placed", 60)
        await drained(conn)
        await until(lambda: counted(delivered=60), what="sixty deliveries")
        before = await scraped(port)
        os.kill(worker.children()[0], signal.SIGKILL)
        await until(lambda: counted(deaths=1, processes=2), what="a death")
        assert (await scraped(port)).of("holdfast_deliveries_total", outcome="delivered") == 60
        await until(lambda: counted(processes=3), what="a new process")
        await publish_many(conn, "order.placed", 40)
        await until(lambda: counted(delivered=100), what="a hundred deliveries")
        after = await scraped(port)
        for (name, labels), value in before.items():
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert after[name, labels] >= value, name


async def test_what_stops_is_reported_to_the_end(dsn: str, conn: asyncpg.Connection, app: Path) -> None:
    """A process that stops in order loses no count (OBS-2)."""
    async with command(dsn, app, *WORKER, "--processes", "2") as worker:
        port = await worker.port()

        async def processes() -> bool:
            return (await scraped(port)).of("holdfast_worker_processes") == 2

        await until(processes, what="two workers")
        await publish_many(conn, "order.placed", 200)
        await drained(conn)
        first, second = worker.children()
        os.kill(first, signal.SIGTERM)  # in order, although nobody told the supervisor
        os.kill(second, signal.SIGTERM)

        async def all_counted() -> bool:
            return (await scraped(port)).of("holdfast_deliveries_total", outcome="delivered") == 200

        await until(all_counted, what="every delivery")


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_mistakes_are_two_lines(dsn: str, app: Path, processes: str) -> None:
    """An address that is none, and one in use (OPS-1)."""
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    for address, problem in (("here", "error: --metrics 'here' is not"), (f"127.0.0.1:{port}", "cannot be used")):
        async with command(
            dsn, app, "worker", "shop:registry", "--metrics", address, "--processes", processes
        ) as worker:
            assert await asyncio.wait_for(worker.process.wait(), 20) == 2
        assert problem in worker.said and "\ntry: " in worker.said and len(worker.said.splitlines()) == 2
    taken.close()


def test_without_the_extra(
    dsn: str, app: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says what to install, and a program of one's own gets the error of every extra (OPS-1)."""
    monkeypatch.setattr(installing, "find_spec", lambda name: None if name == "prometheus_client" else find_spec(name))
    monkeypatch.chdir(app)
    for more in ([], ["--processes", "2"]):
        with pytest.raises(SystemExit) as end:
            main(["worker", "shop:registry", "--dsn", dsn, "--metrics", "0", *more])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "error: prometheus_client is not installed\ntry: pip install '.[prometheus]' in a checkout" in said
    with pytest.raises(ModuleNotFoundError, match="prometheus_client is not installed"):
        Collector()


async def test_promtool_finds_nothing_to_complain_about(dsn: str, conn: asyncpg.Connection, app: Path) -> None:
    """Names, units and help texts are as Prometheus' own linter wants them (OBS-2)."""
    async with (
        command(dsn, app, *WORKER, "--processes", "2") as worker,
        command(dsn, app, "metrics", "--listen", "0") as outbox,
    ):
        await publish_many(conn, "order.placed", 5)
        await publish(conn, "order.lost")
        for served in (worker, outbox):
            _, _, body = await get(await served.port())
            checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, text=True)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
