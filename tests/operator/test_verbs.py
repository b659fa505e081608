"""What a command says that it did is what it did, and what it recommends works when it is typed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher
from tests.commands import holdfast
from tests.logins import OPERATOR, PRODUCER, WORKER, Logins
from tests.operator.support import ACTOR, HANDLER, beat, fail, subscribe
from tests.servers import SessionServer
from tests.worker.support import Facts, running, until

pytestmark = pytest.mark.newcomer

registry = HandlerRegistry()


@registry.handler("order.placed", name=HANDLER)
async def charge(event: EventEnvelope) -> None:
    pass


ARCHIVE = """
WITH gone AS (DELETE FROM core.outbox WHERE id = ANY ($1) RETURNING *)
INSERT INTO core.archive (
    original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason, last_exception,
    event_type, event_version, occurred_at, source, content_class, channel, generation, idempotency_key, origin_id,
    priority, first_failed_at, error_signature, failure_history)
SELECT id, handler_name, payload, headers, attempts, created_at, failed_at, failure_reason, last_error,
       event_type, event_version, occurred_at, source, content_class, channel, generation, idempotency_key, origin_id,
       priority, first_failed_at, error_signature, failure_history
FROM gone ORDER BY failed_at
"""


async def archive(conn: asyncpg.Connection, count: int = 1, *, handler: str = HANDLER) -> list[UUID]:
    """Dead letters as a worker with `dead_letters="archive"` leaves them."""
    ids = await fail(conn, count, handler=handler)
    await conn.execute(ARCHIVE, ids)
    return ids


async def typed(dsn: str, *words: object) -> tuple[int, str, str]:
    """The code, the output and the errors of a command."""
    variables = {**os.environ, "HOLDFAST_DSN": dsn, "HOLDFAST_ACTOR": ACTOR}
    done = await asyncio.to_thread(partial(holdfast, *words, variables=variables))
    return done.returncode, done.stdout, done.stderr


async def discarded(conn: asyncpg.Connection) -> set[UUID]:
    return {each[0] for each in await conn.fetch("SELECT original_id FROM core.archive WHERE deleted_at IS NOT NULL")}


# --- what is in the archive ---


@pytest.mark.slow
@pytest.mark.parametrize("named", ["delivery", "event"])
async def test_what_is_archived_is_discarded_and_restored_by_its_id(
    dsn: str, conn: asyncpg.Connection, named: str
) -> None:
    """Among others in the archive, and the command says so; a dry run says the same and changes nothing (DLQ-2)."""
    ids = await archive(conn, 4)
    event, one = UUID(int=7), ids[1]
    await conn.execute("UPDATE core.archive SET origin_id = $1 WHERE original_id = $2", event, one)
    name = one if named == "delivery" else event
    assert await typed(dsn, "failed", "discard", name, "--dry-run") == (0, f"1 event would be discarded\n  {one}\n", "")
    assert await discarded(conn) == set()
    assert await typed(dsn, "failed", "discard", name, "--yes") == (0, "1 event discarded\n", "")
    assert await discarded(conn) == {one}
    assert await typed(dsn, "failed", "restore", name, "--dry-run") == (0, f"1 event would be restored\n  {one}\n", "")
    assert await typed(dsn, "failed", "restore", name) == (0, "1 event restored\n", "")
    assert await discarded(conn) == set()
    counts = [json.loads(each[0]) for each in await conn.fetch("SELECT counts FROM core.audit ORDER BY id")]
    assert counts == [{"moved": 1}, {"moved": 1}]


@pytest.mark.slow
async def test_a_number_that_is_not_in_the_archive_is_not_called_gone(dsn: str, conn: asyncpg.Connection) -> None:
    """It was replayed, or was never there; and one that is discarded comes back by the archive's own verb (DLQ-2)."""
    await archive(conn, 2)
    first, second = [each[0] for each in await conn.fetch("SELECT id FROM core.archive ORDER BY id")]
    assert (await typed(dsn, "archive", "replay", first, "--yes"))[0] == 0
    for verb in ("replay", "discard", "restore"):
        for number in (first, 4711):
            code, out, _ = await typed(dsn, "archive", verb, number, *(["--yes"] if verb != "restore" else []))
            assert code == 1
            assert out.endswith("1 event left: replayed or never there: no archived row has this number\n")
    assert (await typed(dsn, "archive", "discard", second, "--yes"))[0] == 0
    _, out, _ = await typed(dsn, "archive", "discard", second, "--yes")
    assert "holdfast archive restore" in out and "failed restore" not in out


