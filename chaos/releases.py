"""Two releases of Holdfast beside each other: this one, and a next one that is made from it.

The next release is a copy of this one with a contract of its own, a migration that adds a column, and functions with
one more argument. Its workers run from the copy.
"""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.postgres import migrate
from holdfast.postgres.schema.release import load

WIDENED = ("outbox_claim", "worker_stopped")
MIGRATION = """
ALTER TABLE core.workers ADD COLUMN note text;
DO $$
DECLARE
    found regprocedure;
BEGIN
    FOR found IN SELECT oid FROM pg_proc
                 WHERE pronamespace = 'core'::regnamespace AND proname IN ('outbox_claim', 'worker_stopped') LOOP
        EXECUTE 'DROP FUNCTION ' || found;
    END LOOP;
END
$$;
"""


@dataclass(frozen=True, slots=True)
class NextRelease:
    """A copy of the package in a folder of its own."""

    root: Path

    @property
    def sql(self) -> Path:
        return self.root / "holdfast" / "postgres" / "sql"

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.root)}


def make_next(root: Path) -> NextRelease:
    release, contract = NextRelease(root), load().terms.schema.provides
    package = root / "holdfast"
    shutil.copytree(Path(holdfast.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    write_contract(release.sql, contract + 1, contract, contract + 1)
    (release.sql / "migrations" / f"{load().version + 1:04d}_next.sql").write_text(MIGRATION)
    for name in WIDENED:
        (file,) = (f for f in (release.sql / "functions").iterdir() if f"FUNCTION core.{name}(" in f.read_text())
        _replace(file, rf"(FUNCTION core\.{name}\([^()]*)\)", r"\1, p_note text DEFAULT NULL)")
        _replace(release.sql / "grants.sql", rf"(core\.{name}\([^()]*)\)", r"\1, text)")
    _replace(package / "postgres" / "queries.py", r"map\(values\.__getitem__,", "map(values.get,")
    return release


def write_contract(folder: Path, provides: int, oldest_code: int, oldest_schema: int) -> None:
    """Give a release its terms; the contract 3 is that of holdfast 0.3.0."""
    releases = "".join(f'{number} = "0.{number}.0"\n' for number in range(1, provides + 1))
    terms = f"provides = {provides}\noldest_code = {oldest_code}\noldest_schema = {oldest_schema}\n"
    (folder / "contract.toml").write_text(f"{terms}[releases]\n{releases}")


def _replace(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text())
    assert count == 1, (file, pattern)
    file.write_text(text)


class Releases:
    """Which slots of a fleet run the next release, and since when the schema is its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._next: NextRelease | None = None
        self.slots: set[int] = set()
        self.migrated: float | None = None

    def environment(self, slot: int) -> dict[str, str]:
        """Of the worker of a slot."""
        return self._next.environment if self._next is not None and slot in self.slots else {}

    async def migrate(self, dsn: str) -> None:
        """As the next release does it."""
        self._next = self._next or make_next(self._root)
        await migrate.apply(dsn, source=self._next.sql)
        self.migrated = self.migrated or time.monotonic()

    async def migrate_back(self, dsn: str) -> list[str]:
        """As this release does it, whose schema has been left behind; returns what it has applied."""
        return [migration.name for migration in await migrate.apply(dsn)]
