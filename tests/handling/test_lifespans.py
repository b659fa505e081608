"""What handlers use is opened before the first event is claimed, and closed after the last handler (LSN-14)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reactions, Worker, WorkerSettings
from holdfast.errors import ConfigurationError, LifespanError
from holdfast.handling import lifespans
from holdfast.integrations.fastapi import worker_lifespan
from tests.worker.support import Facts, drained, publish, running, until

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")


@dataclass
class Resources:
    """What a lifespan opened, and the order of everything."""

    log: list[str]
    open: bool = True


def resources(log: list[str], name: str = "resources", *, hold: asyncio.Event | None = None) -> Any:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Resources]:
        log.append(f"open {name}")
        state = Resources(log)
        async with asyncio.timeout(60):  # is left by the task that entered it, or raises
            yield state
        if hold is not None:
            await hold.wait()
        state.open = False
        log.append(f"close {name}")

    lifespan.__qualname__ = name
    return lifespan


def registered(registry: HandlerRegistry, log: list[str], **options: Any) -> HandlerRegistry:
    """Handlers of every kind, that note whether their state is open."""

    @registry.handler("order.placed", name="a.asynchronous", **options)
    async def asynchronous(event: EventEnvelope, state: Resources) -> None:
        log.append(f"async {state.open}")

    @registry.handler("order.placed", name="a.threaded", **options)
    def threaded(event: EventEnvelope, state: Resources) -> None:
        log.append(f"thread {state.open}")

    @registry.handler("order.placed", name="a.transactional", **options)
    async def transactional(event: EventEnvelope, tx: asyncpg.Connection, state: Resources) -> None:
        log.append(f"tx {state.open and tx.is_in_transaction()}")

    return registry


async def test_handlers_of_every_kind_get_the_state(dsn: str, conn: asyncpg.Connection) -> None:
    """LSN-14."""
    log: list[str] = []
    registry = registered(HandlerRegistry(lifespan=resources(log)), log)
    async with running(dsn, registry):
        assert log == ["open resources"]
        await publish(conn, "order.placed")
        await drained(conn)
    assert log[0] == "open resources" and log[-1] == "close resources"
    assert sorted(log[1:-1]) == ["async True", "thread True", "tx True"]


async def test_reactions_get_the_state(dsn: str, conn: asyncpg.Connection) -> None:
    """With an event loop and without one (LSN-14)."""
    log: list[str] = []
    registry = registered(HandlerRegistry(lifespan=resources(log)), log, via="in_process")

    async def one(reactions: Reactions) -> None:
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, "order.placed", {})
        reactions.react(event)
        await reactions.drain(30)

    async with Reactions(dsn, registry) as reactions:
        await one(reactions)
    with Reactions(dsn, registry) as reactions:
        await one(reactions)
    assert log.count("open resources") == log.count("close resources") == 2
    assert log[0] == "open resources" and log[4] == "close resources"
    assert sorted(log[1:4]) == ["async True", "thread True", "tx True"]


async def test_included_registries_bring_their_lifespans(dsn: str, conn: asyncpg.Connection) -> None:
    """The including one is outermost, each is entered once, and a handler gets the state of its own (LSN-14)."""
    log: list[str] = []
    inner, plain, outer = (
        HandlerRegistry(lifespan=resources(log, "inner")),
        HandlerRegistry(),
        HandlerRegistry(lifespan=resources(log, "outer")),
    )
    states: dict[str, Any] = {}
    for registry, name in ((inner, "a.inner"), (inner, "a.second"), (plain, "a.plain"), (outer, "a.outer")):

        async def handler(event: EventEnvelope, state: Resources, name: str = name) -> None:
            states[name] = state

        registry.add(name, ("order.placed",), handler)
    outer.include(inner)
    outer.include(plain)
    app = HandlerRegistry()
    app.include(outer)
    await Worker(dsn, app).drain()
    await publish(conn, "order.placed")
    log.clear()
    await Worker(dsn, app).drain()
    assert log == ["open outer", "open inner", "close inner", "close outer"]
    assert states["a.inner"] is states["a.second"]
    assert states["a.outer"] is states["a.plain"] is not states["a.inner"]


async def test_a_lifespan_ends_after_the_last_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that is still running when the worker stops keeps what it uses (LSN-14)."""
    log: list[str] = []
    registry = HandlerRegistry(lifespan=resources(log))
    begun, seen = asyncio.Event(), []

    @registry.handler("order.placed", name="a.slow")
    async def slow(event: EventEnvelope, state: Resources) -> None:
        begun.set()
        await asyncio.sleep(0.5)
        seen.append(state.open)

    async with running(dsn, registry) as worker:
        await publish(conn, "order.placed")
        await begun.wait()
        worker.stop()
    assert seen == [True] and log[-1] == "close resources"


