"""The concurrency that a worker finds out by itself, against a model of what handlers wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry, WorkerSettings
from holdfast.errors import ConfigurationError
from holdfast.postgres.delivery import Delivery
from holdfast.worker.auto_concurrency import LATE, LEAST, START, AutoConcurrency, Reading
from holdfast.worker.concurrency import Concurrency
from holdfast.worker.memory import share_left
from holdfast.worker.queues import HandlerQueue, queues_of
from holdfast.worker.settler import Settler

TICK = 0.05


@dataclass
class Model:
    """A worker with a backlog: handlers await for `takes` seconds, and the loop ends at most `pace` in a second.

    `pool` is how many of them what they wait for serves at once.
    """

    takes: float
    pace: float = 20_000.0
    pool: int = 10**9
    _owed: float = 0.0

    def reading(self, limit: int) -> Reading:
        wanted = min(limit, self.pool) / self.takes
        rate = min(wanted, self.pace)
        self._owed += rate * TICK
        handled, self._owed = int(self._owed), self._owed % 1
        return Reading(TICK, handled, True, busy=rate / self.pace)

    def limit_after(self, auto: AutoConcurrency, seconds: float) -> int:
        for _ in range(round(seconds / TICK)):
            auto.observe(self.reading(auto.limit))
        return auto.limit


readings = st.builds(
    Reading,
    seconds=st.floats(0.001, 5.0),
    handled=st.integers(0, 5_000),
    full=st.booleans(),
    busy=st.floats(0.0, 1.5),
    late=st.floats(0.0, 2.0),
    slow_settle=st.booleans(),
    little_memory=st.booleans(),
)


@given(st.integers(1, 10_000), st.lists(readings, max_size=200))
def test_bounds(most: int, seen: list[Reading]) -> None:
    """Whatever happens it stays within its bounds, and grows only for a handler that is full (LSN-15)."""
    auto = AutoConcurrency(most)
    for reading in seen:
        before = auto.limit
        auto.observe(reading)
        assert min(LEAST, most) <= auto.limit <= most
        if auto.limit > before:
            assert reading.full and reading.late <= LATE and not (reading.slow_settle or reading.little_memory)
            assert auto.limit <= before * 2
        assert auto.limit == before or auto.cause


def test_one_strain_is_one_step() -> None:
    """A settle that takes a second too long is seen at many looks, and costs a quarter of the places (LSN-15)."""
    auto = AutoConcurrency(500)
    for _ in range(40):
        auto.observe(Reading(0.02, 0, True, slow_settle=True))
    assert (auto.limit, auto.cause) == (75, "the database answers slowly")
    for _ in range(1_000):
        auto.observe(Reading(0.02, 0, True, slow_settle=True))
    assert auto.limit == LEAST


def test_memory_takes_back_growth_alone() -> None:
    """A machine that is always nearly full runs what a worker starts with (LSN-15)."""
    auto = AutoConcurrency(500)
    assert Model(takes=0.02).limit_after(auto, 10.0) > START
    for _ in range(1_000):
        auto.observe(Reading(0.02, 100, True, little_memory=True))
    assert auto.limit == START


def test_an_old_rate_judges_nothing() -> None:
    """Growth is compared with the rate of just before it, not with that of another hour (LSN-15)."""
    auto = AutoConcurrency(500)
    auto.observe(Reading(1.0, 3_000, True))
    assert auto.limit == 2 * START
    auto.observe(Reading(3_600.0, 0, False))
    auto.observe(Reading(1.0, 600, True))  # much less than before: another load
    assert auto.limit == 4 * START


@given(st.floats(0.002, 0.5), st.integers(2_000, 40_000))
def test_handlers_that_wait_get_what_they_need(takes: float, pace: int) -> None:
    """With a backlog it ends where the loop is busy, or at the bound (LSN-15)."""
    model = Model(takes, pace)
    limit = model.limit_after(AutoConcurrency(1_000), 60.0)
    assert limit >= min(0.85 * model.pace * takes, 1_000)
    assert limit <= max(START, 2.3 * model.pace * takes)


def test_the_first_backlog_finds_its_places_soon() -> None:
    """While all that is added is of use, a turn of each place is enough to double them (LSN-15)."""
    auto, takes = AutoConcurrency(1_000), 0.005
    looks = 0
    while auto.limit < 4 * START:
        auto.observe(Reading(0.01, int(auto.limit * 0.01 / takes), True, busy=0.3))
        looks += 1
    assert looks <= 2  # each place has had two turns at a look


def test_a_slow_moment_at_the_start_is_no_verdict() -> None:
    """That growth was in vain is said after three turns of each place, also at the start; then they return (LSN-15)."""
    auto = AutoConcurrency(1_000)
    auto.observe(Reading(0.01, START, True))
    assert auto.limit == 2 * START
    auto.observe(Reading(0.03, 2 * START, True))  # one turn, and fewer in a second than before
    assert auto.limit == 2 * START and auto.starting
    auto.observe(Reading(0.01, 4 * START, True))
    assert auto.limit == 4 * START
    auto.observe(Reading(0.5, 12 * START, True))
    assert auto.limit == 2 * START and not auto.starting
    auto.observe(Reading(1.0, 3 * START, True))  # less than three turns, after the start
    assert auto.limit == 2 * START


@given(st.integers(10, 80), st.floats(0.002, 0.02))
def test_more_in_vain_is_taken_back(pool: int, takes: float) -> None:
    """Handlers that wait for a small pool do not get more places to wait in; trying costs little time (LSN-15)."""
    model, auto = Model(takes, pool=pool), AutoConcurrency(1_000)
    above = 0
    for _ in range(2_000):
        auto.observe(model.reading(auto.limit))
        above += auto.limit > START
        assert auto.limit <= 2 * START
    assert above < 2_000 / 4


def test_it_grows_again() -> None:
    """A loop that was blocked is left with less, and gets it back when it is free (LSN-15)."""
    auto, model = AutoConcurrency(500), Model(takes=0.02)
    for _ in range(50):
        auto.observe(Reading(0.5, 10, True, late=0.45))
    assert auto.limit == LEAST
    assert model.limit_after(auto, 15.0) > 300


def delivery(payload: str) -> Delivery:
    made = Delivery.__new__(Delivery)
    made.payload = payload
    return made


async def coroutine(event: EventEnvelope) -> None: ...


def blocking(event: EventEnvelope) -> None: ...


async def several(events: list[EventEnvelope]) -> None: ...


def queues(settings: WorkerSettings) -> dict[str, HandlerQueue]:
    registry = HandlerRegistry()
    registry.add("a.open", ("x",), coroutine)
    registry.add("a.limited", ("x",), coroutine, concurrency=120)
    registry.add("a.small", ("x",), coroutine, concurrency=3)
    registry.add("a.blocking", ("x",), blocking)
    registry.add("a.several", ("x",), several, batch=10)
    return queues_of(list(registry), settings)


def places(found: dict[str, HandlerQueue], limit: int) -> dict[str, int]:
    for queue in found.values():
        queue.weigh([delivery("{}")])
        queue.adjust(limit)
    return {name: queue.free * queue.size for name, queue in found.items()}


def test_each_handler_keeps_its_own_limit() -> None:
    """A handler's limit, threads and batches stay as they are (LSN-15, LSN-10)."""
    found = queues(WorkerSettings(concurrency_at_most=400, threads=4))
    rest = {"a.small": 3, "a.blocking": 4}
    assert places(found, START) == {"a.open": 100, "a.limited": 100, "a.several": 100, **rest}
    assert places(found, 400) == {"a.open": 400, "a.limited": 120, "a.several": 100, **rest}
    assert places(found, LEAST) == {"a.open": 10, "a.limited": 10, "a.several": 100, **rest}


