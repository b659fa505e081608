"""An HTTP endpoint for Prometheus: GET /metrics, nothing else, no framework.

It goes on while the database does not answer: the response is 503 then, and Prometheus' own `up` shows it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import AsyncIterator, Container, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import structlog

from holdfast.errors import HoldfastError
from holdfast.observability import prometheus
from holdfast.postgres.operations.metrics import READ_FAULTS, MetricsSource
from holdfast.redact import redact_secrets

PATH: Final = "/metrics"
# The database is read at most once in this time, in seconds, however many requests come.
FRESH_FOR: Final = 1.0
# Less than the ten seconds after which Prometheus gives up on a scrape.
_PATIENCE = 8.0
_REQUEST_PATIENCE = 5.0
_LONGEST_REQUEST = 16_384

_log = structlog.get_logger("holdfast")


class Scraper:
    """The metrics of one schema, cached for as long as they are fresh."""

    def __init__(self, dsn: str, schema: str = "core") -> None:
        prometheus.require()
        self._source = MetricsSource(dsn, schema, timeout=_PATIENCE)
        self._turn = asyncio.Lock()
        self._read_at = float("-inf")
        self._text: str | None = None
        self._unavailable = False

    async def metrics(self) -> str | None:
        """The metrics; None when the database does not answer."""
        async with self._turn:
            if time.monotonic() - self._read_at >= FRESH_FOR:
                self._text = await self._read()
                self._read_at = time.monotonic()
            return self._text

    async def _read(self) -> str | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                snapshot = await self._source.read()
        except (HoldfastError, *READ_FAULTS) as error:
            self._source.drop()
            if not self._unavailable:
                _log.error("metrics_unavailable", error=redact_secrets(str(error) or type(error).__name__))
            self._unavailable = True
            return None
        if self._unavailable:
            _log.info("metrics_available")
        self._unavailable = False
        return prometheus.render(snapshot)

    async def close(self) -> None:
        """Close the connection to the database."""
        await self._source.close()


@asynccontextmanager
async def serve(scraper: Scraper, host: str, port: int, allowed: Iterable[str] = ()) -> AsyncIterator[int]:
    """Serve on an address inside the block; yields the port, which the system chooses for port 0.

    A request must be for an address, this machine's name, `localhost` or a host in `allowed`: a web page whose name was
    made to lead here sends that name instead.
    """
    names = frozenset(name.lower().rstrip(".") for name in (host, "localhost", socket.gethostname(), *allowed))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_PATIENCE):
                request = await reader.readuntil(b"\r\n\r\n")
            writer.write(await _respond(request, scraper, names))
            async with asyncio.timeout(_REQUEST_PATIENCE):
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long\n"))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone, or too slow
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_LONGEST_REQUEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await scraper.close()


async def _respond(request: bytes, scraper: Scraper, names: Container[str]) -> bytes:
    method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    target, _, protocol = rest.rpartition(" ")
    if not protocol.startswith("HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST, "this is not HTTP\n")
    if not _is_for_us(request, names):
        return _response(HTTPStatus.MISDIRECTED_REQUEST, "this host is not served; name it with --allow-host\n")
    if method != "GET":
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported\n", "Allow: GET\r\n")
    if target.partition("?")[0] != PATH:
        return _response(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}\n")
    metrics = await scraper.metrics()
    if metrics is None:
        return _response(HTTPStatus.SERVICE_UNAVAILABLE, "the database does not answer\n")
    return _response(HTTPStatus.OK, metrics)


def _is_for_us(request: bytes, names: Container[str]) -> bool:
    """Whether the one `Host` field of a request names us. An address does: only names can be made to lead elsewhere."""
    fields = [line.partition(b":") for line in request.split(b"\r\n")[1:]]
    hosts = [value.decode("latin-1").strip() for name, _, value in fields if name.strip().lower() == b"host"]
    if len(hosts) != 1:
        return False
    host = re.sub(r":[0-9]*$", "", hosts[0]).lower().rstrip(".")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host in names
    return True


def _response(status: HTTPStatus, text: str, headers: str = "") -> bytes:
    body = text.encode()
    kind = prometheus.CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
