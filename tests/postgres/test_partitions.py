"""The outbox as a partitioned table: made of a live one, looked after by workers, and made plain again (OBX-6)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import HandlerRegistry
from holdfast.postgres import doctor, migrate
from holdfast.postgres.queries import Queries
from holdfast.postgres.schema import partitions
from holdfast.postgres.schema.ddl import MigrationRefused
from holdfast.postgres.schema.partitions import PartitionStep, partitioning
from holdfast.postgres.schema.release import load
from tests.outbox import EVENT, HANDLER, Lane, Outbox, connect
from tests.postgres.partitioned import id_at, partition
from tests.worker.support import Facts, publish, running, until

pytestmark = pytest.mark.both_postgres

NOW = datetime.now(UTC)


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


async def findings(dsn: str) -> dict[str, doctor.Finding]:
    """Every drift, and what is said about partitions."""
    connection = await asyncpg.connect(dsn)
    try:
        drift, health = [(await doctor.examine(connection, only=part)).findings for part in doctor.PARTS]
        partitions = [finding for finding in health if finding.code.startswith("partition")]
        return {finding.code: finding for finding in (*drift, *partitions)}
    finally:
        await connection.close()


async def names(outbox: Outbox) -> list[str]:
    return [row["name"] for row in await outbox.call("partitions_list")]


async def tables_of(outbox: Outbox, *ids: UUID) -> set[str]:
    rows = await outbox.connection.fetch("SELECT tableoid::regclass::text FROM core.outbox WHERE id = ANY ($1)", ids)
    return {row[0] for row in rows}


# --- becoming partitioned, and back ---------------------------------------------------------------------------------


async def test_a_table_with_rows_becomes_partitioned_and_plain_again(outbox: Outbox, dsn: str) -> None:
    """No row is lost, leases stay, numbers go on, and both times doctor has nothing to say (OBX-6, OBX-3)."""
    await outbox.insert_many(30)
    held = await outbox.hold(Lane(limit=10))
    last = await outbox.value("SELECT max(seq) FROM core.outbox")
    await partitions.enable(dsn)
    assert await findings(dsn) == {}
    assert await outbox.deliver(*held) == []
    [new] = await outbox.insert_many(1)
    assert (await outbox.row(new))["seq"] == last + 1
    assert (await outbox.row(new))["route"] == f"*/{EVENT}"
    assert len(await outbox.value("SELECT array_agg(id) FROM core.deliveries")) == 31
    again = await outbox.hold(Lane(limit=50))
    assert len(again) == 21
    await partitions.disable(dsn)
    assert await findings(dsn) == {}
    assert await outbox.deliver(*again) == []
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 31
    [newest] = await outbox.insert_many(1)
    assert (await outbox.row(newest))["seq"] == last + 2
    actions = await outbox.connection.fetch("SELECT action FROM core.audit ORDER BY id")
    assert [row[0] for row in actions] == ["partitions.enable", "partitions.disable"]


async def test_a_schema_of_another_name_without_roles_is_converted_too(empty_dsn: str) -> None:
    """Where one login owns everything, there are no grants to keep (OBX-6, OBX-7, OBX-1)."""
    await migrate.apply(empty_dsn, schema="order", roles="never")
    connection = await connect(empty_dsn)
    try:
        outbox = Outbox(connection, "order")
        [id] = await outbox.insert_many(1)
        await partitions.enable(empty_dsn, "order", every="day")
        assert (await partitioning(connection, outbox.queries)).partitioned
        assert (await doctor.examine(connection, "order", only="drift")).findings == ()
        assert [each.id for each in await outbox.hold()] == [id]
        await partitions.disable(empty_dsn, "order")
        assert (await doctor.examine(connection, "order", only="drift")).findings == ()
        assert (await outbox.row(id))["attempts"] == 1
    finally:
        await connection.execute("UPDATE \"order\".outbox SET lease_expires_at = now() + interval '1 hour'")
        await connection.close()


class Mortal:
    """A connection whose session is ended before number `dies_at` of the statements that read or change something."""

    def __init__(self, connection: Any, admin: asyncpg.Connection, dies_at: int) -> None:
        self._connection, self._admin, self.left = connection, admin, dies_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connection, name)
        return self._counted(found) if name in ("execute", "fetch", "fetchval", "fetchrow") else found

    def _counted(self, call: Any) -> Any:
        async def counted(sql: str, *values: Any) -> Any:
            self.left -= "core." in sql
            if self.left == 0:
                await self._admin.execute("SELECT pg_terminate_backend($1)", self._connection.get_server_pid())
            return await call(sql, *values)

        return counted


@pytest.mark.slow
async def test_a_conversion_that_dies_at_any_statement_leaves_a_table_that_works(
    outbox: Outbox, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it before each statement, there and back: events flow, and the next run finishes (OBX-6)."""
    monkeypatch.setattr("holdfast.postgres.schema.ddl.random.uniform", lambda *_: 0.0)
    await outbox.insert_many(5)
    real, dies_at, deaths = partitions.connect, 0, 0

    async def mortal(dsn: str) -> Any:
        nonlocal connection
        connection = Mortal(await real(dsn), outbox.connection, dies_at)
        return connection

    async def works() -> None:
        [id] = await outbox.insert_many(1)
        held = await outbox.hold(Lane(limit=100))
        assert id in {each.id for each in held}
        assert await outbox.deliver(*held) == []

    connection: Any = None
    for verb, other in ((partitions.enable, partitions.disable), (partitions.disable, partitions.enable)):
        dies_at = 0
        while True:
            dies_at += 1
            monkeypatch.setattr(partitions, "connect", mortal)
            try:
                await verb(dsn)
            except (
                asyncpg.PostgresError,
                asyncpg.InterfaceError,
                asyncpg.InternalClientError,
                OSError,
                MigrationRefused,
            ):
                deaths += 1
            monkeypatch.setattr(partitions, "connect", real)
            await works()
            if connection.left > 0:
                break  # it ended before it could die
            await verb(dsn)
            await works()
            await other(dsn)
        assert (await partitioning(outbox.connection, Queries())).partitioned is (verb is partitions.enable)
    assert deaths > 10
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 5 + 2 * deaths + 2
    assert await findings(dsn) == {}


