"""Claiming, extending, settling: what the functions of the delivery do to a row, and what they refuse to do."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.postgres.connection import Address
from holdfast.postgres.deliveries import Deliveries, LaneClaim
from holdfast.postgres.queries import Queries
from holdfast.postgres.statements import NamedStatements
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, NOBODY, START, InFlight, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres

Settle = Callable[[Outbox, InFlight], Awaitable[list[UUID]]]
SETTLES: dict[str, Settle] = {
    "deliver": lambda outbox, held: outbox.deliver(held),
    "deliver_duplicate": lambda outbox, held: outbox.deliver(held, record=False),
    "retry": lambda outbox, held: outbox.retry(held),
    "fail": lambda outbox, held: outbox.fail(held),
    "release": lambda outbox, held: outbox.release(held),
    "snooze": lambda outbox, held: outbox.release(held, delay=5),
    "extend": lambda outbox, held: outbox.extend(held),
}


@pytest.fixture
async def other(shared_dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(shared_dsn)
    yield Outbox(connection)
    await connection.close()


async def inbox(outbox: Outbox) -> list[tuple[str, str]]:
    rows = await outbox.connection.fetch("SELECT handler_name, idempotency_key FROM core.event_handled ORDER BY 1, 2")
    return [(row[0], row[1]) for row in rows]


# --- claiming ---


async def test_a_claim_leases_the_row_and_counts_the_attempt(outbox: Outbox) -> None:
    """One UPDATE; the lease runs on the database's clock, and the attempt counts from the claim on (LSN-1, LSN-3)."""
    id = await outbox.insert(payload={"n": 1}, headers={"a": "b"}, domain_id=uuid.uuid4(), trace_context="00-1")
    worker, token = uuid.uuid4(), uuid.uuid4()
    [claimed] = await outbox.claim(worker=worker, token=token, lease=30)
    row = await outbox.row(id)
    assert row["status"] == "in_flight"
    assert (row["attempts"], row["claimed_by"]) == (1, worker)
    assert row["lease_token"] == token
    left = row["lease_expires_at"] - await outbox.value("SELECT now()")
    assert timedelta(seconds=29) < left <= timedelta(seconds=30)
    same = set(claimed.keys()) & set(row.keys())
    assert {name: claimed[name] for name in same} == {name: row[name] for name in same}
    assert (claimed["failing_for"], claimed["handled"], claimed["expired"], claimed["cancelled"]) == (
        None,
        False,
        None,
        False,
    )
    assert await outbox.claim() == []


async def test_every_claim_has_a_token_of_its_own(outbox: Outbox, shared_dsn: str) -> None:
    """A fresh token per claim, never the last one again; it also says when that was (LSN-3)."""
    await outbox.insert_many(30)
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None: ...

    lanes = [LaneClaim(LANE, 1, registry[HANDLER], 10, START)]
    deliveries = Deliveries(
        NamedStatements(Queries("core"), Address(shared_dsn)), worker=NOBODY, generation=0, lease=60
    )
    version = await outbox.subscriptions_version()
    connection = await asyncpg.connect(shared_dsn)
    try:
        claims = [(await deliveries.claim(connection, version, CHANNEL, lanes))[0] for _ in range(3)]
    finally:
        await connection.close()
    assert [len(claim) for claim in claims] == [10, 10, 10]
    for claim in claims:
        rows = [await outbox.row(each.id) for each in claim]
        assert {row["lease_token"] for row in rows} == {each.token for each in claim}
    tokens = {each.token for claim in claims for each in claim}
    assert len(tokens) == 3
    assert {token.version for token in tokens} == {7}


async def test_a_lane_that_changed_hands_is_settled_for_both(outbox: Outbox, shared_dsn: str) -> None:
    """A batch may hold events of one lane under the handler before a change of interest and the one after (LSN-6)."""
    await outbox.insert_many(2)
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def before(event: EventEnvelope) -> None: ...

    @registry.handler(EVENT, name="mail.send")
    async def after(event: EventEnvelope) -> None: ...

    deliveries = Deliveries(
        NamedStatements(Queries("core"), Address(shared_dsn)), worker=NOBODY, generation=0, lease=60
    )
    version = await outbox.subscriptions_version()
    connection = await asyncpg.connect(shared_dsn)
    try:
        held = []
        for handler in registry:
            claim = [LaneClaim(LANE, 1, handler, 1, START)]
            held += (await deliveries.claim(connection, version, CHANNEL, claim))[0]
        stranger = copy(held[0])
        stranger.id = NOBODY
        assert await deliveries.deliver(connection, [*held, stranger], "delivered", record=True) == [NOBODY]
    finally:
        await connection.close()
    wanted = sorted((each.handler.name, str(each.id)) for each in held)
    assert await inbox(outbox) == wanted
    assert sorted([((await outbox.row(each.id))["handler_name"], str(each.id)) for each in held]) == wanted


