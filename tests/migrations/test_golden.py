"""The schema as a whole, compared with a text that people can review (OBX-3).

A difference is either a mistake or a change that was meant. If it was meant, write the text anew and commit it
together with the migration:

    HOLDFAST_UPDATE_GOLDEN=1 ./dev test -- tests/migrations/test_golden.py
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.postgres import migrate
from tests.servers import SUPPORTED_MAJORS, SessionServer

pytestmark = pytest.mark.both_postgres

GOLDEN = Path(__file__).parent / "golden" / "schema.txt"
UPDATE = "HOLDFAST_UPDATE_GOLDEN"
ALEMBIC = Path(__file__).parents[2] / "docs" / "alembic.md"

RELATIONS = """
SELECT c.oid, c.relname::text AS name, c.relkind::text AS kind, c.relowner::regrole::text AS owner,
       coalesce(array_to_string(ARRAY(SELECT unnest(c.reloptions) ORDER BY 1), ', '), '') AS options,
       CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid, true) END AS definition,
       (SELECT format('%s by %s%s', s.seqstart, s.seqincrement, CASE WHEN s.seqcycle THEN ', cycling' ELSE '' END)
        FROM pg_sequence s WHERE s.seqrelid = c.oid) AS counts
FROM pg_class c WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S') ORDER BY 2
"""
COLUMNS = """
SELECT a.attname::text AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS required,
       a.attidentity::text AS identity, a.attgenerated::text AS generated, pg_get_expr(d.adbin, d.adrelid) AS value
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
# Postgres 18 lists NOT NULL among the constraints; it stands with the columns already.
CONSTRAINTS = """
SELECT conname::text AS name, pg_get_constraintdef(oid) AS definition FROM pg_constraint
WHERE conrelid = $1 AND contype NOT IN ('n', 't') ORDER BY 1
"""
INDEXES = """
SELECT i.indexrelid::regclass::text AS name, pg_get_indexdef(i.indexrelid) AS definition, i.indisvalid AS valid
FROM pg_index i WHERE i.indrelid = $1 ORDER BY 1
"""
TRIGGERS = """
SELECT tgname::text AS name, pg_get_triggerdef(oid) AS definition, tgenabled::text AS enabled FROM pg_trigger
WHERE tgrelid = $1 AND NOT tgisinternal ORDER BY 1
"""
FUNCTIONS = """
SELECT p.proname::text AS name, pg_get_function_arguments(p.oid) AS arguments, pg_get_function_result(p.oid) AS result,
       l.lanname::text AS language, p.proowner::regrole::text AS owner,
       CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END AS volatility,
       CASE WHEN p.prosecdef THEN 'security definer' ELSE 'security invoker' END AS security,
       CASE p.proparallel WHEN 's' THEN 'parallel safe' WHEN 'r' THEN 'parallel restricted' ELSE 'parallel unsafe' END
           AS parallel,
       coalesce(array_to_string(ARRAY(SELECT unnest(p.proconfig) ORDER BY 1), ', '), '') AS settings
FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang WHERE p.pronamespace = $1::regnamespace ORDER BY 1, 2
"""
KINDS = {"r": "table", "p": "partitioned table", "v": "view", "m": "materialized view", "S": "sequence"}


async def describe(connection: asyncpg.Connection, schema: str = "core") -> str:
    """Columns, types, defaults, checks, indexes, triggers, views and functions, one to a line."""
    # With an empty search path every name is printed with its schema.
    await connection.execute("SELECT set_config('search_path', '', false)")
    lines = [f"schema {schema}, owned by {await connection.fetchval(SCHEMA_OWNER, schema)}"]
    for relation in await connection.fetch(RELATIONS, schema):
        lines += ["", *_relation(relation)]
        if relation["kind"] == "S":
            continue
        lines += [f"  column {_column(row)}" for row in await connection.fetch(COLUMNS, relation["oid"])]
        for title, sql in (("constraint", CONSTRAINTS), ("index", INDEXES), ("trigger", TRIGGERS)):
            lines += [f"  {title} {_named(row)}" for row in await connection.fetch(sql, relation["oid"])]
    for function in await connection.fetch(FUNCTIONS, schema):
        lines += ["", *_function(function)]
    return "\n".join(lines) + "\n"


SCHEMA_OWNER = "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = $1"


