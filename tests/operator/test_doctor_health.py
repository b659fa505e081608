"""What is in the way of delivery, each provoked for real, named with its evidence, and gone after its remedy
(OPS-5)."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from holdfast.embedded import EmbeddedPostgres
from holdfast.embedded.account import server_account
from holdfast.embedded.binaries import reachable_copy
from holdfast.operator import Operator
from holdfast.postgres import doctor
from holdfast.postgres.connection import Address
from holdfast.postgres.doctor import Finding, Limits, Report
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.fleet import Fleet, Registration
from holdfast.postgres.queries import Queries, split
from holdfast.postgres.wakeup import mode as wakeup_mode
from tests.outbox import CHANNEL, EVENT, HANDLER, Outbox, connect
from tests.servers import SessionServer, apply_schema
from tests.worker.test_pooler import pooled_dsn

pytestmark = pytest.mark.both_postgres

__all__ = ["pooled_dsn"]  # a fixture

PATIENCE = 20.0
NOW = timedelta(0)
_numbers = itertools.count(1)


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


async def look(connection: asyncpg.Connection, **limits: Any) -> Report:
    return await doctor.examine(connection, only="health", limits=Limits(**limits))


def only(report: Report, code: str) -> Finding:
    """The one finding of a code."""
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, report.findings
    return found[0]


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.02)
    return value


async def follow(connection: asyncpg.Connection, finding: Finding) -> None:
    for statement in split(finding.remedy):
        await connection.execute(statement)


async def test_a_healthy_installation_has_no_findings(conn: asyncpg.Connection) -> None:
    """Nothing is found where nothing is wrong (OPS-5)."""
    report = await doctor.examine(conn)
    assert report.findings == ()
    assert report.passed == report.checks
    assert report.healthy


# --- what holds the xmin horizon ---


@asynccontextmanager
async def snapshot(dsn: str, name: str = "nightly report") -> AsyncIterator[asyncpg.Connection]:
    """A session that has looked once, and keeps what it saw."""
    connection = await asyncpg.connect(dsn, server_settings={"application_name": name})
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    try:
        yield connection
    finally:
        await connection.close()


async def test_a_session_that_holds_the_horizon(conn: asyncpg.Connection, dsn: str) -> None:
    """Pid, application, login and age; ended by the remedy (OPS-5, B16)."""
    async with snapshot(dsn) as holder:
        assert codes(await look(conn)) == [], "five minutes are allowed"
        finding = only(await look(conn, held_for=NOW), "horizon-session")
        pid = holder.get_server_pid()
        assert f"pid {pid} (nightly report, login postgres)" in finding.what
        assert "idle in transaction" in finding.evidence and "transactions old" in finding.evidence
        await follow(conn, finding)

        async def is_gone() -> bool:
            return not await conn.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid)

        await until(is_gone, "the session is gone")
    assert codes(await look(conn, held_for=NOW)) == []


async def test_sessions_that_are_not_named_are_counted(conn: asyncpg.Connection, dsn: str) -> None:
    """Of many that hold the horizon the oldest twenty are named, and the others counted (OPS-5)."""
    async with AsyncExitStack() as stack:
        for number in range(23):
            await stack.enter_async_context(snapshot(dsn, f"report {number}"))
        report = await look(conn, held_for=NOW)
    held = [finding for finding in report.findings if finding.code == "horizon-session"]
    (rest,) = [finding for finding in held if not finding.object.startswith("pid ")]
    assert len(held) == 21 and rest.object == "3 more"
    assert rest.evidence == "23 in all, of which 20 are named"


async def test_how_long_decides_how_bad_it_is(conn: asyncpg.Connection, dsn: str) -> None:
    """A warning, and a problem at ten times as much (OPS-5)."""
    async with snapshot(dsn):
        began = time.monotonic()
        await asyncio.sleep(0.3)
        hasty = only(await look(conn, held_for=timedelta(milliseconds=20)), "horizon-session")
        lasted = timedelta(seconds=time.monotonic() - began)  # nearly as long as the snapshot is old
        patient = only(await look(conn, held_for=lasted / 2), "horizon-session")
        assert (hasty.severity, patient.severity) == ("problem", "warning")


async def test_an_idle_transaction_without_a_snapshot_holds_nothing(conn: asyncpg.Connection, dsn: str) -> None:
    """What is harmless is not reported (OPS-5)."""
    other = await asyncpg.connect(dsn)
    try:
        await other.execute("BEGIN; SELECT 1")
        assert codes(await look(conn, held_for=NOW)) == []
    finally:
        await other.close()


@pytest.fixture(scope="module")
def workshop(postgres_server: SessionServer) -> Iterator[EmbeddedPostgres]:
    """A server whose settings allow what usual ones do not."""
    settings = {"fsync": "off", "max_prepared_transactions": "5", "wal_level": "logical"}
    if postgres_server.major >= 17:
        settings["max_notify_queue_pages"] = "64"
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        yield server


@pytest.fixture
def shop_dsn(workshop: EmbeddedPostgres) -> Iterator[str]:
    name = f"shop_{next(_numbers)}"
    dsn = workshop.create_database(name)
    apply_schema(dsn)
    yield dsn
    workshop.drop_database(name)


@pytest.fixture
async def shop(shop_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(shop_dsn)
    yield connection
    await connection.close()


async def test_a_prepared_transaction(shop: asyncpg.Connection, shop_dsn: str) -> None:
    """Named as it has to be written to end it (OPS-5)."""
    await shop.execute("CREATE TABLE ledger (id int)")
    other = await asyncpg.connect(shop_dsn)
    await other.execute("BEGIN; INSERT INTO ledger VALUES (1)")
    await other.execute("PREPARE TRANSACTION 'ann''s transfer'")
    await other.close()
    assert codes(await look(shop)) == []
    finding = only(await look(shop, held_for=NOW), "horizon-prepared")
    assert "'ann''s transfer'" in finding.what
    await follow(shop, finding)
    assert codes(await look(shop, held_for=NOW)) == []


@pytest.mark.parametrize(
    ("create", "holds"),
    [
        ("pg_create_physical_replication_slot('gone', true)", "physical replication slot 'gone' holds WAL"),
        ("pg_create_logical_replication_slot('gone', 'pgoutput')", "logical replication slot 'gone' holds"),
    ],
)
async def test_a_replication_slot_that_nobody_reads(shop: asyncpg.Connection, create: str, holds: str) -> None:
    """Of either kind (OPS-5)."""
    await shop.execute(f"SELECT {create}")
    finding = only(await look(shop), "horizon-slot")
    assert holds in finding.what and "it has no consumer" in finding.what
    await follow(shop, finding)
    assert codes(await look(shop)) == []


async def test_a_logical_slot_holds_the_horizon_of_the_catalogs(shop: asyncpg.Connection) -> None:
    """Its age is counted in transactions (OPS-5)."""
    await shop.execute("SELECT pg_create_logical_replication_slot('gone', 'pgoutput')")
    try:
        for _ in range(30):
            await shop.execute("SELECT pg_current_xact_id()")
        finding = only(await look(shop, held_transactions=2), "horizon-slot")
        assert "holds the xmin horizon" in finding.what and finding.severity == "problem"
    finally:
        await shop.execute("SELECT pg_drop_replication_slot('gone')")


@contextmanager
def standby_of(server: EmbeddedPostgres, major: SessionServer) -> Iterator[str]:
    """A streaming standby that tells the primary what its queries still need; yields its DSN."""
    account = server_account()
    binaries = reachable_copy(major.binaries, account)
    parts = urlsplit(server.dsn)
    data = server.data_dir / "standby"  # goes with the server's own
    command = [
        *(binaries.program("pg_basebackup"), "--host", str(parts.hostname), "--port", str(parts.port)),
        *("--username", str(parts.username), "--pgdata", str(data), "--write-recovery-conf", "--checkpoint", "fast"),
    ]
    environment = {**os.environ, "PGPASSWORD": parts.password or "", "PGAPPNAME": "reporting"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    for directory, _, names in os.walk(data):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            if account.uid is not None and account.gid is not None:
                os.chown(path, account.uid, account.gid)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "port": str(port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "200",
        "hot_standby_feedback": "on", "wal_receiver_status_interval": "1s", "max_prepared_transactions": "5",
        "wal_level": "logical",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (server.data_dir / "standby.log").open("wb") as log:
        process = subprocess.Popen(
            [binaries.program("postgres"), "-D", str(data), *options],
            cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, **account.popen_arguments(),
        )  # fmt: skip
    try:
        yield f"postgresql://{parts.username}:{parts.password}@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_query_on_a_standby(
    shop: asyncpg.Connection, workshop: EmbeddedPostgres, postgres_server: SessionServer
) -> None:
    """hot_standby_feedback makes it hold the horizon of the primary (OPS-5)."""
    with standby_of(workshop, postgres_server) as dsn:

        async def reader() -> asyncpg.Connection | None:
            try:
                return await asyncpg.connect(dsn)
            except (OSError, asyncpg.PostgresError):
                return None

        holder = await until(reader, "the standby answers")
        try:
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")

            async def named() -> Finding | None:
                await shop.execute("SELECT pg_current_xact_id()")
                found = [f for f in (await look(shop, held_transactions=20)).findings if f.code == "horizon-standby"]
                return found[0] if found else None

            finding = await until(named, "the standby is named")
            assert "reporting (127.0.0.1)" in finding.what
            assert "transactions old" in finding.evidence
        finally:
            await holder.close()


# --- the state of the tables ---


async def test_dead_rows(conn: asyncpg.Connection) -> None:
    """Where autovacuum does not come, and until somebody vacuums (OPS-5)."""
    await conn.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
    await conn.execute(
        "INSERT INTO core.outbox (event_type, source, payload) "
        "SELECT 'a.b', 'shop', '{}' FROM generate_series(1, 12000)"
    )
    await conn.execute("DELETE FROM core.outbox")
    await conn.execute("SELECT pg_stat_force_next_flush()")
    finding = only(await look(conn), "dead-rows")
    assert "core.outbox" in finding.what and "12000 dead" in finding.evidence
    await follow(conn, finding)
    assert codes(await look(conn)) == []


async def test_updates_that_are_not_heap_only(conn: asyncpg.Connection) -> None:
    """An index on what every claim changes (OPS-5)."""
    await conn.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
    await conn.execute(
        "INSERT INTO core.outbox (event_type, source, payload, available_at) "
        "SELECT 'a.b', 'shop', '{}', now() + '1 day' FROM generate_series(1, 1200)"
    )
    update = "UPDATE core.outbox SET attempts = attempts + 1; SELECT pg_stat_force_next_flush()"
    await conn.execute(update)
    await conn.execute("SELECT 1")
    assert "hot-updates-few" not in codes(await look(conn, updates=1000))
    await conn.execute("CREATE INDEX mine ON core.outbox (attempts)")
    for _ in range(4):
        await conn.execute(update)
    await conn.execute("SELECT 1")
    finding = only(await look(conn, updates=1000), "hot-updates-few")
    assert "core.outbox" in finding.what and "of 6000" in finding.evidence
    assert "hot-updates-few" not in codes(await look(conn, updates=7000)), "too few to tell"


@pytest.mark.parametrize("setting", ["autovacuum", "track_counts"])
async def test_a_server_that_does_not_vacuum(shop: asyncpg.Connection, setting: str) -> None:
    """Either setting stops it (OPS-5)."""

    async def is_set(value: str) -> Callable[[], Awaitable[bool]]:
        async def read() -> bool:
            return bool(await shop.fetchval("SELECT current_setting($1) = $2", setting, value))

        return read

    await shop.execute(f"ALTER SYSTEM SET {setting} = off")
    try:
        await shop.execute("SELECT pg_reload_conf()")
        await until(await is_set("off"), f"{setting} is off")
        report = await look(shop)
        finding = only(report, "autovacuum-off")
        assert finding.severity == "problem" and f"{setting} = off" in finding.evidence
        blind = {"could-not-look"} if setting == "track_counts" else set()
        assert set(codes(report)) == {"autovacuum-off"} | blind
        await follow(shop, finding)
        await until(await is_set("on"), f"{setting} is on")
        assert codes(await look(shop)) == []
    finally:
        await shop.execute(f"ALTER SYSTEM RESET {setting}")
        await shop.execute("SELECT pg_reload_conf()")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_transaction_numbers_that_run_out(postgres_server: SessionServer) -> None:
    """A held snapshot keeps autovacuum from freezing what is far too old (OPS-5)."""
    settings = {"fsync": "off", "synchronous_commit": "off", "autovacuum_freeze_max_age": "100000"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        dsn = server.create_database("shop")
        apply_schema(dsn)
        connection = await asyncpg.connect(dsn)
        try:
            assert "wraparound-near" not in codes(await look(connection))
            async with snapshot(dsn):
                await connection.execute(
                    "DO $$ BEGIN FOR i IN 1..210000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
                )
                finding = only(await look(connection), "wraparound-near")
            assert finding.severity == "warning" and "transactions" in finding.what
            assert "after 100000" in finding.evidence
        finally:
            await connection.close()


async def test_an_index_that_a_failed_build_left_behind(conn: asyncpg.Connection, dsn: str) -> None:
    """CREATE INDEX CONCURRENTLY that was cancelled; the remedy builds it (OPS-5)."""
    definition = await conn.fetchval("SELECT pg_get_indexdef('core.outbox_dlq'::regclass)")
    await conn.execute("DROP INDEX core.outbox_dlq")
    async with snapshot(dsn) as holder:
        await holder.execute("SELECT pg_current_xact_id(); SELECT count(*) FROM core.outbox")
        await conn.execute("SET statement_timeout = '300ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await conn.execute(definition.replace("INDEX", "INDEX CONCURRENTLY", 1))
        await conn.execute("RESET statement_timeout")
    [finding] = (await doctor.examine(conn, only="drift")).findings
    assert (finding.code, finding.object) == ("index-invalid", "core.outbox_dlq")
    await follow(conn, finding)
    assert (await doctor.examine(conn)).findings == ()


# --- waking up ---


@pytest.mark.parametrize("mode", ["always", "never"])
async def test_the_bell(conn: asyncpg.Connection, dsn: str, mode: wakeup_mode.Mode) -> None:
    """Either is somebody's choice, and worth a note (OPS-5)."""
    await wakeup_mode.set_mode(dsn, mode)
    report = await look(conn)
    finding = only(report, f"wakeup-{mode}")
    assert finding.severity == "note" and report.healthy
    assert finding.remedy == "holdfast notify when_idle"
    await wakeup_mode.set_mode(dsn, "when_idle")
    assert codes(await look(conn)) == []


