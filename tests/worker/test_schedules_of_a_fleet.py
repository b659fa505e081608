"""Five instances, each with a clock of its own that is set now and then, killed, frozen, cut off and started again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from tests.servers import used
from tests.worker.schedules import slots
from tests.worker.support import WorkerProcess, drained, process, terminate, until

INSTANCES = 5
# What is done to each of them but one. A new process takes a second of the processor, and most of this test's time.
DISTURBANCES = (("kill", "freeze"), ("freeze", "stop"), ("kill", "freeze"), ("freeze", "kill"))
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))), None)
STEPS = ("+0", "-1h", "+1h", "-3d", "+90s", "+5y")


class Clock:
    """The clock of one machine, as far as its programs can tell; the monotonic one goes on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set("+0")

    def set(self, offset: str) -> None:
        partial = self._file.with_suffix(".new")
        partial.write_text(offset + "\n")
        partial.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        if FAKETIME is None:
            return {}
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }


class Instance:
    """One place in the fleet: a process, and another one when that has died."""

    def __init__(self, dsn: str, clock: Clock, look: asyncpg.Pool) -> None:
        self._dsn = dsn
        self.clock = clock
        self._look = look
        self.worker: WorkerProcess | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        # The leases of those that are killed must not keep their events for long.
        settings = {"lease": 2.0, "poll_interval": 0.5, "grace": 1.0, "connections": 2}
        running = process(self._dsn, "ticking", environment=self.clock.environment, **settings)
        self.worker = await self._stack.enter_async_context(running)

    async def end(self) -> None:
        await self._stack.aclose()
        self._stack, self.worker = contextlib.AsyncExitStack(), None

    async def replace(self, number: signal.Signals) -> None:
        assert self.worker is not None
        self.worker.signal(number)
        await self.worker.end()
        await self.end()
        await self.start()

    async def freeze(self) -> None:
        assert self.worker is not None
        self.worker.signal(signal.SIGSTOP)
        since = await now(self._look)
        fired = "SELECT max(last_slot) > $1 FROM core.schedules"
        await until(lambda: self._look.fetchval(fired, since), what="another one fires without it")
        self.worker.signal(signal.SIGCONT)

    async def disturb(self, acts: tuple[str, ...], dice: random.Random) -> None:
        for act in acts:
            self.clock.set(dice.choice(STEPS))
            if act == "freeze":
                await self.freeze()
            else:
                await self.replace(signal.SIGKILL if act == "kill" else signal.SIGTERM)


async def cut(conn: asyncpg.Connection) -> None:
    """End the connections on which schedules are fired, again and again."""
    while True:
        await terminate(conn, "schedule")
        await asyncio.sleep(0.7)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_each_slot_once(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Kill -9, SIGTERM, SIGSTOP, cut connections and stepped clocks; every second has its event, and one (IDM-4)."""
    await conn.execute("CREATE TABLE ticks (schedule text, slot timestamptz)")
    look = await asyncpg.create_pool(dsn, min_size=1, max_size=INSTANCES)
    fleet = [Instance(dsn, Clock(tmp_path / f"clock-{n}"), look) for n in range(INSTANCES)]
    for instance, offset in zip(fleet, STEPS, strict=False):
        instance.clock.set(offset)
    try:
        await asyncio.gather(*(instance.start() for instance in fleet))
        first = {name: since for name, since in await conn.fetch("SELECT name, declared_at FROM core.schedules")}
        cutting = asyncio.create_task(cut(conn))
        disturbing = zip(fleet[1:], DISTURBANCES, strict=True)
        await asyncio.gather(*(each.disturb(acts, random.Random(n)) for n, (each, acts) in enumerate(disturbing)))
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        # Nobody for a while, so that each has a slot to make up for; the first to come back does.
        await asyncio.gather(*(instance.end() for instance in fleet))
        owed = "SELECT bool_and(next_slot < clock_timestamp()) FROM core.schedules WHERE every IS NOT NULL"
        await until(lambda: conn.fetchval(owed), what="slots that nobody fires")
        down = await now(conn)
        await asyncio.gather(*(instance.start() for instance in fleet[:2]))
        fired = "SELECT min(last_slot) > $1 FROM core.schedules WHERE every IS NOT NULL"
        await until(lambda: conn.fetchval(fired, down), what="slots after the outage")
        await conn.execute("SELECT core.schedule_change_state(name, 'pause', 'the test') FROM core.schedules")
        await drained(conn)
    finally:
        await asyncio.gather(*(instance.end() for instance in fleet))
        await look.close()
    for name, every in (("clock.second", 1), ("clock.other", 2), ("clock.minute", 60)):
        found = await slots(conn, name)
        last, fired_count = await conn.fetchrow("SELECT last_slot, fired FROM core.schedules WHERE name = $1", name)
        assert found == every_slot(first[name], last, every), name
        assert fired_count == len(found)
        handled = await conn.fetch("SELECT slot FROM ticks WHERE schedule = $1 ORDER BY slot", name)
        assert [row["slot"] for row in handled] == found, f"{name}: each slot is handled once"
        print(f"{name}: {len(found)} slots, each fired and handled once")
    if FAKETIME is not None:
        used("libfaketime")
    else:
        pytest.skip("without clock steps: libfaketime is not installed (apt-get install libfaketime)")


async def now(conn: asyncpg.Connection | asyncpg.Pool) -> datetime:
    moment: datetime = await conn.fetchval("SELECT clock_timestamp()")
    return moment


def every_slot(since: datetime, last: datetime | None, every: int) -> list[datetime]:
    if last is None:
        return []
    count = int((last - since).total_seconds() // every)
    return [last - n * timedelta(seconds=every) for n in range(count, -1, -1)]
