"""What this release needs of a schema. Reading it connects to nothing, and imports no driver."""

from __future__ import annotations

from holdfast.postgres.schema.contract import Contract, read_terms
from holdfast.postgres.schema.release import load


def code_version() -> int:
    """The version of the schema that this release needs."""
    return load().version


def code_contract() -> Contract:
    """The contract that the code of this release is written for, and its schema provides."""
    return read_terms().schema
