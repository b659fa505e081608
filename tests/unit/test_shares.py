"""Threads and sessions shared by handlers, and how much room a handler has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry, WorkerSettings
from holdfast.postgres.delivery import Delivery
from holdfast.worker.queues import queues_of
from holdfast.worker.shares import Shares

QUICK, SLOW = 0.005, 1.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "quick", "slow", "fail", "linger", "overrun"]), st.sampled_from("abc")),
    max_size=80,
)


def all_of(shares: Shares, handler: str) -> int:
    """Take all that the handler may have; return how many it holds then."""
    while shares.free(handler):
        shares.take(handler)
    return shares.held(handler)


def known(shares: Shares, handler: str, seconds: float, *, failed: bool = False) -> None:
    """Let the handler finish a few deliveries."""
    for _ in range(5):
        shares.take(handler)
        shares.ended(handler, seconds, False, failed)
        shares.give(handler)


@given(STEPS, st.integers(1, 6), st.booleans())
def test_never_more_than_promised(steps: list[tuple[str, str]], size: int, overflow: bool) -> None:
    """As many for the quick as for the slow; threads also have one for each handler that holds none (LSN-17)."""
    shares = Shares(size, handlers=3, overflow=overflow)
    held, lingering, hanging = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), 0
    for step, name in steps:
        if step == "take":
            if shares.free(name):
                shares.take(name)
                held[name] += 1
        elif step == "overrun":
            if overflow:
                shares.overrun(1)
                hanging += 1
        elif step == "linger":
            if lingering[name] < held[name]:
                shares.linger(name)
                lingering[name] += 1
        elif held[name]:
            shares.ended(name, SLOW if step == "slow" else QUICK, lingering[name] == held[name], step == "fail")
            lingering[name] = min(lingering[name], held[name] - 1)
            shares.give(name)
            held[name] -= 1
        shares.learn()
        assert shares.taken == sum(held.values()) <= 2 * size + min(hanging, size) + (len(held) if overflow else 0)
        for each, count in held.items():
            assert shares.held(each) == count
            if count == 0 and overflow:
                assert shares.free(each) >= 1


@pytest.mark.parametrize("handlers", [1, 5])
def test_slow_beside_quick(handlers: int) -> None:
    """The slow use all of one half but the last, however many they are, and the quick have the other half (LSN-17)."""
    shares = Shares(10, handlers=6)
    for number in range(handlers):
        shares.take(f"slow{number}")
        shares.linger(f"slow{number}")
    for number in range(handlers):
        all_of(shares, f"slow{number}")
    assert shares.taken == 9
    assert shares.spent
    assert shares.free("quick") == 1
    known(shares, "quick", QUICK)
    assert all_of(shares, "quick") == 9
    assert shares.free("lone") == 1


def test_hanging_one_after_the_other() -> None:
    """Those of which it is not known yet count as slow, before another one has taken what they will need (LSN-17)."""
    shares = Shares(10, handlers=6)
    for number in range(5):
        shares.take(f"slow{number}")
    for number in range(5):
        shares.linger(f"slow{number}")
        all_of(shares, f"slow{number}")
    assert shares.taken == 9
    known(shares, "quick", QUICK)
    assert all_of(shares, "quick") == 9


def test_hanging_of_late() -> None:
    """A quick handler that begins to hang gives up its half as soon as that shows (LSN-17)."""
    shares = Shares(10)
    known(shares, "hangs", QUICK)
    known(shares, "quick", QUICK)
    assert all_of(shares, "hangs") == 9
    assert all_of(shares, "quick") == 1
    for _ in range(9):
        shares.linger("hangs")
    assert all_of(shares, "quick") == 9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the shares see."""
    now = [1000.0]
    monkeypatch.setattr("holdfast.worker.shares.time.monotonic", lambda: now[0])
    return now


def test_failing_beside_quick(clock: list[float]) -> None:
    """A handler that fails all the time holds one session while others hold some, and many otherwise (LSN-17)."""
    shares = Shares(10)
    known(shares, "quick", QUICK)
    known(shares, "fails", QUICK, failed=True)
    shares.take("quick")
    clock[0] += 4 * QUICK
    assert all_of(shares, "fails") == 1
    shares.give("quick")
    assert all_of(shares, "fails") == 9
    assert shares.free("quick") == 1
    assert not shares.rivals("quick", "fails")
    known(shares, "fails", QUICK)
    assert shares.rivals("quick", "fails")


@pytest.mark.parametrize("failing", [1, 5])
def test_failing_handlers_rest(clock: list[float], failing: int) -> None:
    """Beside a busy handler all those that fail hold less than half a session, and rest for no one else (LSN-17)."""
    shares = Shares(10)
    known(shares, "quick", QUICK)
    names = [f"fails{number}" for number in range(failing)]
    for name in names:
        known(shares, name, QUICK, failed=True)
    clock[0] += 10
    shares.take("quick")
    held = 0
    for _ in range(1000):
        for name in names:
            if shares.free(name):
                held += 1
                shares.take(name)
                shares.ended(name, QUICK, False, True)
                shares.give(name)
                assert not shares.rivals("quick", name)
        clock[0] += QUICK
    assert 100 < held < 500
    shares.give("quick")
    assert all(shares.free(name) for name in names)


