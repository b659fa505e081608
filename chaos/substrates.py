"""Brokers that carry the events, each server behind a line that can be cut: three of NATS, a Valkey with a replica.

Every one of them confirms only what a kill of its servers cannot take away.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import nats

from chaos.network import Line
from chaos.surroundings import Surrounding
from chaos.world import World
from servers.nats import NatsCluster
from servers.processes import ServerProcess
from servers.rabbitmq import SCRIPTS, RabbitmqServer
from servers.valkey import DURABLE, ValkeyServer

_ADMIN_SECONDS = 5.0


class Broker:
    """The servers of one broker. What is killed or frozen stays so until `heal`."""

    def __init__(self, nodes: Sequence[ServerProcess]) -> None:
        self.nodes = list(nodes)
        self.lines = [Line("127.0.0.1", node.port) for node in nodes]
        self._frozen: set[ServerProcess] = set()
        self._dead: set[ServerProcess] = set()

    @property
    def address(self) -> str:
        """What workers are given: the lines, and never the servers themselves."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def around(self, world: World) -> AsyncIterator[None]:
        try:
            for node in self.nodes:
                node.spawn()
            await asyncio.to_thread(self._wait)
            for line in self.lines:
                await line.open()
            world.around, world.substrate = self, self.address
            yield
        finally:
            for line in self.lines:
                await line.close()
            for node in self.nodes:
                node.kill()

    def kill(self, nodes: Sequence[ServerProcess]) -> None:
        for node in nodes:
            self._dead.add(node)
            node.kill()

    def freeze(self, node: ServerProcess) -> None:
        self._frozen.add(node)
        os.kill(node.pid, signal.SIGSTOP)

    async def heal(self) -> None:
        """Start what is dead, and wake what is frozen. What it takes to serve again is the workers' to wait for."""
        frozen, self._frozen = self._frozen, set()
        for node in frozen - self._dead:
            os.kill(node.pid, signal.SIGCONT)
        for node in list(self._dead):
            self.before_start(node)
            node.spawn()
            await asyncio.to_thread(node.wait_until_listening)
            self._dead.discard(node)

    def before_start(self, node: ServerProcess) -> None:
        """Change how a server is started again, where that depends on the others."""

    async def leader(self) -> ServerProcess:
        """Return the server that all others wait for."""
        return self.nodes[0]

    def _wait(self) -> None:
        for node in self.nodes:
            node.wait_until_listening()

    def _hosts(self) -> str:
        return ",".join(f"127.0.0.1:{line.port}" for line in self.lines)


class Nats(Broker):
    """Three servers, and streams with three replicas."""

    def __init__(self, folder: Path) -> None:
        self._servers = NatsCluster(folder).servers
        super().__init__(self._servers)

    @property
    def address(self) -> str:
        return f"nats://{self._hosts()}"

    async def leader(self) -> ServerProcess:
        alive = [node.address for node in self._servers if node not in self._dead | self._frozen]
        async with asyncio.timeout(_ADMIN_SECONDS):
            client = await nats.connect(alive, allow_reconnect=False, connect_timeout=1)
            try:
                streams = await client.jetstream(timeout=2).streams_info()
            finally:
                await client.close()
        name = streams[0].cluster.leader if streams and streams[0].cluster else None
        return next((node for node in self._servers if node.name == name), self._servers[0])

    def _wait(self) -> None:
        super()._wait()
        for node in self._servers:
            node.wait_until_healthy()


class Valkey(Broker):
    """A server with a replica, which has everything before it is confirmed, and can take its place."""

    def __init__(self, folder: Path) -> None:
        self._servers = [ValkeyServer(folder / name, *DURABLE) for name in ("one", "two")]
        super().__init__(self._servers)
        self._alone = {node: list(node.command) for node in self._servers}
        self._primary = self._servers[0]
        self.replication = Line("127.0.0.1", self._primary.port)

    @property
    def address(self) -> str:
        return f"redis://{self._hosts()}?replicas=1"

    @contextlib.asynccontextmanager
    async def around(self, world: World) -> AsyncIterator[None]:
        await self.replication.open()
        for node in self._servers:
            self.before_start(node)
        try:
            async with super().around(world):
                yield
        finally:
            await self.replication.close()

    def before_start(self, node: ServerProcess) -> None:
        follow = ["--replicaof", f"127.0.0.1 {self.replication.port}", "--repl-ping-replica-period", "1"]
        node.command = self._alone[node] + ([] if node is self._primary else follow)  # type: ignore[index]

    async def leader(self) -> ServerProcess:
        return self._primary

    async def promote(self) -> None:
        """Kill the server, and let its replica take its place; it comes back as the replica."""
        old = self._primary
        new = next(node for node in self._servers if node is not old)
        self.kill([old])
        async with asyncio.timeout(_ADMIN_SECONDS), new.client() as client:
            await client.execute_command("REPLICAOF", "NO", "ONE")
        self._primary = new
        self.replication.target = ("127.0.0.1", new.port)
        self.replication.cut()

    def _wait(self) -> None:
        for node in self._servers:
            node.wait_until_listening()
            node.wait_until_ready()


class Rabbitmq(Broker):
    """One node, with what it has confirmed on its disk."""

    def __init__(self, folder: Path) -> None:
        self._node = RabbitmqServer(folder)
        super().__init__([self._node])

    @property
    def address(self) -> str:
        return f"amqp://guest:guest@{self._hosts()}/"

    @contextlib.asynccontextmanager
    async def around(self, world: World) -> AsyncIterator[None]:
        try:
            async with super().around(world):
                yield
        finally:
            self._node.stop()


def _no_rabbitmq() -> str:
    return (
        "" if (SCRIPTS / "rabbitmq-server").exists() else "RabbitMQ is not installed (apt-get install rabbitmq-server)"
    )


SUBSTRATES = {
    "nats": Surrounding(lambda world: Nats(world.directory / "nats").around(world)),
    "redis": Surrounding(lambda world: Valkey(world.directory / "valkey").around(world)),
    "rabbitmq": Surrounding(lambda world: Rabbitmq(world.directory / "rabbitmq").around(world), _no_rabbitmq),
}
