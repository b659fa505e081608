"""What people do to a running service: set the clock, close its logins, roll out another release."""

import asyncio
import random

import asyncpg

from chaos.nemeses import NOBODY, Blow, Nemesis, victims
from chaos.world import DATABASE, TERMINATE, World
from holdfast import NewEvent

HOUR = 3600


class StepClock(Nemesis):
    """Handlers run for longer than a lease while the clock is set, under leases that are extended."""

    name, promise = "step_clock", "T14: a step of the database's clock ends no live lease, and keeps no dead one"

    def __init__(self) -> None:
        self._back = 0

    async def strike(self, world: World, rng: random.Random) -> Blow:
        keys = world.history.keys(30)
        seconds = rng.uniform(1.1, 1.6) * world.setup.lease
        await world.trouble([NewEvent("trouble.linger", {"seconds": seconds}, idempotency_key=key) for key in keys])
        await asyncio.sleep(rng.uniform(0.2, 0.8))
        # A producer's delay is a time of the clock before the step back: it is over when that is undone.
        step = rng.choice((2 * HOUR, -HOUR))
        self._back = min(step, 0)
        world.around.step(step)
        return Blow(rng.uniform(1.0, 2.5) * world.setup.lease, {"step": step, "seconds": seconds}, NOBODY)

    async def heal(self, world: World) -> None:
        world.around.step(-self._back)
        self._back = 0


class CloseLogins(Nemesis):
    name, promise = "close_logins", "T12: a server that refuses to let workers in is an outage, and nothing runs again"

    KINDS = (
        ("ALTER ROLE chaos_worker PASSWORD 'another'", "ALTER ROLE chaos_worker PASSWORD '{password}'"),
        ("ALTER ROLE chaos_worker NOLOGIN", "ALTER ROLE chaos_worker LOGIN"),
        ("ALTER DATABASE {name} ALLOW_CONNECTIONS false", "ALTER DATABASE {name} ALLOW_CONNECTIONS true"),
        ("ALTER DATABASE {name} CONNECTION LIMIT 0", "ALTER DATABASE {name} CONNECTION LIMIT -1"),
    )

    def __init__(self) -> None:
        self._opens = ""

    async def strike(self, world: World, rng: random.Random) -> Blow:
        closes, self._opens = rng.choice(self.KINDS)
        world.outage_begins()
        await self._run(world, closes)
        ended = await self._run(world, TERMINATE, "%")
        return Blow(rng.uniform(4.0, 6.0), {"closes": closes, "ended": ended})

    async def heal(self, world: World) -> None:
        if self._opens:
            await self._run(world, self._opens)
            world.outage_ends()
            self._opens = ""

    async def _run(self, world: World, sql: str, *arguments: str) -> object:
        """From another database: its own lets nobody in."""
        connection = await asyncpg.connect(world.server.dsn, timeout=10)
        try:
            return await connection.fetchval(sql.format(name=DATABASE, password=world.password), *arguments)
        finally:
            connection.terminate()


class RollOut(Nemesis):
    """Migrate, restart some workers as the next release, kill both kinds, and go back."""

    name, promise = "roll_out", "T13: two releases work beside each other, forward and back"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        releases, fleet = world.releases, world.fleet
        await releases.migrate(world.admin_address)
        world.note("migrated")
        await asyncio.sleep(rng.uniform(0.5, 1.0))
        chosen = set(rng.sample(range(fleet.size), rng.randint(1, fleet.size - 1)))
        await self._deploy(world, chosen)
        await asyncio.sleep(rng.uniform(0.5, 1.0))
        for kind in (chosen, set(range(fleet.size)) - chosen):
            for victim in [worker for worker in victims(world, rng, fleet.size) if worker.slot in kind][:1]:
                fleet.kill(victim)
        await asyncio.sleep(rng.uniform(1.0, 2.0))
        if applied := await releases.migrate_back(world.admin_address):
            world.complaints.append(f"the release before has migrated the schema of the next one: {applied}")
        await self._deploy(world, set())
        return Blow(details={"slots": sorted(chosen)})

    async def heal(self, world: World) -> None:
        world.releases.slots = set()

    async def _deploy(self, world: World, slots: set[int]) -> None:
        """Let these slots run the next release, and the others this one; restart one after the other what changes."""
        changed, world.releases.slots = world.releases.slots ^ slots, slots
        for worker in [worker for worker in world.fleet.running if worker.slot in changed]:
            await world.fleet.stop(worker, "busy")
            await world.fleet.ready()
