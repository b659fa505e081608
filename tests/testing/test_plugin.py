"""The plugin as a project meets it: a clean database for each test, several processes, a server of one's own
(TST-1)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from holdfast.testing.databases import TestDatabase, database_address

INI = """
[pytest]
pythonpath = .
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
holdfast_registry = app:registry
holdfast_setup =
    tables.sql
"""

APP = """
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="ledger.record")
async def record(event, tx):
    await tx.execute("INSERT INTO sales (order_id) VALUES ($1)", event.payload["order_id"])
"""

TABLES = """
CREATE TABLE shops (id int PRIMARY KEY, name text);
INSERT INTO shops VALUES (1, 'north'), (2, 'south');
CREATE TABLE sales (id bigint GENERATED ALWAYS AS IDENTITY, order_id text, shop int REFERENCES shops DEFAULT 1);
"""


@pytest.fixture
def server(holdfast_dsn: str) -> str:
    """A server that is there, for tests: that of this session."""
    return database_address(holdfast_dsn, "postgres")


def run(folder: Path, tests: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    """Run the tests of a project of its own."""
    files = {"pytest.ini": INI, "app.py": APP, "tables.sql": TABLES, "test_it.py": tests}
    for name, text in files.items():
        if not (folder / name).exists():
            (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    variables = {**{k: v for k, v in os.environ.items() if "XDIST" not in k}, **(environment or {})}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100)


def passed(result: Any, count: int) -> bool:
    assert f"{count} passed" in result.stdout, result.stdout + result.stderr
    return bool(result.returncode == 0)


@pytest.mark.slow
def test_a_fixture_that_asks_for_the_outbox_later_leaves_it_clean(tmp_path: Path, server: str) -> None:
    """Fixtures that choose by a parameter ask for others while the test runs."""
    tests = """
import pytest

@pytest.fixture(params=["first", "second"])
def chosen(request):
    return request.getfixturevalue("outbox")

def test_it(chosen):
    assert chosen.published() == [] and chosen.fetch("SELECT FROM sales") == []
    chosen.publish("order.placed", {"order_id": "o-1"})
    chosen.drain()
"""
    assert passed(run(tmp_path, tests, "--holdfast-dsn", server), 2)


def test_loading_it_costs_nothing() -> None:
    """Whoever does not use its fixtures imports nothing of the library's, and sets up nothing."""
    program = """
import pytest, sys
before = set(sys.modules)
import holdfast.testing.plugin
print(*sorted(set(sys.modules) - before))
"""
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = set(loaded.stdout.split())
    assert {"holdfast", "holdfast.lazy", "holdfast.testing", "holdfast.testing.plugin"} >= {
        name for name in ours if not name.startswith("importlib")
    }


@pytest.mark.slow
def test_each_test_finds_the_database_as_it_was_set_up(tmp_path: Path, server: str) -> None:
    """Rows, changed and removed ones, sequences and the clock: in whichever order tests write."""
    tests = """
import pytest

@pytest.mark.parametrize("turn", range(3))
def test_clean(outbox, turn):
    assert [tuple(row) for row in outbox.fetch("SELECT * FROM shops ORDER BY id")] == [(1, "north"), (2, "south")]
    assert outbox.published() == [] and outbox.deliveries() == [] and outbox.handled() == []
    outbox.publish("order.placed", {"order_id": "o-1"})
    outbox.drain()
    assert [row["id"] for row in outbox.fetch("SELECT id FROM sales")] == [1]
    outbox.execute("UPDATE shops SET name = 'west' WHERE id = 2")
    outbox.execute("INSERT INTO shops VALUES (3, 'east')")
    outbox.freeze("2030-01-01T00:00:00+00:00")

def test_the_clock_goes_on(outbox):
    assert outbox.now.year < 2030
    outbox.execute("DELETE FROM shops WHERE id = 2")

def test_what_was_removed_is_back(outbox):
    assert len(outbox.fetch("SELECT FROM shops")) == 2
    outbox.execute("ALTER TABLE sales ADD COLUMN cents int; CREATE TABLE other ()")

def test_a_changed_schema_is_back_as_well(outbox):
    assert [row["column_name"] for row in outbox.fetch(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'sales' ORDER BY 1"
    )] == ["id", "order_id", "shop"]
    assert outbox.fetch("SELECT to_regclass('other') AS other")[0]["other"] is None
"""
    assert passed(run(tmp_path, tests, "--holdfast-dsn", server), 6)


