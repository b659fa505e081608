"""Who is owed what: interest, lanes, and the split of an event that several handlers want (LSN-7)."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.postgres.connection import Address
from holdfast.postgres.statements import NamedStatements
from holdfast.postgres.subscriptions import Subscriptions, SubscriptionStatements
from holdfast.worker.routing import subscribers
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres

MAIL, SHIP = "mail.thank", "shipping.send"


async def siblings(outbox: Outbox, *origins: UUID) -> set[tuple[UUID, str]]:
    """The (event, handler) pairs of siblings; of these origins, or of all."""
    rows = await outbox.connection.fetch(
        "SELECT origin_id, handler_name FROM core.outbox WHERE origin_id IS NOT NULL AND ($1 OR origin_id = ANY ($2))",
        not origins,
        origins,
    )
    pairs = [(row[0], row[1]) for row in rows]
    assert len(pairs) == len(set(pairs)), "a sibling exists twice"
    return set(pairs)


async def wanting(outbox: Outbox, event_type: str, target: str | None = None) -> set[str]:
    """The handlers among which an event is split."""
    origin = await outbox.insert(event_type=event_type, target=target)
    assert await outbox.split(f"{target or '*'}/{event_type}") == 1
    found = {handler for _, handler in await siblings(outbox, origin)}
    assert await outbox.states(origin) == ["delivered" if found else "pending"]
    return found


# --- interest ---


async def test_interest_is_durable_and_versioned(outbox: Outbox) -> None:
    """Recorded until it is retired; the version moves with every change and with nothing else (LSN-7)."""
    before = await outbox.subscriptions_version()
    await outbox.subscribe(HANDLER, EVENT, "order.*")
    changed = await outbox.subscriptions_version()
    assert changed > before
    await outbox.subscribe(HANDLER, EVENT, "order.*")
    await outbox.subscribe(HANDLER, "order.*")
    assert await outbox.subscriptions_version() == changed, "a fleet that restarts unchanged disturbs nobody"
    await outbox.subscribe(HANDLER, "order.*", EVENT, "order.paid")
    assert await outbox.subscriptions_version() > changed
    rows = await outbox.call("subscriptions_read")
    assert [(row["domain_context"], row["handler_name"], row["event_type"]) for row in rows] == [
        ("billing", HANDLER, "order.*"),
        ("billing", HANDLER, "order.paid"),
        ("billing", HANDLER, EVENT),
    ]
    assert {row["version"] for row in rows} == {await outbox.subscriptions_version()}


async def test_an_empty_registry_still_has_a_version(outbox: Outbox) -> None:
    """One row without a handler (LSN-7)."""
    [row] = await outbox.call("subscriptions_read")
    assert tuple(row) == (await outbox.subscriptions_version(), None, None, None)


async def test_naming_an_event_type_twice_is_naming_it_once(outbox: Outbox) -> None:
    """And the second start changes nothing either (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT, EVENT)
    version = await outbox.subscriptions_version()
    await outbox.subscribe(HANDLER, EVENT, EVENT)
    assert await outbox.subscriptions_version() == version
    assert len(await outbox.call("subscriptions_read")) == 1


async def test_many_handlers_subscribe_with_few_statements(outbox: Outbox) -> None:
    """The first start of a large application waits for a few round trips, and the next one for one (LSN-7)."""
    registry = HandlerRegistry()

    async def nothing(event: EventEnvelope) -> None: ...

    handlers = [registry.add(f"shop.on_{n}", (f"type.n{n}", "type.all"), nothing) for n in range(150)]
    statements = SubscriptionStatements(NamedStatements(outbox.queries, Address("postgresql://tests-bring-their-own")))

    async def sent_to_subscribe() -> int:
        sent: list[str] = []
        with outbox.connection.query_logger(lambda record: sent.append(record.query)):
            await statements.subscribe(outbox.connection, handlers)
            await asyncio.sleep(0)  # the connection tells in the next turn of the loop
        return len(sent)

    assert 3 <= await sent_to_subscribe() < 10
    found = (await statements.read(outbox.connection)).entries
    assert set(found) == {("shop", each.name, kind) for each in handlers for kind in each.event_types}
    version = await outbox.subscriptions_version()
    assert await sent_to_subscribe() == 1
    assert await outbox.subscriptions_version() == version