async def test_an_expired_lease_is_claimed_again_and_fences_the_old_one(outbox: Outbox) -> None:
    """The crashed worker's row comes back by itself, with the attempt of the crash counted (LSN-3)."""
    before = await outbox.held()
    assert await outbox.claim() == []
    await outbox.expire_lease(before.id)
    [claimed] = await outbox.claim()
    assert (claimed["id"], claimed["attempts"]) == (before.id, 2)
    after = await outbox.row(before.id)
    for name, settle in SETTLES.items():
        assert await settle(outbox, before) == [before.id], name
        assert await outbox.row(before.id) == after, name
    assert await inbox(outbox) == []


async def test_an_expired_lease_is_still_its_holders_until_somebody_claims_it(outbox: Outbox) -> None:
    """Late is not lost; the token decides, not the clock (LSN-3)."""
    held = await outbox.held()
    await outbox.expire_lease(held.id)
    assert await outbox.deliver(held) == []
    assert await outbox.states(held.id) == ["delivered"]


async def test_a_worker_that_crashes_every_time_uses_up_its_attempts(outbox: Outbox) -> None:
    """Attempts are counted at the claim, so a handler that kills its worker is counted too (LSN-3, DLQ-1)."""
    id = await outbox.insert()
    for attempt in range(1, 7):
        [claimed] = await outbox.claim()
        assert (claimed["id"], claimed["attempts"]) == (id, attempt)
        await outbox.expire_lease(id)


async def test_only_due_rows_are_claimed(outbox: Outbox) -> None:
    """Neither delayed, settled nor held ones (PUB-2, LSN-1)."""
    due = await outbox.insert()
    await outbox.value("SELECT now()")
    now = datetime.now(UTC)
    await outbox.insert(available_at=now + timedelta(hours=1))
    settled = await outbox.held(channel="other")
    await outbox.deliver(settled)
    await outbox.failed(channel="other")
    assert [row["id"] for row in await outbox.claim()] == [due]


async def test_channels_generations_and_routes_are_kept_apart(outbox: Outbox) -> None:
    """What another generation, channel or context is owed is not claimed and burns no attempt (E9, GEN-1, OBX-4)."""
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (7)")
    mine = await outbox.insert(generation=0, channel=CHANNEL)
    foreign = [
        await outbox.insert(),  # generation 7, on its own channel
        await outbox.insert(generation=7, channel=CHANNEL),
        await outbox.insert(generation=0, channel="outbox_slow"),
        await outbox.insert(generation=0, channel=CHANNEL, target="shipping"),
        await outbox.insert(generation=0, channel=CHANNEL, event_type="order.paid"),
        await outbox.insert(generation=0, channel=CHANNEL, handler_name="shipping.send"),
    ]
    assert [row["id"] for row in await outbox.claim()] == [mine]
    for id in foreign:
        row = await outbox.row(id)
        assert (row["status"], row["attempts"], row["lease_token"]) == ("pending", 0, None)
    for id, channel, generation, route in [
        (foreign[0], "outbox_gen_7", 7, LANE),
        (foreign[1], CHANNEL, 7, LANE),
        (foreign[2], "outbox_slow", 0, LANE),
        (foreign[3], CHANNEL, 0, f"shipping/{EVENT}"),
        (foreign[4], CHANNEL, 0, "*/order.paid"),
        (foreign[5], CHANNEL, 0, "shipping.send"),
    ]:
        found = await outbox.claim(Lane(route), channel=channel, generation=generation)
        assert [row["id"] for row in found] == [id]


async def test_lanes_give_their_oldest_rows_up_to_their_limits(outbox: Outbox) -> None:
    """Priorities are lanes with limits of their own, oldest first within each (LSN-10)."""
    at = "now() - n * interval '1 s'"
    ids = {p: await outbox.insert_many(5, priority=str(p), created_at=at, available_at=at) for p in range(3)}
    claimed = await outbox.claim(Lane(priority=0, limit=2), Lane(priority=1, limit=1), Lane(priority=2, limit=9))
    by_priority = {p: {row["id"] for row in claimed if row["priority"] == p} for p in range(3)}
    # The higher n is, the longer the row has been due.
    assert by_priority == {0: {ids[0][4], ids[0][3]}, 1: {ids[1][4]}, 2: set(ids[2])}


async def test_a_mark_hides_what_lies_before_it(outbox: Outbox) -> None:
    """The low-water mark is the pair (available_at, id), and the row it names is still claimed (LSN-1)."""
    ids = sorted(await outbox.insert_many(4))
    at = (await outbox.row(ids[2]))["available_at"]
    claimed = await outbox.claim(Lane(mark=(at, ids[2])))
    assert sorted(row["id"] for row in claimed) == ids[2:]
    assert sorted(row["id"] for row in await outbox.claim()) == ids[:2]


async def test_a_locked_row_is_skipped_and_not_waited_for(outbox: Outbox, other: Outbox) -> None:
    """FOR UPDATE SKIP LOCKED (LSN-1)."""
    ids = sorted(await outbox.insert_many(3))
    async with other.connection.transaction():
        await other.value("SELECT id FROM core.outbox WHERE id = $1 FOR UPDATE", ids[0])
        async with asyncio.timeout(5):
            assert sorted(row["id"] for row in await outbox.claim()) == ids[1:]
    assert [row["id"] for row in await outbox.claim()] == ids[:1]


