"""Every statement and function of the package, on each server, in the usual schema and in another (OBX-1)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import asyncpg
import pytest
import sqlalchemy

from holdfast import NewEvent, Publisher
from holdfast.postgres import migrate
from holdfast.postgres.queries import Queries, statements
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, NOBODY, InFlight, Lane, Outbox, connect
from tests.servers import SessionServer, run_coroutine

pytestmark = pytest.mark.both_postgres

STATEMENTS = {file: sorted(named) for file, named in statements().items()}
FILES = [file for file, named in STATEMENTS.items() if named]
ELSEWHERE = "hf_other"


@pytest.fixture(scope="module")
def elsewhere_dsn(postgres_server: SessionServer) -> Iterator[str]:
    """A database with the schema hf_other and no core: what still says core fails."""
    name = postgres_server.create(schema=False)
    dsn = postgres_server.dsn(name)
    try:
        run_coroutine(lambda: migrate.apply(dsn, schema=ELSEWHERE))
        yield dsn
        faults = postgres_server.faults_left(name)
    finally:
        postgres_server.drop(name)
    assert faults == []


@pytest.fixture
async def elsewhere(elsewhere_dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(elsewhere_dsn)
    outbox = Outbox(connection, ELSEWHERE)
    await outbox.clear()
    yield outbox
    await connection.close()


# --- statements ---


async def refused(connection: asyncpg.Connection, queries: Queries, names: list[str]) -> dict[str, str]:
    """The statements that the server cannot prepare, or whose parameters are not those of their text."""
    faults = {}
    for name in names:
        statement = queries.asyncpg(name)
        *others, last = statement.sql.rstrip("; \n").split("; ") if not statement.parameters else [statement.sql]
        try:
            for other in others:  # of one message
                await connection.prepare(other)
            prepared = await connection.prepare(last)
        except asyncpg.PostgresError as error:
            faults[name] = f"{error.sqlstate} {error}"
            continue
        if len(prepared.get_parameters()) != len(statement.parameters):
            faults[name] = f"has {len(prepared.get_parameters())} parameters, not {statement.parameters}"
    return faults


@pytest.mark.parametrize("file", FILES)
async def test_every_statement_prepares(outbox: Outbox, file: str) -> None:
    """Tables, columns, functions and types are as the statement says, on every supported server (OBX-1)."""
    assert await refused(outbox.connection, Queries(), STATEMENTS[file]) == {}


@pytest.mark.parametrize("file", FILES)
async def test_every_statement_prepares_in_another_schema(elsewhere: Outbox, file: str) -> None:
    """The schema's name is a setting (OBX-1)."""
    assert await refused(elsewhere.connection, Queries(ELSEWHERE), STATEMENTS[file]) == {}


def test_every_statement_has_a_name_of_its_own() -> None:
    """Names are looked up across the files (OBX-1)."""
    names = [name for named in STATEMENTS.values() for name in named]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("file", FILES)
def test_every_driver_is_given_the_same_parameters(file: str) -> None:
    """`$n`, `%(name)s` and text() bind the same names (PUB-1)."""
    queries = Queries()
    for name in STATEMENTS[file]:
        wanted = set(queries.asyncpg(name).parameters)
        assert set(re.findall(r"%\((\w+)\)s", queries.psycopg(name))) == wanted, name
        assert set(sqlalchemy.text(queries.sqlalchemy(name)).compile().params) == wanted, name


# --- nothing says core any more ---

TEXTS = """
SELECT 'function ' || p.oid::regprocedure::text, p.prosrc || coalesce(p.proconfig::text, '')
FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
UNION ALL SELECT 'view ' || c.oid::regclass::text, pg_get_viewdef(c.oid)
FROM pg_class c WHERE c.relnamespace = $1::regnamespace AND c.relkind = 'v'
UNION ALL SELECT 'default of ' || d.adrelid::regclass::text, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attrdef d JOIN pg_class c ON c.oid = d.adrelid WHERE c.relnamespace = $1::regnamespace
UNION ALL SELECT 'constraint ' || o.conname::text, pg_get_constraintdef(o.oid)
FROM pg_constraint o WHERE o.connamespace = $1::regnamespace
UNION ALL SELECT 'trigger ' || t.tgname::text, pg_get_triggerdef(t.oid)
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = $1::regnamespace
"""


async def test_nothing_in_another_schema_says_core(elsewhere: Outbox) -> None:
    """Function bodies, views, defaults, constraints and triggers (OBX-1)."""
    rows = await elsewhere.connection.fetch(TEXTS, ELSEWHERE)
    assert len(rows) > 50
    named = {what: re.findall(r".*\bcore\b.*", without_comments(text)) for what, text in rows}
    assert {what: lines for what, lines in named.items() if lines} == {}


def without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


# --- every function runs there ---


async def test_publishing_runs_in_another_schema(elsewhere: Outbox) -> None:
    """OBX-1, PUB-1, PUB-2."""
    shop = Publisher("shop", schema=ELSEWHERE)
    connection = elsewhere.connection
    async with connection.transaction():
        await shop.publish(connection, EVENT, {"n": 1})
        await shop.publish_many(connection, [NewEvent(EVENT, {}), NewEvent(EVENT, {})])
        await shop.publish(connection, EVENT, {}, key="k", delay=60)
        await shop.publish(connection, EVENT, {}, key="k", delay=9, on_duplicate="reschedule")
        assert await shop.reschedule(connection, "k", delay=30)
        assert await shop.cancel(connection, "k")
    await connection.execute(f"INSERT INTO {ELSEWHERE}.deployments (generation) VALUES (3)")
    row = await elsewhere.row(await elsewhere.insert())
    assert (row["generation"], row["channel"]) == (3, "outbox_gen_3")
    assert row["id"].version == 7
    await connection.execute(f"INSERT INTO {ELSEWHERE}.sources VALUES ('shop', current_user)")
    assert await elsewhere.value(f"SELECT count(*) FROM {ELSEWHERE}.my_outbox") == 5
    with pytest.raises(asyncpg.InvalidParameterValueError, match="payload must be a JSON object"):
        await elsewhere.insert(payload=[])


