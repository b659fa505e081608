"""Handlers and generations (GEN-2, LSN-7): who is owed what, who serves it, and what to do about the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

import holdfast.operator.generations
from holdfast.errors import ConfigurationError
from holdfast.operator import Generation, Operator, Refused
from tests.operator.support import ACTOR, EVENT, HANDLER, beat, fail, subscribe
from tests.outbox import Lane, Outbox


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


async def publish(conn: asyncpg.Connection, count: int, generation: int = 0, channel: str | None = None) -> None:
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, generation, channel)
           SELECT 'order.placed', 'shop', '{}', $2, coalesce($3, core.channel_of($2)) FROM generate_series(1, $1)""",
        count,
        generation,
        channel,
    )


async def registry(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT version FROM core.subscriptions_version"))


# --- handlers ---


async def test_handlers_with_their_backlog(conn: asyncpg.Connection, operator: Operator) -> None:
    """On routes of events and on their own, failed ones, and whether somebody serves them (OPS-1, LSN-7)."""
    await subscribe(conn, HANDLER, EVENT)
    await subscribe(conn, "mail.thank", "order.*", "user.left")
    await publish(conn, 4)
    await fail(conn, 3)
    await beat(conn, "one", "mail.thank")
    found = {each.handler_name: each for each in await operator.handlers.all()}
    card, mail = found[HANDLER], found["mail.thank"]
    assert (card.event_types, card.open, card.failed, card.workers, card.unserved) == ([EVENT], 4, 3, [], True)
    assert (mail.event_types, mail.open, mail.failed, mail.workers) == (["order.*", "user.left"], 4, 0, ["one"])
    assert not mail.unserved


async def test_a_handler_is_retired(conn: asyncpg.Connection, operator: Operator) -> None:
    """One type or all, audited; again it changes nothing (LSN-7, S17)."""
    await subscribe(conn, HANDLER, EVENT, "order.paid")
    version = await registry(conn)
    assert await operator.handlers.retire(HANDLER, dry_run=True) == 2
    assert await registry(conn) == version
    assert await operator.handlers.retire(HANDLER, "order.paid", reason="moved to ledger") == 1
    assert await registry(conn) == version + 1
    assert await operator.handlers.retire(HANDLER) == 1
    (gone,) = await operator.handlers.all()
    assert gone.retired and gone.retired_at is not None
    assert await operator.handlers.retire(HANDLER) == 0
    assert await registry(conn) == version + 2, "what ends nothing disturbs nobody"
    lines = await conn.fetch("SELECT actor, reason, counts->>'ended' FROM core.audit ORDER BY id")
    assert [tuple(line) for line in lines] == [(ACTOR, "moved to ledger", "1"), (ACTOR, None, "1"), (ACTOR, None, "0")]


@pytest.mark.parametrize("handler", ["mail.thank", "billing", "", "x'; --", None])
async def test_an_unknown_handler_is_an_error(conn: asyncpg.Connection, operator: Operator, handler: str) -> None:
    """And does not make every worker reload the registry (S9)."""
    await subscribe(conn)
    version = await registry(conn)
    with pytest.raises(ConfigurationError) as refused:
        await operator.handlers.retire(handler)
    assert refused.value.field == "handler"
    with pytest.raises(ConfigurationError, match="event_type"):
        await operator.handlers.retire(HANDLER, "order.unknown")
    assert await conn.fetchval("SELECT core.retire('no.such')") == 0
    assert await registry(conn) == version


# --- generations ---


def named(found: list[Generation]) -> dict[int, Generation]:
    return {each.generation: each for each in found}


async def test_backlog_per_generation(conn: asyncpg.Connection, operator: Operator) -> None:
    """What is open, what failed, who serves it, and which channels nobody serves (GEN-2)."""
    await conn.execute("INSERT INTO core.deployments (generation, label) VALUES (3, 'v1.3'), (4, 'v1.4')")
    await publish(conn, 5, generation=2)
    await publish(conn, 7, generation=3)
    await publish(conn, 2, generation=3, channel="hot")
    await fail(conn, 4, generation=1)
    await beat(conn, "new", HANDLER, generation=3)
    found = named(await operator.generations.all())
    assert list(found) == [4, 3, 2, 1]
    assert (found[4].open, found[4].current, found[4].label, found[4].in_the_way) == (
        0,
        True,
        "v1.4",
        ["it is the current one"],
    )
    assert (found[3].open, found[3].workers, found[3].channels) == (9, ["new"], ["hot", "outbox_gen_3"])
    assert found[3].unserved == ["hot"]
    assert (found[2].open, found[2].workers, len(found[2].unserved)) == (5, [], 1)
    assert found[2].in_the_way == ["5 events are open"]
    assert (found[1].open, found[1].failed, found[1].in_the_way) == (0, 4, [])


async def test_a_generation_is_retired_when_nothing_is_left(conn: asyncpg.Connection, operator: Operator) -> None:
    """Refused while it has something to do or somebody who does it; refusals are audited (GEN-2)."""
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    await publish(conn, 1, generation=1)
    with pytest.raises(Refused, match=r"has 1 open event\b(?! and)"):
        await operator.generations.retire(1)
    with pytest.raises(Refused, match="is the current one"):
        await operator.generations.retire(2)
    assert await conn.fetchval("SELECT count(*) FROM core.deployments WHERE retired_at IS NOT NULL") == 0
    await operator.generations.retire(1, force=True, dry_run=True)
    assert await conn.fetchval("SELECT count(*) FROM core.deployments WHERE retired_at IS NOT NULL") == 0
    await operator.generations.retire(1, force=True, reason="test data")
    assert await conn.fetchval("SELECT generation FROM core.deployments WHERE retired_at IS NOT NULL") == 1
    lines = await conn.fetch("SELECT action, arguments ? 'refused', reason FROM core.audit ORDER BY id")
    assert [tuple(line) for line in lines] == [
        ("generation.retire", True, None), ("generation.retire", True, None), ("generation.retire", False, "test data"),
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "living"), [(45, True), (61, False)])
async def test_what_the_list_calls_retirable_can_be_retired(
    conn: asyncpg.Connection, operator: Operator, seconds: int, living: bool
) -> None:
    """Lists, status and actions have one rule for a living worker (GEN-2)."""
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    await subscribe(conn)
    await beat(conn, "one", HANDLER, generation=1)
    await conn.execute("UPDATE core.workers SET heartbeat_at = now() - $1 * interval '1 second'", seconds)
    await publish(conn, 1, generation=1)
    status = await operator.status()
    assert [worker.living for worker in status.workers] == [living]
    assert (status.unserved == []) == living
    assert (await conn.fetch("SELECT * FROM core.unserved_channels()") == []) == living
    (handler,) = await operator.handlers.all()
    assert (handler.workers == ["one"]) == living
    await conn.execute("DELETE FROM core.outbox")
    assert named(await operator.generations.all())[1].in_the_way == (["1 worker serves it"] if living else [])
    if living:
        with pytest.raises(Refused, match="1 living worker"):
            await operator.generations.retire(1)
    else:
        await operator.generations.retire(1)


