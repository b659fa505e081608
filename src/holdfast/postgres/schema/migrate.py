"""Bringing a database to the schema of this release, forward only.

Migrations are numbered files, recorded in `core.migrations`. Functions and grants have no number; they are replaced as
a whole at the end of every run, in one transaction with the migrations before them, so that a worker finds the schema
of one release or of the other and nothing between them. Two processes may start at once: the second waits, and finds
nothing left to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.resources.abc import Traversable
from itertools import takewhile
from typing import Any, Literal

import asyncpg

from holdfast.errors import ConfigurationError, SchemaMismatch
from holdfast.postgres.queries import Queries, render, split
from holdfast.postgres.schema.concurrent_index import statements_for
from holdfast.postgres.schema.contract import Contract, apply_command, read_contract, read_terms
from holdfast.postgres.schema.ddl import (
    MigrationRefused,
    change,
    connect,
    is_passing,
    one_at_a_time,
    refusal,
)
from holdfast.postgres.schema.ownership import Ownership, RolesMode, decide, inspect
from holdfast.postgres.schema.release import Migration, Release, load
from holdfast.postgres.schema.state import AppliedMigration, SchemaState, compare
from holdfast.postgres.schema.trust import Trust
from holdfast.postgres.schema.uninstall import Holdings, Removal, holdings, uninstall

__all__ = [
    "AppliedMigration",
    "Contract",
    "Holdings",
    "Migration",
    "MigrationRefused",
    "Removal",
    "SchemaState",
    "Step",
    "apply",
    "holdings",
    "installed_version",
    "printable",
    "require_compatible",
    "state",
    "uninstall",
]


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
        return await compare(connection, queries, release)


async def apply(
    dsn: str,
    *,
    schema: str = "core",
    roles: RolesMode = "auto",
    trusted_roles: Collection[str] = (),
    on_step: OnStep | None = None,
    source: Traversable | None = None,
) -> list[Migration]:
    """Apply what is pending, and return it. Safe to run from several processes at once.

    `roles="auto"` gives the schema to the NOLOGIN role holdfast_owner where this login can arrange that, and
    otherwise keeps everything with this login; `"always"` refuses to do without, `"never"` does without.

    A schema that belongs to another login, or has something in it that does, is refused unless that login is in
    `trusted_roles`: what it has put there would run with the rights of this one.
    """
    queries, release = Queries(schema), load(source)
    trust = Trust(queries, trusted_roles)
    notify = on_step or (lambda _step: None)
    async with _connected(dsn) as connection:
        waiting = Step("wait", "another schema change is running, waiting for it to end")
        async with one_at_a_time(connection, queries, lambda: notify(waiting)) as direct:
            found = await compare(connection, queries, release, trust)  # refuses before anything is changed
            if found.newer:
                notify(Step("hint", f"schema {schema} is of {found.contract}, and serves this release too"))
                return []
            runner = _Runner(connection, queries, release, trust, notify, direct)
            await runner.prepare_schema(roles)
            return await runner.migrate()


def installed_version() -> int:
    """Return the number of the last migration of this release."""
    return load().version


def printable(
    schema: str = "core",
    *,
    roles: bool = True,
    since: int = 0,
    to: int | None = None,
    trusted_roles: Collection[str] = (),
    source: Traversable | None = None,
) -> str:
    """Everything `apply` would run, as one script for review, psql, Alembic or Django's RunSQL.

    `since` leaves out the migrations up to that number, and `to` those after it, with the functions and grants, which
    are those of the last migration. The script records what it applies, so that `holdfast migrate status` knows
    afterwards. It begins no transaction: run it in one. It refuses what `apply` refuses, unless the login that owns it
    is in `trusted_roles`.
    """
    queries, release = Queries(schema), load(source)
    if not 0 <= since <= release.version:
        raise ConfigurationError("since", f"is {since}", f"name a migration of this release: 0 to {release.version}")
    last = release.version if to is None else to
    parts = [
        f"-- Holdfast, schema {schema}, version {last}. Run it in one transaction, for example:\n"
        "--   psql --single-transaction --set ON_ERROR_STOP=1 --file <this file>"
    ]
    parts.append(Trust(queries, trusted_roles).printed())
    if roles:
        parts.append(queries.script("roles.sql"))
        parts.append(queries.script("grant_owner.sql"))
    if since > 0:
        parts.append(queries.script("trusted.sql"))
    if since == 0:
        parts.append(queries.asyncpg("create_owned_schema" if roles else "create_schema").sql + ";")
    elif roles:
        parts.append(queries.script("change_owner.sql"))
    if roles:
        parts.append(queries.asyncpg("become_owner_for_session").sql + ";")
    parts.append(queries.script("revoke_strangers.sql"))
    parts.append(queries.script("ledger.sql"))
    parts.append(queries.script("trusted.sql"))
    if since > 0:
        parts.append(_filled_in(queries, "tell_baseline", {"baseline": release.terms.schema.baseline}))
        parts.append(queries.script("baseline.sql"))
    for migration in release.migrations[since:last]:
        text = migration.sql
        if not migration.transactional:
            # As the rest of the script, in its transaction: an index then keeps producers waiting while it is built.
            text = text.replace(" CONCURRENTLY", "")
        parts.append(f"-- Migration {migration}\n{render(text, schema)}")
        parts.append(_record(queries, migration.version, migration.name, migration.checksum))
    if last == release.version:
        parts.extend(render(script, schema) for script in release.functions)
        parts.append(_record(queries, 0, "functions", release.functions_checksum))
        parts.append(_filled_in(queries, "record_contract", asdict(release.terms.schema)))
        parts.append(render(release.grants, schema) if roles else queries.script("revoke_public.sql"))
    if roles:
        parts.append(queries.asyncpg("become_oneself").sql + ";")
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


async def require_compatible(
    connection: Any, schema: str = "core", *, source: Traversable | None = None, role: str = "worker"
) -> None:
    """Raise SchemaMismatch unless the contract of the database and that of this code work together.

    `role` is what the caller is: a login without any role of Holdfast is told to get that one.
    """
    queries, terms = Queries(schema), read_terms(source)
    facts = await inspect(connection, queries)
    if facts.has_ledger and not facts.may_read_ledger:
        raise MigrationRefused(
            f"{facts.login} may not read {schema}.migrations",
            f"use a login that has the role holdfast_{role}, or as an administrator: "
            f"GRANT holdfast_{role} TO {facts.login}",
        )
    found = await read_contract(connection, queries, recorded=facts.has_contract) if facts.has_ledger else None
    if facts.has_ledger and found is None:
        raise SchemaMismatch(f"{schema}, which records no contract", terms.wanted, apply_command(schema))
    terms.require(schema, found)


def _record(queries: Queries, version: int, name: str, checksum: str) -> str:
    return _filled_in(queries, "record_migration", {"version": version, "name": name, "checksum": checksum})


def _filled_in(queries: Queries, name: str, values: Mapping[str, int | str]) -> str:
    return queries.asyncpg(name).filled_in(values) + ";"


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[Any]:
    connection = await connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


class _Runner:
    """One run of `apply`, holding the lock."""

    def __init__(
        self, connection: Any, queries: Queries, release: Release, trust: Trust, notify: OnStep, direct: bool
    ) -> None:
        self.connection = connection
        self.queries = queries
        self.release = release
        self.trust = trust
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
            await self.trust.require(self.connection)
            if ownership.roles:
                await self._script("roles.sql")
                await self._script("grant_owner.sql")
            if ownership.create_schema:
                await self._run("create_owned_schema" if ownership.roles else "create_schema")
            if ownership.change_owner:
                await self._script("change_owner.sql")
            await self._become_owner()
            await self._script("revoke_strangers.sql")
            await self._script("ledger.sql")
            await self.trust.require(self.connection)  # a ledger that another session made this moment
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
            f"runs the output of: holdfast migrate print --since {self.release.version} --trusted-role {login}{option} "
            f"({login} then keeps its rights but for migrating, which needs GRANT holdfast_owner TO {login})",
        )

    async def migrate(self) -> list[Migration]:
        """Apply what is pending, then functions, grants and the contract, in as few transactions as possible."""
        done: list[Migration] = []
        while True:
            # Asked again each time: behind a pooler another run may be taking turns with this one.
            current = await compare(self.connection, self.queries, self.release, self.trust)
            if current.newer:
                return done
            if current.pending and not current.pending[0].transactional:
                applied = [current.pending[0]]
                self._notify_all("apply", "applying", applied)
                await self._apply_without_transaction(applied[0])
                finished = False
            else:
                applied, finished = await self._apply_together(current)
            self._notify_all("applied", "applied", applied)
            done += applied
            if finished:
                return done

    async def _apply_together(self, current: SchemaState) -> tuple[list[Migration], bool]:
        """Apply the next migrations that can share a transaction, and the functions if none is left after them."""
        group = list(takewhile(lambda migration: migration.transactional, current.pending))
        last = len(group) == len(current.pending)
        turn = True

        async def work() -> None:
            nonlocal turn
            turn = await compare(self.connection, self.queries, self.release, self.trust) == current
            if turn:
                await self._become_owner()
                for migration in group:
                    await self._apply(migration)
                if last:
                    await self._replace_functions_and_grants()

        self._notify_all("apply", "applying", group)
        if last:
            self.notify(Step("functions", "functions and grants"))
        names = [str(migration) for migration in group] + ["functions and grants"] * last
        await self._change(" to ".join(dict.fromkeys((names[0], names[-1]))), work, roles=True)
        return (group, last) if turn else ([], False)

    def _notify_all(self, action: Literal["apply", "applied"], verb: str, migrations: list[Migration]) -> None:
        for migration in migrations:
            self.notify(Step(action, f"{verb} {migration}", migration))

    async def _apply(self, migration: Migration) -> None:
        try:
            await self._execute(render(migration.sql, self.queries.schema))
        except asyncpg.PostgresError as error:
            if is_passing(error):
                raise
            raise refusal(f"migration {migration}", error) from error
        await self._record(migration.version, migration.name, migration.checksum)

    async def _apply_without_transaction(self, migration: Migration) -> None:
        if not self.direct:
            raise MigrationRefused(
                f"migration {migration} cannot run through a connection pooler",
                "use the address of the Postgres server itself",
            )
        await self._run("begin_without_transaction")
        if self.roles:
            await self._run("become_owner_for_session")
        try:
            for written in split(render(migration.sql, self.queries.schema)):
                for statement in await statements_for(self.connection, self.queries, written):
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

    async def _replace_functions_and_grants(self) -> None:
        for script in self.release.functions:
            await self._execute(render(script, self.queries.schema))
        await self._record(0, "functions", self.release.functions_checksum)
        statement = self.queries.asyncpg("record_contract")
        await self.connection.execute(statement.sql, *statement.bind(asdict(self.release.terms.schema)))
        if self.roles:
            await self._execute(render(self.release.grants, self.queries.schema))
        else:
            await self._script("revoke_public.sql")

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
