"""Idempotency records as operators may see them: never a body, a header, a hash or a whole key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from holdfast.postgres.operations.connection import Statements

RequestState = Literal["started", "completed", "failed"]

MOST_EXAMINED: Final = 20_000


@dataclass(frozen=True, slots=True)
class Request:
    """A command that was sent with an idempotency key; one that ended its transaction unanswered is `started`."""

    scope: str  # whose key it is
    key_hint: str  # how the key begins
    key_bytes: int
    state: RequestState
    status_code: int | None
    body_bytes: int | None
    body_omitted: bool  # it was too large to be kept
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Requests, the ones that expire last first. `next` is the cursor of the next page; None: there are no more."""

    requests: list[Request]
    next: str | None = None
    examined: int = 0


async def page(
    statements: Statements,
    *,
    scope: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    state: str | None,
    before: tuple[datetime, str] | None,
    limit: int,
) -> RequestPage:
    """Requests of a scope, a key and a time."""
    at, mark = before or (None, None)
    values = {"scope": scope, "key": key, "since": since, "until": until, "state": state, "before_at": at}
    *rows, end = await statements.fetch(
        "list_requests", **values, before_mark=mark, most=limit, most_examined=MOST_EXAMINED
    )
    found = [Request(**{name: row[name] for name in Request.__dataclass_fields__}) for row in rows]
    more = None if end["last_at"] is None else f"{end['last_at'].isoformat()} {end['last_mark']}"
    return RequestPage(found, more, end["examined"])