async def test_concurrent_claims_share_the_rows(outbox: Outbox, shared_dsn: str) -> None:
    """Every row has one claimer (LSN-1)."""
    ids = await outbox.insert_many(400)
    workers = [Outbox(await connect(shared_dsn)) for _ in range(4)]

    async def drain(worker: Outbox) -> list[UUID]:
        mine: list[UUID] = []
        while rows := await worker.claim(Lane(limit=7), version=1):
            mine += [row["id"] for row in rows]
        return mine

    try:
        taken = await asyncio.gather(*map(drain, workers))
    finally:
        for worker in workers:
            await worker.connection.close()
    assert sorted(id for mine in taken for id in mine) == sorted(ids)
    assert sum(1 for mine in taken if mine) > 1


async def test_an_outdated_registry_claims_nothing(outbox: Outbox) -> None:
    """One row without an id says so; the row itself is untouched (LSN-7)."""
    id = await outbox.insert()
    version = await outbox.subscriptions_version()
    [answer] = await outbox.claim(version=version + 1)
    assert set(answer.values()) == {None}
    row = await outbox.row(id)
    assert (row["status"], row["attempts"]) == ("pending", 0)


async def test_a_subscription_that_arrives_during_a_claim_is_not_overlooked(outbox: Outbox, shared_dsn: str) -> None:
    """A claim decides by the registry and the rows of one moment.

    The claim is held up between its first look at the registry and its rows. Meanwhile a second handler is
    subscribed, and then an event is published: both are owed it, so the claim planned for one must not have it (LSN-7).
    """
    holder, worker = await connect(shared_dsn), Outbox(await connect(shared_dsn))
    try:
        await outbox.subscribe(HANDLER, EVENT)
        version = await outbox.subscriptions_version()
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        claim = asyncio.create_task(worker.claim(version=version))
        await outbox.somebody_waits()
        await outbox.subscribe("shipping.send", EVENT)
        id = await Outbox(holder).insert()
        await transaction.commit()
        assert [row["id"] for row in await claim if row["id"]] == []
        assert await outbox.states(id) == ["pending"]
        assert await outbox.split(LANE) == 1
        siblings = await outbox.connection.fetch("SELECT handler_name FROM core.outbox WHERE origin_id = $1", id)
        assert {row[0] for row in siblings} == {HANDLER, "shipping.send"}
    finally:
        await holder.close()
        await worker.connection.close()


async def test_a_claim_says_what_was_handled_already(outbox: Outbox) -> None:
    """Per handler and idempotency key, whichever row it came with (LSN-6)."""
    first = await outbox.held(idempotency_key="k")
    await outbox.deliver(first)
    await outbox.insert(idempotency_key="k")
    await outbox.insert(idempotency_key="k", event_type="order.paid")
    await outbox.insert(idempotency_key="k2")
    rows = await outbox.claim(Lane(), Lane("*/order.paid", handler="shipping.send"))
    assert {(row["route"], row["idempotency_key"]): row["handled"] for row in rows} == {
        (LANE, "k"): True,
        ("*/order.paid", "k"): False,
        (LANE, "k2"): False,
    }


async def test_a_claim_says_what_has_expired(outbox: Outbox) -> None:
    """Expiry is judged by the database's clock at the claim (PUB-2)."""
    now = await outbox.value("SELECT now()")
    past = await outbox.insert(expires_at=now - timedelta(seconds=1))
    future = await outbox.insert(expires_at=now + timedelta(hours=1))
    assert {row["id"]: row["expired"] for row in await outbox.claim()} == {past: True, future: False}


async def test_a_claim_says_how_long_the_event_has_been_failing(outbox: Outbox) -> None:
    """max_total_delay needs it (RTY-1)."""
    held = await outbox.held()
    await outbox.retry(held)
    await outbox.connection.execute(
        "UPDATE core.outbox SET first_failed_at = first_failed_at - interval '90 seconds' WHERE id = $1", held.id
    )
    [row] = await outbox.claim(Lane(HANDLER))
    assert 90 <= row["failing_for"] < 100


# --- the fence ---


@pytest.mark.parametrize("name", SETTLES)
async def test_a_foreign_token_changes_nothing(outbox: Outbox, name: str) -> None:
    """A wrong token is answered with the id, whatever state the row is in (S4, LSN-3)."""
    held = await outbox.held()
    rows = {
        "in_flight": held.id,
        "delivered": (await outbox.held()).id,
        "failed": await outbox.failed(),
        "pending": await outbox.insert(),
    }
    delivered = await outbox.row(rows["delivered"])
    await outbox.deliver(InFlight(delivered["id"], delivered["lease_token"]))
    for status, id in rows.items():
        before = await outbox.row(id)
        assert before["status"] == status
        assert await SETTLES[name](outbox, InFlight(id, NOBODY)) == [id], status
        assert await outbox.row(id) == before, status
    assert await SETTLES[name](outbox, InFlight(NOBODY, held.token)) == [NOBODY]


