"""What doctor takes for the right schema is what the migrations make of an empty database (OBX-3).

`src/holdfast/postgres/doctor/schema.json` is written here, and nowhere by hand. After a change of the SQL:

    HOLDFAST_UPDATE_GOLDEN=1 ./dev test -- tests/operator/test_doctor_expected.py
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from importlib.resources import files
from pathlib import Path

import asyncpg
import pytest

from holdfast.embedded.account import server_account
from holdfast.embedded.binaries import reachable_copy
from holdfast.postgres import doctor, migrate
from holdfast.postgres.doctor import expected
from holdfast.postgres.doctor.description import KINDS, Description, describe
from holdfast.postgres.doctor.expected import Expected, shipped, stamp
from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.release import load
from tests.servers import SUPPORTED_MAJORS, SessionServer

pytestmark = pytest.mark.both_postgres

FILE = Path(str(files("holdfast.postgres.doctor").joinpath("schema.json")))
UPDATE = "HOLDFAST_UPDATE_GOLDEN"
HOW = f"If the SQL was meant to change: {UPDATE}=1 ./dev test -- tests/operator/{Path(__file__).name}"


def written(release: str, objects: Description) -> str:
    """One object to a line, so that a change can be reviewed."""
    kinds = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(attributes)}" for name, attributes in objects[kind].items())
        + "\n}"
        for kind in KINDS
    ]
    return f'{{"release": "{release}",\n"objects": {{\n' + ",\n".join(kinds) + "\n}}\n"


async def test_the_description_is_that_of_a_fresh_database(
    conn: asyncpg.Connection, postgres_server: SessionServer
) -> None:
    """Every kind, every object, every attribute, on each supported Postgres (OBX-3)."""
    live = await describe(conn, Queries())
    if os.environ.get(UPDATE) and postgres_server.major == SUPPORTED_MAJORS[0]:
        FILE.write_text(written(stamp(load()), live.objects), encoding="utf-8")
        shipped.cache_clear()
    assert shipped()["release"] == stamp(load()), HOW
    wanted = Expected("core")
    assert {kind: list(objects) for kind, objects in live.objects.items()} == {
        kind: list(objects) for kind, objects in wanted.objects.items()
    }, HOW
    for kind in KINDS:
        for name, attributes in live.objects[kind].items():
            other = {
                key for key in attributes if not wanted.same(kind, wanted.objects[kind][name][key], attributes[key])
            }
            assert other == set(), f"{kind} {name}: {other}. {HOW}"


def test_the_description_knows_what_matters() -> None:
    """Were the statements to find nothing, the comparison would be empty (OBX-3)."""
    objects = Expected("core").objects
    assert {"outbox", "event_handled", "subscriptions", "migrations", "workers"} <= set(objects["table"])
    assert "fillfactor=50" in objects["table"]["outbox"]["options"]
    assert objects["column"]["outbox.route"]["generated"].endswith("STORED")
    assert objects["column"]["outbox.seq"]["identity"] == "ALWAYS"
    assert objects["column"]["outbox.id"]["default"] == "core.uuid7()"
    assert "'paused'" in objects["constraint"]["plans.plans_state"]["definition"]
    assert "WHERE ((settled_at IS NULL)" in objects["index"]["outbox_lane"]["definition"]
    assert "DEFERRABLE" in objects["trigger"]["outbox.outbox_bell"]["definition"]
    assert objects["view"]["my_outbox"]["options"] == ["security_barrier=true"]
    assert objects["function"]["subscriptions_read()"]["security"] == "DEFINER"
    assert objects["function"]["subscriptions_read()"]["settings"] == ["search_path=pg_catalog, pg_temp"]
    assert len(objects["grant"]["INSERT on columns of table outbox to holdfast_producer"]["columns"]) > 10
    assert objects["role"]["holdfast_owner"] == {"name": "holdfast_owner", "attributes": [], "member_of": []}
    assert all(not default["grants"] for default in objects["default"].values())


def test_the_text_of_every_function_is_in_the_release() -> None:
    """Or it could not be rendered for another schema, and would never match there (OBX-1)."""
    bodies = expected._bodies(load(), "core")
    functions = Expected("core").objects["function"]
    assert [name for name, function in functions.items() if function["body"] not in bodies] == []


def test_every_function_of_a_migration_can_be_made_again() -> None:
    """The remedy for a changed function is its own text, unless `migrate apply` replaces it anyway (OBX-3)."""
    here = Expected("acme")
    names = {name.partition("(")[0] for name in here.objects["function"]}
    made = {name for name in names if not here.is_replaced(name)}
    assert {"uuid7", "current_channel", "audit_is_kept"} <= made < names
    for name in made:
        assert here.function_text(name).startswith(f'CREATE OR REPLACE FUNCTION "acme".{name}(')


@pytest.mark.parametrize("schema", ["hf_other", "user", "new", "outbox"])
async def test_another_name_of_the_schema_changes_nothing(empty_dsn: str, schema: str) -> None:
    """Also one that is a reserved word, or the name of something else (OBX-1)."""
    await migrate.apply(empty_dsn, schema=schema)
    connection = await asyncpg.connect(empty_dsn)
    try:
        assert (await doctor.examine(connection, schema)).findings == ()
        await connection.execute(f'ALTER TABLE "{schema}".plans DROP CONSTRAINT plans_state')
        await connection.execute(f'ALTER FUNCTION "{schema}".subscriptions_read() SECURITY INVOKER')
        report = await doctor.examine(connection, schema, only="drift")
        found = {finding.code: finding for finding in report.findings}
        assert set(found) == {"constraint-missing", "function-security"}
        assert found["constraint-missing"].object == f"{schema}.plans.plans_state"
        assert found["function-security"].remedy == f"holdfast migrate apply --schema {schema}"
        for statement in found["constraint-missing"].remedy.splitlines():
            await connection.execute(statement)
        await migrate.apply(empty_dsn, schema=schema)
        assert (await doctor.examine(connection, schema)).findings == ()
    finally:
        await connection.close()


async def test_settings_of_the_session_change_nothing(dsn: str) -> None:
    """Definitions are printed in one style, whatever the login or the database prefers (C2)."""
    odd = {"TimeZone": "Asia/Kathmandu", "DateStyle": "German, DMY", "IntervalStyle": "iso_8601", "search_path": "core"}
    connection = await asyncpg.connect(dsn, server_settings={**odd, "quote_all_identifiers": "on"})
    try:
        assert (await doctor.examine(connection, only="drift")).findings == ()
    finally:
        await connection.close()


async def test_what_was_restored_from_a_backup_is_the_same(
    dsn: str, empty_dsn: str, postgres_server: SessionServer
) -> None:
    """Postgres prints some definitions otherwise once they were made from what it printed (OBX-3, OPS-4)."""
    account = server_account()
    binaries = reachable_copy(postgres_server.binaries, account)
    environment = {**os.environ, "PGOPTIONS": "-c client_min_messages=warning"}
    dump = subprocess.run([binaries.program("pg_dump"), dsn], capture_output=True, check=True, env=environment)
    restore = [binaries.program("psql"), "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", empty_dsn]
    subprocess.run(restore, input=dump.stdout, capture_output=True, check=True, env=environment)
    connection = await asyncpg.connect(empty_dsn)
    try:
        actor = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'audit_actor'"
        restored = await connection.fetchval(actor)
        assert restored != shipped()["objects"]["constraint"]["audit.audit_actor"]["definition"], (
            "or this shows nothing"
        )
        assert (await doctor.examine(connection)).findings == ()
    finally:
        await connection.close()


def test_the_description_is_part_of_the_package() -> None:
    """An installed command finds it beside the code (OBX-3)."""
    assert FILE.parent == Path(importlib.import_module("holdfast.postgres.doctor").__file__ or "").parent
    assert shipped()["objects"]
