"""A TCP line to the database that can be cut, refused, frozen and swallowed."""

import asyncio
import contextlib
import socket
import struct
import time
from typing import Self

Side = asyncio.StreamWriter
# Closing with this sends RST, as a firewall or a crashed machine would, and no orderly FIN.
_RESET = struct.pack("ii", 1, 0)


class Line:
    """Forwards to one address. What is frozen stays half-open: nothing passes, and nobody is told."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.attempts: list[float] = []  # when somebody tried to connect
        self._server: asyncio.Server | None = None
        self._open: dict[tuple[Side, Side], list[asyncio.Task[None]]] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._frozen: list[tuple[Side, ...]] = []
        self._muted: list[tuple[Side, Side]] = []
        self._refusing = self._swallowing = False

    async def open(self, host: str = "127.0.0.1") -> Self:
        self._server = await asyncio.start_server(self._accept, host, 0)
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    # --- faults ---

    def cut(self) -> int:
        """Reset every connection; returns how many."""
        cut = list(self._open)
        for pair in cut:
            self._end(pair)
        return len(cut)

    def refuse(self) -> int:
        """Reset every connection, and every new one at once."""
        self._refusing = True
        return self.cut()

    def freeze(self, *, swallow: bool = False) -> int:
        """Make all connections half-open; with `swallow` new ones are accepted and get no answer either."""
        self._swallowing = swallow
        frozen = list(self._open.items())
        for pair, pumps in frozen:
            for pump in pumps:
                pump.cancel()
            for side in pair:
                with contextlib.suppress(RuntimeError):  # it is closing already
                    side.transport.pause_reading()  # type: ignore[attr-defined]
            self._frozen.append(pair)
        self._open.clear()
        return len(frozen)

    def mute(self) -> int:
        """Requests still arrive and are carried out; no answer comes back any more."""
        muted = list(self._open.items())
        for pair, (_requests, answers) in muted:
            answers.cancel()
            self._muted.append(pair)
        return len(muted)

    def heal(self) -> None:
        """New connections pass. Frozen and muted ones are reset: whoever still waits on them finds out now."""
        for muted in self._muted:
            self._end(muted)
        self._muted.clear()
        self._refusing = self._swallowing = False
        for pair in self._frozen:
            for side in pair:
                _reset(side)
        self._frozen.clear()

    # --- forwarding ---

    async def _accept(self, reader: asyncio.StreamReader, front: Side) -> None:
        self.attempts.append(time.monotonic())
        if self._refusing:
            _reset(front)
            return
        if self._swallowing:
            self._frozen.append((front,))
            return
        try:
            back_reader, back = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(front)
            return
        pair = front, back
        if self._refusing or self._swallowing:
            self._end(pair)
            return
        self._open[pair] = [
            asyncio.create_task(self._pump(pair, reader, back)),
            asyncio.create_task(self._pump(pair, back_reader, front)),
        ]
        for pump in self._open[pair]:
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, pair: tuple[Side, Side], source: asyncio.StreamReader, sink: Side) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        # One side has closed. The other is told in order, after what it was sent.
        for side in pair:
            side.close()
        self._open.pop(pair, None)

    def _end(self, pair: tuple[Side, Side]) -> None:
        for pump in self._open.pop(pair, []):
            pump.cancel()
        for side in pair:
            _reset(side)


def _reset(side: Side) -> None:
    connection = side.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    side.transport.abort()