async def test_unserved_events_are_moved(
    conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch after batch, to the other generation's channel, while what a worker holds stays with it (GEN-2)."""
    await subscribe(conn)
    await publish(conn, 23, generation=2)
    await publish(conn, 3, generation=2, channel="hot")
    outbox = Outbox(conn)
    held = await outbox.hold(Lane(limit=2), channel="outbox_gen_2", generation=2)
    monkeypatch.setattr(holdfast.operator.generations, "BATCH", 10)
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (5)")
    dry = await operator.generations.move(2, 5, dry_run=True)
    assert (dry.moved, dry.left, dry.dry_run) == (24, 2, True)
    done = await operator.generations.move(2, 5, reason="generation 2 is gone")
    assert (done.moved, done.left) == (24, 2)
    rows = await conn.fetch("SELECT generation, channel, count(*) FROM core.outbox GROUP BY 1, 2 ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [(2, "outbox_gen_2", 2), (5, "hot", 3), (5, "outbox_gen_5", 21)]
    assert await outbox.deliver(*held) == []
    lines = await conn.fetch("SELECT reason, (counts->>'moved')::int AS moved FROM core.audit ORDER BY id")
    assert [tuple(line) for line in lines] == [("generation 2 is gone", n) for n in (10, 10, 4)]
    assert len(await outbox.claim(Lane(limit=100), channel="outbox_gen_5", generation=5)) == 21
    await outbox.connection.execute(
        "SELECT core.outbox_cancel_event(id, 'test') FROM core.outbox WHERE settled_at IS NULL"
    )


async def test_a_row_whose_lease_has_ended_moves_as_well(conn: asyncpg.Connection, operator: Operator) -> None:
    """Its worker is dead; if it is not after all, its settle still counts (GEN-2, LSN-3)."""
    await publish(conn, 1, generation=2)
    outbox = Outbox(conn)
    (held,) = await outbox.hold(Lane(), channel="outbox_gen_2", generation=2)
    await outbox.expire_lease(held.id)
    assert (await operator.generations.move(2, 0)).moved == 1
    assert await outbox.deliver(held) == []
    assert await outbox.states(held.id) == ["delivered"]


async def test_nothing_is_moved_where_nobody_will_come(conn: asyncpg.Connection, operator: Operator) -> None:
    """A number that no deployment and no living worker has is a slip of the hand, unless it is meant (GEN-2)."""
    await publish(conn, 1, generation=2)
    await conn.execute("INSERT INTO core.deployments (generation, retired_at) VALUES (3, now()), (4, NULL), (6, NULL)")
    await beat(conn, "one", HANDLER, generation=7)
    for to in (12, 3, 0):
        for dry_run in (True, False):
            with pytest.raises(Refused, match=f"generation {to} is not a known deployment") as refused:
                await operator.generations.move(2, to, dry_run=dry_run)
            assert "--force" in refused.value.remedy
    for to in (4, 6, 7):
        assert (await operator.generations.move(2, to, dry_run=True)).moved == 1
    assert (await operator.generations.move(2, 12, force=True)).moved == 1
    refusals = await conn.fetchval("SELECT count(*) FROM core.audit WHERE arguments ? 'refused'")
    assert refusals == 3, "of those that were meant"
    (dead,) = await fail(conn)
    assert (await operator.failed.replay([dead], generation=13, dry_run=True)).warning
    assert (await operator.failed.replay([dead], generation=6)).warning is None


async def test_the_current_generation_is_not_retired_from_psql_either(conn: asyncpg.Connection) -> None:
    """Writers that name none would get one that is gone (GEN-2)."""
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    for force in (True, False):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="2 is the current one"):
            await conn.fetch("SELECT core.generation_retire(2, $1, 'ann')", force)
    assert await conn.fetchval("SELECT count(*) FROM core.deployments WHERE retired_at IS NULL") == 2


@pytest.mark.parametrize(
    ("source", "to", "field"),
    [(2, 2, "to"), (-1, 2, "generation"), (2, -1, "to"), (7, 3, "generation"), (2, True, "to")],
)
async def test_a_bad_move_changes_nothing(
    conn: asyncpg.Connection, operator: Operator, source: int, to: int, field: str
) -> None:
    """S9."""
    await publish(conn, 1, generation=2)
    with pytest.raises(ConfigurationError) as refused:
        await operator.generations.move(source, to)
    assert refused.value.field == field
    assert await conn.fetchval("SELECT generation FROM core.outbox") == 2
