"""Limits, pauses and breakers of handlers, as operators read and change them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from holdfast.postgres.operations.connection import Statements

Breaker = Literal["closed", "open", "probing", "ramp"]
Limit = Literal["fleet_concurrency", "rate"]


@dataclass(frozen=True, slots=True)
class HandlerFlow:
    """What holds a handler back, or may do so."""

    handler_name: str
    fleet_concurrency: int | None
    rate: float | None  # per second
    set_by_operator: list[str]  # of the two
    in_flight: int  # of what was claimed while it had a limit
    paused_at: datetime | None
    paused_by: str | None
    breaker: Breaker | None  # None: it has none
    failures: int  # in a row, while it is closed
    opened_at: datetime | None
    failed_probes: int
    probe_in: float | None  # seconds

    @property
    def holds(self) -> bool:
        """Whether nothing is claimed for it now, by a pause or an open breaker."""
        return self.paused_at is not None or self.opened_at is not None


async def every(statements: Statements, only: str | None = None) -> dict[str, HandlerFlow]:
    """What there is, by handler."""
    rows = await statements.fetch("list_handler_flow", only=only)
    return {row["handler_name"]: HandlerFlow(**row) for row in rows}


async def limit(
    statements: Statements,
    handler: str,
    fleet_concurrency: int | None,
    rate: float | None,
    clear: list[str],
    *,
    actor: str,
    reason: str | None,
) -> bool:
    """Set limits, or clear them; whether something has changed."""
    values = {"fleet_concurrency": fleet_concurrency, "rate": rate, "clear": clear}
    return bool(await statements.value("handler_limit", handler=handler, **values, actor=actor, reason=reason))


async def pause(statements: Statements, handler: str, *, actor: str, reason: str | None) -> bool:
    """Pause a handler; whether it was not paused."""
    return bool(await statements.value("handler_pause", handler=handler, actor=actor, reason=reason))


async def resume(statements: Statements, handler: str, *, actor: str, reason: str | None) -> bool:
    """End the pause of a handler; whether it was paused."""
    return bool(await statements.value("handler_resume", handler=handler, actor=actor, reason=reason))


async def turn_breaker(statements: Statements, handler: str, *, open: bool, actor: str, reason: str | None) -> bool:
    """Open or close the breaker of a handler; whether it was the other."""
    return bool(await statements.value("handler_breaker", handler=handler, open=open, actor=actor, reason=reason))
