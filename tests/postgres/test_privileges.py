"""Least privilege (P10, S1-S4, OBX-2): the whole matrix as declared here, and what each role can really do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import asyncpg
import pytest

from holdfast import NewEvent, Publisher
from holdfast.ids import uuid7
from holdfast.postgres import migrate
from tests.logins import OPERATOR, OWNER, PRODUCER, ROLES, RUNTIME, WORKER, Logins
from tests.outbox import CHANNEL, EVENT, HANDLER, LANE, InFlight, Lane, Outbox, connect
from tests.servers import SessionServer

pytestmark = pytest.mark.both_postgres

# --- the declared matrix: what is not here is denied ---

TABLES: dict[str, dict[str, set[str]]] = {
    PRODUCER: {"my_outbox": {"SELECT"}, "migrations": {"SELECT"}, "contract": {"SELECT"}},
    WORKER: {"migrations": {"SELECT"}, "contract": {"SELECT"}},
    OPERATOR: {
        name: {"SELECT"}
        for name in (
            "migrations", "contract", "outbox", "failed", "deliveries", "event_handled", "subscriptions",
            "subscriptions_version", "workers", "deployments", "outbox_keys", "sources", "cancel_requests", "audit",
            "failure_notes", "plans", "plan_rows", "clock_steps", "clock", "rollup", "rollup_journal", "rollup_reports",
            "rollup_counts", "ordering_heads",
        )
    },
}  # fmt: skip

# Beside those of whole tables: a producer fills in an event, and nothing of its later life.
COLUMNS: dict[str, dict[tuple[str, str], set[str]]] = {
    PRODUCER: {
        ("outbox", "INSERT"): {
            "id", "event_type", "event_version", "occurred_at", "source", "target", "content_class", "channel",
            "generation", "domain_id", "payload", "headers", "idempotency_key", "trace_context", "available_at",
            "expires_at", "priority", "ordering_key", "dedupe_key",
            "fairness_key",
        }
    },
}  # fmt: skip

FUNCTIONS: dict[str, set[str]] = {
    PRODUCER: {
        "uuid7", "current_generation", "current_channel", "channel_of", "outbox_hold_key", "outbox_cancel",
        "outbox_reschedule",
    },
    WORKER: {
        "outbox_claim_ordered", "outbox_claim_fair", "sweep_heads",
        "outbox_claim", "outbox_extend", "outbox_deliver", "outbox_blocked", "outbox_retry", "outbox_fail",
        "outbox_release", "outbox_enter", "outbox_enter_at_once", "outbox_enter_batch",
        "outbox_reopen", "outbox_retry_entered", "outbox_split", "outbox_routes", "outbox_routes_within",
        "outbox_channels", "outbox_due_in", "subscribe", "subscriptions_read", "worker_beat", "worker_stopped",
        "unserved_channels", "worker_alive", "silent_workers", "clock_stepped",
        "clock_unrecorded", "clock_repair", "rollup_write", "rollup_fold", "rollup_lag",
    },
    OPERATOR: {
        "outbox_replay", "outbox_cancel_event", "retire", "outbox_routes", "outbox_channels", "served_channels",
        "living_for", "is_living", "channel_of", "subscriptions_read", "outbox_replay_many",
        "outbox_discard", "outbox_restore", "outbox_edit", "keys_blocked", "key_release", "open_rows", "keyed_lanes",
        "sweep_heads",
        "failure_note", "failed_select", "event_rows", "plan_create", "plan_take", "plan_step", "plan_release",
        "plan_change_state", "generation_open", "generation_begin", "generation_retire", "generation_move",
        "serving_generation", "audit_import",
        "audit_refused", "worker_release", "deliveries_of", "row_outcomes", "open_channels", "raised_at",
    },
}  # fmt: skip

SCHEMA: dict[str, set[str]] = {role: {"USAGE"} for role in RUNTIME}

# Called by other functions, by triggers and by defaults; nobody has them by name.
INTERNAL = {
    "outbox_fill", "outbox_notify", "require_source", "outbox_retime", "sibling_id",
    "audit_append", "audit_rows", "audit_sweep", "require_reactions",
    "audit_is_kept", "require_ids", "require_operator", "outbox_replay_rows", "plan_observe",
    "discarded_until", "require_lease", "longest_lease", "clock_advance", "clock_jumped", "is_begun",
    "served_generation", "counted_generation", "open_lanes", "clock_observe", "clock_shows",
}  # fmt: skip

# --- of the archive and of retention ---
TABLES[OPERATOR] |= {name: {"SELECT"} for name in ("archive", "retention_policies", "sweeps")}
_SWEEPS = {
    "retention_policies_read", "retention_classes", "retention_sweep", "sweep_keys", "sweep_inbox", "sweep_acquire",
    "sweep_finish",
}  # fmt: skip
FUNCTIONS[WORKER] |= _SWEEPS | {"outbox_archive", "outbox_deliver_and_delete", "outbox_delete_delivered"}
FUNCTIONS[OPERATOR] |= _SWEEPS | {
    "archive_replay", "archive_discard", "retention_set", "retention_due", "inbox_horizon", "erase_archived",
    "erase_outbox", "erase_records",
}  # fmt: skip
INTERNAL |= {
    "history_with", "require_archive_ids", "days_ago", "retention_policy", "is_in_replay_plan", "deletes_delivered",
    "deletes_delivered_of", "outbox_dispose", "archive_dispose", "archive_mark", "archive_numbers", "archive_return",
    "plan_waits_for",
}  # fmt: skip

# --- of reactions in the producer's process ---
_REACTIONS = {"reaction_unhandled", "reaction_enter", "reaction_settle"}
FUNCTIONS[PRODUCER] |= _REACTIONS
FUNCTIONS[WORKER] |= _REACTIONS

# --- of limits, pauses and breakers ---
TABLES[OPERATOR] |= {"handler_flow": {"SELECT"}, "handler_slots": {"SELECT"}}
FUNCTIONS[WORKER] |= {"flow_declare", "flow_limited", "flow_waits", "outbox_falter", "breaker_succeed", "wake"}
FUNCTIONS[OPERATOR] |= {"handler_limit", "handler_pause", "handler_resume", "handler_breaker", "flow_waits"}
INTERNAL |= {
    "flow_tokens", "flow_ramp", "flow_in_flight", "flow_allow", "flow_is_limited", "flow_probes", "flow_allowance",
    "flow_spend", "flow_adopt", "is_limit", "is_rate", "flow_forget", "flow_wake", "flow_change", "probe_interval",
    "breaker_give_back", "breaker_close",
}  # fmt: skip

# --- of brokers ---
TABLES[OPERATOR] |= {"broker_reports": {"SELECT"}}
FUNCTIONS[WORKER] |= {
    "broker_interests", "broker_undecided", "broker_adopt", "broker_look", "broker_enter", "broker_enter_at_once",
    "broker_enter_batch", "broker_leave", "broker_deliver", "broker_park", "relay_details", "relay_keys",
    "broker_report", "broker_report_due", "broker_naming", "broker_stranded",
}  # fmt: skip
FUNCTIONS[OPERATOR] |= {
    "handler_via", "handler_drained", "broker_interests", "relayed_rows", "relay_again", "relay_lost", "relay_repair",
    "relay_rotate",
}  # fmt: skip
INTERNAL |= {"set_via", "broker_parked", "require_messages", "inbox_take_back"}

# --- of schedules ---
TABLES[OPERATOR] |= {"schedules": {"SELECT"}}
FUNCTIONS[WORKER] |= {"schedule_declare", "schedules_watch", "schedule_fire"}
FUNCTIONS[OPERATOR] |= {"schedule_trigger", "schedule_change_state", "schedule_remove"}
INTERNAL |= {"schedule_publish", "reaction_owned", "require_generation"}

# --- of sources and their keys ---
INTERNAL |= {
    "refuse_argument", "is_list", "is_name", "are_names", "is_silence", "require_batch", "require_failures",
    "require_delays", "require_key",
}  # fmt: skip
INTERNAL |= {"error_text", "error_traceback"}
INTERNAL |= {"erase_keys", "outbox_source", "sources_owned", "outbox_changed", "require_event", "require_row"}
INTERNAL |= {"secret", "scoped_key", "inbox_is_foreign", "inbox_has", "inbox_add"}

# --- of idempotency records ---
FUNCTIONS[PRODUCER] |= {"idempotency_begin", "idempotency_complete"}
FUNCTIONS[WORKER] |= {"idempotency_begin", "idempotency_complete", "sweep_records"}
FUNCTIONS[OPERATOR] |= {"idempotency_begin", "idempotency_complete", "sweep_records", "requests_read", "audit_reveal"}

# --- of the roll-up ---
FUNCTIONS[WORKER] |= {"sweep_rollup"}
FUNCTIONS[OPERATOR] |= {"sweep_rollup", "rollup_lag", "operator_secret"}
INTERNAL |= {
    "is_dead_letter", "keyed_lanes_of", "keyed_places", "keyed_gather", "key_of_source", "require_keyed_claim",
    "split_rows", "replayed_places", "forget_heads",
}  # fmt: skip
INTERNAL |= {
    "breaker_turn", "breaker_probe", "breaker_distrust", "is_distrusted", "owned_keys", "require_operators_records",
}  # fmt: skip
INTERNAL |= {"require_application", "rollup_count", "rollup_writer", "add_buckets", "begun_for"}

# --- of batch handlers ---
FUNCTIONS[WORKER] |= {"outbox_enter_batch"}

# --- of partitions ---
TABLES[OPERATOR] |= {"partitioning": {"SELECT"}}
FUNCTIONS[WORKER] |= {"partitions_extend", "partitions_drop"}
FUNCTIONS[OPERATOR] |= {
    "partitions_list",
    "partitions_bound",
    "is_partitioned",
    "partition_kept",
    "first_id",
    "id_time",
}
PARTITIONS = {
    "partitions_prepare", "partitions_validate", "partitions_abandon", "partitions_swap", "partitions_unswap",
    "partitions_gather", "partitions_settle", "partitions_obstacles", "partitions_refuse", "partition_make",
    "partition_copy",
}  # fmt: skip
INTERNAL |= PARTITIONS | {"outbox_definition", "outbox_dress", "bare_trigger", "period_end", "require_dated"}


async def cells(outbox: Outbox, sql: str, *values: object) -> set[tuple[str, ...]]:
    return {tuple(row) for row in await outbox.connection.fetch(sql, *values)}


async def granted_to(outbox: Outbox, role: str) -> dict[str, set[tuple[str, ...]]]:
    """Every cell of the matrix that Postgres says yes to."""
    major = await outbox.value("SELECT current_setting('server_version_num')::int / 10000")
    verbs = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]
    if major >= 17:
        verbs.append("MAINTAIN")
    return {
        "tables": await cells(
            outbox,
            """SELECT c.relname::text, verb FROM pg_class c, unnest($2::text[]) verb
               WHERE c.relnamespace = 'core'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
                 AND has_table_privilege($1, c.oid, verb)""",
            role,
            verbs,
        ),
        "columns": await cells(
            outbox,
            """SELECT c.relname::text, a.attname::text, verb
               FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped,
                    unnest('{SELECT,INSERT,UPDATE,REFERENCES}'::text[]) verb
               WHERE c.relnamespace = 'core'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
                 AND has_column_privilege($1, c.oid, a.attnum, verb)""",
            role,
        ),
        "sequences": await cells(
            outbox,
            """SELECT c.relname::text, verb FROM pg_class c, unnest('{USAGE,SELECT,UPDATE}'::text[]) verb
               WHERE c.relnamespace = 'core'::regnamespace AND c.relkind = 'S'
                 AND has_sequence_privilege($1, c.oid, verb)""",
            role,
        ),
        "functions": await cells(
            outbox,
            """SELECT p.proname::text FROM pg_proc p WHERE p.pronamespace = 'core'::regnamespace
               AND has_function_privilege($1, p.oid, 'EXECUTE')""",
            role,
        ),
        "schema": await cells(
            outbox,
            "SELECT verb FROM unnest('{USAGE,CREATE}'::text[]) verb WHERE has_schema_privilege($1, 'core', verb)",
            role,
        ),
    }


async def declared_for(outbox: Outbox, role: str) -> dict[str, set[tuple[str, ...]]]:
    columns = await cells(
        outbox,
        """SELECT c.relname::text, a.attname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
           WHERE c.relnamespace = 'core'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind <> 'i'""",
    )
    tables = {(table, verb) for table, verbs in TABLES.get(role, {}).items() for verb in verbs}
    whole = {(table, column, verb) for table, verb in tables for of, column in columns if of == table}
    single = {(t, column, verb) for (t, verb), names in COLUMNS.get(role, {}).items() for column in names}
    return {
        "tables": tables,
        "columns": whole | single,
        "sequences": set(),
        "functions": {(name,) for name in FUNCTIONS.get(role, set())},
        "schema": {(verb,) for verb in SCHEMA.get(role, set())},
    }


@pytest.mark.parametrize("role", [*RUNTIME, "public", "stranger"])
async def test_every_cell_of_the_matrix_is_as_declared(outbox: Outbox, logins: Logins, role: str) -> None:
    """Role by object by verb, with columns, sequences, TRUNCATE, TRIGGER, REFERENCES and EXECUTE (P10, S2, S3)."""
    assert await granted_to(outbox, logins.names.get(role, role)) == await declared_for(outbox, role)


@pytest.mark.parametrize("role", RUNTIME)
async def test_a_login_has_what_its_role_has_and_no_more(outbox: Outbox, logins: Logins, role: str) -> None:
    """Membership is all that a login needs (S3)."""
    assert await granted_to(outbox, logins.names[role]) == await declared_for(outbox, role)


async def test_the_matrix_knows_every_function(outbox: Outbox) -> None:
    """A new function has to be declared here, as somebody's or as internal (P10)."""
    found = {name for (name,) in await cells(outbox, PROCEDURES)}
    assert found == set.union(INTERNAL, *FUNCTIONS.values())


