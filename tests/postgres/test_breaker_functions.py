"""Breakers, as the functions of the database keep them: when they open, probe and close, and what that costs."""

from __future__ import annotations

import uuid
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from tests.outbox import EVENT, HANDLER, InFlight, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres

ONE = Lane(limit=1)
# A row that has failed is on its handler's own route.
BOTH = Lane(), Lane(HANDLER)


@pytest.fixture(autouse=True)
async def declared(outbox: Outbox) -> None:
    await outbox.subscribe(HANDLER, EVENT)
    await declare(outbox)


async def declare(outbox: Outbox, after: int | None = 3) -> None:
    probes: list[object] = [None, None] if after is None else [1.0, 30.0]
    await outbox.call(
        "flow_declare", handlers=[HANDLER], fleet_concurrencies=[None], rates=[None],
        breakers=[after], first_probes=probes[:1], longest_waits=probes[1:],
    )  # fmt: skip


async def falter(
    outbox: Outbox, *held: InFlight, last: bool = False, after_success: bool = False, delay: float = 0
) -> list[tuple[str, bool]]:
    """The verdict on each, and whether the breaker is open."""
    n = len(held)
    rows = await outbox.call(
        "outbox_falter", ids=[each.id for each in held], tokens=[each.token for each in held],
        handlers=[HANDLER] * n, delays=[timedelta(seconds=delay)] * n, errors=["no answer"] * n, last=[last] * n,
        after_success=[after_success] * n,
    )  # fmt: skip
    assert [row["id"] for row in rows] == [each.id for each in held]
    return [(row["verdict"], row["open"]) for row in rows]


async def succeed(outbox: Outbox, *held: InFlight) -> list[tuple[str, bool]]:
    rows = await outbox.call("breaker_succeed", handlers=[HANDLER] * len(held), tokens=[each.token for each in held])
    return [tuple(row) for row in rows]


async def opened(outbox: Outbox, count: int = 10) -> None:
    """A breaker that has opened by three failures, with rows that wait."""
    await outbox.insert_many(count)
    assert (await falter(outbox, *await outbox.hold(Lane(limit=3))))[-1] == ("hold", True)


async def time_to_probe(outbox: Outbox) -> None:
    await outbox.value("UPDATE core.handler_flow SET probe_at = clock_timestamp()")
    await outbox.value("UPDATE core.outbox SET available_at = now() WHERE status = 'pending'")


async def flow(outbox: Outbox) -> asyncpg.Record:
    row = await outbox.connection.fetchrow("SELECT * FROM core.handler_flow")
    assert row is not None
    return row


async def attempts(outbox: Outbox) -> int:
    return int(await outbox.value("SELECT coalesce(sum(attempts), 0) FROM core.outbox WHERE status = 'pending'"))


async def test_failures_in_a_row_open_it_and_cost_nothing(outbox: Outbox) -> None:
    """Also the attempts of those that failed before the one that opened it are given back (LSN-17)."""
    await outbox.insert_many(5)
    assert await falter(outbox, *await outbox.hold(ONE)) == [("retry", False)]
    assert await falter(outbox, *await outbox.hold(ONE)) == [("retry", False)]
    assert await attempts(outbox) == 2
    assert await falter(outbox, *await outbox.hold(ONE)) == [("hold", True)]
    assert await attempts(outbox) == 0
    assert await outbox.hold() == []
    [(actor, counts)] = await outbox.connection.fetch(
        "SELECT actor, counts FROM core.audit WHERE action = 'breaker.open'"
    )
    assert (actor, counts) == ("system", {"failures": 3})


async def test_a_success_in_between_begins_anew(outbox: Outbox) -> None:
    """Of the same worker, which says so with its next failure, or of any other (LSN-17)."""
    await outbox.insert_many(9)
    for _ in range(4):
        assert await falter(outbox, *await outbox.hold(Lane(limit=2)), after_success=True) == [("retry", False)] * 2
    assert (await flow(outbox))["failing"] != []
    [good] = await outbox.hold(ONE)
    assert await succeed(outbox, good) == []
    assert (await flow(outbox))["failing"] == []


async def test_one_event_alone_does_not_open_it(outbox: Outbox) -> None:
    """It fails by its own fault, however often, and becomes a dead letter after one chance more (LSN-17)."""
    await outbox.insert_many(1)
    for _ in range(6):
        assert await falter(outbox, *await outbox.hold(*BOTH)) == [("retry", False)]
    assert await falter(outbox, *await outbox.hold(*BOTH), last=True) == [("hold", False)]
    [held] = await outbox.hold(*BOTH)
    assert await falter(outbox, held, last=True) == [("fail", False)]
    # The caller fails it: it is still in flight under its lease.
    assert await outbox.fail(held) == []


