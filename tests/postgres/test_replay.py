"""What operators do with single events: replay in place, and cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast.failure import FailureCycle
from holdfast.worker.lease_keeper import digest_of
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, NOBODY, InFlight, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres


@pytest.fixture
async def other(shared_dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(shared_dsn)
    yield Outbox(connection)
    await connection.close()


@pytest.fixture
async def heard(shared_dsn: str) -> AsyncIterator[list[tuple[str, str]]]:
    """What listeners on the channels of generations 0, 2 and 3 hear."""
    notifications: list[tuple[str, str]] = []
    connection = await asyncpg.connect(shared_dsn)
    for channel in (CHANNEL, "outbox_gen_2", "outbox_gen_3", "outbox_slow"):
        await connection.add_listener(channel, lambda _c, _pid, name, text: notifications.append((name, str(text))))
    yield notifications
    await connection.close()


async def settled(notifications: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    async with asyncio.timeout(5):
        while len(notifications) < count:  # noqa: ASYNC110 - the list is filled by asyncpg
            await asyncio.sleep(0.005)
    return [each for each in notifications if each[1].startswith(("rescan", "cancel"))]


async def in_state(outbox: Outbox, state: str) -> UUID:
    if state == "pending":
        return await outbox.insert()
    if state == "missing":
        return NOBODY
    held = await outbox.held()
    if state == "delivered":
        await outbox.deliver(held)
    elif state == "failed":
        await outbox.fail(held)
    elif state == "waiting for a retry":
        await outbox.retry(held, delay=60)
    elif state in ("cancelled", "expired"):
        await outbox.fail(held, reason=state)
    elif state == "discarded":
        await outbox.fail(held)
        await outbox.connection.execute("UPDATE core.outbox SET deleted_at = now() WHERE id = $1", held.id)
    return held.id


STATES = ["pending", "in_flight", "waiting for a retry", "delivered", "cancelled", "expired", "discarded", "missing"]


@pytest.mark.parametrize("state", STATES)
async def test_what_has_not_failed_is_not_replayed(outbox: Outbox, state: str) -> None:
    """The answer is 0, and the row is as it was (E8, DLQ-3)."""
    id = await in_state(outbox, state)
    before = None if state == "missing" else await outbox.row(id)
    assert await outbox.replay(id) == 0
    if before is not None:
        assert await outbox.row(id) == before


async def test_a_failed_row_is_put_back_in_place(outbox: Outbox) -> None:
    """The cycle moves into the history, everything that identifies the event stays (E8, DLQ-3)."""
    held = await outbox.held(payload={"n": 1}, headers={"h": "1"}, idempotency_key="k", target=None)
    await outbox.retry(held, error="first")
    [held] = await outbox.hold(Lane(HANDLER))
    await outbox.fail(held, reason="max_deliveries", error="last words")
    before = await outbox.row(held.id)
    assert await outbox.replay(held.id, 0, "ann@example.org") == 1

    after = await outbox.row(held.id)
    moved = {name for name in after.keys() if after[name] != before[name]}  # noqa: SIM118 - a record, not a dict
    assert moved == {
        "status", "attempts", "last_error", "first_failed_at", "failure_history", "available_at", "settled_at",
        "failed_at", "failure_reason", "error_signature", "claimed_by",
    }  # fmt: skip
    cleared = ("last_error", "first_failed_at", "settled_at", "failed_at", "failure_reason", "error_signature")
    assert [after[name] for name in cleared] == [None] * len(cleared)
    assert (after["status"], after["attempts"]) == ("pending", 0)
    assert after["available_at"] <= await outbox.value("SELECT now()")

    [entry] = after["failure_history"]
    cycle = FailureCycle.model_validate(entry)
    assert (cycle.attempts, cycle.last_error, cycle.generation) == (2, "last words", 0)
    assert (cycle.first_failed_at, cycle.failed_at) == (before["first_failed_at"], before["failed_at"])
    assert (cycle.replayed_by, cycle.replayed_at) == ("ann@example.org", after["available_at"])
    assert entry["failure_reason"] == "max_deliveries"


async def test_a_failure_without_an_error_is_history_too(outbox: Outbox) -> None:
    """last_error is null on a bare reject (DLQ-3)."""
    held = await outbox.held()
    await outbox.fail(held, reason="rejected", error=None, signature=None)
    await outbox.replay(held.id)
    [entry] = (await outbox.row(held.id))["failure_history"]
    assert FailureCycle.model_validate(entry).last_error is None


async def test_a_replayed_row_is_claimed_by_its_handler_again(outbox: Outbox) -> None:
    """Only by the handler that failed it, from the first attempt on; and never split again (DLQ-3, LSN-7)."""
    id = await outbox.failed()
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe("shipping.send", EVENT)
    await outbox.replay(id)
    assert await outbox.split(LANE) == 0
    assert await outbox.claim() == []
    [claimed] = await outbox.claim(Lane(HANDLER))
    assert (claimed["id"], claimed["attempts"], claimed["failing_for"]) == (id, 1, None)


async def test_a_replay_of_what_was_handled_meanwhile_is_a_duplicate(outbox: Outbox) -> None:
    """The idempotency key is the same, so the inbox knows (DLQ-3, LSN-6)."""
    id = await outbox.failed(idempotency_key="k")
    await outbox.deliver(await outbox.held(idempotency_key="k"))
    await outbox.replay(id)
    [claimed] = await outbox.claim(Lane(HANDLER))
    assert (claimed["id"], claimed["handled"]) == (id, True)


@pytest.mark.parametrize(
    ("channel", "generation", "new_generation", "new_channel"),
    [
        (CHANNEL, 0, 3, "outbox_gen_3"),
        ("outbox_gen_2", 2, 3, "outbox_gen_3"),
        ("outbox_gen_2", 2, 0, CHANNEL),
        ("outbox_slow", 2, 3, "outbox_slow"),
        ("outbox_gen_2", 5, 3, "outbox_gen_2"),  # somebody chose that channel by name
    ],
)
async def test_generation_and_channel_move_with_a_replay(
    outbox: Outbox,
    heard: list[tuple[str, str]],
    channel: str,
    generation: int,
    new_generation: int,
    new_channel: str,
) -> None:
    """A generation's own channel follows it, a chosen one stays; the history says where it was (DLQ-3, GEN-1)."""
    await outbox.insert(channel=channel, generation=generation)
    [held] = await outbox.hold(channel=channel, generation=generation)
    await outbox.fail(held)
    heard.clear()
    assert await outbox.replay(held.id, new_generation) == 1
    row = await outbox.row(held.id)
    assert (row["generation"], row["channel"]) == (new_generation, new_channel)
    assert row["failure_history"][0]["generation"] == generation
    assert await settled(heard, 1) == [(new_channel, "rescan")]
    [claimed] = await outbox.claim(Lane(HANDLER), channel=new_channel, generation=new_generation)
    assert claimed["id"] == held.id


