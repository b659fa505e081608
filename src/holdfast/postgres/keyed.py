"""What a worker claims by key: heads of ordering keys, and shares of fairness keys.

The functions stand with their reasons in `sql/functions/ordering.sql` and `sql/functions/fairness.sql`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

import asyncpg

from holdfast.handlers import Handler
from holdfast.ids import uuid7
from holdfast.postgres.clock import DatabaseClock
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.statements import NamedStatements

# How many keys one claim looks at for each handler.
_PROBES = 1_000
_COLUMNS = 20  # those of every claim
_LIKE = str.maketrans({"\\": r"\\", "%": r"\%", "_": r"\_", "*": "%"})

Kind = Literal["", "ordered", "fair"]  # of the open rows on a channel that have a key; `fair`: some or all


class KeyPlace(NamedTuple):
    """Where a handler goes on with an ordering key: from this number on."""

    handler: str
    key: str
    seq: int


@dataclass(frozen=True, slots=True)
class KeyedRoom:
    """How many rows a handler takes, and the key after which the walk goes on."""

    handler: Handler
    limit: int
    after: str


class KeyedClaim(NamedTuple):
    """What a claim has found. `after` has the keys after which it stopped, for handlers whose last key it has not
    reached; `due_in` the seconds until the next of the rows that it has seen is due."""

    deliveries: list[Delivery]
    after: dict[str, str]
    due_in: float | None


class KeyedDeliveries:
    """The claims of one worker. Both methods take the connection they run on."""

    def __init__(
        self, statements: NamedStatements, *, worker: UUID, generation: int, lease: float, clock: DatabaseClock
    ) -> None:
        self._fetch = statements.fetch
        self._worker = worker
        self._generation = generation
        self._lease = timedelta(seconds=lease)
        self._clock = clock

    async def claim_ordered(
        self,
        connection: asyncpg.Connection,
        channel: str,
        rooms: Sequence[KeyedRoom],
        keys: Sequence[KeyPlace],
        *,
        discover: bool,
    ) -> KeyedClaim:
        """Lease the heads of ordering keys: of the given ones and, with `discover`, of those that come next."""
        values = self._values(channel, rooms)
        records = await self._fetch(
            connection,
            "outbox_claim_ordered",
            **values,
            blocks=[room.handler.on_failed_head == "block" for room in rooms],
            key_handlers=[place.handler for place in keys],
            keys=[place.key for place in keys],
            seqs=[place.seq for place in keys],
            discover=discover,
        )
        return _claim(records, values["token"], rooms, "ordering_key")

    async def claim_fair(self, connection: asyncpg.Connection, channel: str, rooms: Sequence[KeyedRoom]) -> KeyedClaim:
        """Lease rows that have a fairness key, an equal share of each key that has something due."""
        values = self._values(channel, rooms)
        per_key = [room.handler.per_key_concurrency for room in rooms]
        records = await self._fetch(connection, "outbox_claim_fair", **values, per_key=per_key)
        return _claim(records, values["token"], rooms, "fairness_key")

    def _values(self, channel: str, rooms: Sequence[KeyedRoom]) -> dict[str, Any]:
        wanted = [(room.handler.name, each) for room in rooms for each in room.handler.event_types]
        return {
            "worker": self._worker,
            "token": uuid7(),
            "lease": self._lease,
            "channel": channel,
            "generation": self._generation,
            "handlers": [room.handler.name for room in rooms],
            "limits": [room.limit for room in rooms],
            "after": [room.after for room in rooms],
            "wanted_by": [name for name, _ in wanted],
            "wanted": [each.translate(_LIKE) for _, each in wanted],
            "most_probes": _PROBES,
            "ended_before": self._clock.ended_before(),
        }


def _claim(records: Iterable[asyncpg.Record], token: UUID, rooms: Sequence[KeyedRoom], key: str) -> KeyedClaim:
    handlers = {room.handler.name: room.handler for room in rooms}
    claim = KeyedClaim([], {}, None)
    now = time.monotonic()
    for record in records:
        name = record["handler"]
        if record["id"] is not None:
            claim.deliveries.append(_delivery(record, token, handlers[name], now, ordered=key == "ordering_key"))
            continue
        if record[key] is not None:
            claim.after[name] = record[key]
        due_in = record["failing_for"]
        if due_in is not None and (claim.due_in is None or due_in < claim.due_in):
            claim = claim._replace(due_in=due_in)
    claim.deliveries.sort(key=_in_turn)
    return claim


def _delivery(record: asyncpg.Record, token: UUID, handler: Handler, now: float, *, ordered: bool) -> Delivery:
    handlers: Mapping[str, Handler] = {record["route"]: handler}
    delivery = Delivery(tuple(record)[:_COLUMNS], token, handlers, now)
    if ordered:
        delivery.ordering_key, delivery.seq = record["ordering_key"], record["seq"]
    delivery.awaited = ordered or handler.per_key_concurrency is not None
    return delivery


def _in_turn(delivery: Delivery) -> tuple[str, object, UUID]:
    return delivery.handler.name, delivery.available_at, delivery.id
