"""What a transaction pooler looks like to a client: another backend answers than the one that was introduced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the answers of the server on, with another pid in its BackendKeyData."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        kind = await reader.readexactly(1)
        if kind in b"NS":
            writer.write(kind)
            kind = await reader.readexactly(1)
        while True:
            size = await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(size, "big") - 4)
            if kind == b"K":
                body = (999_999).to_bytes(4, "big") + body[4:]
            writer.write(kind + size + body)
            if kind == b"K":
                break
            kind = await reader.readexactly(1)
    await _copy(reader, writer)


@contextlib.asynccontextmanager
async def pooler(dsn: str) -> AsyncIterator[str]:
    """The address of a relay that every client takes for a transaction pooler."""
    parts = urlsplit(dsn)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(_copy(reader, downstream), _introduce(upstream, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield dsn.replace(f":{parts.port}/", f":{port}/")
    finally:
        server.close()
