"""Handlers with their subscriptions, their backlog and the workers that serve them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from holdfast.postgres.operations import archive, failed, flow
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.flow import HandlerFlow
from holdfast.postgres.operations.status import MOST, Status

MOST_HANDLERS = 1_000


@dataclass(frozen=True, slots=True)
class HandlerStatus:
    """A handler that has, or had, subscriptions."""

    handler_name: str
    domain_context: str
    event_types: list[str]  # none: it is retired
    retired_at: datetime | None
    open: int  # on its own route, and on routes of events that were not split among their handlers yet
    failed: int  # and in the outbox
    archived: int  # failed, and moved to the archive
    workers: list[str]  # living ones that have it
    flow: HandlerFlow | None = None  # None: it has no limits and no breaker, and is not paused
    via: str = "outbox"  # or the broker that carries its events
    draining: str | None = None  # a broker that carried them before, and may still hold some

    @property
    def retired(self) -> bool:
        return not self.event_types

    @property
    def unserved(self) -> bool:
        """Whether events wait for it and no living worker has it."""
        return self.open > 0 and not self.workers


async def every(statements: Statements, status: Status, only: str | None = None) -> Excerpt[HandlerStatus]:
    """Every handler that ever subscribed, or one; of too many those first that living workers have."""
    subscriptions = await statements.fetch("list_subscriptions", most=MOST_HANDLERS, only=only)
    failures: Counter[str] = Counter()
    for handler, _, count in await failed.counts_by_handler(statements, most=MOST):
        failures[handler] += count
    archived = await archive.counts_by_handler(statements, only)
    flows = await flow.every(statements, only)
    waiting: Counter[str] = Counter()
    for route in status.routes:
        waiting.update({handler: route.open for handler in route.handlers})
    found = [
        HandlerStatus(
            handler_name=row["handler_name"],
            domain_context=row["domain_context"],
            event_types=row["event_types"] or [],
            retired_at=row["retired_at"] if not row["event_types"] else None,
            open=waiting[row["handler_name"]],
            failed=failures[row["handler_name"]],
            archived=archived.get(row["handler_name"], 0),
            workers=row["workers"],
            flow=flows.get(row["handler_name"]),
            via=row["via"],
            draining=row["draining"],
        )
        for row in subscriptions
    ]
    idle = {row["handler_name"] for row in subscriptions if row["idle"]} if only is None else set()
    shown = [
        each
        for each in found
        if each.handler_name not in idle or each.open or each.failed or each.archived or each.workers
    ]
    total = subscriptions[0]["total"] if subscriptions else 0
    return Excerpt(shown, total - (len(found) - len(shown)))


async def retire(
    statements: Statements, handler: str, event_type: str | None, *, actor: str, reason: str | None
) -> int:
    """End the subscriptions of a handler, or one of them; how many ended."""
    values = {"handler": handler, "event_type": event_type, "actor": actor, "reason": reason}
    return int(await statements.value("retire", **values))