@pytest.mark.parametrize("role", [*RUNTIME, "stranger"])
async def test_no_function_can_be_called_beyond_the_matrix(outbox: Outbox, logins: Logins, role: str) -> None:
    """Every function that a role was not given, called by one that has it (P10, T8)."""
    functions = await outbox.connection.fetch(
        """SELECT p.proname::text AS name, ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) t) AS types
           FROM pg_proc p WHERE p.pronamespace = 'core'::regnamespace AND p.prorettype <> 'trigger'::regtype"""
    )
    async with session(logins, role) as each:
        for function in functions:
            if function["name"] not in FUNCTIONS.get(role, set()):
                types = (type_.replace("anyarray", "text[]") for type_ in function["types"])
                arguments = ", ".join(f"NULL::{type_}" for type_ in types)
                await assert_denied(each, f"SELECT core.{function['name']}({arguments})")


async def test_no_grant_can_be_passed_on(outbox: Outbox) -> None:
    """No privilege comes with the option to grant it (S3)."""
    granted = await cells(
        outbox,
        """SELECT grantee::regrole::text, privilege_type FROM (
               SELECT (aclexplode(relacl)).* FROM pg_class WHERE relnamespace = 'core'::regnamespace
               UNION ALL SELECT (aclexplode(proacl)).* FROM pg_proc WHERE pronamespace = 'core'::regnamespace
               UNION ALL SELECT (aclexplode(attacl)).* FROM pg_attribute WHERE attrelid = 'core.outbox'::regclass
               UNION ALL SELECT (aclexplode(nspacl)).* FROM pg_namespace WHERE nspname = 'core') acl
           WHERE is_grantable AND grantee::regrole::text <> 'holdfast_owner'""",
    )
    assert granted == set()


