"""Ordering keys that a dead letter blocks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from holdfast.postgres.operations.connection import Statements

MOST_FOLLOWERS = 100_000


@dataclass(frozen=True, slots=True)
class BlockedKey:
    """An ordering key whose events wait for a handler behind a dead letter, its head."""

    handler_name: str
    ordering_key: str
    head_id: UUID  # the delivery that failed: replay it, discard it, or release the key
    event_id: UUID
    event_type: str
    blocked_at: datetime
    failure_reason: str
    last_error: str | None
    archived: bool  # the head is in the archive
    followers: int  # events that wait behind it
    more_followers: bool  # and more than that


async def blocked(statements: Statements, handler: str | None, key: str | None, most: int) -> list[BlockedKey]:
    """Keys that are blocked, the longest first; of one handler, or one key, if they are given."""
    rows = await statements.fetch("keys_blocked", handler=handler, key=key, most=most, most_followers=MOST_FOLLOWERS)
    return [BlockedKey(**dict(row), more_followers=row["followers"] >= MOST_FOLLOWERS) for row in rows]


async def release(statements: Statements, handler: str, key: str, *, actor: str, reason: str | None) -> UUID | None:
    """Let the events behind a dead letter go on; the id of the dead letter, or None when the key is not blocked."""
    head: UUID | None = await statements.value("key_release", handler=handler, key=key, actor=actor, reason=reason)
    return head
