"""Contracts: numbers by which code and schema of different releases know whether they work together.

A schema provides a contract and serves code back to an older one; code is written for a contract and works with
schemas back to an older one. Where the two ranges meet, a process starts. Texts of functions decide nothing.

Until 1.0 a change of the schema edits migration 0001, the baseline: a schema with another baseline is refused.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

from holdfast.errors import SchemaMismatch
from holdfast.installing import release_remedy
from holdfast.postgres.queries import Queries, sql_files, sql_folder


@dataclass(frozen=True, slots=True)
class Contract:
    """What a schema promises: `provides` to the code of `release`, and back to `oldest_code`, of `oldest_release`.

    `baseline` is the checksum of the migration 0001 that made the schema.
    """

    provides: int
    oldest_code: int
    release: str
    oldest_release: str
    baseline: str

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
        self.require_baseline(schema, found.baseline)
        if not self.sufficed_by(found):
            raise SchemaMismatch(f"{schema} of {found}", self.wanted, apply_command(schema))
        if not self.served_by(found):
            described = f"{schema} of {found}, which serves {found.served}"
            raise SchemaMismatch(described, self.wanted, release_remedy(found.oldest_release))

    def require_baseline(self, schema: str, found: str) -> None:
        """Raise SchemaMismatch unless the migration 0001 with this checksum is the one of this release."""
        if found != self.schema.baseline:
            raise SchemaMismatch(f"{schema} with another migration 0001", "its own", baseline_remedy(schema))

    @property
    def wanted(self) -> str:
        """The contracts that this code works with, for people."""
        older = f", or one back to {self.oldest_schema}" if self.oldest_schema < self.schema.provides else ""
        return f"{self.schema}{older}"


def read_terms(source: Traversable | None = None) -> Terms:
    """The terms in `contract.toml` of a folder laid out like `sql/`, by default the package's own."""
    folder = source if source is not None else sql_folder()
    text = tomllib.loads(text_of(folder.joinpath("contract.toml")))
    provides, oldest, releases = text["provides"], text["oldest_code"], text["releases"]
    migrations = folder.joinpath("migrations")
    baseline = checksum_of(text_of(migrations.joinpath(sql_files(migrations)[0])))
    schema = Contract(provides, oldest, releases[str(provides)], releases[str(oldest)], baseline)
    return Terms(schema, text["oldest_schema"])


def text_of(file: Traversable) -> str:
    """The text of a file, which a checkout on another system has not changed: line endings may be its own."""
    return file.read_bytes().decode("utf-8").replace("\r\n", "\n")


def checksum_of(text: str) -> str:
    """The checksum by which the ledger knows a text."""
    return hashlib.sha256(text.encode()).hexdigest()


async def read_contract(connection: Any, queries: Queries, *, recorded: bool) -> Contract | None:
    """The contract of an installed schema; None: it has none. `recorded` says whether it has the table."""
    row = await connection.fetchrow(queries.asyncpg("read_contract").sql) if recorded else None
    return Contract(**dict(row)) if row else None


def apply_command(schema: str) -> str:
    """The command that brings a schema forward."""
    return f"holdfast migrate apply{_option(schema)}"


def baseline_remedy(schema: str) -> str:
    """What helps against a schema with another baseline."""
    return (
        "no schema is converted before 1.0: install beside it with --schema NAME; or stop the producers, let the "
        "version that made it finish what is open, and run "
        f"holdfast uninstall{_option(schema)} and {apply_command(schema)}"
    )


def _option(schema: str) -> str:
    return "" if schema == "core" else f" --schema {schema}"
