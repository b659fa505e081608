"""`Worker.health()` (OBS-3, LSN-2): live and ready, and why not, whatever the worker meets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator

import asyncpg
import httpx
import pytest
from fastapi import FastAPI

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.cli.worker_status import lines
from holdfast.embedded import EmbeddedPostgres
from holdfast.observability.health import Health, from_data, joined
from holdfast.observability.health_pages import HealthApp
from holdfast.worker import health, maintenance
from tests.worker.support import Facts, publish, running, until
from tests.worker.test_old_primary import free_port


@pytest.fixture
def registry() -> HandlerRegistry:
    made = HandlerRegistry()

    @made.handler("shop.slept", name="shop.sleep")
    async def sleep(event: EventEnvelope) -> None:
        time.sleep(event.payload["s"])

    @made.handler("shop.waited", name="shop.wait")
    async def wait(event: EventEnvelope) -> None:
        await asyncio.sleep(event.payload["s"])

    return made


@contextlib.contextmanager
def seen_by_a_thread(worker: Worker) -> Iterator[list[Health]]:
    """The health of a worker, read all the time by another thread."""
    seen, done = [worker.health()], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(worker.health())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


async def test_from_the_start_to_the_end(dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry) -> None:
    """Ready while it claims; not from the moment it is told to stop; live as long as it has work to end (OBS-3)."""
    worker = Worker(dsn, registry, WorkerSettings(name="box"))
    assert (worker.health().state, worker.health().live, worker.health().ready) == ("new", False, False)
    async with worker:
        health = await until(lambda: worker.health() if worker.health().listener == "listening" else None)
        assert health is not None and health.ready and health.problems == ()
        assert str(health) == "ready (listening, generation 0, 0 in flight)"
        assert (health.name, health.state, health.in_flight) == ("box", "running", 0)
        await until(lambda: worker.health().heartbeat_s is not None, what="a heartbeat")
        await publish(conn, "shop.waited", {"s": 0.5})
        await until(lambda: worker.health().in_flight == 1, what="a delivery in flight")
        worker.stop()
        assert (worker.health().state, worker.health().live, worker.health().ready) == ("draining", True, False)
        assert "draining" in str(worker.health())
    assert (worker.health().state, worker.health().live) == ("stopped", False)


@pytest.mark.slow
async def test_a_handler_that_blocks_the_loop(dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry) -> None:
    """A short block is none; a long one is said while it lasts, with the handler's name, and is forgiven (OBS-3)."""
    async with running(dsn, registry, loop_patience=1.0) as worker:
        await until(lambda: worker.health().ready)
        with seen_by_a_thread(worker) as seen:
            await publish(conn, "shop.slept", {"s": 0.6})
            await until(lambda: worker.counters.delivered == 1, what="a short one")
            assert all(each.live for each in seen)
            await publish(conn, "shop.slept", {"s": 2.5})
            await until(lambda: worker.counters.delivered == 2, what="a long one")
        dead = [each for each in seen if not each.live]
        assert dead and not dead[0].ready
        assert dead[0].loop_silent_s is not None and dead[0].loop_silent_s >= 1.0
        assert "the event loop has been blocked for 1 s; running: shop.sleep" in dead[0].problems
        await until(lambda: worker.health().ready, what="it has recovered")


