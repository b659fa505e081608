"""Several handlers, contexts and workers that want the same events, or that nobody wants yet."""

from __future__ import annotations

import asyncio
import json

import asyncpg

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, RetryPolicy, TerminalHandlerError
from holdfast.failure import FailureCycle
from tests.worker.support import (
    Facts,
    drained,
    insert,
    publish,
    publish_many,
    row,
    running,
    settled,
    siblings,
    until,
)


def noting(seen: list[tuple[str, int]], *names: str, event_type: str = "order.placed") -> HandlerRegistry:
    """A registry whose handlers note their name and the event's number."""
    registry = HandlerRegistry()
    for name in names:

        async def note(event: EventEnvelope, context: HandlerContext) -> None:
            seen.append((context.handler_name, event.payload.get("n", 0)))

        registry.add(name, (event_type,), note)
    return registry


async def test_only_the_failing_handler_is_tried_again(dsn: str, conn: asyncpg.Connection) -> None:
    """Of three handlers one fails for good: the others run once, and each has its own row (LSN-7, E3)."""
    seen: list[tuple[str, int]] = []
    registry = noting(seen, "billing.charge", "mail.thank")
    policy = RetryPolicy(max_attempts=3, base_delay=0.001, max_delay=0.001)
    broken = True

    @registry.handler("order.placed", name="stock.reserve", retry=policy)
    async def reserve(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append((context.handler_name, context.attempt))
        if broken:
            raise ConnectionError("the warehouse is closed")

    origin = await publish(conn, "order.placed", idempotency_key="order-1")
    async with running(dsn, registry, poll_interval=3600):
        await drained(conn)
        rows = await siblings(conn, origin)
        assert sorted(seen) == [
            ("billing.charge", 0),
            ("mail.thank", 0),
            ("stock.reserve", 1),
            ("stock.reserve", 2),
            ("stock.reserve", 3),
        ]
        assert {name: each["status"] for name, each in rows.items()} == {
            "billing.charge": "delivered",
            "mail.thank": "delivered",
            "stock.reserve": "failed",
        }
        assert {each["idempotency_key"] for each in rows.values()} == {"order-1"}
        published = await row(conn, origin)
        assert (published["status"], published["handler_name"], published["attempts"]) == ("delivered", "*", 0)

        # DLQ-3: the replay of the failed sibling runs that handler and no other.
        seen.clear()
        broken = False
        moved = await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann@example.com')", rows["stock.reserve"]["id"])
        assert moved == 1
        again = await settled(conn, rows["stock.reserve"]["id"])
        await drained(conn)
    assert seen == [("stock.reserve", 1)]
    cycles = [FailureCycle.model_validate(cycle) for cycle in json.loads(again["failure_history"])]
    assert [(cycle.attempts, cycle.replayed_by) for cycle in cycles] == [(3, "ann@example.com")]
    assert len(await siblings(conn, origin)) == 3


async def test_handlers_see_the_published_events_id(dsn: str, conn: asyncpg.Connection) -> None:
    """Every sibling's envelope has the origin's id; only the delivery id differs (LSN-7)."""
    registry, seen = HandlerRegistry(), []
    for name in ("billing.charge", "mail.thank"):

        async def note(event: EventEnvelope, context: HandlerContext) -> None:
            seen.append((event.event_id, context.event_id, context.delivery_id))

        registry.add(name, ("order.placed",), note)
    origin = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await drained(conn)
    assert [each[:2] for each in seen] == [(origin, origin)] * 2
    assert len({each[2] for each in seen} | {origin}) == 3


async def test_interest_outlives_the_worker(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that was once there is owed what is published while it is away, and nothing twice (LSN-7)."""
    seen: list[tuple[str, int]] = []
    billing, mail = noting(seen, "billing.charge"), noting(seen, "mail.thank")
    async with running(dsn, mail):
        pass
    events = await publish_many(conn, "order.placed", 20)
    async with running(dsn, billing):
        await until(lambda: len(seen) == 20, what="billing has handled its share")
        await until(
            lambda: conn.fetchval("SELECT count(*) = 20 FROM core.outbox WHERE status = 'pending'"),
            what="what mail is owed waits",
        )
    seen.clear()
    async with running(dsn, mail):
        await drained(conn)
    assert sorted(seen) == [("mail.thank", n) for n in range(20)]
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 3 * len(events)


async def test_handlers_in_workers_of_their_own(dsn: str, conn: asyncpg.Connection) -> None:
    """Two workers with different handlers for one type, and events before and after the second starts (LSN-7)."""
    seen: list[tuple[str, int]] = []
    async with running(dsn, noting(seen, "billing.charge"), poll_interval=3600):
        early = await publish(conn, "order.placed", {"n": 1})
        await settled(conn, early)
        async with running(dsn, noting(seen, "mail.thank"), poll_interval=3600):
            await publish(conn, "order.placed", {"n": 2})
            await until(lambda: len(seen) == 3, what="both have the second event")
            await drained(conn)
    # Before its interest was known, mail was owed nothing.
    assert sorted(seen) == [("billing.charge", 1), ("billing.charge", 2), ("mail.thank", 2)]


async def test_retired_interest_is_owed_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """An operator's retire ends what a handler is owed (LSN-7)."""
    seen: list[tuple[str, int]] = []
    async with running(dsn, noting(seen, "mail.thank")):
        pass
    async with running(dsn, noting(seen, "billing.charge"), poll_interval=3600):
        assert await conn.fetchval("SELECT core.retire('mail.thank')") == 1
        identity = await publish(conn, "order.placed")
        delivered = await settled(conn, identity)
        assert delivered["handler_name"] == "billing.charge"
        await drained(conn)
    assert seen == [("billing.charge", 0)]


async def test_target_chooses_the_context(dsn: str, conn: asyncpg.Connection) -> None:
    """Target=NULL reaches every context, a named target only its own; a context can be a setting (LSN-7)."""
    seen: list[tuple[str, int]] = []
    registry = noting(seen, "billing.charge", "mail.thank")
    elsewhere = HandlerRegistry(domain_context="archive")

    @elsewhere.handler("order.placed", name="billing.keep")
    async def keep(event: EventEnvelope) -> None:
        seen.append(("billing.keep", event.payload["n"]))

    registry.include(elsewhere)
    async with running(dsn, registry, poll_interval=3600):
        await publish(conn, "order.placed", {"n": 0})
        for n, target in enumerate(["billing", "mail", "archive"], start=1):
            await publish(conn, "order.placed", {"n": n}, target=target)
        await until(lambda: len(seen) == 6, what="all deliveries")
        await drained(conn)
    assert sorted(seen) == [
        ("billing.charge", 0),
        ("billing.charge", 1),
        ("billing.keep", 0),
        ("billing.keep", 3),
        ("mail.thank", 0),
        ("mail.thank", 2),
    ]


async def test_unrouted_events_wait_and_are_reported(dsn: str, conn: asyncpg.Connection) -> None:
    """What nobody wants burns no attempt, is reported once, and flows once somebody subscribes (LSN-7, D6)."""
    seen: list[tuple[str, int]] = []
    facts = Facts()
    strange = await publish(conn, "order.strange", {"n": 1})
    astray = await publish(conn, "order.placed", {"n": 2}, target="nowhere")
    async with running(dsn, noting(seen, "billing.charge"), facts):
        known = await publish(conn, "order.placed", {"n": 3})
        await settled(conn, known)
        await until(lambda: len(facts.notices("events_unrouted")) == 2, what="both are reported")
        reported = {(n.details["event_type"], n.details["target"]) for n in facts.notices("events_unrouted")}
        assert reported == {("order.strange", None), ("order.placed", "nowhere")}
        for identity in (strange, astray):
            waiting = await row(conn, identity)
            assert (waiting["status"], waiting["attempts"], waiting["handler_name"]) == ("pending", 0, None)
        async with running(dsn, noting(seen, "audit.note", event_type="order.strange")):
            await settled(conn, strange)
        assert (await row(conn, astray))["attempts"] == 0
    assert seen == [("billing.charge", 3), ("audit.note", 1)]


async def test_patterns_match_types_that_appear_later(dsn: str, conn: asyncpg.Connection) -> None:
    """ "order.*" and "*" get new types at once, also when they share them with a plain handler (LSN-7)."""
    seen: list[tuple[str, str]] = []
    registry = HandlerRegistry()

    def note(name: str, *event_types: str) -> None:
        async def handler(event: EventEnvelope) -> None:
            seen.append((name, event.event_type))

        registry.add(name, event_types, handler)

    note("audit.everything", "*")
    note("orders.all", "order.*")
    note("orders.placed", "order.placed")
    expected = set()
    async with running(dsn, registry, poll_interval=3600):
        for event_type, names in [
            ("order.placed", ["audit.everything", "orders.all", "orders.placed"]),
            ("order.shipped", ["audit.everything", "orders.all"]),
            ("orders.placed", ["audit.everything"]),  # not of the pattern "order.*"
            ("order_placed", ["audit.everything"]),  # an underscore is no wildcard
            ("user.joined", ["audit.everything"]),
        ]:
            expected |= {(name, event_type) for name in names}
            await insert(conn, event_type)
            await until(lambda: set(seen) == expected, within=5, what=f"{event_type} at {names}")  # noqa: B023
        await drained(conn)
    assert len(seen) == len(expected)


async def test_busy_pattern_handlers_find_new_types(dsn: str, conn: asyncpg.Connection) -> None:
    """A backlog of one type does not hide the first event of another (LSN-7)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("*", name="audit.everything")
    async def note(event: EventEnvelope) -> None:
        seen.append(event.event_type)
        await asyncio.sleep(0.01)

    await publish_many(conn, "order.placed", 5000)
    async with running(dsn, registry, poll_interval=1.0, concurrency=10):
        await until(lambda: seen, what="the backlog is being worked on")
        await publish(conn, "user.joined")
        await until(lambda: "user.joined" in seen, within=4, what="the new type beside the backlog")
        assert seen.count("order.placed") < 5000


async def test_late_subscriber_of_a_failed_event(dsn: str, conn: asyncpg.Connection) -> None:
    """A replay goes to the handler that failed, and never splits again (LSN-7, DLQ-3)."""
    seen: list[tuple[str, int]] = []
    broken = True
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        if broken:
            raise TerminalHandlerError("no card")
        seen.append(("billing.charge", 0))

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await settled(conn, identity, "failed")
        async with running(dsn, noting(seen, "mail.thank")):
            broken = False
            await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann')", identity)
            await settled(conn, identity)
            await drained(conn)
    assert seen == [("billing.charge", 0)]
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1