@pytest.mark.slow
async def test_rows_that_are_many_are_moved_back_a_few_at_a_time(outbox: Outbox, dsn: str) -> None:
    """On the way back every row is seen and claimable, triggers do not fire for what is only moved, and a row in
    flight stays until it is settled; afterwards an id is unique again (OBX-6).
    """
    await outbox.insert_many(6_000)
    await partitions.enable(dsn, bound=datetime.now(UTC))
    late = await outbox.insert_many(7_000)
    held = await outbox.hold(Lane(limit=100))
    assert len(await tables_of(outbox, *late)) == 1
    steps: list[PartitionStep] = []
    ended = asyncio.create_task(partitions.disable(dsn, on_step=steps.append))
    await until(lambda: [step for step in steps if step.action == "gather"], what="rows are moved")
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 13_000
    assert "partitions-unfinished" in await findings(dsn)
    [meanwhile] = await outbox.insert_many(1)
    assert await outbox.deliver(*held) == []
    async with asyncio.timeout(60):
        await ended
    assert await outbox.value("SELECT count(*), count(DISTINCT id) FROM core.outbox") == 13_001
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 100
    assert await tables_of(outbox, meanwhile, late[0], late[-1]) == {"core.outbox"}
    with pytest.raises(asyncpg.UniqueViolationError):
        await outbox.insert(id=late[0])
    assert await findings(dsn) == {}


async def test_what_is_in_the_way_is_named_before_anything_is_changed(outbox: Outbox, dsn: str) -> None:
    """Objects of others would go on reading the table as it was, and ids without a time have no partition (OBX-6)."""
    foreign = await outbox.insert(id=uuid.UUID("f47ac10b-58cc-4372-a567-0e02b2c3d479"))
    await outbox.connection.execute("CREATE VIEW public.open_events AS SELECT id FROM core.outbox")
    with pytest.raises(MigrationRefused) as refused:
        await partitions.enable(dsn)
    assert "public.open_events" in str(refused.value) or "open_events" in str(refused.value)
    assert "version 4 ids" in str(refused.value)
    assert (await partitioning(outbox.connection, Queries())).bound is None
    await outbox.connection.execute("DROP VIEW public.open_events")
    await outbox.connection.execute("DELETE FROM core.outbox WHERE id = $1", foreign)
    await partitions.enable(dsn, dry_run=True)
    assert not (await partitioning(outbox.connection, Queries())).partitioned
    await partitions.enable(dsn, every="day")
    with pytest.raises(MigrationRefused, match="partitioned by day"):
        await partitions.enable(dsn, every="week")
    await partitions.enable(dsn, every="day")


