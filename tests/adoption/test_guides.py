"""Services on other libraries, moved to Holdfast by the commands of their guides, with the real libraries."""

from __future__ import annotations

import asyncio
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
from tests.adoption.bare import Installed
from tests.docs.support import ROOT, blocks

pytestmark = pytest.mark.timeout(300)

GUIDES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
OWN = """
CREATE TABLE mine (id int PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);
INSERT INTO mine SELECT n, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 1200) n;
"""


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.nightly("service that is moved")
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_service_is_moved_by_its_guide(
    page: Path, empty_dsn: str, valkey: ValkeyServer, tmp_path: Path, installed: Installed
) -> None:
    """What waits in the other library is handled by Holdfast, each once, and nothing waits there any more (PUB-1)."""
    for block in blocks("python", pages=[page]):
        assert block.file is not None
        (tmp_path / block.file).write_text(block.text)
    environment = {**installed(page), "HOLDFAST_DSN": empty_dsn, "BROKER": f"{valkey.address}/0"}
    [commands] = blocks("sh", pages=[page])
    *_, imported, drained = commands.text.strip().splitlines()
    run = subprocess.run(
        ["/bin/sh", "-e"],
        input=f"{commands.text}\n{imported}\n{drained}\n",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
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
        await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 500
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE published_at IS NOT NULL") == 500
    found = await import_pending(
        conn,
        Publisher("shop"),
        "table",
        actor="ada",
        reason="moving",
        table="public.mine",
        renamed={"not an event": "order.placed"},
    )
    assert found.events == {"order.placed": 700}
    lines = await conn.fetch("SELECT actor, action, reason, arguments, counts FROM core.audit ORDER BY id")
    assert {(line["actor"], line["action"]) for line in lines} == {("ada", "import")}
    assert [line["reason"] for line in lines] == [None, "moving", "moving"]
    assert [json.loads(line["counts"]) for line in lines] == [{"published": n} for n in (500, 500, 200)]
    assert json.loads(lines[0]["arguments"]) == {"library": "table", "place": "public.mine", "source": "shop"}
    assert await conn.fetchval("SELECT count(DISTINCT (payload->>'n')::int) FROM core.outbox") == 1200


async def test_a_row_that_is_too_large_is_named(conn: asyncpg.Connection) -> None:
    await conn.execute(OWN)
    await conn.execute("UPDATE mine SET payload = jsonb_build_object('n', repeat('x', 400000)) WHERE id = 7")
    with pytest.raises(ConfigurationError, match="row 7 cannot be an event"):
        await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine")


@pytest.mark.parametrize(
    ("id_", "payload", "named", "problem"),
    [
        pytest.param("1", '{"a":' * 5_000 + "1" + "}" * 5_000, "row 1", "it is nested too deeply", id="nested"),
        pytest.param("1", '{"a":' + "9" * 5_000 + "}", "row 1", "an integer in it has more digits", id="digits"),
        pytest.param("1" * 5_000, "{}", f"row {'1' * 95}…", "idempotency_key", id="name"),
    ],
)
@pytest.mark.parametrize("kind", ["text", "jsonb"])
async def test_a_row_that_cannot_be_read_is_named(
    conn: asyncpg.Connection, id_: str, payload: str, named: str, problem: str, kind: str
) -> None:
    """Nothing is taken, nothing becomes the text of its JSON, and the error is short (S8)."""
    await conn.execute(OWN.replace("id int", "id text").replace("jsonb,", f"{kind},"))
    await conn.execute(f"UPDATE mine SET id = $1, payload = $2::{kind} WHERE id = '1'", id_, payload)
    with pytest.raises(ConfigurationError, match=f"^{named} cannot be an event: .*{problem}") as refused:
        await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine")
    assert len(str(refused.value)) < 500
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE published_at IS NULL") == 1200
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_a_row_without_a_type_is_named(conn: asyncpg.Connection) -> None:
    """It is no event of the type None, which nobody would handle."""
    await conn.execute(OWN)
    await conn.execute("UPDATE mine SET event_type = NULL WHERE id = 1")
    with pytest.raises(ConfigurationError, match="row 1 cannot be an event: its type is None"):
        await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine")


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
    await import_pending(conn, Publisher("shop"), "table", actor="ada", table='"Shop Two".mine')
    assert await conn.fetchval("SELECT payload->>'n' FROM core.outbox") == "1"


async def test_a_dry_run_changes_nothing(conn: asyncpg.Connection) -> None:
    await conn.execute(OWN)
    found = await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine", dry_run=True)
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0
    assert found.total == 1200
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE published_at IS NULL") == 1200


@pytest.mark.parametrize(
    ("library", "options", "problem"),
    [
        ("table", {"table": "public.nothing"}, "public.nothing does not exist"),
        ("pgqueuer", {"table": "public.mine"}, "is not such a table"),
        *(
            (
                "table",
                {"table": "public.mine", "columns": Columns(**{use: "kynd"})},
                f"^--{use}-column kynd is not a column of public.mine; name one of id, event_type, payload",
            )
            for use in ("id", "type", "payload", "done")
        ),
        ("table", {"table": "public.mine", "columns": Columns(id="event_type")}, "does not tell its rows apart"),
        (
            "table",
            {"table": "public.mine", "columns": Columns(done="payload")},
            "^--done-column payload of public.mine is of type jsonb; name a time",
        ),
        (
            "table",
            {"table": "public.mine", "columns": Columns(done="event_type")},
            "^--done-column event_type of public.mine is of type text; .*if it is a status, add one$",
        ),
        ("pgqueuer", {"columns": Columns(id="number")}, "--id-column is for a table of your own"),
        ("sidekiq", {}, "choose one of"),
    ],
)
async def test_a_wrong_option_is_refused_with_its_name(
    conn: asyncpg.Connection, library: str, options: dict[str, object], problem: str
) -> None:
    await conn.execute(OWN)
    with pytest.raises(ConfigurationError, match=problem):
        await import_pending(conn, Publisher("shop"), library, actor="ada", **options)  # type: ignore[arg-type]
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_a_boolean_says_which_rows_wait(conn: asyncpg.Connection) -> None:
    """Rows that are not true wait, and are true when they are published (PUB-1)."""
    await conn.execute(OWN.replace("published_at timestamptz", "done boolean DEFAULT false"))
    await conn.execute("UPDATE mine SET done = (CASE id WHEN 1 THEN true END) WHERE id <= 2")
    for waiting in (1199, 0):
        found = await import_pending(
            conn, Publisher("shop"), "table", actor="ada", table="public.mine", columns=Columns(done="done")
        )
        assert found.total == waiting
    assert await conn.fetchval("SELECT count(*) FROM mine WHERE done") == 1200


@pytest.mark.parametrize("done", ["timestamptz", "boolean"])
@pytest.mark.parametrize("wrong", ["type", "payload"])
async def test_the_error_says_how_a_row_is_put_aside(conn: asyncpg.Connection, done: str, wrong: str) -> None:
    await conn.execute(OWN.replace("id int", "id text").replace("published_at timestamptz", f'"Done" {done}'))
    await conn.execute("UPDATE mine SET id = 'it''s' WHERE id = '7'")
    change = (
        "event_type = 'not an event'" if wrong == "type" else "payload = jsonb_build_object('n', repeat('x', 400000))"
    )
    await conn.execute(f"UPDATE mine SET {change} WHERE id = 'it''s'")
    columns = Columns(done="Done")
    with pytest.raises(ConfigurationError, match=r"^row it's cannot be an event") as refused:
        await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine", columns=columns)
    assert ("--rename" in refused.value.remedy) is (wrong == "type")
    await conn.execute(refused.value.remedy.partition("put the row aside: ")[2])
    await import_pending(conn, Publisher("shop"), "table", actor="ada", table="public.mine", columns=columns)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1199


async def test_a_name_of_a_table_is_never_more_than_a_name(conn: asyncpg.Connection) -> None:
    """Names are quoted by the server (SEC-1)."""
    await conn.execute('CREATE TABLE "we; DROP" ("a"" id" int PRIMARY KEY, event_type text, payload jsonb, done time)')
    await conn.execute("""INSERT INTO "we; DROP" VALUES (1, 'order.placed', '{}')""")
    await conn.execute('ALTER TABLE "we; DROP" ALTER done TYPE timestamptz USING NULL')
    columns = Columns(id='a" id', done="done")
    found = await import_pending(
        conn, Publisher("shop"), "table", actor="ada", table='public."we; DROP"', columns=columns
    )
    assert found.total == 1


async def test_a_task_that_was_published_when_an_import_was_killed_is_handled_once(
    conn: asyncpg.Connection, valkey: ValkeyServer
) -> None:
    """The task's id is the idempotency key, and what was moved aside is found by the next import (PUB-5)."""
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
        found = await import_celery(conn, Publisher("shop"), valkey.address, actor="ada", queue="killed")
        assert found.total == 2
        assert await redis.llen("killed.holdfast") == 0
    keys = {row[0] for row in await conn.fetch("SELECT idempotency_key FROM core.outbox")}
    assert keys == {"celery:7d0f", "celery:7d10"}


def task_of(**parts: object) -> str:
    headers = {"id": "7d11", "task": "mail.requested"}
    return json.dumps({"headers": headers, "content-type": "application/json", "body": "[[], {}]"} | parts)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        pytest.param("[" * 100_000, r"the task that begins with b'\[{60}'", id="nested"),
        pytest.param(task_of(body="[[], {" + '"a":[' * 5_000), "task 7d11", id="nested body"),
        pytest.param(task_of(properties=5), "task 7d11", id="properties"),
        pytest.param(task_of(body='[[], {"a":' + "9" * 5_000 + "}]"), "task 7d11", id="digits"),
        pytest.param(task_of(body=json.dumps([[], {"a": "x" * 400_000}])), "task 7d11", id="large"),
        pytest.param(task_of(headers={"id": "7" * 5_000, "task": "a.b"}), f"task {'7' * 94}…", id="name"),
    ],
)
async def test_a_task_that_cannot_be_read_is_named(
    conn: asyncpg.Connection, valkey: ValkeyServer, message: str, named: str
) -> None:
    """It stays in its queue with the others, where Celery's workers find them (S8)."""
    async with valkey.client() as redis:
        await redis.delete("hostile")
        await redis.lpush("hostile", task_of(), message)
        with pytest.raises(ConfigurationError, match=f"^{named} cannot be an event: ") as refused:
            await import_celery(conn, Publisher("shop"), valkey.address, actor="ada", queue="hostile")
        assert len(str(refused.value)) < 500
        assert await redis.llen("hostile") == 2
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


@pytest.mark.parametrize("mode", ["--yes", "--dry-run"])
async def test_a_name_that_is_mistyped_is_told_before_anything_is_published(
    conn: asyncpg.Connection, dsn: str, mode: str
) -> None:
    await conn.execute(OWN)
    command = [sys.executable, "-m", "holdfast", "import", "table", "--table", "public.mine", mode]
    run = await asyncio.to_thread(
        subprocess.run,
        [*command, "--rename", "order.plcaed=order.made"],
        env={**os.environ, "HOLDFAST_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2, run.stdout
    assert "--rename order.plcaed=order.made: nothing that waits has this name" in run.stderr
    assert "a name that waits: order.placed" in run.stderr
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_a_redis_that_does_not_answer_is_named(conn: asyncpg.Connection) -> None:
    with pytest.raises(ConfigurationError, match="--broker does not answer"):
        await import_celery(conn, Publisher("shop"), "redis://127.0.0.1:1/0", actor="ada")