def test_a_number_is_that_number() -> None:
    """Nothing changes it (LSN-15)."""
    found = queues(WorkerSettings(concurrency=50))
    assert places(found, 400)["a.open"] == places(found, LEAST)["a.open"] == 50
    assert not any(queue.adjustable for queue in found.values())


def test_large_payloads_do_not_run_by_the_hundred() -> None:
    """Above what a worker starts with, the payloads that run have a bound in characters too (LSN-15)."""
    queue = queues(WorkerSettings())["a.open"]
    queue.adjust(500)
    for _ in range(3):
        queue.weigh([delivery("x" * 256 * 1024)])
    assert queue.free == 128


def test_runners_beyond_the_limit_are_noticed() -> None:
    """When the number shrinks, no runner begins with another event, and no more are claimed (LSN-15)."""
    queue = queues(WorkerSettings())["a.open"]
    for _ in range(50):
        queue.take()
    queue.adjust(LEAST)
    assert (queue.surplus, queue.free, queue.room(500)) == (True, 0, 0)


def test_a_slow_handler_is_full_without_rows_that_wait() -> None:
    """Of a handler that takes seconds nothing is claimed ahead; it is full all the same, and can grow (LSN-15)."""
    queue = queues(WorkerSettings())["a.open"]
    queue.adjust(LEAST)
    for _ in range(LEAST):
        assert not queue.is_full(LEAST)
        queue.take()
    assert queue.is_full(LEAST) and queue.room(500) == 0


