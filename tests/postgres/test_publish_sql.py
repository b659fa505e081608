"""Writers in other languages: one INSERT that names event_type, source and payload (PUB-1)."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast.ids import uuid7_time
from tests.outbox import CHANNEL, EVENT, Lane, Outbox
from tests.servers import SessionServer, run_coroutine, used

pytestmark = pytest.mark.both_postgres

INSERT = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{\"n\": 1}')"


def assert_filled(row: asyncpg.Record, *, generation: int = 0, channel: str = CHANNEL) -> None:
    """What the database fills in."""
    assert row["id"].version == 7
    assert abs(uuid7_time(row["id"]) - row["created_at"]) < timedelta(seconds=30)
    assert row["idempotency_key"] == str(row["id"])
    assert row["occurred_at"] == row["created_at"] == row["available_at"]
    assert (row["event_version"], row["priority"], row["content_class"]) == (1, 1, "operations")
    assert (row["generation"], row["channel"]) == (generation, channel)
    assert (row["status"], row["attempts"], row["failure_history"]) == ("pending", 0, [])
    unset = ("target", "domain_id", "headers", "trace_context", "handler_name", "origin_id", "expires_at", "settled_at")
    assert {row[name] for name in unset} == {None}


async def test_three_columns_are_enough(outbox: Outbox) -> None:
    """Id, times, key, generation and channel are the database's business; a worker claims the row (PUB-1)."""
    await outbox.connection.execute(INSERT)
    [row] = await outbox.connection.fetch("SELECT * FROM core.outbox")
    assert_filled(row)
    assert row["payload"] == {"n": 1}
    [claimed] = await outbox.claim()
    assert claimed["id"] == row["id"]


async def test_a_deployment_stamps_foreign_writers_too(outbox: Outbox) -> None:
    """The current generation of core.deployments and its channel (PUB-1, GEN-1)."""
    await outbox.connection.execute("INSERT INTO core.deployments (generation, label) VALUES (4, 'blue')")
    await outbox.connection.execute(INSERT)
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (5)")
    await outbox.connection.execute(INSERT)
    blue, green = await outbox.connection.fetch("SELECT * FROM core.outbox ORDER BY seq")
    assert_filled(blue, generation=4, channel="outbox_gen_4")
    assert_filled(green, generation=5, channel="outbox_gen_5")
    assert [row["id"] for row in await outbox.claim(channel="outbox_gen_4", generation=4)] == [blue["id"]]


async def test_copy_fills_in_the_same(outbox: Outbox) -> None:
    """Thousands at once, each with an id and a key of its own (PUB-1)."""
    lines = "".join(f'order.placed\tshop\t{{"n": {n}}}\n' for n in range(3000))
    await outbox.connection.copy_to_table(
        "outbox", schema_name="core", columns=["event_type", "source", "payload"], source=BytesIO(lines.encode())
    )
    rows = await outbox.connection.fetch("SELECT * FROM core.outbox ORDER BY seq")
    assert [row["payload"]["n"] for row in rows] == list(range(3000))
    assert len({row["idempotency_key"] for row in rows}) == 3000
    for row in rows[::100]:
        assert row["idempotency_key"] == str(row["id"])
    assert len(await outbox.claim(Lane(limit=5000))) == 3000


async def test_one_bad_line_of_a_copy_refuses_all(outbox: Outbox) -> None:
    """With the field in the message (PUB-3)."""
    lines = f"{EVENT}\tshop\t{{}}\n{EVENT}\tshop\t[]\n"
    with pytest.raises(asyncpg.InvalidParameterValueError, match="payload must be a JSON object, not array"):
        await outbox.connection.copy_to_table(
            "outbox", schema_name="core", columns=["event_type", "source", "payload"], source=BytesIO(lines.encode())
        )
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 0


async def test_what_the_writer_gives_is_kept(outbox: Outbox) -> None:
    """Also an id that is no version 7, and NULL where a default would stand (PUB-1)."""
    await outbox.connection.execute(
        """INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, occurred_at, headers, target)
           VALUES ('9f0d6a1e-1111-4222-8333-000000000000', 'order.placed', 'shop', '{}', 'k', '2020-02-02 02:02+02',
                   '{"tenant": "acme"}', 'billing'),
                  (DEFAULT, 'order.placed', 'shop', '{}', NULL, DEFAULT, NULL, NULL)"""
    )
    given, left_out = await outbox.connection.fetch("SELECT * FROM core.outbox ORDER BY seq")
    assert str(given["id"]) == "9f0d6a1e-1111-4222-8333-000000000000"
    assert (given["idempotency_key"], given["headers"], given["target"]) == ("k", {"tenant": "acme"}, "billing")
    assert given["occurred_at"].isoformat() == "2020-02-02T00:02:00+00:00"
    assert_filled(left_out)


