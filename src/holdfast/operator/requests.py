"""Verbs for requests with an idempotency key: was this key used, and how did it end?"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final, get_args

from holdfast.checks import UNPRINTABLE, quoted
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import requests
from holdfast.postgres.operations.requests import Request, RequestPage, RequestState

STATES: Final[tuple[RequestState, ...]] = get_args(RequestState)
LONGEST_KEY: Final = 255
LONGEST_SCOPE: Final = 1_020
_CURSOR: Final = re.compile(r"(?P<at>\S{1,40}) (?P<mark>\(\d{1,10},\d{1,5}\))")


class Requests:
    """Requests with an idempotency key, as `operator.requests`. No body, no hash and no whole key is ever shown."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self,
        *,
        scope: str | None = None,
        key: str | None = None,
        state: RequestState | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> RequestPage:
        """Requests, those that expire last first; `before` is the `next` of the previous page.

        A page examines 20,000 records at most: it may be empty, and still have a `next`. A scope together with a key
        is looked up.
        """
        arguments.page("limit", limit)
        if state is not None and state not in STATES:
            raise ConfigurationError("state", f"{quoted(state)} is unknown", f"use one of {', '.join(STATES)}")
        for field, moment in (("since", since), ("until", until)):
            if moment is not None:
                arguments.moment(field, moment)
        async with self._session.reading() as statements:
            return await requests.page(
                statements,
                scope=None if scope is None else _text("scope", scope, LONGEST_SCOPE),
                key=None if key is None else _text("key", key, LONGEST_KEY),
                since=since,
                until=until,
                state=state,
                before=None if before is None else _cursor(before),
                limit=limit,
            )

    async def detail(self, scope: str, key: str) -> Request:
        """The request of a scope with a key."""
        found = (await self.page(scope=_text("scope", scope, LONGEST_SCOPE), key=key, limit=1)).requests
        if not found:
            raise NotFound("key", "was not used in this scope", "check both; a record is forgotten when it has expired")
        return found[0]


def _text(field: str, value: str, longest: int) -> str:
    if not isinstance(value, str) or not value or len(value.encode(errors="replace")) > longest:
        raise ConfigurationError(field, "is empty or too long", f"write 1 to {longest:,} bytes")
    if UNPRINTABLE.search(value):
        raise ConfigurationError(field, "has control characters", "write it as the request did")
    return value


def _cursor(value: str) -> tuple[datetime, str]:
    found = _CURSOR.fullmatch(value) if isinstance(value, str) else None
    try:
        if found is not None:
            return arguments.moment("before", datetime.fromisoformat(found["at"])), found["mark"]
    except ValueError:
        pass
    raise ConfigurationError("before", f"{quoted(value)} is not a cursor", "copy the next of the page before")
