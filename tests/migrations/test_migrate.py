"""Forward-only migrations (OBX-3), safe beside running workers (RELIABILITY B13, B14) and in any schema (OBX-1)."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from holdfast.errors import ConfigurationError, MigrationError, SchemaMismatch
from holdfast.importing import import_from
from holdfast.installing import release_remedy
from holdfast.postgres.schema import ddl, migrate
from holdfast.postgres.schema.migrate import Step
from holdfast.postgres.wakeup import mode
from tests.migrations.conftest import FIRST, SECOND, MakeSource
from tests.servers import SessionServer

pytestmark = pytest.mark.both_postgres


async def fetch(dsn: str, sql: str, *values: object) -> list[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for row in await connection.fetch(sql, *values)]
    finally:
        await connection.close()


async def execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


LEDGER = "SELECT version, name FROM core.migrations WHERE version > 0 ORDER BY version"


async def test_plan_of_a_database_without_the_schema_says_version_0(empty_dsn: str) -> None:
    """Everything is pending, and looking changes nothing (OBX-3)."""
    found = await migrate.state(empty_dsn)
    assert (found.database_version, found.applied) == (0, ())
    assert found.pending
    assert found.code_version == found.pending[-1].version
    assert await fetch(empty_dsn, "SELECT 1 FROM pg_namespace WHERE nspname = 'core'") == []


async def test_the_packaged_migrations_apply_and_are_then_done(empty_dsn: str) -> None:
    """Applied in order, recorded, and not applied again (OBX-3)."""
    steps: list[Step] = []
    done = await migrate.apply(empty_dsn, on_step=steps.append)
    assert [m.version for m in done] == list(range(1, len(done) + 1))
    assert [s.migration for s in steps if s.action == "applied"] == done
    found = await migrate.state(empty_dsn)
    assert found.up_to_date
    assert found.database_version == found.code_version == len(done)
    for line, migration in zip(found.applied, done, strict=True):
        assert line.checksum == hashlib.sha256(migration.sql.encode()).hexdigest() == migration.checksum
        assert line.applied_by == urlsplit(empty_dsn).username
    assert await migrate.apply(empty_dsn) == []


async def test_migrations_and_functions_are_one_transaction(empty_dsn: str, make_source: MakeSource) -> None:
    """No worker finds a schema between two releases; what fails leaves the schema as it was (OBX-3, OPS-6)."""
    broken = make_source(FIRST, f"{SECOND} SELECT 1/0;")
    with pytest.raises(MigrationError, match=r"0002_step.*division by zero") as refused:
        await migrate.apply(empty_dsn, source=broken)
    assert isinstance(refused.value, migrate.MigrationRefused)
    assert refused.value.remedy
    assert await fetch(empty_dsn, LEDGER) == []
    with pytest.raises(MigrationError, match=r"functions.*does not exist"):
        await migrate.apply(empty_dsn, source=make_source(FIRST, functions="DROP FUNCTION core.nothing();"))
    assert await fetch(empty_dsn, "SELECT to_regclass('core.thing')::text") == [(None,)]
    done = await migrate.apply(empty_dsn, source=make_source(FIRST, SECOND))
    assert [m.version for m in done] == [1, 2]


async def test_of_several_processes_one_migrates_and_the_others_find_nothing_to_do(
    empty_dsn: str, make_source: MakeSource
) -> None:
    """Every instance of a deployment may run it at start (OBX-3)."""
    source = make_source(f"{FIRST} SELECT pg_sleep(0.3);", SECOND)
    steps: list[Step] = []
    runs = [migrate.apply(empty_dsn, source=source, on_step=steps.append) for _ in range(4)]
    done = await asyncio.gather(*runs)
    assert sorted(len(each) for each in done) == [0, 0, 0, 2]
    assert [s.action for s in steps].count("wait") == 3


async def test_behind_a_pooler_runs_take_turns(
    empty_dsn: str, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler gives its own backend number; then no lock outlives a transaction (OBX-7)."""
    monkeypatch.setattr(asyncpg.Connection, "get_server_pid", lambda _self: -1)
    source = make_source(f"{FIRST} SELECT pg_sleep(0.2);", SECOND)
    done = await asyncio.gather(*(migrate.apply(empty_dsn, source=source) for _ in range(3)))
    assert sorted(m.version for each in done for m in each) == [1, 2]
    index = "-- holdfast: no-transaction\nCREATE INDEX CONCURRENTLY i ON core.thing (note);"
    with pytest.raises(MigrationError, match="pooler"):
        await migrate.apply(empty_dsn, source=make_source(f"{FIRST} SELECT pg_sleep(0.2);", SECOND, index))


