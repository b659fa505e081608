"""Deadlines: who is cut and when, how many timers that takes, and the time of work that may have to wait."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

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


async def test_a_block_is_cut_when_its_time_is_over_and_only_once() -> None:
    began, cuts = time.monotonic(), list[float]()
    with Deadline(0.05, lambda: cuts.append(time.monotonic() - began)):
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.05)
    (cut,) = cuts
    assert 0.045 < cut < 0.2


async def test_a_block_that_has_ended_is_not_cut() -> None:
    cuts: list[str] = []
    with Deadline(0.02, lambda: cuts.append("ended")):
        pass
    with Deadline(0.02, lambda: cuts.append("failed")), pytest.raises(ValueError, match="its own"):
        raise ValueError("its own")
    await asyncio.sleep(0.06)
    assert cuts == []


async def test_blocks_inside_and_beside_each_other_have_each_their_own_time() -> None:
    cuts: list[str] = []

    async def block(name: str, seconds: float) -> None:
        with Deadline(seconds, lambda: cuts.append(name)):
            await asyncio.sleep(0.15)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(block("late", 0.1))
        tasks.create_task(block("early", 0.03))
        tasks.create_task(block("never", 10))
        with Deadline(0.12, lambda: cuts.append("outer")), Deadline(0.06, lambda: cuts.append("inner")):
            await asyncio.sleep(0.15)
    assert cuts == ["early", "inner", "late", "outer"]


async def test_a_block_that_begins_when_the_timer_of_earlier_ones_is_set_is_cut_in_time() -> None:
    cuts: list[str] = []
    with Deadline(0.05, lambda: cuts.append("first")):
        pass
    await asyncio.sleep(0.03)
    with Deadline(0.05, lambda: cuts.append("second")):
        await asyncio.sleep(0.035)
        assert cuts == []  # the timer of the first has rung
        await asyncio.sleep(0.06)
    assert cuts == ["second"]


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


# --- within ---


async def test_work_that_need_not_wait_takes_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)

    async def work() -> str:
        return "done"

    assert await within(0.01, work()) == "done"
    assert timers.set == []


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
