"""Verbs for handlers: their subscriptions, their backlog, and the workers that serve them."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import handlers
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.handlers import HandlerStatus


class Handlers:
    """Handlers, as `operator.handlers`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def all(self) -> Excerpt[HandlerStatus]:
        """Every handler that ever subscribed, with its backlog. Counts end at the limits of the status.

        Of too many those are listed first that living workers have; `left_out` says how many are not listed.
        """
        return await self._read()

    async def known(self, handler: str) -> bool:
        """Whether a handler ever subscribed."""
        return bool(await self._read(handler))

    async def _read(self, only: str | None = None) -> Excerpt[HandlerStatus]:
        status = await self._session.connection.status()
        async with self._session.reading() as statements:
            return await handlers.every(statements, status, only)

    async def retire(
        self, handler: str, event_type: str | None = None, *, reason: str | None = None, dry_run: bool = False
    ) -> int:
        """End the subscriptions of a handler, or one of them; how many ended. Events that already wait for it stay."""
        arguments.handler(handler)
        if event_type is not None and not 1 <= len(event_type) <= 200:
            raise ConfigurationError("event_type", "is empty or too long", "holdfast handlers list")
        known = await self._read(handler)
        wanted = [each for each in known if event_type is None or event_type in each.event_types]
        if not known:
            raise ConfigurationError("handler", f"{handler} is unknown", "holdfast handlers list")
        if not wanted:
            raise ConfigurationError(
                "event_type", f"{handler} has no subscription to {event_type!r}", "holdfast handlers list"
            )
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handler": handler}
        async with self._session.changing("handler.retire", dry_run=dry_run, **asked) as statements:
            actor = self._session.actor
            return await handlers.retire(statements, handler, event_type, actor=actor, reason=reason)