async def test_a_context_that_changes_is_a_change(outbox: Outbox) -> None:
    """A worker's context is a setting, and decides which targets it is owed (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    version = await outbox.subscriptions_version()
    await outbox.subscribe(HANDLER, EVENT, context="accounting")
    assert await outbox.subscriptions_version() > version
    assert await wanting(outbox, EVENT, target="accounting") == {HANDLER}
    assert await wanting(outbox, EVENT, target="billing") == set()


async def test_retired_interest_is_owed_nothing_more(outbox: Outbox) -> None:
    """What waits in its own lane stays visible; a later start subscribes again (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT, "order.*")
    await outbox.subscribe(MAIL, EVENT)
    waiting = await outbox.insert()
    await outbox.split(LANE)
    version = await outbox.subscriptions_version()
    assert await outbox.value("SELECT core.retire($1, $2)", HANDLER, "order.*") == 1
    assert await outbox.value("SELECT core.retire($1)", HANDLER) == 1
    assert await outbox.subscriptions_version() > version
    assert await outbox.value("SELECT core.retire($1)", HANDLER) == 0
    assert [row["handler_name"] for row in await outbox.call("subscriptions_read")] == [MAIL]
    assert await wanting(outbox, EVENT) == {MAIL}
    assert (waiting, HANDLER) in await siblings(outbox)
    assert HANDLER in [row[0] for row in await outbox.call("outbox_routes", channel=CHANNEL, generation=0)]
    await outbox.subscribe(HANDLER, EVENT)
    assert await wanting(outbox, EVENT) == {MAIL, HANDLER}


@pytest.mark.parametrize(
    "handler", ["charge_card", "Billing.charge", "billing.", ".charge", "billing.charge/card", "*", ""]
)
async def test_a_handler_name_without_a_domain_context_is_refused(outbox: Outbox, handler: str) -> None:
    """Also by the database (ENV-2)."""
    version = await outbox.subscriptions_version()
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await outbox.subscribe(handler, EVENT, context="billing")
    assert await outbox.subscriptions_version() == version


async def test_two_starts_at_once_do_not_lose_a_version(outbox: Outbox, shared_dsn: str) -> None:
    """Changes are ordered, so a version means one content (LSN-7)."""
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(4)]
    version = await outbox.subscriptions_version()
    try:
        await asyncio.gather(*(s.subscribe(f"c{n}.handle", EVENT) for n, s in enumerate(sessions)))
    finally:
        for session in sessions:
            await session.connection.close()
    assert await outbox.subscriptions_version() == version + 4
    assert len(await outbox.call("subscriptions_read")) == 4


# --- splitting ---


async def test_a_split_makes_one_sibling_for_each_handler(outbox: Outbox) -> None:
    """The published row is settled as split, every handler has a lane of its own, and nothing of the event is
    lost on the way (LSN-7).
    """
    for handler in (HANDLER, MAIL):
        await outbox.subscribe(handler, EVENT)
    now = await outbox.value("SELECT now()")
    origin = await outbox.insert(
        payload={"n": [1, {"a": "ü"}]},
        headers={"correlation_id": "c"},
        event_version=3,
        occurred_at=now - timedelta(days=1),
        available_at=now - timedelta(hours=1),
        expires_at=now + timedelta(hours=1),
        domain_id=uuid.uuid4(),
        idempotency_key="k",
        trace_context="00-1",
        priority=2,
        content_class="personal",
        dedupe_key="d",
    )
    assert await outbox.split(LANE) == 1
    row = await outbox.row(origin)
    assert (row["status"], row["handler_name"], row["attempts"]) == ("delivered", "*", 0)
    assert row["settled_at"] == row["delivered_at"] is not None
    for handler in (HANDLER, MAIL):
        [claimed] = await outbox.claim(Lane(handler, 2, handler))
        sibling = await outbox.row(claimed["id"])
        assert (sibling["origin_id"], sibling["handler_name"], sibling["route"]) == (origin, handler, handler)
        same = (
            "event_type", "event_version", "occurred_at", "source", "target", "content_class", "channel", "generation",
            "domain_id", "payload", "headers", "idempotency_key", "trace_context", "created_at", "available_at",
            "expires_at", "priority",
        )  # fmt: skip
        assert {name: sibling[name] for name in same} == {name: row[name] for name in same}
        assert sibling["dedupe_key"] is None, "the producer's key names the event, not a delivery"