# --- the owner and its functions ---

PROCEDURES = "SELECT proname::text FROM pg_proc WHERE pronamespace = 'core'::regnamespace"


async def test_the_roles_can_do_nothing_by_themselves(outbox: Outbox) -> None:
    """No login, no superuser, no attribute and no membership in anything, such as pg_read_all_data (S1, S3)."""
    rows = await outbox.connection.fetch("SELECT * FROM pg_roles WHERE rolname = ANY ($1)", list(ROLES))
    assert len(rows) == 4
    for row in rows:
        flags = ("rolcanlogin", "rolsuper", "rolcreaterole", "rolcreatedb", "rolreplication", "rolbypassrls")
        assert [flag for flag in flags if row[flag]] == [], row["rolname"]
    member_of = """SELECT m.member::regrole::text, m.roleid::regrole::text FROM pg_auth_members m
                   WHERE m.member::regrole::text = ANY ($1)"""
    assert await cells(outbox, member_of, list(ROLES)) == set()


async def test_the_owner_cannot_log_in(outbox: Outbox, logins: Logins) -> None:
    """Not even with the right password; nor can the roles that others are members of (S3)."""
    for role in ROLES:
        await outbox.connection.execute(f"ALTER ROLE {role} PASSWORD '{logins.password}'")
        try:
            with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="not permitted to log in"):
                await asyncpg.connect(logins.dsn_of(role))
        finally:
            await outbox.connection.execute(f"ALTER ROLE {role} PASSWORD NULL")


async def test_everything_belongs_to_the_owner(outbox: Outbox) -> None:
    """Tables, views, sequences, functions and the schema itself (OBX-2)."""
    owners = await cells(
        outbox,
        """SELECT relowner::regrole::text FROM pg_class WHERE relnamespace = 'core'::regnamespace
           UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'core'::regnamespace
           UNION SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'core'""",
    )
    assert owners == {(OWNER,)}


QUALIFIED = {
    "core.outbox_fill()",
    "core.broker_enter_at_once(text,uuid,text,text,bigint,interval,boolean)",
    "core.outbox_notify()", "core.outbox_source()",
    "core.is_list(anyarray)", "core.is_name(text,integer)", "core.is_silence(interval)",
    "core.error_text(text)", "core.error_traceback(text)", "core.raised_at(text)", "core.require_dated(uuid)",
    "core.open_rows()",
}  # fmt: skip