async def living(
    outbox: Outbox, *, generation: int = 0, channels: tuple[str, ...] = (CHANNEL,), handlers: tuple[str, ...] = ()
) -> None:
    """A worker that has just been heard of."""
    worker = Registration(uuid.uuid4(), "w1", "host", 1, "0.1.0", generation, list(channels), list(handlers))
    await Fleet(Queries()).beat(outbox.connection, worker)


async def test_workers_that_do_not_listen(outbox: Outbox, dsn: str) -> None:
    """A living worker without a listening connection only polls (LSN-2, OPS-5)."""
    await living(outbox)
    (worker,) = await outbox.connection.fetchrow("SELECT id FROM core.workers")
    claiming = await asyncpg.connect(dsn, server_settings={"application_name": f"holdfast claim {worker}"})
    try:
        finding = only(await look(outbox.connection), "listeners-missing")
        assert "1 living (w1), 0 listening" in finding.evidence and "--listen-dsn" in finding.remedy
        listener = await asyncpg.connect(dsn, server_settings={"application_name": "holdfast listen"})
        try:
            assert codes(await look(outbox.connection)) == []
        finally:
            await listener.close()
    finally:
        await claiming.close()


async def test_workers_that_are_cut_off_or_silent(outbox: Outbox, dsn: str) -> None:
    """A worker that cannot connect is not one behind a pooler; and one that is gone is named (LSN-2, OPS-5)."""
    await living(outbox)
    (worker,) = await outbox.connection.fetchrow("SELECT id FROM core.workers")
    await outbox.connection.execute("UPDATE core.workers SET heartbeat_at = heartbeat_at - interval '30 seconds'")
    report = await look(outbox.connection)
    finding = only(report, "worker-unconnected")
    assert "w1" in finding.what and "database_unavailable" in finding.remedy and "host:1" in finding.evidence
    assert codes(report) == ["worker-unconnected"], "and no word of a pooler"
    name = {"application_name": f"holdfast claim {worker}"}
    session = await asyncpg.connect(dsn, server_settings=name)
    try:
        assert codes(await look(outbox.connection)) == ["listeners-missing"]
    finally:
        await session.close()
    await outbox.connection.execute("UPDATE core.workers SET heartbeat_at = heartbeat_at - interval '5 minutes'")
    report = await look(outbox.connection)
    assert f"holdfast workers release {worker}" in only(report, "worker-silent").remedy
    assert codes(report) == ["worker-silent"]


