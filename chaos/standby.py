"""A streaming standby, made from the primary by pg_basebackup, that can take its place."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from urllib.parse import unquote, urlsplit

from chaos.surroundings import Surrounding, free_port
from chaos.world import World
from holdfast.embedded import EmbeddedPostgres, EmbeddedPostgresError, PostgresBinaries, find_binaries
from holdfast.embedded.account import server_account
from holdfast.embedded.binaries import reachable_copy

_PATIENCE = 30.0
_READ_ONLY = {"default_transaction_read_only": "on"}


class Standby:
    """The second server. Commits on the first one wait for it, so that none is lost with the first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._account = server_account()
        self._binaries = reachable_copy(find_binaries(), self._account)
        self._data = world.directory / "standby"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.promoted = False

    @contextlib.asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        world = self._world
        world.around = self
        try:
            await asyncio.to_thread(self._copy)
            self._start()
            await self._until("SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'")
            async with world.admin() as connection:
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                await connection.execute("SELECT pg_reload_conf()")
            await self._until("SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
            world.worker_address = lambda: self._both("chaos_worker")
            world.producer_address = lambda: self._both("chaos_producer")
            yield
        finally:
            self._stop()

    async def promote(self, *, orderly: bool) -> None:
        """Let the standby take over from a primary that crashes, or that is made read-only first."""
        world = self._world
        if orderly:
            async with world.admin() as connection:
                await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
                await connection.execute("SELECT pg_reload_conf()")
            await asyncio.sleep(0.5)  # sessions of that time meet a server that refuses to write (25006)
            await world.terminate()
            await self._until("SELECT bool_and(replay_lsn >= pg_current_wal_flush_lsn()) FROM pg_stat_replication")
        else:
            await asyncio.to_thread(world.server.stop, "immediate")
        began = time.monotonic()
        world.outage_begins()
        world.admin_port = self.port
        world.observer.dsn = world.admin_address
        # Not to be waited for in the statement: its snapshot can be in the way of the replay that comes first.
        await world.ask("SELECT pg_promote(false)")
        await self._until("SELECT NOT pg_is_in_recovery()")
        self.promoted = True
        world.outages[-1] = (began, time.monotonic())
        if not orderly:
            # The old primary comes back, and must not be taken for the new one.
            world.server = EmbeddedPostgres(
                world.directory / "postgres", settings={**world.setup.server, **_READ_ONLY}, port=world.server.port
            )
            await asyncio.to_thread(world.server.start)

    def _both(self, role: str) -> str:
        first = self._world.address(role, self._world.server.port)
        hosts = f"127.0.0.1:{self._world.server.port},127.0.0.1:{self.port}"
        return first.replace(f"127.0.0.1:{self._world.server.port}", hosts) + "&target_session_attrs=read-write"

    async def _until(self, sql: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not await self._world.ask(sql):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_PATIENCE:g} s: {sql}")
            await asyncio.sleep(0.05)

    def _copy(self) -> None:
        parts = urlsplit(self._world.server.dsn)
        command = [
            self._binaries.program("pg_basebackup"),
            *("--host", str(parts.hostname), "--port", str(parts.port), "--username", str(parts.username)),
            *("--pgdata", str(self._data), "--write-recovery-conf", "--wal-method", "stream", "--checkpoint", "fast"),
        ]
        environment = {**os.environ, "PGPASSWORD": unquote(parts.password or "")}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        for directory, _, files in os.walk(self._data):
            for path in (directory, *(os.path.join(directory, file) for file in files)):
                if self._account.uid is not None and self._account.gid is not None:
                    os.chown(path, self._account.uid, self._account.gid)

    def _start(self) -> None:
        settings = {
            **self._world.setup.server,
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "hot_standby": "on",
        }
        command = [self._binaries.program("postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self._world.directory / "standby.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._account.popen_arguments()
            )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()


def _missing() -> str:
    try:
        binaries: PostgresBinaries = find_binaries()
    except EmbeddedPostgresError as error:
        return str(error)
    return "" if shutil.which(binaries.program("pg_basebackup")) else "this Postgres has no pg_basebackup"


STANDBY = Surrounding(lambda world: Standby(world).around(), _missing)
