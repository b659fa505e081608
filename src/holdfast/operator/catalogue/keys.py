"""Verbs for ordering keys that a dead letter blocks."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from pydantic import Field

from holdfast.new_event import LONGEST_KEY
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Limit, Name, Text
from holdfast.operator.operator import Operator
from holdfast.postgres.operations.keys import BlockedKey

VERBS = Catalogue()

OrderingKey = Annotated[Text, Field(min_length=1, max_length=LONGEST_KEY)]


class ListBlocked(Arguments):
    handler: Name | None = None
    key: OrderingKey | None = None
    limit: Limit = 100


class ReleaseKey(Change):
    handler: Name
    key: OrderingKey


@VERBS.reads("keys.blocked")
async def blocked(operator: Operator, given: ListBlocked) -> list[BlockedKey]:
    """Ordering keys that a dead letter blocks, the longest first, with the number of events behind it."""
    return await operator.keys.blocked(given.handler, given.key, limit=given.limit)


@VERBS.changes("keys.release")
async def release(operator: Operator, given: ReleaseKey) -> dict[str, UUID | None]:
    """Let the events of a key go on without the dead letter at its head, which stays one."""
    head = await operator.keys.release(given.handler, given.key, reason=given.reason, dry_run=given.dry_run)
    return {"head_id": head}
