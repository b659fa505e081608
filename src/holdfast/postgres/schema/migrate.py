"""Bringing a database to the schema this version of the code needs, forward only.

Migrations are numbered files, each applied in its own transaction and recorded in `core.migrations`. Two
processes may start at once: the second waits, and finds nothing left to do. Functions and grants have no
number; they are replaced as a whole at the end of every run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.resources.abc import Traversable
from typing import Any, Literal

import asyncpg

from holdfast.errors import SchemaMismatch
from holdfast.postgres.queries import Queries, render, split
from holdfast.postgres.schema.ddl import MigrationRefused, change, connect, one_at_a_time, transaction
from holdfast.postgres.schema.ownership import Facts, Ownership, RolesMode, decide, inspect
from holdfast.postgres.schema.release import Migration, Release, load
from holdfast.postgres.schema.uninstall import Holdings, Removal, holdings, uninstall

__all__ = [
    "AppliedMigration",
    "Holdings",
    "Migration",
    "MigrationRefused",
    "Removal",
    "SchemaState",
    "Step",
    "apply",
    "holdings",
    "printable",
    "require_current",
    "state",
    "uninstall",
]


@dataclass(frozen=True, slots=True)
class AppliedMigration:
    """A line of `core.migrations`."""

    version: int
    name: str
    checksum: str
    applied_at: datetime
    applied_by: str


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The migrations that a database has and lacks."""

    applied: tuple[AppliedMigration, ...]
    pending: tuple[Migration, ...]
    database_version: int
    code_version: int
    functions_changed: bool

    @property
    def up_to_date(self) -> bool:
        """Whether `apply` would change nothing."""
        return not self.pending and not self.functions_changed


@dataclass(frozen=True, slots=True)
class Step:
    """Something `apply` did or waits for; `text` is for people."""

    action: Literal["wait", "schema", "apply", "applied", "retry", "functions", "hint"]
    text: str
    migration: Migration | None = None


OnStep = Callable[[Step], None]


async def state(dsn: str, *, schema: str = "core", source: Traversable | None = None) -> SchemaState:
    """Compare the database with the code. Reads only; a schema that is not there has version 0."""
    queries, release = Queries(schema), load(source)
    async with _connected(dsn) as connection:
        return await _compare(connection, queries, release)


async def apply(
    dsn: str,
    *,
    schema: str = "core",
    roles: RolesMode = "auto",
    on_step: OnStep | None = None,
    source: Traversable | None = None,
) -> list[Migration]:
    """Apply what is pending, and return it. Safe to run from several processes at once.

    `roles="auto"` gives the schema to the NOLOGIN role holdfast_owner where this login can arrange that, and
    otherwise keeps everything with this login; `"always"` refuses to do without, `"never"` does without.
    """
    queries, release = Queries(schema), load(source)
    notify = on_step or (lambda _step: None)
    async with _connected(dsn) as connection:
        waiting = Step("wait", "another schema change is running, waiting for it to end")
        async with one_at_a_time(connection, queries, lambda: notify(waiting)) as direct:
            await _compare(connection, queries, release)  # refuses before anything is changed
            runner = _Runner(connection, queries, release, notify, direct)
            await runner.prepare_schema(roles)
            done = await runner.migrate()
            await runner.replace_functions_and_grants()
            return done


def printable(schema: str = "core", *, roles: bool = True, since: int = 0, source: Traversable | None = None) -> str:
    """Everything `apply` would run, as one script for review, psql, Alembic or Django's RunSQL.

    `since` leaves out the migrations up to that number. The script records what it applies, so that
    `holdfast migrate status` knows afterwards. It begins no transaction: run it in one.
    """
    queries, release = Queries(schema), load(source)
    parts = [
        f"-- Holdfast, schema {schema}, version {release.version}. Run it in one transaction, for example:\n"
        "--   psql --single-transaction --set ON_ERROR_STOP=1 --file <this file>"
    ]
    if roles:
        parts.append(queries.script("roles.sql"))
        parts.append(queries.script("grant_owner.sql"))
    if since == 0:
        parts.append(queries.asyncpg("create_owned_schema" if roles else "create_schema").sql + ";")
    elif roles:
        parts.append(queries.script("change_owner.sql"))
    if roles:
        parts.append(queries.asyncpg("become_owner_for_session").sql + ";")
    if since == 0:
        parts.append(queries.script("ledger.sql"))
    for migration in release.migrations[since:]:
        alone = "" if migration.transactional else "\n-- Each statement of this one must run outside a transaction."
        parts.append(f"-- Migration {migration}{alone}\n{render(migration.sql, schema)}")
        parts.append(_record(queries, migration.version, migration.name, migration.checksum))
    parts.extend(render(script, schema) for script in release.functions)
    parts.append(_record(queries, 0, "functions", release.functions_checksum))
    parts.append(render(release.grants, schema) if roles else queries.script("revoke_public.sql"))
    if roles:
        parts.append(queries.asyncpg("become_oneself").sql + ";")
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