async def test_siblings_of_a_replayed_row_are_untouched(outbox: Outbox) -> None:
    """Each handler's delivery is its own (DLQ-3, LSN-7, E3)."""
    handlers = (HANDLER, "mail.thank", "shipping.send")
    for handler in handlers:
        await outbox.subscribe(handler, EVENT)
    origin = await outbox.insert(payload={"n": 1})
    assert await outbox.split(LANE) == 1
    held = {h: (await outbox.hold(Lane(h, handler=h)))[0] for h in handlers}
    await outbox.fail(held[HANDLER])
    await outbox.fail(held["mail.thank"])
    await outbox.deliver(held["shipping.send"])
    others = [origin, held["mail.thank"].id, held["shipping.send"].id]
    before = [await outbox.row(id) for id in others]
    assert await outbox.replay(held[HANDLER].id) == 1
    assert [await outbox.row(id) for id in others] == before
    row = await outbox.row(held[HANDLER].id)
    assert (row["status"], row["origin_id"], row["payload"]) == ("pending", origin, {"n": 1})
    assert await outbox.replay(origin) == 1, "the event's own id stands for its dead letters: the mail"
    assert (await outbox.row(held["mail.thank"].id))["status"] == "pending"


ERRORS = {
    "plain": "boom " * 2000,
    "three bytes a character": "\u20ac" * 2700,
    "four bytes a character": "\U0001f4a5" * 2040,
    "escaped twice as long": '"\\\n\t' * 2048,
    "escaped six times as long": "\x01" * 8192,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
async def test_the_history_is_bounded(outbox: Outbox, error: str) -> None:
    """At most 20 cycles and 64 KiB, whatever the errors were; the newest are kept, in order (D4, DLQ-3)."""
    id = await outbox.failed(error)
    for number in range(23):
        assert await outbox.replay(id, number, f"round {number}") == 1
        [held] = await outbox.hold(
            Lane(HANDLER), channel=f"outbox_gen_{number}" if number else CHANNEL, generation=number
        )
        await outbox.fail(held, error=error)
    history = (await outbox.row(id))["failure_history"]
    assert await outbox.value("SELECT octet_length(failure_history::text) FROM core.outbox WHERE id = $1", id) <= 65536
    assert 5 <= len(history) <= 20
    if error.isascii() and error.isprintable():
        assert len(history) == 20
    cycles = [FailureCycle.model_validate(entry) for entry in history]
    assert [cycle.replayed_by for cycle in cycles] == [f"round {n}" for n in range(23 - len(cycles), 23)]
    assert all(cycle.last_error and error.startswith(cycle.last_error[:100]) for cycle in cycles)


@pytest.mark.parametrize(
    ("generation", "by", "named"),
    [
        (None, "ann", "p_new_generation"),
        (-1, "ann", "p_new_generation"),
        (0, None, "p_replayed_by"),
        (0, "", "p_replayed_by"),
        (0, "x" * 201, "p_replayed_by"),
        (0, "\u20ac" * 67, "p_replayed_by"),
    ],
)
async def test_a_replay_with_bad_arguments_says_which(
    outbox: Outbox, generation: int | None, by: str | None, named: str
) -> None:
    """A typed error with a hint, and nothing moves (DLQ-3)."""
    id = await outbox.failed()
    before = await outbox.row(id)
    with pytest.raises(asyncpg.InvalidParameterValueError, match=named) as refused:
        await outbox.replay(id, generation, by)
    assert refused.value.hint
    assert await outbox.row(id) == before


async def test_of_two_replays_at_once_one_moves(outbox: Outbox, other: Outbox) -> None:
    """The second neither waits nor writes a second cycle (E8)."""
    id = await outbox.failed()
    async with outbox.connection.transaction():
        assert await outbox.replay(id) == 1
        async with asyncio.timeout(5):
            assert await other.replay(id) == 0
    assert await other.replay(id) == 0
    assert len((await outbox.row(id))["failure_history"]) == 1


async def test_of_many_replays_at_once_each_row_moves_once(outbox: Outbox, shared_dsn: str) -> None:
    """The counts that the callers get add up (E8, B12)."""
    ids = [await outbox.failed() for _ in range(20)]
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(4)]

    async def replay_all(session: Outbox, ids: list[UUID]) -> int:
        return sum([await session.replay(id) for id in ids])

    try:
        counts = await asyncio.gather(
            *(replay_all(session, ids if n % 2 else ids[::-1]) for n, session in enumerate(sessions))
        )
    finally:
        for session in sessions:
            await session.connection.close()
    assert sum(counts) == len(ids)
    assert {len((await outbox.row(id))["failure_history"]) for id in ids} == {1}


