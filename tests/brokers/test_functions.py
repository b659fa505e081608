"""The functions of brokers, as a worker and an operator call them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.outbox import CHANNEL, EVENT, HANDLER, InFlight, Lane, Outbox, connect

pytestmark = pytest.mark.both_postgres

RELAY = "relay.nats"
OTHER = "mail.confirm"
FAR = datetime(2200, 1, 1, tzinfo=UTC)


async def via(outbox: Outbox, name: str, *handlers: str) -> int:
    values = {"handlers": list(handlers), "via": name, "actor": "ann@example.com", "reason": "moved"}
    return int((await outbox.call("handler_via", **values))[0][0])


async def look(outbox: Outbox, *events: dict[str, Any], handler: str = HANDLER) -> list[str]:
    values = {
        "handler": handler,
        "events": [each["event_id"] for each in events],
        "sources": [each["source"] for each in events],
        "keys": [each["idempotency_key"] for each in events],
    }
    return list((await outbox.call("broker_look", **values))[0][0])


async def enter(outbox: Outbox, event: dict[str, Any], handler: str = HANDLER) -> str:
    values = {
        "handler": handler,
        "event": event["event_id"],
        "source": event["source"],
        "key": event["idempotency_key"],
        "generation": 0,
        "idle": timedelta(seconds=60),
    }
    return str((await outbox.call("broker_enter", **values))[0][0])


async def leave(outbox: Outbox, event: dict[str, Any], handler: str = HANDLER) -> bool:
    values = {"handler": handler, "sources": [event["source"]], "keys": [event["idempotency_key"]], "generation": 0}
    return bool((await outbox.call("broker_leave", **values))[0][0])


async def park(
    outbox: Outbox, *events: dict[str, Any], token: UUID | None = None, handler: str = HANDLER
) -> list[UUID | None]:
    values = {
        "handler": handler,
        "channel": CHANNEL,
        "generation": 0,
        "worker": uuid.uuid4(),
        "lease": timedelta(seconds=60),
        "events": [json.dumps(each, default=str) for each in events],
        "tokens": [token] * len(events),
    }
    return list((await outbox.call("broker_park", **values))[0][0])


def message(**fields: Any) -> dict[str, Any]:
    """An event as it comes from a broker; its own row may be nowhere here."""
    event_id = fields.get("event_id") or uuid.uuid4()
    event = {
        "event_id": event_id,
        "event_type": EVENT,
        "event_version": 1,
        "occurred_at": datetime.now(UTC),
        "source": "shop",
        "payload": {"amount": 12},
        "idempotency_key": str(event_id),
    }
    return event | fields


async def audited(outbox: Outbox, action: str, last: int) -> list[tuple[str, dict[str, int]]]:
    rows = await outbox.connection.fetch(
        "SELECT actor, counts FROM core.audit WHERE action = $1 ORDER BY id DESC LIMIT $2", action, last
    )
    return [(row["actor"], row["counts"]) for row in reversed(rows)]


async def relayed(outbox: Outbox, **columns: object) -> UUID:
    """An event that the relay has sent, and a broker has confirmed."""
    id = await outbox.insert(**columns)
    held = await outbox.hold(Lane(handler=RELAY, limit=1000))
    assert await outbox.deliver(*held, record=False) == []
    return id


async def test_relay_is_owed_once_for_all_handlers_of_a_broker(outbox: Outbox) -> None:
    """An event goes to the broker once for all handlers there, and to others from the outbox (SCL-1)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(OTHER, EVENT)
    await outbox.subscribe("audit.record", EVENT)
    version = await outbox.subscriptions_version()
    assert await via(outbox, "nats", HANDLER, OTHER) == 2
    assert await outbox.subscriptions_version() == version + 1
    assert await outbox.claim(version=version, worker=uuid.uuid4()), (
        "a claim worked out before says that it is outdated"
    )
    event = await outbox.insert()
    lane = Lane()
    await outbox.call(
        "outbox_split",
        subscriptions_version=version + 1,
        channel=CHANNEL,
        generation=0,
        routes=[lane.route],
        priorities=[1],
        limits=[10],
        marks_at=[lane.mark[0]],
        marks_id=[lane.mark[1]],
        ended_before=None,
    )
    rows = await outbox.connection.fetch("SELECT handler_name FROM core.outbox WHERE origin_id = $1", event)
    assert sorted(row["handler_name"] for row in rows) == ["audit.record", RELAY]
    read = await outbox.call("subscriptions_read")
    assert sorted(row["handler_name"] for row in read) == ["audit.record", RELAY, RELAY]


