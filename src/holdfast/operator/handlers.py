"""Handlers: who is owed what, how much of it waits or failed, and who serves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.session import Operator
from holdfast.postgres import reads

MOST_HANDLERS = 1_000


@dataclass(frozen=True, slots=True)
class HandlerSeen:
    """A handler as the registry of interest knows it."""

    handler_name: str
    context: str
    event_types: list[str]  # none: it is retired
    retired_at: datetime | None
    open: int  # in its own lanes, and in those of events that it has not yet got a delivery of
    failed: int
    workers: list[str]  # living ones that have it

    @property
    def retired(self) -> bool:
        return not self.event_types

    @property
    def unserved(self) -> bool:
        """Events wait for it, and nobody is there to handle them."""
        return self.open > 0 and not self.workers


async def listing(operator: Operator) -> list[HandlerSeen]:
    """Every handler that ever registered, with its backlog. Counts end at the limits of `reads`."""
    status = await reads.status(operator.connection, operator.schema)
    async with operator.reading():
        subscriptions = await operator.fetch("list_subscriptions", silence=reads.SILENCE, most=MOST_HANDLERS)
        failures = await operator.fetch("count_failed_by_handler", most=reads.MOST)
    failed: Counter[str] = Counter()
    for row in failures:
        failed[row["handler_name"]] += row["count"]
    waiting: Counter[str] = Counter()
    for lane in status.lanes:
        waiting.update({handler: lane.open for handler in lane.handlers})
    return [
        HandlerSeen(
            handler_name=row["handler_name"],
            context=row["domain_context"],
            event_types=row["event_types"] or [],
            retired_at=row["retired_at"] if not row["event_types"] else None,
            open=waiting[row["handler_name"]],
            failed=failed[row["handler_name"]],
            workers=row["workers"],
        )
        for row in subscriptions
    ]


async def retire(
    operator: Operator, handler: str, event_type: str | None = None, *, reason: str | None = None, dry_run: bool = False
) -> int:
    """End what a handler is owed, or one type of it; how many interests ended. What already waits for it stays."""
    arguments.handler(handler)
    if event_type is not None and not 1 <= len(event_type) <= 200:
        raise ConfigurationError("event_type", "is empty or too long", "holdfast handlers list has them")
    known = [each for each in await listing(operator) if each.handler_name == handler]
    wanted = [each for each in known if event_type is None or event_type in each.event_types]
    if not known:
        raise ConfigurationError("handler", f"{handler} is unknown", "holdfast handlers list has those that there are")
    if not wanted:
        raise ConfigurationError("event_type", f"{event_type!r} is not owed to {handler}", "holdfast handlers list")
    async with operator.changing("handler.retire", dry_run=dry_run, reason=arguments.reason(reason), handler=handler):
        values = {"handler": handler, "event_type": event_type, "actor": operator.actor, "reason": reason}
        return int((await operator.fetch("retire_handler", **values))[0][0])
