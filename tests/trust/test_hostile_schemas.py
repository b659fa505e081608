"""Whoever installs Holdfast runs nothing that another login has left where it is installed."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import asyncpg
import pytest

from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres import migrate
from holdfast.postgres.schema.migrate import MigrationRefused
from holdfast.postgres.schema.ownership import RolesMode
from tests.servers import SessionServer

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

_numbers = itertools.count(1)

LEDGER = """CREATE TABLE core.migrations (
    version int PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(), applied_by text NOT NULL DEFAULT current_user)"""


@pytest.fixture(scope="module")
def cluster(postgres_server: SessionServer) -> Iterator[EmbeddedPostgres]:
    """Roles belong to a whole cluster, so tests about them have one of their own."""
    settings = {"fsync": "off", "full_page_writes": "off"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        yield server


@dataclass
class Place:
    """An empty database in which the login `evil`, and a deployer, may create schemas."""

    server: EmbeddedPostgres
    database: str
    evil: str
    deployer: str

    @property
    def dsn(self) -> str:
        return self.server.database_dsn(self.database)

    def dsn_of(self, login: str) -> str:
        parts = urlsplit(self.dsn)
        return f"postgresql://{login}:pw@{parts.hostname}:{parts.port}/{self.database}"

    @asynccontextmanager
    async def session(self, login: str | None = None) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.dsn if login is None else self.dsn_of(login))
        try:
            yield connection
        finally:
            await connection.close()

    async def run(self, script: str, login: str | None = None) -> None:
        async with self.session(login) as connection:
            await connection.execute(re.sub(r"\bevil\b", self.evil, script))

    async def is_superuser(self) -> bool:
        async with self.session() as admin:
            return bool(await admin.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = $1", self.evil))


@pytest.fixture
async def place(cluster: EmbeddedPostgres) -> AsyncIterator[Place]:
    number = next(_numbers)
    place = Place(cluster, f"shop_{number}", f"evil_{number}", f"deployer_{number}")
    admin = await asyncpg.connect(cluster.dsn)
    await admin.execute(f"CREATE DATABASE {place.database}")
    for login in (place.evil, place.deployer):
        await admin.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'pw'")
        await admin.execute(f"GRANT CREATE ON DATABASE {place.database} TO {login}")
    yield place
    await admin.execute(f"DROP DATABASE {place.database} WITH (FORCE)")
    holdfast = await admin.fetch("SELECT rolname FROM pg_roles WHERE rolname ~ '^holdfast_'")
    for login in (*(row[0] for row in holdfast), place.evil, place.deployer):
        await admin.execute(f"DROP ROLE {login}")
    await admin.close()


TAKE_OVER = """CREATE FUNCTION core.t() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RESET ROLE; ALTER ROLE evil SUPERUSER; RETURN NEW; END $$;
CREATE TRIGGER t BEFORE INSERT ON core.migrations FOR EACH ROW EXECUTE FUNCTION core.t();"""


@pytest.mark.parametrize("roles", ["auto", "always", "never"])
async def test_a_planted_ledger_is_refused_before_anything_of_it_runs(place: Place, roles: RolesMode) -> None:
    """An administrator is told whose schema it is, and nothing is left behind (SEC-1)."""
    await place.run(f"CREATE SCHEMA core; {LEDGER}; {TAKE_OVER}", place.evil)
    with pytest.raises(MigrationRefused, match=f"the schema core belongs to {place.evil}") as refused:
        await migrate.apply(place.dsn, roles=roles)
    assert f"--trusted-role {place.evil}" in refused.value.remedy
    with pytest.raises(MigrationRefused, match=r"table core\.migrations.* has a trigger"):
        await migrate.apply(place.dsn, roles=roles, trusted_roles=[place.evil])
    async with place.session() as admin:
        with pytest.raises(asyncpg.PostgresError, match="belongs to"):
            await admin.execute(migrate.printable(since=1))
    assert not await place.is_superuser()


async def test_a_deployer_does_not_migrate_in_the_schema_of_another(place: Place) -> None:
    """Neither a superuser nor one who makes roles: the right to create in a schema is no reason to trust it (SEC-1)."""
    await place.run(f"CREATE SCHEMA core; GRANT USAGE, CREATE ON SCHEMA core TO {place.deployer}", place.evil)
    with pytest.raises(MigrationRefused, match=f"belongs to {place.evil}"):
        await migrate.apply(place.dsn_of(place.deployer))
    await place.run(f"{LEDGER}; GRANT ALL ON core.migrations TO PUBLIC", place.evil)
    with pytest.raises(MigrationRefused, match=f"belongs to {place.evil}"):
        await migrate.apply(place.dsn_of(place.deployer))


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ("CREATE FUNCTION core.f() RETURNS int LANGUAGE sql AS 'SELECT 1'", r"function core\.f\(\) belongs to evil"),
        ("CREATE TYPE core.mood AS ENUM ('sad')", r"type core\.mood belongs to evil"),
        ("CREATE VIEW core.seen AS SELECT 1 AS one", r"view core\.seen belongs to evil"),
        (
            "CREATE FUNCTION core.f(int, int) RETURNS bool LANGUAGE sql AS 'SELECT true';"
            "CREATE OPERATOR core.=== (FUNCTION = core.f, LEFTARG = int, RIGHTARG = int)",
            "belongs to evil",
        ),
        ("CREATE COLLATION core.mine FROM pg_catalog.\"C\"", r"collation core\.mine belongs to evil"),
    ],
)  # fmt: skip
async def test_what_another_login_made_in_the_schema_is_named(place: Place, planted: str, named: str) -> None:
    """Objects of every kind, at the next migration (SEC-1)."""
    await migrate.apply(place.dsn)
    await place.run("GRANT USAGE, CREATE ON SCHEMA core TO evil")
    await place.run(planted, place.evil)
    with pytest.raises(MigrationRefused, match=named.replace("evil", place.evil)):
        await migrate.apply(place.dsn)
    if "TYPE" in planted:
        await migrate.apply(place.dsn, trusted_roles=[place.evil])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("CREATE RULE r AS ON INSERT TO core.migrations DO ALSO SELECT 1", "a rule"),
        ("ALTER TABLE core.contract ENABLE ROW LEVEL SECURITY", "row security"),
        ("CREATE TABLE public.child () INHERITS (core.migrations)", "a parent or a child"),
        ("ALTER TABLE core.migrations ALTER applied_by SET DEFAULT his.f()", "a default"),
    ],
)  # fmt: skip
async def test_a_ledger_that_was_changed_is_not_written(place: Place, change: str, what: str) -> None:
    """The ledger and the contract are plain tables, whoever owns them now (SEC-1)."""
    await migrate.apply(place.dsn)
    await place.run(
        "CREATE SCHEMA his; CREATE FUNCTION his.f() RETURNS text LANGUAGE sql AS $$ SELECT 'a' $$", place.evil
    )
    await place.run(change)
    with pytest.raises(MigrationRefused, match=what):
        await migrate.apply(place.dsn)


async def test_a_trigger_of_another_login_on_a_table_of_ours_is_refused(place: Place) -> None:
    """The privilege TRIGGER is enough to put one there (SEC-1)."""
    await migrate.apply(place.dsn)
    await place.run(
        "GRANT USAGE ON SCHEMA core TO evil; GRANT TRIGGER ON core.sources TO evil; "
        "CREATE SCHEMA his AUTHORIZATION evil"
    )
    await place.run(
        """CREATE FUNCTION his.t() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
           CREATE TRIGGER t BEFORE INSERT ON core.sources FOR EACH ROW EXECUTE FUNCTION his.t()""",
        place.evil,
    )
    with pytest.raises(MigrationRefused, match=f"calls a function that belongs to {place.evil}"):
        await migrate.apply(place.dsn)


@pytest.mark.parametrize("kind", ["TYPE core.mood AS ENUM ('sad')", 'COLLATION core.mine FROM pg_catalog."C"'])
async def test_a_schema_that_holds_anything_is_not_ours(place: Place, kind: str) -> None:
    """Not only tables and functions count, whoever owns them (SEC-1)."""
    await place.run(f"CREATE SCHEMA core; CREATE {kind}")
    with pytest.raises(MigrationRefused, match="objects that are not Holdfast's"):
        await migrate.apply(place.dsn)


async def test_rights_in_an_empty_schema_do_not_outlive_the_installation(place: Place) -> None:
    """What was granted before the first migration goes, and the right to create goes at every one (SEC-1)."""
    await place.run(
        "CREATE SCHEMA core; GRANT USAGE, CREATE ON SCHEMA core TO evil; GRANT ALL ON SCHEMA core TO PUBLIC"
    )
    await migrate.apply(place.dsn)
    may = "SELECT has_schema_privilege($1, 'core', 'CREATE'), has_schema_privilege($1, 'core', 'USAGE')"
    async with place.session() as admin:
        assert tuple(await admin.fetchrow(may, place.evil)) == (False, False)
        await place.run("GRANT USAGE, CREATE ON SCHEMA core TO evil")  # a reader, with a right too many
        await migrate.apply(place.dsn)
        assert tuple(await admin.fetchrow(may, place.evil)) == (False, True)


@pytest.mark.parametrize("attribute", ["LOGIN", "CREATEDB", "BYPASSRLS"])
async def test_a_role_that_somebody_made_before_is_not_adopted(place: Place, attribute: str) -> None:
    """A role that can log in, or do more than ours; the remedy, as printed, helps who made it (SEC-1)."""
    await place.run(f"CREATE ROLE holdfast_owner {attribute}")
    with pytest.raises(MigrationRefused, match=f"holdfast_owner has the attribute {attribute}") as refused:
        await migrate.apply(place.dsn)
    async with place.session() as admin:
        with pytest.raises(asyncpg.PostgresError, match="has the attribute"):
            await admin.execute(migrate.printable())
        assert not await admin.fetchval("SELECT count(*) FROM pg_namespace WHERE nspname = 'core'")
    await place.run(refused.value.remedy.partition("as an administrator: ")[2].partition(";")[0])
    await migrate.apply(place.dsn)


async def test_a_login_that_administers_a_role_is_named_to_a_superuser(place: Place) -> None:
    """It could become the owner of what is installed; with `trusted_roles` it may (SEC-1)."""
    await place.run("CREATE ROLE holdfast_operator; GRANT holdfast_operator TO evil WITH ADMIN OPTION")
    with pytest.raises(MigrationRefused, match=f"{place.evil} can give itself the role holdfast_operator") as refused:
        await migrate.apply(place.dsn)
    await migrate.apply(place.dsn, trusted_roles=[place.evil])
    await place.run(refused.value.remedy.partition("as an administrator: ")[2].partition(";")[0])
    await migrate.apply(place.dsn)


async def test_roles_that_contain_each_other_are_refused(place: Place) -> None:
    """Every producer would be an owner (SEC-1)."""
    await migrate.apply(place.dsn)
    await place.run("GRANT holdfast_owner TO holdfast_producer")
    with pytest.raises(MigrationRefused, match="holdfast_producer can give itself the role holdfast_owner"):
        await migrate.apply(place.dsn)