@pytest.mark.slow
async def test_what_blocks_delivery_is_the_root_of_the_chain(conn: asyncpg.Connection, dsn: str) -> None:
    """A worker waits for a statement that waits for an idle transaction; that one is named, and ended (OPS-5)."""
    claim = f"holdfast claim {uuid.uuid4()}"
    async with AsyncExitStack() as sessions:

        async def session(name: str) -> asyncpg.Connection:
            opened = await asyncpg.connect(dsn, server_settings={"application_name": name})
            sessions.push_async_callback(opened.close)
            return opened

        idle, altering, claiming = await session("psql"), await session("pasted"), await session(claim)
        await idle.execute("BEGIN; SELECT FROM core.outbox LIMIT 1")
        pid = idle.get_server_pid()
        waiting = [asyncio.create_task(altering.execute("ALTER TABLE core.outbox ADD COLUMN note text"))]
        await waits_for_a_lock(conn, altering)
        waiting.append(asyncio.create_task(claiming.execute("SELECT FROM core.outbox LIMIT 1")))
        await waits_for_a_lock(conn, claiming)
        briefly = timedelta(milliseconds=1)
        finding = only(await look(conn, lock_wait=briefly), "delivery-blocked")
        assert (finding.severity, finding.object) == ("problem", f"pid {pid}")
        assert f"pid {pid}, login" in finding.what and "application psql, idle in transaction for" in finding.what
        assert f"pid {claiming.get_server_pid()} ({claim}) waits" in finding.evidence
        await follow(conn, finding)
        async with asyncio.timeout(20):
            await asyncio.gather(*waiting)
        assert "delivery-blocked" not in codes(await look(conn, lock_wait=briefly))