async def test_the_first_to_meet_an_outage_is_no_dead_letter(outbox: Outbox) -> None:
    """One whose budget is spent when the outage begins waits, and is held as the others are (LSN-17)."""
    await outbox.insert_many(4)
    for verdict in (("hold", False), ("hold", False), ("hold", True)):
        assert await falter(outbox, *await outbox.hold(ONE), last=True) == [verdict]
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'pending'") == 4


async def test_it_probes_with_one_event_and_waits_longer_each_time(outbox: Outbox) -> None:
    """1, 2, 4 … 30 seconds, give or take a fifth, by the database's clock; one at a time in all the fleet (LSN-17)."""
    await opened(outbox)
    for failed in range(7):
        await time_to_probe(outbox)
        [probe] = await outbox.hold()
        assert await outbox.hold() == []
        assert await falter(outbox, probe) == [("hold", True)]
        wait = await outbox.value(
            "SELECT extract(epoch FROM probe_at - clock_timestamp())::float8 FROM core.handler_flow"
        )
        expected = min(2.0 ** (failed + 1), 30.0)
        assert 0.8 * expected - 0.5 <= wait <= 1.2 * expected
    assert await attempts(outbox) == 0
    assert (await flow(outbox))["failed_probes"] == 7


async def test_a_probe_that_succeeds_closes_it_with_a_ramp(outbox: Outbox) -> None:
    """First one at a time, then twice as many every half second, then as many as there are (LSN-17)."""
    await opened(outbox, 60)
    await time_to_probe(outbox)
    [probe] = await outbox.hold()
    await outbox.deliver(probe)
    assert await succeed(outbox, probe) == [(HANDLER, True)]
    assert await succeed(outbox, probe) == []
    assert len(await outbox.hold(Lane(limit=50))) == 1
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '1.7 seconds'")
    assert len(await outbox.hold(Lane(limit=50))) == 7
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '5 seconds'")
    assert len(await outbox.hold(Lane(limit=45))) == 45
    assert [row[0] for row in await outbox.connection.fetch("SELECT action FROM core.audit ORDER BY id")][-2:] == [
        "breaker.open", "breaker.close",
    ]  # fmt: skip


async def resumed(outbox: Outbox) -> None:
    """A breaker that a probe has closed this moment, with rows that wait."""
    await opened(outbox)
    await time_to_probe(outbox)
    [probe] = await outbox.hold(*BOTH)
    await outbox.deliver(probe)
    assert await succeed(outbox, probe) == [(HANDLER, True)]


@pytest.mark.trust
async def test_what_fails_right_after_a_success_pays_for_it(outbox: Outbox) -> None:
    """Else a few events that nobody can handle would open it for ever, and never be dead letters (SEC-1, LSN-17)."""
    await resumed(outbox)
    assert await falter(outbox, *await outbox.hold(ONE)) == [("retry", False)]
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '6 seconds'")
    assert await falter(outbox, *await outbox.hold(Lane(limit=2))) == [("retry", True)] * 2
    assert await attempts(outbox) == 3
    # Behind those that have not failed.
    early = """SELECT count(*) FROM core.outbox o CROSS JOIN core.handler_flow f
               WHERE o.status = 'pending' AND o.attempts > 0 AND o.available_at < f.probe_at - interval '0.3 seconds'"""
    assert await outbox.value(early) == 0
    assert await outbox.hold() == []


@pytest.mark.trust
async def test_right_after_a_success_a_spent_budget_is_spent(outbox: Outbox) -> None:
    """Whether the breaker opens with the failure or not (SEC-1, LSN-17)."""
    await resumed(outbox)
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '6 seconds'")
    assert await falter(outbox, *await outbox.hold(Lane(limit=3)), last=True) == [("fail", True)] * 3


async def test_an_outage_later_on_costs_nothing(outbox: Outbox) -> None:
    """LSN-17."""
    await resumed(outbox)
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '11 seconds'")
    assert (await falter(outbox, *await outbox.hold(Lane(limit=3)), last=True))[-1] == ("hold", True)
    assert await attempts(outbox) == 0


async def test_what_was_in_flight_before_does_not_close_it(outbox: Outbox) -> None:
    """A slow success of before the outage says nothing; its failure costs nothing (LSN-17)."""
    await outbox.insert_many(2)
    early = await outbox.hold()
    await opened(outbox)
    assert await succeed(outbox, early[0]) == [(HANDLER, False)]
    assert (await flow(outbox))["opened_at"] is not None
    assert await falter(outbox, early[1], last=True) == [("hold", True)]


