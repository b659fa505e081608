"""Wake-ups of the claimer: none is lost between two looks, and a flood of idle ones is slowed down."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from holdfast.worker.wakeups import Wakeups


async def test_a_wakeup_before_the_wait_ends_it_at_once() -> None:
    """What arrives while the claimer looks is not slept over (LSN-1)."""
    woken = Wakeups()
    woken.wake()
    assert woken.pending
    async with asyncio.timeout(5):
        assert await woken.wait(60)
    assert woken.take() is False
    assert not woken.pending
    assert not await woken.wait(0.001)


async def test_one_of_several_wakeups_asks_for_a_rescan() -> None:
    """A rescan that was asked for is not forgotten for a later wake-up without one (LSN-2)."""
    woken = Wakeups()
    woken.look_again()
    woken.wake()
    assert woken.take() is True
    woken.wake()
    assert woken.take() is False


async def test_a_flood_of_wakeups_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twenty in a second that find nothing cost no pause; the others do (LSN-1)."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("holdfast.worker.wakeups.asyncio.sleep", sleep)
    woken = Wakeups()
    for _ in range(20):
        await woken.temper()
    assert pauses == []
    await woken.temper()
    assert pauses == [0.05]


def test_a_second_retry_after_the_alarm_has_run() -> None:
    """Also on uvloop, whose timers do not know their time once they have run (LSN-3)."""

    async def twice() -> bool:
        wakeups = Wakeups()
        wakeups.wake_in(0.001)
        first = await wakeups.wait(5)
        wakeups.take()
        wakeups.wake_in(0.001)
        return first and await wakeups.wait(5)

    assert uvloop.run(twice())
