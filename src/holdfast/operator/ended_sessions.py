"""Sessions of consoles that were ended before their time, for every process that serves the same database.

A log-out is a command that is carried out once: it leaves an idempotency record, under a hash of the session's id, that
is forgotten when the session would have ended by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.operator.pool import Operators
from holdfast.postgres.faults import DATABASE_ERRORS
from holdfast.postgres.idempotency import NewRecord, Records, StoredResponse

SCOPE: Final = "operator-console/log-out"
ASKED_EVERY: Final = 5.0  # seconds, for one session
_PATIENCE: Final = 1.0  # seconds that a page may wait for the answer
_MOST_KEPT: Final = 10_000
_READER: Final = "holdfast console"


class EndedSessions:
    """What a process knows of log-outs in the others. While the database is away, it goes by what it knew."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._records = Records(operators.schema)
        self._asked: OrderedDict[str, float] = OrderedDict()  # sessions that had not ended, and when that was asked

    async def add(self, id: str, seconds: float) -> None:
        """Have a session be ended everywhere, for as long as it would have lasted."""
        key = _key(id)
        with suppress(*DATABASE_ERRORS, HoldfastError):
            async with self._operators.records() as connection, connection.transaction():
                if await self._records.begin(connection, NewRecord(SCOPE, key, [key], 1, seconds, 2.0)) is None:
                    await self._records.complete(connection, SCOPE, key, StoredResponse(False, 204, [], b""))

    async def has(self, id: str) -> bool:
        """Whether a session was ended. Asked again after a few seconds; an answer that takes long is not waited for."""
        now = time.monotonic()
        if now - self._asked.get(id, -ASKED_EVERY) < ASKED_EVERY:
            return False
        self._asked[id] = now
        self._asked.move_to_end(id)
        while len(self._asked) > _MOST_KEPT:
            self._asked.popitem(last=False)
        with suppress(*DATABASE_ERRORS, HoldfastError, TimeoutError):
            async with asyncio.timeout(_PATIENCE), self._operators.acting(_READER) as operator:
                found = await operator.requests.page(scope=SCOPE, key=_key(id), limit=1)
                if found.requests:
                    del self._asked[id]
                    return True
        return False


def _key(id: str) -> str:
    return sha256(id.encode()).hexdigest()
