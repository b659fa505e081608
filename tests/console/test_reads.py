"""What is read beyond the open and the failed: any event, by key and domain, its causes and effects (OPS-2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast import Publisher
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import Operator, Selection
from holdfast.postgres.operations import search
from tests.logins import Logins
from tests.operator.support import ACTOR, CAUSES, HANDLER, driver_of, fail, fail_with, subscribe
from tests.servers import SessionServer, run_coroutine

KEPT = 50_000

FILL = """
INSERT INTO core.outbox (id, event_type, source, payload, headers, idempotency_key, domain_id, status, settled_at,
                         delivered_at, handler_name, created_at)
SELECT ('0190' || lpad(to_hex(n), 28, '0'))::uuid, 'order.placed', 'shop', '{"order_id": 1}',
       CASE WHEN n = 40000 THEN '{"causation_id": "01900000-0000-0000-0000-000000009c3f"}'::jsonb END, 'k' || n,
       CASE WHEN n = 7 THEN '00000000-0000-4000-8000-000000000007'::uuid END, 'delivered',
       now(), now(), 'billing.charge_card', now()
FROM generate_series(1, $1::int) n
"""


def made(n: int) -> UUID:
    """The id of one of the rows that are kept."""
    return UUID(f"0190{n:028x}")


@pytest.fixture(scope="module")
def kept_dsn(postgres_server: SessionServer) -> Iterator[str]:
    """50,000 delivered rows, without statistics and without a vacuum: the plans must not depend on either."""
    name = postgres_server.create(schema=True)

    async def fill() -> None:
        connection = await asyncpg.connect(postgres_server.dsn(name))
        await connection.execute("SET session_replication_role = replica")
        await connection.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
        await connection.execute(FILL, KEPT)
        await connection.close()

    run_coroutine(fill)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.fixture
async def kept(kept_dsn: str) -> AsyncIterator[Operator]:
    async with Operator(kept_dsn, actor=ACTOR) as each:
        yield each


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


async def publish(conn: asyncpg.Connection, event_type: str, payload: dict[str, Any], **options: Any) -> UUID:
    async with conn.transaction():
        return (await Publisher(source="shop").publish(conn, event_type, payload, **options)).event_id


# --- the list ---


async def test_pages_of_delivered_events_follow_each_other(kept: Operator) -> None:
    """Every row once, the newest first, without an offset (OPS-2)."""
    first = await kept.events.search(state="delivered", limit=100)
    second = await kept.events.search(state="delivered", limit=100, before=first.next)
    ids = [each.id for each in (*first.events, *second.events)]
    assert ids == [made(n) for n in range(KEPT, KEPT - 200, -1)]
    assert first.next == ids[99] and first.searched_until is None
    assert first.events[0].state == "delivered" and first.events[0].handler_name == HANDLER


async def test_a_filter_that_matches_little_ends_soon_and_says_where(kept: Operator) -> None:
    """A page examines 20,000 rows and no more; the next one goes on from there, until all were seen (OPS-2)."""
    wanted: dict[str, Any] = {"domain_id": "00000000-0000-4000-8000-000000000007"}
    page = await kept.events.search(**wanted)
    assert page.events == [] and page.next == made(KEPT - 19_999)
    assert page.searched_until == datetime.fromtimestamp(0x0190_0000_0000 / 1000, UTC)
    pages = [page]
    while pages[-1].next is not None:
        pages.append(await kept.events.search(**wanted, before=pages[-1].next))
    assert len(pages) == 3
    assert [each.id for page in pages for each in page.events] == [made(7)]


async def test_times_bound_the_search(kept: Operator) -> None:
    """Since and until are places in the order of the ids, so that nothing outside of them is examined (OPS-2)."""
    edge = datetime.fromtimestamp(0x0190_0000_0000 / 1000, UTC)
    assert (await kept.events.search(until=edge, limit=5)).events == []
    assert (await kept.events.search(since=edge + timedelta(seconds=1), limit=5)).events == []
    within = await kept.events.search(since=edge, until=edge + timedelta(milliseconds=1), limit=5)
    assert [each.id for each in within.events] == [made(n) for n in range(KEPT, KEPT - 5, -1)]


async def test_states_of_every_kind_are_listed(conn: asyncpg.Connection, operator: Operator) -> None:
    """Also when there are few of them among many others, and with a handler that is not yet known (OPS-2)."""
    await subscribe(conn)
    pending = await publish(conn, "order.placed", {"n": 1})
    others = await publish(conn, "order.lost", {"n": 2})
    failed, discarded = await fail(conn, 2)
    await operator.failed.discard([discarded], reason="a test")

    async def found(**filters: Any) -> set[UUID]:
        page = await operator.events.search(**filters)
        assert page.next is None
        return {each.id for each in page.events}

    assert await found() == {pending, others, failed, discarded}
    assert await found(state="pending") == {pending, others}
    assert await found(state="pending", handler=HANDLER) == {pending}
    assert await found(state="failed") == {failed}
    assert await found(state="discarded") == {discarded}
    assert await found(state="in_flight") == await found(state="delivered") == set()
    assert await found(event_type="order.lost", source="shop", generation=0) == {others}
    assert await found(handler=HANDLER) == {pending, failed, discarded}
    assert await found(source="bank") == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "lost"},
        {"limit": 0},
        {"limit": 1001},
        {"before": "1"},
        {"since": datetime(2026, 1, 1)},
        {"since": datetime(2026, 1, 2, tzinfo=UTC), "until": datetime(2026, 1, 1, tzinfo=UTC)},
        {"event_type": "a b"},
        {"handler": "x"},
        {"generation": -1},
        {"key": ""},
        {"key": "a\0"},
        {"key": "k" * 2000},
        {"domain_id": "me"},
    ],
)
async def test_what_cannot_be_searched_for_is_refused(operator: Operator, wrong: dict[str, Any]) -> None:
    """Before anything is read, and with the name of the field (OPS-3)."""
    with pytest.raises(ConfigurationError) as refusal:
        await operator.events.search(**wrong)
    assert refusal.value.field in wrong


# --- by key ---


async def test_an_event_is_found_by_any_of_its_names(conn: asyncpg.Connection, operator: Operator) -> None:
    """Its id, its idempotency key and its producer's key; pending, failed, and handled long ago (OPS-2)."""
    keyed = await publish(conn, "order.placed", {"n": 1}, key="order-17", idempotency_key="charge-17")
    (failed,) = await fail(conn)
    for name in ("order-17", "charge-17", str(keyed)):
        assert [each.id for each in (await operator.events.find(name)).events] == [keyed], name
    assert [each.id for each in (await operator.events.find(str(failed))).events] == [failed]
    assert (await operator.events.find("order-18")).events == []


