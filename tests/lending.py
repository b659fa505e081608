"""Databases that the tests of a process use one after the other, as users' tests do with `holdfast.testing`.

A new database takes 300 files to make and to remove; a used one is brought back by the kit's reset, which brings back
no more than rows. So what a test has added to the schema public is dropped before the reset, and a database in which
anything else has changed is dropped as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from holdfast.testing.databases import script

KEEPER = "keeper of a lent database"  # the name of the session that brings it back
# Rows that are gone still take their place, which makes the tests after them slower.
MOST_BYTES = 1_000_000

# altered: how many rows the catalogs of this database have, and whether one of them is of a later transaction: an index
# or a grant, a comment, a setting, statistics for the planner, or whatever else the next test could stumble over.
ALTERED = """
CREATE FUNCTION holdfast_testing.altered(p_since xid, OUT total bigint, OUT later boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
AS $altered$
BEGIN
    SELECT (SELECT sum(c.relpages) FROM pg_class c) + count(s.*),
           age(d.xmin) < age(p_since) OR coalesce(bool_or(age(s.xmin) < age(p_since)), false)
    INTO total, later
    FROM pg_database d LEFT JOIN pg_db_role_setting s ON s.setdatabase = d.oid
    WHERE d.datname = current_database() GROUP BY d.xmin;
    {}
END
$altered$
"""
ONE_CATALOG = """
    SELECT total + count(*), later OR coalesce(bool_or(age(c.xmin) < age(p_since)), false) INTO total, later FROM {} c;
"""
# drop_added: drops the tables, views, sequences and functions that were made in the schema public since then.
DROP_ADDED = """
CREATE FUNCTION holdfast_testing.drop_added(p_since xid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $drop_added$
DECLARE
    v_drops text;
BEGIN
    -- Tables first, because they drop the sequences that are theirs.
    SELECT string_agg(format('DROP %s IF EXISTS %s CASCADE', a.kind, a.name), ';' ORDER BY a.kind = 'TABLE' DESC)
    INTO v_drops
    FROM (SELECT k.kind, c.oid::regclass::text AS name
          FROM pg_class c JOIN (VALUES ('r', 'TABLE'), ('p', 'TABLE'), ('v', 'VIEW'), ('m', 'MATERIALIZED VIEW'),
                                       ('S', 'SEQUENCE')) k (relkind, kind) ON k.relkind = c.relkind::text
          WHERE c.relnamespace = to_regnamespace('public') AND age(c.xmin) < age(p_since)
          UNION ALL
          SELECT 'ROUTINE', p.oid::regprocedure::text
          FROM pg_proc p WHERE p.pronamespace = to_regnamespace('public') AND age(p.xmin) < age(p_since)) a;
    IF v_drops IS NOT NULL THEN
        EXECUTE v_drops;
    END IF;
END
$drop_added$
"""
CATALOGS = """
SELECT relname FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'pg_catalog'::regnamespace AND NOT relisshared ORDER BY oid
"""


LARGEST = (
    "SELECT max(pg_relation_size(c.oid)) AS bytes FROM pg_class c WHERE c.relkind IN ('r', 'i') AND c.oid >= 16384"
)


def keep_as_it_is(dsn: str) -> None:
    """Have the copies of a database know how to come back to what is in it now."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA holdfast_testing")
        connection.execute(script("reset"))
        connection.execute(DROP_ADDED)
        catalogs = [sql.SQL(ONE_CATALOG).format(sql.Identifier(name)) for (name,) in connection.execute(CATALOGS)]
        connection.execute(sql.SQL(ALTERED).format(sql.SQL("").join(catalogs)))
        connection.execute("SELECT holdfast_testing.keep()")


def rows_without_lease(fetch: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """Rows that nobody will ever settle, in words."""
    if fetch("SELECT to_regclass('core.outbox') AS outbox")[0]["outbox"] is None:
        return []
    rows = fetch(
        """
        SELECT id, claimed_by, lease_expires_at FROM core.outbox
        WHERE status = 'in_flight' AND (lease_expires_at IS NULL OR lease_expires_at < now()) LIMIT 20
        """
    )
    return [f"row {r['id']} is in flight without a live lease (until {r['lease_expires_at']})" for r in rows]


class LentDatabase:
    """A copy of another database that knows how to come back, and the session that has it do so."""

    def __init__(self, name: str, dsn: str, original: str) -> None:
        self.name = name
        self.dsn = dsn
        self.original = original
        self._keeper: psycopg.Connection[dict[str, Any]] | None = None
        self._since = self._row("SELECT pg_current_xact_id()::xid::text AS since")["since"]
        self._catalogs = self._altered()

    def rows_without_lease(self) -> list[str]:
        return rows_without_lease(self._rows)

    def bring_back(self) -> bool:
        """Bring back what the database was lent with; return whether it can be lent again."""
        self._row("SELECT holdfast_testing.drop_added(%s)", self._since)
        if self._altered() != self._catalogs or self._row(LARGEST)["bytes"] > MOST_BYTES:
            return False
        # What the server counted for the tests before would otherwise be found by the next one.
        return bool(self._row("SELECT holdfast_testing.reset() AS back, pg_stat_reset()")["back"])

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def _altered(self) -> dict[str, Any]:
        return self._row("SELECT total, later FROM holdfast_testing.altered(%s)", self._since)

    def _row(self, query: str, *values: object) -> dict[str, Any]:
        return self._rows(query, *values)[0]

    def _rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        try:
            return self._open().execute(query, values).fetchall()
        except psycopg.OperationalError:
            if self._keeper is not None and not self._keeper.closed:
                raise
            return self._open().execute(query, values).fetchall()  # a test had every session of its database ended

    def _open(self) -> psycopg.Connection[dict[str, Any]]:
        if self._keeper is None or self._keeper.closed:
            # Without counting: what is deleted here is nothing that a test has done.
            options: dict[str, Any] = {"application_name": KEEPER, "options": "-c track_counts=off"}
            self._keeper = psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row, **options)
        return self._keeper