@pytest.mark.slow
async def test_no_list_of_dead_letters_is_silent_about_the_archive(dsn: str, conn: asyncpg.Connection) -> None:
    """Each says how many there are, and the command that lists them (DLQ-2)."""
    await archive(conn, 2, handler="zed.arc")
    await archive(conn, 1)
    await subscribe(conn, "zed.arc")
    of_handler = "2 dead letters in the archive: holdfast archive list --handler zed.arc\n"
    for verb in ("list", "groups"):
        code, out, _ = await typed(dsn, "failed", verb, "--handler", "zed.arc")
        assert (code, out.endswith(of_handler)) == (0, True), out
        _, out, err = await typed(dsn, "failed", verb, "--handler", "zed.arc", "--json")
        assert json.loads(out) in (
            [],
            {"groups": [], "groups_left_out": 0, "examined": 0, "limit": 100_000, "is_more": False},
        ), out
        assert err == of_handler
        _, out, _ = await typed(dsn, "failed", verb)
        assert out.endswith("3 dead letters in the archive: holdfast archive list\n")
    for verb in ("replay", "discard"):
        code, out, _ = await typed(dsn, "failed", verb, "--handler", "zed.arc")
        assert (code, out.endswith(of_handler)) == (0, True), out
    code, _, err = await typed(dsn, "plans", "create", "--handler", "zed.arc")
    assert code == 2 and "handler=zed.arc; 2 are in the archive" in err
    assert err.endswith("try: holdfast archive list --handler zed.arc\n")
    assert "0, archived 2" in (await typed(dsn, "handlers", "list"))[1]
    code, out, _ = await typed(dsn, "handlers", "retire", "zed.arc", "--yes")
    drop = "holdfast archive discard --handler zed.arc"
    assert (code, out.splitlines()[-1].endswith(drop)) == (0, True), out
    assert await typed(dsn, *drop.split()[1:], "--yes") == (0, "2 events discarded\n", "")
    assert len(await discarded(conn)) == 2
    code, out, _ = await typed(dsn, "archive", "replay", "--handler", HANDLER, "--yes")
    assert (code, out.startswith("1 event replayed")) == (0, True)


@pytest.mark.slow
async def test_the_status_shows_a_failure_that_is_archived(dsn: str, conn: asyncpg.Connection) -> None:
    """The newest of all dead letters (DLQ-2)."""
    await fail(conn)
    await conn.execute("UPDATE core.outbox SET failed_at = failed_at - interval '1 hour'")
    await archive(conn, handler="zed.arc")
    (line,) = [each for each in (await typed(dsn, "status"))[1].splitlines() if each.startswith("newest failure")]
    assert "zed.arc" in line and line.endswith("(in the archive)")
    await conn.execute("UPDATE core.archive SET deleted_at = now()")
    newest = json.loads((await typed(dsn, "status", "--json"))[1])["newest_failure"]
    assert (newest["handler_name"], newest["archived"]) == (HANDLER, False)
    await conn.execute("UPDATE core.outbox SET last_error = NULL, traceback = NULL, failure_reason = 'max_deliveries'")
    assert f"{HANDLER}  max_deliveries: its worker died at each attempt" in (await typed(dsn, "status"))[1]