async def test_a_worker_that_dies_while_it_probes_leaves_nothing_stuck(outbox: Outbox) -> None:
    """When its lease has expired, the next claim probes (LSN-17)."""
    await opened(outbox)
    await time_to_probe(outbox)
    [probe] = await outbox.hold()
    await time_to_probe(outbox)
    assert await outbox.hold() == []
    await outbox.expire_lease(probe.id)
    [again] = await outbox.hold()
    assert again.token != probe.token
    assert await falter(outbox, probe) == ([("lost", True)])
    assert await succeed(outbox, again) == [(HANDLER, True)]


async def test_a_probe_that_ends_otherwise_is_followed_by_another(outbox: Outbox) -> None:
    """One that was released, rejected or cancelled says nothing about the partner (LSN-17)."""
    await opened(outbox)
    await time_to_probe(outbox)
    [probe] = await outbox.hold()
    await outbox.release(probe)
    assert await outbox.hold() == []
    await time_to_probe(outbox)
    assert len(await outbox.hold()) == 1


async def test_a_clock_that_is_set_back_does_not_keep_it_open(outbox: Outbox) -> None:
    """A probe that would be due hours later is due now (LSN-17)."""
    await opened(outbox)
    await time_to_probe(outbox)
    await outbox.value("UPDATE core.handler_flow SET probe_at = clock_timestamp() + interval '5 hours'")
    assert len(await outbox.hold()) == 1


async def test_an_outage_is_no_time_of_failing(outbox: Outbox) -> None:
    """Whoever has met nothing but the outage has all of its max_total_delay afterwards (LSN-17, RTY-1)."""
    await outbox.insert_many(4)
    first, *others = await outbox.hold()
    await falter(outbox, first)
    assert await outbox.value("SELECT count(first_failed_at) FROM core.outbox") == 1
    assert (await falter(outbox, *others[:2]))[-1] == ("hold", True)
    assert await falter(outbox, others[2]) == [("hold", True)]
    assert await outbox.value("SELECT count(last_error) FROM core.outbox") == 4
    assert await outbox.value("SELECT count(first_failed_at) FROM core.outbox") == 0


async def test_breakers_that_open_together_are_all_named(outbox: Outbox) -> None:
    """The partner of several handlers goes away, and each of their breakers is reported (LSN-17)."""
    other = "mail.send"
    await outbox.subscribe(other, EVENT)
    await outbox.call(
        "flow_declare", handlers=[HANDLER, other], fleet_concurrencies=[None] * 2, rates=[None] * 2,
        breakers=[1, 1], first_probes=[1.0] * 2, longest_waits=[30.0] * 2,
    )  # fmt: skip
    await outbox.insert_many(2)
    held = await outbox.hold()
    rows = await outbox.call(
        "outbox_falter", ids=[each.id for each in held], tokens=[each.token for each in held],
        handlers=[HANDLER, other], delays=[timedelta(0)] * 2, errors=["no answer"] * 2, last=[False] * 2,
        after_success=[False] * 2,
    )  # fmt: skip
    assert [(row["open"], row["opened"]) for row in rows] == [(True, True)] * 2


async def test_an_outage_of_long_ago_does_not_stop_workers_that_start(outbox: Outbox, shared_dsn: str) -> None:
    """A session that claims for the first time long after the ramp gets what is due (LSN-17)."""
    await outbox.insert_many(3)
    for ago in (timedelta(seconds=20), timedelta(days=400), timedelta(hours=-1)):
        await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - $1::interval", ago)
        newcomer = await connect(shared_dsn)
        assert len(await Outbox(newcomer).hold(ONE)) == 1
        await newcomer.close()


async def test_code_without_a_breaker_closes_it(outbox: Outbox) -> None:
    """A deployment that no longer declares one must not leave the handler held (LSN-17)."""
    await opened(outbox)
    await declare(outbox, None)
    await outbox.value("UPDATE core.outbox SET available_at = now() WHERE status = 'pending'")
    held = await outbox.hold(*BOTH)
    assert len(held) == 10
    assert await falter(outbox, held[0]) == [("retry", False)]
    assert await falter(outbox, held[1], last=True) == [("fail", False)]


async def test_a_lost_lease_counts_for_nothing(outbox: Outbox) -> None:
    """What another worker has by now is neither settled nor counted (LSN-3, LSN-17)."""
    await outbox.insert_many(3)
    held = await outbox.hold()
    stale = [InFlight(each.id, uuid.uuid4()) for each in held]
    assert await falter(outbox, *stale) == [("lost", False)] * 3
    assert (await flow(outbox))["failing"] == []


