"""A TCP proxy before the database, to cut lines in ways that a server cannot."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Forwards to the database. `freeze` makes every line it has half-open: nothing passes, nothing is closed.

    A line over which `cut_at` would pass, in either direction, is cut before it does, as long as `cuts` is above zero.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lines: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._frozen_lines: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._frozen: set[asyncio.Task[None]] = set()
        self.refusing = False
        self.cut_at = b""
        self.cuts = 0
        self.attempts: list[float] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts.append(time.monotonic())
        if self.refusing:
            writer.transport.abort()
            return
        try:
            back_reader, back_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._lines.append((writer, back_writer))
        for source, sink in ((reader, back_writer), (back_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await source.read(65536):
                if self.cuts and self.cut_at in data:
                    self.cuts -= 1
                    self._cut(sink)
                    return
                sink.write(data)
                await sink.drain()
            sink.close()

    def _cut(self, side: asyncio.StreamWriter) -> None:
        for line in self._lines:
            if side in line:
                for each in line:
                    each.transport.abort()

    def freeze(self) -> int:
        """Make the lines of this moment half-open; later ones pass. Returns how many."""
        lines = len(self._lines)
        for pump in self._pumps:
            pump.cancel()
        for front, back in self._lines:
            for side in (front, back):
                side.transport.pause_reading()  # type: ignore[attr-defined]
        self._frozen_lines += self._lines
        self._lines = []
        return lines

    def close(self) -> None:
        for front, back in [*self._lines, *self._frozen_lines]:
            front.transport.abort()
            back.transport.abort()


@contextlib.asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy and the DSN that leads through it."""
    parts = urlsplit(dsn)
    assert parts.hostname is not None and parts.port is not None
    proxy = Proxy(parts.hostname, parts.port)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    credentials = parts.netloc.rpartition("@")[0]
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{port}"))
    finally:
        server.close()
        proxy.close()
        await asyncio.sleep(0)