@pytest.mark.parametrize("name", SETTLES)
async def test_of_a_batch_only_the_lost_are_answered(outbox: Outbox, name: str) -> None:
    """A lost lease in a batch costs nobody else anything (LSN-3)."""
    await outbox.insert_many(5)
    held = await outbox.hold()
    lost = [held[1]._replace(token=NOBODY), held[3]._replace(token=NOBODY)]
    batch = [held[0], lost[0], held[2], lost[1], held[4]]
    random.shuffle(batch)
    calls: dict[str, Callable[..., Awaitable[list[UUID]]]] = {
        "deliver": outbox.deliver,
        "deliver_duplicate": lambda *held: outbox.deliver(*held, record=False),
        "retry": outbox.retry,
        "fail": outbox.fail,
        "release": outbox.release,
        "snooze": lambda *held: outbox.release(*held, delay=5),
        "extend": outbox.extend,
    }
    assert sorted(await calls[name](*batch)) == sorted(each.id for each in lost)
    assert await outbox.states(*(each.id for each in lost)) == ["in_flight", "in_flight"]


@pytest.mark.parametrize("first", [name for name in SETTLES if name != "extend"])
async def test_a_settle_that_is_sent_twice_is_done_once(outbox: Outbox, first: str) -> None:
    """The answer to the first was lost on the way, and the worker asks again (LSN-3)."""
    held = await outbox.held()
    assert await SETTLES[first](outbox, held) == []
    settled = await outbox.row(held.id)
    for name, settle in SETTLES.items():
        assert await settle(outbox, held) == [held.id], name
        assert await outbox.row(held.id) == settled, name


async def test_an_empty_batch_is_no_error(outbox: Outbox) -> None:
    assert await outbox.deliver() == await outbox.retry() == await outbox.fail() == []
    assert await outbox.release() == await outbox.extend() == []


# --- settling ---


async def test_extending_moves_the_end_of_the_lease(outbox: Outbox) -> None:
    """From the database's now on, with the same token and attempt (LSN-3)."""
    held = await outbox.held()
    await outbox.expire_lease(held.id)
    assert await outbox.extend(held, lease=120) == []
    row = await outbox.row(held.id)
    assert row["lease_expires_at"] - await outbox.value("SELECT now()") > timedelta(seconds=119)
    assert (row["lease_token"], row["attempts"]) == (held.token, 1)
    assert await outbox.claim() == []


async def test_delivering_settles_the_row_and_writes_the_inbox(outbox: Outbox) -> None:
    """Both in one statement (LSN-3, LSN-6)."""
    held = await outbox.held(idempotency_key="k")
    assert await outbox.deliver(held) == []
    row = await outbox.row(held.id)
    assert (row["status"], row["handler_name"], row["attempts"]) == ("delivered", HANDLER, 1)
    assert row["delivered_at"] == row["settled_at"] is not None
    assert (row["lease_token"], row["lease_expires_at"]) == (None, None)
    assert row["claimed_by"] is not None, "operators ask who delivered it"
    assert await inbox(outbox) == [(HANDLER, "k")]


async def test_a_duplicate_is_settled_without_a_second_inbox_row(outbox: Outbox) -> None:
    """The same key published twice, delivered in one batch, apart, and without recording (PUB-5, LSN-6)."""
    held = [await outbox.held(idempotency_key=key) for key in ("k", "k", "k", "other")]
    assert await outbox.deliver(held[0], held[1], held[3]) == []
    assert await outbox.deliver(held[2], record=False) == []
    assert await outbox.states(*(each.id for each in held)) == ["delivered"] * 4
    assert await inbox(outbox) == [(HANDLER, "k"), (HANDLER, "other")]
    again = await outbox.held(idempotency_key="k")
    assert await outbox.deliver(again) == []
    assert len(await inbox(outbox)) == 2


async def test_a_duplicate_that_is_settled_at_the_same_moment_waits_for_the_first(
    outbox: Outbox, other: Outbox
) -> None:
    """Two rows with one key, two workers: one inbox row, both rows settled, no error (PUB-5, E1)."""
    for _ in range(2):
        await outbox.insert(idempotency_key="k")
    one, two = await outbox.hold()
    async with outbox.connection.transaction():
        await outbox.deliver(one)
        second = asyncio.create_task(other.deliver(two))
        await outbox.somebody_waits()
    async with asyncio.timeout(10):
        assert await second == []
    assert await outbox.states(one.id, two.id) == ["delivered", "delivered"]
    assert await inbox(outbox) == [(HANDLER, "k")]