async def test_a_key_of_long_ago_is_found_by_what_the_inbox_remembers(kept_dsn: str) -> None:
    """The newest 20,000 rows are not those, and the whole outbox is not read (OPS-2)."""
    connection = await asyncpg.connect(kept_dsn)
    async with Operator(kept_dsn, actor=ACTOR) as operator:
        early = await operator.events.find("k12")
        assert early.events == [] and early.next is not None
        await subscribe(connection)
        moment = datetime.fromtimestamp(0x0190_0000_0000 / 1000, UTC) - search._SKEW
        late = await connection.fetchval("SELECT id FROM core.outbox ORDER BY id DESC OFFSET 30000 LIMIT 1")
        assert late == made(20_000)
        await connection.execute("INSERT INTO core.event_handled VALUES ($1, 'k12', $2, 'shop')", HANDLER, moment)
        # All rows here have the same time, so that the place which the inbox leads to is the end.
        found = await operator.events.find("k12")
        assert found.events == [] and found.next is not None
        early_id = UUID(int=made(1).int - (1 << 84))
        columns = "id, event_type, source, payload, idempotency_key"
        insert = f"INSERT INTO core.outbox ({columns}) VALUES ($1, 'a.b', 's', '{{}}', $2)"
        await connection.execute(insert, early_id, "k-old")
        await connection.execute(
            "UPDATE core.outbox SET status = 'delivered', settled_at = now() WHERE id = $1", early_id
        )
        await connection.execute("INSERT INTO core.event_handled VALUES ($1, 'k-old', $2, 'shop')", HANDLER, moment)
        assert [each.id for each in (await operator.events.find("k-old")).events] == [early_id]
        await connection.execute("DELETE FROM core.outbox WHERE id = $1", early_id)
    await connection.close()


