"""Every argument of every function that a producer or a worker may call (SEC-1, OBX-2, T8)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from tests.logins import PRODUCER, WORKER, Logins
from tests.outbox import HANDLER, Outbox, connect

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

# What a call may end with: a bad value, no right, nothing there, or not the time for it. All are raised by name.
DECLARED = {"22023", "42501", "P0002", "55000"}
LONG = "repeat('x', 2000000)"
EVENT = (
    """'{"event_id": "01890000-0000-7000-8000-000000000001", "source": "shop", "idempotency_key": "k", """
    """"event_type": "a.b", "event_version": 1, "occurred_at": "2026-01-01T00:00:00Z", "payload": {}}'"""
)

# The first of each type is a value that could be meant.
VALUES: dict[str, list[str]] = {
    "text": ["'a.b'", "''", "' '", "'a/b'", "E'\\n'", LONG],
    "text[]": ["'{a.b}'", "'{}'", "'{NULL}'", "'{a.b,NULL}'", "'{a.b,c.d}'", "'{{a.b},{c.d}}'", f"ARRAY[{LONG}]"],
    "uuid": ["gen_random_uuid()", "'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'"],
    "uuid[]": [
        "ARRAY[gen_random_uuid()]", "'{}'", "'{NULL}'", "ARRAY[gen_random_uuid(), gen_random_uuid()]",
        "array_fill(gen_random_uuid(), '{200000}')",
    ],
    "smallint": ["1", "'-32768'", "32767"],
    "smallint[]": ["'{1}'", "'{}'", "'{NULL}'", "'{1,2}'", "'{-32768}'"],
    "integer": ["1", "0", "'-1'", "'-2147483648'", "2147483647"],
    "integer[]": ["'{1}'", "'{}'", "'{NULL}'", "'{1,1}'", "'{-1}'", "'{2147483647}'"],
    "bigint": ["0", "'-1'", "'-9223372036854775808'", "9223372036854775807"],
    "bigint[]": ["'{1}'", "'{}'", "'{NULL}'", "'{1,1}'", "'{-1}'", "'{9223372036854775807}'"],
    "double precision[]": ["'{1}'", "'{}'", "'{NULL}'", "'{1,1}'", "'{-1}'", "'{NaN}'", "'{Infinity}'"],
    "boolean": ["true", "false"],
    "boolean[]": ["'{true}'", "'{}'", "'{NULL}'", "'{true,false}'", "'{{true},{false}}'"],
    "interval": ["'1 second'", "'0'", "'-1 day'", "'170000000 years'", "'-170000000 years'"],
    "interval[]": ["'{1 second}'", "'{}'", "'{NULL}'", "'{1 second,1 second}'", "'{170000000 years}'", "'{-1 day}'"],
    "timestamp with time zone": [
        "now()", "'infinity'", "'-infinity'", "'4713-01-01 BC'", "'294276-12-31'",
    ],
    "timestamp with time zone[]": [
        "ARRAY[now()]", "'{}'", "'{NULL}'", "'{infinity}'", "'{-infinity}'", "'{294276-12-31}'", "ARRAY[now(), now()]",
    ],
    "jsonb": [EVENT, "'{}'", "'[]'", "'null'", "'\"x\"'", f"jsonb_build_object('event_id', {LONG})",
              EVENT.replace("2026-01-01T00:00:00Z", "infinity"), EVENT.replace("0000-7000", "x"),
              EVENT.replace('"event_version": 1', '"event_version": "x"'),
              EVENT.replace('"payload": {}', '"payload": 1')],
    "bytea": ["'x'", "''", f"convert_to({LONG}, 'UTF8')"],
}  # fmt: skip

# What could be meant by a parameter, where its type says too little.
MEANT = {
    "p_reasons text[]": "'{rejected}'",
    "p_step text": "'delivered'",
    "p_missed text": "'latest'",
    "p_cron text": "NULL",
    "p_timezone text": "NULL",
    "p_target text": "NULL",
    "p_payload jsonb": "'{}'",
    "p_counts jsonb": "'{}'",
    "p_actor text": "NULL",
    "p_hash_version integer": "1",
    "p_status_code integer": "200",
    "p_idle_ms integer": "5000",
    "p_idle interval": "'5 seconds'",
    "p_every interval": "'1 hour'",
}

CALLABLE = """
SELECT p.oid::regprocedure::text AS name, p.proname::text AS short,
       ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, n) ORDER BY n) AS types,
       p.proargnames[1:p.pronargs] AS parameters
FROM pg_proc p WHERE p.pronamespace = 'core'::regnamespace AND has_function_privilege($1, p.oid, 'EXECUTE') ORDER BY 1
"""


@pytest.fixture(params=[PRODUCER, WORKER])
async def caller(request: pytest.FixtureRequest, logins: Logins) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(logins.dsn_of(logins.names[request.param]), statement_cache_size=0)
    await connection.execute("SET statement_timeout = '10s'")
    yield connection
    await connection.close()


def calls(types: list[str], names: list[str]) -> Iterator[list[str]]:
    """Each argument in turn with every value of its type; the others as they could be meant."""
    usual = [MEANT.get(f"{name} {each}", VALUES[each][0]) for each, name in zip(types, names, strict=True)]
    yield usual
    yield ["NULL"] * len(types)
    for place, type_ in enumerate(types):
        for value in ("NULL", *VALUES[type_]):
            yield [*usual[:place], value, *usual[place + 1 :]]


