"""Contracts: numbers by which code and schema of different releases know whether they work together.

A schema provides a contract and serves code back to an older one; code is written for a contract and works with
schemas back to an older one. Where the two ranges meet, a process starts. Texts of functions decide nothing.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from holdfast.errors import SchemaMismatch
from holdfast.installing import release_remedy
from holdfast.postgres.queries import Queries


@dataclass(frozen=True, slots=True)
class Contract:
    """What a schema promises: `provides` to the code of `release`, and back to `oldest_code`, of `oldest_release`."""

    provides: int
    oldest_code: int
    release: str
    oldest_release: str

    def __str__(self) -> str:
        return f"contract {self.provides} (holdfast {self.release})"

    @property
    def served(self) -> str:
        """The code that the schema serves, for people."""
        return f"code of contract {self.oldest_code} (holdfast {self.oldest_release}) or later"


@dataclass(frozen=True, slots=True)
class Terms:
    """What one release promises: its schema's contract, and the oldest contract its code works with."""

    schema: Contract
    oldest_schema: int

    def served_by(self, found: Contract) -> bool:
        """Whether this code is new enough for the schema that was found."""
        return self.schema.provides >= found.oldest_code

    def sufficed_by(self, found: Contract) -> bool:
        """Whether the schema that was found is new enough for this code."""
        return found.provides >= self.oldest_schema

    def require(self, schema: str, found: Contract | None) -> None:
        """Raise SchemaMismatch, with both sides and the remedy, unless the ranges meet; None: not installed."""
        if found is None:
            raise SchemaMismatch(f"{schema} (not installed)", self.wanted, apply_command(schema))
        if not self.sufficed_by(found):
            raise SchemaMismatch(f"{schema} of {found}", self.wanted, apply_command(schema))
        if not self.served_by(found):
            described = f"{schema} of {found}, which serves {found.served}"
            raise SchemaMismatch(described, self.wanted, release_remedy(found.oldest_release))

    @property
    def wanted(self) -> str:
        """The contracts that this code works with, for people."""
        older = f", or one back to {self.oldest_schema}" if self.oldest_schema < self.schema.provides else ""
        return f"{self.schema}{older}"


# Of a database that was migrated before contracts were recorded, and of a release without the file.
FIRST = Contract(1, 1, "0.1.0 preview", "0.1.0 preview")


def read_terms(folder: Traversable | None = None) -> Terms:
    """The terms in `contract.toml` of a folder laid out like `sql/`, by default the package's own."""
    file = (files("holdfast.postgres").joinpath("sql") if folder is None else folder).joinpath("contract.toml")
    if not file.is_file():
        return Terms(FIRST, oldest_schema=FIRST.provides)
    text = tomllib.loads(file.read_text(encoding="utf-8"))
    provides, oldest, releases = text["provides"], text["oldest_code"], text["releases"]
    schema = Contract(provides, oldest, releases[str(provides)], releases[str(oldest)])
    return Terms(schema, text["oldest_schema"])


async def read_contract(connection: Any, queries: Queries, *, recorded: bool) -> Contract:
    """The contract of an installed schema. `recorded` says whether it has the table."""
    row = await connection.fetchrow(queries.asyncpg("read_contract").sql) if recorded else None
    return Contract(**dict(row)) if row else FIRST


def apply_command(schema: str) -> str:
    """The command that brings a schema forward."""
    return "holdfast migrate apply" + ("" if schema == "core" else f" --schema {schema}")