# --- causes and effects ---


async def test_causes_are_followed_up_and_effects_down(conn: asyncpg.Connection, operator: Operator) -> None:
    """What caused an event, and what it caused (OPS-2)."""
    first = await publish(conn, "order.placed", {})
    second = await publish(conn, "order.charged", {}, causation_id=str(first))
    thirds = [await publish(conn, "mail.sent", {"n": n}, causation_id=str(second)) for n in range(3)]
    chain = await operator.events.ancestors(thirds[0])
    assert [each.event_id for each in chain] == [thirds[0], second, first]
    assert [each.distance for each in chain] == [0, 1, 2]
    page = await operator.events.children(second, limit=2)
    assert [each.event_id for each in page.children] == thirds[:2] and page.next == thirds[1]
    rest = await operator.events.children(second, after=page.next, limit=2)
    assert [each.event_id for each in rest.children] == thirds[2:] and rest.next is None
    with pytest.raises(NotFound):
        await operator.events.ancestors(uuid4())


async def test_a_chain_without_an_end_ends(conn: asyncpg.Connection, operator: Operator) -> None:
    """A producer may name anything as the cause: its effect, itself, what is no id, what is gone (OPS-2)."""
    one, two = [await publish(conn, "a.b", {}) for _ in range(2)]
    odd = await publish(conn, "a.b", {}, causation_id="'; DROP TABLE core.outbox; --")
    lost = await publish(conn, "a.b", {}, causation_id=str(uuid4()))
    for id, cause in ((one, two), (two, one)):
        headers = json.dumps({"causation_id": str(cause)})
        await conn.execute("UPDATE core.outbox SET headers = $2::text::jsonb WHERE id = $1", id, headers)
    assert [each.event_id for each in await operator.events.ancestors(one)] == [one, two]
    assert [each.event_id for each in await operator.events.ancestors(odd)] == [odd]
    (alone,) = await operator.events.ancestors(lost)
    assert alone.cause is not None
    line = [await publish(conn, "a.b", {})]
    for _ in range(60):
        line.append(await publish(conn, "a.b", {}, causation_id=str(line[-1])))
    assert len(await operator.events.ancestors(line[-1])) == 51


async def test_effects_are_looked_for_among_what_came_next(kept: Operator) -> None:
    """Among 20,000 rows, and then where that search ended (OPS-2)."""
    page = await kept.events.children(made(39_999))
    assert [each.event_id for each in page.children] == [made(40_000)]
    far = await kept.events.children(made(10))
    assert far.children == [] and far.next == made(20_010)


# --- plans, groups, audit, requests ---


async def test_outcomes_of_a_plan_are_counted_by_when_they_were_replayed(
    conn: asyncpg.Connection, operator: Operator
) -> None:
    """In steps that hold every row that was replayed, and no other (OPS-2, DLQ-4)."""
    ids = await fail(conn, 9)
    plan = (await operator.plans.create(ids=ids, reason="fixed")).plan.id
    assert await operator.plans.outcomes(plan) == []
    state = "UPDATE core.plan_rows SET state = $2, replayed_at = now() - $3 * interval '1 s' WHERE row_id = ANY ($1)"
    for rows, outcome, seconds in ((ids[:4], "delivered", 100), (ids[4:6], "failed", 50), (ids[6:8], "replayed", 0)):
        await conn.execute(state, rows, outcome, seconds)
    found = await operator.plans.outcomes(plan, steps=10)
    assert [(each.delivered, each.failed, each.waiting) for each in found] == [(4, 0, 0), (0, 2, 0), (0, 0, 2)]
    assert {round(each.step.total_seconds()) for each in found} == {11}
    assert 33 <= (found[1].start - found[0].start).total_seconds() <= 50
    whole = await operator.plans.outcomes(plan, steps=1)
    assert [(each.delivered, each.failed, each.waiting) for each in whole] == [(4, 2, 2)]
    with pytest.raises(ConfigurationError, match="steps"):
        await operator.plans.outcomes(plan, steps=0)
    with pytest.raises(NotFound):
        await operator.plans.outcomes(plan + 1)