async def test_a_conversion_that_was_left_alone_is_taken_back_before_it_refuses_events(
    outbox: Outbox, dsn: str
) -> None:
    """Killed between two steps and forgotten: a worker takes the bound back a day before it would matter (OBX-6)."""
    await outbox.call("partitions_prepare", every="week", bound=NOW + timedelta(days=2))
    assert (await findings(dsn))["partitions-unfinished"].severity == "problem"
    assert await outbox.call("partitions_extend") == []
    assert (await partitioning(outbox.connection, Queries())).bound is not None
    await outbox.call("partitions_prepare", every="week", bound=NOW + timedelta(hours=20))
    await outbox.call("partitions_extend")
    assert (await partitioning(outbox.connection, Queries())).bound is None
    assert await findings(dsn) == {}


# --- partitions made ahead, and everything else -----------------------------------------------------------------------


async def test_a_missing_partition_never_fails_a_publish(outbox: Outbox, dsn: str) -> None:
    """Rows of a time without a partition go to outbox_default, and move, in flight too, when it is made (OBX-6)."""
    await partition(dsn, "week")
    *_, last = [name for name in await names(outbox) if name.startswith("outbox_p")]
    bounds = {row["name"]: row for row in await outbox.call("partitions_list")}
    await outbox.connection.execute(f"DROP TABLE core.{last}")
    ids = [id_at(bounds[last]["lower_at"] + timedelta(hours=n)) for n in range(3)]
    far = id_at(NOW + timedelta(days=400))
    for id in (*ids, far):
        await outbox.insert(id=id)
    held = await outbox.hold()
    assert await tables_of(outbox, *ids, far) == {"core.outbox_default"}
    assert (await findings(dsn))["partitions-default"].evidence.startswith("4 rows")
    [made] = await outbox.call("partitions_extend")
    assert dict(made) == {"name": last, "moved": 3}
    assert await tables_of(outbox, *ids) == {f"core.{last}"}
    assert await tables_of(outbox, far) == {"core.outbox_default"}
    assert await outbox.call("partitions_extend") == []
    assert await outbox.deliver(*held) == []


@pytest.mark.slow
@pytest.mark.trust
async def test_ids_that_are_dated_ahead_keep_no_partition_from_being_made(outbox: Outbox, dsn: str) -> None:
    """However many there are, their period is made, in parts that can be moved in a moment each (SEC-1, OBX-6)."""
    await partition(dsn)
    bounds = {row["name"]: row for row in await outbox.call("partitions_list")}
    *_, last = [name for name in await names(outbox) if name.startswith("outbox_p")]
    await outbox.connection.execute(f"DROP TABLE core.{last}")
    await outbox.connection.execute(
        """INSERT INTO core.outbox (id, event_type, source, payload)
           SELECT overlay(core.first_id($1)::text PLACING '7' FROM 15)::uuid, 'order.placed', 'bank', '{}'::jsonb
           UNION ALL
           SELECT (substr(core.first_id($1 + interval '1 second')::text, 1, 14) || '7' || substr(h, 1, 3) || '-8'
                   || substr(h, 4, 3) || '-' || substr(h, 7, 12))::uuid, 'order.placed', 'bank', '{}'::jsonb
           FROM generate_series(1, 20000) g CROSS JOIN LATERAL md5(g::text) h""",
        bounds[last]["lower_at"],
    )
    made = [dict((await outbox.call("partitions_extend"))[0]) for _ in range(2)]
    assert made == [{"name": last, "moved": 20_000}, {"name": f"{last}_2", "moved": 1}]
    assert await outbox.call("partitions_extend") == []
    found = {row["name"]: row for row in await outbox.call("partitions_list")}
    assert found[f"{last}_2"]["upper_at"] == bounds[last]["upper_at"]
    assert await outbox.value("SELECT count(*) FROM core.outbox_default") == 0