async def test_a_migration_outside_a_transaction(empty_dsn: str, make_source: MakeSource) -> None:
    """CREATE INDEX CONCURRENTLY works, also while another run waits for its turn (OBX-3)."""
    index = """-- Lets readers find notes.
-- holdfast: no-transaction
CREATE INDEX CONCURRENTLY thing_note ON core.thing (note);
CREATE INDEX CONCURRENTLY thing_both ON core.thing (note, id);
"""
    # The pause makes sure that the second run is waiting when the index is built.
    source = make_source(FIRST, f"{SECOND} SELECT pg_sleep(0.5);", index)
    async with asyncio.timeout(20):
        done = await asyncio.gather(*(migrate.apply(empty_dsn, source=source) for _ in range(2)))
    assert sorted(len(each) for each in done) == [0, 3]
    indexes = """SELECT c.relname::text, pg_get_userbyid(c.relowner)::text FROM pg_index i
                 JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indisvalid AND c.relname ~ '^thing_[nb]' ORDER BY 1"""
    assert await fetch(empty_dsn, indexes) == [
        ("thing_both", "holdfast_owner"),
        ("thing_note", "holdfast_owner"),
    ]


async def test_a_failed_migration_outside_a_transaction_is_not_recorded(
    empty_dsn: str, make_source: MakeSource
) -> None:
    index = "-- holdfast: no-transaction\nCREATE UNIQUE INDEX CONCURRENTLY i ON core.thing ((1));"
    rows = f"{FIRST} INSERT INTO core.thing VALUES (1), (2);"
    with pytest.raises(MigrationError, match="INVALID index"):
        await migrate.apply(empty_dsn, source=make_source(rows, index))
    assert await fetch(empty_dsn, LEDGER) == [(1, "step")]


# --- what is refused ---


async def test_a_changed_migration_is_refused(empty_dsn: str, make_source: MakeSource) -> None:
    """What was applied is history. (OBX-3)"""
    await migrate.apply(empty_dsn, source=make_source(FIRST, SECOND))
    changed = make_source(FIRST, SECOND.replace("text", "int"))
    for attempt in (migrate.state, migrate.apply):
        with pytest.raises(
            MigrationError,
            match=r"0002_step is not the text that was applied.*install this release again.*new migration",
        ):
            await attempt(empty_dsn, source=changed)
    assert await fetch(empty_dsn, LEDGER) == [(1, "step"), (2, "step")]


@pytest.mark.parametrize("more", [(), (SECOND,)], ids=["as many", "more migrations"])
async def test_a_schema_with_another_baseline_is_refused(
    empty_dsn: str, make_source: MakeSource, more: tuple[str, ...]
) -> None:
    """Until 1.0 a change of the schema edits 0001, and a schema that another 0001 made is not touched. (OBX-3)"""
    await migrate.apply(empty_dsn, schema="shop", source=make_source(FIRST, *more, contract=(3, 2, 3)))
    before = await catalog(empty_dsn, "shop")
    connection = await asyncpg.connect(empty_dsn)
    try:
        for attempt in (
            migrate.state(empty_dsn, schema="shop"),
            migrate.apply(empty_dsn, schema="shop"),
            migrate.require_compatible(connection, "shop"),
            mode.set_mode(empty_dsn, "never", "shop"),
            import_from(empty_dsn, "shop", "table", source="shop", actor="ada", table="public.mine"),
        ):
            with pytest.raises(SchemaMismatch) as refused:
                await attempt
            assert str(refused.value) == (
                "the database has schema shop with another migration 0001, this version needs its own; no schema is "
                "converted before 1.0: install beside it with --schema NAME; or stop the producers, let the version "
                "that made it finish what is open, and run holdfast uninstall --schema shop and holdfast migrate apply "
                "--schema shop"
            )
    finally:
        await connection.close()
    with psycopg.connect(empty_dsn) as printed, pytest.raises(psycopg.Error, match="another migration 0001"):
        printed.execute(migrate.printable("shop", since=1).encode())
    assert await catalog(empty_dsn, "shop") == before
    await migrate.uninstall(empty_dsn, "shop")
    await migrate.apply(empty_dsn, schema="shop")
    assert (await migrate.state(empty_dsn, schema="shop")).up_to_date