async def test_an_archived_event_names_its_group_and_its_other_deliveries(dsn: str, conn: asyncpg.Connection) -> None:
    """One of several is shown, and the others are named (DLQ-2)."""
    await archive(conn, handler="zed.arc")
    await archive(conn, 2)
    event = UUID(int=7)
    await conn.execute("UPDATE core.archive SET origin_id = $1 WHERE id < 3", event)
    code, out, _ = await typed(dsn, "archive", "show", event)
    signature = await conn.fetchval("SELECT error_signature FROM core.archive WHERE id = 2")
    assert (code, out.splitlines()[0].split()) == (0, ["group", f"{HANDLER}/{signature}"])
    assert out.endswith("the archive has another delivery of this event: holdfast archive show 1\n")
    assert "holdfast archive show" not in (await typed(dsn, "archive", "show", 3))[1]


# --- a worker without its role ---


@pytest.mark.parametrize("role", [PRODUCER, OPERATOR, "stranger"])
@pytest.mark.parametrize("processes", [1, 2])
async def test_a_worker_is_refused_a_login_without_its_role(logins: Logins, role: str, processes: int) -> None:
    """At its start, with the role that it lacks (OPS-1)."""
    login = logins.names[role]
    words = ("worker", "tests.operator.test_verbs:registry", "--processes", processes)
    code, _, err = await typed(logins.dsn_of(login), *words)
    assert code == 1, err
    grant = f"as an administrator: GRANT holdfast_worker TO {login}"
    assert err.endswith(f"try: use a login that has the role holdfast_worker, or {grant}\n")
    assert "holdfast_operator" not in err


async def test_a_right_that_is_lost_is_no_outage(logins: Logins, conn: asyncpg.Connection) -> None:
    """The log of a worker names the role, rather than a database that cannot be reached (OPS-1)."""
    facts, login = Facts(), logins.names[WORKER]
    async with running(logins.dsn_of(login), registry, facts, lease=3.0):
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.workers"), what="a worker")
        await conn.execute("REVOKE EXECUTE ON FUNCTION core.worker_alive(uuid, interval) FROM holdfast_worker")
        await until(lambda: facts.notices("permission_denied"), within=20, what="the notice")
        await conn.execute("GRANT EXECUTE ON FUNCTION core.worker_alive(uuid, interval) TO holdfast_worker")
    assert facts.notices("database_unavailable") == []
    said = facts.notices("permission_denied")[0].details
    assert said["remedy"] == "as an administrator: GRANT holdfast_worker TO the login of this worker"


# --- plans ---


@pytest.mark.slow
async def test_a_plan_that_delivers_nothing_is_not_done(dsn: str, conn: asyncpg.Connection) -> None:
    """It stops and says for whom it waits, then and later; a run after a worker has come goes on (DLQ-4)."""
    await fail(conn, 2)
    await beat(conn, "other", "mail.thank")
    options = ("--handler", HANDLER, "--canary", 0, "--rate", 100, "--patience", 1)
    assert (await typed(dsn, "plans", "create", *options))[0] == 0
    code, out, _ = await typed(dsn, "plans", "run", 1, "--yes")
    why = f"2 of {HANDLER} in generation 0, which no living worker serves"
    assert (code, f"plan 1 stopped: 2 replayed rows have no outcome after 00:00:01: {why}" in out) == (1, True), out
    assert why in (await typed(dsn, "plans", "show", 1))[1]
    assert (await typed(dsn, "plans", "resume", 1))[0] == 0
    async with running(dsn, registry):
        code, out, _ = await typed(dsn, "plans", "run", 1, "--yes")
    assert (code, "2 delivered" in out) == (0, True), out


# --- handlers and generations ---


