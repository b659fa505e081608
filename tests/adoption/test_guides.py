"""Services on other libraries, moved to Holdfast by the commands of their guides, with the real libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from holdfast import Publisher
from holdfast.errors import ConfigurationError
from holdfast.importing import Columns, import_celery, import_pending
from servers.valkey import ValkeyServer
from tests.docs.support import ROOT, blocks

pytestmark = [pytest.mark.adoption, pytest.mark.newest_postgres]

GUIDES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
OWN = """
CREATE TABLE mine (id int PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);
INSERT INTO mine SELECT n, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 1200) n;
"""


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_service_is_moved_by_its_guide(page: Path, empty_dsn: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    """PUB-1: what waits in the other library is handled by Holdfast, each once, and nothing waits there any more."""
    for block in blocks("python", pages=[page]):
        assert block.file is not None
        (tmp_path / block.file).write_text(block.text)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST")}
    environment = {
        **bare,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOLDFAST_DSN": empty_dsn,
        "BROKER": f"{valkey.address}/0",
    }
    [commands] = blocks("sh", pages=[page])
    *_, imported, drained = commands.text.strip().splitlines()
    run = subprocess.run(
        ["/bin/sh", "-e"],
        input=f"{commands.text}\n{imported}\n{drained}\n",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "3 events would be published" in run.stdout
    assert "3 events published" in run.stdout
    # The last two commands once more: nothing is left to be imported, nothing is handled twice.
    assert "0 events published" in run.stdout
    assert sorted(line for line in run.stdout.splitlines() if line.startswith("mail for order")) == [
        f"mail for order {number}" for number in (1, 2, 3)
    ]


async def test_an_import_that_cannot_go_on_keeps_what_it_has_done(conn: asyncpg.Connection) -> None:
    """A row is in one of the two tables at any time: batches are whole, and the next import goes on."""
    await conn.execute(OWN)
    await conn.execute("UPDATE mine SET event_type = 'not an event' WHERE id = 700")
    with pytest.raises(ConfigurationError, match="row 700 cannot be an event"):
        await import_pending(conn, Publisher("shop"), "table", table="public.mine")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 500
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE published_at IS NOT NULL") == 500
    found = await import_pending(
        conn, Publisher("shop"), "table", table="public.mine", renamed={"not an event": "order.placed"}
    )
    assert found.events == {"order.placed": 700}
    assert await conn.fetchval("SELECT count(DISTINCT (payload->>'n')::int) FROM core.outbox") == 1200


async def test_a_row_that_is_too_large_is_named(conn: asyncpg.Connection) -> None:
    await conn.execute(OWN)
    await conn.execute("UPDATE mine SET payload = jsonb_build_object('n', repeat('x', 400000)) WHERE id = 7")
    with pytest.raises(ConfigurationError, match="row 7 cannot be an event"):
        await import_pending(conn, Publisher("shop"), "table", table="public.mine")


async def test_a_row_without_a_type_is_named(conn: asyncpg.Connection) -> None:
    """It is no event of the type None, which nobody would handle."""
    await conn.execute(OWN)
    await conn.execute("UPDATE mine SET event_type = NULL WHERE id = 1")
    with pytest.raises(ConfigurationError, match="row 1 cannot be an event: its type is None"):
        await import_pending(conn, Publisher("shop"), "table", table="public.mine")


async def test_triggers_of_a_schema_whose_name_is_quoted_find_their_functions(conn: asyncpg.Connection) -> None:
    """procrastinate's triggers name its functions without their schema; JSON in a text column is JSON."""
    await conn.execute("""
        CREATE SCHEMA "Shop Two";
        CREATE TABLE "Shop Two".mine (id int PRIMARY KEY, event_type text, payload text, published_at timestamptz);
        INSERT INTO "Shop Two".mine VALUES (1, 'order.placed', '{"n": 1}');
        CREATE FUNCTION "Shop Two".named() RETURNS int LANGUAGE sql AS 'SELECT 1';
        CREATE FUNCTION "Shop Two".touched() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM named(); RETURN NEW; END';
        CREATE TRIGGER touched BEFORE UPDATE ON "Shop Two".mine FOR EACH ROW EXECUTE FUNCTION "Shop Two".touched();
    """)
    await import_pending(conn, Publisher("shop"), "table", table='"Shop Two".mine')
    assert await conn.fetchval("SELECT payload->>'n' FROM core.outbox") == "1"