async def test_bad_arguments_are_refused(outbox: Outbox) -> None:
    """Whatever a login with the role passes (S5)."""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="one entry for each"):
        await outbox.call(
            "outbox_falter", ids=[UUID(int=1)], tokens=[], handlers=[], delays=[], errors=[], last=[], after_success=[]
        )
    with pytest.raises(asyncpg.InvalidParameterValueError, match="one entry for each"):
        await outbox.call("breaker_succeed", handlers=[HANDLER], tokens=[])
    for after in (0, 1001):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="a breaker opens"):
            await declare(outbox, after)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="one entry"):
        await outbox.call(
            "flow_declare", handlers=[HANDLER], fleet_concurrencies=[], rates=[], breakers=[], first_probes=[],
            longest_waits=[],
        )  # fmt: skip


async def poisoned(outbox: Outbox, own: str | None = None) -> None:
    """A breaker that was opened by events of `bank`, which has fifty more that are older than one of `shop`."""
    if own is not None:
        await outbox.value("INSERT INTO core.sources VALUES ($1, 'postgres')", own)
    await outbox.insert_many(53)
    await outbox.value("UPDATE core.outbox SET source = 'bank', available_at = available_at - interval '1 minute'")
    await outbox.insert_many(1)
    await outbox.value("UPDATE core.outbox SET source = 'shop' WHERE source <> 'bank'")
    assert (await falter(outbox, *await outbox.hold(Lane(limit=3))))[-1] == ("hold", True)


async def probes(outbox: Outbox, count: int, failing: str) -> list[str]:
    """The sources of so many probes, of which those of one source fail; ends with the first that succeeds."""
    found: list[str] = []
    for _ in range(count):
        await outbox.value("UPDATE core.handler_flow SET probe_at = clock_timestamp()")
        [probe] = await outbox.hold(*BOTH)
        found.append(await outbox.value("SELECT source FROM core.outbox WHERE id = $1", probe.id))
        if found[-1] not in failing:
            await outbox.deliver(probe)
            assert await succeed(outbox, probe) == [(HANDLER, True)]
            break
        assert await falter(outbox, probe) == [("hold", True)]
    return found


@pytest.mark.trust
@pytest.mark.parametrize("own", [None, "shop", "bank"])
async def test_one_source_that_fails_does_not_keep_others_back(outbox: Outbox, own: str | None) -> None:
    """The next probe is of another source; when it succeeds, the failures of the first are its own (SEC-1, LSN-17)."""
    await poisoned(outbox, own)
    assert await probes(outbox, 3, "bank") == ["shop"]
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '15 seconds'")
    for last, verdict in ((False, "retry"), (True, "fail")):
        held = await outbox.hold(Lane(limit=10))
        assert len(held) == 10
        assert await falter(outbox, *held, last=last) == [(verdict, False)] * 10
    assert (await flow(outbox))["failing"] == []
    # After a minute they may tell of an outage again.
    await outbox.value("UPDATE core.handler_flow SET distrusted_until = clock_timestamp()")
    assert (await falter(outbox, *await outbox.hold(Lane(limit=3))))[-1] == ("hold", True)


@pytest.mark.trust
async def test_many_names_of_sources_are_one_beside_one_with_an_owner(outbox: Outbox) -> None:
    """A producer may invent names, and none of them takes a turn of a source with an owner (SEC-1, LSN-17)."""
    await poisoned(outbox, "shop")
    await outbox.value("UPDATE core.outbox SET source = 'bank-' || id WHERE source = 'bank'")
    await outbox.value("UPDATE core.handler_flow SET failing_sources = ARRAY['bank-1', 'bank-2']")
    assert await probes(outbox, 3, "bank") == ["shop"]
    await outbox.value("UPDATE core.handler_flow SET resumed_at = clock_timestamp() - interval '15 seconds'")
    assert await falter(outbox, *await outbox.hold(Lane(limit=10))) == [("retry", False)] * 10


@pytest.mark.trust
async def test_in_an_outage_sources_take_turns_and_nothing_is_lost(outbox: Outbox) -> None:
    """No attempt counts, and no source is distrusted when the partner is back (SEC-1, LSN-17)."""
    await poisoned(outbox, "bank")
    await outbox.value("UPDATE core.outbox SET available_at = now() - interval '1 minute' WHERE status = 'pending'")
    turns = []
    for _ in range(6):
        turns += await probes(outbox, 1, "bank, shop")
        await outbox.value("UPDATE core.outbox SET available_at = now() - interval '1 minute' WHERE status = 'pending'")
    assert turns == ["shop", "bank"] * 3
    assert await attempts(outbox) == 0
    assert len(await probes(outbox, 1, "")) == 1
    assert (await flow(outbox))["distrusted"] == []
