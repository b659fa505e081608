"""Limits and pauses, as the functions of the database keep them: what a claim may take, and what comes back."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outbox import EVENT, HANDLER, LANE, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres

OTHER = "mail.send"
BY = "ann@example.org"


async def limit(outbox: Outbox, fleet: int | None = None, rate: float | None = None, *clear: str) -> bool:
    values = {"handler": HANDLER, "fleet_concurrency": fleet, "rate": rate, "clear": list(clear)}
    rows = await outbox.call("handler_limit", **values, actor=BY, reason=None)
    return bool(rows[0][0])


async def declare(outbox: Outbox, handler: str = HANDLER, fleet: int | None = None, rate: float | None = None) -> None:
    nothing: list[object] = [None]
    await outbox.call(
        "flow_declare", handlers=[handler], fleet_concurrencies=[fleet], rates=[rate],
        breakers=nothing, first_probes=nothing, longest_waits=nothing,
    )  # fmt: skip


async def waits(outbox: Outbox) -> dict[str, tuple[str, float | None]]:
    rows = await outbox.call("flow_waits", handlers=[HANDLER, OTHER], ended_before=None)
    return {row["handler_name"]: (row["cause"], row["seconds"]) for row in rows}


@pytest.fixture(autouse=True)
async def subscribed(outbox: Outbox) -> None:
    await outbox.subscribe(HANDLER, EVENT)


async def test_a_fleet_concurrency_bounds_what_is_in_flight(outbox: Outbox) -> None:
    """Whoever claims, no more rows of a handler are in flight than its limit; the others stay as they are (LSN-10)."""
    await outbox.insert_many(20)
    await limit(outbox, fleet=7)
    first = await outbox.hold(Lane(limit=5))
    assert len(first) == 5
    assert len(await outbox.hold(Lane(limit=5))) == 2
    assert await outbox.hold() == []
    assert (await waits(outbox))[HANDLER] == ("concurrency", 1.0)
    states = await outbox.connection.fetch("SELECT status, attempts FROM core.outbox WHERE status = 'pending'")
    assert Counter(row["attempts"] for row in states) == {0: 13}
    await outbox.deliver(*first[:3])
    assert len(await outbox.hold()) == 3


async def test_a_limit_that_ends_behind_a_claim_is_asked_for_again(outbox: Outbox) -> None:
    """A claim that got nothing, a moment before there was a token, must not count as if nothing was there (LSN-10)."""
    await outbox.insert_many(2)
    await limit(outbox, rate=1)
    assert len(await outbox.hold()) == 1
    assert await outbox.hold() == []
    await outbox.value("UPDATE core.handler_flow SET tokens_at = clock_timestamp() - interval '1 second'")
    assert (await waits(outbox))[HANDLER] == ("busy", 0.01)
    assert len(await outbox.hold()) == 1


ENDINGS = {
    "deliver": lambda outbox, held: outbox.deliver(held),
    "retry": lambda outbox, held: outbox.retry(held, delay=60),
    "fail": lambda outbox, held: outbox.fail(held),
    "release": lambda outbox, held: outbox.release(held),
    "snooze": lambda outbox, held: outbox.release(held, delay=60),
    "enter": lambda outbox, held: outbox.enter(held),
    "lease": lambda outbox, held: outbox.expire_lease(held.id),
    "delete": lambda outbox, held: outbox.value("DELETE FROM core.outbox WHERE id = $1", held.id),
    "worker": lambda outbox, held: outbox.value(
        "SELECT core.worker_release(claimed_by, 10, 'ann@example.org') FROM core.outbox WHERE id = $1", held.id
    ),
    "archive": lambda outbox, held: outbox.call(
        "outbox_archive", ids=[held.id], tokens=[held.token], handlers=[HANDLER], reasons=["rejected"],
        errors=["boom"], signatures=["E:1"],
    ),
    "consume": lambda outbox, held: outbox.call(
        "outbox_deliver_and_delete", ids=[held.id], tokens=[held.token], routes=[LANE], handlers=[HANDLER],
        record=True, outcome="delivered",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
async def test_every_way_in_which_a_delivery_ends_gives_its_place_back(outbox: Outbox, ending: str) -> None:
    """There is no counter to be forgotten: a row counts while it is in flight, and not a moment longer (LSN-10)."""
    await outbox.insert_many(3)
    await limit(outbox, fleet=1)
    [held] = await outbox.hold()
    assert await outbox.hold() == []
    await ENDINGS[ending](outbox, held)
    [next] = await outbox.hold()
    assert await outbox.hold() == []
    # What was written of the first claim is gone.
    assert await outbox.value("SELECT array_agg(token) FROM core.handler_slots") == [next.token]


async def test_a_row_that_is_claimed_again_counts_once(outbox: Outbox) -> None:
    """A lease that expired and was taken over does not take two places (LSN-10)."""
    [id] = await outbox.insert_many(1)
    await limit(outbox, fleet=2)
    await outbox.hold()
    await outbox.expire_lease(id)
    assert [each.id for each in await outbox.hold()] == [id]
    await outbox.insert_many(3)
    assert len(await outbox.hold()) == 1


async def test_a_handler_that_holds_its_row_in_a_transaction_counts(outbox: Outbox, shared_dsn: str) -> None:
    """A handler that takes tx may run longer than its lease; the row is locked, and its place is taken (LSN-10)."""
    await outbox.insert_many(3)
    await limit(outbox, fleet=1)
    [held] = await outbox.hold()
    await outbox.expire_lease(held.id)
    connection = await connect(shared_dsn)
    try:
        transaction = connection.transaction()
        await transaction.start()
        assert await Outbox(connection).enter(held) == "run"
        assert await outbox.hold() == []
        await transaction.commit()
    finally:
        await connection.close()
    assert len(await outbox.hold()) == 1


async def test_slots_that_were_broken_on_purpose_heal(outbox: Outbox) -> None:
    """Whatever is written into the table by mistake, the next claim counts what is true (LSN-10)."""
    await outbox.insert_many(4)
    await limit(outbox, fleet=2)
    [first, _] = await outbox.hold()
    await outbox.value(
        "INSERT INTO core.handler_slots VALUES ($1, gen_random_uuid(), ARRAY[$2::uuid, gen_random_uuid()])",
        HANDLER, first.id,
    )  # fmt: skip
    await outbox.deliver(first)
    assert len(await outbox.hold()) == 1
    assert await outbox.hold() == []
    assert await outbox.value("SELECT sum(cardinality(ids)) FROM core.handler_slots") <= 3


@pytest.mark.parametrize("own_route", [False, True])
async def test_what_runs_when_a_limit_is_set_counts_when_its_lease_is_extended(outbox: Outbox, own_route: bool) -> None:
    """Workers extend leases long before they expire, so a new limit is exceeded for less than a lease (LSN-10)."""
    lanes = Lane(), Lane(HANDLER)
    await outbox.insert_many(9)
    running = await outbox.hold(Lane(limit=4))
    if own_route:
        await outbox.retry(*running)
        running = await outbox.hold(Lane(HANDLER))
    await limit(outbox, fleet=5)
    assert await outbox.extend(*running) == []
    assert len(await outbox.hold(*lanes)) == 1
    await outbox.deliver(*running)
    assert len(await outbox.hold(*lanes)) == 4


async def test_nobody_waits_for_a_claim_of_a_limited_handler(outbox: Outbox, shared_dsn: str) -> None:
    """A claimer that stalls keeps others from its handler only, and makes nobody wait (LSN-10)."""
    await outbox.subscribe(OTHER, "mail.wanted")
    await outbox.insert_many(3)
    await outbox.insert_many(3, "mail.wanted")
    await limit(outbox, fleet=5)
    connection = await connect(shared_dsn)
    try:
        async with connection.transaction():
            assert len(await Outbox(connection).hold(Lane(limit=1))) == 1
            await outbox.value("SET statement_timeout = '2s'")
            lanes = Lane(), Lane("*/mail.wanted", handler=OTHER)
            assert {each.handler for each in await outbox.hold(*lanes)} == {OTHER}
    finally:
        await connection.close()
    assert len(await outbox.hold()) == 2


async def test_the_lanes_of_a_limited_handler_take_turns(outbox: Outbox) -> None:
    """A flood of urgent events leaves the others a share of the places, in proportion to what is asked for (LSN-10)."""
    await outbox.insert_many(150, priority="0")
    await outbox.insert_many(150)
    await limit(outbox, fleet=1)
    found: Counter[int] = Counter()
    for _ in range(100):
        rows = await outbox.claim(Lane(priority=0, limit=8), Lane(priority=1, limit=4), lease=0)
        found.update(row["priority"] for row in rows)
    assert sum(found.values()) == 100
    # A chance of one in three: fewer than 12 of 100 would come once in a million runs.
    assert found[1] >= 12
    assert found[0] > found[1] / 3


async def test_a_claim_takes_the_oldest_of_a_lane(outbox: Outbox) -> None:
    """A limit does not change the order within a lane (LSN-10)."""
    await outbox.insert_many(6)
    rows = await outbox.connection.fetch("SELECT id FROM core.outbox ORDER BY available_at, id")
    await limit(outbox, fleet=4)
    assert [each.id for each in await outbox.hold()] == sorted(row["id"] for row in rows[:4])


async def test_what_an_operator_sets_wins_until_it_is_cleared(outbox: Outbox) -> None:
    """The declared limit comes back when the operator's is cleared; without either nothing is kept (LSN-10)."""
    await outbox.insert_many(10)
    await declare(outbox, fleet=2)
    assert len(await outbox.hold()) == 2
    assert await limit(outbox, fleet=5)
    assert not await limit(outbox, fleet=5)
    assert len(await outbox.hold()) == 3
    await declare(outbox, fleet=1)
    assert await limit(outbox, None, None, "fleet_concurrency")
    assert await outbox.hold() == []
    await declare(outbox)
    assert await outbox.value("SELECT count(*) FROM core.handler_flow") == 0
    assert await outbox.value("SELECT count(*) FROM core.handler_slots") == 0
    assert len(await outbox.hold()) == 5


