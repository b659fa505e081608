"""Limits and breakers of handlers, as workers use them.

The functions stand with their reasons in `sql/functions/flow.sql` and `sql/functions/breaker.sql`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, Protocol
from uuid import UUID

import asyncpg

from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.statements import NamedStatements

Cause = Literal["paused", "open", "concurrency", "ramp", "rate", "busy"]
FalterVerdict = Literal["retry", "hold", "fail", "lost"]


class Wait(NamedTuple):
    """Nothing of a handler can be claimed now, for a cause, and may be after so many seconds; None: until told."""

    handler: str
    cause: Cause
    seconds: float | None


class Failure(Protocol):
    """A transient failure of an attempt, as far as the breaker is concerned."""

    @property
    def delivery(self) -> Delivery: ...
    @property
    def delay(self) -> float: ...
    @property
    def error(self) -> str: ...
    @property
    def last(self) -> bool: ...
    @property
    def after_success(self) -> bool: ...


class Faltered(NamedTuple):
    """What has become of a delivery whose attempt failed with a transient error."""

    id: UUID
    verdict: FalterVerdict
    open: bool  # the breaker of its handler
    opened: bool  # by this failure


class FlowStatements:
    """Declares, asks and reports. Every method takes the connection it runs on."""

    def __init__(self, statements: NamedStatements) -> None:
        self._fetch = statements.fetch

    async def declare(self, connection: asyncpg.Connection, handlers: Iterable[Handler]) -> None:
        """Record what the code of the handlers declares: limits, breakers, or none."""
        some = list(handlers)
        breakers = [handler.breaker for handler in some]
        await self._fetch(
            connection,
            "flow_declare",
            handlers=[handler.name for handler in some],
            fleet_concurrencies=[handler.fleet_concurrency for handler in some],
            rates=[handler.rate for handler in some],
            breakers=[None if each is None else each.after for each in breakers],
            first_probes=[None if each is None else each.first_probe for each in breakers],
            longest_waits=[None if each is None else each.longest_wait for each in breakers],
        )

    async def limited(self, connection: asyncpg.Connection, handlers: Iterable[str]) -> frozenset[str]:
        """Return the handlers that have a limit or a breaker, or are paused."""
        rows = await self._fetch(connection, "flow_limited", handlers=list(handlers))
        return frozenset(row[0] for row in rows)

    async def waits(
        self, connection: asyncpg.Connection, handlers: Iterable[str], ended_before: datetime | None
    ) -> list[Wait]:
        """Return which of the handlers nothing can be claimed of now."""
        rows = await self._fetch(connection, "flow_waits", handlers=list(handlers), ended_before=ended_before)
        return [Wait(*row) for row in rows]

    async def falter(self, connection: asyncpg.Connection, batch: Sequence[Failure]) -> list[Faltered]:
        """Settle transient failures of handlers that have a breaker, in the order in which they came."""
        rows = await self._fetch(
            connection,
            "outbox_falter",
            ids=[each.delivery.id for each in batch],
            tokens=[each.delivery.token for each in batch],
            handlers=[each.delivery.handler.name for each in batch],
            delays=[timedelta(seconds=each.delay) for each in batch],
            errors=[each.error for each in batch],
            last=[each.last for each in batch],
            after_success=[each.after_success for each in batch],
        )
        return [Faltered(*row) for row in rows]

    async def succeed(
        self, connection: asyncpg.Connection, successes: Sequence[tuple[str, UUID]]
    ) -> list[tuple[str, bool]]:
        """Report successes by handler and token; returns the handlers whose breaker is open, or has closed with it."""
        handlers, tokens = [name for name, _ in successes], [token for _, token in successes]
        rows = await self._fetch(connection, "breaker_succeed", handlers=handlers, tokens=tokens)
        return [(row[0], row[1]) for row in rows]