async def test_every_function_has_a_pinned_search_path(outbox: Outbox) -> None:
    """Those with their owner's rights, and the others as well; a few on hot paths name all in full (S1)."""
    rows = await outbox.connection.fetch(
        """SELECT p.oid::regprocedure::text AS name, p.prosecdef, coalesce(p.proconfig, '{}') AS settings,
                  l.lanname::text AS language
           FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang WHERE p.pronamespace = 'core'::regnamespace"""
    )
    assert sum(row["prosecdef"] for row in rows) > 20
    for row in rows:
        pinned = "search_path=pg_catalog, pg_temp" in row["settings"]
        assert pinned or row["name"] in QUALIFIED, row["name"]
        assert row["language"] in ("sql", "plpgsql"), row["name"]


async def test_dynamic_sql_is_nowhere(outbox: Outbox) -> None:
    """No function builds a statement out of its arguments. Those that make, read and drop partitions name tables
    that come and go: by %I, and values by %L or USING (S5).
    """
    dynamic = {
        name
        for name, source in await cells(
            outbox, "SELECT proname::text, prosrc FROM pg_proc WHERE pronamespace = 'core'::regnamespace AND prosecdef"
        )
        if re.search(r"\bEXECUTE\b", source)
    }
    assert dynamic == {
        "outbox_dress", "partition_copy", "partition_kept", "partition_make", "partitions_drop", "partitions_extend",
        "partitions_gather", "partitions_prepare", "partitions_settle", "partitions_swap", "partitions_unswap",
    }  # fmt: skip


async def test_what_the_owner_makes_later_is_closed_too(outbox: Outbox) -> None:
    """A function that a later migration forgets to close is not PUBLIC's (S2)."""
    transaction = outbox.connection.transaction()
    await transaction.start()
    try:
        await outbox.connection.execute(
            """SET LOCAL ROLE holdfast_owner;
               CREATE FUNCTION core.later() RETURNS int LANGUAGE sql AS 'SELECT 1';
               CREATE TABLE core.later_too (id int)"""
        )
        assert not await outbox.value("SELECT has_function_privilege('public', 'core.later()', 'EXECUTE')")
        for verb in ("SELECT", "INSERT"):
            assert not await outbox.value("SELECT has_table_privilege('public', 'core.later_too', $1)", verb)
    finally:
        await transaction.rollback()


# --- logins ---


@pytest.fixture(scope="module")
def logins(postgres_server: SessionServer, shared_dsn: str) -> Iterator[Logins]:
    logins = Logins(postgres_server, shared_dsn)
    logins.create()
    yield logins
    logins.drop()


@asynccontextmanager
async def session(logins: Logins, role: str) -> AsyncIterator[Outbox]:
    connection = await connect(logins.dsn_of(logins.names[role]))
    try:
        yield Outbox(connection)
    finally:
        await connection.close()


@pytest.fixture
async def producer(logins: Logins, outbox: Outbox) -> AsyncIterator[Outbox]:
    async with session(logins, PRODUCER) as each:
        yield each


@pytest.fixture
async def bank(logins: Logins, outbox: Outbox) -> AsyncIterator[Outbox]:
    async with session(logins, "bank") as each:
        yield each


@pytest.fixture
async def worker(logins: Logins, outbox: Outbox) -> AsyncIterator[Outbox]:
    async with session(logins, WORKER) as each:
        yield each


@pytest.fixture
async def operator(logins: Logins, outbox: Outbox) -> AsyncIterator[Outbox]:
    async with session(logins, OPERATOR) as each:
        yield each


@pytest.fixture
async def stranger(logins: Logins, outbox: Outbox) -> AsyncIterator[Outbox]:
    async with session(logins, "stranger") as each:
        yield each


async def assert_denied(session: Outbox, *statements: str) -> None:
    for statement in statements:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with session.connection.transaction():
                await session.connection.execute(statement)


TOUCH_TABLES = (
    "UPDATE core.outbox SET status = 'delivered'",
    "UPDATE core.outbox SET attempts = 0",
    "UPDATE core.outbox SET payload = '{}'",
    "DELETE FROM core.outbox",
    "TRUNCATE core.outbox",
    "LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE",
    "CREATE TRIGGER t BEFORE INSERT ON core.outbox FOR EACH ROW EXECUTE FUNCTION core.outbox_fill()",
    "ALTER TABLE core.outbox DISABLE TRIGGER ALL",
    "CREATE INDEX ON core.outbox (source)",
    "INSERT INTO core.event_handled (handler_name, idempotency_key) VALUES ('a.b', 'k')",
    "DELETE FROM core.event_handled",
    "UPDATE core.subscriptions_version SET version = 0",
    "INSERT INTO core.subscriptions (domain_context, handler_name, event_type) VALUES ('a', 'a.b', 'c')",
    "INSERT INTO core.sources (source, role_name) VALUES ('shop', current_user)",
    "INSERT INTO core.deployments (generation) VALUES (99)",
    "UPDATE core.outbox_keys SET event_id = core.uuid7()",
    "DELETE FROM core.migrations",
    "INSERT INTO core.audit (actor, action) VALUES ('me', 'replay')",
    "UPDATE core.audit SET actor = 'nobody'",
    "DELETE FROM core.audit",
    "TRUNCATE core.audit",
    "ALTER TABLE core.audit DISABLE TRIGGER audit_is_kept",
    "SELECT core.audit_append('me', 'replay', NULL, '{}', '{}')",
    "UPDATE core.plans SET state = 'open'",
    "UPDATE core.plan_rows SET state = 'pending'",
    "INSERT INTO core.failure_notes VALUES ('a.b', 's', 'n', 'me')",
    "SELECT nextval('core.outbox_seq_seq')",
    "CREATE TABLE core.mine (id int)",
    "CREATE FUNCTION core.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE OR REPLACE FUNCTION core.outbox_replay(event_id uuid, p_new_generation bigint, p_replayed_by text)"
    " RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "ALTER FUNCTION core.outbox_replay(uuid, bigint, text) RESET search_path",
    "SET ROLE holdfast_owner",
    "DROP SCHEMA core CASCADE",
    "SELECT core.require_source('shop')",
    "SELECT core.outbox_retime(core.uuid7(), 'shop', now())",
)


