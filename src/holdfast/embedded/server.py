"""Start, stop, crash and restart a private Postgres."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from holdfast.embedded import lifeline
from holdfast.embedded.account import server_account
from holdfast.embedded.binaries import (
    MINIMUM_MAJOR,
    PostgresBinaries,
    find_binaries,
    inspect_binaries,
    reachable_copy,
)
from holdfast.embedded.cluster import SUPERUSER, Cluster, server_environment
from holdfast.embedded.errors import EmbeddedPostgresError
from holdfast.names import is_identifier

StopMode = Literal["smart", "fast", "immediate"]

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_PORT_TRIES = 5
_DEFAULTS = {"max_connections": "200", "timezone": "UTC", "log_timezone": "UTC"}


class EmbeddedPostgres:
    """One private server on 127.0.0.1 and a Unix socket, with a generated password.

    Use it as a context manager, plain or async, or call start() and stop().

    data_dir: where the data stays between starts; None is a temporary directory that stop() removes.
    binaries: the directory of the server's programs; None takes find_binaries().
    settings: server settings by name; they win over the defaults, which leave fsync on.
    port: None takes a free one, the last one again if it is free.
    environment: variables of the server's process beside its own; nothing of the caller's environment reaches it.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        binaries: Path | PostgresBinaries | None = None,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._account = server_account(None if data_dir is None else data_dir / "cluster")
        self._binaries = reachable_copy(_chosen(binaries), self._account)
        self._settings = {**_DEFAULTS, **(settings or {})}
        self._environment = {**server_environment(), **(environment or {})}
        self._wanted_port = port
        self._port: int | None = None
        self._cluster: Cluster | None = None
        self._socket_dir: Path | None = None
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None  # the postmaster's, from its parent
        self._owner = os.getpid()

    # --- what it is ---

    @property
    def version(self) -> str:
        """The server's version, such as "18.1"."""
        return self._binaries.version

    @property
    def major(self) -> int:
        return self._binaries.major

    @property
    def running(self) -> bool:
        return self._lifeline is not None and self._lifeline.poll() is None

    @property
    def port(self) -> int:
        if self._port is None:
            raise EmbeddedPostgresError("The server has not been started. Call start() or use a with block.")
        return self._port

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._pid is None or not self.running:
            raise EmbeddedPostgresError("The server is not running. Call start() first.")
        return self._pid

    @property
    def data_dir(self) -> Path:
        return self._started_cluster().root

    @property
    def log_path(self) -> Path:
        return self._started_cluster().log

    @property
    def dsn(self) -> str:
        """The superuser's URI over loopback TCP. It contains the password: do not log it."""
        return self.database_dsn("postgres")

    @property
    def socket_dsn(self) -> str:
        """The same over the Unix socket."""
        host = quote(str(self._socket_dir), safe="")
        return f"postgresql://{SUPERUSER}:{self._password()}@/postgres?host={host}&port={self.port}"

    def database_dsn(self, name: str) -> str:
        """The URI of one of the server's databases."""
        return f"postgresql://{SUPERUSER}:{self._password()}@127.0.0.1:{self.port}/{name}"

    def __repr__(self) -> str:
        where = f"port {self._port}" if self.running else "stopped"
        return f"<EmbeddedPostgres {self.version}, {where}>"

    # --- its life ---

    def start(self) -> Self:
        """Start the server, making its data the first time, and wait until it accepts connections."""
        if self.running:
            return self
        cluster = self._open_cluster()
        try:
            cluster.initialise(self._binaries, sync=self._data_dir is not None)
            cluster.clear_stale_pid()
            self._launch(cluster)
        except BaseException:
            self._end_lifeline()
            self._clean_up()
            raise
        atexit.register(self._stop_at_exit)
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; a temporary one loses its data. Stopping a stopped server does nothing."""
        self._halt(_SIGNALS[mode])
        self._clean_up()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again on the same port and data. "immediate" is a crash followed by recovery."""
        self._halt(_SIGNALS[mode])
        self.start()

    def kill(self) -> None:
        """SIGKILL the postmaster, as the out-of-memory killer would. start() brings the data back."""
        self._halt(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # --- its databases ---

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, or copy one that nobody is connected to; returns its URI."""
        self._run_program("createdb", *(["--template", _identifier(template)] if template else []), _identifier(name))
        return self.database_dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it is there, ending whatever connections it has."""
        self._run_program("dropdb", "--if-exists", "--force", _identifier(name))

    def _run_program(self, program: str, *arguments: str) -> None:
        environment = {
            **server_environment(),
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": SUPERUSER,
            "PGPASSWORD": self._password(),
        }
        command = [self._binaries.program(program), *arguments]
        run = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
        if run.returncode != 0:
            raise EmbeddedPostgresError(f"{program} {arguments[-1]} failed: {run.stderr.strip()}")

    # --- how it is done ---

    def _open_cluster(self) -> Cluster:
        if self._cluster is None:
            if self._data_dir is None:
                self._cluster = Cluster.temporary(self._account)
            else:
                self._cluster = Cluster.at(self._data_dir, self._account)
        return self._cluster

    def _started_cluster(self) -> Cluster:
        if self._cluster is None:
            raise EmbeddedPostgresError("The server has not been started. Call start() or use a with block.")
        return self._cluster

    def _password(self) -> str:
        return self._started_cluster().password

    def _launch(self, cluster: Cluster) -> None:
        if self._socket_dir is None:
            self._socket_dir = cluster.socket_dir()
        for attempt in range(1, _PORT_TRIES + 1):
            self._port = self._choose_port(cluster)
            self._spawn(cluster)
            if self._wait_until_ready(cluster):
                cluster.remember_port(self._port)
                return
            tail = cluster.log_tail()
            collided = "could not bind" in tail or "could not create any TCP/IP sockets" in tail
            if collided and self._wanted_port is None and attempt < _PORT_TRIES:
                self._port = None  # somebody took the free port between our look and the server's bind
                continue
            remedy = f" Port {self._port} is taken: name another one, or none." if collided else ""
            raise EmbeddedPostgresError(f"Postgres {self.version} did not start.{remedy} End of {cluster.log}:\n{tail}")

    def _choose_port(self, cluster: Cluster) -> int:
        if self._wanted_port is not None:
            return self._wanted_port
        for candidate in (self._port, cluster.last_port):
            if candidate is not None and _is_free(candidate):
                return candidate
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    def _spawn(self, cluster: Cluster) -> None:
        settings = {
            **self._settings,
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "unix_socket_directories": str(self._socket_dir),
            "unix_socket_permissions": "0700",
        }
        command = [self._binaries.program("postgres"), "-D", str(cluster.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        reading, reporting = os.pipe()
        order = {
            "command": command,
            "report": reporting,
            "uid": self._account.uid,
            "gid": self._account.gid,
            "remove": [str(cluster.root), str(self._socket_dir)] if self._data_dir is None else [],
        }
        try:
            self._start_lifeline(cluster, order, reporting)
        finally:
            os.close(reporting)
            with os.fdopen(reading, "rb") as report:
                told = report.readline() if self._lifeline is not None else b""
                self._pid = int(told) if told else None

    def _start_lifeline(self, cluster: Cluster, order: dict[str, object], reporting: int) -> None:
        log = cluster.open_log()
        try:
            self._lifeline = subprocess.Popen(
                [sys.executable, "-I", "-S", lifeline.__file__, json.dumps(order)],
                pass_fds=(reporting,),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                # Ctrl-C in a terminal goes to the whole group; the server must outlive what uses it.
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _wait_until_ready(self, cluster: Cluster) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while self.running:
            postmaster = cluster.postmaster()
            if postmaster == (self._pid, "ready"):
                return True
            if time.monotonic() > deadline:
                self._end_lifeline()
                return False
            time.sleep(0.02)
        self._end_lifeline()
        return False

    def _halt(self, sign: signal.Signals) -> None:
        cluster = self._cluster
        if cluster is None or self._lifeline is None:
            return
        if self.running:
            self._signal(sign)
            try:
                self._lifeline.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGQUIT)
        self._end_lifeline()
        # After a kill the backends notice within moments; a restart must not meet them.
        cluster.wait_until_empty(_STOP_SECONDS)

    def _signal(self, sign: signal.Signals) -> None:
        """Signal the postmaster through its parent, which knows it without any file of the server's user."""
        self._order(f"signal {sign:d}")

    def _order(self, line: str) -> None:
        if self._lifeline is not None and self._lifeline.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._lifeline.stdin.write(f"{line}\n".encode())
                self._lifeline.stdin.flush()

    def _end_lifeline(self) -> None:
        """Close the pipe, upon which the lifeline stops whatever still runs, and wait for it."""
        if self._lifeline is None:
            return
        self._order("keep")  # a lifeline that reads nothing knows that we died and cleans up
        if self._lifeline.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._lifeline.stdin.close()
        self._lifeline.wait()
        self._lifeline = None
        self._pid = None

    def _clean_up(self) -> None:
        atexit.unregister(self._stop_at_exit)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._data_dir is None and self._cluster is not None:
            shutil.rmtree(self._cluster.root, ignore_errors=True)
            self._cluster = None

    def _stop_at_exit(self) -> None:
        # A forked child runs our exit functions too, and the server is not its to stop.
        if os.getpid() == self._owner:
            self.stop()


def _chosen(binaries: Path | PostgresBinaries | None) -> PostgresBinaries:
    if binaries is None:
        return find_binaries()
    if isinstance(binaries, PostgresBinaries):
        return binaries
    found = inspect_binaries(binaries.absolute())
    if found is None or found.major < MINIMUM_MAJOR:
        raise EmbeddedPostgresError(
            f"{binaries} holds no Postgres {MINIMUM_MAJOR} or later. Name its bin directory, or pass none "
            "to look for one."
        )
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does it: a closed connection's leftover must not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _identifier(name: str) -> str:
    if not is_identifier(name, 63):
        raise EmbeddedPostgresError(
            f"{name!r} cannot name a database. Use 1 to 63 lower-case letters, digits and underscores."
        )
    return name
