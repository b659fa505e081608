"""Deadlines: who is cut and when, how many timers that takes, and the time of work that may have to wait."""

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import pytest

from holdfast.postgres.deadlines import Deadline, within


class Timers:
    """Counts the timers that are set on the running loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        call_at = loop.call_at
        self.set: list[float] = []

        def counting(when: float, callback: Callable[..., Any], *arguments: Any, **more: Any) -> asyncio.TimerHandle:
            self.set.append(when)
            return call_at(when, callback, *arguments, **more)

        monkeypatch.setattr(loop, "call_at", counting)


class Clock(selectors.DefaultSelector):
    """What a loop waits with: it does not wait, and its time goes on at once. So no busy machine is too late."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def run(work: Coroutine[Any, Any, Any]) -> None:
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work)


class Cuts:
    """Notes which blocks were cut, and when."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, float]] = []

    def within(self, seconds: float, name: str = "") -> Deadline:
        return Deadline(seconds, lambda: self.noted.append((name, round(asyncio.get_running_loop().time(), 3))))


def test_a_block_is_cut_when_its_time_is_over_and_only_once() -> None:
    cuts = Cuts()

    async def block() -> None:
        with cuts.within(5):
            await asyncio.sleep(20)
        await asyncio.sleep(20)

    run(block())
    assert cuts.noted == [("", 5)]


def test_a_block_that_has_ended_is_not_cut() -> None:
    cuts = Cuts()

    async def blocks() -> None:
        with cuts.within(2, "ended"):
            pass
        with cuts.within(2, "failed"), pytest.raises(ValueError, match="its own"):
            raise ValueError("its own")
        await asyncio.sleep(20)

    run(blocks())
    assert cuts.noted == []


def test_a_cut_that_raises_leaves_the_others_their_time() -> None:
    cuts = Cuts()

    def broken() -> None:
        raise LookupError("broken")

    async def blocks() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        with cuts.within(10, "later"), Deadline(5, broken):
            await asyncio.sleep(20)

    run(blocks())
    assert cuts.noted == [("later", 10)]


def test_blocks_inside_and_beside_each_other_have_each_their_own_time() -> None:
    cuts = Cuts()

    async def block(name: str, seconds: float) -> None:
        with cuts.within(seconds, name):
            await asyncio.sleep(15)

    async def blocks() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(block("late", 10))
            tasks.create_task(block("early", 3))
            tasks.create_task(block("never", 1_000))
            with cuts.within(12, "outer"), cuts.within(6, "inner"):
                await asyncio.sleep(15)

    run(blocks())
    assert cuts.noted == [("early", 3), ("inner", 6), ("late", 10), ("outer", 12)]


def test_a_block_that_begins_while_the_timer_of_an_earlier_one_is_set_is_cut_in_time() -> None:
    cuts = Cuts()

    async def blocks() -> None:
        with cuts.within(5, "first"):
            pass
        await asyncio.sleep(3)
        with cuts.within(5, "second"):
            await asyncio.sleep(20)

    run(blocks())
    assert cuts.noted == [("second", 8)]


async def test_a_thousand_blocks_take_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    for _ in range(1_000):
        with Deadline(10, list):
            pass
    assert len(timers.set) == 1


def test_each_loop_has_a_timer_of_its_own() -> None:
    async def cut() -> list[str]:
        cuts: list[str] = []
        with Deadline(0.02, lambda: cuts.append("cut")):
            await asyncio.sleep(0.06)
        return cuts

    assert [asyncio.run(cut()) for _ in range(2)] == [["cut"], ["cut"]]


def test_a_block_is_cut_with_its_own_context_variables() -> None:
    """Who is cut sees nothing of the request that set the timer (SEC-1)."""
    tenant, seen = ContextVar("tenant", default="nobody"), list[str]()

    async def request(name: str, ends: bool) -> None:
        tenant.set(name)
        with Deadline(5, lambda: seen.append(tenant.get())):
            await asyncio.sleep(1 if ends else 20)

    async def requests() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(request("ann", ends=True))
            await asyncio.sleep(0.5)
            tasks.create_task(request("bob", ends=False))

    run(requests())
    assert seen == ["bob"]


async def test_a_timer_that_could_not_be_set_is_set_by_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_arguments: Any, **_more: Any) -> asyncio.TimerHandle:
        raise MemoryError

    cuts, cut = list[str](), asyncio.Event()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_at", failing)
        with pytest.raises(MemoryError), Deadline(0.01, lambda: cuts.append("first")):
            pytest.fail("it has no timer")
    with Deadline(0.02, cut.set):
        async with asyncio.timeout(20):
            await cut.wait()


def test_closed_loops_are_let_go() -> None:
    left = WeakSet[asyncio.AbstractEventLoop]()

    async def suspended() -> None:
        with Deadline(1_000, list):
            await asyncio.sleep(1_000)

    for _ in range(5):
        loop = asyncio.new_event_loop()
        left.add(loop)
        task = loop.create_task(suspended())
        loop.run_until_complete(asyncio.wait({task}, timeout=0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
    del loop, task
    gc.collect()
    assert len(left) <= 1


# --- within ---


async def test_a_thousand_works_take_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)

    async def work() -> str:
        return "done"

    assert {await within(10, work()) for _ in range(1_000)} == {"done"}
    assert len(timers.set) == 1


async def test_work_that_waits_goes_on_where_it_was() -> None:
    async def work() -> str:
        with pytest.raises(LookupError, match="lent out"):
            await failing()
        await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.sleep(0.01, "done"), 1)

    async def failing() -> None:
        await asyncio.sleep(0)
        raise LookupError("lent out")

    assert await within(5, work()) == "done"


async def test_work_that_takes_too_long_is_cancelled() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("left")

    with pytest.raises(TimeoutError):
        await within(0.02, work())
    assert ended == ["left"]


@pytest.mark.parametrize("limit", (0.02, None))
async def test_work_with_a_shorter_limit_of_its_own_ends_by_that(limit: float | None) -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(limit):
                await asyncio.sleep(0.05)
        except TimeoutError:
            return "its own"
        return "none"

    assert await within(5, work()) == ("none" if limit is None else "its own")


async def test_a_cancellation_reaches_the_work_and_its_caller() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(0)  # what it does then may wait too
            ended.append("left")
            raise

    waiting = asyncio.create_task(within(10, work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cancelled", "left"]


async def test_work_that_fails_before_it_waits_fails_its_caller() -> None:
    async def work() -> None:
        raise LookupError("refused")

    with pytest.raises(LookupError, match="refused"):
        await within(5, work())
