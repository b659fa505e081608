"""Holdfast's schema among the revisions of Alembic (ENV-3), by the commands of docs/alembic.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from chaos.releases import make_next
from holdfast.postgres import migrate
from tests.adoption.bare import Installed
from tests.docs.support import ROOT, blocks

PAGE = ROOT / "docs" / "alembic.md"
_, INIT, ADDRESS, ENV, NEW, REVISION, GO_ON, _ = (block.text for block in blocks("text", pages=[PAGE]))
IMPORT = "from holdfast.integrations.alembic import migrate_holdfast"
MODEL = """
import sqlalchemy as sa

metadata = sa.MetaData()
sa.Table("orders", metadata, sa.Column("id", sa.BigInteger, primary_key=True))
"""


@pytest.fixture(params=["psycopg", "asyncpg"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.nightly("application of a page")
async def test_the_commands_of_the_page(empty_dsn: str, driver: str, tmp_path: Path, installed: Installed) -> None:
    """From an empty folder, with an engine of each kind; autogenerate leaves Holdfast's tables alone (ENV-3)."""
    upgrade, autogenerate = GO_ON.splitlines()
    shell = installed(PAGE, **({"psycopg": "sqlalchemy"} if driver == "asyncpg" else {}))
    alembic = partial(run_alembic, tmp_path, shell)
    alembic(*words(INIT), *(("--template", "async") if driver == "asyncpg" else ()))
    (tmp_path / "model.py").write_text(MODEL)
    settings = tmp_path / "alembic.ini"
    address = empty_dsn.replace("postgresql://", f"postgresql+{driver}://").replace("%", "%%")
    line = ADDRESS.partition(" = ")[0]
    settings.write_text(re.sub(f"^{line} = .*$", lambda _: f"{line} = {address}", settings.read_text(), flags=re.M))
    imports, metadata, arguments = ENV.split("\n\n")
    env = tmp_path / "migrations" / "env.py"
    text = env.read_text()
    assert text.count("target_metadata = None\n") == 1 and text.count("target_metadata=target_metadata") == 2
    text = text.replace("target_metadata = None\n", f"{metadata}\n")
    added = arguments.strip().splitlines()[-1].strip()
    env.write_text(
        f"{imports}\n" + text.replace("target_metadata=target_metadata", f"target_metadata=target_metadata, {added}")
    )

    alembic(*words(NEW.strip()))
    (first,) = (tmp_path / "migrations" / "versions").glob("*.py")
    head = first.read_text().partition("def upgrade")[0]
    first.write_text(f"{REVISION.partition('def upgrade')[0]}{head}def upgrade{REVISION.partition('def upgrade')[2]}")
    assert "CREATE TABLE core.outbox" in alembic("upgrade", "head", "--sql")
    assert not (await migrate.state(empty_dsn)).up_to_date
    alembic(*words(upgrade))
    assert (await migrate.state(empty_dsn)).up_to_date

    alembic(*words(autogenerate))
    (second,) = set((tmp_path / "migrations" / "versions").glob("*.py")) - {first}
    assert "op.create_table('orders'" in second.read_text() and "core" not in second.read_text()
    alembic("upgrade", "head")
    alembic("check")
    connection = await asyncpg.connect(empty_dsn)
    assert await connection.fetchval("SELECT to_regclass('orders') IS NOT NULL")
    await connection.close()


@pytest.mark.slow
async def test_a_script_has_the_migrations_of_its_revision_alone(empty_dsn: str, tmp_path: Path) -> None:
    """What two revisions print is a whole schema, and the second one prints only what is new (ENV-3)."""
    (tmp_path / "next").mkdir()
    following = make_next(tmp_path / "next")
    shell = {**os.environ, "PATH": str(Path(sys.executable).parent), **following.environment}
    alembic(tmp_path, "init", "migrations")
    settings = tmp_path / "alembic.ini"
    settings.write_text(settings.read_text().replace("driver://user:pass@localhost/dbname", "postgresql+psycopg://"))
    for number, arguments in enumerate(("to=1", "since=1, to=2"), start=1):
        alembic(tmp_path, "revision", "--message", f"holdfast {number}", "--rev-id", str(number))
        (file,) = (tmp_path / "migrations" / "versions").glob(f"{number}_*.py")
        text = file.read_text().replace("    pass", f"    migrate_holdfast({arguments})", 1)
        file.write_text(text.replace("from alembic", f"{IMPORT}\nfrom alembic", 1))
    both = run_alembic(tmp_path, shell, "upgrade", "head", "--sql")
    assert both.count("-- Migration ") == 2
    second = run_alembic(tmp_path, shell, "upgrade", "1:2", "--sql")
    assert second.count("-- Migration ") == 1 and "FUNCTION core.schedule_publish" in second
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute(both)
    await connection.close()
    assert (await migrate.state(empty_dsn, source=following.sql)).up_to_date


async def test_the_address_may_be_given(empty_dsn: str, tmp_path: Path) -> None:
    """An engine that is set up in Python does not show how it connects (ENV-3)."""
    alembic(tmp_path, "init", "migrations")
    settings = tmp_path / "alembic.ini"
    settings.write_text(settings.read_text().replace("driver://user:pass@localhost/dbname", "postgresql+psycopg://"))
    env = tmp_path / "migrations" / "env.py"
    creator = f"poolclass=pool.NullPool, creator=lambda: __import__('psycopg').connect({empty_dsn!r})"
    env.write_text(env.read_text().replace("poolclass=pool.NullPool", creator))
    alembic(tmp_path, "revision", "--message", "holdfast")
    (file,) = (tmp_path / "migrations" / "versions").glob("*.py")
    text = file.read_text().replace("    pass", f"    migrate_holdfast(dsn={empty_dsn!r})", 1)
    file.write_text(text.replace("from alembic", f"{IMPORT}\nfrom alembic", 1))
    alembic(tmp_path, "upgrade", "head")
    assert (await migrate.state(empty_dsn)).up_to_date


def words(command: str) -> list[str]:
    return [word.strip('"') for word in command.split()[1:]]


def alembic(folder: Path, *arguments: str) -> str:
    """Run the command in this environment."""
    return run_alembic(folder, {**os.environ, "PATH": str(Path(sys.executable).parent)}, *arguments)


def run_alembic(folder: Path, shell: dict[str, str], *arguments: str) -> str:
    """Run the command of a shell with such variables."""
    run = subprocess.run(
        [shutil.which("alembic", path=shell["PATH"]) or "alembic", *arguments],
        cwd=folder,
        env=shell,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
