"""An HTTP endpoint for Prometheus: GET /metrics, nothing else, no framework.

It lives as long as it is wanted, whatever becomes of the database: while that does not answer, neither do the metrics
(503), and Prometheus' own `up` says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import asyncpg
import structlog

from holdfast.errors import HoldfastError
from holdfast.observability.prometheus import CONTENT_TYPE, scrape
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.redact import redact_dsn

PATH: Final = "/metrics"
# However many ask, and however often: the database is asked once in this time.
FRESH_FOR: Final = 1.0
# Less than the ten seconds after which Prometheus gives up.
_PATIENCE = 8.0
_REQUEST_PATIENCE = 5.0
_LONGEST_REQUEST = 16_384

_log = structlog.get_logger("holdfast")


class Scraper:
    """One connection to the database, and the last answer for as long as it is fresh."""

    def __init__(self, dsn: str, schema: str = "core") -> None:
        self._address = Address(dsn)
        self._schema = schema
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()
        self._asked_at = float("-inf")
        self._answer: str | None = None
        self._silent = False

    async def metrics(self) -> str | None:
        """The metrics; None when the database does not answer."""
        async with self._turn:
            if time.monotonic() - self._asked_at >= FRESH_FOR:
                self._answer = await self._ask()
                self._asked_at = time.monotonic()
            return self._answer

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                connection = await self._connected()
                answer = await scrape(connection, self._schema)
        except (HoldfastError, asyncpg.PostgresError, *CONNECTION_FAULTS) as error:
            self._drop()
            if not self._silent:
                _log.error("metrics_unavailable", error=redact_dsn(str(error) or type(error).__name__))
            self._silent = True
            return None
        if self._silent:
            _log.info("metrics_available")
        self._silent = False
        return answer

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            await self._address.probe()
            self._connection = await connect(self._address, "metrics", statement_timeout=_PATIENCE)
            await migrate.require_current(self._connection, self._schema)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2)
            except CONNECTION_FAULTS:
                connection.terminate()


@asynccontextmanager
async def serve(scraper: Scraper, host: str, port: int) -> AsyncIterator[int]:
    """Answer on an address inside the block; yields the port, which port 0 leaves to the system."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_PATIENCE):
                request = await reader.readuntil(b"\r\n\r\n")
            writer.write(await _respond(request, scraper))
            async with asyncio.timeout(_REQUEST_PATIENCE):
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long\n"))
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever asked is gone, or asked too slowly
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_LONGEST_REQUEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await scraper.close()


async def _respond(request: bytes, scraper: Scraper) -> bytes:
    method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    target, _, protocol = rest.rpartition(" ")
    if not protocol.startswith("HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST, "this is not HTTP\n")
    if method != "GET":
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "GET is all there is\n", "Allow: GET\r\n")
    if target.partition("?")[0] != PATH:
        return _response(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}\n")
    metrics = await scraper.metrics()
    if metrics is None:
        return _response(HTTPStatus.SERVICE_UNAVAILABLE, "the database does not answer\n")
    return _response(HTTPStatus.OK, metrics)


def _response(status: HTTPStatus, text: str, headers: str = "") -> bytes:
    body = text.encode()
    kind = CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