@pytest.mark.parametrize("role", [*RUNTIME, "stranger"])
async def test_no_runtime_role_touches_a_table(outbox: Outbox, logins: Logins, role: str) -> None:
    """A direct change of a row, of its state or of the schema is denied for every one of them (OBX-2, S4)."""
    id = await outbox.insert()
    before = await outbox.row(id)
    async with session(logins, role) as each:
        await assert_denied(each, *TOUCH_TABLES)
    assert await outbox.row(id) == before


async def test_a_producer_publishes_and_looks_after_its_events(outbox: Outbox, producer: Outbox) -> None:
    """By plain SQL and by every call of the library, with INSERT alone (S3, PUB-1)."""
    shop = Publisher("shop")
    connection = producer.connection
    await connection.execute(
        f"INSERT INTO core.outbox (event_type, source, payload) VALUES ('{EVENT}', 'shop', '{{}}')"
    )
    async with connection.transaction():
        await shop.publish(connection, EVENT, {"n": 1})
        await shop.publish_many(connection, [NewEvent(EVENT, {}), NewEvent(EVENT, {}, headers={"a": "b"})])
        await shop.publish(connection, EVENT, {}, key="k", delay=60)
        await shop.publish(connection, EVENT, {}, key="k", delay=90, on_duplicate="reschedule")
        assert await shop.reschedule(connection, "k", delay=30)
        assert await shop.cancel(connection, "k")
    await migrate.require_compatible(connection)
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 5
    assert await outbox.value("SELECT count(*) FROM core.outbox WHERE status = 'pending'") == 4


async def test_a_producer_reacts_to_its_own_events(outbox: Outbox, producer: Outbox) -> None:
    """In its own process, by EXECUTE alone; not to those of a source that belongs to another role (S3, IDM-3)."""
    connection = producer.connection
    async with connection.transaction():
        event = await Publisher("shop").publish(connection, EVENT, {})
    key = event.idempotency_key
    unhandled = {"handlers": ["shop.a"], "key": key, "source": "shop"}
    assert (await producer.call("reaction_unhandled", **unhandled))[0][0] == ["shop.a"]
    entering = {
        "handler": "shop.a",
        "event": event.event_id,
        "source": "shop",
        "key": key,
        "idle": timedelta(seconds=5),
    }
    assert (await producer.call("reaction_enter", **entering))[0][0]
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another one than it is said to be"):
        await producer.call("reaction_enter", **(entering | {"key": "schedule:billing.monthly:2026-12-01T00:00:00Z"}))
    with pytest.raises(asyncpg.NoDataFoundError, match="not in the outbox"):
        await producer.call("reaction_enter", **(entering | {"event": uuid7()}))
    values = {
        "event": event.model_dump_json(), "done": ["shop.a"], "failed": ["shop.b"], "reasons": ["rejected"],
        "errors": ["no"], "signatures": ["s"], "alone": True,
    }  # fmt: skip
    await producer.call("reaction_settle", **values)
    assert await outbox.states(event.event_id) == ["delivered"]
    assert await outbox.value("SELECT array_agg(handler_name) FROM core.failed") == ["shop.b"]
    await outbox.connection.execute("INSERT INTO core.sources (source, role_name) VALUES ('bank', 'holdfast_operator')")
    foreign = event.model_copy(update={"source": "bank"}).model_dump_json()
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another role"):
        await producer.call("reaction_settle", **(values | {"event": foreign}))
    # Nor another's event under one's own name: a forged dead letter would stand where its delivery belongs.
    theirs = await outbox.insert(source="bank")
    stolen = event.model_copy(update={"event_id": theirs}).model_dump_json()
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another one than it is said to be"):
        await producer.call("reaction_settle", **(values | {"event": stolen}))
    assert await outbox.states(theirs) == ["pending"]
    # Nor a key under which it has published nothing.
    guessed = event.model_copy(update={"idempotency_key": "schedule:billing.monthly:2026-12-01T00:00:00Z"})
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another one than it is said to be"):
        await producer.call("reaction_settle", **(values | {"event": guessed.model_dump_json()}))
    gone = guessed.model_copy(update={"event_id": uuid7()})
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="belong to schedules"):
        await producer.call("reaction_settle", **(values | {"event": gone.model_dump_json()}))
    assert await outbox.value("SELECT count(*) FROM core.event_handled WHERE idempotency_key LIKE 'schedule:%'") == 0


