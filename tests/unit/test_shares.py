"""Threads and sessions shared by handlers, and how much room a handler has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry, WorkerSettings
from holdfast.worker.queues import queues_of
from holdfast.worker.shares import Shares

STEPS = st.lists(st.tuples(st.sampled_from(["take", "give", "hang"]), st.sampled_from("abc")), max_size=80)


@given(STEPS, st.integers(1, 6), st.booleans())
def test_a_handler_that_holds_none_is_served(steps: list[tuple[str, str]], size: int, overflow: bool) -> None:
    """LSN-17: whatever the others hold, threads have one for it; of the sessions the last one is not for the greedy."""
    reserve = 0 if overflow or size == 1 else 1
    shares, held, hanging = Shares(size, reserve=reserve, overflow=overflow), dict.fromkeys("abc", 0), 0
    for step, name in steps:
        if step == "take" and shares.free(name):
            shares.take(name)
            held[name] += 1
        elif step == "give" and held[name]:
            shares.give(name)
            held[name] -= 1
        elif step == "hang" and hanging < sum(held.values()):
            shares.overrun(1)
            hanging += 1
        elif hanging:
            shares.overrun(-1)
            hanging -= 1
        taken = sum(held.values())
        assert taken <= 2 * size + (len(held) if overflow else 0)
        for each, count in held.items():
            assert shares.held(each) == count
            if count == 0 and overflow:
                assert shares.free(each) >= 1
    if not overflow and size > 1:
        shares = Shares(size, reserve=1)
        while shares.free("greedy"):
            shares.take("greedy")
        assert shares.held("greedy") == size - 1
        assert shares.spent
        assert shares.free("lone") == 1


def test_room_of_each_handler() -> None:
    """LSN-17: `concurrency` is what one handler may run; threads and sessions limit those that need them."""
    registry = HandlerRegistry()

    async def coroutine(event: EventEnvelope) -> None: ...

    async def transactional(event: EventEnvelope, tx: object) -> None: ...

    def blocking(event: EventEnvelope) -> None: ...

    registry.add("a.coroutine", ("x",), coroutine)
    registry.add("a.transactional", ("x",), transactional)
    registry.add("a.transactional_too", ("x",), transactional)
    registry.add("a.blocking", ("x",), blocking)
    queues = queues_of(list(registry), WorkerSettings(concurrency=50, threads=4, connections=3))
    assert {name: queue.room(500) for name, queue in queues.items()} == {
        "a.coroutine": 50,
        "a.transactional": 3,
        "a.transactional_too": 3,
        "a.blocking": 4,
    }
    for _ in range(4):
        queues["a.coroutine"].take()
        queues["a.blocking"].take()
    queues["a.transactional"].take()
    assert {name: queue.room(500) for name, queue in queues.items()} == {
        "a.coroutine": 46,
        "a.transactional": 1,
        "a.transactional_too": 2,
        "a.blocking": 0,
    }
