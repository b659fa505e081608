"""What some faults need around the workers: a pooler, a network of their own, a small disk, a standby, wrong clocks.

Each knows whether this machine has what it takes, and says what is missing.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from urllib.parse import urlsplit

import asyncpg

from chaos.clock import FAKETIME, KEEP_MONOTONIC, MISSING, ServerClock
from chaos.wire import Wire
from chaos.world import DATABASE, World
from holdfast.embedded import EmbeddedPostgres

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Surrounding:
    """`missing` says why it cannot be had here, or nothing; `around` is entered when the server runs."""

    around: Callable[[World], AbstractAsyncContextManager[None]]
    missing: Callable[[], str] = lambda: ""


def _run(*command: str) -> str:
    """The error of a command that failed."""
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    return "" if run.returncode == 0 else f"{' '.join(command[:3])}: {run.stderr.strip() or run.returncode}"


def _must(*command: str) -> None:
    if error := _run(*command):
        raise RuntimeError(error)


def _account() -> pwd.struct_passwd | None:
    """Servers refuse to run as root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


@contextlib.asynccontextmanager
async def _nothing(world: World) -> AsyncIterator[None]:
    yield


PLAIN = Surrounding(_nothing)

# --- pgbouncer --------------------------------------------------------------------------------------------

POOLER = """
[databases]
* = host=127.0.0.1 port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 20
server_login_retry = 1
"""


def _no_pooler() -> str:
    return "" if shutil.which("pgbouncer", path=PATH) else "pgbouncer is not installed (apt-get install pgbouncer)"


class Pooler:
    """pgbouncer in transaction mode, which can be killed and started again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process: subprocess.Popen[bytes] | None = None
        self._configuration = world.directory / "pgbouncer.ini"

    @contextlib.asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        world = self._world
        port = free_port()
        parts = urlsplit(world.address("chaos_worker", world.server.port))
        self._configuration.write_text(
            POOLER.format(port=parts.port, user=parts.username, password=parts.password, listen=port)
        )
        self._configuration.chmod(0o644)
        self.start()
        world.worker_target = port
        world.around = self
        world.after_workers = self.kill
        try:
            yield
        finally:
            self.kill()

    def start(self) -> None:
        account = _account()
        program = shutil.which("pgbouncer", path=PATH)
        assert program is not None
        with (self._world.directory / "pgbouncer.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, str(self._configuration)], user=account.pw_uid if account else None, stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


POOLED = Surrounding(lambda world: Pooler(world).around(), _no_pooler)

# --- lines that know the protocol -------------------------------------------------------------------------


class Wires:
    """One for the workers and one for the producers, each to be cut at a message."""

    def __init__(self, port: int) -> None:
        self.workers = Wire("127.0.0.1", port)
        self.producers = Wire("127.0.0.1", port)


@contextlib.asynccontextmanager
async def _wired(world: World) -> AsyncIterator[None]:
    world.around = wires = Wires(world.server.port)
    await wires.workers.open()
    await wires.producers.open()
    world.worker_target, world.producer_target = wires.workers.port, wires.producers.port
    try:
        yield
    finally:
        await wires.workers.close()
        await wires.producers.close()


WIRED = Surrounding(_wired)

# --- a network namespace ----------------------------------------------------------------------------------


class Namespace:
    """Workers behind a pair of virtual network cards, whose link can be taken down: packets vanish, nobody is told."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"chaos{os.getpid()}"
        self.outside, self.inside = f"ch{os.getpid()}o", f"ch{os.getpid()}i"
        self.host, self.guest = f"10.213.{number}.1", f"10.213.{number}.2"

    def open(self) -> str:
        """The error, if it cannot be made."""
        steps = (
            f"ip netns add {self.name}",
            f"ip link add {self.outside} type veth peer name {self.inside} netns {self.name}",
            f"ip addr add {self.host}/30 dev {self.outside}",
            f"ip link set {self.outside} up",
            f"ip -n {self.name} addr add {self.guest}/30 dev {self.inside}",
            f"ip -n {self.name} link set {self.inside} up",
            f"ip -n {self.name} link set lo up",
        )
        for step in steps:
            if error := _run(*step.split()):
                self.close()
                return error
        return ""

    def close(self) -> None:
        _run("ip", "link", "del", self.outside)
        _run("ip", "netns", "del", self.name)

    def link(self, state: str) -> None:
        _must("ip", "link", "set", self.outside, state)


def no_namespace() -> str:
    if shutil.which("ip", path=PATH) is None:
        return "ip is not installed (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    namespace = Namespace()
    error = namespace.open()
    namespace.close()
    return f"network namespaces cannot be made here: {error}" if error else ""


@contextlib.asynccontextmanager
async def _in_namespace(world: World) -> AsyncIterator[None]:
    namespace = Namespace()
    if error := namespace.open():
        raise RuntimeError(error)
    world.worker_host = namespace.host
    world.around = namespace
    ip = shutil.which("ip", path=PATH)
    world.fleet.prefix = lambda _slot: (str(ip), "netns", "exec", namespace.name)
    try:
        yield
    finally:
        namespace.close()


NAMESPACE = Surrounding(_in_namespace, no_namespace)

# --- a small disk -----------------------------------------------------------------------------------------

DISK_SIZE = "160m"


def _no_mount() -> str:
    return "" if os.geteuid() == 0 else "mounting a small disk needs root"


@contextlib.asynccontextmanager
async def _small_disk(world: World) -> AsyncIterator[None]:
    disk = world.directory / "disk"
    disk.mkdir()
    _must("mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE},mode=755", "tmpfs", str(disk))
    try:
        space = disk / "space"
        space.mkdir()
        if account := _account():
            os.chown(space, account.pw_uid, account.pw_gid)
        connection = await asyncpg.connect(world.server.dsn)
        await connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        await connection.execute(f"ALTER DATABASE {DATABASE} SET TABLESPACE small")
        await connection.close()
        yield
    finally:
        await asyncio.to_thread(world.server.stop, "immediate")
        _run("umount", "--lazy", str(disk))


SMALL_DISK = Surrounding(_small_disk, _no_mount)

# --- clocks -----------------------------------------------------------------------------------------------

SKEWS = ("+10m", "-10m", "+0")


def _no_faketime() -> str:
    return "" if FAKETIME else MISSING


@contextlib.asynccontextmanager
async def _skewed(world: World) -> AsyncIterator[None]:
    world.fleet.environment = lambda slot: {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME": SKEWS[slot % len(SKEWS)],
        **KEEP_MONOTONIC,
    }
    yield


SKEWED_CLOCKS = Surrounding(_skewed, _no_faketime)


@contextlib.asynccontextmanager
async def _stepping(world: World) -> AsyncIterator[None]:
    world.around = clock = ServerClock(world.directory / "clock")
    port = world.server.port
    await asyncio.to_thread(world.server.stop)
    world.server = EmbeddedPostgres(
        world.directory / "postgres", settings=world.setup.server, port=port, environment=clock.environment
    )
    await asyncio.to_thread(world.server.start)
    # After a step forward workers go by the time before it, until every living one has extended its leases.
    world.recovery += world.setup.lease
    yield


STEPPING_CLOCK = Surrounding(_stepping, _no_faketime)