async def test_retrying_returns_the_row_to_its_handlers_lane(outbox: Outbox) -> None:
    """The delay runs on the database's clock, the first failure is kept, the attempt stays counted (RTY-1)."""
    held = await outbox.held()
    assert await outbox.retry(held, delay=30, error="one") == []
    row = await outbox.row(held.id)
    now = await outbox.value("SELECT now()")
    assert (row["status"], row["attempts"], row["last_error"]) == ("pending", 1, "one")
    assert (row["handler_name"], row["route"]) == (HANDLER, HANDLER)
    assert (row["claimed_by"], row["lease_token"], row["lease_expires_at"]) == (None, None, None)
    assert timedelta(seconds=29) < row["available_at"] - now <= timedelta(seconds=30)
    first = row["first_failed_at"]
    await outbox.connection.execute("UPDATE core.outbox SET available_at = now()")
    [again] = await outbox.hold(Lane(HANDLER))
    await outbox.retry(again, error="two")
    row = await outbox.row(held.id)
    assert (row["first_failed_at"], row["attempts"], row["last_error"]) == (first, 2, "two")


@pytest.mark.parametrize("reason", ["max_deliveries", "retry_terminal", "rejected", "cancelled", "expired"])
async def test_failing_keeps_the_reason(outbox: Outbox, reason: str) -> None:
    """A dead letter has a reason, an error and a signature; what is nobody's to put right is no
    dead letter (DLQ-1, DLQ-5).
    """
    held = await outbox.held()
    assert await outbox.fail(held, reason=reason, error="boom", signature="ValueError:1") == []
    row = await outbox.row(held.id)
    assert (row["status"], row["failure_reason"], row["last_error"]) == ("failed", reason, "boom")
    assert (row["error_signature"], row["handler_name"], row["attempts"]) == ("ValueError:1", HANDLER, 1)
    assert row["failed_at"] == row["settled_at"] == row["first_failed_at"] is not None
    assert (row["lease_token"], row["lease_expires_at"], row["delivered_at"]) == (None, None, None)
    listed = await outbox.connection.fetch("SELECT id, event_id FROM core.failed")
    literal = await outbox.connection.fetch("SELECT id FROM core.outbox WHERE status = 'failed' AND deleted_at IS NULL")
    if reason in ("cancelled", "expired"):
        assert row["deleted_at"] == row["failed_at"]
        assert listed == literal == []
    else:
        assert row["deleted_at"] is None
        assert [tuple(each) for each in listed] == [(held.id, held.id)]
        assert [each["id"] for each in literal] == [held.id]
    assert await inbox(outbox) == []


async def test_failing_without_an_error_keeps_the_last_one(outbox: Outbox) -> None:
    """max_deliveries means that the handler was not invoked; what it said before is worth keeping (DLQ-1)."""
    held = await outbox.held()
    await outbox.retry(held, error="the last words")
    [again] = await outbox.hold(Lane(HANDLER))
    await outbox.fail(again, reason="max_deliveries", error=None, signature=None)
    assert (await outbox.row(held.id))["last_error"] == "the last words"


async def test_an_unknown_reason_is_refused_as_a_whole(outbox: Outbox) -> None:
    """An illegal transition is an error, and nothing of its batch is written (S4)."""
    await outbox.insert_many(2)
    held = await outbox.hold()
    for reason in ("whatever", "", None):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await outbox.fail(*held, reason=reason)  # type: ignore[arg-type]
    assert await outbox.states(*(each.id for each in held)) == ["in_flight", "in_flight"]


async def test_a_handler_that_would_have_the_name_of_a_lane_is_refused(outbox: Outbox) -> None:
    """Whatever settles an event for it (S4, LSN-1)."""
    held = await outbox.held()
    for function, values in (
        ("outbox_deliver", {"routes": [held.route], "handlers": ["a/b"], "record": True, "outcome": "delivered"}),
        (
            "outbox_deliver_and_delete",
            {"routes": [held.route], "handlers": ["a/b"], "record": True, "outcome": "delivered"},
        ),
        ("outbox_retry", {"handlers": ["a/b"], "delays": [timedelta()], "errors": ["boom"]}),
    ):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await outbox.call(function, ids=[held.id], tokens=[held.token], **values)
    assert await outbox.states(held.id) == ["in_flight"]


async def test_giving_back_burns_no_attempt(outbox: Outbox) -> None:
    """The row is as if it had never been claimed, in its old place (LSN-4)."""
    id = await outbox.insert()
    before = await outbox.row(id)
    [held] = await outbox.hold()
    assert await outbox.release(held) == []
    assert await outbox.row(id) == before
    [held] = await outbox.hold()
    assert (await outbox.row(id))["attempts"] == 1


async def test_snoozing_delays_and_burns_no_attempt(outbox: Outbox) -> None:
    """Like giving back, but due later, and still in the lane of its event (LSN-8)."""
    held = await outbox.held()
    assert await outbox.release(held, delay=30) == []
    row = await outbox.row(held.id)
    left = row["available_at"] - await outbox.value("SELECT now()")
    assert timedelta(seconds=29) < left <= timedelta(seconds=30)
    assert (row["status"], row["attempts"], row["handler_name"], row["last_error"]) == ("pending", 0, None, None)