async def waits_for_a_lock(conn: asyncpg.Connection, session: asyncpg.Connection) -> None:
    waits = "SELECT bool_or(waitstart IS NOT NULL) FROM pg_locks WHERE pid = $1 AND NOT granted"
    await until(lambda: conn.fetchval(waits, session.get_server_pid()), what="it waits for a lock")


async def test_nobody_need_listen_for_a_bell_that_is_silent(outbox: Outbox, dsn: str) -> None:
    await wakeup_mode.set_mode(dsn, "never")
    await living(outbox)
    assert set(codes(await look(outbox.connection))) == {"worker-unconnected", "wakeup-never"}


async def test_through_a_transaction_pooler(pooled_dsn: str) -> None:
    """It says so, and everything else can be looked at all the same (OBX-7, OPS-5)."""
    address = Address(pooled_dsn)
    await address.probe()
    connection = await asyncpg.connect(pooled_dsn, statement_cache_size=0)
    try:
        report = await doctor.examine(connection, pooled=address.pooled)
        assert only(report, "pooler").severity == "note"
        assert codes(report) == ["pooler"]
    finally:
        await connection.close()


async def test_a_notification_queue_that_fills_up(
    shop: asyncpg.Connection, shop_dsn: str, postgres_server: SessionServer
) -> None:
    """A session that listens and never reads (OPS-5, OBS-3)."""
    # Before Postgres 17 the queue takes gigabytes.
    limits = {} if postgres_server.major >= 17 else {"queue_usage": 1e-6}
    sleeper = await asyncpg.connect(shop_dsn)
    try:
        await sleeper.execute("LISTEN noise")
        await sleeper.execute("BEGIN")
        for n in range(20):
            await shop.execute("SELECT pg_notify('noise', $1)", f"{n} ".ljust(7900, "x"))
        assert "notify-queue-filling" in codes(await look(shop, **limits))
        finding = only(await look(shop, **limits), "notify-queue-filling")
        assert "in use" in finding.evidence
    finally:
        await sleeper.close()
    await shop.execute("SELECT pg_notify('noise', 'the queue is trimmed by who comes next')")

    async def is_empty() -> bool:
        await shop.execute("SELECT pg_notify('noise', '')")
        return codes(await look(shop)) == []

    await until(is_empty, "the queue is empty")


