"""What the tables say about the demo. Times are the database's."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

import asyncpg

from examples.orders.handlers import registry
from holdfast.operator import Operator

HANDLERS = sorted(each.name for each in registry if each.via == "outbox" and each.wants("order.placed"))

# An event that was not yet split among its handlers owes one delivery to each of them. What a broker was given and a
# handler has not had is in flight.
_SNAPSHOT = """
SELECT CASE $4::text WHEN '' THEN 0 ELSE (SELECT count(*) FROM core.relay_lost($4, $1, 'infinity', 100000)) END
           + count(*) FILTER (WHERE status = 'in_flight') AS in_flight,
       coalesce(sum(CASE WHEN handler_name IS NULL THEN $2::int ELSE 1 END)
                FILTER (WHERE status = 'pending'), 0)::int AS waiting,
       coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8 AS oldest,
       coalesce(extract(epoch FROM max(lease_expires_at) - clock_timestamp()), 0)::float8 AS lease_left,
       CASE $4 WHEN '' THEN (SELECT count(*) FROM core.outbox
                             WHERE settled_at >= $1 AND status = 'delivered' AND handler_name <> '*')
       ELSE (SELECT count(*) FROM core.event_handled h
             WHERE h.handled_at >= $1 AND h.handler_name IN
                   (SELECT s.handler_name FROM core.subscriptions s WHERE s.via = $4)) END AS delivered,
       (SELECT count(*) FROM core.failed) AS failed,
       (SELECT count(*) FROM orders WHERE placed_at >= $1) AS orders,
       (SELECT count(*) FROM ledger WHERE recorded_at >= $1) AS ledger,
       (SELECT count(*) - count(DISTINCT order_id) FROM ledger WHERE recorded_at >= $1) AS ledger_duplicates,
       EXISTS (SELECT FROM core.workers WHERE pid = $3 AND stopped_at IS NULL AND started_at >= $1)
           AND NOT EXISTS (SELECT FROM core.subscriptions s
                           WHERE $4 <> '' AND s.retired_at IS NULL AND s.via = 'outbox') AS worker_ready
FROM core.outbox WHERE settled_at IS NULL
"""

# Delivered is what the outbox, the inbox and the ledger all say was delivered. Through a broker goes one row for all.
_DELIVERED = """
SELECT o.domain_id
FROM core.outbox o
JOIN core.event_handled h ON h.handler_name = ANY ($2::text[]) AND h.idempotency_key = o.idempotency_key
WHERE o.domain_id = ANY ($1::uuid[]) AND o.status = 'delivered'
  AND (o.handler_name = h.handler_name OR o.handler_name = 'relay.' || $3::text)
GROUP BY o.domain_id
HAVING count(DISTINCT h.handler_name) = cardinality($2::text[])
   AND EXISTS (SELECT FROM ledger WHERE order_id = o.domain_id)
"""

_LATENCIES = """
SELECT extract(epoch FROM l.recorded_at - o.created_at)::float8 * 1000 AS ms
FROM core.outbox o JOIN ledger l ON l.order_id = o.domain_id
WHERE o.handler_name = CASE $3::text WHEN '' THEN 'ledger.record_sale' ELSE 'relay.' || $3::text END
  AND EXISTS (SELECT FROM unnest($1::timestamptz[], $2::timestamptz[]) AS calm (since, until)
              WHERE o.created_at >= calm.since AND o.created_at < calm.until)
ORDER BY ms
"""

# By the inbox, where the reaction has committed together with what it wrote.
_REACTED = """
SELECT count(DISTINCT o.domain_id)
FROM core.event_handled h JOIN core.outbox o ON o.idempotency_key = h.idempotency_key
WHERE h.handler_name = 'storefront.count_order' AND o.domain_id = ANY ($1::uuid[])
"""

# The books that were closed last, beside what the ledger has of that day.
_BOOKS = """
SELECT s.fired, s.next_slot, coalesce(d.orders, 0) AS closed,
       (SELECT count(*) FROM ledger l WHERE (l.recorded_at AT TIME ZONE 'Europe/Berlin')::date = d.day) AS recorded
