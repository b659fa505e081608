"""Dead letters (DLQ-1, DLQ-5): what failed, why, since when and how much, and putting single ones right."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast import HandlerRegistry, TerminalHandlerError
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused, Selection
from holdfast.postgres.operations import failed as statements
from tests.operator.support import ACTOR, CAUSES, EVENT, HANDLER, driver_of, fail, fail_with, states, subscribe
from tests.worker.support import drained, publish_many, running, siblings


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


async def row(conn: asyncpg.Connection, id: UUID) -> asyncpg.Record:
    return await conn.fetchrow("SELECT * FROM core.outbox WHERE id = $1", id)


# --- groups ---

# Ids that grow, like real ones, and no triggers: a million rows should take seconds.
DELIVERED = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, status, settled_at, delivered_at,
                         handler_name)
SELECT ('0190' || lpad(to_hex(n), 28, '0'))::uuid, 'order.placed', 'shop', '{"order_id": 1}', n::text, 'delivered',
       now(), now(), 'billing.charge_card'
FROM generate_series(1, $1::int) n
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ten_thousand_failures_of_seven_causes_are_seven_groups(
    conn: asyncpg.Connection, operator: Operator
) -> None:
    """In under a second, with 200,000 delivered rows beside them (DLQ-1, DLQ-5, OBS-4)."""
    ids = await fail_with(conn, [CAUSES[n % 7](n) for n in range(5_000)])
    await conn.execute("SET session_replication_role = replica")
    await conn.execute(DELIVERED, 200_000)
    await conn.execute("RESET session_replication_role")
    ids = await fail_with(conn, [CAUSES[n % 7](n) for n in range(5_000, 10_000)]) + ids
    await conn.execute("ANALYZE core.outbox")
    await operator.failed.groups()  # the connection's first look
    begun = time.perf_counter()
    found = await operator.failed.groups()
    elapsed = time.perf_counter() - begun
    assert sorted(group.count for group in found.groups) == [1428] * 3 + [1429] * 4
    assert (found.examined, found.is_more) == (10_000, False)
    assert {group.sample_error.partition(":")[0] for group in found.groups if group.sample_error} == {
        type(cause(0)).__name__ for cause in CAUSES
    }
    newest = next(group for group in found.groups if group.signature.startswith("ValueError"))
    assert newest.first_seen is not None and newest.first_seen < newest.last_seen
    assert (newest.reasons, newest.event_types, newest.generations) == (["retry_terminal"], [EVENT], [0])
    assert elapsed < 1, f"took {elapsed:.2f} s"

    begun = time.perf_counter()
    page = await operator.failed.page(Selection(signature=newest.signature), limit=1_000)
    assert time.perf_counter() - begun < 1
    assert len(page) == 1_000
    assert [event.failed_at for event in page] == sorted((event.failed_at for event in page), reverse=True)


async def test_a_worker_stores_the_cause_when_it_fails(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Signatures are written with the failure, not guessed from texts later (DLQ-5)."""
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge_card(event: object) -> None:
        n = event.payload["n"]  # type: ignore[attr-defined]
        raise TerminalHandlerError(f"no charge {n}") from CAUSES[n % 7](n)

    await publish_many(conn, EVENT, 70)
    async with running(dsn, registry):
        await drained(conn)
    found = await operator.failed.groups()
    assert [group.count for group in found.groups] == [10] * 7


async def test_a_group_has_a_note(conn: asyncpg.Connection, operator: Operator) -> None:
    """What somebody found out is beside the failures, whoever looks next (DLQ-5)."""
    await fail_with(conn, [CAUSES[n % 2](n) for n in range(4)])
    first, second = (await operator.failed.groups()).groups
    assert await operator.failed.note(first.name, "the old price list; ann looks into it") is True
    noted = {group.name: (group.note, group.noted_by) for group in (await operator.failed.groups()).groups}
    assert noted == {first.name: ("the old price list; ann looks into it", ACTOR), second.name: (None, None)}
    assert await operator.failed.note(first.name, "fixed in 1.4", dry_run=True) is True
    assert await operator.failed.note(first.name, None) is False
    assert [group.note for group in (await operator.failed.groups()).groups] == [None, None]
    with pytest.raises(ConfigurationError, match="matches no dead letter"):
        await operator.failed.note(f"{HANDLER}/ValueError:0000", "nothing")
    trail = await conn.fetch("SELECT actor, arguments->>'note' FROM core.audit WHERE action = 'note' ORDER BY id")
    assert [tuple(line) for line in trail] == [(ACTOR, "the old price list; ann looks into it"), (ACTOR, None)]