# --- cancelling ---


@pytest.mark.parametrize("state", ["pending", "in_flight", "waiting for a retry"])
async def test_a_cancelled_event_is_no_dead_letter(outbox: Outbox, heard: list[tuple[str, str]], state: str) -> None:
    """Waiting or running; its worker is told (LSN-11)."""
    id = await in_state(outbox, state)
    token = (await outbox.row(id))["lease_token"]
    heard.clear()
    assert await outbox.cancel_event(id, "ann@example.org") == 1
    row = await outbox.row(id)
    assert (row["status"], row["failure_reason"]) == ("failed", "cancelled")
    assert row["last_error"] == "cancelled by ann@example.org"
    assert row["deleted_at"] == row["failed_at"] == row["settled_at"] is not None
    assert await outbox.connection.fetch("SELECT FROM core.failed") == []
    assert await settled(heard, 1) == [(CHANNEL, f"cancel {digest_of(id)}")]
    assert await outbox.replay(id) == 0
    if token is not None:
        assert await outbox.extend(InFlight(id, token)) == [id], "the lease keeper learns of it"
        assert await outbox.deliver(InFlight(id, token)) == [id]
        assert await outbox.row(id) == row


async def test_an_event_inside_a_transactional_handler_is_cancelled_by_its_worker(
    outbox: Outbox, other: Outbox, heard: list[tuple[str, str]]
) -> None:
    """Its lock is not waited for. The lease keeper learns of it, the handler rolls back (LSN-11)."""
    held = await outbox.held()
    heard.clear()
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await outbox.enter(held) == "run"
    async with asyncio.timeout(5):
        assert await other.cancel_event(held.id) == 1
        assert await other.cancel_event(held.id, "bob") == 1
        assert await other.extend(held) == [held.id]
    assert (CHANNEL, f"cancel {digest_of(held.id)}") in await settled(heard, 2)
    await transaction.rollback()
    await outbox.expire_lease(held.id)
    [claimed] = await outbox.claim(token=NOBODY)
    assert (claimed["id"], claimed["cancelled"]) == (held.id, True)
    assert await outbox.fail(InFlight(held.id, NOBODY), reason="cancelled", error="cancelled") == []
    assert await outbox.value("SELECT count(*) FROM core.cancel_requests") == 0
    row = await outbox.row(held.id)
    assert (row["failure_reason"], row["deleted_at"] is not None) == ("cancelled", True)


