"""A line to Postgres that is cut at a chosen message of the protocol.

    async with wired(dsn) as (wire, through):
        connection = await asyncpg.connect(through)
        uncut = wire.watch()
        await connection.execute("SELECT 1")
        uncut.seen["to_server"]                     # ['Q']
        wire.watch(cut=Cut("to_client", 1))
        await connection.execute("SELECT 1")        # is carried out, and never answered

It knows how messages begin and end and nothing else: a letter and a length, except for the first message of a
connection, which has no letter. Encryption is declined, since nothing could be seen through it.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

Direction = Literal["to_server", "to_client"]

_FIRST = "^"  # stands for the letter that the first message of a connection does not have
_CANCEL, _ENCRYPT = 80877102, (80877103, 80877104)  # codes in place of the protocol's version
# Closing with this sends RST, as a firewall or a crashed machine would, and no orderly FIN.
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where: at the `number`-th message in a direction since the watch began. How: in one of two ways.

    `closed` resets the connections on both sides; `half_open` lets nothing pass any more, and tells nobody.
    """

    direction: Direction
    number: int
    where: Literal["before", "within", "after"] = "before"
    how: Literal["closed", "half_open"] = "closed"

    def __str__(self) -> str:
        return f"{self.how} {self.where} message {self.number} {self.direction}"


class Watch:
    """The messages of the connections with one application name, or of all, and the cut to be made among them."""

    def __init__(self, name: str | None, cut: Cut | None) -> None:
        self.name = name
        self.cut = cut
        self.seen: dict[Direction, list[str]] = {"to_server": [], "to_client": []}  # their letters
        self.made = asyncio.Event()

    def hit_by(self, name: str, direction: Direction, letter: str) -> Cut | None:
        """Count a message; the cut, if it is to be made here. It is made once."""
        if self.made.is_set() or self.name not in (None, name):
            return None
        self.seen[direction].append(letter)
        if self.cut is None or (self.cut.direction, self.cut.number) != (direction, len(self.seen[direction])):
            return None
        self.made.set()
        return self.cut


class _Line:
    """One connection: from the client to the proxy, and from there to the server."""

    def __init__(self, name: str, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.name = name
        self.sinks: dict[Direction, asyncio.StreamWriter] = {"to_client": client, "to_server": server}
        self.pumps: list[asyncio.Task[None]] = []
        for sink in self.sinks.values():
            sink.transport.set_write_buffer_limits(0)  # drained means sent

    def freeze(self) -> None:
        for pump in self.pumps:
            pump.cancel()

    def reset(self) -> None:
        self.freeze()
        for sink in self.sinks.values():
            with contextlib.suppress(OSError):
                sink.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sink.transport.abort()


class Wire:
    """Forwards to one server. One watch at a time looks on."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._half_open: set[_Line] = set()
        self._greeting: set[asyncio.Task[None]] = set()
        self._watch = Watch(None, None)
        self.passed = 0  # messages, in both directions of all connections

    async def open(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        pumps = [pump for line in self._lines for pump in line.pumps]
        self.reset()
        self.heal()
        for task in self._greeting:
            task.cancel()
        await asyncio.gather(*pumps, *self._greeting, return_exceptions=True)

    def watch(self, name: str | None = None, cut: Cut | None = None) -> Watch:
        """Count from now on, from nothing; `name` is an application name."""
        self._watch = Watch(name, cut)
        return self._watch

    def reset(self, name: str | None = None) -> int:
        """Reset the connections of an application name, or all; returns how many."""
        lines = [line for line in self._lines if name in (None, line.name)]
        for line in lines:
            self._lines.discard(line)
            line.reset()
        return len(lines)

    def heal(self) -> None:
        """Reset what is half-open: whoever waits there finds out now."""
        while self._half_open:
            self._half_open.pop().reset()

    # --- a connection ---

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = asyncio.current_task()
        assert greeting is not None
        self._greeting.add(greeting)
        try:
            await self._greet(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._greeting.discard(greeting)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the first message, to know who it is, and let it pass like the others."""
        while True:
            length = await reader.readexactly(4)
            first = length + await reader.readexactly(int.from_bytes(length) - 4)
            code = int.from_bytes(first[4:8])
            if code not in _ENCRYPT:
                break
            writer.write(b"N")
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        if code == _CANCEL:
            server_writer.write(first)
            server_writer.close()
            writer.close()
            return
        fields = first[8:].split(b"\0")
        parameters = dict(zip(fields[::2], fields[1::2], strict=False))
        name = parameters.get(b"application_name", b"").decode()
        # A worker's name has its id as the third word.
        line = _Line(" ".join(name.split()[:2]), writer, server_writer)
        self._lines.add(line)
        if await self._pass(line, "to_server", _FIRST, first):
            line.pumps = [
                asyncio.create_task(self._pump(line, "to_server", reader)),
                asyncio.create_task(self._pump(line, "to_client", server_reader)),
            ]

    async def _pump(self, line: _Line, direction: Direction, source: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            passing = True
            while passing:
                head = await source.readexactly(5)
                body = await source.readexactly(int.from_bytes(head[1:]) - 4)
                passing = await self._pass(line, direction, chr(head[0]), head + body)
            return
        # One side has closed: so does the other.
        self._lines.discard(line)
        for sink in line.sinks.values():
            sink.close()

    async def _pass(self, line: _Line, direction: Direction, letter: str, message: bytes) -> bool:
        """Forward a message, or cut the line at it and answer false."""
        self.passed += 1
        sink = line.sinks[direction]
        cut = self._watch.hit_by(line.name, direction, letter)
        if cut is None or cut.where == "after":
            sink.write(message)
        elif cut.where == "within":
            sink.write(message[: (len(message) + 1) // 2])
        await sink.drain()
        if cut is None:
            return True
        self._lines.discard(line)
        if cut.how == "closed":
            line.reset()
        else:
            self._half_open.add(line)
            line.freeze()
        return False


@contextlib.asynccontextmanager
async def wired(dsn: str) -> AsyncIterator[tuple[Wire, str]]:
    """A wire to the server of a DSN, and the DSN that leads through it."""
    parts = urlsplit(dsn)
    wire = await Wire(parts.hostname or "127.0.0.1", parts.port or 5432).open()
    credentials, _, _ = parts.netloc.rpartition("@")
    try:
        yield wire, urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{wire.port}"))
    finally:
        await wire.close()