async def test_a_lifespan_that_fails_at_start_stops_the_worker(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing is claimed, the ones before it are closed, and the message names it without secrets (LSN-14)."""
    log: list[str] = []

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ConnectionError("no route to postgresql://app:hunter2@db/x\nsecond line")
        yield

    inner = registered(HandlerRegistry(lifespan=broken), log)
    registry = HandlerRegistry(lifespan=resources(log))
    registry.include(inner)
    await publish(conn, "order.placed")
    for start in (Worker(dsn, registry).run, Worker(dsn, registry).drain):
        log.clear()
        with pytest.raises(LifespanError, match=r"broken failed at start: ConnectionError: no route") as failed:
            await start()
        assert "hunter2" not in str(failed.value) and "\n" not in str(failed.value)
        assert log == ["open resources"]  # and nothing was handled
    assert await conn.fetchval("SELECT count(*) FROM core.workers") == 0
    assert await conn.fetchval("SELECT attempts FROM core.outbox") == 0
    reacting = registered(HandlerRegistry(lifespan=broken), log, via="in_process")
    with pytest.raises(LifespanError):
        async with Reactions(dsn, reacting):
            pass


@pytest.mark.parametrize("kind", ["hangs", "raises"])
async def test_a_lifespan_that_does_not_end_well_is_reported(
    dsn: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The worker stops within a bound (LSN-14)."""
    monkeypatch.setattr(lifespans, "END_PATIENCE", 0.2)

    @asynccontextmanager
    async def bad() -> AsyncIterator[None]:
        yield
        if kind == "hangs":
            await asyncio.Event().wait()
        raise OSError("cannot close")

    registry, facts = HandlerRegistry(lifespan=bad), Facts()

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None: ...

    started = time.monotonic()
    async with running(dsn, registry, facts):
        pass
    assert time.monotonic() - started < 15
    name = "lifespan_overran" if kind == "hangs" else "lifespan_failed"
    await until(lambda: facts.notices(name))


async def test_a_lifespan_that_ends_too_early_stops_the_worker(dsn: str) -> None:
    """A task group in it may fail; handlers must not go on without what they need (LSN-14)."""

    @asynccontextmanager
    async def grouped() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing())
            yield

    async def failing() -> None:
        await asyncio.sleep(0.3)
        raise OSError("the feed is gone")

    registry, facts = HandlerRegistry(lifespan=grouped), Facts()

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None: ...

    worker = Worker(dsn, registry, observers=(facts.append,))
    with pytest.raises(LifespanError, match="grouped failed while handlers ran"):
        async with asyncio.timeout(20):
            await worker.run()
    await until(lambda: facts.notices("lifespan_failed"))


async def test_stopping_while_a_lifespan_starts(dsn: str) -> None:
    """A worker whose lifespan takes long to open can be stopped (LSN-14)."""
    log: list[str] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        try:
            log.append("opening")
            await asyncio.Event().wait()
            yield
        finally:
            log.append("cleaned up")

    registry = registered(HandlerRegistry(lifespan=slow), log)
    worker = Worker(dsn, registry)
    run = asyncio.create_task(worker.run())
    await until(lambda: log)
    worker.stop()
    async with asyncio.timeout(10):
        await run
    assert log == ["opening", "cleaned up"]
    assert worker.counters.claimed == 0


def not_decorated() -> AsyncIterator[None]: ...  # type: ignore[empty-body]


async def bare() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def with_parameter(app: Any) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("wrong", [bare, with_parameter, 7, "resources"])
def test_what_is_no_lifespan_is_refused_by_the_constructor(wrong: Any) -> None:
    """LSN-14."""
    with pytest.raises(ConfigurationError, match="asynccontextmanager"):
        HandlerRegistry(lifespan=wrong)


async def test_what_is_found_at_start(dsn: str) -> None:
    """No context manager, a state that nothing fills, a state of another class (LSN-14)."""
    log: list[str] = []
    with pytest.raises(LifespanError, match="no asynchronous context manager"):
        await Worker(dsn, registered(HandlerRegistry(lifespan=not_decorated), log)).run()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a\.asynchronous\.state is filled by no lifespan"):
        Worker(dsn, registered(HandlerRegistry(), log))

    @asynccontextmanager
    async def other() -> AsyncIterator[dict[str, int]]:
        yield {}

    with pytest.raises(ConfigurationError, match="annotated with Resources, and gets dict"):
        await Worker(dsn, registered(HandlerRegistry(lifespan=other), log)).run()


async def test_an_optional_state_is_left_out_without_a_lifespan(dsn: str, conn: asyncpg.Connection) -> None:
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope, state: str = "its own") -> None:
        seen.append(state)

    await Worker(dsn, registry).drain()
    await publish(conn, "order.placed")
    await Worker(dsn, registry).drain()
    assert seen == ["its own"]


APP = """
import asyncio, os
from contextlib import asynccontextmanager
from holdfast import EventEnvelope, HandlerRegistry

@asynccontextmanager
async def resources():
    if os.environ.get("BROKEN"):
        raise ConnectionError("no partner at https://u:hunter2@example.com")
    print("opened", flush=True)
    yield "state"
    print("closed", flush=True)

registry = HandlerRegistry(lifespan=resources)

@registry.handler("order.placed", name="a.b")
async def handler(event: EventEnvelope, state: str) -> None:
    print("handled", state, flush=True)
"""