FROM core.schedules s LEFT JOIN (SELECT * FROM closed_days ORDER BY day DESC LIMIT 1) d ON true
WHERE s.name = $1
"""
END_OF_DAY = "ledger.end_of_day"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. Counts are since the demo started, but for what is open."""

    waiting: int = 0
    in_flight: int = 0
    delivered: int = 0
    failed: int = 0
    oldest: float = 0.0
    lease_left: float = 0.0
    orders: int = 0
    ledger: int = 0
    ledger_duplicates: int = 0
    worker_ready: bool = False

    @property
    def owed(self) -> int:
        return self.waiting + self.in_flight


@dataclass(frozen=True, slots=True)
class Account:
    """The reckoning at the end."""

    delivered: int
    lost: int
    effect_duplicates: int
    confirmation_duplicates: int


@dataclass(frozen=True, slots=True)
class Books:
    """What the schedule has done."""

    fired: int  # slots
    next_slot: datetime | None
    closed: int  # orders in the books
    recorded: int  # orders of that day in the ledger


class Figures:
    """Reads, on a connection of its own."""

    def __init__(self, dsn: str, sent: Path, broker: str = "") -> None:
        """`broker` is the name of what carries the events; empty where that is the outbox."""
        self._dsn = dsn
        self._broker = broker
        self._sent = sent

    async def __aenter__(self) -> Self:
        self._connection = await asyncpg.connect(self._dsn, server_settings={"application_name": "orders demo"})
        self._since = await self.now()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._connection.terminate()  # a read that was cut short leaves nothing to say goodbye to

    async def now(self) -> datetime:
        moment: datetime = await self._connection.fetchval("SELECT clock_timestamp()")
        return moment

    async def snapshot(self, worker_pid: int | None) -> Snapshot:
        return Snapshot(
            **await self._connection.fetchrow(_SNAPSHOT, self._since, len(HANDLERS), worker_pid, self._broker)
        )

    async def account(self, acknowledged: Iterable[UUID]) -> Account:
        """What became of the orders that the API acknowledged."""
        orders = set(acknowledged)
        rows = await self._connection.fetch(_DELIVERED, list(orders), HANDLERS, self._broker)
        confirmed = self.confirmations()
        delivered = {row[0] for row in rows} & confirmed.keys()
        duplicates = "SELECT count(*) - count(DISTINCT order_id) FROM ledger WHERE recorded_at >= $1"
        return Account(
            delivered=len(delivered),
            lost=len(orders - delivered),
            effect_duplicates=await self._connection.fetchval(duplicates, self._since),
            confirmation_duplicates=confirmed.total() - len(confirmed),
        )

    async def reacted(self, acknowledged: Iterable[UUID]) -> int:
        """To how many of the orders the API itself has reacted."""
        return int(await self._connection.fetchval(_REACTED, list(acknowledged)))

    async def end_the_day(self) -> None:
        """What `holdfast schedules trigger` does: few demos run at midnight."""
        async with Operator(self._dsn, actor="the demo") as operator:
            await operator.schedules.trigger(END_OF_DAY, reason="to show the books")

    async def books(self) -> Books:
        return Books(**await self._connection.fetchrow(_BOOKS, END_OF_DAY))

    def confirmations(self) -> Counter[UUID]:
        """How often each order was confirmed."""
        if not self._sent.exists():
            return Counter()
        return Counter(UUID(line.split(" ", 1)[0]) for line in self._sent.read_text().splitlines())

    async def latencies(self, calm: list[tuple[datetime, datetime]]) -> list[float]:
        """Milliseconds from publishing to the ledger's handler, for orders placed in calm times, sorted."""
        since, until = [start for start, _ in calm], [end for _, end in calm]
        return [row[0] for row in await self._connection.fetch(_LATENCIES, since, until, self._broker)]


def percentile(values: list[float], share: float) -> float | None:
    """The nearest-rank percentile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None