async def test_commits_that_wait_for_the_lock_of_notify(own_server: EmbeddedPostgres, own_dsn: str) -> None:
    """One commit is held up by a standby that does not answer, and holds up the others (OPS-5, B17)."""
    await wakeup_mode.set_mode(own_dsn, "always")
    producers = [await connect(own_dsn) for _ in range(3)]
    conn = await asyncpg.connect(own_dsn)
    try:
        assert "notify-lock-waits" not in codes(await look(conn))
        await conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'ghost'")
        await conn.execute("SELECT pg_reload_conf()")

        async def is_set() -> bool:
            return bool(await conn.fetchval("SELECT current_setting('synchronous_standby_names') = 'ghost'"))

        await until(is_set, "commits wait for a standby")
        async with asyncio.TaskGroup() as group:
            for producer in producers:
                group.create_task(Outbox(producer).insert())
            waiting = "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted AND locktype = 'object'"
            await until(lambda: conn.fetchval(waiting), "two commits wait for a third")
            finding = only(await look(conn), "notify-lock-waits")
            assert "in 5 of 5 looks, up to 2 sessions" in finding.evidence
            await conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await conn.execute("SELECT pg_reload_conf()")
        assert "notify-lock-waits" not in codes(await look(conn))
    finally:
        for connection in (conn, *producers):
            await connection.close()