async def test_line_endings_are_not_a_change(empty_dsn: str, make_source: MakeSource) -> None:
    await migrate.apply(empty_dsn, source=make_source("-- one\n" + FIRST))
    windows = make_source("")
    (windows / "migrations" / "0001_step.sql").write_bytes(b"-- one\r\n" + FIRST.encode())
    assert (await migrate.state(empty_dsn, source=windows)).pending == ()


async def test_a_gap_in_the_ledger_is_refused(empty_dsn: str, make_source: MakeSource) -> None:
    source = make_source(FIRST, SECOND)
    await migrate.apply(empty_dsn, source=source)
    await execute(empty_dsn, "DELETE FROM core.migrations WHERE version = 1")
    for attempt in (migrate.state, migrate.apply):
        with pytest.raises(MigrationError, match=r"gap: 0001 is missing before 0002.*restore"):
            await attempt(empty_dsn, source=source)


@pytest.mark.parametrize(
    "names", [["0002_b.sql"], ["0001_a.sql", "0003_c.sql"], ["0001_a.sql", "0001_b.sql"], ["one.sql"]]
)
def test_files_with_a_gap_or_another_name_are_refused(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "migrations").mkdir()
    for name in names:
        (tmp_path / "migrations" / name).write_text("SELECT 1")
    with pytest.raises(MigrationError, match="should have the number"):
        migrate.printable(source=tmp_path)


async def test_a_database_that_no_longer_serves_the_code_is_refused(empty_dsn: str, make_source: MakeSource) -> None:
    """Old code must not touch what it does not know; the error names both releases and the remedy (OBX-3, OPS-6)."""
    await migrate.apply(empty_dsn, source=make_source(FIRST, SECOND, contract=(3, 2, 2)))
    for attempt in (migrate.state, migrate.apply):
        with pytest.raises(SchemaMismatch) as refused:
            await attempt(empty_dsn, source=make_source(FIRST))
        assert refused.value.found == (
            "core of contract 3 (holdfast 0.3.0), which serves code of contract 2 (holdfast 0.2.0) or later"
        )
        assert "contract 1" in refused.value.expected
        assert refused.value.remedy == release_remedy("0.2.0")


async def test_a_newer_database_that_serves_the_code_is_left_as_it_is(empty_dsn: str, make_source: MakeSource) -> None:
    """After a rollback the old release runs `migrate apply` again, and puts no old function back (OPS-6)."""
    old = make_source(FIRST, functions=FUNCTION, contract=(2, 1, 2))
    new = make_source(FIRST, functions=FUNCTION.replace("41", "42"), contract=(3, 2, 3))
    newest = make_source(FIRST, SECOND, functions=FUNCTION.replace("41", "43"), contract=(3, 2, 3))
    for later, answer in ((new, 42), (newest, 43)):
        await migrate.apply(empty_dsn, source=later)
        found = await migrate.state(empty_dsn, source=old)
        assert (found.newer, found.up_to_date, found.pending) == (True, True, ())
        steps: list[Step] = []
        assert await migrate.apply(empty_dsn, source=old, on_step=steps.append) == []
        assert [step.text for step in steps] == [
            "schema core is of contract 3 (holdfast 0.3.0), and serves this release too"
        ]
        assert await fetch(empty_dsn, "SELECT core.answer()") == [(answer,)]


async def test_a_schema_with_other_things_in_it_is_refused(empty_dsn: str) -> None:
    """Uninstalling drops the schema, so it must never hold what is not Holdfast's (OBX-7)."""
    await execute(empty_dsn, "CREATE SCHEMA core; CREATE TABLE core.customers (id int)")
    with pytest.raises(MigrationError, match=r"not Holdfast's.*--schema"):
        await migrate.apply(empty_dsn)
    with pytest.raises(MigrationError, match="no Holdfast in the schema core"):
        await migrate.uninstall(empty_dsn)
    assert await fetch(empty_dsn, "SELECT count(*) FROM core.customers") == [(0,)]


async def test_another_encoding_is_refused(empty_dsn: str, postgres_server: SessionServer) -> None:
    name = urlsplit(empty_dsn).path[1:] + "_latin1"
    admin = postgres_server.admin()
    admin.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        for attempt in (migrate.state, migrate.apply):
            with pytest.raises(MigrationError, match=r"LATIN1.*ENCODING 'UTF8'"):
                await attempt(postgres_server.dsn(name))
    finally:
        postgres_server.drop(name)


