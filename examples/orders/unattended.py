"""The demo without anybody at the keys: orders, kill -9, more orders, a new worker, and the reckoning."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from examples.orders.customers import Customers
from examples.orders.figures import Figures, Snapshot, percentile
from examples.orders.processes import Child, Stage

_RATE = 40.0  # orders per second
_BURST = 40
_SHORTEST = 6.0  # what the scenes need at least, whatever time is left
_PATIENCE = 60.0


class NotReady(Exception):
    """A process of the demo did not come up, or a backlog did not drain; the text has the end of its log."""


class Run:
    """One run, scene by scene."""

    def __init__(self, stage: Stage, figures: Figures, customers: Customers, *, started: float, seconds: float) -> None:
        self._stage = stage
        self._figures = figures
        self._customers = customers
        self._started = started
        self._deadline = started + seconds
        self._calm: list[tuple[datetime, datetime]] = []
        self._kills = 0

    async def play(self) -> dict[str, Any]:
        await self._curtain_up()
        left = max(_SHORTEST, self._deadline - time.monotonic())
        await self._steady(0.35 * left)
        await self._kill_in_flight()
        await self._orders_without_worker(0.2 * left)
        await self._recover()
        await self._steady(max(1.0, self._deadline - time.monotonic() - 0.5))
        await self._drained("draining")
        await self._end_the_day()
        return await self._reckoning()

    # --- the scenes -----------------------------------------------------------------------------------

    async def _curtain_up(self) -> None:
        self._say("starting the API and the worker")
        if not await self._customers.wait_for_api(lambda: self._stage.api.running):
            raise _not_ready("the API did not start", self._stage.api)
        await self._until(lambda now: now.worker_ready, "the worker did not start")

    async def _steady(self, seconds: float) -> None:
        """Calm: the worker is up and nothing is left over, so what is placed now shows the latency."""
        self._say(f"placing {_RATE:g} orders a second for {seconds:.1f} s")
        since = await self._figures.now()
        await self._customers.place_steadily(_RATE, time.monotonic() + seconds)
        self._calm.append((since, await self._figures.now()))

    async def _kill_in_flight(self) -> None:
        burst = asyncio.create_task(self._customers.place(_BURST))
        deadline = time.monotonic() + 2
        while (now := await self._snapshot()).in_flight < 5 and time.monotonic() < deadline and not burst.done():
            pass
        self._stage.worker.kill()
        self._kills += 1
        self._say(f"kill -9 of the worker, with {now.in_flight} deliveries in flight")
        await burst

    async def _orders_without_worker(self, seconds: float) -> None:
        before = len(self._customers.acknowledged)
        await self._customers.place_steadily(_RATE, time.monotonic() + seconds)
        placed = len(self._customers.acknowledged) - before
        self._say(f"{placed} orders placed without a worker, {(await self._snapshot()).owed} deliveries owed")

    async def _recover(self) -> None:
        self._stage.worker.start()
        self._say("a new worker is starting")
        await self._drained("recovering")
        self._say("drained: what the dead worker held was claimed again when its leases expired")

    async def _end_the_day(self) -> None:
        await self._figures.end_the_day()
        self._say("the schedule that ends the day is triggered")
        await self._drained("closing the books")

    async def _reckoning(self) -> dict[str, Any]:
        account = await self._figures.account(self._customers.acknowledged)
        failed = (await self._snapshot()).failed
        latencies = await self._figures.latencies(self._calm)
        books = await self._figures.books()
        return {
            "orders": len(self._customers.acknowledged),
            "delivered": account.delivered,
            "lost": account.lost,
            "effect_duplicates": account.effect_duplicates,
            "confirmation_duplicates": account.confirmation_duplicates,
            "reacted": await self._reacted(),
            "slots_fired": books.fired,
            "next_slot": None if books.next_slot is None else f"{books.next_slot:%Y-%m-%d %H:%M} UTC",
            "books_closed": books.closed,
            "books_recorded": books.recorded,
            "failed": failed,
            "unanswered": self._customers.unanswered,
            "kills": self._kills,
            "p50_ms": _rounded(percentile(latencies, 0.50)),
            "p99_ms": _rounded(percentile(latencies, 0.99)),
            "latency_sample": len(latencies),
            "seconds": round(time.monotonic() - self._started, 1),
        }

    async def _reacted(self) -> int:
        """Nobody waits for reactions; the last ones may still be at it."""
        orders, deadline = self._customers.acknowledged, time.monotonic() + 5
        while (found := await self._figures.reacted(orders)) < len(orders) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return found

    # --- waiting --------------------------------------------------------------------------------------

    async def _snapshot(self) -> Snapshot:
        return await self._figures.snapshot(self._stage.worker.pid)

    async def _drained(self, what: str) -> None:
        await self._until(lambda now: now.owed == 0, f"{what} took longer than {_PATIENCE:g} s", give_up=False)

    async def _until(self, condition: Callable[[Snapshot], bool], problem: str, *, give_up: bool = True) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition(await self._snapshot()):
            if not self._stage.worker.running or time.monotonic() > deadline:
                if give_up or not self._stage.worker.running:
                    raise _not_ready(problem, self._stage.worker)
                self._say(problem)  # the reckoning then says what is missing
                return
            await asyncio.sleep(0.05)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:5.1f} s  {text}", file=sys.stderr, flush=True)


def _not_ready(problem: str, child: Child) -> NotReady:
    return NotReady(f"{problem}; the end of its log:\n{child.tail()}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def report(result: dict[str, Any], *, as_json: bool) -> int:
    """Print the reckoning; 1 when an order was lost or recorded twice."""
    sound = result["lost"] == 0 and result["effect_duplicates"] == 0
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print(summary(result, sound=sound), flush=True)
    return 0 if sound else 1


def summary(result: dict[str, Any], *, sound: bool) -> str:
    """The reckoning, in lines."""
    times = f"p50 {result['p50_ms']} ms, p99 {result['p99_ms']} ms over {result['latency_sample']} orders"
    lines = [
        f"{result['orders']} orders acknowledged, the worker killed with -9 {result['kills']} time(s)",
        f"{result['delivered']:>6}  reached both handlers",
        f"{result['lost']:>6}  lost",
        f"{result['effect_duplicates']:>6}  recorded twice in the ledger (a database effect: exactly once)",
        f"{result['confirmation_duplicates']:>6}  confirmed twice (an outside effect: at least once)",
        f"{result['reacted']:>6}  counted by the API after its commit (a reaction in process: once, or not at all)",
        f"{result['books_closed']:>6}  in the books of the day, closed when its schedule was triggered; "
        f"{result['slots_fired']} slots fired by themselves, the next one at {result['next_slot']}",
        f"commit to handler while the worker was up: {times}",
        "All is well." if sound else "SOMETHING IS WRONG: this must not happen.",
    ]
    return "\n".join(lines)