async def test_workers_make_partitions_without_being_asked(outbox: Outbox, dsn: str) -> None:
    """Whichever comes first, with no more than a worker's rights, which are not enough to convert the table (OBX-6)."""
    await partition(dsn)
    *_, last, default = expected = await names(outbox)
    assert default == "outbox_default"
    await outbox.connection.execute(f"DROP TABLE core.{last}")
    facts, registry = Facts(), HandlerRegistry()
    registry.handler(EVENT, name=HANDLER)(lambda event: None)
    async with running(dsn, registry, facts):
        await until(lambda: facts.notices("partition_made"), what="a partition is made")
    assert await names(outbox) == expected
    await outbox.connection.execute(f"DROP TABLE core.{last}")
    await outbox.connection.execute("SET ROLE holdfast_worker")
    [made] = await outbox.call("partitions_extend")
    assert made["name"] == last
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await outbox.call("partitions_unswap")
    await outbox.connection.execute("RESET ROLE")


async def test_ids_without_a_time_are_refused_with_a_remedy(outbox: Outbox, dsn: str) -> None:
    """A version 4 id of a foreign writer, by a plain INSERT and by the publisher; siblings are of version 7 (OBX-6)."""
    await partition(dsn)
    with pytest.raises(asyncpg.CheckViolationError, match="version 7 while the outbox is partitioned") as refused:
        await outbox.insert(id=uuid.uuid4())
    assert "Leave id out" in (refused.value.hint or "")
    assert refused.value.constraint_name == "outbox_dated"
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.subscribe("stock.reserve", EVENT)
    origin = await outbox.insert()
    assert await outbox.split(f"*/{EVENT}") == 1
    rows = await outbox.connection.fetch(
        "SELECT id, tableoid FROM core.outbox WHERE coalesce(origin_id, id) = $1", origin
    )
    assert {row["id"].version for row in rows} == {7}
    assert len({row["tableoid"] for row in rows}) == 1


async def test_no_function_of_the_hot_path_reads_a_partition_from_end_to_end(outbox: Outbox, dsn: str) -> None:
    """A claim, a heartbeat and a settle go by index, in every partition, under generic plans too (OBX-6, LSN-1)."""
    await outbox.insert_many(2_000)
    await partition(dsn, ago=timedelta(0))
    await outbox.insert_many(2_000)
    await outbox.subscribe(HANDLER, EVENT)
    scans = "SELECT coalesce(sum(seq_scan), 0) FROM pg_stat_xact_all_tables WHERE relname ~ '^outbox_(first|p|default)'"
    for _ in range(8):  # Postgres plans the first five for their arguments
        async with outbox.connection.transaction():
            held = await outbox.hold(Lane(limit=50), Lane(HANDLER, limit=50))
            assert len(held) >= 50
            assert await outbox.extend(*held) == []
            assert await outbox.retry(*held[:5]) == []
            assert await outbox.fail(*held[5:10]) == []
            assert await outbox.deliver(*held[10:]) == []
            assert await outbox.value(scans) == 0


# --- retention --------------------------------------------------------------------------------------------------------


async def settle_by_hand(outbox: Outbox, ids: list[UUID], days: float, **columns: str) -> None:
    """As if the events had been delivered so many days ago."""
    more = "".join(f", {name} = {value}" for name, value in columns.items())
    await outbox.connection.execute(
        f"""UPDATE core.outbox SET status = 'delivered', settled_at = now() - $2 * interval '1 day',
            delivered_at = now() - $2 * interval '1 day'{more} WHERE id = ANY ($1)""",
        ids,
        days,
    )