async def require_current(connection: Any, schema: str = "core", *, source: Traversable | None = None) -> None:
    """Raise SchemaMismatch unless the database has exactly the version and the functions this code was written for."""
    queries, release = Queries(schema), load(source)
    facts = await inspect(connection, queries)
    if facts.has_ledger and not facts.may_read_ledger:
        raise MigrationRefused(
            f"{facts.login} may not read {schema}.migrations",
            f"as an administrator: GRANT holdfast_worker TO {facts.login} (or holdfast_producer, holdfast_operator)",
        )
    ledger = await connection.fetch(queries.asyncpg("read_ledger").sql) if facts.has_ledger else []
    checksums: dict[int, str] = {line["version"]: line["checksum"] for line in ledger}
    found = max(checksums, default=0)
    if found != release.version:
        raise _mismatch(schema, found, release.version)
    if checksums.get(0) != release.functions_checksum:
        wanted = f"version {found} with the functions of its own release"
        raise SchemaMismatch(f"{schema} version {found} with other functions", wanted, _apply_command(schema))


def _apply_command(schema: str) -> str:
    return "holdfast migrate apply" + ("" if schema == "core" else f" --schema {schema}")


def _mismatch(schema: str, found: int, expected: int) -> SchemaMismatch:
    remedy = _apply_command(schema) if found < expected else "pip install --upgrade holdfast"
    return SchemaMismatch(
        f"{schema} version {found}" if found else f"{schema} version 0 (not installed)",
        f"version {expected}",
        remedy,
    )


def _record(queries: Queries, version: int, name: str, checksum: str) -> str:
    # Names and checksums come from our own file names and hashes: [a-z0-9_] only.
    statement = queries.asyncpg("record_migration")
    sql = statement.sql
    values = {"version": str(version), "name": f"'{name}'", "checksum": f"'{checksum}'"}
    for number, parameter in enumerate(statement.parameters, start=1):
        sql = sql.replace(f"${number}", values[parameter])
    return sql + ";"


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[Any]:
    connection = await connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def _compare(connection: Any, queries: Queries, release: Release) -> SchemaState:
    async with transaction(connection, queries):
        facts = await inspect(connection, queries)
        rows = await _read_ledger(connection, queries, facts) if facts.has_ledger else []
    lines = [AppliedMigration(**dict(row)) for row in rows]
    applied = tuple(line for line in lines if line.version > 0)
    functions = next((line.checksum for line in lines if line.version == 0), None)
    _require_same_history(queries.schema, release, applied)
    return SchemaState(
        applied=applied,
        pending=release.migrations[len(applied) :],
        database_version=len(applied),
        code_version=release.version,
        functions_changed=functions != release.functions_checksum,
    )


async def _read_ledger(connection: Any, queries: Queries, facts: Facts) -> list[Any]:
    if not facts.may_read_ledger:
        if not facts.may_become_owner:
            raise MigrationRefused(
                f"{facts.login} may not read {queries.schema}.migrations",
                f"as an administrator: GRANT {facts.schema_owner} TO {facts.login}",
            )
        await connection.execute(queries.asyncpg("become_owner").sql)
    rows: list[Any] = await connection.fetch(queries.asyncpg("read_ledger").sql)
    return rows


def _require_same_history(schema: str, release: Release, applied: tuple[AppliedMigration, ...]) -> None:
    for expected, line in enumerate(applied, start=1):
        if line.version != expected:
            raise MigrationRefused(
                f"{schema}.migrations has a gap: {expected:04d} is missing before {line.version:04d}",
                "restore the table from a backup, or apply the missing file by hand and insert its line",
            )
    if len(applied) > release.version:
        raise _mismatch(schema, len(applied), release.version)
    for line, migration in zip(applied, release.migrations, strict=False):
        if line.checksum != migration.checksum:
            raise MigrationRefused(
                f"the migration {migration} is not the text that was applied on {line.applied_at:%Y-%m-%d}",
                "restore the file as it was, and put the change into a new migration",
            )