def command(tmp_path: Path, dsn: str, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "lifespan_app.py").write_text(APP)
    return subprocess.Popen(
        [sys.executable, "-c", "from holdfast.cli import main; main()", "worker", "lifespan_app:registry"],
        cwd=tmp_path,
        env=os.environ | {"HOLDFAST_DSN": dsn, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_the_command_runs_them(tmp_path: Path, dsn: str, conn: asyncpg.Connection) -> None:
    """`holdfast worker` opens before it works, and closes after SIGTERM (LSN-14)."""
    worker = command(tmp_path, dsn)
    try:
        await until(lambda: conn.fetchval("SELECT count(*) FROM core.subscriptions"))
        await publish(conn, "order.placed")
        await drained(conn)
        worker.send_signal(signal.SIGTERM)
        printed, errors = await asyncio.to_thread(worker.communicate, timeout=30)
    finally:
        worker.kill()
    assert worker.returncode == 0, errors
    said = [line for line in printed.splitlines() if not line.startswith("{")]
    assert [line for line in said if line in ("opened", "handled state", "closed")] == [
        "opened",
        "handled state",
        "closed",
    ]


async def test_the_command_ends_with_the_message(tmp_path: Path, dsn: str) -> None:
    """One line, without a traceback, and a status that is not 0 (LSN-14)."""
    worker = command(tmp_path, dsn, BROKEN="1")
    try:
        _, errors = await asyncio.to_thread(worker.communicate, timeout=30)
    finally:
        worker.kill()
    assert worker.returncode == 1
    assert "error: the lifespan resources failed at start: ConnectionError: no partner" in errors
    assert "hunter2" not in errors and "Traceback" not in errors


async def test_a_worker_in_an_application_runs_them(dsn: str) -> None:
    """Within `worker_lifespan`; the application's own lifespan is outermost (LSN-14)."""
    log: list[str] = []
    registry = registered(HandlerRegistry(lifespan=resources(log)), log)

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[None]:
        log.append("open application")
        yield
        log.append("close application")

    lifespan = worker_lifespan(lambda: Worker(dsn, registry, WorkerSettings(grace=1)), own)
    async with lifespan(None):
        pass
    assert log == ["open application", "open resources", "close resources", "close application"]


@pytest.mark.parametrize("code", ["REDIS_URL is not set", 0])
async def test_a_lifespan_that_exits_is_named(dsn: str, code: object) -> None:
    """An exit is a failure like any other, and does not end the program around the worker (LSN-14)."""

    @asynccontextmanager
    async def exits() -> AsyncIterator[None]:
        sys.exit(code)  # type: ignore[arg-type]
        yield

    registry = HandlerRegistry(lifespan=exits)
    registry.add("a.b", ("order.placed",), print)
    with pytest.raises(LifespanError, match=f"exits failed at start: SystemExit: {code}"):
        await Worker(dsn, registry).drain()


async def test_a_lifespan_that_exits_at_its_end_is_reported(dsn: str) -> None:
    @asynccontextmanager
    async def exits() -> AsyncIterator[None]:
        yield
        sys.exit("cannot close")

    registry, facts = HandlerRegistry(lifespan=exits), Facts()
    registry.add("a.b", ("order.placed",), print)
    await Worker(dsn, registry, observers=(facts.append,)).drain()
    await until(lambda: facts.notices("lifespan_failed"))
    assert "SystemExit: cannot close" in str(facts.notices("lifespan_failed")[0].details)


EXITS = {
    "lifespan": "from contextlib import asynccontextmanager\n@asynccontextmanager\nasync def resources():\n"
    "    sys.exit('no REDIS_URL')\n    yield",
    "import": "resources = None\nsys.exit(0)",
}


@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        ("lifespan", 1, "error: the lifespan resources failed at start: SystemExit: no REDIS_URL"),
        ("import", 2, "error: exiting_app failed while it was imported: SystemExit: 0"),
    ],
    ids=["lifespan", "import"],
)
def test_the_command_says_that_the_application_exits(
    tmp_path: Path, dsn: str, where: str, code: int, message: str
) -> None:
    """A worker that ends with nothing on the screen leaves its operator without a clue."""
    (tmp_path / "exiting_app.py").write_text(
        f"import sys\nfrom holdfast import HandlerRegistry\n{EXITS[where]}\n"
        "registry = HandlerRegistry(lifespan=resources)\nregistry.add('a.b', ('order.placed',), print)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main()", "worker", "exiting_app:registry"],
        cwd=tmp_path,
        env=os.environ | {"HOLDFAST_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr


async def test_a_lifespan_that_never_yields_is_named(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that waits for it would stand still in silence (LSN-14)."""
    monkeypatch.setattr(lifespans, "SLOW_START", 0.2)

    @asynccontextmanager
    async def waits() -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    registry, facts = HandlerRegistry(lifespan=waits), Facts()
    registry.add("a.b", ("order.placed",), print)
    worker = Worker(dsn, registry, observers=(facts.append,))
    run = asyncio.create_task(worker.run())
    await until(lambda: facts.notices("lifespan_slow"))
    assert "waits" in str(facts.notices("lifespan_slow")[0].details["lifespan"])
    worker.stop()
    async with asyncio.timeout(10):
        await run