async def test_a_pause_holds_and_a_resume_lets_go(outbox: Outbox) -> None:
    """Nothing is claimed once a pause is committed, also by a claim that was worked out before it (LSN-10)."""
    await outbox.insert_many(4)
    version = await outbox.subscriptions_version()
    [running] = await outbox.hold(Lane(limit=1))
    for changes in (True, False):
        assert (await outbox.call("handler_pause", handler=HANDLER, actor=BY, reason="partner moves"))[0][0] is changes
    assert [row["id"] for row in await outbox.claim(version=version)] == [None]
    assert await outbox.hold() == []
    assert (await waits(outbox))[HANDLER] == ("paused", None)
    assert await outbox.deliver(running) == []
    assert (await outbox.call("handler_resume", handler=HANDLER, actor=BY, reason=None))[0][0] is True
    assert len(await outbox.hold()) == 3
    lines = await outbox.connection.fetch("SELECT action, actor, reason FROM core.audit ORDER BY id DESC LIMIT 3")
    assert [line["action"] for line in lines] == ["handler.resume", "handler.pause", "handler.pause"]


async def test_a_rate_lets_through_what_the_bucket_holds(outbox: Outbox) -> None:
    """The bucket of 40/s holds ten; the next claim is told when to come back (LSN-10)."""
    await outbox.insert_many(100)
    await limit(outbox, rate=0.01)
    await outbox.value("UPDATE core.handler_flow SET tokens = 0, tokens_at = clock_timestamp() + interval '1 hour'")
    # A clock that was set back by an hour does not stop the handler: the bucket fills from now on.
    assert await outbox.hold(Lane(limit=50)) == []
    cause, seconds = (await waits(outbox))[HANDLER]
    assert cause == "rate"
    assert seconds is not None
    assert 50 < seconds <= 100
    await limit(outbox, rate=40)
    await outbox.value("UPDATE core.handler_flow SET tokens_at = clock_timestamp() - interval '1 hour'")
    assert len(await outbox.hold(Lane(limit=50))) == 10
    assert await outbox.value("SELECT tokens < 2 FROM core.handler_flow")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"fleet_concurrency": 0}, "p_fleet_concurrency must be 1 to 100000"),
        ({"fleet_concurrency": 100_001}, "p_fleet_concurrency"),
        ({"rate": 0.0}, "p_rate must be"),
        ({"rate": -1.0}, "p_rate must be"),
        ({"rate": float("nan")}, "p_rate must be"),
        ({"rate": float("inf")}, "p_rate must be"),
        ({"clear": ["everything"]}, "p_clear may name"),
        ({"handler": "no.body"}, "must be a handler"),
    ],
)
async def test_bad_limits_are_refused(outbox: Outbox, values: dict[str, object], problem: str) -> None:
    """A limit of nothing is not a pause (LSN-10)."""
    asked: dict[str, object] = {"handler": HANDLER, "fleet_concurrency": None, "rate": None, "clear": []} | values
    with pytest.raises(asyncpg.InvalidParameterValueError, match=problem):
        await outbox.call("handler_limit", **asked, actor=BY, reason=None)


