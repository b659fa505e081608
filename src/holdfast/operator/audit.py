"""Verbs for the audit."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import audit
from holdfast.postgres.operations.audit import AuditLine


class AuditTrail:
    """The audit, as `operator.audit`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def of_event(self, id: UUID | str, *, limit: int = 50) -> list[AuditLine]:
        """Actions that changed any delivery of an event, the latest first."""
        arguments.page("limit", limit)
        asked = arguments.identity(id, listed_by="holdfast events list, or holdfast failed list")
        async with self._session.reading() as statements:
            return await audit.of_event(statements, asked, limit=limit)

    async def page(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        actor: str | None = None,
        action: str | None = None,
        since: datetime | None = None,
        steps: bool = False,
    ) -> list[AuditLine]:
        """Actions of operators, the latest first; `before` is the id of the last line of the previous page.

        The single steps of replay plans are left out unless `steps`: a plan's own lines say what it did.
        """
        arguments.page("limit", limit)
        if before is not None:
            arguments.whole("before", before)
        if actor is not None:
            arguments.line("actor", actor)
        if action is not None:
            arguments.name("action", action)
        if since is not None:
            arguments.moment("since", since)
        steps = steps or action == "plan.step"
        async with self._session.reading() as statements:
            return await audit.page(
                statements, limit=limit, before=before, actor=actor, action=action, since=since, steps=steps
            )