async def test_claiming_and_settling_run_in_another_schema(elsewhere: Outbox) -> None:
    """OBX-1, LSN-3."""
    await elsewhere.insert_many(6)
    held = await elsewhere.hold()
    assert await elsewhere.extend(*held) == []
    assert await elsewhere.deliver(held[0]) == await elsewhere.retry(held[1], delay=60) == []
    assert await elsewhere.fail(held[2]) == await elsewhere.release(held[3]) == []
    async with elsewhere.connection.transaction():
        assert await elsewhere.enter(held[4]) == "run"
    assert await elsewhere.cancel_event(held[5].id) == 1
    assert await elsewhere.deliver(held[5]) == [held[5].id]
    assert await elsewhere.states(*(each.id for each in held)) == [
        "delivered", "pending", "failed", "pending", "delivered", "failed",
    ]  # fmt: skip
    assert await elsewhere.value(f"SELECT count(*) FROM {ELSEWHERE}.event_handled") == 2
    assert await elsewhere.replay(held[2].id) == 1
    [again] = await elsewhere.hold(Lane(HANDLER))
    assert again.id == held[2].id
    assert await elsewhere.fail(again) == []
    assert await elsewhere.value(f"SELECT count(*) FROM {ELSEWHERE}.failed") == 1
    due = await elsewhere.call(
        "outbox_due_in", channel=CHANNEL, generation=0, routes=[HANDLER], priorities=[1], since=timedelta(0)
    )
    assert 0 < due[0][0] <= 60


async def test_routing_runs_in_another_schema(elsewhere: Outbox) -> None:
    """OBX-1, LSN-7."""
    await elsewhere.subscribe(HANDLER, EVENT)
    await elsewhere.subscribe("mail.thank", "order.*")
    assert len(await elsewhere.call("subscriptions_read")) == 2
    await elsewhere.insert()
    assert await elsewhere.split(LANE, version=0) == -1
    assert await elsewhere.split(LANE) == 1
    lanes = await elsewhere.call("outbox_routes", channel=CHANNEL, generation=0)
    assert {row[0] for row in lanes} == {HANDLER, "mail.thank"}
    assert [tuple(row) for row in await elsewhere.call("outbox_channels")] == [(CHANNEL, 0)]
    assert await elsewhere.value(f"SELECT {ELSEWHERE}.retire($1)", HANDLER) == 1
    id = await elsewhere.value("SELECT gen_random_uuid()")
    await elsewhere.call(
        "worker_beat",
        id=id,
        name="w",
        host="h",
        pid=1,
        version="0",
        generation=0,
        channels=[CHANNEL],
        handlers=[HANDLER],
    )
    await elsewhere.call("worker_stopped", id=id)
    assert await elsewhere.value(f"SELECT count(*) FROM {ELSEWHERE}.workers WHERE stopped_at IS NOT NULL") == 1


async def test_the_bells_of_two_schemas_are_two(elsewhere: Outbox, elsewhere_dsn: str) -> None:
    """A worker that sleeps beside one schema's outbox is not rung for another's (OBX-1, LSN-1)."""
    sleeper = await asyncpg.connect(elsewhere_dsn)
    heard: list[str] = []
    finished = asyncio.Event()

    def hear(_connection: object, _pid: int, channel: str, text: object) -> None:
        heard.append(str(text)) if channel == CHANNEL else finished.set()

    try:
        for channel in (CHANNEL, "finish"):
            await sleeper.add_listener(channel, hear)
        lock = "SELECT pg_advisory_{}lock(hashtextextended($1 || '.outbox_default', 0))"
        await sleeper.execute(lock.format(""), "core")
        await elsewhere.insert()
        await sleeper.execute(lock.format(""), ELSEWHERE)
        await elsewhere.insert()
        await elsewhere.connection.execute("NOTIFY finish")
        async with asyncio.timeout(5):
            await finished.wait()
    finally:
        await sleeper.close()
    assert heard == [""]


async def test_two_schemas_in_one_database_do_not_touch_each_other(elsewhere_dsn: str, elsewhere: Outbox) -> None:
    """The same ids, keys and handlers in both (OBX-1)."""
    await migrate.apply(elsewhere_dsn)
    core = Outbox(await connect(elsewhere_dsn))
    try:
        id = await elsewhere.insert(idempotency_key="k")
        assert await core.insert(id=id, idempotency_key="k") == id
        [held] = await elsewhere.hold()
        assert await core.deliver(held) == [id]
        assert await elsewhere.deliver(held) == []
        assert await core.states(id) == ["pending"]
        [claimed] = await core.claim(token=NOBODY)
        assert claimed["handled"] is False
        assert await core.fail(InFlight(id, NOBODY)) == []
        assert await elsewhere.replay(id) == 0
        assert await core.replay(id) == 1
        assert await elsewhere.states(id) == ["delivered"]
    finally:
        await core.connection.close()
        await migrate.uninstall(elsewhere_dsn)
