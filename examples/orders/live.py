"""The demo with somebody at the keys."""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from rich.console import Console
from rich.live import Live

from examples.orders.customers import Customers
from examples.orders.figures import Figures
from examples.orders.keys import Keys
from examples.orders.processes import Stage
from examples.orders.view import Scene, draw
from holdfast.embedded import EmbeddedPostgres

_TICK = 0.25
_BURST = 500


class Play:
    """Samples the figures, obeys the keys, and keeps the scene true."""

    def __init__(self, stage: Stage, figures: Figures, customers: Customers, server: EmbeddedPostgres) -> None:
        self._stage = stage
        self._figures = figures
        self._customers = customers
        self._scene = Scene(
            url=stage.url,
            console=stage.console_url,
            server=f"Postgres {server.version}" + (f", {stage.broker}" if stage.broker else ""),
            dsn=server.database_dsn("shop"),
        )
        self._backlog: deque[int] = deque(maxlen=1000)
        self._delivered: deque[tuple[float, int]] = deque(maxlen=9)
        self._news: deque[tuple[str, str]] = deque(maxlen=30)
        self._actions: set[asyncio.Task[None]] = set()
        self._expected = "running"  # what the worker was last told to be
        self._busy_since: float | None = None

    async def run(self, console: Console) -> None:
        self._tell("starting; try b for work, k while it is at it, then w")
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
            watching = asyncio.create_task(self._watch(live))
            try:
                while not watching.done():
                    pressed = asyncio.create_task(keys.next())
                    await asyncio.wait((watching, pressed), return_when=asyncio.FIRST_COMPLETED)
                    if not pressed.done():
                        pressed.cancel()
                    elif pressed.result() == "q":
                        break
                    else:
                        self._press(pressed.result())
                if watching.done():
                    watching.result()
            finally:
                tasks = [watching, *self._actions]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- keys -----------------------------------------------------------------------------------------

    def _press(self, key: str) -> None:
        match key:
            case "w":
                self._act(self._stop_worker() if self._stage.worker.running else self._start_worker())
            case "k" if self._stage.worker.running:
                self._kill_worker()
            case "o":
                self._act(self._place(1))
            case "b":
                self._act(self._place(_BURST))

    def _act(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)

    async def _start_worker(self) -> None:
        self._stage.worker.start()
        self._expected = "running"
        self._tell("a worker is starting")

    async def _stop_worker(self) -> None:
        if self._expected == "stopped":
            return
        self._expected = "stopped"
        self._tell("SIGTERM: it finishes what it runs and gives the rest back")
        await self._stage.worker.stop()
        self._tell("the worker has stopped; orders can still be placed")

    def _kill_worker(self) -> None:
        self._stage.worker.kill()
        self._expected = "killed"
        self._scene.kills += 1
        self._tell(f"kill -9 with about {self._scene.now.in_flight} in flight; w starts a new worker")

    async def _place(self, count: int) -> None:
        self._scene.placing += count
        started, before = time.monotonic(), self._customers.unanswered
        try:
            await self._customers.place(count)
        finally:
            self._scene.placing -= count
        unanswered = self._customers.unanswered - before
        took = time.monotonic() - started
        orders = f"{count} orders" if count > 1 else "one order"
        self._tell(f"{orders} placed in {took:.2f} s" + (f", {unanswered} without an answer" if unanswered else ""))

    def _tell(self, what: str) -> None:
        self._news.append((time.strftime("%H:%M:%S"), what))

    # --- figures --------------------------------------------------------------------------------------

    async def _watch(self, live: Live) -> None:
        while True:
            started = time.monotonic()
            await self._sample()
            live.update(draw(self._scene), refresh=True)
            await asyncio.sleep(max(0.02, _TICK - (time.monotonic() - started)))

    async def _sample(self) -> None:
        scene, worker = self._scene, self._stage.worker
        scene.now = now = await self._figures.snapshot(worker.pid)
        self._backlog.append(now.owed)
        self._delivered.append((time.monotonic(), now.delivered))
        (then, before), (latest, after) = self._delivered[0], self._delivered[-1]
        scene.per_second = (after - before) / (latest - then) if latest > then else 0.0
        confirmed = self._figures.confirmations()
        scene.confirmations = confirmed.total()
        scene.confirmation_duplicates = confirmed.total() - len(confirmed)
        scene.backlog, scene.news = self._backlog, self._news
        scene.worker_pid = worker.pid
        scene.worker = self._worker_state(now.worker_ready)
        self._notice_drain(now.owed)

    def _worker_state(self, ready: bool) -> str:
        if self._stage.worker.running:
            if self._expected == "stopped":
                return "stopping"
            return "running" if ready else "starting"
        if self._expected == "running":
            self._expected = "died"
            self._tell(f"the worker died by itself: {self._stage.worker.tail(1)}")
        return self._expected

    def _notice_drain(self, owed: int) -> None:
        if owed > 50 and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif owed == 0 and self._busy_since is not None:
            took = time.monotonic() - self._busy_since
            self._busy_since = None
            self._tell(f"everything is delivered, {took:.1f} s after the backlog began")


async def play(stage: Stage, figures: Figures, customers: Customers, server: EmbeddedPostgres) -> int:
    """Until q is pressed."""
    await Play(stage, figures, customers, server).run(Console())
    return 0