@pytest.mark.slow
async def test_a_loop_that_is_blocked_is_no_fault_of_the_database(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim whose answer nobody can take is none that the database does not answer; the cause is told (OBS-3)."""
    monkeypatch.setattr(health, "_CLAIM_PATIENCE", 0.5)
    facts = Facts()
    async with running(dsn, registry, facts, lease=6, poll_interval=0.02) as worker:
        await until(lambda: worker.health().ready)
        with seen_by_a_thread(worker) as seen:
            await publish(conn, "shop.slept", {"s": 2.7})
            await until(lambda: any(each.loop_silent_s and each.loop_silent_s > 2.4 for each in seen))
        blocked = [each for each in seen if each.loop_silent_s and 0.6 < each.loop_silent_s < 2.4]
        assert blocked and not any("no claim" in problem for each in blocked for problem in each.problems)
        await until(lambda: facts.notices("loop_blocked"))


@pytest.mark.slow
async def test_the_database_is_away(own_server: EmbeddedPostgres, own_dsn: str, registry: HandlerRegistry) -> None:
    """Live, because a restart would not help; not ready, with the reason; ready when it is back (OBS-3)."""
    async with running(own_dsn, registry, poll_interval=0.5, lease=2.0, loop_patience=1.0) as worker:
        await until(lambda: worker.health().ready)
        with seen_by_a_thread(worker) as seen:
            await asyncio.to_thread(own_server.kill)
            gone = await until(lambda: None if worker.health().ready else worker.health())
            assert gone is not None and gone.live and "the database has been away" in gone.problems[0]
            password = own_dsn.partition("postgres:")[2].partition("@")[0]
            assert len(password) > 20 and password not in str(gone.as_data())
            await until(lambda: worker.health().listener == "connecting", what="it does not listen")
            await asyncio.sleep(2.5)  # longer than a lease, and than the patience with the loop
            await asyncio.to_thread(own_server.start)
            await until(lambda: worker.health().ready and worker.health().listener == "listening", what="it is back")
        assert all(each.live for each in seen)
        said = [[why for why in each.problems if "database has been away" in why] for each in seen]
        assert {len(each) for each in said} == {0, 1}, "an outage is one sentence, whichever loops meet it"


async def test_a_database_that_was_never_reached(registry: HandlerRegistry) -> None:
    """A worker that starts before its database is live, and says what it waits for (OBS-3)."""
    dsn = f"postgresql://shop:secret@127.0.0.1:{free_port()}/shop"
    async with running(dsn, registry) as worker:
        found = worker.health()
        assert (found.state, found.live, found.ready) == ("starting", True, False)
        assert found.problems[0] == "it is starting" and "Connect" in found.problems[1]
        assert "secret" not in str(found)


async def test_claims_that_do_not_succeed(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database answers, and no claim comes back (OBS-3)."""
    monkeypatch.setattr(health, "_CLAIM_PATIENCE", 0.5)
    async with running(dsn, registry, poll_interval=0.1) as worker:
        await until(lambda: worker.health().ready)
        async with conn.transaction():
            await conn.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
            found = await until(lambda: None if worker.health().ready else worker.health())
            assert found is not None and found.live and "no claim has succeeded for" in found.problems[0]
        await until(lambda: worker.health().ready, what="the lock is gone")


async def test_a_schema_that_outgrew_the_worker(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a migration that no longer serves this code; it is reported, and works as long as it can (OBS-3)."""
    monkeypatch.setattr(maintenance, "_INTERVAL", 0.1)
    facts = Facts()
    async with running(dsn, registry, facts) as worker:
        await until(lambda: worker.health().ready)
        await conn.execute("UPDATE core.contract SET provides = 1000, oldest_code = 999")
        found = await until(lambda: None if worker.health().ready else worker.health())
        assert found is not None and found.live and "the database has schema core of contract 1000" in found.problems[0]
        await until(lambda: facts.notices("schema_mismatch"), what="the notice")
        await publish(conn, "shop.waited", {"s": 0})
        await until(lambda: worker.counters.delivered == 1, what="it still delivers")


async def test_heartbeats_that_are_no_longer_sent(dsn: str, registry: HandlerRegistry) -> None:
    """The thread of the lease keeper hangs: leases would run out, and a restart helps (OBS-3)."""
    async with running(dsn, registry, lease=0.5, loop_patience=1.0) as worker:
        keeper = worker._parts.lease_keeper
        loop, _ = await until(lambda: keeper._running, what="the thread runs")
        loop.call_soon_threadsafe(time.sleep, 2.0)
        found = await until(lambda: None if worker.health().live else worker.health(), within=3)
        assert found is not None and found.problems[0].startswith("the thread that sends heartbeats has been blocked")
        await until(lambda: worker.health().live, what="it has recovered")


async def test_what_is_known_of_listening(dsn: str, registry: HandlerRegistry) -> None:
    """Listening, off, or connecting; ready all the same, because polling delivers. See test_pooler.py (LSN-2)."""
    async with running(dsn, registry, listen=False) as worker:
        await until(lambda: worker.health().ready)
        assert worker.health().listener == "off" and "polling: LISTEN is off" in str(worker.health())
    nowhere = f"postgresql://shop@127.0.0.1:{free_port()}/shop"
    async with running(dsn, registry, listen_dsn=nowhere) as worker:
        await until(lambda: worker.health().state == "running")
        assert worker.health().ready and worker.health().listener == "connecting"
        assert "polling until LISTEN is connected" in str(worker.health())


async def test_a_worker_that_could_not_start(empty_dsn: str, registry: HandlerRegistry) -> None:
    """It has stopped (OBS-3)."""
    worker = Worker(empty_dsn, registry)
    with pytest.raises(Exception, match="not installed"):
        await worker.run()
    assert worker.health().state == "stopped"


def test_several_processes_are_as_healthy_as_the_worst() -> None:
    """One endpoint for all of --processes (OBS-3)."""
    well = Health("running", name="a/1", listener="listening", in_flight=2, heartbeat_s=1.0)
    slow = Health("running", not_ready=("no claim",), name="a/2", listener="connecting", in_flight=1)
    stuck = Health("running", not_live=("blocked",), name="a/3", listener="listening")
    parent = Health("running", name="a", pid=7, generation=0)
    assert joined(parent, [well, well]).ready
    new = Health("starting", not_ready=("it is starting",))
    assert [joined(parent, each).state for each in ([new, new], [new, well], [])] == ["starting", "running", "running"]
    assert joined(Health("draining"), [new]).state == "draining"
    both = joined(parent, [well, slow])
    assert both.live and both.problems == ("process 2: no claim",) and both.listener == "connecting"
    assert (both.in_flight, both.heartbeat_s, both.name) == (3, 1.0, "a")
    assert joined(parent, [well, slow, stuck]).problems == ("process 3: blocked", "process 2: no claim")
    assert str(joined(parent, [well, well])) == "ready (listening, generation 0, 4 in flight, 2 processes)"


def test_a_loop_that_does_not_turn_is_told_before_it_counts() -> None:
    """While the worker is still ready, so that nobody looks elsewhere (OBS-3)."""
    assert str(Health("running", loop_silent_s=11.2)) == "ready (event loop blocked for 11 s)"
    assert str(Health("running", loop_silent_s=1.9)) == "ready"
    assert str(Health("running", loop_silent_s=99.0, not_live=("blocked",))) == "not live: blocked"


def test_a_narrow_terminal_shows_each_problem_on_a_line_of_its_own() -> None:
    """And what is piped stays one line for each worker (OBS-3, OPS-1)."""
    away = "the database has been away for 12 s: ConnectionRefusedError: [Errno 111] Connect call failed"
    health = Health("running", not_ready=(away, "no claim"), name="web-7", pid=12, listener="listening", in_flight=3)
    assert lines(health, None) == [f"worker web-7 (pid 12): {health}"]
    first, *others = lines(health, 80)
    assert first == "worker web-7 (pid 12): live, not ready (listening, 3 in flight)"
    assert others[0].startswith("  the database has been away") and others[-1] == "  no claim"
    assert max(map(len, others)) <= 80


def test_health_travels_as_json() -> None:
    """To another process, and from a later release that says more (OBS-3)."""
    found = joined(Health("draining", not_ready=("draining",)), [Health("running", listener="off")])
    data = json.loads(json.dumps(found.as_data()))
    assert from_data(data) == found
    assert from_data({**data, "weather": "fine", "processes": [{"state": "new", "mood": 1}]}).processes


async def test_an_application_that_mounts_it(dsn: str, registry: HandlerRegistry) -> None:
    """A FastAPI service with a worker in it (OBS-3)."""
    worker = Worker(dsn, registry)
    app = FastAPI()
    app.mount("/health", HealthApp(worker.health))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http:
        assert (await http.get("/health/live")).status_code == 503
        async with worker:
            await until(lambda: worker.health().ready)
            assert (await http.get("/health/live")).json()["problems"] == []
            answer = await http.get("/health/ready")
            assert (answer.status_code, answer.json()["ready"]) == (200, True)
            assert answer.headers["content-type"] == "application/json"
            assert (await http.head("/health/ready")).content == b""
            assert (await http.post("/health/ready")).status_code == 405
            assert (await http.get("/health/else")).status_code == 404
            worker.stop()
            answer = await http.get("/health/ready")
            assert (answer.status_code, answer.json()["state"]) == (503, "draining")


async def test_heartbeats_that_do_not_pass(dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry) -> None:
    """Another session holds the worker's row: its lease runs out, and its events go to other workers (OBS-3)."""
    async with running(dsn, registry, lease=1.0) as worker:
        await until(lambda: worker.health().heartbeat_s is not None and worker.health().ready, what="a heartbeat")
        async with conn.transaction():
            await conn.execute("LOCK TABLE core.workers IN ACCESS EXCLUSIVE MODE")
            found = await until(lambda: None if worker.health().ready else worker.health())
            assert found is not None and found.live
        await until(lambda: worker.health().ready, what="the lock is gone")
