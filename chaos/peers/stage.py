"""One Postgres for all systems, and databases of their own for each of them."""

import asyncio
import contextlib
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import asyncpg

from benchmarks.environments import clean_environment
from chaos.peers.crew import Crew
from chaos.peers.systems import System
from chaos.workers import ROOT
from chaos.world import numbers
from holdfast.embedded import EmbeddedPostgres

ROLES = ("worker", "producer")
# Recovery begins with a sync of all files, of which there are many with so many databases.
SETTINGS = {"max_connections": "300", "recovery_init_sync_method": "syncfs"}
DOWN = 2.0


class Stage:
    def __init__(self, directory: Path, seed: int) -> None:
        directory.chmod(0o755)  # the server runs as another user than root
        self.directory = directory
        self.seed = seed
        self.server = EmbeddedPostgres(directory / "postgres", settings=SETTINGS)
        self._password = secrets.token_hex(8)
        self._databases: list[str] = []
        self._made = 0

    async def open(self, systems: Sequence[System]) -> None:
        """The server, and for each system a database with its tables, to be copied."""
        await asyncio.to_thread(self.server.start)
        for role in ROLES:
            await self._execute(f"CREATE ROLE chaos_{role} SUPERUSER LOGIN PASSWORD '{self._password}'")
        for system in systems:
            await asyncio.to_thread(self._install, system)

    async def close(self) -> None:
        await asyncio.to_thread(self.server.stop, "immediate")

    @contextlib.asynccontextmanager
    async def crews(self, systems: Sequence[System]) -> AsyncIterator[list[Crew]]:
        """Fresh workers of each system, on a database of their own. Whoever uses the list may replace one of them."""
        crews = [await self.crew(system) for system in systems]
        await self._execute("CHECKPOINT")  # nothing of the making is left to be recovered
        try:
            yield crews
        finally:
            await asyncio.gather(*(crew.close() for crew in crews), return_exceptions=True)
        while self._databases:
            await asyncio.to_thread(self.server.drop_database, self._databases.pop())

    async def crew(self, system: System) -> Crew:
        self._made += 1
        database = f"{_identifier(system)}_{self._made}"
        self._databases.append(database)
        await asyncio.to_thread(self.server.create_database, database, _identifier(system))
        dsns = {role: self._dsn(role, database) for role in ROLES} | {"admin": self.server.database_dsn(database)}
        crew = Crew(system, dsns, self.directory / database)
        await crew.open()
        return crew

    async def ready(self, crews: list[Crew], fault: str) -> None:
        """All of them, with the same random numbers. One that is not done with the last fault gives way to another."""

        async def one(place: int) -> None:
            if not await crews[place].ready(numbers(self.seed, fault)):
                await crews[place].close()
                crews[place] = await self.crew(crews[place].system)
                await crews[place].ready(numbers(self.seed, fault))

        await asyncio.gather(*map(one, range(len(crews))))

    async def restart(self) -> float:
        """A crash and the recovery from it; returns when connections were accepted again."""
        await asyncio.to_thread(self.server.stop, "immediate")
        await asyncio.sleep(DOWN)
        await asyncio.to_thread(self.server.start)
        return time.monotonic()

    def _install(self, system: System) -> None:
        database = _identifier(system)
        self.server.create_database(database)
        dsn = self._dsn("producer", database)
        environment = clean_environment() | {"CHAOS_DSN": dsn, "HOLDFAST_DSN": dsn}
        command = [system.python, "-m", system.program, "install"]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{system.name} could not be installed: {run.stderr.strip()[-2000:]}")

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.server.dsn)
        await connection.execute(statement)
        await connection.close()

    def _dsn(self, role: str, database: str) -> str:
        return f"postgresql://chaos_{role}:{self._password}@127.0.0.1:{self.server.port}/{database}"


def _identifier(system: System) -> str:
    return system.name.replace("-", "_")