async def test_giving_back_tells_the_others_to_look_again(outbox: Outbox, other: Outbox) -> None:
    """The rows lie below the other workers' marks, so each channel gets one `rescan` (LSN-4)."""
    heard: list[tuple[str, str]] = []
    told = asyncio.Event()

    def hear(_connection: object, _pid: int, channel: str, text: object) -> None:
        heard.append((channel, str(text)))
        if channel == "done":
            told.set()

    for channel in (CHANNEL, "outbox_slow", "done"):
        await other.connection.add_listener(channel, hear)
    try:
        await outbox.connection.execute("SET holdfast.notify = 'off'")  # no bell for the inserts
        held = [await outbox.held() for _ in range(3)] + [await outbox.held(channel="outbox_slow")]
        await outbox.release(*held)
        await outbox.release(held[0])  # lost: nothing to tell
        [again] = [each for each in await outbox.hold() if each.id == held[0].id]
        await outbox.release(again, delay=5)  # it left its place: nobody has to look back
        await outbox.connection.execute("NOTIFY done")
        async with asyncio.timeout(5):
            await told.wait()
    finally:
        await other.connection.reset()
        await outbox.connection.execute("RESET holdfast.notify")
    assert sorted(heard) == [("done", ""), (CHANNEL, "rescan"), ("outbox_slow", "rescan")]


# --- transactional handlers ---


async def test_a_transactional_handlers_writes_settle_with_it(outbox: Outbox, other: Outbox) -> None:
    """Inbox row, effects and settle are visible together or not at all (LSN-5, LSN-6)."""
    held = await outbox.held(idempotency_key="k")
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await outbox.enter(held) == "run"
    assert await inbox(other) == []
    assert await other.states(held.id) == ["in_flight"]
    await transaction.commit()
    assert await inbox(other) == [(HANDLER, "k")]
    row = await other.row(held.id)
    assert (row["status"], row["handler_name"], row["lease_token"]) == ("delivered", HANDLER, None)


async def test_a_transactional_handler_that_fails_leaves_no_inbox_row(outbox: Outbox) -> None:
    """Rolled back with the handler, so the retry runs (E2)."""
    held = await outbox.held(idempotency_key="k")
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await outbox.enter(held) == "run"
    await transaction.rollback()
    assert await inbox(outbox) == []
    assert await outbox.retry(held) == []


async def test_entering_tells_duplicates_and_lost_leases(outbox: Outbox) -> None:
    """A duplicate is settled without running, a lost lease does nothing (LSN-5, LSN-6)."""
    first = await outbox.held(idempotency_key="k")
    await outbox.deliver(first)
    duplicate = await outbox.held(idempotency_key="k")
    async with outbox.connection.transaction():
        assert await outbox.enter(duplicate) == "duplicate"
    assert await outbox.states(duplicate.id) == ["delivered"]
    async with outbox.connection.transaction():
        for lost in (first, InFlight(duplicate.id, NOBODY), InFlight(NOBODY, duplicate.token)):
            assert await outbox.enter(lost) == "lost"
            assert await outbox.reopen(lost) is False
    assert await inbox(outbox) == [(HANDLER, "k")]


async def test_a_row_inside_a_transactional_handler_is_neither_claimed_nor_lost(outbox: Outbox, other: Outbox) -> None:
    """Its lock protects it from claims, even when its lease cannot be extended (LSN-3, LSN-5)."""
    held = await outbox.held()
    await outbox.expire_lease(held.id)
    async with outbox.connection.transaction():
        assert await outbox.enter(held) == "run"
        async with asyncio.timeout(5):
            assert await other.claim() == []
            assert await other.extend(held) == []
            assert await other.replay(held.id) == 0
    assert await outbox.states(held.id) == ["delivered"]


async def test_extending_does_not_break_a_repeatable_read_handler(outbox: Outbox, other: Outbox) -> None:
    """Under REPEATABLE READ a row that changes after the snapshot would fail the settle with 40001 (LSN-5)."""
    held = await outbox.held()
    async with outbox.connection.transaction(isolation="repeatable_read"):
        assert await outbox.enter(held) == "run"
        assert await other.extend(held, lease=300) == []
    assert await outbox.states(held.id) == ["delivered"]


async def test_a_silent_transaction_is_ended_by_the_server(outbox: Outbox) -> None:
    """A handler's limit is the server's too, for its transaction only; its own statements wait as they like (LSN-5)."""
    held = await outbox.held()
    async with outbox.connection.transaction():
        assert await outbox.enter(held, idle=7.25) == "run"
        assert await outbox.value("SHOW idle_in_transaction_session_timeout") == "7250ms"
        assert await outbox.value("SHOW lock_timeout") == "0"
    assert await outbox.value("SHOW idle_in_transaction_session_timeout") == "0"