async def test_a_producer_does_nothing_else(outbox: Outbox, producer: Outbox) -> None:
    """It cannot read events, nor write a row that has already been through its life (S3, S4)."""
    await outbox.insert()
    plain = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')"
    insert = "INSERT INTO core.outbox (event_type, source, payload, {}) VALUES ('a.b', 'shop', '{{}}', {})"
    forged = {
        "status": "'delivered'", "attempts": "4", "last_error": "'x'", "first_failed_at": "now()",
        "settled_at": "now()", "delivered_at": "now()", "deleted_at": "now()", "failed_at": "now()",
        "failure_reason": "'rejected'", "failure_history": "'[]'", "error_signature": "'x'", "handler_name": "'a.b'",
        "origin_id": "core.uuid7()", "claimed_by": "core.uuid7()", "lease_token": "core.uuid7()",
        "lease_expires_at": "now()", "created_at": "now()",
    }  # fmt: skip
    await assert_denied(producer, *(insert.format(column, value) for column, value in forged.items()))
    with pytest.raises(asyncpg.PostgresError):
        await producer.connection.execute(insert.format("seq", "1"))
    await assert_denied(
        producer,
        "SELECT id FROM core.outbox",
        "SELECT payload FROM core.outbox",
        f"{plain} RETURNING id",
        f"{plain} ON CONFLICT (id) DO NOTHING",
        "COPY core.outbox TO STDOUT",
        "SELECT * FROM core.failed",
        "SELECT * FROM core.event_handled",
        "SELECT * FROM core.subscriptions",
        "SELECT * FROM core.sources",
        "SELECT core.outbox_replay(core.uuid7(), 0, 'me')",
        "SELECT core.outbox_cancel_event(core.uuid7(), 'me')",
        "SELECT core.subscribe('a', 'a.b', '{c}')",
        "SELECT * FROM core.subscriptions_read()",
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await producer.claim(version=1)


async def test_a_worker_claims_and_settles_without_a_table(outbox: Outbox, worker: Outbox) -> None:
    """Every call that workers make, by EXECUTE alone (S3)."""
    await worker.subscribe(HANDLER, EVENT)
    await outbox.insert_many(8)
    version = (await worker.call("subscriptions_read"))[0]["version"]
    held = await worker.hold(Lane(limit=6), version=version)
    assert await worker.extend(*held) == []
    assert await worker.deliver(held[0]) == await worker.retry(held[1], delay=60) == []
    assert await worker.fail(held[2]) == await worker.release(held[3], delay=60) == []
    async with worker.connection.transaction():
        assert await worker.enter(held[4]) == "run"
        assert await worker.reopen(held[4]) is True
        assert await worker.deliver(held[4]) == []
    assert await worker.deliver(held[5]._replace(token=held[5].id)) == [held[5].id]
    await worker.subscribe("mail.thank", EVENT)
    assert await worker.split(LANE, version=version) == -1
    assert await worker.split(LANE, version=version + 1) == 2
    assert await worker.call("outbox_routes", channel=CHANNEL, generation=0)
    assert await worker.call("outbox_channels")
    assert [row["channel"] for row in await worker.call("unserved_channels")] == [CHANNEL]
    assert await worker.call(
        "outbox_due_in", channel=CHANNEL, generation=0, routes=[HANDLER], priorities=[1], since=timedelta(0)
    )
    await migrate.require_compatible(worker.connection)
    await assert_denied(
        worker,
        "SELECT * FROM core.outbox",
        "SELECT * FROM core.my_outbox",
        "SELECT * FROM core.subscriptions_version",
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')",
        f"SELECT core.outbox_replay('{held[2].id}', 0, 'me')",
        f"SELECT core.outbox_cancel_event('{held[2].id}', 'me')",
        f"SELECT core.retire('{HANDLER}')",
        "SELECT core.outbox_cancel('shop', 'k')",
    )


async def test_an_operator_reads_replays_and_stops(outbox: Outbox, operator: Outbox) -> None:
    """Operators may SELECT core.outbox, and repair through functions only (S3, DLQ-1)."""
    failed, waiting = await outbox.failed(), await outbox.insert()
    await outbox.subscribe(HANDLER, EVENT)
    for table in TABLES[OPERATOR]:
        await operator.connection.fetch(f"SELECT * FROM core.{table}")
    dead = await operator.connection.fetch("SELECT id FROM core.outbox WHERE status = 'failed' AND deleted_at IS NULL")
    assert [row["id"] for row in dead] == [failed]
    assert await operator.replay(failed) == 1
    assert await operator.cancel_event(waiting) == 1
    assert await operator.value("SELECT core.retire($1)", HANDLER) == 1
    assert await operator.states(failed, waiting) == ["pending", "failed"]
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await operator.claim(Lane(HANDLER))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await operator.deliver(InFlight(failed, failed))
    await assert_denied(
        operator,
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')",
        "SELECT core.outbox_cancel('shop', 'k')",
        "SELECT core.subscribe('a', 'a.b', '{c}')",
    )


async def test_a_stranger_sees_nothing(outbox: Outbox, stranger: Outbox) -> None:
    """PUBLIC has no right in the schema, not even to name what is in it (S2)."""
    await assert_denied(
        stranger,
        "SELECT 1 FROM core.outbox",
        "SELECT 1 FROM core.my_outbox",
        "SELECT 1 FROM core.migrations",
        "SELECT core.uuid7()",
        "SELECT core.outbox_replay(gen_random_uuid(), 0, 'me')",
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')",
    )


# --- whose events ---


async def own(outbox: Outbox, source: str, login: str) -> None:
    await outbox.connection.execute("INSERT INTO core.sources (source, role_name) VALUES ($1, $2)", source, login)


async def test_a_producer_sees_the_events_of_its_own_sources(
    outbox: Outbox, producer: Outbox, bank: Outbox, logins: Logins
) -> None:
    """All states of its rows, and nobody else's; a source that nobody owns is nobody's to see (OBX-2)."""
    await own(outbox, "shop", logins.names[PRODUCER])
    await own(outbox, "bank", logins.names["bank"])
    await own(outbox, "gone", "no such role")
    shop = {await outbox.insert(), await outbox.failed(), (await outbox.held()).id}
    money = await outbox.insert(source="bank", payload={"secret": "canary"})
    for source in ("open", "gone", "Shop", "shop2"):
        await outbox.insert(source=source)
    assert {row["id"] for row in await producer.connection.fetch("SELECT * FROM core.my_outbox")} == shop
    assert {row["id"] for row in await bank.connection.fetch("SELECT * FROM core.my_outbox")} == {money}
    assert await producer.connection.fetch("SELECT FROM core.my_outbox WHERE source = 'bank'") == []


async def test_membership_in_an_owning_role_is_enough(outbox: Outbox, producer: Outbox) -> None:
    """A team's role may own a source (OBX-2)."""
    await own(outbox, "shop", PRODUCER)
    await outbox.insert()
    assert await producer.value("SELECT count(*) FROM core.my_outbox") == 1


async def test_a_leaky_function_learns_nothing_of_others_rows(outbox: Outbox, producer: Outbox, logins: Logins) -> None:
    """The view is a security barrier; a cheap function in WHERE is not run before its filter (S3)."""
    await own(outbox, "shop", logins.names[PRODUCER])
    await own(outbox, "bank", logins.names["bank"])
    await outbox.insert(payload={"mine": 1})
    await outbox.insert(source="bank", payload={"secret": "canary"})
    await producer.connection.execute(
        """CREATE FUNCTION pg_temp.leak(jsonb) RETURNS boolean LANGUAGE plpgsql COST 0.0000001
           AS 'BEGIN RAISE NOTICE ''leaked %'', $1; RETURN true; END'"""
    )
    heard: list[str] = []
    producer.connection.add_log_listener(lambda _connection, message: heard.append(str(message)))
    assert await producer.value("SELECT count(*) FROM core.my_outbox WHERE pg_temp.leak(payload)") == 1
    assert [text for text in heard if "mine" in text]
    assert not [text for text in heard if "canary" in text]


async def test_another_roles_source_is_out_of_reach(
    outbox: Outbox, producer: Outbox, bank: Outbox, logins: Logins
) -> None:
    """Cancel, reschedule and holding a key are refused; a source that nobody owns is open (OBX-2)."""
    await own(outbox, "bank", logins.names["bank"])
    money = Publisher("bank")
    async with bank.connection.transaction():
        envelope = await money.publish(bank.connection, EVENT, {}, key="k", delay=60)
    before = await outbox.row(envelope.event_id)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: money.cancel(producer.connection, "k"),
        lambda: money.reschedule(producer.connection, "k", delay=0),
        lambda: money.publish(producer.connection, EVENT, {}, key="k", on_duplicate="reschedule"),
        lambda: money.publish(producer.connection, EVENT, {}, key="new"),
    ]
    for call in calls:
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source bank belongs to another role"):
            async with producer.connection.transaction():
                await call()
    assert await outbox.row(envelope.event_id) == before
    async with producer.connection.transaction():
        await Publisher("open").publish(producer.connection, EVENT, {}, key="k")
    async with bank.connection.transaction():
        assert await money.cancel(bank.connection, "k")
        assert await Publisher("open").cancel(bank.connection, "k")


