"""Installing, updating and removing the schema of Holdfast. These verbs need no schema, so they take an address."""

from __future__ import annotations

from holdfast.postgres.schema.migrate import (
    AppliedMigration,
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
from holdfast.postgres.schema.release import load

__all__ = [
    "AppliedMigration",
    "Holdings",
    "Migration",
    "MigrationRefused",
    "Removal",
    "SchemaState",
    "Step",
    "apply",
    "code_version",
    "holdings",
    "printable",
    "state",
    "uninstall",
]


def code_version() -> int:
    """The version of the schema that this release needs."""
    return load().version