@pytest.mark.parametrize("name", SETTLES)
async def test_a_failed_handler_is_settled_in_its_transaction(outbox: Outbox, other: Outbox, name: str) -> None:
    """The inbox row goes, and the row stays locked until what became of the attempt is settled (LSN-5, E2)."""
    held = await outbox.held(idempotency_key="k")
    before = await outbox.row(held.id)
    async with outbox.connection.transaction():
        assert await outbox.enter(held) == "run"
        savepoint = outbox.connection.transaction()
        await savepoint.start()
        await savepoint.rollback()
        assert await outbox.reopen(held) is True
        again = await outbox.row(held.id)
        changed = {key for key in before.keys() if before[key] != again[key]}  # noqa: SIM118 - a Record yields values
        assert changed <= {"lease_expires_at"}
        assert await other.claim() == []
        assert await SETTLES[name](outbox, held) == []
    assert await inbox(outbox) == ([(HANDLER, "k")] if name == "deliver" else [])
    assert (await outbox.states(held.id))[0] != "in_flight" or name == "extend"


async def test_a_failed_handler_of_a_siblings_lane(outbox: Outbox) -> None:
    """A row that is a handler's own stays its own (LSN-7)."""
    held = await outbox.held()
    assert await outbox.retry(held) == []
    [again] = await outbox.hold(Lane(HANDLER))
    async with outbox.connection.transaction():
        assert await outbox.enter(again) == "run"
        assert await outbox.reopen(again) is True
        assert await outbox.release(again) == []
    assert (await outbox.row(held.id))["route"] == HANDLER


@pytest.mark.parametrize("own_lane", [False, True])
async def test_a_retry_in_the_transaction_of_the_handler(outbox: Outbox, other: Outbox, own_lane: bool) -> None:
    """What takes one statement leaves the same as what takes two, and the row is locked until it commits (LSN-5,
    E2).
    """
    rows, counts = [], []
    for at_once in (False, True):
        held = await outbox.held(idempotency_key=f"k{at_once}")
        if own_lane:
            assert await outbox.retry(held) == []
            [held] = await outbox.hold(Lane(HANDLER))
        await outbox.connection.execute("DELETE FROM core.rollup_journal")
        async with outbox.connection.transaction():
            assert await outbox.enter(held) == "run"
            if at_once:
                await outbox.retry_entered(held, delay=60, error="down\x1eraised at here")
            else:
                assert await outbox.reopen(held) is True
                assert await outbox.retry(held, delay=60, error="down\x1eraised at here") == []
            assert await other.claim() == []
        row = dict(await outbox.row(held.id))
        assert row["available_at"] - row["first_failed_at"] >= timedelta(seconds=59)
        differs = ("id", "event_id", "idempotency_key", "seq", "available_at", "first_failed_at", "occurred_at")
        rows.append({key: value for key, value in row.items() if key not in differs and not key.endswith("created_at")})
        counted = "SELECT outcome, sum(n) FROM core.rollup_journal GROUP BY 1 HAVING sum(n) <> 0 ORDER BY 1"
        counts.append([tuple(each) for each in await outbox.connection.fetch(counted)])
    assert rows[0] == rows[1]
    assert (rows[1]["status"], rows[1]["last_error"], rows[1]["traceback"]) == ("pending", "down", "raised at here")
    assert counts == [[("retried", 1)]] * 2
    assert await inbox(outbox) == []


async def test_only_what_the_transaction_has_entered_is_retried(outbox: Outbox) -> None:
    """Not what is committed, nor what is in flight; a duplicate leaves the inbox row of the first (LSN-3, LSN-6)."""
    first, second = await outbox.held(idempotency_key="k"), await outbox.held(idempotency_key="k")
    async with outbox.connection.transaction():
        assert await outbox.enter(first) == "run"
    for held in (first, second):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
            await outbox.retry_entered(held)
    async with outbox.connection.transaction():
        assert await outbox.enter(second) == "duplicate"
        await outbox.retry_entered(second)
    assert await inbox(outbox) == [(HANDLER, "k")]
    assert await outbox.states(first.id, second.id) == ["delivered", "pending"]


async def test_only_the_transaction_that_entered_can_reopen(outbox: Outbox) -> None:
    """What is committed is delivered for good, and a duplicate has no inbox row of its own (LSN-3, LSN-6)."""
    first, second = await outbox.held(idempotency_key="k"), await outbox.held(idempotency_key="k")
    async with outbox.connection.transaction():
        assert await outbox.enter(first) == "run"
    async with outbox.connection.transaction():
        assert await outbox.reopen(first) is False
        assert await outbox.enter(second) == "duplicate"
        assert await outbox.reopen(second) is True
        assert await outbox.release(second) == []
    assert await inbox(outbox) == [(HANDLER, "k")]
    assert await outbox.states(first.id, second.id) == ["delivered", "pending"]


async def test_a_second_copy_waits_until_the_first_has_committed(outbox: Outbox, other: Outbox) -> None:
    """Two transactional handlers with one key at the same time: one runs, the other is a duplicate (E1, PUB-5)."""
    for _ in range(2):
        await outbox.insert(idempotency_key="k")
    one, two = await outbox.hold()
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await outbox.enter(one) == "run"
    async with other.connection.transaction():
        second = asyncio.create_task(other.enter(two))
        await outbox.somebody_waits()
        await transaction.commit()
        async with asyncio.timeout(5):
            assert await second == "duplicate"
    assert await outbox.states(one.id, two.id) == ["delivered", "delivered"]


