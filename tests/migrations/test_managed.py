"""Managed Postgres, where nobody is a superuser and perhaps nobody may create roles (OBX-7, OBX-2)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import MigrationError
from holdfast.postgres import migrate
from holdfast.postgres.schema.migrate import Step
from holdfast.postgres.schema.ownership import ROLES

pytestmark = pytest.mark.both_postgres

_numbers = itertools.count(1)


@dataclass
class Managed:
    """A database on a server that somebody else runs, and the login we were given."""

    server: EmbeddedPostgres
    database: str
    login: str

    @property
    def dsn(self) -> str:
        return self.dsn_of(self.database)

    def dsn_of(self, database: str) -> str:
        parts = urlsplit(self.server.database_dsn(database))
        return f"postgresql://{self.login}:app-password@{parts.hostname}:{parts.port}/{database}"

    @property
    def admin_dsn(self) -> str:
        return self.server.database_dsn(self.database)

    def as_admin(self, *statements: str) -> None:
        with psycopg.connect(self.admin_dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def read(self, sql: str) -> list[Any]:
        with psycopg.connect(self.admin_dsn, autocommit=True) as connection:
            return [row[0] for row in connection.execute(sql.encode()).fetchall()]

    def owners(self) -> set[str]:
        """Who owns the schema and the things in it."""
        return set(
            self.read(
                """SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = 'core'
                   UNION SELECT pg_get_userbyid(relowner)::text FROM pg_class
                         WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'core')
                   UNION SELECT pg_get_userbyid(proowner)::text FROM pg_proc
                         WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'core')"""
            )
        )

    def roles(self) -> set[str]:
        return set(self.read("SELECT rolname::text FROM pg_roles WHERE rolname ~ '^holdfast_'"))


@pytest.fixture
def managed(roles_cluster: EmbeddedPostgres) -> Iterator[Managed]:
    """The login has no attribute at all, and owns nothing; each test grants what its provider would."""
    number = next(_numbers)
    place = Managed(roles_cluster, f"shop_{number}", f"app_{number}")
    with psycopg.connect(roles_cluster.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {place.login} LOGIN PASSWORD 'app-password'".encode())
        admin.execute(f"CREATE DATABASE {place.database}".encode())
    yield place
    with psycopg.connect(roles_cluster.dsn, autocommit=True) as admin:
        left = admin.execute(
            "SELECT datname FROM pg_database WHERE datname = %s OR datname = %s",
            [place.database, place.database + "_b"],
        ).fetchall()
        for (name,) in left:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        present = admin.execute("SELECT rolname FROM pg_roles WHERE rolname ~ '^holdfast_'").fetchall()
        # Since Postgres 16 what a role granted hangs on it: the roles go before the login that made them.
        for name in (*(role for (role,) in present), place.login):
            admin.execute(f"DROP ROLE {name}".encode())


async def publish(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')")
        count: int = await connection.fetchval("SELECT count(*) FROM core.outbox")
        return count
    finally:
        await connection.close()


async def test_with_createrole_the_schema_belongs_to_a_role_that_cannot_log_in(managed: Managed) -> None:
    """Owner NOLOGIN, no superuser needed; from Postgres 16 on CREATEROLE alone may not become it (OBX-2, S1)."""
    managed.as_admin(
        f"ALTER ROLE {managed.login} CREATEROLE",
        f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}",
    )
    assert await migrate.apply(managed.dsn)
    assert managed.roles() == set(ROLES)
    assert managed.owners() == {"holdfast_owner"}
    assert managed.read("SELECT rolname FROM pg_roles WHERE rolname ~ '^holdfast_' AND (rolcanlogin OR rolsuper)") == []
    assert (await migrate.state(managed.dsn)).up_to_date
    assert await migrate.apply(managed.dsn) == []


async def test_with_createrole_everything_can_be_removed_again(managed: Managed) -> None:
    """Uninstall takes the roles along when nothing else uses them (OBX-7)."""
    managed.as_admin(
        f"ALTER ROLE {managed.login} CREATEROLE", f"ALTER DATABASE {managed.database} OWNER TO {managed.login}"
    )
    await migrate.apply(managed.dsn)
    managed.as_admin(f"GRANT holdfast_worker TO {managed.login}")  # a membership is no use of its own
    removal = await migrate.uninstall(managed.dsn)
    assert set(removal.roles_dropped) == set(ROLES)
    assert removal.roles_kept == ()
    assert managed.roles() == set()
    assert managed.owners() == set()
    assert managed.read("SELECT 1 FROM pg_default_acl") == []


async def test_roles_that_another_database_uses_are_kept(managed: Managed) -> None:
    other = managed.database + "_b"
    managed.as_admin(
        f"ALTER ROLE {managed.login} CREATEROLE",
        f"ALTER DATABASE {managed.database} OWNER TO {managed.login}",
        f"CREATE DATABASE {other} OWNER {managed.login}",
    )
    await migrate.apply(managed.dsn)
    await migrate.apply(managed.dsn_of(other))
    removal = await migrate.uninstall(managed.dsn)
    assert (removal.roles_dropped, set(removal.roles_kept)) == ((), set(ROLES))
    assert (await migrate.state(managed.dsn_of(other))).up_to_date
    assert set((await migrate.uninstall(managed.dsn_of(other))).roles_dropped) == set(ROLES)


async def test_without_createrole_everything_belongs_to_the_login(managed: Managed) -> None:
    """No CREATEROLE needed; a hint says how to add the roles later (OBX-7)."""
    managed.as_admin(f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}")
    steps: list[Step] = []
    assert await migrate.apply(managed.dsn, on_step=steps.append)
    assert managed.owners() == {managed.login}
    assert managed.roles() == set()
    hint = next(step.text for step in steps if step.action == "hint")
    assert "holdfast migrate print --since" in hint
    assert await publish(managed.dsn) == 1
    connection = await asyncpg.connect(managed.dsn)
    try:
        await migrate.require_compatible(connection)
    finally:
        await connection.close()
    assert await migrate.apply(managed.dsn) == []
    public = """SELECT proname FROM pg_proc WHERE pronamespace = 'core'::regnamespace
                AND has_function_privilege('public', oid, 'EXECUTE')"""
    assert managed.read(public) == []
    await migrate.uninstall(managed.dsn)
    assert managed.owners() == set()


async def test_an_administrator_can_add_the_roles_later(managed: Managed) -> None:
    """The grants are printable, and move an installation without roles to one with them (OBX-7)."""
    managed.as_admin(f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}")
    await migrate.apply(managed.dsn)
    await publish(managed.dsn)
    version = (await migrate.state(managed.dsn)).code_version
    managed.as_admin(migrate.printable(since=version, trusted_roles=[managed.login]))
    assert managed.owners() == {"holdfast_owner"}
    assert managed.read("SELECT count(*) FROM core.outbox") == [1]
    assert await publish(managed.dsn) == 2, "the login that owned everything was locked out"
    connection = await asyncpg.connect(managed.dsn)
    try:
        await migrate.require_compatible(connection)
        memberships = "SELECT role FROM unnest($1::text[]) role WHERE pg_has_role(role, 'USAGE')"
        held = [row["role"] for row in await connection.fetch(memberships, list(ROLES))]
    finally:
        await connection.close()
    assert held == ["holdfast_producer", "holdfast_worker", "holdfast_operator"]
    with pytest.raises(MigrationError, match=f"GRANT holdfast_owner TO {managed.login}"):
        await migrate.apply(managed.dsn)
    managed.as_admin(f"GRANT holdfast_owner TO {managed.login}")
    assert await migrate.apply(managed.dsn) == []
    assert (await migrate.state(managed.dsn)).up_to_date


async def test_always_moves_an_installation_of_ones_own_to_the_roles(managed: Managed) -> None:
    managed.as_admin(f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}")
    await migrate.apply(managed.dsn, roles="never")
    with pytest.raises(MigrationError, match="may not create the roles"):
        await migrate.apply(managed.dsn, roles="always")
    managed.as_admin(f"ALTER ROLE {managed.login} CREATEROLE")
    await migrate.apply(managed.dsn)
    assert managed.owners() == {managed.login}, "auto leaves an installation as it is"
    await migrate.apply(managed.dsn, roles="always")
    assert managed.owners() == {"holdfast_owner"}
    with pytest.raises(MigrationError, match="leave out --roles never"):
        await migrate.apply(managed.dsn, roles="never")


async def test_a_login_that_may_create_nothing_is_told_what_to_ask_for(managed: Managed) -> None:
    """The error is the sentence for the administrator (OBX-7)."""
    with pytest.raises(MigrationError) as refused:
        await migrate.apply(managed.dsn)
    assert isinstance(refused.value, migrate.MigrationRefused)
    request = refused.value.remedy.removeprefix("as an administrator: ")
    assert request == f"CREATE SCHEMA core AUTHORIZATION {managed.login}"
    managed.as_admin(request)
    assert await migrate.apply(managed.dsn)
    assert managed.owners() == {managed.login}
    assert await publish(managed.dsn) == 1


async def test_roles_that_exist_are_used_when_the_login_may_become_the_owner(managed: Managed) -> None:
    """An administrator makes the roles once, and the login needs no attribute (OBX-2)."""
    managed.as_admin(
        *(f"CREATE ROLE {role} NOLOGIN" for role in ROLES),
        f"GRANT holdfast_owner TO {managed.login}",
        f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}",
    )
    await migrate.apply(managed.dsn)
    assert managed.owners() == {"holdfast_owner"}
    removal = await migrate.uninstall(managed.dsn)
    assert set(removal.roles_kept) == set(ROLES), "they are not this login's to drop"


async def test_roles_that_exist_but_belong_to_others_are_left_alone(managed: Managed) -> None:
    managed.as_admin(
        *(f"CREATE ROLE {role} NOLOGIN" for role in ROLES),
        f"GRANT CREATE ON DATABASE {managed.database} TO {managed.login}",
    )
    await migrate.apply(managed.dsn)
    assert managed.owners() == {managed.login}
    with pytest.raises(MigrationError, match="may not become holdfast_owner"):
        await migrate.apply(managed.dsn, roles="always")


async def test_a_schema_made_for_the_owner_needs_no_right_on_the_database(managed: Managed) -> None:
    managed.as_admin(
        *(f"CREATE ROLE {role} NOLOGIN" for role in ROLES),
        f"GRANT holdfast_owner TO {managed.login}",
        "CREATE SCHEMA core AUTHORIZATION holdfast_owner",
    )
    await migrate.apply(managed.dsn)
    assert managed.owners() == {"holdfast_owner"}


async def test_another_login_may_neither_read_nor_use_it(managed: Managed) -> None:
    """Nothing is open to PUBLIC; the error names the grant that is missing (S2)."""
    await migrate.apply(managed.admin_dsn)
    for attempt in (migrate.state, migrate.uninstall):
        with pytest.raises(MigrationError, match=f"GRANT holdfast_owner TO {managed.login}"):
            await attempt(managed.dsn)
    connection = await asyncpg.connect(managed.dsn)
    try:
        with pytest.raises(MigrationError, match=r"may not read core\.migrations"):
            await migrate.require_compatible(connection)
        managed.as_admin(f"GRANT holdfast_worker TO {managed.login}")
        await migrate.require_compatible(connection)
    finally:
        await connection.close()


async def test_two_databases_of_one_cluster_may_be_set_up_at_once(managed: Managed) -> None:
    """Roles belong to the cluster, the lock on migrations to a database."""
    other = managed.database + "_b"
    managed.as_admin(f"CREATE DATABASE {other}")
    for _ in range(3):
        await asyncio.gather(migrate.apply(managed.admin_dsn), migrate.apply(managed.server.database_dsn(other)))
        await asyncio.gather(
            migrate.uninstall(managed.admin_dsn), migrate.uninstall(managed.server.database_dsn(other))
        )
    assert managed.owners() == set()
