"""Metrics over HTTP: GET /metrics, of an outbox or of a worker.

That of an outbox goes on while the database does not answer: the response is 503 then, and Prometheus' own `up` shows
it. That of a worker needs no database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from holdfast.errors import HoldfastError
from holdfast.observability import http, prometheus
from holdfast.observability.http import Page, Request, Response, Site
from holdfast.observability.logging import logger
from holdfast.postgres.operations.metrics import READ_FAULTS, MetricsSource, Snapshot
from holdfast.redact import redact_secrets

if TYPE_CHECKING:
    from prometheus_client import Metric

PATH: Final = "/metrics"
# The database is read at most once in this time, in seconds, however many requests come.
FRESH_FOR: Final = 1.0
# Less than the ten seconds after which Prometheus gives up on a scrape.
_PATIENCE = 8.0


class Scraper:
    """The state of one schema, cached for as long as it is fresh."""

    def __init__(self, dsn: str, schema: str = "core") -> None:
        prometheus.require()
        self._source = MetricsSource(dsn, schema, timeout=_PATIENCE)
        self._turn = asyncio.Lock()
        self._read_at = float("-inf")
        self._snapshot: Snapshot | None = None
        self._unavailable = False

    async def snapshot(self) -> Snapshot | None:
        """The state; None when the database does not answer."""
        async with self._turn:
            if time.monotonic() - self._read_at >= FRESH_FOR:
                self._snapshot = await self._read()
                self._read_at = time.monotonic()
            return self._snapshot

    async def _read(self) -> Snapshot | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                snapshot = await self._source.read()
        except (HoldfastError, *READ_FAULTS) as error:
            self._source.drop()
            if not self._unavailable:
                logger().error("metrics_unavailable", error=redact_secrets(str(error) or type(error).__name__))
            self._unavailable = True
            return None
        if self._unavailable:
            logger().info("metrics_available")
        self._unavailable = False
        return snapshot

    async def close(self) -> None:
        """Close the connection to the database."""
        await self._source.close()


def outbox_page(scraper: Scraper) -> Page:
    """Return the page with the state of an outbox."""

    async def page(request: Request) -> Response:
        snapshot = await scraper.snapshot()
        if snapshot is None:
            return Response("the database does not answer\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return _response(lambda: prometheus.outbox_metrics(snapshot), request)

    return page


def outboxes_page(scrapers: Mapping[str, Scraper]) -> Page:
    """Return the page with the state of the outboxes of several databases, by their names."""

    async def page(request: Request) -> Response:
        found = await asyncio.gather(*(scraper.snapshot() for scraper in scrapers.values()))
        snapshots = dict(zip(scrapers, found, strict=True))
        return _response(lambda: prometheus.outboxes_metrics(snapshots), request)

    return page


def process_page(collect: Callable[[], Iterable[Metric]]) -> Page:
    """Return the page with what a process has done."""
    prometheus.require()

    async def page(request: Request) -> Response:
        return _response(collect, request)

    return page


def _response(collect: Callable[[], Iterable[Metric]], request: Request) -> Response:
    text, content_type = prometheus.exposition(collect, request.fields.get("accept", ""))
    return Response(text, content_type=content_type)


@asynccontextmanager
async def serve(
    scrapers: Mapping[str, Scraper], host: str, port: int, allowed: Iterable[str] = ()
) -> AsyncIterator[int]:
    """Serve the state of the outboxes on an address inside the block; yields the port. One may have an empty name."""
    page = outbox_page(scrapers[""]) if "" in scrapers else outboxes_page(scrapers)
    try:
        async with http.serve([Site(host, port, {PATH: page}, tuple(allowed))]) as (bound,):
            yield bound
    finally:
        for scraper in scrapers.values():
            await scraper.close()