async def test_a_role_that_was_set_counts_and_not_the_login_behind_it(
    outbox: Outbox, logins: Logins, postgres_server: SessionServer
) -> None:
    """A pool that logs in once and sets a role for each tenant must not mix their sources up (OBX-2)."""
    shop, bank = logins.names[PRODUCER], logins.names["bank"]
    await own(outbox, "shop", shop)
    await own(outbox, "bank", bank)
    admin = postgres_server.admin()
    admin.execute(f"CREATE ROLE login_pool LOGIN PASSWORD '{logins.password}'")
    admin.execute(f"GRANT {shop}, {bank} TO login_pool")
    pool = await asyncpg.connect(logins.dsn_of("login_pool"))
    try:
        async with pool.transaction():
            await pool.execute(f"SET LOCAL ROLE {bank}")
            await Publisher("bank").publish(pool, EVENT, {}, key="k", delay=60)
            assert await pool.fetchval("SELECT count(*) FROM core.my_outbox") == 1
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another role"):
            async with pool.transaction():
                await pool.execute(f"SET LOCAL ROLE {shop}")
                assert await pool.fetchval("SELECT count(*) FROM core.my_outbox") == 0
                await Publisher("bank").cancel(pool, "k")
        async with pool.transaction():
            assert await Publisher("bank").cancel(pool, "k"), "the login itself is a member of both"
    finally:
        await pool.close()
        admin.execute("DROP ROLE login_pool")


async def test_a_worker_declares_schedules_of_its_own_sources(
    outbox: Outbox, worker: Outbox, bank: Outbox, logins: Logins
) -> None:
    """Not those of another role's source, nor under the name of one; nor does it fire them (OBX-2, IDM-4)."""
    await own(outbox, "bank", logins.names["bank"])
    values = {
        "name": "bank.monthly", "cron": None, "timezone": None, "every": timedelta(hours=1), "missed": "latest",
        "event_type": EVENT, "source": "bank", "target": None, "priority": 1, "payload": "{}", "generation": 0,
        "force": True,
    }  # fmt: skip
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source bank belongs to another role"):
        await worker.call("schedule_declare", **values)
    assert await outbox.value("SELECT count(*) FROM core.schedules") == 0
    await outbox.call("schedule_declare", **values)
    before = await outbox.connection.fetchrow("SELECT * FROM core.schedules")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source bank belongs to another role"):
        await worker.call("schedule_declare", **(values | {"source": "shop"}))
    fire = {
        "name": "bank.monthly", "version": before["version"], "slots": [], "until": before["owed_after"],
        "next": before["owed_after"] + timedelta(days=3650), "generation": 0, "trace_context": None,
    }  # fmt: skip
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source bank belongs to another role"):
        await worker.call("schedule_fire", **fire)
    assert await outbox.connection.fetchrow("SELECT * FROM core.schedules") == before
    # A source that nobody owns is open, and one can have several roles.
    await worker.call("schedule_declare", **(values | {"name": "shop.hourly", "source": "shop"}))
    await own(outbox, "bank", logins.names[WORKER])
    assert (await worker.call("schedule_declare", **values))[0][0] == "unchanged"
    assert (await worker.call("schedule_fire", **fire))[0][0] is True


async def test_a_worker_declares_schedules_for_generations_that_are_known(outbox: Outbox, worker: Outbox) -> None:
    """A number that nobody has would stand against every later declaration, and take its events away (GEN-1, IDM-4)."""
    values = {
        "name": "shop.hourly", "cron": None, "timezone": None, "every": timedelta(hours=1), "missed": "latest",
        "event_type": EVENT, "source": "shop", "target": None, "priority": 1, "payload": "{}", "force": True,
    }  # fmt: skip
    for unknown in (1, 2**63 - 1, -1, None):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="is no deployment, and no worker"):
            await worker.call("schedule_declare", **values, generation=unknown)
    assert (await worker.call("schedule_declare", **values, generation=0))[0][0] == "declared"
    seen = await outbox.connection.fetchrow("SELECT * FROM core.schedules")
    fire = {
        "name": "shop.hourly", "version": seen["version"], "slots": [], "until": seen["owed_after"],
        "next": seen["owed_after"] + timedelta(hours=1), "trace_context": None,
    }  # fmt: skip
    with pytest.raises(asyncpg.InvalidParameterValueError, match="is no deployment, and no worker"):
        await worker.call("schedule_fire", **fire, generation=2**63 - 1)
    assert (await worker.call("schedule_fire", **fire, generation=0))[0][0] is True
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (7)")
    assert (await worker.call("schedule_declare", **values, generation=7))[0][0] == "declared"
    await worker.connection.execute(
        "SELECT core.worker_beat(gen_random_uuid(), 'new', 'host', 1, '1.0', 9, '{outbox_gen_9}', '{}')"
    )
    assert (await worker.call("schedule_declare", **values, generation=9))[0][0] == "declared"
    with pytest.raises(asyncpg.InvalidParameterValueError, match="generation 10 is no deployment"):
        await worker.call("schedule_declare", **values, generation=10)


