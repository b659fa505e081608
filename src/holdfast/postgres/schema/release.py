"""What this version of the code brings to a database: numbered migrations, functions, grants, a contract."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from holdfast.errors import MigrationError
from holdfast.postgres.queries import sql_files, sql_folder
from holdfast.postgres.schema.contract import Terms, checksum_of, read_terms, text_of

_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_NO_TRANSACTION = re.compile(r"\A(?:[ \t]*(?:--[^\n]*)?\n)*?-- holdfast: no-transaction[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step forward. `sql` says `core`; it is rendered for the schema when it runs."""

    version: int
    name: str
    checksum: str
    sql: str

    @property
    def transactional(self) -> bool:
        """False for what must run alone, like CREATE INDEX CONCURRENTLY."""
        return not _NO_TRANSACTION.search(self.sql)

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


@dataclass(frozen=True, slots=True)
class Release:
    """Migrations run once, in order. Functions and grants are replaced as a whole each time."""

    migrations: tuple[Migration, ...]
    functions: tuple[str, ...]
    grants: str
    terms: Terms

    @property
    def version(self) -> int:
        """The number of the last migration."""
        return self.migrations[-1].version if self.migrations else 0

    @property
    def functions_checksum(self) -> str:
        """Tells whether a database has these functions, which have no number of their own."""
        return checksum_of("\n".join(self.functions))


def load(source: Traversable | None = None) -> Release:
    """Read a release from a folder laid out like `sql/`, by default the package's own."""
    folder = source if source is not None else sql_folder()
    migrations = tuple(_read_migrations(folder.joinpath("migrations")))
    functions = folder.joinpath("functions")
    grants = folder.joinpath("grants.sql")
    return Release(
        migrations,
        tuple(text_of(functions.joinpath(name)) for name in sql_files(functions)) if functions.is_dir() else (),
        text_of(grants) if grants.is_file() else "",
        read_terms(folder),
    )


def _read_migrations(folder: Traversable) -> list[Migration]:
    found = []
    for expected, file_name in enumerate(sql_files(folder), start=1):
        match = _FILE_NAME.fullmatch(file_name)
        if match is None or int(match[1]) != expected:
            raise MigrationError(
                f"the migration file {file_name} should have the number {expected:04d}; "
                f"name the files 0001_name.sql, 0002_name.sql and so on without a gap"
            )
        sql = text_of(folder.joinpath(file_name))
        found.append(Migration(expected, match[2], checksum_of(sql), sql))
    return found
