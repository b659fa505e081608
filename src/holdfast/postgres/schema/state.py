"""The state of a database compared with a release: migrations applied and pending, functions, contract."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.contract import Contract, read_contract
from holdfast.postgres.schema.ddl import MigrationRefused, transaction
from holdfast.postgres.schema.ownership import Facts, inspect
from holdfast.postgres.schema.release import Migration, Release
from holdfast.postgres.schema.trust import Trust


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
    """The migrations that a database has and lacks, and its contract; None: nothing is installed.

    `newer`: a later release has migrated the database, and it still serves this code, which leaves it as it is.
    """

    applied: tuple[AppliedMigration, ...]
    pending: tuple[Migration, ...]
    database_version: int
    code_version: int
    functions_changed: bool
    contract: Contract | None = None
    newer: bool = False

    @property
    def up_to_date(self) -> bool:
        """Whether `apply` would change nothing."""
        return not self.pending and not self.functions_changed


async def compare(connection: Any, queries: Queries, release: Release, trust: Trust | None = None) -> SchemaState:
    """Compare the database with a release; refuse a history that is not the release's.

    With `trust` a ledger is read, and then written, only where everything belongs to who is trusted.
    """
    async with transaction(connection, queries):
        facts = await inspect(connection, queries)
        if trust is not None and facts.has_ledger:
            await trust.require(connection)
        rows = await _read_ledger(connection, queries, facts) if facts.has_ledger else []
        contract = await read_contract(connection, queries, recorded=facts.has_contract) if rows else None
    lines = [AppliedMigration(**dict(row)) for row in rows]
    applied = tuple(line for line in lines if line.version > 0)
    functions = next((line.checksum for line in lines if line.version == 0), None)
    _require_same_history(queries.schema, release, applied)
    terms = release.terms
    newer = contract is not None and (len(applied) > release.version or contract.provides > terms.schema.provides)
    if newer:
        terms.require(queries.schema, contract)
    return SchemaState(
        applied=applied,
        pending=release.migrations[len(applied) :],
        database_version=len(applied),
        code_version=release.version,
        functions_changed=not newer and functions != release.functions_checksum,
        contract=contract,
        newer=newer,
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
    for line, migration in zip(applied, release.migrations, strict=False):
        if line.version == 1:
            release.terms.require_baseline(schema, line.checksum)
        if line.checksum != migration.checksum:
            raise MigrationRefused(
                f"the migration {migration} is not the text that was applied on {line.applied_at:%Y-%m-%d}",
                "the installed package is damaged or was changed: install this release again; if you develop Holdfast, "
                "restore the file as it was and put the change into a new migration",
            )