# --- what is owed ---


async def test_an_unserved_generation(outbox: Outbox) -> None:
    """Open rows of a generation that nobody has (GEN-2, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.insert(generation=3, channel="outbox_gen_3")
    finding = only(await look(outbox.connection), "generation-unserved")
    assert finding.severity == "problem"
    assert "generation 3" in finding.what and "1 open" in finding.evidence
    assert "--channel outbox_gen_3 --generation 3" in finding.remedy and "on outbox_gen_3" in finding.evidence
    assert "--to" not in finding.remedy, "no generation is served"
    await living(outbox, generation=5, channels=("outbox_gen_5",))
    finding = only(await look(outbox.connection), "generation-unserved")
    assert finding.remedy.endswith("holdfast generations move 3 --to 5")
    await bell_is_heard(outbox, generation=3, channels=("outbox_gen_3",), handlers=(HANDLER,))


async def bell_is_heard(outbox: Outbox, **worker: Any) -> None:
    """With this worker, the only thing left to find is that it has no session."""
    await living(outbox, **worker)
    assert set(codes(await look(outbox.connection))) == {"worker-unconnected"}


async def test_what_is_not_due_yet_is_only_a_warning(outbox: Outbox) -> None:
    """There is time left to start a worker (OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.insert(available_at=datetime.now(UTC) + timedelta(hours=1))
    finding = only(await look(outbox.connection), "generation-unserved")
    assert finding.severity == "warning" and "none due yet" in finding.evidence


async def test_a_channel_that_nobody_serves(outbox: Outbox) -> None:
    """The generation has workers, the channel has none (OBX-4, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.insert(channel="cold")
    await living(outbox, handlers=(HANDLER,))
    finding = only(await look(outbox.connection), "channel-unserved")
    assert finding.severity == "problem" and "channel cold" in finding.what and "--channel cold" in finding.remedy
    await bell_is_heard(outbox, channels=("cold",), handlers=(HANDLER,))


async def test_a_handler_that_nobody_has(outbox: Outbox) -> None:
    """Its events are owed, running or not (LSN-7, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.insert()
    await living(outbox, handlers=("mail.thank",))
    finding = only(await look(outbox.connection), "handler-unserved")
    assert finding.severity == "problem" and HANDLER in finding.what
    await bell_is_heard(outbox, handlers=(HANDLER,))


async def remedied(outbox: Outbox, dsn: str, finding: Finding) -> None:
    """Run the commands that a remedy names, as an operator would copy them."""
    commands = re.findall(r"holdfast [^;]+", finding.remedy)
    assert commands, finding.remedy
    for command in commands:
        run = [sys.executable, "-c", "from holdfast.cli import main; main()", *shlex.split(command)[1:], "--yes"]
        done = subprocess.run(run, env={**os.environ, "HOLDFAST_DSN": dsn}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.slow
@pytest.mark.newcomer
async def test_the_remedy_of_a_handler_that_is_gone_cures(outbox: Outbox, dsn: str) -> None:
    """What was split, what was not, and nothing else; then the doctor has no complaint left (LSN-7, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT, "order.other")
    await outbox.subscribe("mail.thank", EVENT)
    split = await outbox.insert()
    await outbox.connection.execute("UPDATE core.outbox SET handler_name = $2 WHERE id = $1", split, HANDLER)
    await outbox.insert(event_type="order.other")
    other = await outbox.insert()
    await outbox.connection.execute("UPDATE core.outbox SET handler_name = $2 WHERE id = $1", other, "mail.thank")
    await living(outbox, handlers=("mail.thank",))
    finding = only(await look(outbox.connection), "handler-unserved")
    await remedied(outbox, dsn, finding)
    # What was not split may be wanted by a handler of another name; without one, the doctor says so.
    await remedied(outbox, dsn, only(await look(outbox.connection), "event-unrouted"))
    found = await look(outbox.connection)
    assert not {"handler-unserved", "event-unrouted"} & set(codes(found)), found
    rows = await outbox.connection.fetch("SELECT id, status FROM core.outbox WHERE settled_at IS NULL")
    assert [row["id"] for row in rows] == [other]


@pytest.mark.newcomer
async def test_the_remedy_of_an_event_that_nobody_wants_cures(outbox: Outbox, dsn: str) -> None:
    """LSN-7, OPS-5."""
    await outbox.insert(event_type="order.lost", target="billing")
    await living(outbox, handlers=(HANDLER,))
    await remedied(outbox, dsn, only(await look(outbox.connection), "event-unrouted"))
    assert "event-unrouted" not in codes(await look(outbox.connection))


async def test_an_event_that_nobody_wants(outbox: Outbox) -> None:
    """It waits, visible as unrouted (D6, LSN-7, OPS-5)."""
    await outbox.insert(event_type="order.lost", target="billing")
    await living(outbox, handlers=(HANDLER,))
    finding = only(await look(outbox.connection), "event-unrouted")
    assert finding.severity == "warning" and "order.lost for billing" in finding.what
    await outbox.subscribe(HANDLER, "order.lost")
    assert codes(await look(outbox.connection)) == ["worker-unconnected"]


@pytest.mark.abandons_leases("nobody claims it again")
async def test_a_lease_that_ended_long_ago(outbox: Outbox) -> None:
    """Nobody takes the event again (P8, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.held()
    await living(outbox, handlers=(HANDLER,))
    assert codes(await look(outbox.connection)) == ["worker-unconnected"]
    await outbox.connection.execute("UPDATE core.outbox SET lease_expires_at = now() - interval '2 minutes'")
    finding = only(await look(outbox.connection), "lease-expired")
    assert re.search(r"1 events, the first for 1[2-9]\d s", finding.evidence)


@pytest.mark.abandons_leases("its handler never ends")
async def test_handlers_that_overran_keep_the_slots_of_their_worker(outbox: Outbox) -> None:
    """The worker lives, so another one is not what is missing (P8, OPS-5)."""
    await outbox.subscribe(HANDLER, EVENT)
    await outbox.held()
    await living(outbox, handlers=(HANDLER,))
    await outbox.connection.execute(
        """UPDATE core.outbox SET lease_expires_at = now() - interval '2 minutes',
                                  claimed_by = (SELECT w.id FROM core.workers w WHERE w.name = 'w1')"""
    )
    report = await look(outbox.connection)
    finding = only(report, "handler-overrun")
    assert "w1" in finding.what and "host:1: 1 events" in finding.evidence and "restart" in finding.remedy
    assert "lease-expired" not in codes(report)


@pytest.mark.parametrize("table", ["subscriptions_version", "sweeps"])
async def test_a_table_without_its_only_row(conn: asyncpg.Connection, table: str) -> None:
    """Every claim would come back empty, or nothing be swept (LSN-7, OBX-5, OPS-5)."""
    await conn.execute(f"DELETE FROM core.{table}")
    finding = only(await look(conn), "row-lost")
    assert finding.severity == "problem" and f"core.{table}" in finding.what
    await follow(conn, finding)
    assert codes(await look(conn)) == []


@pytest.mark.parametrize(("shift", "words"), [(60.0, "60.0 s behind"), (-60.0, "60.0 s ahead"), (0.5, "")])
async def test_clocks_that_differ(conn: asyncpg.Connection, shift: float, words: str) -> None:
    """This machine's clock against the database's, allowing for the way there (C1, OPS-5)."""
    report = await doctor.examine(conn, only="health", clock=lambda: time.time() + shift)
    assert [words in finding.evidence for finding in report.findings] == ([True] if words else [])


# --- when it cannot look ---


@pytest.mark.slow
async def test_a_schema_that_is_being_changed(conn: asyncpg.Connection, dsn: str) -> None:
    """It waits two seconds for a lock, not for ever, says what it did not see, and who is in the way (OPS-5)."""
    other = await asyncpg.connect(dsn)
    try:
        await other.execute("BEGIN; LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        started = time.monotonic()
        async with Operator(dsn, actor="ann@example.com") as operator:
            report = await operator.doctor("health")
        assert time.monotonic() - started < 15
        blocked = only(report, "delivery-blocked")
        assert blocked.severity == "problem" and f"pid {other.get_server_pid()}, login " in blocked.what
        assert f"SELECT pg_terminate_backend({other.get_server_pid()});" in blocked.remedy
        blind = only(report, "could-not-look")
        assert "another session holds a lock on a table" in blind.evidence and "generations" in blind.object
        assert "autovacuum" in report.passed
    finally:
        await other.close()


async def test_a_server_that_is_newer_than_the_release(
    conn: asyncpg.Connection, postgres_server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said once, because its way of printing definitions may look like drift (OBX-3)."""
    monkeypatch.setattr(doctor, "NEWEST_TESTED", postgres_server.major - 1)
    [finding] = (await doctor.examine(conn)).findings
    assert (finding.severity, finding.code) == ("note", "server-untested")
    assert f"Postgres {postgres_server.major}" in finding.evidence


async def test_a_schema_too_damaged_to_read(conn: asyncpg.Connection) -> None:
    """What the drift keeps from being looked at is said, and the drift is named beside it (OPS-5)."""
    await conn.execute("DROP TABLE core.workers")
    report = await doctor.examine(conn)
    assert only(report, "table-missing").object == "core.workers"
    assert "the schema is not what this release needs" in only(report, "could-not-look").evidence


async def test_a_connection_that_is_lost_ends_it(conn: asyncpg.Connection, dsn: str) -> None:
    """A report without answers would be none (OPS-5)."""
    changer, other = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        await changer.execute("BEGIN; LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        looking = asyncio.create_task(look(other))
        await Outbox(conn).somebody_waits()
        await conn.execute("SELECT pg_terminate_backend($1)", other.get_server_pid())
        with pytest.raises(CONNECTION_FAULTS):
            await looking
    finally:
        await changer.close()
        await other.close()


async def test_a_look_beside_many_kept_events_is_cheap(conn: asyncpg.Connection) -> None:
    """No check reads settled rows (OBS-4, OPS-5)."""
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, status, settled_at, delivered_at, handler_name)
           SELECT 'a.b', 'shop', '{}', 'delivered', now(), now(), 'shop.ship' FROM generate_series(1, 20000)"""
    )
    await conn.execute("ANALYZE core.outbox; SELECT pg_stat_force_next_flush()")
    reads = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_all_tables WHERE relid = 'core.outbox'::regclass"
    before = await conn.fetchval(reads)
    assert codes(await look(conn)) == []
    await conn.execute("SELECT pg_stat_force_next_flush()")
    assert await conn.fetchval(reads) - before < 100
