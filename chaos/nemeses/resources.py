"""What a database can run short of: locks, connections, time, disk."""

import asyncio
import contextlib
import os
import random
from pathlib import Path

import asyncpg

from chaos.nemeses import NOBODY, Blow, Nemesis, hit, victims
from chaos.world import World
from holdfast import NewEvent


class Held(Nemesis):
    """Keeps sessions of its own open while it holds."""

    def __init__(self) -> None:
        self._sessions: list[asyncpg.Connection] = []

    async def session(self, dsn: str) -> asyncpg.Connection:
        session = await asyncpg.connect(dsn, timeout=5, server_settings={"application_name": "chaos"})
        self._sessions.append(session)
        return session

    async def heal(self, world: World) -> None:
        for session in self._sessions:
            session.terminate()
        self._sessions = []


class LockTable(Held):
    name, promise = "lock_table", "B11: statements that run into their time limit are sent again; no event fails by it"

    def __init__(self, leases: tuple[float, float] = (0.2, 1.5)) -> None:
        super().__init__()
        self._leases = leases

    async def strike(self, world: World, rng: random.Random) -> Blow:
        session = await self.session(world.admin_address)
        await session.execute("BEGIN; SET lock_timeout = '5s'; LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        return Blow(rng.uniform(*self._leases) * world.setup.lease)


class HoldSnapshot(Held):
    name, promise = "hold_snapshot", "B16: a transaction left open keeps nothing from being delivered"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        session = await self.session(world.admin_address)
        await session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM core.outbox")
        return Blow(rng.uniform(2.0, 8.0), hit=NOBODY)


class FloodOfNotifications(Held):
    name, promise = "notify_flood", "S6: anybody may NOTIFY; a flood of it neither stops nor fools a worker"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        session = await self.session(world.admin_address)
        words = rng.choice(("rescan", "asleep nobody", "stop 00000000-0000-0000-0000-000000000000", "\x07junk"))
        for _ in range(20):
            await session.execute(
                "SELECT pg_notify('outbox_default', $1 || n) FROM generate_series(1, 200) AS n", words
            )
            await asyncio.sleep(0.02)
        return Blow(details={"words": words}, hit=NOBODY)


class TooManyConnections(Held):
    name, promise = "too_many_connections", "B10: workers that find no free connection (53300) wait, and come back"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        struck = victims(world, rng, 2)
        for victim in struck:
            world.fleet.kill(victim)
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                await self.session(world.address("chaos_producer", world.server.port))
        return hit(struck, rng.uniform(3.0, 6.0), taken=len(self._sessions))


class HogConnections(Nemesis):
    name, promise = "pool_exhausted", "B9: handlers that use up their connections keep nobody from claiming or settling"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        keys = world.history.keys(4 * world.setup.workers * world.setup.connections)
        seconds = rng.uniform(0.3, 0.8)
        await world.trouble([NewEvent("trouble.hog", {"seconds": seconds}, idempotency_key=key) for key in keys])
        return Blow(details={"hogs": len(keys), "seconds": seconds}, hit=NOBODY)


class ImpatientProducers(LockTable):
    name, promise = "statement_timeout", "B11: a locked table and statement_timeout = 50 ms (57014) fail no event"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        await world.ask("ALTER ROLE chaos_producer SET statement_timeout = '50ms'")
        await world.terminate()
        return await super().strike(world, rng)

    async def heal(self, world: World) -> None:
        await super().heal(world)
        await world.ask("ALTER ROLE chaos_producer RESET statement_timeout")


class FillDisk(Nemesis):
    name, promise = "disk_full", "B15: a full disk (53100) fails producers cleanly, and workers go on when it is not"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        ballast = self._ballast(world)
        free = os.statvfs(ballast.parent)
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        return Blow(rng.uniform(3.0, 6.0), details={"bytes": ballast.stat().st_size})

    async def heal(self, world: World) -> None:
        self._ballast(world).unlink(missing_ok=True)

    def _ballast(self, world: World) -> Path:
        return world.directory / "disk" / "ballast"