@pytest.mark.slow
async def test_a_bad_argument_is_refused_by_name(caller: asyncpg.Connection) -> None:
    """NULL, NULL inside arrays, infinity, minima and maxima, empty, arrays of unequal lengths, long texts (T8)."""
    undeclared: dict[str, str] = {}
    functions = await caller.fetch(CALLABLE, await caller.fetchval("SELECT current_user"))
    assert len(functions) > 10
    for function in functions:
        for arguments in calls(function["types"], function["parameters"] or []):
            typed = ", ".join(f"{value}::{type_}" for value, type_ in zip(arguments, function["types"], strict=True))
            try:
                await caller.execute(f"BEGIN; SELECT count(*) FROM core.{function['short']}({typed}); ROLLBACK")
            except asyncpg.PostgresError as error:
                await caller.execute("ROLLBACK")
                if error.sqlstate not in DECLARED:
                    undeclared[f"{function['short']}({typed})"] = f"{error.sqlstate} {error}"
    assert not undeclared, "\n" + "\n".join(f"{call[:200]}: {error[:100]}" for call, error in undeclared.items())


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


BEGIN = "SELECT core.idempotency_begin('ann', 'k', $1, 1, '1 hour', 2000, NULL)"


async def test_no_answer_without_the_right_hash(conn: asyncpg.Connection) -> None:
    """A NULL beside the wrong hash does not open another caller's answer (SEC-1, T8)."""
    async with conn.transaction():
        assert await conn.fetchval(BEGIN, ["secret"]) is None
        await conn.execute("SELECT core.idempotency_complete('ann', 'k', false, 200, '{}', 'body', false)")
    for hashes in (["wrong", None], [None], [None, "wrong"], []):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await conn.fetchval(BEGIN, hashes)
    assert json.loads(await conn.fetchval(BEGIN, ["wrong"])) == {"outcome": "reused"}
    assert json.loads(await conn.fetchval(BEGIN, ["new", "secret"]))["outcome"] == "answered"


async def test_a_claim_has_a_limit(outbox: Outbox) -> None:
    """LIMIT NULL would be none (T8)."""
    await outbox.insert_many(3)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="a limit is 0 to 100000"):
        await outbox.value(
            """SELECT core.outbox_claim($1, $1, '1 min', 1, 'outbox_default', 0, '{*/order.placed}', '{1}', '{a.b}',
                                        '{NULL}', '{0001-01-02}', ARRAY[$1::uuid])""",
            "0" * 32,
        )


async def test_what_is_said_about_a_failure_is_capped(outbox: Outbox) -> None:
    """Error texts and signatures, by every way into a row (S9, T8)."""
    await outbox.subscribe(HANDLER, "order.placed")
    long = "x" * 1_000_000
    held = await outbox.held()
    assert await outbox.retry(held, error=long) == []
    failed = await outbox.held()
    assert await outbox.fail(failed, error=long, signature=long) == []
    archived = await outbox.held()
    fence = {"ids": [archived.id], "tokens": [archived.token], "handlers": [HANDLER], "reasons": ["rejected"]}
    assert await outbox.call("outbox_archive", **fence, errors=[long], signatures=[long]) == []
    sizes = """SELECT max(octet_length(last_error)), max(octet_length(error_signature)) FROM core.outbox
               UNION ALL
               SELECT max(octet_length(last_exception)), max(octet_length(error_signature)) FROM core.archive"""
    assert [tuple(row) for row in await outbox.connection.fetch(sizes)] == [(8192, 300), (8192, 300)]
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await outbox.fail((await outbox.held())._replace(handler="h" * 201))
    await outbox.connection.execute("DELETE FROM core.outbox")


async def test_no_dead_letter_is_planted_in_a_workers_lane(outbox: Outbox, logins: Logins) -> None:
    """A producer's reactions fail in their own lanes, not in those of handlers that never wanted the event (SEC-1)."""
    await outbox.subscribe(HANDLER, "order.placed")
    event = await outbox.insert(event_type="junk.made", payload={"amount": -1})
    row = await outbox.row(event)
    envelope = {
        "event_id": str(event), "event_type": "junk.made", "event_version": 1, "source": "shop", "payload": {},
        "occurred_at": row["occurred_at"].isoformat(), "idempotency_key": str(event),
    }  # fmt: skip
    values = {"event": json.dumps(envelope), "done": [], "reasons": ["rejected"], "errors": ["no"], "signatures": ["s"]}
    producer = Outbox(await asyncpg.connect(logins.dsn_of(logins.names[PRODUCER])))
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="has never wanted junk"):
        await producer.call("reaction_settle", **values, failed=[HANDLER], alone=False)
    await producer.call("reaction_settle", **values, failed=["shop.react"], alone=False)
    await producer.call("reaction_settle", **values, failed=["shop.react"], alone=False)
    await producer.connection.close()
    assert await outbox.value("SELECT array_agg(handler_name) FROM core.failed") == ["shop.react"]


async def test_replays_do_not_go_to_a_generation_that_is_only_named(outbox: Outbox) -> None:
    """A worker that names a number, and does not serve its channel, leads no replay there (GEN-1)."""
    beat = "SELECT core.worker_beat(gen_random_uuid(), 'w', 'host', 1, '1.0', $1, $2, '{}')"
    await outbox.connection.execute(beat, 3, ["outbox_gen_3"])
    await outbox.connection.execute(beat, 2**63 - 1, ["outbox_default"])
    assert await outbox.value("SELECT core.serving_generation()") == 3
    for generation, channels in ((-1, ["c"]), (0, [None]), (0, ["c" * 64]), (None, ["c"])):
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await outbox.connection.execute(beat, generation, channels)