async def test_what_failed_again_is_listed_with_both_errors(conn: asyncpg.Connection, operator: Operator) -> None:
    """In the plan's order, as it is now (OPS-2, DLQ-4)."""
    ids = await fail(conn, 5)
    plan = (await operator.plans.create(ids=ids, reason="fixed")).plan.id
    await operator.failed.replay(ids, reason="fixed")
    again = (
        "UPDATE core.outbox SET status = 'failed', failed_at = now(), settled_at = now(), last_error = 'KeyError: 1', "
    )
    again += "error_signature = 'KeyError', failure_reason = 'retry_terminal' WHERE id = ANY ($1)"
    await conn.execute(again, ids[1:4])
    state = "UPDATE core.plan_rows SET state = 'failed', replayed_at = now() WHERE row_id = ANY ($1)"
    await conn.execute(state, ids[1:4])
    page = await operator.plans.failed_again(plan, limit=2)
    rest = await operator.plans.failed_again(plan, after=page.next, limit=2)
    assert {each.id for each in (*page.rows, *rest.rows)} == set(ids[1:4]) and rest.next is None
    first = page.rows[0]
    assert first.state == "failed" and first.error_signature == "KeyError" and first.last_error == "KeyError: 1"
    assert first.previous_error is not None and "is unknown" in first.previous_error
    with pytest.raises(NotFound):
        await operator.plans.failed_again(plan + 1)


async def test_groups_have_a_histogram_of_when_they_failed(conn: asyncpg.Connection, operator: Operator) -> None:
    """One statement for all groups, the largest first; what is older is not counted (OPS-2)."""
    await fail_with(conn, [CAUSES[0](n) for n in range(10)])
    old = await fail_with(conn, [CAUSES[1](n) for n in range(3)])
    await conn.execute("UPDATE core.outbox SET failed_at = now() - interval '90 minutes' WHERE id = ANY ($1)", old[:2])
    await conn.execute("UPDATE core.outbox SET failed_at = now() - interval '3 days' WHERE id = $1", old[2])
    found = await operator.failed.histogram(hours=4, steps=8)
    assert found.step == 1800 and found.examined == 12 and not found.is_more
    largest, other = found.groups
    assert largest.counts == [0] * 7 + [10]
    assert other.counts == [0, 0, 0, 0, 2, 0, 0, 0] or other.counts == [0, 0, 0, 0, 0, 2, 0, 0]
    assert {largest.name, other.name} == {group.name for group in (await operator.failed.groups()).groups}
    only = await operator.failed.histogram(Selection.group(largest.name), hours=4, steps=8)
    assert [each.name for each in only.groups] == [largest.name]
    with pytest.raises(ConfigurationError, match="name the hours"):
        await operator.failed.histogram(Selection(since=datetime.now(UTC)))


async def test_the_audit_of_an_event_has_what_was_done_to_any_delivery(
    conn: asyncpg.Connection, operator: Operator
) -> None:
    """The latest first, and nothing of other events (OPS-2, DLQ-6)."""
    mine, other = await fail(conn, 2)
    await operator.failed.discard([mine, other], reason="both")
    await operator.failed.restore([mine], reason="this one")
    await operator.failed.replay([mine], reason="again")
    assert [line.action for line in await operator.audit.of_event(mine)] == ["replay", "restore", "discard"]
    assert [line.reason for line in await operator.audit.of_event(str(mine), limit=1)] == ["again"]
    assert [line.reason for line in await operator.audit.of_event(other)] == ["both"]
    assert await operator.audit.of_event(uuid4()) == []


BEGIN = "SELECT core.idempotency_begin($1, $2, ARRAY['hash'], 1, $3::text::interval, 100, NULL)"
COMPLETE = "SELECT core.idempotency_complete($1, $2, $3, $4, '{}', 'secret body', false)"


async def request(conn: asyncpg.Connection, scope: str, key: str, *, failed: bool = False, keep: str = "1 day") -> None:
    async with conn.transaction():
        await conn.execute(BEGIN, scope, key, keep)
        await conn.execute(COMPLETE, scope, key, failed, 500 if failed else 201)