# --- beside running workers ---


@pytest.mark.slow
async def test_a_migration_that_waits_for_a_lock_lets_others_pass(empty_dsn: str, make_source: MakeSource) -> None:
    """ALTER TABLE behind a long transaction stalls nobody for longer than two seconds, and gets there (B14)."""
    await migrate.apply(empty_dsn, source=make_source(FIRST))
    reader, worker = await asyncpg.connect(empty_dsn), await asyncpg.connect(empty_dsn)
    retried = asyncio.Event()
    longest = 0.0

    def on_step(step: Step) -> None:
        if step.action == "retry":
            retried.set()

    async def work() -> None:
        nonlocal longest
        while True:
            started = time.monotonic()
            await worker.execute("INSERT INTO core.thing SELECT coalesce(max(id), 0) + 1 FROM core.thing")
            longest = max(longest, time.monotonic() - started)
            await asyncio.sleep(0.01)

    busy = asyncio.create_task(work())
    try:
        transaction = reader.transaction()
        await transaction.start()
        await reader.execute("SELECT FROM core.thing")
        run = asyncio.create_task(migrate.apply(empty_dsn, source=make_source(FIRST, SECOND), on_step=on_step))
        async with asyncio.timeout(10):
            await retried.wait()
        await transaction.rollback()
        async with asyncio.timeout(30):
            assert [m.version for m in await run] == [2]
    finally:
        busy.cancel()
        await asyncio.wait([busy])
        await reader.close()
        worker.terminate()
    assert 1.0 < longest < 3.0


