"""Small releases to migrate with, and a cluster whose roles a test may create and drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.releases import write_contract
from holdfast.embedded import EmbeddedPostgres
from tests.servers import SessionServer

FIRST = "CREATE TABLE core.thing (id int PRIMARY KEY);"
SECOND = "ALTER TABLE core.thing ADD COLUMN note text;"

MakeSource = Callable[..., Path]


@pytest.fixture
def make_source(tmp_path: Path) -> MakeSource:
    """make_source(FIRST, SECOND, functions="…", contract=(3, 2, 2)) -> a folder laid out like the package's sql/."""
    made = iter(range(1000))

    def make(
        *migrations: str, functions: str = "", grants: str = "", contract: tuple[int, int, int] = (1, 1, 1)
    ) -> Path:
        folder = tmp_path / f"release{next(made)}"
        (folder / "migrations").mkdir(parents=True)
        for number, sql in enumerate(migrations, start=1):
            (folder / "migrations" / f"{number:04d}_step.sql").write_text(sql)
        if functions:
            (folder / "functions").mkdir()
            (folder / "functions" / "all.sql").write_text(functions)
        (folder / "grants.sql").write_text(grants)
        write_contract(folder, *contract)
        return folder

    return make


@pytest.fixture(scope="module")
def roles_cluster(postgres_server: SessionServer) -> Iterator[EmbeddedPostgres]:
    """Roles belong to a whole cluster, so tests about them have one of their own."""
    settings = {"fsync": "off", "full_page_writes": "off"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        yield server