async def test_a_handler_that_commits_first_can_no_longer_be_cancelled(outbox: Outbox, other: Outbox) -> None:
    """The request came too late, and cancels nothing else (LSN-11)."""
    held = await outbox.held()
    async with outbox.connection.transaction():
        await outbox.enter(held)
        assert await other.cancel_event(held.id) == 1
    assert await outbox.states(held.id) == ["delivered"]
    assert await other.cancel_event(held.id) == 0
    await outbox.insert()
    assert [row["cancelled"] for row in await outbox.claim()] == [False]


async def test_a_request_to_cancel_survives_a_settle_that_came_too_late(outbox: Outbox, other: Outbox) -> None:
    """A worker that has lost the row settles its batch; the answer to the operator stays true (LSN-3, LSN-11)."""
    stale = await outbox.held()
    await outbox.expire_lease(stale.id)
    [held] = await outbox.hold()
    transaction = other.connection.transaction()
    await transaction.start()
    assert await other.enter(held) == "run"
    assert await outbox.cancel_event(stale.id) == 1
    bystander = await outbox.held()
    assert await outbox.fail(bystander, stale, reason="cancelled") == [stale.id]
    await transaction.rollback()
    await outbox.expire_lease(stale.id)
    assert [row["cancelled"] for row in await outbox.claim()] == [True]


@pytest.mark.parametrize("late", [False, True], ids=["before the failure is settled", "while it is being settled"])
async def test_a_replay_is_not_cancelled_by_the_request_of_an_earlier_cycle(
    outbox: Outbox, other: Outbox, late: bool
) -> None:
    """The handler failed before it heard of the request. Who replays it wants it to run (LSN-11, DLQ-3)."""
    held = await outbox.held()
    transaction = other.connection.transaction()
    await transaction.start()
    await other.enter(held)
    assert await other.reopen(held)
    if not late:
        assert await outbox.cancel_event(held.id) == 1
    assert await other.fail(held) == []
    if late:
        assert await outbox.cancel_event(held.id) == 1
    await transaction.commit()
    assert await outbox.replay(held.id) == 1
    assert [row["cancelled"] for row in await outbox.claim(Lane(HANDLER))] == [False]


@pytest.mark.parametrize("state", ["delivered", "failed", "cancelled", "expired", "discarded", "missing"])
async def test_what_is_settled_cannot_be_cancelled(outbox: Outbox, state: str) -> None:
    """The answer is 0, and the row is as it was (LSN-11)."""
    id = await in_state(outbox, state)
    before = None if state == "missing" else await outbox.row(id)
    assert await outbox.cancel_event(id) == 0
    if before is not None:
        assert await outbox.row(id) == before


@pytest.mark.parametrize("by", [None, "", "x" * 201])
async def test_cancelling_needs_a_name(outbox: Outbox, by: str | None) -> None:
    """Who did it is part of the row (S17)."""
    id = await outbox.insert()
    with pytest.raises(asyncpg.InvalidParameterValueError, match="p_cancelled_by"):
        await outbox.cancel_event(id, by)
    assert await outbox.states(id) == ["pending"]


async def test_a_row_is_the_same_for_people_in_other_time_zones(outbox: Outbox) -> None:
    """History times carry their offset, whatever the session prints (C2)."""
    id = await outbox.failed()
    await outbox.connection.execute("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'SQL, DMY'")
    try:
        failed_at = (await outbox.row(id))["failed_at"]
        await outbox.replay(id)
        cycle = FailureCycle.model_validate((await outbox.row(id))["failure_history"][0])
    finally:
        await outbox.connection.execute("RESET ALL")
    assert cycle.failed_at == failed_at
    assert cycle.replayed_at is not None
    assert cycle.replayed_at - failed_at < timedelta(seconds=30)