async def test_three_thousand_events_have_exact_sets(outbox: Outbox) -> None:
    """Subscribers that arrive in between are owed what is split after them, and nothing is owed twice (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(MAIL, "order.*")
    expected: set[tuple[UUID, str]] = set()
    handlers = [HANDLER, MAIL]
    for newcomer in ("audit.record", SHIP, None):
        ids = await outbox.insert_many(1000)
        done = 0
        while split := await outbox.split(LANE, limit=300):
            done += split
        assert done == 1000
        expected |= {(id, handler) for id in ids for handler in handlers}
        if newcomer is not None:
            await outbox.subscribe(newcomer, EVENT)
            handlers.append(newcomer)
    assert await siblings(outbox) == expected
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'pending' AND origin_id IS NULL") == 0


async def test_concurrent_splitters_make_every_sibling_once(outbox: Outbox, shared_dsn: str) -> None:
    """Four workers, while a fifth goes on publishing (LSN-7)."""
    handlers = (HANDLER, MAIL, SHIP)
    for handler in handlers:
        await outbox.subscribe(handler, EVENT)
    ids = await outbox.insert_many(600)
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(5)]
    publishing = True

    async def publish(session: Outbox) -> None:
        nonlocal publishing
        for _ in range(10):
            ids.extend(await session.insert_many(20))
        publishing = False

    async def split(session: Outbox) -> int:
        done = 0
        while (n := await session.split(LANE, limit=37)) or publishing:
            done += n
        return done

    try:
        done = await asyncio.gather(publish(sessions[0]), *map(split, sessions[1:]))
    finally:
        for session in sessions:
            await session.connection.close()
    rest = await outbox.split(LANE)
    assert sum(n or 0 for n in done) + rest == len(ids) == 800
    assert await siblings(outbox) == {(id, handler) for id in ids for handler in handlers}


async def test_splitting_twice_is_splitting_once(outbox: Outbox) -> None:
    """The primary key makes it so, even for an origin that is put back by hand (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(MAIL, EVENT)
    origin = await outbox.insert()
    await outbox.split(LANE)
    [held] = await outbox.hold(Lane(HANDLER))
    await outbox.deliver(held)
    assert await outbox.split(LANE) == 0
    await outbox.connection.execute(
        """UPDATE core.outbox SET status = 'pending', settled_at = NULL, delivered_at = NULL, handler_name = NULL
           WHERE id = $1""",
        origin,
    )
    assert await outbox.split(LANE) == 1
    assert await siblings(outbox) == {(origin, HANDLER), (origin, MAIL)}
    assert await outbox.states(held.id) == ["delivered"]


async def test_sibling_ids_are_deterministic_and_sort_beside_their_origin(outbox: Outbox) -> None:
    """v7 in shape, with the origin's 48 bits of time; for a foreign v4 id as well (LSN-7)."""
    seen: set[UUID] = set()
    for origin in [uuid.uuid4(), await outbox.value("SELECT core.uuid7()")]:
        for handler in (HANDLER, MAIL, *(f"c{n}.handle" for n in range(200))):
            id = await outbox.value("SELECT core.sibling_id($1, $2, core.secret())", origin, handler)
            assert id == await outbox.value("SELECT core.sibling_id($1, $2, core.secret())", origin, handler)
            assert (id.version, id.variant) == (7, uuid.RFC_4122)
            assert id.int >> 80 == origin.int >> 80
            seen.add(id)
    assert len(seen) == 404


async def test_an_outdated_registry_splits_nothing(outbox: Outbox) -> None:
    """-1, and the worker reloads (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(MAIL, EVENT)
    id = await outbox.insert()
    assert await outbox.split(LANE, version=await outbox.subscriptions_version() - 1) == -1
    assert await outbox.states(id) == ["pending"]
    assert await siblings(outbox) == set()


async def test_an_event_that_nobody_wants_waits(outbox: Outbox) -> None:
    """Never settled by a split, whoever asks for one; visible as a lane that nobody serves (LSN-7, D6)."""
    await outbox.subscribe(HANDLER, EVENT)
    lonely = await outbox.insert(event_type="order.paid")
    elsewhere = await outbox.insert(target="mail")
    await outbox.split("*/order.paid", f"mail/{EVENT}")
    for id in (lonely, elsewhere):
        row = await outbox.row(id)
        assert (row["status"], row["attempts"], row["handler_name"]) == ("pending", 0, None)
    lanes = [row[0] for row in await outbox.call("outbox_routes", channel=CHANNEL, generation=0)]
    assert lanes == ["*/order.paid", f"mail/{EVENT}"]


async def test_handlers_that_retire_during_a_split_do_not_make_the_event_vanish(
    outbox: Outbox, shared_dsn: str
) -> None:
    """A split is held up before its rows; meanwhile every subscriber retires (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(MAIL, EVENT)
    version = await outbox.subscriptions_version()
    holder, worker = await connect(shared_dsn), Outbox(await connect(shared_dsn))
    try:
        transaction = holder.transaction()
        await transaction.start()
        id = await Outbox(holder).insert()
        await holder.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        split = asyncio.create_task(worker.split(LANE, version=version))
        await outbox.somebody_waits()
        for handler in (HANDLER, MAIL):
            await outbox.value("SELECT core.retire($1)", handler)
        await transaction.commit()
        await split
        assert await outbox.states(id) == ["pending"]
    finally:
        await holder.close()
        await worker.connection.close()


async def test_only_what_is_due_and_not_held_is_split(outbox: Outbox) -> None:
    """Not delayed, leased or of another channel or generation; a crashed claim's rows are (LSN-7, GEN-1)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(MAIL, EVENT)
    crashed, held = await outbox.held(), await outbox.held()
    await outbox.expire_lease(crashed.id)
    now = await outbox.value("SELECT now()")
    await outbox.insert(available_at=now + timedelta(hours=1))
    await outbox.insert(generation=7, channel=CHANNEL)
    await outbox.insert(channel="outbox_slow")
    due = await outbox.insert(priority=2)
    assert await outbox.split(LANE) == 2
    assert {origin for origin, _ in await siblings(outbox)} == {crashed.id, due}
    assert await outbox.deliver(crashed) == [crashed.id], "the lease ended with the split"
    assert await outbox.deliver(held) == []
    assert await outbox.split(LANE, channel="outbox_slow") == 1
    assert await outbox.split(LANE, generation=7) == 1


async def test_a_split_has_the_lanes_of_a_claim(outbox: Outbox) -> None:
    """Limits and marks per lane; the answer says how much was found and where it began (LSN-7, LSN-10)."""
    for handler in (HANDLER, MAIL):
        await outbox.subscribe(handler, EVENT)
    at = "now() - (10 - n) * interval '1 s'"
    ids = {p: await outbox.insert_many(5, priority=str(p), created_at=at, available_at=at) for p in (0, 1)}
    rows = {p: [await outbox.row(id) for id in each] for p, each in ids.items()}
    mark = (rows[1][3]["available_at"], rows[1][3]["id"])
    lanes = [Lane(priority=0, limit=2), Lane(priority=1, limit=9, mark=mark), Lane(priority=2), Lane("*/nothing")]
    found = await outbox.find_and_split(*lanes)
    assert sorted(tuple(row) for row in found) == [
        (LANE, 0, 2, rows[0][0]["available_at"], ids[0][0]),
        (LANE, 1, 2, *mark),
    ]
    assert {origin for origin, _ in await siblings(outbox)} == {*ids[0][:2], *ids[1][3:]}


async def test_a_target_is_a_context(outbox: Outbox) -> None:
    """NULL is a broadcast, 'x' goes to the handlers of x only (LSN-7)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe("billing.audit", "order.*")
    await outbox.subscribe(MAIL, EVENT)
    assert await wanting(outbox, EVENT) == {HANDLER, "billing.audit", MAIL}
    assert await wanting(outbox, EVENT, target="billing") == {HANDLER, "billing.audit"}
    assert await wanting(outbox, EVENT, target="mail") == {MAIL}


PATTERNS = {
    "c.exact": "a_b.c%d",
    "c.all": "*",
    "c.prefix": "a_b.*",
    "c.suffix": "*.c%d",
    "c.middle": "a*%d",
    "c.backslash": "a\\b",
}


@pytest.mark.parametrize(
    ("event_type", "wanted"),
    [
        ("a_b.c%d", {"c.exact", "c.all", "c.prefix", "c.suffix", "c.middle"}),
        ("aXb.c%d", {"c.all", "c.suffix", "c.middle"}),
        ("a_b.cXXd", {"c.all", "c.prefix"}),
        ("aXb.cXXd", {"c.all"}),
        ("a_b.", {"c.all", "c.prefix"}),
        ("a_b", {"c.all"}),
        ("a%d", {"c.all", "c.middle"}),
        ("xa%d", {"c.all"}),
        ("a\\b", {"c.all", "c.backslash"}),
        ("a\\\\b", {"c.all"}),
        ("ab", {"c.all"}),
        ("A_B.c%d", {"c.all", "c.suffix"}),
    ],
)
async def test_only_a_star_is_a_wildcard(outbox: Outbox, event_type: str, wanted: set[str]) -> None:
    """`_`, `%` and `\\` in names stand for themselves, in the database as in the worker's own plan (LSN-7)."""
    for handler, pattern in PATTERNS.items():
        await outbox.subscribe(handler, pattern)
    assert await wanting(outbox, event_type) == wanted
    interest = Subscriptions(1, tuple(("c", handler, pattern) for handler, pattern in PATTERNS.items()))
    assert subscribers(interest, f"*/{event_type}") == wanted


# --- lanes ---


async def test_lanes_and_channels_list_what_is_open(outbox: Outbox) -> None:
    """Each once, whatever the number of rows; settled rows are not there (LSN-1, OBX-4)."""
    await outbox.insert_many(50)
    await outbox.insert_many(50, "order.paid")
    await outbox.insert(target="mail")
    await outbox.insert(channel="outbox_slow", generation=3)
    await outbox.insert(generation=3)
    delivered = await outbox.held(channel="outbox_done")
    await outbox.deliver(delivered)
    lanes = [row[0] for row in await outbox.call("outbox_routes", channel=CHANNEL, generation=0)]
    assert sorted(lanes) == sorted([LANE, "*/order.paid", f"mail/{EVENT}"])
    found = sorted(tuple(row) for row in await outbox.call("outbox_channels"))
    assert found == [(CHANNEL, 0), (CHANNEL, 3), ("outbox_slow", 3)]


async def test_an_empty_outbox_has_no_lanes(outbox: Outbox) -> None:
    assert await outbox.call("outbox_routes", channel=CHANNEL, generation=0) == []
    assert await outbox.call("outbox_channels") == []


async def test_due_in_names_the_next_delayed_row_of_the_lanes(outbox: Outbox) -> None:
    """A worker with nothing to do sleeps until then, and no longer (LSN-1)."""

    async def due_in(*lanes: tuple[str, int], since: float = 0) -> float | None:
        rows = await outbox.call(
            "outbox_due_in",
            channel=CHANNEL,
            generation=0,
            routes=[route for route, _ in lanes],
            priorities=[priority for _, priority in lanes],
            since=timedelta(seconds=since),
        )
        return rows[0][0]

    assert await due_in((LANE, 1)) is None
    now = await outbox.value("SELECT now()")
    await outbox.insert()
    assert await due_in((LANE, 1)) is None, "what is due already needs no alarm"
    for seconds, columns in [
        (60, {}),
        (30, {"priority": 0}),
        (20, {"event_type": "order.paid"}),
        (10, {"generation": 7, "channel": CHANNEL}),
        (5, {"channel": "outbox_slow"}),
    ]:
        await outbox.insert(available_at=now + timedelta(seconds=seconds), **columns)
    for expected, lanes in [(60, [(LANE, 1)]), (30, [(LANE, 1), (LANE, 0)]), (20, [(LANE, 0), ("*/order.paid", 1)])]:
        due = await due_in(*lanes)
        assert due is not None
        assert expected - 10 < due <= expected
    assert await due_in((LANE, 2)) is None
    await outbox.connection.execute("UPDATE core.outbox SET available_at = 'infinity'")
    assert await due_in((LANE, 1)) is None


async def test_what_became_due_since_the_last_claim_is_not_overlooked(outbox: Outbox) -> None:
    """A retry that is due between the claim and the question how long to sleep would wait for the poll (RTY-1)."""

    async def due_in(since: float) -> float | None:
        values = {"routes": [LANE], "priorities": [1], "since": timedelta(seconds=since)}
        return (await outbox.call("outbox_due_in", channel=CHANNEL, generation=0, **values))[0][0]

    now = await outbox.value("SELECT now()")
    await outbox.insert(created_at=now - timedelta(seconds=2), available_at=now - timedelta(seconds=2))
    await outbox.insert(available_at=now + timedelta(hours=1))
    assert -20 < (await due_in(since=30) or 0) < -1
    assert (await due_in(since=1) or 0) > 3000, "it was there when the claim looked"
    [held] = await outbox.hold()
    assert (await due_in(since=30) or 0) > 3000, "claimed meanwhile"
    await outbox.retry(held)


# --- the fleet ---


async def test_the_fleet_is_listed_by_its_heartbeats(outbox: Outbox) -> None:
    """Started, beating, stopped; what ran more than a day ago is forgotten (GEN-1)."""
    me, old = uuid.uuid4(), uuid.uuid4()

    async def beat(id: UUID) -> None:
        await outbox.call(
            "worker_beat",
            id=id,
            name="w",
            host="h",
            pid=1,
            version="0.1",
            generation=0,
            channels=[CHANNEL],
            handlers=[HANDLER],
        )

    async def fleet() -> dict[UUID, asyncpg.Record]:
        return {row["id"]: row for row in await outbox.connection.fetch("SELECT * FROM core.workers")}

    await beat(old)
    await outbox.connection.execute("UPDATE core.workers SET heartbeat_at = now() - interval '25 hours'")
    await beat(me)
    first = (await fleet())[me]
    assert set(await fleet()) == {me}
    assert (first["channels"], first["handlers"], first["stopped_at"]) == ([CHANNEL], [HANDLER], None)
    await outbox.insert_many(2)
    await outbox.insert(channel="outbox_slow")
    unserved = "unserved_channels"
    assert [tuple(row) for row in await outbox.call(unserved)] == [("outbox_slow", 0)]
    await outbox.call("worker_stopped", id=me)
    assert (await fleet())[me]["stopped_at"] is not None
    assert [tuple(row) for row in await outbox.call(unserved)] == [(CHANNEL, 0), ("outbox_slow", 0)]
    await beat(me)
    again = (await fleet())[me]
    assert again["stopped_at"] is None
    assert again["started_at"] == first["started_at"]
    assert again["heartbeat_at"] > first["heartbeat_at"]
