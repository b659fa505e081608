"""Installing, updating and removing the schema of Holdfast. These verbs need no schema, so they take an address."""

from __future__ import annotations

from holdfast.operator.release import code_contract, code_version
from holdfast.postgres.schema.migrate import (
    AppliedMigration,
    Contract,
    Holdings,
    Migration,
    MigrationRefused,
    Removal,
    SchemaState,
    Step,
    apply,
    holdings,
    printable,
    state,
    uninstall,
)

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
    "code_contract",
    "code_version",
    "holdings",
    "printable",
    "state",
    "uninstall",
]