@pytest.mark.slow
async def test_without_the_lock_it_gives_up_and_names_the_holder(
    empty_dsn: str, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries are bounded, and the error says which transaction to look at (B14)."""
    monkeypatch.setattr(ddl, "LOCK_TRIES", 2)
    await migrate.apply(empty_dsn, source=make_source(FIRST))
    reader = await asyncpg.connect(empty_dsn, server_settings={"application_name": "long report"})
    try:
        async with reader.transaction():
            await reader.execute("SELECT FROM core.thing")
            with pytest.raises(MigrationError) as refused:
                await migrate.apply(empty_dsn, source=make_source(FIRST, SECOND))
            pid = await reader.fetchval("SELECT pg_backend_pid()")
    finally:
        await reader.close()
    assert f"pid {pid}" in str(refused.value)
    assert "long report" in str(refused.value)
    assert await fetch(empty_dsn, LEDGER) == [(1, "step")]


async def test_settings_of_the_database_do_not_matter(empty_dsn: str, make_source: MakeSource) -> None:
    """Isolation, timeouts and a search path that others may write to (B13, S1)."""
    name = urlsplit(empty_dsn).path[1:]
    await execute(
        empty_dsn,
        f"""CREATE SCHEMA evil;
            CREATE FUNCTION evil.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
            ALTER DATABASE {name} SET search_path = evil, pg_catalog;
            ALTER DATABASE {name} SET default_transaction_isolation = 'serializable';
            ALTER DATABASE {name} SET statement_timeout = '200ms';
            ALTER DATABASE {name} SET lock_timeout = '1ms';""",
    )
    record = """CREATE TABLE core.seen AS SELECT pg_sleep(0.4) IS NULL AS slept, current_setting('search_path') AS path,
                current_setting('transaction_isolation') AS isolation, current_setting('lock_timeout') AS lock;"""
    await migrate.apply(empty_dsn, source=make_source(record))
    found = await fetch(empty_dsn, "SELECT path, isolation, lock FROM core.seen")
    assert found == [("pg_catalog, pg_temp", "read committed", "2s")]


# --- functions, printing, other schemas ---

FUNCTION = "CREATE OR REPLACE FUNCTION core.answer() RETURNS int LANGUAGE sql AS 'SELECT 41';"


async def test_functions_are_replaced_as_a_whole(empty_dsn: str, make_source: MakeSource) -> None:
    """A function has no number; the plan says when the database has another text (OBX-3)."""
    await migrate.apply(empty_dsn, source=make_source(FIRST, functions=FUNCTION))
    newer = make_source(FIRST, functions=FUNCTION.replace("41", "42"))
    found = await migrate.state(empty_dsn, source=newer)
    assert (found.pending, found.functions_changed, found.up_to_date) == ((), True, False)
    assert await migrate.apply(empty_dsn, source=newer) == []
    assert await fetch(empty_dsn, "SELECT core.answer()") == [(42,)]
    assert (await migrate.state(empty_dsn, source=newer)).up_to_date


CATALOG = """
SELECT 'relation', c.relname::text, c.relkind::text, pg_get_userbyid(c.relowner)::text, c.relacl::text,
       c.reloptions::text
FROM pg_class c WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT 'column', c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attacl::text,
       pg_get_expr(d.adbin, d.adrelid)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT 'index', c.relname::text, pg_get_indexdef(c.oid), '', '', ''
FROM pg_class c WHERE c.relnamespace = $1::regnamespace AND c.relkind = 'i'
UNION ALL
SELECT 'constraint', o.conname::text, pg_get_constraintdef(o.oid), '', '', ''
FROM pg_constraint o WHERE o.connamespace = $1::regnamespace
UNION ALL
SELECT 'trigger', t.tgname::text, pg_get_triggerdef(t.oid), '', '', ''
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = $1::regnamespace AND NOT t.tgisinternal
UNION ALL
SELECT 'function', p.oid::regprocedure::text, p.prosrc, pg_get_userbyid(p.proowner)::text, p.proacl::text,
       p.proconfig::text
FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
UNION ALL
SELECT 'schema', '', '', pg_get_userbyid(n.nspowner)::text, n.nspacl::text, ''
FROM pg_namespace n WHERE n.oid = $1::regnamespace
ORDER BY 1, 2, 3, 4, 5
"""


async def catalog(dsn: str, schema: str = "core") -> list[Any]:
    return await fetch(dsn, CATALOG, f'"{schema}"')


@pytest.mark.parametrize("roles", [True, False])
async def test_the_printed_script_makes_what_apply_makes(
    empty_dsn: str, postgres_server: SessionServer, roles: bool
) -> None:
    """Printable for review, Alembic and Django, and known to `migrate status` afterwards (OBX-3)."""
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(migrate.printable(roles=roles).encode())
    assert (await migrate.state(empty_dsn)).up_to_date
    printed = await catalog(empty_dsn)
    other = postgres_server.create(schema=False)
    try:
        await migrate.apply(postgres_server.dsn(other), roles="always" if roles else "never")
        assert await catalog(postgres_server.dsn(other)) == printed
    finally:
        postgres_server.drop(other)


async def test_the_script_since_a_version_brings_a_database_forward(empty_dsn: str, make_source: MakeSource) -> None:
    await migrate.apply(empty_dsn, source=make_source(FIRST))
    both = make_source(FIRST, SECOND)
    script = migrate.printable(since=1, source=both)
    assert FIRST not in script
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(script.encode())
    assert (await migrate.state(empty_dsn, source=both)).up_to_date


@pytest.mark.parametrize("since", [-1, 2])
def test_a_script_since_a_migration_that_is_not_there_is_refused(since: int) -> None:
    """Otherwise it would have functions alone, which another schema may not be made for. (OBX-3)"""
    with pytest.raises(ConfigurationError, match=rf"since is {since}; name a migration of this release: 0 to 1"):
        migrate.printable(since=since)


def test_the_printed_script_has_no_transaction_of_its_own() -> None:
    """Alembic and Django have one already (OBX-3)."""
    lines = {line.strip().upper() for line in migrate.printable().splitlines()}
    assert not lines & {"BEGIN;", "COMMIT;", "START TRANSACTION;", "ROLLBACK;"}


async def test_two_installations_live_in_one_database(dsn: str) -> None:
    """The schema's name is a setting, also when it is a reserved word (OBX-1)."""
    await migrate.apply(dsn, schema="order")
    renamed = [
        tuple(re.sub(r"'order(?!ing|ed)", "'core", str(part).replace('"order"', "core")) for part in row)
        for row in await catalog(dsn, "order")
    ]
    original = [tuple(str(part) for part in row) for row in await catalog(dsn)]
    assert sorted(renamed) == sorted(original)
    publish = "INSERT INTO \"order\".outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')"
    await execute(dsn, publish)
    assert await fetch(dsn, 'SELECT count(*) FROM "order".outbox') == [(1,)]
    assert await fetch(dsn, "SELECT count(*) FROM core.outbox") == [(0,)]
    await migrate.uninstall(dsn, "order")
    assert (await migrate.state(dsn)).up_to_date


# --- asked by every worker at its start ---


async def test_require_compatible_accepts_the_version_of_the_code(conn: asyncpg.Connection) -> None:
    """Also for roles that may do nothing but their work (OBX-3)."""
    for role in ("holdfast_producer", "holdfast_worker", "holdfast_operator"):
        await conn.execute(f"SET ROLE {role}")
        await migrate.require_compatible(conn)
        await conn.execute("RESET ROLE")


async def test_require_compatible_lets_the_ranges_meet(empty_dsn: str, make_source: MakeSource) -> None:
    """One release of distance both ways, whatever the functions' texts; beyond it, both sides and a remedy (OPS-6)."""
    releases = [
        make_source(FIRST, functions=FUNCTION.replace("41", str(number)), contract=(number, max(1, number - 1), oldest))
        for number, oldest in ((1, 1), (2, 1), (3, 3), (4, 3))
    ]
    accepted: dict[int, list[int]] = {}
    connection = await asyncpg.connect(empty_dsn)
    try:
        with pytest.raises(SchemaMismatch, match="not installed") as refused:
            await migrate.require_compatible(connection, "shop", source=releases[0])
        assert refused.value.remedy == "holdfast migrate apply --schema shop"
        for number, schema in enumerate(releases, start=1):
            await migrate.apply(empty_dsn, source=schema)
            accepted[number] = []
            for code, source in enumerate(releases, start=1):
                try:
                    await migrate.require_compatible(connection, source=source)
                    accepted[number].append(code)
                except SchemaMismatch as error:
                    assert f"contract {number} (holdfast 0.{number}.0)" in error.found
                    assert f"contract {code} (holdfast 0.{code}.0)" in error.expected
                    upgrade = release_remedy(f"0.{number - 1}.0")
                    assert error.remedy == ("holdfast migrate apply" if code > number else upgrade)
    finally:
        await connection.close()
    # Code 3 cannot do without the schema 3; code 2 can do without the schema 2, and code 4 without the schema 4.
    assert accepted == {1: [1, 2], 2: [1, 2], 3: [2, 3, 4], 4: [3, 4]}


@pytest.mark.parametrize("loss", ["DROP TABLE core.contract", "DELETE FROM core.contract"])
async def test_a_lost_contract_is_put_back(empty_dsn: str, make_source: MakeSource, loss: str) -> None:
    """Nothing starts without the contract, and the command that the error names records it anew. (OPS-6)"""
    source = make_source(FIRST, contract=(2, 1, 1))
    await migrate.apply(empty_dsn, source=source)
    await execute(empty_dsn, loss)
    connection = await asyncpg.connect(empty_dsn)
    try:
        with pytest.raises(SchemaMismatch, match=r"core, which records no contract.*run holdfast migrate apply$"):
            await migrate.require_compatible(connection, source=source)
        with pytest.raises(SchemaMismatch, match="another migration 0001"):
            await migrate.apply(empty_dsn)
        assert await migrate.apply(empty_dsn, source=source) == []
        await migrate.require_compatible(connection, source=source)
    finally:
        await connection.close()
    assert await fetch(empty_dsn, "SELECT provides, oldest_code FROM core.contract") == [(2, 1)]


async def test_require_compatible_leaves_a_transaction_usable(empty_dsn: str) -> None:
    connection = await asyncpg.connect(empty_dsn)
    try:
        async with connection.transaction():
            with pytest.raises(SchemaMismatch):
                await migrate.require_compatible(connection)
            assert await connection.fetchval("SELECT 1") == 1
    finally:
        await connection.close()


# --- uninstalling ---


async def test_uninstall_removes_the_schema_and_what_stands_outside_it(dsn: str) -> None:
    """Nothing is left, not even default privileges (OBX-7)."""
    publish = (
        "INSERT INTO core.outbox (event_type, source, payload) SELECT 'a.b', 'shop', '{}' FROM generate_series(1, 3)"
    )
    await execute(dsn, publish)
    holdings = await migrate.holdings(dsn)
    assert holdings.events == 3
    assert {"outbox", "migrations"} <= set(holdings.tables)
    await migrate.uninstall(dsn)
    assert await fetch(dsn, "SELECT FROM pg_namespace WHERE nspname = 'core'") == []
    assert await fetch(dsn, "SELECT FROM pg_default_acl") == []
    assert (await migrate.state(dsn)).database_version == 0
    with pytest.raises(MigrationError, match="no Holdfast"):
        await migrate.uninstall(dsn)
