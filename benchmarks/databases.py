"""The server of a run, and a database for each of its processes, copied from one that has what all of them need."""

import asyncio
import shutil
from collections.abc import Callable

import asyncpg

from benchmarks.counters import EXTENSIONS
from benchmarks.systems.tables import BYTES_PER_KEPT, install
from holdfast.embedded import EmbeddedPostgres, find_binaries

# A checkpoint in the middle of a run would be the measurement. What a run wrote to the log is read afterwards.
SERVER = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "wal_keep_size": "2GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
}
WAL_BYTES = 8 * 2**30
STATEMENTS = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "all"}
# A copy of files spares the log, and costs two checkpoints.
COPY_FILES_FROM = 100_000


class NoSpace(Exception):
    """The disk does not hold what a benchmark keeps; the text says how much it needs."""


def settings() -> dict[str, str]:
    """Of the server; statements are counted where its programs come with the library for it."""
    library = next(find_binaries().bin_dir.parent.rglob("pg_stat_statements.so"), None)
    return SERVER | (STATEMENTS if library else {})


class Databases:
    """`fresh` makes the database of one run, `drop` removes it. What is kept is filled in once and copied.

    Runs that only read share one database, `shared`, which is there until the server ends.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._filled: set[str] = set()
        asyncio.run(self._extend())

    def fresh(self, system: str, kept: int | None, say: Callable[[str], None] = lambda text: None) -> str:
        """The address of a database with Holdfast's schema and `kept` delivered events; None: of an empty one."""
        name = self._name(system)
        template = "template1" if kept is None else self._template(kept, say)
        self._copy(name, template, kept or 0, say)
        return self._server.database_dsn(name)

    def shared(self, kept: int, say: Callable[[str], None] = lambda text: None) -> str:
        """The address of a database with Holdfast's schema and `kept` delivered events, the same at each call."""
        name = f"read_{kept}"
        if name not in self._filled:
            if (template := f"stock_{kept}") in self._filled:
                self._copy(name, template, kept, say)
            else:
                self._fill(name, kept, say)
            self._filled.add(name)
        return self._server.database_dsn(name)

    def drop(self, system: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {self._name(system)} WITH (FORCE)")

    @staticmethod
    def _name(system: str) -> str:
        return f"bench_{system.replace('-', '_')}"

    def _template(self, kept: int, say: Callable[[str], None]) -> str:
        name = f"stock_{kept}"
        if name not in self._filled:
            self._fill(name, kept, say)
            self._filled.add(name)
        return name

    def _fill(self, name: str, kept: int, say: Callable[[str], None]) -> None:
        self._require_space(kept)
        self._execute(f"CREATE DATABASE {name}")
        asyncio.run(install(self._server.database_dsn(name), kept, say))

    def _copy(self, name: str, template: str, kept: int, say: Callable[[str], None]) -> None:
        strategy = "wal_log"
        if kept >= COPY_FILES_FROM:
            say(f"copying {kept:,} kept events")
            strategy = "file_copy"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {strategy}")

    def _require_space(self, kept: int) -> None:
        needed, free = required_bytes(kept), shutil.disk_usage(self._server.data_dir).free
        if free < needed:
            raise NoSpace(
                f"{kept:,} kept events, a copy of them and the log need {needed / 2**30:.0f} GB in "
                f"{self._server.data_dir}, and {free / 2**30:.0f} GB are free; set TMPDIR to a larger disk"
            )

    async def _extend(self) -> None:
        """Databases are copied from template1, so each of them has what counters.py reads."""
        connection = await asyncpg.connect(self._server.database_dsn("template1"))
        available = {row[0] for row in await connection.fetch("SELECT name FROM pg_available_extensions")}
        preloaded = await connection.fetchval("SHOW shared_preload_libraries")
        for extension in EXTENSIONS:
            if extension in available and (extension != "pg_stat_statements" or extension in preloaded):
                await connection.execute(f"CREATE EXTENSION IF NOT EXISTS {extension}")
        await connection.close()

    def _execute(self, statement: str) -> None:
        async def execute() -> None:
            connection = await asyncpg.connect(self._server.dsn)
            try:
                await connection.execute(statement)
            finally:
                await connection.close()

        asyncio.run(execute())


def required_bytes(kept: int) -> int:
    """For the events, for a copy of them, and for the log."""
    return 2 * kept * BYTES_PER_KEPT + WAL_BYTES if kept else 0
