"""doctor for logins that may do little, and for installations without roles (OBX-7, OPS-5)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest
from psycopg import sql

from holdfast.postgres import doctor, migrate
from holdfast.postgres.doctor import Part, Report
from tests.servers import SessionServer

# For no owner of the schema: only an administrator may.
MONITOR = "-- as an administrator:\nGRANT pg_monitor TO {};"
OPERATE = "-- as an administrator:\nGRANT holdfast_operator TO {};"

pytestmark = pytest.mark.both_postgres

PASSWORD = "visitor-password"
_numbers = itertools.count(1)


class Visitor:
    """A login that starts with no right at all."""

    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self.name = f"visitor_{next(_numbers)}"

    def as_admin(self, text: str, database: str = "") -> None:
        dsn = database or self._server.server.dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL(text).format(me=sql.Identifier(self.name)))  # type: ignore[arg-type]

    def dsn(self, dsn: str) -> str:
        parts = urlsplit(dsn)
        return f"postgresql://{self.name}:{PASSWORD}@{parts.hostname}:{parts.port}{parts.path}"

    async def examine(self, dsn: str, *, only: Part | None = None) -> Report:
        async with connected(self.dsn(dsn)) as connection:
            return await doctor.examine(connection, only=only)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def visitor(postgres_server: SessionServer) -> Iterator[Visitor]:
    visitor = Visitor(postgres_server)
    visitor.as_admin(f"CREATE ROLE {{me}} LOGIN PASSWORD '{PASSWORD}'")
    yield visitor
    visitor.as_admin("DROP ROLE {me}")


def told(report: Report) -> dict[str, str]:
    """Which checks could not look, by what would help."""
    assert {finding.code for finding in report.findings} <= {"could-not-look"}
    spots: dict[str, list[str]] = {}
    for finding in report.findings:
        spots.setdefault(finding.remedy, []).append(finding.object)
    return {remedy: ", ".join(objects) for remedy, objects in spots.items()}


async def test_a_login_without_rights_is_told_what_it_lacks(dsn: str, visitor: Visitor) -> None:
    """It says what it could not look at, and which grant would help; the schema is compared all the same (OPS-5)."""
    report = await visitor.examine(dsn)
    spots = told(report)
    assert set(spots) == {MONITOR.format(visitor.name), OPERATE.format(visitor.name)}
    assert spots[MONITOR.format(visitor.name)] == "sessions, standbys, inbox"
    unseen = set(spots[OPERATE.format(visitor.name)].split(", "))
    assert unseen == {
        "broker-lag", "broker-names", "broker-settings",
        "release", "listeners", "generations", "channels", "handlers", "routes", "routing", "leases", "single-rows",
        "keys", "schedules", "slots", "declarations", "sources", "locks", "clock-steps", "workers",
        "rollup", "growth", "weekly-times", "weekly-failures",
        "partitions", "partitions-ahead", "partitions-conversion", "partitions-kept", "relays", "takers",
    }  # fmt: skip
    assert set(report.passed) == set(report.checks) - unseen - {"sessions", "standbys", "inbox"}
    drift, health = report.of("problem")
    assert drift.object == "release, partitions" and "generations" in health.object
    assert [finding.object for finding in report.of("warning")] == ["sessions, standbys, inbox"], "not all may see them"
    assert not (await visitor.examine(dsn, only="health")).healthy, "nobody has looked"
    assert all(finding.what.startswith("could not check ") for finding in report.findings)


async def test_drift_is_named_to_everybody(dsn: str, conn: asyncpg.Connection, visitor: Visitor) -> None:
    """The catalogs are open to all (OBX-3)."""
    await conn.execute("ALTER TABLE core.plans DROP CONSTRAINT plans_state")
    await conn.execute("GRANT SELECT ON core.outbox TO PUBLIC")
    problems = {finding.code for finding in (await visitor.examine(dsn)).of("problem")}
    assert problems == {"constraint-missing", "grant-extra", "could-not-look"}


async def test_the_remedies_open_its_eyes(dsn: str, visitor: Visitor) -> None:
    """An operator with pg_monitor sees everything; a worker does not (OPS-5)."""
    visitor.as_admin("GRANT holdfast_worker TO {me}")
    worker = told(await visitor.examine(dsn))
    assert "release" not in ", ".join(worker.values()).split(", "), "every role may read the ledger"
    assert "generations" in worker[OPERATE.format(visitor.name)]
    visitor.as_admin("GRANT holdfast_operator TO {me}")
    report = await visitor.examine(dsn)
    assert set(told(report)) == {MONITOR.format(visitor.name)} and report.healthy
    visitor.as_admin("GRANT pg_monitor TO {me}")
    report = await visitor.examine(dsn)
    assert report.findings == ()
    assert report.passed == report.checks


async def test_an_installation_without_roles(empty_dsn: str, visitor: Visitor, postgres_server: SessionServer) -> None:
    """Everything belongs to one login; nothing is missing, and no role is asked for (OBX-7)."""
    database = urlsplit(empty_dsn).path.strip("/")
    visitor.as_admin(f"GRANT CREATE ON DATABASE {database} TO {{me}}")
    try:
        await migrate.apply(visitor.dsn(empty_dsn), roles="never")
        report = await visitor.examine(empty_dsn)
        assert told(report) == {MONITOR.format(visitor.name): "sessions, standbys, inbox"}
        assert report.owner == visitor.name

        async with connected(empty_dsn) as admin:
            await admin.execute("GRANT EXECUTE ON FUNCTION core.uuid7() TO PUBLIC")
            await admin.execute("GRANT SELECT ON core.outbox TO pg_monitor")
            await admin.execute("ALTER TABLE core.workers OWNER TO CURRENT_USER")
            found = {(finding.severity, finding.code) for finding in (await doctor.examine(admin)).findings}
            assert found == {
                ("problem", "grant-extra"), ("warning", "grant-foreign"), ("problem", "owner-other"),
            }  # fmt: skip
            await admin.execute(f"ALTER TABLE core.workers OWNER TO {visitor.name}")
    finally:
        visitor.as_admin("DROP OWNED BY {me}", empty_dsn)


async def test_a_schema_that_another_login_owns(empty_dsn: str, visitor: Visitor) -> None:
    """Without roles only the owner sees the events (OBX-7)."""
    async with connected(empty_dsn) as admin:
        await migrate.apply(empty_dsn, roles="never")
        owner = await admin.fetchval("SELECT current_user")
    assert f"run it as {owner}, who owns them" in told(await visitor.examine(empty_dsn))
