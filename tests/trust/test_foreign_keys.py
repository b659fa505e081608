"""Ordering and fairness keys of one producer keep no event of another source back (SEC-1, LSN-9, T2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reject
from tests.logins import PRODUCER, Logins
from tests.outbox import EVENT, HANDLER, Outbox, connect
from tests.postgres.keyed import claim_fair, claim_ordered
from tests.servers import SessionServer
from tests.worker.support import running, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

FLOOD = 600  # lanes; to compare each of them for each key would take 360,000 looks
INSERT = "INSERT INTO core.outbox (event_type, source, payload, ordering_key) VALUES ($1, 'shop', '{}', $2)"
LOOKS = "SELECT sum(idx_scan) FROM pg_stat_user_indexes WHERE indexrelname IN ('outbox_keyed', 'outbox_fair')"


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


@pytest.fixture
async def logins(postgres_server: SessionServer, dsn: str, outbox: Outbox) -> AsyncIterator[Logins]:
    """The shop's login owns the source shop; bank belongs to nobody."""
    logins = Logins(postgres_server, dsn)
    logins.create()
    own = "INSERT INTO core.sources (source, role_name) VALUES ('shop', $1)"
    await outbox.connection.execute(own, logins.names[PRODUCER])
    yield logins
    logins.drop()


@asynccontextmanager
async def sessions(logins: Logins) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Connection]]:
    """Connections of the shop, and of another producer."""
    shop = await asyncpg.connect(logins.dsn_of(logins.names[PRODUCER]))
    bank = await asyncpg.connect(logins.dsn_of(logins.names["bank"]))
    try:
        yield shop, bank
    finally:
        await shop.close()
        await bank.close()


async def publish(connection: asyncpg.Connection, source: str, **options: object) -> None:
    async with connection.transaction():
        event = NewEvent(EVENT, {}, **options)  # type: ignore[arg-type]
        await Publisher(source).publish_event(connection, event)


@pytest.mark.parametrize("column", ["available_at", "channel", "generation", "payload"])
async def test_the_head_of_another_producer_keeps_nothing_back(
    dsn: str, outbox: Outbox, logins: Logins, column: str
) -> None:
    """A head that is delayed for good, that nobody serves, or that fails (SEC-1, LSN-9)."""
    value = {"available_at": "infinity", "channel": "nobody", "generation": "7", "payload": "{}"}[column]
    registry, handled = HandlerRegistry(), []

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> Reject | None:
        handled.append(event.source)
        return Reject("not one of ours") if event.source != "shop" else None

    columns = {"event_type": EVENT, "source": "bank", "payload": "{}"} | {column: value}
    names, values = ", ".join(columns), ", ".join(f"'{each}'" for each in columns.values())
    squat = f"INSERT INTO core.outbox ({names}, ordering_key) VALUES ({values}, $1)"
    async with sessions(logins) as (shop, bank), running(dsn, registry):
        for key in ("order-17", "shop/order-17"):
            await bank.execute(squat, key)
        if column == "payload":
            await until(lambda: handled.count("bank") == 2, what="both have failed")
        await publish(shop, "shop", ordering_key="order-17")
        await until(lambda: "shop" in handled, what="the shop's event is handled")


async def test_events_of_an_owned_source_are_in_order(outbox: Outbox, logins: Logins) -> None:
    """Also under keys as long as they may be, and in lanes of several handlers (LSN-9)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe("mail.thank", EVENT)
    long = "x" * 800
    async with sessions(logins) as (shop, _):
        for key in ("order-17", long, "order-17", long):
            await shop.execute(INSERT, EVENT, key)
    numbers = []
    for _ in range(2):
        claim = await claim_ordered(outbox)
        numbers.append([row["seq"] for row in claim.rows])
        for held in claim.held:
            await outbox.deliver(held)
    assert [len(each) for each in numbers] == [2, 2]
    assert max(numbers[0]) < min(numbers[1])
    keys = [row[0] for row in await outbox.connection.fetch("SELECT DISTINCT ordering_key FROM core.outbox ORDER BY 1")]
    assert len(keys) == 2 and all(key.startswith("shop/") and len(key) <= 800 for key in keys)


async def test_the_share_of_a_fairness_key_is_its_sources_own(outbox: Outbox, logins: Logins) -> None:
    """What another producer has in flight under a tenant's key does not count for the tenant (SEC-1, LSN-9)."""
    await outbox.subscribe(HANDLER, EVENT)
    async with sessions(logins) as (shop, bank):
        for key in ("tenant-7", "shop/tenant-7"):
            await publish(bank, "bank", fairness_key=key)
        assert len((await claim_fair(outbox, per_key=1)).rows) == 2
        await publish(shop, "shop", fairness_key="tenant-7")
    assert [row["source"] for row in (await claim_fair(outbox, per_key=1)).rows] == ["shop"]


async def looks(outbox: Outbox) -> int:
    await outbox.connection.execute("SELECT pg_stat_force_next_flush()")
    return int(await outbox.value(LOOKS))


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize(
    "lanes",
    ["'order.' || i, 'outbox_default', 0", "'order.placed', 'c' || i, 0", "'order.placed', 'outbox_default', i"],
    ids=["types", "channels", "generations"],
)
async def test_many_lanes_do_not_multiply_the_work_of_a_claim(outbox: Outbox, lanes: str, fair: bool) -> None:
    """A producer names types, channels and generations as it likes, and delays the rows for good (SEC-1, SCL-1)."""
    await outbox.subscribe(HANDLER, "order.*")
    key, claim = ("fairness_key", claim_fair) if fair else ("ordering_key", claim_ordered)
    await outbox.connection.execute(
        f"INSERT INTO core.outbox (event_type, channel, generation, source, payload, {key}, available_at) "
        f"SELECT {lanes}, 'bank', '{{}}', 'a' || i, 'infinity' FROM generate_series(1, {FLOOD}) AS i"
    )
    await outbox.insert(event_type="order.placed", **{key: "z"})
    before, found, after = await looks(outbox), [], ""
    for _ in range(10):
        answer = await claim(outbox, wanted={HANDLER: ["order.%"]}, after={HANDLER: after})
        found += answer.keys
        if (after := answer.after[HANDLER] or "") == "" and found:
            break
    assert found == ["z"]
    assert await looks(outbox) - before < 30 * FLOOD


async def test_types_that_nobody_wants_are_not_walked_past(outbox: Outbox) -> None:
    """A handler that names its types in full has them looked up (SEC-1, SCL-1)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.connection.execute(
        "INSERT INTO core.outbox (event_type, source, payload, ordering_key) "
        "SELECT 'junk.' || i, 'bank', '{}', 'a' FROM generate_series(1, 5000) AS i"
    )
    await outbox.insert(ordering_key="z")
    before = await looks(outbox)
    assert (await claim_ordered(outbox)).keys == ["z"]
    assert await looks(outbox) - before < 2000