def _relation(row: Any) -> Iterable[str]:
    yield f"{KINDS[row['kind']]} {row['name']}, owned by {row['owner']}"
    if row["options"]:
        yield f"  with {row['options']}"
    if row["counts"]:
        yield f"  from {row['counts']}"
    if row["definition"]:
        # Before Postgres 16 a column of the only table in FROM was printed with the table's name.
        definition = re.sub(
            r"(?<![\w.])(?:o|outbox|cancel_requests|subscriptions_version)\.(?=\w)", "", row["definition"]
        )
        yield from (f"  | {line.rstrip()}" for line in definition.splitlines())


def _column(row: Any) -> str:
    words = [row["name"], row["type"]]
    if row["required"]:
        words.append("not null")
    if row["identity"]:
        words.append("generated always as identity" if row["identity"] == "a" else "generated by default as identity")
    if row["generated"]:
        words.append(f"generated always as {row['value']} {'stored' if row['generated'] == 's' else 'virtual'}")
    elif row["value"] is not None:
        words.append(f"default {row['value']}")
    return " ".join(words)


def _named(row: Any) -> str:
    flaw = "" if row.get("valid", True) else " INVALID"
    flaw += "" if row.get("enabled", "O") == "O" else f" enabled={row['enabled']}"
    return f"{row['name']}: {' '.join(row['definition'].split())}{flaw}"


def _function(row: Any) -> Iterable[str]:
    yield f"function {row['name']}({row['arguments']})"
    yield f"  returns {row['result']}"
    words = ("language", "volatility", "security", "parallel")
    yield f"  {', '.join(row[word] for word in words)}, owned by {row['owner']}"
    yield f"  set {row['settings']}"


@pytest.fixture
async def described(conn: asyncpg.Connection) -> str:
    return await describe(conn)


async def test_the_schema_is_the_golden_one(described: str, postgres_server: SessionServer) -> None:
    """The same on every server; a difference has to be looked at, and is written down on purpose only (OBX-3)."""
    if os.environ.get(UPDATE) and postgres_server.major == SUPPORTED_MAJORS[0]:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(described, encoding="utf-8")
    golden = GOLDEN.read_text(encoding="utf-8") if GOLDEN.exists() else ""
    difference = difflib.unified_diff(
        golden.splitlines(), described.splitlines(), GOLDEN.name, f"Postgres {postgres_server.major}", lineterm="", n=1
    )
    if found := "\n".join(difference):
        pytest.fail(f"{found}\n\nIf this was meant: {UPDATE}=1 ./dev test -- tests/migrations/{Path(__file__).name}")


async def test_another_schema_is_the_golden_one_under_its_name(empty_dsn: str) -> None:
    """Only the name differs (OBX-1)."""
    await migrate.apply(empty_dsn, schema="hf_other")
    connection = await asyncpg.connect(empty_dsn)
    try:
        described = await describe(connection, "hf_other")
    finally:
        await connection.close()
    assert "core." not in described
    expected = GOLDEN.read_text(encoding="utf-8")
    assert described.replace("hf_other", "core").splitlines() == expected.splitlines()


def test_the_golden_text_knows_what_matters() -> None:
    """Were the queries above to find nothing, the comparison would be empty (OBX-3)."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    for start in (
        "table outbox, owned by holdfast_owner",
        "  with autovacuum_",
        "  column idempotency_key text not null",
        "  constraint plans_state: CHECK ((state = ANY",
        "  index core.outbox_lane: CREATE INDEX outbox_lane ON core.outbox USING btree (channel, generation, route,",
        "  trigger outbox_bell: CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox DEFERRABLE INITIALLY",
        "view failed, owned by holdfast_owner",
        "function outbox_replay(event_id uuid, p_new_generation bigint, p_replayed_by text)",
        "  plpgsql, volatile, security definer, parallel unsafe, owned by holdfast_owner",
        "  set search_path=pg_catalog, pg_temp",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_the_page_of_alembic_names_the_last_migration() -> None:
    """The numbers of its example are accepted as they stand there (ENV-3)."""
    text, last = ALEMBIC.read_text(), migrate.installed_version()
    named = r"(?<=migrate_holdfast\(to=)\d+|(?<=migrate_holdfast\(since=)\d+"
    if os.environ.get(UPDATE):
        ALEMBIC.write_text(re.sub(named, str(last), text))
        return
    assert re.findall(named, text) == [str(last)] * 2, f"{UPDATE}=1 writes the number anew"