class Slow:
    """A settler whose database does not answer."""

    full = False
    asking_for = 5.0


async def test_what_suffers_is_seen_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that does not answer takes places from the handlers that run, and a warning says why (LSN-15)."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    queue = queues(WorkerSettings())["a.open"]
    found = Concurrency(WorkerSettings(), cast("Settler", Slow()), told.put_nowait, lambda queue: None)
    monkeypatch.setattr("holdfast.worker.auto_concurrency._RECOVERY", 0.0)
    queue.weigh([delivery("{}")])
    queue.take()
    found.watch(queue)
    notice = await asyncio.wait_for(told.get(), 5)
    assert (notice.level, notice.name) == ("warning", "concurrency_changed")
    assert notice.details["because"] == "the database answers slowly"
    assert notice.details["handler_name"] == "a.open"
    assert queue.free < START / 2
    queue.give()


async def test_growth_is_judged_by_its_own_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two handlers the one that is full gets more, however fast the other is; memory can forbid it (LSN-15)."""
    quick, slow = (queues(WorkerSettings())[name] for name in ("a.limited", "a.open"))
    settler = cast("Settler", type("Fast", (), {"full": False, "asking_for": 0.0}))
    found = Concurrency(WorkerSettings(), settler, lambda fact: None, lambda queue: None)
    for queue in (quick, slow):
        queue.weigh([delivery("{}")])
        found.watch(queue)
    left = 0.01
    monkeypatch.setattr("holdfast.worker.concurrency.share_left", lambda: left)

    async def handle_until(reached: Callable[[], bool], looks: int) -> bool:
        for _ in range(looks):
            while slow.free:
                slow.take()
            quick.handled += 1_000
            slow.handled += slow.running // 4
            if reached():
                return True
            await asyncio.sleep(0.005)
        return False

    quick.take()
    assert not await handle_until(lambda: slow.running > START, 60)
    left = 0.5
    found._memory_at = -1e9
    assert await handle_until(lambda: slow.running > 3 * START, 2_000)
    assert quick.free == START - 1
    for _ in range(slow.running):
        slow.give()
    quick.give()


@pytest.mark.parametrize("wrong", [0, 10_001, "many", True, None])
def test_wrong_numbers(wrong: object) -> None:
    """The error names both ways to write it."""
    with pytest.raises(ConfigurationError, match='10,000, or "auto"'):
        WorkerSettings(concurrency=wrong)  # type: ignore[arg-type]


def test_memory_left(tmp_path: Path) -> None:
    """A container's limit counts, without the files that the kernel can drop."""
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  500 kB\n")
    assert share_left(tmp_path, machine) == 0.5
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 100\n")
    assert share_left(tmp_path, machine) == pytest.approx(0.2)
    (tmp_path / "memory.max").write_text("max\n")
    assert share_left(tmp_path, machine) == 0.5
    assert share_left(tmp_path / "none", tmp_path / "nothing", tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/app.slice/worker.service", "app.slice/worker.service", ("max", "current", "inactive_file")),
        ("0::/app.slice/worker.service", "app.slice", ("max", "current", "inactive_file")),
        ("3:cpu,memory:/worker", "memory/worker", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
        ("3:memory:/elsewhere", "memory", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")),
    ],
)
def test_memory_left_of_the_own_group(tmp_path: Path, line: str, folder: str, files: tuple[str, str, str]) -> None:
    """A limit of the service counts, and one around it, in both versions of control groups."""
    own, group = tmp_path / "cgroup", tmp_path / "group" / folder
    own.write_text(f"1:name=systemd:/\n{line}\n")
    group.mkdir(parents=True)
    most, used, reclaimable = files
    (group / f"memory.{most}").write_text("1000\n")
    (group / f"memory.{used}").write_text("900\n")
    (group / "memory.stat").write_text(f"{reclaimable} 100\n")
    assert share_left(tmp_path / "group", tmp_path / "nothing", own) == pytest.approx(0.2)