async def test_a_prepared_statement_works_for_many_generations(outbox: Outbox) -> None:
    """A default is asked for at each execution, not when the statement is prepared (PUB-1)."""
    statement = await outbox.connection.prepare(
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ($1, $2, $3) RETURNING generation"
    )
    assert await statement.fetchval(EVENT, "shop", {}) == 0
    for generation in range(1, 8):
        await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES ($1)", generation)
        assert await statement.fetchval(EVENT, "shop", {}) == generation


# --- psql itself ---

Psql = Callable[[str], str]


@pytest.fixture
def psql(postgres_server: SessionServer, shared_dsn: str) -> Psql:
    """Run a script in psql, as people and shell scripts do; returns what it printed."""
    program = Path(postgres_server.binaries.program("psql"))

    def run(script: str) -> str:
        used(f"psql {postgres_server.binaries.version} ({postgres_server.binaries.origin})")
        command = [str(program), "--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set", "ON_ERROR_STOP=1"]
        ran = subprocess.run([*command, shared_dsn], input=script, text=True, capture_output=True, timeout=30)
        return ran.stdout + ran.stderr

    async def execute(script: str) -> str:
        connection = await asyncpg.connect(shared_dsn)
        try:
            return str(await connection.fetchval(script))
        except asyncpg.PostgresError as error:
            return f"ERROR:  {error}\nHINT:  {error.hint}"
        finally:
            await connection.close()

    def run_without(script: str) -> str:
        used(f"psql is missing beside Postgres {postgres_server.major}: its statements ran over asyncpg")
        return str(run_coroutine(lambda: execute(script)))

    return run if program.exists() else run_without


async def test_psql_publishes(outbox: Outbox, psql: Psql) -> None:
    """What the documentation tells people to type (PUB-1)."""
    printed = await asyncio.to_thread(psql, INSERT + " RETURNING channel;")
    assert printed.strip() == CHANNEL
    [row] = await outbox.connection.fetch("SELECT * FROM core.outbox")
    assert_filled(row)


async def test_psql_replays(outbox: Outbox, psql: Psql) -> None:
    """Replay is one function call for whoever has psql and nothing else (DLQ-3)."""
    id = await outbox.failed()
    assert (await asyncio.to_thread(psql, f"SELECT core.outbox_replay('{id}', 0, 'sql-direct');")).strip() == "1"
    again = await asyncio.to_thread(psql, f"SELECT core.outbox_replay('{id}', 0, 'sql-direct');")
    assert again.split("\n")[0] == "0"
    assert "nothing was replayed: the delivery to billing.charge_card is pending" in again
    assert await outbox.states(id) == ["pending"]


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "payload array": ({"payload": "'[1]'"}, "payload must be a JSON object, not array"),
    "empty type": ({"event_type": "''"}, "event_type must be 1 to 200 characters"),
    "oversize payload": ({"payload": "jsonb_build_object('a', repeat('x', 600000))"}, "payload has 600009 bytes"),
    "channel of 64 bytes": ({"channel": "repeat('c', 64)"}, "outbox_channel"),
    "NUL in the payload": ({"payload": '\'{"a": "\\u0000"}\''}, "unsupported Unicode escape sequence"),
    "no JSON at all": ({"payload": "'order'"}, "invalid input syntax for type json"),
    "another status": ({"status": "'delivered'"}, "outbox_settled"),
}


@pytest.mark.parametrize(("columns", "said"), REFUSED.values(), ids=REFUSED)
async def test_psql_is_told_what_is_wrong(outbox: Outbox, psql: Psql, columns: dict[str, str], said: str) -> None:
    """On the terminal, in words (PUB-3, D2)."""
    values: dict[str, Any] = {"event_type": "'order.placed'", "source": "'shop'", "payload": "'{}'"} | columns
    script = f"INSERT INTO core.outbox ({', '.join(values)}) VALUES ({', '.join(values.values())});"
    printed = await asyncio.to_thread(psql, script)
    assert "ERROR:" in printed
    assert said in printed
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 0
