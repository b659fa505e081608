"""Verbs for ordering keys that a dead letter blocks."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.new_event import LONGEST_KEY
from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import keys
from holdfast.postgres.operations.keys import BlockedKey


class Keys:
    """Ordering keys, as `operator.keys`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def blocked(
        self, handler: str | None = None, key: str | None = None, *, limit: int = 100
    ) -> list[BlockedKey]:
        """Keys that are blocked, the longest first. Followers are counted up to 100,000."""
        handler = None if handler is None else arguments.handler(handler)
        key = None if key is None else _key(key)
        limit = arguments.page("limit", limit)
        async with self._session.reading() as statements:
            return await keys.blocked(statements, handler, key, limit)

    async def release(self, handler: str, key: str, *, reason: str | None = None, dry_run: bool = False) -> UUID | None:
        """Let the events of a key go on without the dead letter at its head, which stays one.

        Returns its id, or None when the key is not blocked. If it is replayed later it takes a place at the end.
        """
        handler, key = arguments.handler(handler), _key(key)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handler": handler, "ordering_key": key}
        async with self._session.changing("key.release", dry_run=dry_run, **asked) as statements:
            return await keys.release(statements, handler, key, actor=self._session.actor, reason=reason)


def _key(key: str) -> str:
    if not isinstance(key, str) or not 1 <= len(key.encode()) <= LONGEST_KEY:
        raise ConfigurationError("key", f"must have 1 to {LONGEST_KEY} bytes", "holdfast keys blocked")
    return key