async def test_counts_end_at_their_limit(
    conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of failures does not become a flood of reads (S9)."""
    await fail(conn, 30)
    monkeypatch.setattr(statements, "MOST", 20)
    found = await operator.failed.groups()
    assert (found.examined, found.groups[0].count) == (20, 20)


# --- filters ---


async def test_every_field_of_a_selection_selects(conn: asyncpg.Connection, operator: Operator) -> None:
    """And all that are given have to match (DLQ-4)."""
    await fail(conn, 3)
    await fail(conn, 2, handler="mail.thank", event_type="order.paid", generation=4)
    await conn.execute("UPDATE core.outbox SET source = 'bank' WHERE handler_name = 'mail.thank'")
    await fail_with(conn, [KeyError("sku-1")])
    await conn.execute("UPDATE core.outbox SET failure_reason = 'rejected' WHERE error_signature LIKE 'KeyError%'")
    (last,) = await operator.failed.page(Selection(reason="rejected"))
    assert last.error_signature is not None and last.error_signature.startswith("KeyError:")
    counts = {
        Selection(handler=HANDLER): 4,
        Selection(handler="mail.thank"): 2,
        Selection(event_type="order.paid"): 2,
        Selection(source="bank"): 2,
        Selection(source="shop"): 4,
        Selection(generation=4): 2,
        Selection(generation=0): 4,
        Selection(signature=last.error_signature): 1,
        Selection(handler="mail.thank", signature=last.error_signature): 0,
        Selection.group(f"{HANDLER}/{last.error_signature}"): 1,
        Selection(since=last.failed_at): 1,
        Selection(until=last.failed_at): 5,
        Selection(since=last.failed_at - timedelta(days=1), until=last.failed_at): 5,
        Selection(): 6,
    }
    for selection, count in counts.items():
        assert len(await operator.failed.page(selection)) == count, selection


async def test_pages_follow_each_other(conn: asyncpg.Connection, operator: Operator) -> None:
    """Nothing twice and nothing left out, whatever shares a moment (OPS-1)."""
    ids = await fail(conn, 25)
    await conn.execute("UPDATE core.outbox SET failed_at = date_trunc('second', failed_at)")
    seen: list[UUID] = []
    last = None
    while page := await operator.failed.page(limit=10, before=last):
        seen += [event.id for event in page]
        last = page[-1]
    assert len(seen) == 25 and set(seen) == set(ids)
    assert [event.id async for event in operator.failed.pages()] == seen


async def test_an_export_has_payloads_only_if_asked(conn: asyncpg.Connection, operator: Operator) -> None:
    """S7."""
    await fail(conn, 2)
    assert [event.payload async for event in operator.failed.pages()] == [None, None]
    assert [event.payload async for event in operator.failed.pages(payload=True)] == [{"n": 1}, {"n": 2}]


# --- one event ---


async def test_everything_about_one_event(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Cycles, attempts, error, siblings, who handled it, and what operators did (DLQ-3, OPS-2)."""
    registry = HandlerRegistry()
    broken = True

    @registry.handler(EVENT, name=HANDLER)
    async def charge_card(event: object) -> None:
        if broken:
            raise TerminalHandlerError("declined")

    @registry.handler(EVENT, name="mail.thank")
    async def thank(event: object) -> None: ...

    (event_id,) = await publish_many(conn, EVENT, 1, headers={"tenant": "acme"})
    async with running(dsn, registry):
        await drained(conn)
        rows = await siblings(conn, event_id)
        failed = rows[HANDLER]["id"]
        moved = await operator.failed.replay([event_id], reason="the terminal is back")
        assert moved.moved == [failed], "an event's id stands for its failed delivery"
        await drained(conn)
    await operator.failed.discard([failed])

    for id in (event_id, failed, rows["mail.thank"]["id"]):
        found = await operator.events.detail(id)
        assert (found.event_id, found.event_type, found.payload) == (event_id, EVENT, None)
        assert list(found.handled_by) == ["mail.thank"]
        by_handler = {each.handler_name: each for each in found.deliveries}
        assert {name: each.status for name, each in by_handler.items()} == {
            "*": "delivered",
            HANDLER: "failed",
            "mail.thank": "delivered",
        }
    card = by_handler[HANDLER]
    assert (card.attempts, card.failure_reason, card.last_error) == (
        1,
        "retry_terminal",
        "holdfast.errors.TerminalHandlerError: declined",
    )
    assert [(cycle.replayed_by, cycle.attempts) for cycle in card.cycles] == [(ACTOR, 1)]
    assert [(line.action, line.reason) for line in card.actions] == [
        ("replay", "the terminal is back"),
        ("discard", None),
    ]
    assert card.deleted_at is not None
    assert by_handler["mail.thank"].actions == []
    full = await operator.events.detail(event_id, payload=True)
    assert (full.payload, full.headers["tenant"]) == ({"n": 0}, "acme")
    with pytest.raises(ConfigurationError, match="is not an event"):
        await operator.events.detail(uuid4())


async def test_open_events_are_listed(conn: asyncpg.Connection, operator: Operator) -> None:
    """OPS-1."""
    await publish_many(conn, EVENT, 3)
    await publish_many(conn, "order.paid", 2)
    await fail(conn, 2)
    assert len(await operator.events.page()) == 5
    assert {event.event_type for event in await operator.events.page(event_type="order.paid")} == {"order.paid"}
    assert len(await operator.events.page(limit=4)) == 4
    assert await operator.events.page(generation=7) == []


async def test_open_events_are_found_by_the_handler_they_are_owed_to(
    conn: asyncpg.Connection, operator: Operator
) -> None:
    """Also before a worker has claimed them, by the subscriptions of the handler (OPS-1, LSN-7)."""
    placed = await publish_many(conn, EVENT, 2)
    await publish_many(conn, "user.left", 1)
    await subscribe(conn, HANDLER, "order.*")
    await subscribe(conn, "mail.thank", "user.left")
    assert {event.id for event in await operator.events.page(handler=HANDLER)} == set(placed)
    await conn.execute("UPDATE core.outbox SET target = 'ledger' WHERE id = $1", placed[0])
    assert [event.id for event in await operator.events.page(handler=HANDLER)] == [placed[1]]
    await conn.execute("UPDATE core.outbox SET target = NULL, handler_name = $2 WHERE id = $1", placed[0], "mail.thank")
    assert [event.id for event in await operator.events.page(handler=HANDLER)] == [placed[1]]
    assert placed[0] in {event.id for event in await operator.events.page(handler="mail.thank")}
    await subscribe(conn, "mail.thank", EVENT)
    assert [event.id for event in await operator.events.page(handler=HANDLER)] == [placed[1]]
    with pytest.raises(Refused):
        await operator.events.select(handler=HANDLER)  # to be cancelled, and another handler is owed it too
    await operator.handlers.retire("mail.thank")
    assert await operator.events.select(handler=HANDLER) == [placed[1]]
    await operator.handlers.retire(HANDLER)
    assert await operator.events.page(handler=HANDLER) == []


async def test_an_event_is_cancelled(conn: asyncpg.Connection, operator: Operator) -> None:
    """Once; what is settled stays (LSN-11, S17)."""
    (event_id,) = await publish_many(conn, EVENT, 1)
    assert (await operator.events.cancel(event_id, dry_run=True)).moved == [event_id]
    assert (await row(conn, event_id))["status"] == "pending"
    assert (await operator.events.cancel(event_id, reason="sent by mistake")).moved == [event_id]
    assert (await row(conn, event_id))["failure_reason"] == "cancelled"
    assert (await operator.events.cancel(event_id)).left == {"cancelled": 1}
    (delivery,) = (await operator.events.detail(event_id)).deliveries
    assert [(line.action, line.reason) for line in delivery.actions] == [("cancel", "sent by mistake")]
    assert (await operator.failed.restore([event_id])).left == {"cancelled": 1}


async def split(conn: asyncpg.Connection, *handlers: str) -> UUID:
    """An event that was split among handlers, with a pending delivery for each."""
    for handler in handlers:
        await subscribe(conn, handler)
    (event_id,) = await publish_many(conn, EVENT, 1)
    version = await conn.fetchval("SELECT version FROM core.subscriptions_version")
    await conn.fetch(SPLIT, version, f"*/{EVENT}")
    assert set(await siblings(conn, event_id)) == set(handlers)
    return event_id


SPLIT = """
SELECT * FROM core.outbox_split($1, 'outbox_default', 0, ARRAY[$2::text], '{1}', '{9}', '{0001-01-02}',
                                '{00000000-0000-0000-0000-000000000000}')
"""


async def test_an_event_that_was_split_is_cancelled_by_its_own_id(conn: asyncpg.Connection, operator: Operator) -> None:
    """For every handler that has not handled it; a delivery's id stands for that one alone (LSN-7, LSN-11)."""
    event_id = await split(conn, HANDLER, "ledger.book", "mail.thank")
    rows = {name: each["id"] for name, each in (await siblings(conn, event_id)).items()}
    assert (await operator.events.cancel(rows["mail.thank"])).moved == [rows["mail.thank"]]
    done = await operator.events.cancel(event_id, reason="sent by mistake")
    assert (set(done.moved), done.left) == ({rows[HANDLER], rows["ledger.book"]}, {"cancelled": 1})
    assert {each["failure_reason"] for each in (await siblings(conn, event_id)).values()} == {"cancelled"}
    assert (await operator.events.cancel(event_id)).left == {"cancelled": 3}
    with pytest.raises(ConfigurationError, match="is not an event"):
        await operator.events.cancel(uuid4())


async def test_an_event_is_found_when_its_published_row_is_gone(conn: asyncpg.Connection, operator: Operator) -> None:
    """Retention takes the row that was split before the deliveries that failed (DLQ-4, OBX-5)."""
    event_id = await split(conn, HANDLER, "mail.thank")
    open_id, dead = [each["id"] for _, each in sorted((await siblings(conn, event_id)).items(), reverse=True)]
    await conn.execute("DELETE FROM core.outbox WHERE id = $1", event_id)
    await conn.execute(
        """UPDATE core.outbox SET status = 'failed', failure_reason = 'rejected', failed_at = now(), settled_at = now()
           WHERE id = $1""",
        dead,
    )
    found = await operator.events.detail(event_id)
    assert (found.event_id, {each.id for each in found.deliveries}) == (event_id, {open_id, dead})
    assert await operator.failed.resolve([event_id]) == [dead]
    assert (await operator.failed.discard([event_id])).moved == [dead]
    assert (await operator.events.cancel(event_id)).moved == [open_id]


# --- discard and restore ---


async def test_a_discard_can_be_taken_back(conn: asyncpg.Connection, operator: Operator) -> None:
    """It says until when, which is the grace of the row's retention policy (DLQ-4, OBX-5)."""
    ids = await fail(conn, 3)
    dry = await operator.failed.discard(ids, dry_run=True)
    assert (dry.count, dry.dry_run) == (3, True)
    assert await states(conn) == {"failed": 3}
    done = await operator.failed.discard(ids[:2], reason="test orders")
    assert done.count == 2
    assert done.purge_at is not None
    now = await conn.fetchval("SELECT now()")
    # Forty-five days since it failed, and seven of grace.
    assert timedelta(days=51, hours=23) < done.purge_at - now < timedelta(days=52, hours=1)
    assert await states(conn) == {"failed": 1, "discarded": 2}
    assert [event.id for event in await operator.failed.page()] == ids[2:]
    assert (await operator.failed.discard(ids)).left == {"discarded": 2}
    assert (await operator.failed.replay(ids)).left == {"discarded": 3}
    assert (await operator.failed.restore(ids[:2])).count == 2
    assert (await operator.failed.restore(ids)).left == {"failed": 2}
    assert await states(conn) == {"failed": 3}
    assert (await operator.failed.replay(ids)).count == 3


async def test_what_lost_its_payload_cannot_be_restored(conn: asyncpg.Connection, operator: Operator) -> None:
    """There would be nothing to hand to a handler (OBX-5)."""
    (id,) = await fail(conn)
    await operator.failed.discard([id])
    await conn.execute("UPDATE core.outbox SET payload = NULL")
    assert (await operator.failed.restore([id])).left == {"stripped": 1}
    assert await states(conn) == {"discarded": 1}


# --- correcting ---


async def test_a_corrected_event_takes_the_place_of_a_dead_letter(
    dsn: str, conn: asyncpg.Connection, operator: Operator
) -> None:
    """A new, linked event for the handler that failed; its siblings are left in peace (DLQ-4)."""
    registry = HandlerRegistry()
    handled: list[tuple[str, object]] = []

    @registry.handler(EVENT, name=HANDLER)
    async def charge_card(event: object) -> None:
        if event.payload["n"] == 0:  # type: ignore[attr-defined]
            raise TerminalHandlerError("no amount")
        handled.append((HANDLER, event.payload))  # type: ignore[attr-defined]

    @registry.handler(EVENT, name="mail.thank")
    async def thank(event: object) -> None:
        handled.append(("mail.thank", event.payload))  # type: ignore[attr-defined]

    (event_id,) = await publish_many(conn, EVENT, 1, correlation_id="checkout-9")
    async with running(dsn, registry):
        await drained(conn)
        dry = await operator.failed.edit(event_id, {"n": 1}, dry_run=True)
        assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE id = $1", dry.new_id) == 0
        done = await operator.failed.edit(event_id, {"n": 1}, reason="the amount was missing")
        await drained(conn)
    assert handled == [("mail.thank", {"n": 0}), (HANDLER, {"n": 1})]
    old, new = await row(conn, done.id), await row(conn, done.new_id)
    assert (old["status"], old["deleted_at"] is not None) == ("failed", True)
    assert (new["status"], new["handler_name"], new["idempotency_key"]) == ("delivered", HANDLER, str(done.new_id))
    headers = json.loads(new["headers"])
    assert headers == {"correlation_id": "checkout-9", "causation_id": str(event_id), "edited_from": str(done.id)}
    line = await conn.fetchrow("SELECT actor, reason, arguments FROM core.audit WHERE action = 'edit'")
    assert (line["actor"], line["reason"]) == (ACTOR, "the amount was missing")
    assert json.loads(line["arguments"])["new_id"] == str(done.new_id)
    with pytest.raises(Refused, match="is edited, not failed"):
        await operator.failed.edit(done.id, {"n": 2})
    assert (await operator.failed.restore([done.id])).left == {"edited": 1}, "it would run beside the corrected one"
    (cycle,) = [d.cycles[-1] for d in (await operator.events.detail(event_id)).deliveries if d.id == done.id]
    assert (cycle.edited_to, cycle.replayed_by) == (done.new_id, ACTOR)
    assert await conn.fetchval("SELECT count(*) FROM core.audit WHERE action = 'edit' AND arguments ? 'refused'") == 1


@pytest.mark.parametrize("payload", [{"n": float("nan")}, {"n": {1, 2}}, {"n": "\x00"}, [1], None])
async def test_a_payload_that_cannot_be_stored_changes_nothing(
    conn: asyncpg.Connection, operator: Operator, payload: object
) -> None:
    """PUB-3."""
    (id,) = await fail(conn)
    with pytest.raises(ConfigurationError, match="payload"):
        await operator.failed.edit(id, payload)  # type: ignore[arg-type]
    assert await states(conn) == {"failed": 1}


async def test_an_operator_has_no_other_rights(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Every verb works with the rights of holdfast_operator alone (OBX-2)."""
    await subscribe(conn)
    ids = await fail(conn, 4)
    await driver_of(operator).execute("SET ROLE holdfast_operator")
    group = (await operator.failed.groups()).groups[0]
    await operator.failed.note(group.name, "seen")
    await operator.failed.page()
    await operator.events.detail(ids[0], payload=True)
    assert (await operator.failed.discard(ids[:1])).count == 1
    assert (await operator.failed.restore(ids[:1])).count == 1
    assert (await operator.failed.replay(ids[:1])).count == 1
    assert (await operator.failed.edit(ids[1], {"n": 9})).id == ids[1]
    assert (await operator.events.cancel(ids[0])).count == 1
    await driver_of(operator).execute("RESET ROLE")