class _Runner:
    """One run of `apply`, holding the lock."""

    def __init__(self, connection: Any, queries: Queries, release: Release, notify: OnStep, direct: bool) -> None:
        self.connection = connection
        self.queries = queries
        self.release = release
        self.notify = notify
        self.direct = direct
        self.roles = False

    async def prepare_schema(self, mode: RolesMode) -> None:
        """Roles, schema and ledger. One transaction, so that a refusal leaves nothing behind."""
        step = Step("hint", "")

        async def work() -> None:
            nonlocal step
            facts = await inspect(self.connection, self.queries)
            ownership = decide(facts, mode, self.queries.schema)
            self.roles = ownership.roles
            if ownership.roles:
                await self._script("roles.sql")
                await self._script("grant_owner.sql")
            if ownership.create_schema:
                await self._run("create_owned_schema" if ownership.roles else "create_schema")
            if ownership.change_owner:
                await self._script("change_owner.sql")
            if not facts.has_ledger:
                await self._become_owner()
                await self._script("ledger.sql")
            step = self._ownership_step(facts.login, ownership)

        await self._change(f"preparing the schema {self.queries.schema}", work, roles=True)
        self.notify(step)

    def _ownership_step(self, login: str, ownership: Ownership) -> Step:
        if not ownership.why_not:
            owner = "holdfast_owner" if ownership.roles else login
            return Step("schema", f"schema {self.queries.schema}, owned by {owner}")
        option = "" if self.queries.schema == "core" else f" --schema {self.queries.schema}"
        return Step(
            "hint",
            f"no roles: {ownership.why_not}. Everything belongs to {login}. To add them later, an administrator "
            f"runs the output of: holdfast migrate print --since {self.release.version}{option}",
        )

    async def migrate(self) -> list[Migration]:
        done: list[Migration] = []
        while True:
            # Asked again each time: behind a pooler another run may be taking turns with this one.
            current = await _compare(self.connection, self.queries, self.release)
            if not current.pending:
                return done
            migration = current.pending[0]
            self.notify(Step("apply", f"applying {migration}", migration))
            if migration.transactional:
                applied = await self._apply(migration)
            else:
                applied = await self._apply_without_transaction(migration)
            if applied:
                done.append(migration)
                self.notify(Step("applied", f"applied {migration}", migration))

    async def _apply(self, migration: Migration) -> bool:
        applied = False

        async def work() -> None:
            nonlocal applied
            await self._become_owner()
            applied = await self._next_version() == migration.version
            if applied:
                await self._execute(render(migration.sql, self.queries.schema))
                await self._record(migration.version, migration.name, migration.checksum)

        await self._change(f"migration {migration}", work)
        return applied

    async def _apply_without_transaction(self, migration: Migration) -> bool:
        if not self.direct:
            raise MigrationRefused(
                f"migration {migration} cannot run through a connection pooler",
                "use the address of the Postgres server itself",
            )
        await self._run("begin_without_transaction")
        if self.roles:
            await self._run("become_owner_for_session")
        try:
            for statement in split(render(migration.sql, self.queries.schema)):
                await self.connection.execute(statement)
        except asyncpg.PostgresError as error:
            raise MigrationRefused(
                f"migration {migration}: {error} ({error.sqlstate})",
                "it runs without a transaction: drop an INVALID index that it left, and run this again",
            ) from error
        finally:
            if not self.connection.is_closed():
                await self._run("become_oneself")

        async def record() -> None:
            await self._become_owner()
            await self._record(migration.version, migration.name, migration.checksum)

        await self._change(f"recording {migration}", record)
        return True

    async def replace_functions_and_grants(self) -> None:
        async def work() -> None:
            await self._become_owner()
            for script in self.release.functions:
                await self._execute(render(script, self.queries.schema))
            await self._record(0, "functions", self.release.functions_checksum)
            if self.roles:
                await self._execute(render(self.release.grants, self.queries.schema))
            else:
                await self._script("revoke_public.sql")

        self.notify(Step("functions", "functions and grants"))
        await self._change("functions and grants", work, roles=True)

    async def _next_version(self) -> int:
        version: int = await self.connection.fetchval(self.queries.asyncpg("schema_version").sql)
        return version + 1

    async def _become_owner(self) -> None:
        if self.roles:
            await self._run("become_owner")

    async def _record(self, version: int, name: str, checksum: str) -> None:
        statement = self.queries.asyncpg("record_migration")
        values = {"version": version, "name": name, "checksum": checksum}
        await self.connection.execute(statement.sql, *statement.bind(values))

    async def _run(self, name: str) -> None:
        await self.connection.execute(self.queries.asyncpg(name).sql)

    async def _script(self, path: str) -> None:
        await self._execute(self.queries.script(path))

    async def _execute(self, script: str) -> None:
        if split(script):  # asyncpg cannot run a script of comments only
            await self.connection.execute(script)

    async def _change(self, what: str, work: Any, *, roles: bool = False) -> None:
        def on_retry(attempt: int) -> None:
            self.notify(Step("retry", f"{what}: no lock within 2 s, trying again ({attempt})"))

        await change(self.connection, self.queries, what, work, roles=roles, on_retry=on_retry)