async def test_requests_are_listed_without_what_is_secret(conn: asyncpg.Connection, operator: Operator) -> None:
    """Was this key used, and how did it end? (OPS-2, IDM-1)"""
    for n in range(5):
        await request(conn, f"http:user-{n % 2}", f"key-number-{n}", failed=n == 4)
    page = await operator.requests.page(limit=2)
    rest = await operator.requests.page(limit=10, before=page.next)
    every = [*page.requests, *rest.requests]
    assert len(every) == 5 and rest.next is None
    assert [each.state for each in every] == ["failed"] + ["completed"] * 4
    assert all(each.key_hint == "key-nu…" and each.key_bytes == 12 for each in every)
    assert not any(secret in repr(every) for secret in ("key-number", "secret body", "hash"))
    assert len((await operator.requests.page(scope="http:user-1")).requests) == 2
    assert [each.status_code for each in (await operator.requests.page(state="failed")).requests] == [500]
    assert len((await operator.requests.page(key="key-number-3")).requests) == 1
    found = await operator.requests.detail("http:user-1", "key-number-3")
    assert found.status_code == 201 and found.body_bytes == len("secret body") and found.scope == "http:user-1"
    with pytest.raises(NotFound):
        await operator.requests.detail("http:user-0", "key-number-3")
    assert (await operator.requests.page(since=datetime.now(UTC) + timedelta(hours=1))).requests == []
    for wrong in (
        {"before": "x"},
        {"before": "2026-01-01T00:00:00 (1,2)"},
        {"state": "x"},
        {"scope": ""},
        {"key": "k" * 256},
    ):
        with pytest.raises(ConfigurationError) as refusal:
            await operator.requests.page(**wrong)  # type: ignore[arg-type]
        assert refusal.value.field in wrong


# --- what it costs, and with which rights ---


async def test_no_page_reads_more_than_it_may(kept: Operator) -> None:
    """EXPLAIN on 50,000 rows without statistics: by the primary key, and not the whole table (OPS-2, OBS-4)."""
    connection = driver_of(kept)
    filters: dict[str, Any] = dict.fromkeys(
        ("state", "event_type", "source", "generation", "handler", "domain_id", "key")
    )
    filters |= {"before": search.NEWEST, "first": search.OLDEST, "error_length": 500}
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("search_events", {"most": 50, "most_examined": 20_000}, 50),
        ("search_events", {"most": 50, "most_examined": 20_000, "key": "none"}, 20_000),
        ("search_end", {"most_examined": 20_000}, 20_000),
        ("search_few", {"state": "failed", "most": 50, "most_few": 5_000}, 0),
        ("search_few", {"state": "pending", "most": 50, "most_few": 5_000}, 0),
        ("list_children", {"cause": "x", "after": search.OLDEST, "most": 50, "most_examined": 20_000}, 20_000),
    ]
    for name, values, rows in cases:
        async with kept._session.reading() as statements:
            await statements.fetch("begin_search")
            statement = statements.queries.asyncpg(name)
            explained = await connection.fetchval(
                f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) {statement.sql.rstrip().rstrip(';')}",
                *statement.bind(filters | values),
            )
        nodes = list(flatten(json.loads(explained)[0]["Plan"]))
        read = [node for node in nodes if node.get("Relation Name") == "outbox"]
        assert {node["Node Type"] for node in read} <= {"Index Scan", "Index Only Scan"}, name
        assert sum(node["Actual Rows"] * node["Actual Loops"] for node in read) <= rows, name


def flatten(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from flatten(child)


async def test_the_role_of_operators_is_enough(conn: asyncpg.Connection, logins: Logins) -> None:
    """No right on a table of requests, no other role; a producer's login reads none of it (OBX-2, OPS-2)."""
    (id,) = await fail(conn)
    await request(conn, "http:ann", "a-key")
    async with Operator(logins.dsn_of("login_operator"), actor=ACTOR) as operator:
        assert len((await operator.events.search()).events) == 1
        assert len((await operator.events.find(str(id))).events) == 1
        assert len((await operator.requests.page()).requests) == 1
        assert len((await operator.failed.histogram()).groups) == 1
        assert await operator.audit.of_event(id) == []
        assert len(await operator.events.ancestors(id)) == 1
        assert (await operator.events.children(id)).children == []
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await driver_of(operator).fetch("SELECT * FROM core.idempotency_records")
    producer = await asyncpg.connect(logins.dsn_of("login_producer"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await producer.fetch("SELECT * FROM core.requests_read(NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, 1)")
    await producer.close()
    await asyncio.sleep(0)