async def old_rows(outbox: Outbox, count: int, **columns: str) -> list[UUID]:
    """Events of 70 days ago."""
    rows = [id_at(NOW - timedelta(days=70) + timedelta(seconds=n)) for n in range(count)]
    given = await outbox.connection.fetch(
        f"""INSERT INTO core.outbox (id, event_type, source, payload{"".join(f", {name}" for name in columns)})
            SELECT unnest($1::uuid[]), '{EVENT}', 'shop', '{{}}'{"".join(f", {value}" for value in columns.values())}
            RETURNING id""",
        rows,
    )
    return [row["id"] for row in given]


async def test_a_partition_is_dropped_and_nothing_that_is_kept_goes_with_it(outbox: Outbox, dsn: str) -> None:
    """Pending, delayed, in flight, failed, discarded within its grace, longer-lived classes, and rows
    without their contents survive the drop, as they were (OBX-6, OBX-5).
    """
    gone = await old_rows(outbox, 500)
    await settle_by_hand(outbox, gone, 69)
    recent, tombstone = await old_rows(outbox, 2)
    await settle_by_hand(outbox, [recent], 3)
    await settle_by_hand(outbox, [tombstone], 69, deleted_at="now() - interval '1 day'")
    [legal] = await old_rows(outbox, 1, content_class="'legal'")
    await settle_by_hand(outbox, [legal], 69)
    [stripped] = await old_rows(outbox, 1, content_class="'audit'")
    await settle_by_hand(outbox, [stripped], 69, deleted_at="now() - interval '20 days'")
    await outbox.connection.execute(
        """INSERT INTO core.retention_policies VALUES ('outbox_row', 'legal', 400, 0, 'HARD_DELETE'),
           ('outbox_row', 'audit', 1, 1, 'STRIP_PAYLOAD')"""
    )
    assert await outbox.value("SELECT swept FROM core.retention_sweep('tombstones', 'audit', '-infinity', 10)") == 1
    pending, delayed, failing, discarding = await old_rows(outbox, 4)
    await outbox.connection.execute(
        "UPDATE core.outbox SET available_at = now() + interval '9 days' WHERE id = $1", delayed
    )
    for failed in (failing, discarding):
        await outbox.connection.execute(
            """UPDATE core.outbox SET status = 'failed', failed_at = settled, settled_at = settled,
               failure_reason = 'rejected', handler_name = $2
               FROM (SELECT now() - interval '69 days' AS settled) s WHERE id = $1""",
            failed,
            HANDLER,
        )
    await outbox.value("SELECT core.outbox_discard(ARRAY[$1::uuid], 'ann')", discarding)
    held = await outbox.hold(Lane(limit=1))
    [waiting] = await old_rows(outbox, 1)
    assert [each.id for each in held] == [pending]
    kept = {recent, tombstone, legal, stripped, pending, delayed, failing, discarding, waiting}
    before = {id: dict(await outbox.row(id)) for id in kept}

    await partitions.enable(dsn, every="day", bound=NOW - timedelta(days=60))
    [dropped] = await outbox.call("partitions_drop")
    assert dropped["name"] == "outbox_first"
    assert dropped["kept"] == len(kept)
    assert {id: dict(await outbox.row(id)) for id in kept} == before
    assert await outbox.value("SELECT count(*) FROM core.outbox") == len(kept)
    assert await tables_of(outbox, *kept) == {"core.outbox_default"}
    assert await outbox.call("partitions_drop") == []
    assert await outbox.deliver(*held) == []
    assert await outbox.replay(failing) == 1
    assert await findings(dsn) == {}


@pytest.mark.slow
async def test_a_partition_with_much_to_keep_stays_and_is_swept_row_by_row(outbox: Outbox, dsn: str) -> None:
    """Nothing is lost, and what is past retention goes all the same (OBX-6, OBX-5)."""
    await settle_by_hand(outbox, await old_rows(outbox, 200), 69)
    await old_rows(outbox, 10_001)
    await partitions.enable(dsn, every="day", bound=NOW - timedelta(days=60))
    assert await outbox.call("partitions_drop") == []
    assert "outbox_first" in await names(outbox)
    assert (await findings(dsn))["partitions-kept"].object == "core.outbox_first"
    assert (
        await outbox.value("SELECT swept FROM core.retention_sweep('delivered', 'operations', '-infinity', 5000)")
        == 200
    )