def test_slow_commits() -> None:
    """Where every delivery takes a while, long is what takes longer than the others (LSN-17)."""
    shares = Shares(10)
    known(shares, "quick", 0.15)
    known(shares, "slow", SLOW)
    shares.learn()
    assert all_of(shares, "slow") == 9
    assert all_of(shares, "quick") == 9


def test_sessions_that_the_server_refuses() -> None:
    """Where there can be no more, the last one is still for a handler that holds none (LSN-17)."""
    shares = Shares(10)
    known(shares, "slow", SLOW)
    shares.refused()
    assert all_of(shares, "slow") == 9
    assert shares.free("quick") == 1


def test_one_handler_has_all() -> None:
    shares = Shares(10, handlers=1)
    assert all_of(shares, "alone") == 10


def claimed(payload: str) -> Delivery:
    """A delivery, as far as its size is concerned."""
    delivery = Delivery.__new__(Delivery)
    delivery.payload = payload
    return delivery


def test_a_claim_is_bounded_in_characters_too() -> None:
    """All handlers wait for a claim, so one of large payloads has few rows; the first one, too (LSN-16, LSN-17)."""
    registry = HandlerRegistry()

    async def coroutine(event: EventEnvelope) -> None: ...

    registry.add("a.coroutine", ("x",), coroutine)
    queue = queues_of(list(registry), WorkerSettings(concurrency=100))["a.coroutine"]
    assert queue.room(500) == 9, "of a size that is not known"
    queue.weigh([claimed("x" * 400_000)])
    assert queue.room(500) == 3
    for _ in range(20):
        queue.weigh([claimed("{}")])
    assert queue.room(500) == 100


@pytest.mark.parametrize("concurrency", [5, 100])
def test_a_burst_is_claimed_in_whole_batches(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which a handler had nothing to do does not count against its pace.

    Nor does a pace of long ago count: what comes next may be slow, and is left to other workers (LSN-17, LSN-16).
    """
    now = 1_000.0
    monkeypatch.setattr("holdfast.worker.queues.time.monotonic", lambda: now)
    registry = HandlerRegistry()

    async def coroutine(event: EventEnvelope) -> None: ...

    registry.add("a.coroutine", ("x",), coroutine)
    queue = queues_of(list(registry), WorkerSettings(concurrency=concurrency))["a.coroutine"]
    claims = []
    for pause in (60.0, 0.5, 60.0):
        now += pause  # nothing to do
        for _ in range(30):
            claims.append(room := queue.room(500))
            queue.feed([claimed("{}") for _ in range(room)])
            while queue.waiting:
                queue.take()
                now += 0.0001  # ten thousand a second
                queue.waiting.popleft()
                queue.finished += 1
                queue.give()
            now += 0.005  # until the next claim is answered
    assert claims[0] < claims[20] == 500
    assert claims[30] == 500, "after a short pause"
    assert claims[60] == concurrency and claims[80] == 500, "after a long one"
    queue.feed([claimed("{}")])
    queue.waiting.clear()  # given back
    assert queue.room(500) == 500
    now += 60.0
    assert queue.room(500) == concurrency, "after a long one in which nothing ran"


def test_room_of_each_handler() -> None:
    """`concurrency` is what one handler may run; threads and sessions limit those that need them (LSN-17)."""
    registry = HandlerRegistry()

    async def coroutine(event: EventEnvelope) -> None: ...

    async def transactional(event: EventEnvelope, tx: object) -> None: ...

    def blocking(event: EventEnvelope) -> None: ...

    registry.add("a.coroutine", ("x",), coroutine)
    registry.add("a.transactional", ("x",), transactional)
    registry.add("a.transactional_too", ("x",), transactional)
    registry.add("a.blocking", ("x",), blocking)
    queues = queues_of(list(registry), WorkerSettings(concurrency=50, threads=4, connections=3))
    known(queues["a.transactional"].shares or Shares(0), "a.transactional", QUICK)
    for queue in queues.values():
        queue.weigh([claimed("{}")])
    assert {name: queue.room(500) for name, queue in queues.items()} == {
        "a.coroutine": 50,
        "a.transactional": 3,
        "a.transactional_too": 1,
        "a.blocking": 4,
    }
    for _ in range(4):
        queues["a.coroutine"].take()
        queues["a.blocking"].take()
    queues["a.transactional"].take()
    assert {name: queue.room(500) for name, queue in queues.items()} == {
        "a.coroutine": 46,
        "a.transactional": 1,
        "a.transactional_too": 1,
        "a.blocking": 0,
    }
