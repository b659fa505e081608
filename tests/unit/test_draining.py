"""When everything that is due is delivered: the wait of `Worker.drain` and of the testing kit."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from holdfast.telemetry import Counters
from holdfast.worker.draining import deliver_due


class Outbox:
    """A claimer that rests when nothing is due. Each handler publishes another event when it ends, as often as told."""

    def __init__(self, chain: int) -> None:
        self.counters = Counters()
        self.none = asyncio.Event()
        self.none.set()
        self.due, self.chain, self.behind_breaker = 1, chain, 0

    def claim(self) -> None:
        self.due -= 1
        self.counters.claimed += 1
        self.none.clear()
        asyncio.get_running_loop().call_later(0.01, self._end)

    def _end(self) -> None:
        self.counters.delivered += 1
        self.chain -= 1
        self.due += self.chain > 0
        self.none.set()

    def hurry(self) -> None:
        """Nothing gathers."""

    async def flush(self) -> None:
        """Successes are reported: a breaker closes, and what it held back is due."""
        await asyncio.sleep(0)
        if self.counters.delivered:
            self.due, self.behind_breaker = self.due + self.behind_breaker, 0

    async def rest(self) -> None:
        while self.due:
            self.claim()
            await asyncio.sleep(0)


async def _until(awaited: Coroutine[None, None, object]) -> None:
    await awaited


async def _drain(outbox: Outbox) -> None:
    shared = SimpleNamespace(counters=outbox.counters, in_flight=outbox)
    parts: Any = SimpleNamespace(shared=shared, claimer=outbox, dispatcher=outbox, settler=outbox)
    await deliver_due(parts, _until, lambda: False)


async def test_events_of_handlers_are_waited_for() -> None:
    """A chain is followed to its end (LSN-1)."""
    outbox = Outbox(chain=5)
    await _drain(outbox)
    assert outbox.counters.delivered == 5


async def test_what_was_claimed_before_is_waited_for_too() -> None:
    """A handler that runs already when the wait begins may still publish (LSN-1)."""
    outbox = Outbox(chain=2)
    outbox.claim()
    await _drain(outbox)
    assert outbox.counters.delivered == 2


async def test_what_a_probe_makes_due_is_waited_for() -> None:
    """A probe that succeeds closes its breaker when that is reported, behind its settlement (LSN-17)."""
    outbox = Outbox(chain=1)
    outbox.behind_breaker = 3
    await _drain(outbox)
    assert outbox.counters.delivered == 4