async def test_rows_are_not_tombstoned_where_a_drop_is_near(outbox: Outbox, dsn: str) -> None:
    """50 days after it was settled a row of a plain outbox is due; in a partition it waits for the drop (OBX-6)."""
    ids = await outbox.insert_many(3)
    await settle_by_hand(outbox, ids, 50)
    due = "SELECT count(*) FROM core.retention_due('delivered', 'operations', '-infinity', 10)"
    assert await outbox.value(due) == 3
    await partitions.enable(dsn)
    assert await outbox.value(due) == 0
    await settle_by_hand(outbox, ids, 61)
    assert await outbox.value(due) == 3


async def test_nothing_is_made_or_dropped_after_the_clock_was_set_forward(outbox: Outbox, dsn: str) -> None:
    """What looks old may not be (OBX-6, OBX-5)."""
    await settle_by_hand(outbox, await old_rows(outbox, 20), 69)
    await partitions.enable(dsn, every="day", bound=NOW - timedelta(days=60))
    await outbox.connection.execute(
        "INSERT INTO core.clock_steps (seen_by, step) VALUES (gen_random_uuid(), interval '2 days')"
    )
    await outbox.connection.execute(f"DROP TABLE core.{(await names(outbox))[-2]}")
    assert await outbox.call("partitions_drop") == []
    assert await outbox.call("partitions_extend") == []
    await outbox.connection.execute("DELETE FROM core.clock_steps")
    assert len(await outbox.call("partitions_extend")) == 1
    assert len(await outbox.call("partitions_drop")) == 1


# --- migrations -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_later_migrations_work_on_partitions(outbox: Outbox, dsn: str, make_source: Any) -> None:
    """Nothing is pending after the conversion; columns and indexes of a later release reach every
    partition, one that is built concurrently among them (OBX-3, OBX-6).
    """
    await partition(dsn)
    assert await migrate.apply(dsn) == []
    assert await findings(dsn) == {}
    release = [each.sql for each in load().migrations]
    later = make_source(
        *release,
        "ALTER TABLE core.outbox ADD COLUMN later int NOT NULL DEFAULT 0;"
        "CREATE INDEX outbox_later ON core.outbox (later);",
        "-- holdfast: no-transaction\n"
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS outbox_latest ON core.outbox (later, id) WHERE settled_at IS NULL;",
        contract=(3, 2, 2),
    )
    assert len(await migrate.apply(dsn, source=later)) == 2
    await outbox.insert_many(2)
    assert await outbox.value(
        "SELECT bool_and(indisvalid) FROM pg_index WHERE indexrelid::regclass::text LIKE '%late%'"
    )
    assert await outbox.value(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'core.outbox_latest'::regclass"
    ) == len(await names(outbox))


# --- under load -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_live_table_is_converted_there_and_back(outbox: Outbox, dsn: str) -> None:
    """20,000 rows, three producers, a worker: no publish fails, no event is lost or handled twice (OBX-6)."""
    await outbox.insert_many(20_000, "order.old")
    await outbox.connection.execute(
        "UPDATE core.outbox SET status = 'delivered', settled_at = now(), delivered_at = now()"
    )
    registry, handled, published = HandlerRegistry(), [], []
    registry.handler(EVENT, name=HANDLER)(lambda event: handled.append(event.event_id))
    stop = asyncio.Event()

    async def produce() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            while not stop.is_set():
                published.append(await publish(connection, EVENT))
                await asyncio.sleep(0.002)
        finally:
            await connection.close()

    async with running(dsn, registry):
        producers = [asyncio.create_task(produce()) for _ in range(3)]
        await until(lambda: len(handled) > 50, what="events flow")
        await partitions.enable(dsn, every="day")
        mark = len(handled)
        await until(lambda: len(handled) > mark + 100, what="events flow on partitions")
        await partitions.disable(dsn)
        mark = len(handled)
        await until(lambda: len(handled) > mark + 50, what="events flow on the plain table")
        stop.set()
        await asyncio.gather(*producers)
        await until(lambda: len(handled) >= len(published), what="every event is handled")
    assert sorted(handled) == sorted(published)
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 20_000 + len(published)
    assert await outbox.value("SELECT max(attempts) FROM core.outbox") == 1