@pytest.mark.slow
async def test_a_retired_handler_is_not_to_be_retired_again(dsn: str, conn: asyncpg.Connection) -> None:
    """What waits for it is cancelled, by the one command that the doctor names (OPS-1)."""
    await beat(conn, "other", "mail.thank")
    await subscribe(conn, "zed.old", "order.placed")
    async with conn.transaction():
        await Publisher("shop").publish(conn, "order.placed", {})
    await conn.execute("UPDATE core.outbox SET handler_name = 'zed.old'")

    async def remedy() -> str:
        report = json.loads((await typed(dsn, "doctor", "--only", "health", "--json"))[1])
        return str(next(each["remedy"] for each in report["findings"] if each["code"] == "handler-unserved"))

    cancel = "holdfast events cancel --handler zed.old"
    assert (await remedy()).endswith(f"holdfast handlers retire zed.old; and for what only it could handle: {cancel}")
    assert (await typed(dsn, "handlers", "retire", "zed.old", "--yes"))[0] == 0
    assert await remedy() == f"start the worker that has it, or, if it is gone for good: {cancel}"
    code, out, _ = await typed(dsn, *cancel.split()[1:], "--yes")
    assert (code, out) == (0, "1 event cancelled\n")


@pytest.mark.slow
async def test_why_the_current_generation_is_not_retired(dsn: str, conn: asyncpg.Connection) -> None:
    """The reason, and no text of the database; what was tried already is not the remedy (GEN-3)."""
    back = "start workers of the one before it and add --force, to go back"
    remedy = f"try: {back}; or begin another: holdfast generations begin"

    async def refused(*words: object) -> str:
        code, _, err = await typed(dsn, "generations", "retire", *words, "--yes")
        problem, tried = err.splitlines()
        assert (code, tried) == (1, remedy)
        return problem

    alone = "error: generation 0 is the current one, and there is none to go back to"
    assert await refused(0) == await refused(0, "--force") == alone
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (2), (3)")
    assert await refused(3) == "error: generation 3 is the current one"
    unserved = "and no living worker serves generation 2, which would become current"
    assert await refused(3, "--force") == f"error: generation 3 is the current one, {unserved}"
    await beat(conn, "before", HANDLER, generation=2)
    assert (await typed(dsn, "generations", "retire", 3, "--force", "--yes"))[0] == 0


async def test_the_current_generation_is_listed_as_such_without_a_worker(dsn: str, conn: asyncpg.Connection) -> None:
    """Both are said (GEN-3)."""
    async with conn.transaction():
        await Publisher("shop").publish(conn, "order.placed", {})
    assert "current, UNSERVED" in (await typed(dsn, "generations", "list"))[1]


# --- a restored backup ---


@pytest.mark.slow
@pytest.mark.parametrize("owners", [(), ("--no-owner",)])
async def test_a_restored_backup_is_put_right_by_what_the_doctor_names(
    dsn: str, empty_dsn: str, postgres_server: SessionServer, tmp_path: Path, owners: tuple[str, ...]
) -> None:
    """No right of Holdfast's own roles is to be revoked, and functions of a superuser are reported (OPS-4)."""
    tools, dump = postgres_server.binaries.bin_dir, tmp_path / "dump"
    for words in (
        (tools / "pg_dump", "--format=custom", f"--file={dump}", dsn),
        (tools / "pg_restore", *owners, "--exit-on-error", f"--dbname={empty_dsn}", dump),
    ):
        await asyncio.to_thread(subprocess.run, words, check=True)

    async def findings() -> list[dict[str, str]]:
        report = json.loads((await typed(empty_dsn, "doctor", "--only", "drift", "--json"))[1])
        return list(report["findings"])

    found = await findings()
    assert [each["code"] for each in found] == (["owner-lost"] if owners else [])
    for each in found:
        assert each["what"].endswith("functions run with the rights of postgres, a superuser")
        assert each["remedy"] == "holdfast migrate apply --roles always"
        assert (await typed(empty_dsn, *each["remedy"].split()[1:]))[0] == 0
    assert await findings() == []