@pytest.mark.slow
def test_a_server_of_ones_own_keeps_its_data(tmp_path: Path, server: str) -> None:
    """Only databases of the kit's own are made, under names that say so, and dropped."""
    # Other tests of this session make and drop databases of theirs on the same server meanwhile.
    names = "SELECT datname FROM pg_database WHERE NOT starts_with(datname, 'holdfast_test_') ORDER BY 1"
    with psycopg.connect(server, autocommit=True) as connection:
        before = connection.execute(names).fetchall()
        tests = """
import pathlib

def test_names(outbox, holdfast_dsn):
    name = outbox.fetch("SELECT current_database() AS name")[0]["name"]
    pathlib.Path("name").write_text(name)
    assert name.startswith("holdfast_test_")
    session = name.rpartition("_")[0]
    assert [row["datname"] for row in outbox.fetch(
        "SELECT datname FROM pg_database WHERE starts_with(datname, '" + session + "') ORDER BY 1"
    )] == [name, session + "_template"]

def test_that_fails(outbox):
    assert False
"""
        result = run(tmp_path, tests, environment={"HOLDFAST_TEST_DSN": server})
        assert "1 failed, 1 passed" in result.stdout, result.stdout
        assert connection.execute(names).fetchall() == before
        session = (tmp_path / "name").read_text().rpartition("_")[0]
        left = "SELECT datname FROM pg_database WHERE starts_with(datname, %s)"
        assert connection.execute(left, [session]).fetchall() == []


@pytest.mark.nightly("project with the testing kit")
@pytest.mark.slow
def test_processes_share_one_server_and_no_database(tmp_path: Path) -> None:
    """Parallel-safe under xdist: one embedded server, a database for each process, nothing left of either."""
    tests = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range(40))
def test_alone(outbox, n):
    outbox.publish("order.placed", {"order_id": str(n)})
    outbox.drain()
    assert [row["order_id"] for row in outbox.fetch("SELECT order_id FROM sales")] == [str(n)]
    where, name = outbox.fetch("SELECT current_setting('data_directory'), current_database()")[0]
    pathlib.Path(f"used-{os.getpid()}").write_text(f"{where} {name}")
"""
    assert passed(run(tmp_path, tests, "-n", "4"), 40)
    used = [file.read_text().split() for file in tmp_path.glob("used-*")]
    assert len({server for server, _ in used}) == 1 and len({name for _, name in used}) == len(used) > 1
    assert not Path(used[0][0]).exists()


@pytest.mark.slow
def test_a_test_that_fails_shows_its_outbox(tmp_path: Path, server: str) -> None:
    """Also when an assertion of its own failed, and not one of the kit's."""
    tests = """
def test_it(outbox):
    outbox.publish("order.placed", {"id": "o-1"})
    outbox.drain()
    assert outbox.fetch("SELECT FROM sales")
"""
    shown = run(tmp_path, tests, "--holdfast-dsn", server).stdout
    assert "holdfast outbox" in shown
    assert re.search(
        r"ledger.record  failed \(retry_terminal, attempt \d: KeyError.*order.placed  {'id': 'o-1'}", shown
    )


@pytest.mark.slow
def test_a_transaction_that_is_left_open_is_named(tmp_path: Path, server: str) -> None:
    """The test that left it fails, and the next one has a clean database all the same."""
    tests = """
import psycopg

def test_leaves_it(outbox):
    global left
    left = psycopg.connect(outbox.dsn)
    left.execute("LOCK TABLE sales")
    outbox.publish("order.placed", {"order_id": "o-1"})
    left.execute("INSERT INTO sales (order_id) VALUES ('o-9')")

def test_next(outbox):
    assert outbox.published() == [] and outbox.fetch("SELECT FROM sales") == []
"""
    shown = run(tmp_path, tests, "--holdfast-dsn", server).stdout
    assert "2 passed, 1 error" in shown, shown
    assert "the test has left a transaction open" in shown and "INSERT INTO sales" in shown


def test_a_fault_that_nothing_met_fails_its_test(tmp_path: Path, server: str) -> None:
    """Or the test would pass without having shown anything (TST-2)."""
    tests = """
def test_it(outbox):
    outbox.crash_after_effect("ledger.record")
    outbox.drain()
"""
    shown = run(tmp_path, tests, "--holdfast-dsn", server).stdout
    assert "1 passed, 1 error" in shown and "no delivery has met the fault: Crash after ledger.record" in shown


def test_anyio_runs_asynchronous_tests_too(tmp_path: Path, server: str) -> None:
    (tmp_path / "pytest.ini").write_text(INI.replace("asyncio_mode = auto", "asyncio_mode = strict"))
    tests = """
import pytest

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_it(async_outbox):
    async_outbox.publish("order.placed", {"order_id": "o-1"})
    await async_outbox.drain()
    async_outbox.assert_all_delivered()
"""
    assert passed(run(tmp_path, tests, "--holdfast-dsn", server), 1)


@pytest.mark.nightly("project with the testing kit")
@pytest.mark.parametrize(
    "option, problem",
    [
        ("holdfast_registry = app", "holdfast_registry is 'app'"),
        ("holdfast_registry = app:missing", "has no attribute 'missing'"),
        ("holdfast_registry = app:record", "names function, not a HandlerRegistry"),
        ("holdfast_setup = nothing.sql", "names a file that is not there"),
        ("holdfast_dsn = mysql://localhost", "is not a URL of a Postgres server"),
    ],
)
def test_mistakes_in_options_are_named(tmp_path: Path, server: str, option: str, problem: str) -> None:
    name = option.partition(" ")[0]
    lines = [line for line in INI.splitlines() if name not in line and "tables.sql" not in line]
    (tmp_path / "pytest.ini").write_text("\n".join([*lines, option]))
    arguments = () if name == "holdfast_dsn" else ("--holdfast-dsn", server)
    assert problem in run(tmp_path, "def test_it(outbox): ...", *arguments).stdout