# --- many at once ---


@pytest.mark.slow
async def test_overlapping_settles_never_deadlock(outbox: Outbox, shared_dsn: str) -> None:
    """Eight connections settle, extend and replay the same rows in random order: no 40P01, and no row lost (B12)."""
    ids = await outbox.insert_many(60, idempotency_key="'k' || n % 15")
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(8)]
    known = {id: InFlight(id, NOBODY) for id in ids}
    actions = ("claim", "claim", "replay", "replay", "fail", "fail", "retry", "release", "extend", "deliver")
    lanes = (Lane(limit=60), Lane(HANDLER, limit=60))
    counts: Counter[str] = Counter()
    faults: list[str] = []
    began = time.monotonic()

    def going() -> bool:
        """For a second; on a slow machine longer, until there was enough of everything."""
        enough = min(counts["claim"], counts["fail"], counts["replay"]) > 60 and counts.keys() == set(actions)
        return time.monotonic() - began < (1.0 if enough else 30.0)

    async def churn(session: Outbox, choose: random.Random) -> None:
        while going():
            # Few are delivered, which is for good, and many fail, which a replay undoes.
            action = choose.choice(actions if counts["deliver"] < 30 else actions[:-1])
            batch = choose.sample(list(known.values()), 2 if action == "deliver" else 40)
            if action == "claim":
                claimed = await session.hold(*lanes, version=1)
                known.update((held.id, InFlight(held.id, held.token)) for held in claimed)
                counts[action] += len(claimed)
            elif action == "replay":
                async with session.connection.transaction():
                    for held in batch:
                        counts[action] += await session.replay(held.id)
            else:
                counts[action] += len(batch) - len(await getattr(session, action)(*batch))

    async def guarded(session: Outbox, seed: int) -> None:
        while going():
            try:
                await churn(session, random.Random(seed))
            except asyncpg.PostgresError as error:
                faults.append(f"{error.sqlstate} {error}")

    try:
        await asyncio.gather(*(guarded(session, seed) for seed, session in enumerate(sessions)))
    finally:
        for session in sessions:
            await session.connection.close()
    assert faults == []
    assert counts.keys() == set(actions), counts
    assert min(counts["claim"], counts["fail"], counts["replay"]) > 60, counts
    assert await outbox.value("SELECT count(*) FROM core.outbox") == len(ids)
    delivered = await outbox.connection.fetch(
        "SELECT DISTINCT idempotency_key FROM core.outbox WHERE status = 'delivered'"
    )
    assert await inbox(outbox) == sorted((HANDLER, row[0]) for row in delivered)


async def test_the_same_keys_in_opposite_order_never_deadlock(outbox: Outbox, shared_dsn: str) -> None:
    """Inbox rows are written in the order of their keys, whatever the order of the events (B12, PUB-5)."""
    sessions = [Outbox(await connect(shared_dsn)) for _ in range(2)]
    try:
        for number in range(6):
            batches = []
            for start, key in ((0, "n"), (500, "501 - n")):
                # Ids that grow with n, so that one batch meets the keys rising and the other falling.
                id = f"rpad(lpad(to_hex(n + {start + 1000 * number}), 12, '0') || '70008', 32, '0')::uuid"
                await outbox.insert_many(500, id=id, idempotency_key=f"'{number}-' || {key}")
                batches.append(await outbox.hold(Lane(limit=500)))
            settles = (session.deliver(*batch) for session, batch in zip(sessions, batches, strict=True))
            assert await asyncio.gather(*settles) == [[], []]
    finally:
        for session in sessions:
            await session.connection.close()
    assert len(await inbox(outbox)) == 6 * 500


async def test_a_handler_is_entered_at_once_where_nothing_is_in_its_way(outbox: Outbox) -> None:
    """A duplicate, a lost lease and a session that is not clean are left to outbox_enter; nothing is written
    (LSN-5).
    """
    first, second = await outbox.insert(idempotency_key="k"), await outbox.insert(idempotency_key="k")
    token = uuid.uuid4()
    assert len(await outbox.claim(token=token)) == 2
    values: dict[str, object] = {"handler": HANDLER, "idle": timedelta(seconds=35), "look": True}

    async def enter(id: UUID, token: UUID) -> None:
        await outbox.call("outbox_enter_at_once", id=id, token=token, **values)

    async with outbox.connection.transaction():
        await enter(first, token)
        assert await outbox.value("SHOW idle_in_transaction_session_timeout") == "35s"
    for id, given in ((second, token), (first, token), (second, uuid.uuid4())):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="at once"):
            await enter(id, given)
    assert await outbox.states(first, second) == ["delivered", "in_flight"]
    await outbox.connection.execute("UPDATE core.outbox SET idempotency_key = 'other' WHERE id = $1", second)
    await outbox.connection.execute("LISTEN something")
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="at once"):
        await enter(second, token)
    await outbox.connection.execute("UNLISTEN *")
    await enter(second, token)
    assert await outbox.states(second) == ["delivered"]