async def test_new_types_follow_their_handler_to_the_broker(outbox: Outbox) -> None:
    await outbox.subscribe(HANDLER, EVENT)
    await via(outbox, "nats", HANDLER)
    await outbox.subscribe(HANDLER, EVENT, "order.paid")
    [found] = await outbox.call("broker_interests", via="nats", handlers=[HANDLER])
    assert found["event_types"] == ["order.paid", EVENT]
    assert (await outbox.call("broker_interests", via="redis", handlers=[HANDLER])) == []


async def test_worker_adopts_only_what_nobody_has_decided(outbox: Outbox) -> None:
    """A broker is one setting of the worker, and an operator's decision outlives the worker's next start (SCL-2)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(OTHER, EVENT)

    async def adopt() -> int:
        values = {"handlers": [HANDLER, OTHER], "via": "nats", "worker": "w1"}
        return int((await outbox.call("broker_adopt", **values))[0][0])

    assert await via(outbox, "outbox", OTHER) == 0
    assert await adopt() == 1
    assert await adopt() == 0
    assert await via(outbox, "outbox", HANDLER) == 1
    assert await adopt() == 0
    assert [actor for actor, _ in await audited(outbox, "handler.via", 3)] == [
        "ann@example.com",
        "system",
        "ann@example.com",
    ]


async def test_unknown_handler_cannot_be_moved(outbox: Outbox) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"nobody\.there"):
        await via(outbox, "nats", "nobody.there")


async def test_message_is_handled_once(outbox: Outbox) -> None:
    """The inbox row of a message commits with what its handler writes (LSN-6)."""
    event = message()
    assert await look(outbox, event) == ["run"]
    transaction = outbox.connection.transaction()
    await transaction.start()
    assert await enter(outbox, event) == "run"
    await transaction.rollback()
    assert await look(outbox, event) == ["run"]
    assert await enter(outbox, event) == "run"
    assert await enter(outbox, event) == "duplicate"
    assert await look(outbox, event, message()) == ["duplicate", "run"]


async def test_second_copy_waits_for_the_first_and_not_for_long(outbox: Outbox, shared_dsn: str) -> None:
    event = message()
    other = Outbox(await connect(shared_dsn))
    try:
        async with outbox.connection.transaction():
            assert await enter(outbox, event) == "run"
            with pytest.raises(asyncpg.LockNotAvailableError):
                await enter(other, event)
        assert await enter(other, event) == "duplicate"
    finally:
        await other.connection.close()


async def test_failed_message_is_a_row_of_its_handler(outbox: Outbox) -> None:
    """Retries and dead letters of messages are rows like all others (SCL-2)."""
    event, token = message(headers={"correlation_id": "c1"}), uuid.uuid4()
    async with outbox.connection.transaction():
        assert await enter(outbox, event) == "run"
        assert await leave(outbox, event)
        [id] = await park(outbox, event, token=token)
        assert id is not None
        assert await outbox.retry(InFlight(id, token, HANDLER, HANDLER), delay=0) == []
    row = await outbox.row(id)
    assert (row["status"], row["attempts"], row["last_error"], row["handler_name"], row["origin_id"]) == (
        "pending", 1, "boom", HANDLER, event["event_id"],
    )  # fmt: skip
    assert (row["payload"], row["headers"]) == (event["payload"], event["headers"])
    assert await look(outbox, event) == ["duplicate"], "it is handled from its row"
    assert await enter(outbox, event) == "duplicate"
    assert await outbox.value("SELECT count(*) FROM core.event_handled") == 0
    [held] = await outbox.hold(Lane(route=HANDLER))
    assert held.id == id
    assert await outbox.deliver(held) == []
    assert await look(outbox, event) == ["duplicate"]


async def test_parking_again_changes_nothing(outbox: Outbox) -> None:
    event = message()
    [id] = await park(outbox, event)
    assert await park(outbox, event) == [None]
    assert (await outbox.row(id))["status"] == "pending" if id else False


async def test_same_event_id_of_another_source_is_another_event(outbox: Outbox) -> None:
    event = message()
    [first] = await park(outbox, event)
    [second] = await park(outbox, event | {"source": "stranger"})
    assert first and second and first != second


async def test_parked_event_keeps_its_place_in_the_order(outbox: Outbox) -> None:
    """What goes through a broker and is parked stays before what was published later (LSN-9)."""
    early = await outbox.insert(ordering_key="k")
    later = await outbox.insert(ordering_key="k")
    [id] = await park(outbox, message(event_id=early, ordering_key="k"))
    assert id is not None
    seq = {each: (await outbox.row(each))["seq"] for each in (early, later, id)}
    assert seq[id] == seq[early] < seq[later]


@pytest.mark.parametrize("wrong", [{"event_type": "a/b"}, {"payload": 3}, {"occurred_at": "soon"}, {"source": None}])
async def test_what_is_no_event_is_refused_with_a_sentence(outbox: Outbox, wrong: dict[str, Any]) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await park(outbox, message(**wrong))
    assert refused.value.sqlstate in ("22023", "23514", "23502")


async def test_settled_in_a_batch(outbox: Outbox) -> None:
    events = [message() for _ in range(3)]
    for _ in range(2):
        values = {
            "handlers": [HANDLER] * 3,
            "sources": ["shop"] * 3,
            "keys": [each["idempotency_key"] for each in events],
            "generation": 0,
            "record": True,
            "outcome": "delivered",
        }
        await outbox.call("broker_deliver", **values)
    assert await look(outbox, *events) == ["duplicate"] * 3


async def test_relay_writes_no_inbox_row_and_can_send_again(outbox: Outbox) -> None:
    """Re-relay by time range, audited; the message gets another id, so that the broker takes it (SCL-1)."""
    await outbox.subscribe(HANDLER, EVENT)
    await via(outbox, "nats", HANDLER)
    start = await outbox.value("SELECT now()")
    ids = [await relayed(outbox) for _ in range(3)]
    assert await outbox.value("SELECT count(*) FROM core.event_handled") == 0

    async def again(**changed: object) -> int:
        values = {
            "via": "nats", "since": start, "until": FAR, "event_type": None, "source": None, "most": 2,
            "actor": "ann@example.com", "reason": "the stream was lost",
        }  # fmt: skip
        return int((await outbox.call("relay_again", **values | changed))[0][0])

    assert await again(event_type="order.paid") == 0
    assert await again(until=start) == 0
    assert [await again(), await again(), await again()] == [2, 1, 0]
    assert await outbox.states(*ids) == ["pending"] * 3
    details = await outbox.call("relay_details", ids=ids)
    assert [row["cycle"] for row in details] == [1, 1, 1]
    assert [counts["rows"] for _, counts in await audited(outbox, "relay.again", 5)] == [0, 0, 2, 1, 0]


async def test_what_a_broker_has_lost_is_found_and_repaired(outbox: Outbox) -> None:
    """An event that the broker confirmed and lost reaches its handler all the same (SCL-1)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe(OTHER, EVENT)
    before = await relayed_as_handler(outbox)
    await via(outbox, "nats", HANDLER, OTHER)
    handled, parked, lost = [await relayed(outbox) for _ in range(3)]
    for handler in (HANDLER, OTHER):
        assert await enter(outbox, message(event_id=handled), handler) == "run"
        await park(outbox, message(event_id=parked), handler=handler)
    assert await enter(outbox, message(event_id=lost), HANDLER) == "run"
    values = {"via": "nats", "since": datetime(2000, 1, 1, tzinfo=UTC), "until": FAR, "most": 100}
    found = await outbox.call("relay_lost", **values)
    assert [(row["event_id"], row["handler_name"]) for row in found] == [(lost, OTHER)]
    repair = {**values, "actor": "ann@example.com", "reason": "power cut"}
    assert (await outbox.call("relay_repair", **repair))[0][0] == 1
    assert (await outbox.call("relay_repair", **repair))[0][0] == 0
    mine = await outbox.hold(Lane(route=OTHER))
    assert sorted([(await outbox.row(each.id))["origin_id"] for each in mine]) == sorted([parked, lost])
    assert before not in {row["event_id"] for row in found}


async def relayed_as_handler(outbox: Outbox) -> UUID:
    """An event that a handler got from the outbox, before its events went to a broker."""
    id = await outbox.insert()
    held = await outbox.hold(Lane(limit=1000))
    assert await outbox.deliver(*held) == []
    return id