DJANGO = """
import django
from django.conf import settings
from django.db import connection, transaction
from django.http import JsonResponse
from django.urls import path

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", **DATABASE}},
    INSTALLED_APPS=[], ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], USE_TZ=True,
)
django.setup()

from app import registry
from holdfast import Publisher
from holdfast.testing.django import HoldfastTestCase
from django.test.runner import DiscoverRunner
from unittest import TestLoader, TestResult

def order(request):
    with transaction.atomic():
        Publisher("shop").publish(connection, "order.placed", {"order_id": request.GET["id"]})
    return JsonResponse({})

urlpatterns = [path("orders", order)]

class OrderTests(HoldfastTestCase):
    registry = registry

    def test_1_an_order_is_recorded(self):
        self.client.get("/orders?id=o-1")
        self.outbox.assert_published("order.placed", {"order_id": "o-1"}, times=1)
        self.outbox.drain()
        self.outbox.assert_all_delivered()

    def test_2_the_next_one_finds_nothing(self):
        self.assertEqual(self.outbox.published(), [])
        self.client.get("/orders?id=o-2")
        self.outbox.crash_after_effect("ledger.record")
        self.outbox.drain()
        self.assertEqual(len(self.outbox.fetch("SELECT FROM sales")), 1)

    def test_3_a_fault_that_no_delivery_meets_is_an_error(self):
        result = TestResult()
        Unmet("arm")(result)
        self.assertIn("no delivery has met the fault", result.errors[0][1])

class Unmet(HoldfastTestCase):
    def arm(self):
        self.outbox.crash_after_effect("ledger.record")

class Runner(DiscoverRunner):
    def setup_databases(self, **kwargs):
        made = super().setup_databases(**kwargs)
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE sales (order_id text)")  # as a migration would
        return made

    def build_suite(self, *args, **kwargs):
        return TestLoader().loadTestsFromTestCase(OrderTests)

raise SystemExit(Runner(verbosity=0).run_tests([]))
"""


def test_a_test_case_for_django(tmp_path: Path, server: str) -> None:
    """Commits are real, events are delivered, and the next test finds nothing of it."""
    with psycopg.connect(server) as connection:
        info = connection.info
        login = {"USER": info.user, "PASSWORD": info.password, "HOST": info.host, "PORT": info.port}
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "shop_tests.py").write_text(f"DATABASE = {login!r}\n{DJANGO}")
    command = [sys.executable, "shop_tests.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and "Ran 3 tests" in result.stderr, result.stdout + result.stderr


def test_a_test_case_for_django_whose_login_is_no_superuser(tmp_path: Path, server: str) -> None:
    """The message is about Django's settings, and names the test case that needs no superuser (TST-1)."""
    name = f"plain_{uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        info = connection.info
        connection.execute(SQL("CREATE ROLE {} LOGIN CREATEDB PASSWORD 'plain'").format(Identifier(name)))
        login = {"USER": name, "PASSWORD": "plain", "HOST": info.host, "PORT": info.port, "NAME": name}
        try:
            (tmp_path / "app.py").write_text(APP)
            (tmp_path / "shop_tests.py").write_text(f"DATABASE = {login!r}\n{DJANGO}")
            command = [sys.executable, "shop_tests.py"]
            result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        finally:
            connection.execute(SQL("DROP DATABASE IF EXISTS {}").format(Identifier(f"test_{name}")))
            connection.execute(SQL("DROP ROLE {}").format(Identifier(name)))
    assert "DATABASES has a login that cannot set up test databases: it is no superuser; use a su" in result.stderr
    assert "OutboxMixin" in result.stderr and "embedded" not in result.stderr


def test_a_handler_whose_transaction_nothing_makes_is_told_of_the_fixture(tmp_path: Path, server: str) -> None:
    """And not of a worker, which tests do not start (TST-1)."""
    tests = """
import psycopg
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.kept", name="ledger.keep")
async def keep(event, tx: psycopg.AsyncConnection): ...

def test_it(outbox):
    outbox.publish("order.kept")
    outbox.drain(registry)

async def test_that_is_async(async_outbox):
    await async_outbox.drain(registry)
"""
    result = run(tmp_path, tests, "--holdfast-dsn", server)
    told = "the fixture holdfast_transactions returns nothing that makes one"
    # Once in each report: whether the summary repeats it depends on the width, and on CI.
    assert sum(told in line for line in result.stdout.splitlines() if line.startswith("E ")) == 2
    assert "let it return a psycopg_pool.AsyncConnectionPool: docs/testing.md" in result.stdout
    assert "holdfast worker" not in result.stdout


def test_only_the_kits_own_databases_can_be_dropped(holdfast_database: TestDatabase) -> None:
    from holdfast.errors import ConfigurationError
    from holdfast.testing.databases import drop
    from holdfast.testing.loop import kit_loop

    with pytest.raises(ConfigurationError, match="is not a database for tests"):
        kit_loop().run(drop(holdfast_database.dsn, "postgres"))
