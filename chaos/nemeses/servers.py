"""What can happen to Postgres, to its backends, and to the pooler before it."""

import asyncio
import contextlib
import os
import random
import signal

from chaos.nemeses import NOBODY, Blow, Nemesis
from chaos.world import World
from holdfast import NewEvent
from holdfast.embedded.server import StopMode


class RestartPostgres(Nemesis):
    """Down for a while, and back on the same port."""

    def __init__(self, mode: StopMode | None, name: str, promise: str, hold: tuple[float, float] = (0.0, 3.0)) -> None:
        self.name = name
        self.promise = promise
        self._mode = mode
        self._hold = hold

    async def strike(self, world: World, rng: random.Random) -> Blow:
        world.outage_begins()
        if self._mode is None:
            await asyncio.to_thread(world.server.kill)
        else:
            await asyncio.to_thread(world.server.stop, self._mode)
        return Blow(rng.uniform(*self._hold))

    async def heal(self, world: World) -> None:
        await world.start_server()


class FreezePostgres(Nemesis):
    name, promise = "freeze_postgres", "P1: a server that answers nobody for a while (SIGSTOP) is waited for"

    def __init__(self) -> None:
        self._frozen: list[int] = []

    async def strike(self, world: World, rng: random.Random) -> Blow:
        self._frozen = world.server_processes()
        for pid in self._frozen:
            _signal(pid, signal.SIGSTOP)
        return Blow(rng.uniform(0.5, 2.0) * world.setup.lease)

    async def heal(self, world: World) -> None:
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen = []


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Terminate(Nemesis):
    """pg_terminate_backend for connections of one purpose, or all."""

    def __init__(self, purpose: str, name: str, promise: str) -> None:
        self.name = name
        self.promise = promise
        self._purpose = purpose

    async def strike(self, world: World, rng: random.Random) -> Blow:
        return Blow(details={"ended": await world.terminate(self._purpose)})


class SlowCommits(Nemesis):
    """As with a synchronous standby far away."""

    name, promise = "slow_commits", "LSN-16: however slow commits are, what is handled and not settled is bounded"

    def __init__(self, backlog: int = 1_000) -> None:
        self._backlog = backlog

    async def strike(self, world: World, rng: random.Random) -> Blow:
        keys = world.history.keys(self._backlog)
        await world.trouble([NewEvent("price.changed", {"n": key}, idempotency_key=key) for key in keys])
        await self._set(world, "commit_delay = 60000", "commit_siblings = 0")
        return Blow(rng.uniform(3.0, 6.0), hit=NOBODY)

    async def heal(self, world: World) -> None:
        await self._set(world, "commit_delay = DEFAULT", "commit_siblings = DEFAULT")

    async def _set(self, world: World, *settings: str) -> None:
        async with world.admin() as connection:
            for setting in settings:
                await connection.execute(f"ALTER SYSTEM SET {setting}")
            await connection.execute("SELECT pg_reload_conf()")


class KillPooler(Nemesis):
    name, promise = "kill_pooler", "B4: a pooler that dies takes its connections along, and nothing else"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        world.around.kill()
        return Blow(rng.uniform(0.0, 3.0))

    async def heal(self, world: World) -> None:
        world.around.kill()
        world.around.start()


class Failover(Nemesis):
    name, promise = "failover", "B7: a standby takes over; with synchronous replication nothing is lost"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        orderly = rng.random() < 0.5
        await world.around.promote(orderly=orderly)
        return Blow(details={"orderly": orderly})
