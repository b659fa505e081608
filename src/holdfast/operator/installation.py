"""Installing, updating and removing the schema of Holdfast. These verbs need no schema, so they take an address."""

from __future__ import annotations

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
from holdfast.postgres.schema.release import load

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


def code_contract() -> Contract:
    """The contract that the code of this release is written for, and its schema provides."""
    return load().terms.schema


def code_version() -> int:
    """The version of the schema that this release needs."""
    return load().version