T0 = datetime(2026, 1, 1, tzinfo=UTC)
STEPS = st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 60)), min_size=1, max_size=25)


@given(rate=st.sampled_from([0.01, 0.5, 1.0, 3.0, 40.0, 100.0, 999.0]), steps=STEPS)
async def test_the_bucket_never_lets_more_through_than_the_rate(
    shared_dsn: str, rate: float, steps: list[tuple[int, int]]
) -> None:
    """Over any time, at most its rate times the time and one bucket; and all of that, if it is asked for (LSN-10)."""
    connection = await connect(shared_dsn)
    try:
        burst = max(1.0, rate / 4)
        now, tokens, at = T0, None, None
        taken = 0
        for milliseconds, wanted in steps:
            now += timedelta(milliseconds=milliseconds)
            found = await connection.fetchval("SELECT core.flow_tokens($1, $2, $3, $4)", tokens, at, rate, now)
            assert 0 <= found <= burst + 1e-9
            n = min(wanted, int(found))
            tokens, at, taken = found - n, now, taken + n
            assert taken <= burst + rate * (now - T0).total_seconds() + 1e-6
        # A clock that is set back adds nothing, and takes nothing away.
        back = await connection.fetchval("SELECT core.flow_tokens($1, $2, $3, $4)", tokens, at, rate, T0)
        assert back == pytest.approx(tokens)
    finally:
        await connection.close()


async def test_without_limits_a_claim_looks_once(outbox: Outbox) -> None:
    """Where no handler has a limit, nothing is written, and no function of limits is called (LSN-10)."""
    await outbox.insert_many(5)
    await outbox.value("SET track_functions = 'all'")
    before = await outbox.value(
        "SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions WHERE funcname LIKE 'flow%'"
    )
    async with outbox.connection.transaction():
        assert len(await outbox.hold()) == 5
        called = await outbox.connection.fetch(
            "SELECT funcname FROM pg_stat_xact_user_functions WHERE funcname LIKE 'flow%' AND calls > 0"
        )
    assert (before, called) == (0, [])
    assert await outbox.value("SELECT count(*) FROM core.handler_slots") == 0