async def test_a_dry_run_changes_nothing(conn: asyncpg.Connection) -> None:
    await conn.execute(OWN)
    found = await import_pending(conn, Publisher("shop"), "table", table="public.mine", dry_run=True)
    assert found.total == 1200
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE published_at IS NULL") == 1200


@pytest.mark.parametrize(
    ("library", "options", "problem"),
    [
        ("table", {"table": "public.nothing"}, "public.nothing does not exist"),
        ("pgqueuer", {"table": "public.mine"}, "is not such a table"),
        ("table", {"table": "public.mine", "columns": Columns(done="sent_at")}, "is not such a table"),
        ("table", {"table": "public.mine", "columns": Columns(type="kind")}, "has no column 'kind'"),
        ("table", {"table": "public.mine", "columns": Columns(id="event_type")}, "does not tell its rows apart"),
        (
            "table",
            {"table": "public.mine", "columns": Columns(done="payload")},
            "is not such a table",
        ),
        ("pgqueuer", {"columns": Columns(id="number")}, "--id-column is for a table of your own"),
        ("sidekiq", {}, "choose one of"),
    ],
)
async def test_what_is_wrong_is_named(
    conn: asyncpg.Connection, library: str, options: dict[str, object], problem: str
) -> None:
    await conn.execute(OWN)
    with pytest.raises(ConfigurationError, match=problem):
        await import_pending(conn, Publisher("shop"), library, **options)  # type: ignore[arg-type]
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_a_name_of_a_table_is_never_more_than_a_name(conn: asyncpg.Connection) -> None:
    """SEC-1: names are quoted by the server."""
    await conn.execute('CREATE TABLE "we; DROP" ("a"" id" int PRIMARY KEY, event_type text, payload jsonb, done time)')
    await conn.execute("""INSERT INTO "we; DROP" VALUES (1, 'order.placed', '{}')""")
    await conn.execute('ALTER TABLE "we; DROP" ALTER done TYPE timestamptz USING NULL')
    columns = Columns(id='a" id', done="done")
    found = await import_pending(conn, Publisher("shop"), "table", table='public."we; DROP"', columns=columns)
    assert found.total == 1


async def test_a_task_that_was_published_when_an_import_was_killed_is_handled_once(
    conn: asyncpg.Connection, valkey: ValkeyServer
) -> None:
    """PUB-5: the task's id is the idempotency key, and what was moved aside is found by the next import."""
    task = json.dumps(
        {
            "headers": {"id": "7d0f", "task": "mail.requested", "eta": None},
            "content-type": "application/json",
            "body": json.dumps([[], {"order_id": 1}, {}]),
            "properties": {},
        }
    )
    async with valkey.client() as redis:
        await redis.lpush("killed.holdfast", task)
        await redis.lpush("killed\x06\x169", task.replace("7d0f", "7d10"))  # one of low priority, as kombu keeps it
        found = await import_celery(conn, Publisher("shop"), valkey.address, queue="killed")
        assert found.total == 2
        assert await redis.llen("killed.holdfast") == 0
    keys = {row[0] for row in await conn.fetch("SELECT idempotency_key FROM core.outbox")}
    assert keys == {"celery:7d0f", "celery:7d10"}


async def test_a_redis_that_does_not_answer_is_named(conn: asyncpg.Connection) -> None:
    with pytest.raises(ConfigurationError, match="--broker does not answer"):
        await import_celery(conn, Publisher("shop"), "redis://127.0.0.1:1/0")
