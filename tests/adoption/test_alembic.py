"""Holdfast's schema among the revisions of Alembic (ENV-3), by the commands of docs/alembic.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from holdfast.postgres import migrate
from tests.docs.support import ROOT, blocks

pytestmark = [pytest.mark.adoption, pytest.mark.newest_postgres]

COMMANDS, REVISION = (block.text for block in blocks("text", pages=[ROOT / "docs" / "alembic.md"]))
MODEL = """
import sqlalchemy as sa

metadata = sa.MetaData()
sa.Table("orders", metadata, sa.Column("id", sa.BigInteger, primary_key=True))
"""


@pytest.fixture(params=["psycopg", "asyncpg"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_the_commands_of_the_page(empty_dsn: str, driver: str, tmp_path: Path) -> None:
    """ENV-3: from an empty folder, with an engine of each kind; autogenerate leaves Holdfast's tables alone."""
    init, new, upgrade, autogenerate = COMMANDS.splitlines()
    alembic(tmp_path, *init.split()[1:], *(("--template", "async") if driver == "asyncpg" else ()))
    (tmp_path / "model.py").write_text(MODEL)
    settings = tmp_path / "alembic.ini"
    address = empty_dsn.replace("postgresql://", f"postgresql+{driver}://").replace("%", "%%")
    settings.write_text(
        re.sub("^sqlalchemy.url = .*$", lambda _: f"sqlalchemy.url = {address}", settings.read_text(), flags=re.M)
    )
    env = tmp_path / "migrations" / "env.py"
    text = env.read_text().replace("target_metadata = None", "from model import metadata as target_metadata")
    text = "from holdfast.integrations.alembic import without_holdfast\n" + re.sub(
        r"target_metadata=target_metadata", r"\g<0>, include_schemas=True, include_name=without_holdfast()", text
    )
    env.write_text(text)

    alembic(tmp_path, *words(new))
    (first,) = (tmp_path / "migrations" / "versions").glob("*.py")
    head = first.read_text().partition("def upgrade")[0]
    first.write_text(f"{REVISION.partition('def upgrade')[0]}{head}def upgrade{REVISION.partition('def upgrade')[2]}")
    assert "CREATE TABLE core.outbox" in alembic(tmp_path, "upgrade", "head", "--sql")
    assert not (await migrate.state(empty_dsn)).up_to_date
    alembic(tmp_path, *words(upgrade))
    assert (await migrate.state(empty_dsn)).up_to_date

    alembic(tmp_path, *words(autogenerate))
    (second,) = set((tmp_path / "migrations" / "versions").glob("*.py")) - {first}
    assert "op.create_table('orders'" in second.read_text() and "core" not in second.read_text()
    alembic(tmp_path, "upgrade", "head")
    alembic(tmp_path, "check")
    connection = await asyncpg.connect(empty_dsn)
    assert await connection.fetchval("SELECT to_regclass('orders') IS NOT NULL")
    await connection.close()


def words(command: str) -> list[str]:
    return [word.strip('"') for word in command.split()[1:]]


def alembic(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        [str(Path(sys.executable).with_name("alembic")), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