# --- names that shadow ours ---

# Every function, operator and table name that our functions use, with a body that betrays itself.
DECOYS = """
CREATE SCHEMA {schema};
CREATE TABLE {schema}.outbox (LIKE pg_catalog.pg_class);
CREATE TABLE {schema}.subscriptions_version (one boolean, version bigint);
CREATE TABLE {schema}.subscriptions (handler_name text);
CREATE TABLE {schema}.event_handled (handler_name text);
CREATE FUNCTION {schema}.now() RETURNS timestamptz LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy now'; END$$;
CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.gen_random_uuid() RETURNS uuid LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy uuid'; END$$;
CREATE FUNCTION {schema}.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy notify'; END$$;
CREATE FUNCTION {schema}.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.current_setting(text) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.current_setting(text, boolean) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.pg_has_role(name, oid, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION {schema}.jsonb_typeof(jsonb) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy typeof'; END$$;
CREATE FUNCTION {schema}.hashtextextended(text, bigint) RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.texteq(text, text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy'; END$$;
CREATE FUNCTION {schema}.concat(text, text) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy concat'; END$$;
CREATE FUNCTION {schema}.pg_try_advisory_xact_lock_shared(bigint) RETURNS boolean LANGUAGE plpgsql
    AS $$BEGIN RAISE 'decoy lock'; END$$;
CREATE FUNCTION {schema}.md5(text) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy md5'; END$$;
CREATE FUNCTION {schema}.betray(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy ='; END$$;
CREATE FUNCTION {schema}.betray(text, text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'decoy ='; END$$;
CREATE OPERATOR {schema}.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = {schema}.betray);
CREATE OPERATOR {schema}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {schema}.betray);
CREATE OPERATOR {schema}.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = {schema}.betray);
CREATE DOMAIN {schema}.uuid AS text;
CREATE DOMAIN {schema}.text AS pg_catalog.int4;
"""


@pytest.mark.parametrize("schema", ["evil", "pg_temp"])
async def test_names_that_shadow_ours_change_nothing(
    outbox: Outbox, logins: Logins, postgres_server: SessionServer, schema: str
) -> None:
    """A user with functions, operators, types and tables of the same names, in front of its search path (S1)."""
    decoys = DECOYS.format(schema=schema)
    if schema == "pg_temp":
        decoys = decoys.replace("CREATE SCHEMA pg_temp;\n", "")
    admin = postgres_server.admin()
    name = urlsplit(logins.dsn_of("x")).path[1:]
    admin.execute("CREATE ROLE login_evil LOGIN PASSWORD 'matrix'")
    admin.execute(f"GRANT {PRODUCER}, {WORKER}, {OPERATOR} TO login_evil")
    admin.execute(f"GRANT CREATE ON DATABASE {name} TO login_evil")
    await own(outbox, "bank", logins.names["bank"])
    connection = await asyncpg.connect(logins.dsn_of("login_evil"))
    evil = Outbox(connection)
    try:
        await connection.execute(decoys)
        await connection.execute(f"SET search_path = {schema}, pg_catalog, core")
        with pytest.raises(asyncpg.RaiseError, match="decoy now"):
            await connection.execute("SELECT evil.now()" if schema == "evil" else "SELECT pg_temp.now()")
        insert = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')"
        for _ in range(4):
            await connection.execute(insert)
        # Literals instead of casts: what stands in the caller's own statement is the caller's own affair.
        call = connection.fetch
        await call("SELECT core.subscribe('billing', 'billing.charge_card', '{order.placed}')")
        version = await outbox.subscriptions_version()
        zero = "0" * 32
        claim = f"""SELECT * FROM core.outbox_claim('{zero}', '{zero}', '1 min', {version}, 'outbox_default', 0,
                    '{{{LANE}}}', '{{1}}', '{{billing.charge_card}}', '{{3}}', '{{0001-01-02}}', '{{{zero}}}')"""
        rows = await call(claim)
        assert len(rows) == 3
        held = [(str(row["id"]), zero) for row in rows]
        fences = [f"'{{{id}}}', '{{{token}}}'" for id, token in held]
        names = f"'{{{LANE}}}', '{{billing.charge_card}}'"
        forged = f"'{{{held[0][0]}}}', '{{{'1' * 32}}}'"
        assert await call(f"SELECT core.outbox_extend({fences[0]}, '1 min')") == []
        assert len(await call(f"SELECT core.outbox_deliver({forged}, {names}, true, 'delivered')")) == 1
        assert await call(f"SELECT core.outbox_deliver({fences[0]}, {names}, true, 'delivered')") == []
        fail = f"SELECT core.outbox_fail({fences[1]}, '{{billing.charge_card}}', '{{rejected}}', '{{boom}}', '{{s}}')"
        assert await call(fail) == []
        assert await call(f"SELECT core.outbox_release({fences[2]}, '{{0}}', '{{billing.charge_card}}')") == []
        assert (await call(f"SELECT core.outbox_replay('{held[1][0]}', 0, 'evil')"))[0][0] == 1
        await call("SELECT core.subscribe('mail', 'mail.thank', '{order.placed}')")
        split = f"""SELECT n FROM core.outbox_split({version + 1}, 'outbox_default', 0, '{{{LANE}}}', '{{1}}', '{{9}}',
                    '{{0001-01-02}}', '{{{zero}}}')"""
        assert (await call(split))[0][0] == 2
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="another role"):
            await call("SELECT core.outbox_cancel('bank', 'k')")
        assert await call("SELECT * FROM core.my_outbox") == []
        assert await outbox.states(rows[0]["id"], rows[1]["id"]) == ["delivered", "pending"]
        assert await outbox.value("SELECT count(*) FROM core.event_handled") == 1
        assert await evil.value(f"SELECT count(*) FROM {schema}.outbox") == 0
    finally:
        await connection.close()
        await outbox.connection.execute("DROP SCHEMA IF EXISTS evil CASCADE")
        await outbox.connection.execute("DROP OWNED BY login_evil")
        admin.execute("DROP ROLE login_evil")
