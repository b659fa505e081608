"""Verbs for brokers: which handlers they carry events to, what was relayed and lost, and sending it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.brokers.engine import Interest
from holdfast.brokers.engines import NAMES
from holdfast.checks import one_of
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import brokers
from holdfast.postgres.operations.brokers import CarriedHandler, LostDelivery

# So long a message may be on its way before it counts as lost.
PATIENCE = timedelta(minutes=10)
_MOST_ROWS = 100_000
# Rows that one transaction sends again.
_PORTION = 5_000


@dataclass(frozen=True, slots=True)
class RelayCheck:
    """What a broker has lost of what was relayed in some time."""

    broker: str
    since: datetime
    until: datetime
    lost: list[LostDelivery]
    looked_at: int  # relayed events of that time


@dataclass(frozen=True, slots=True)
class RelayChange:
    """How many rows were sent again, or deliveries put into their lanes."""

    broker: str
    count: int
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class RelayRotation:
    """How many secrets of relays this database accepts now, the new one included."""

    accepted: int
    dry_run: bool = False


class Relay:
    """Brokers, as `operator.relay`. Nothing here connects to one."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def show(self) -> list[CarriedHandler]:
        """Every handler that gets its events by a broker, or did, and is still given the last of them."""
        async with self._session.reading() as statements:
            return await brokers.carried(statements)

    async def interests(self, broker: str, handlers: Sequence[str] | None = None) -> list[Interest]:
        """What handlers are to get from a broker, on each channel that is served, as its client needs to know it."""
        broker_name(broker)
        async with self._session.reading() as statements:
            owed = await statements.fetch("broker_interests", via=broker, handlers=handlers and list(handlers))
            channels = await brokers.channels(statements)
        return [
            Interest(row["handler_name"], channel, row["domain_context"], tuple(row["event_types"]), row["since"])
            for row in owed
            for channel in channels
        ]

    async def wanted(self, handlers: Sequence[str]) -> list[Interest]:
        """What handlers would get from a broker that carries their events from now on, on each channel."""
        async with self._session.reading() as statements:
            found = await statements.fetch("list_wanted", handlers=list(handlers))
            channels = await brokers.channels(statements)
        return [
            Interest(row["handler_name"], channel, row["domain_context"], tuple(row["event_types"]), row["since"])
            for row in found
            for channel in channels
        ]

    async def check(
        self, broker: str, *, since: datetime | None = None, until: datetime | None = None, rows: int = 10_000
    ) -> RelayCheck:
        """Look for events that were relayed and confirmed, and that a handler of this database has not got.

        By default those of the last day, but for the last ten minutes. So many `rows` are looked at. A broker that
        nothing is relayed to is refused.
        """
        begin, end = self._span(broker, since, until)
        most = arguments.whole("rows", rows, 1, _MOST_ROWS)
        async with self._session.reading() as statements:
            looked_at = await brokers.relayed(statements, broker, begin, end, most)
            if looked_at is None:
                raise NotFound("broker", f"{broker} has never had an event from this database", "holdfast relay show")
            lost = await brokers.lost(statements, broker, begin, end, most)
            return RelayCheck(broker, begin, end, lost, looked_at)

    async def repair(
        self,
        broker: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        rows: int = 10_000,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> RelayChange:
        """Put what `check` finds into the lanes of its handlers, where no broker is needed."""
        begin, end = self._span(broker, since, until)
        most, why = arguments.whole("rows", rows, 1, _MOST_ROWS), arguments.reason(reason)
        asked: dict[str, Any] = {"reason": why, "broker": broker}
        async with self._session.changing("relay.repair", dry_run=dry_run, **asked) as statements:
            actor = self._session.actor
            count = await brokers.repair(statements, broker, begin, end, most, actor=actor, reason=why)
        return RelayChange(broker, count, dry_run)

    async def again(
        self,
        broker: str,
        *,
        since: datetime,
        until: datetime | None = None,
        event_type: str | None = None,
        source: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> RelayChange:
        """Relay once more what was relayed in some time, as far as retention has kept it; by default until now.

        Consumers that have handled an event find it in their inbox. Rows are taken some at a time; a dry run counts
        the first of them.
        """
        broker_name(broker)
        begin, end = arguments.moment("since", since), arguments.moment("until", until or datetime.now(UTC))
        kind = None if event_type is None else arguments.name("event_type", event_type)
        origin = None if source is None else arguments.name("source", source)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "broker": broker}
        actor, count = self._session.actor, 0
        while True:
            async with self._session.changing("relay.again", dry_run=dry_run, **asked) as statements:
                some = await brokers.again(
                    statements, broker, begin, end, kind, origin, _PORTION, actor=actor, reason=reason
                )
            count += some
            if dry_run or some < _PORTION:
                return RelayChange(broker, count, dry_run)

    async def rotate(
        self, *, drop_old: bool = False, reason: str | None = None, dry_run: bool = False
    ) -> RelayRotation:
        """Make a new secret, which relays sign with a minute later.

        The old ones are accepted for 30 days; with `drop_old` for two minutes, as when somebody else knows one.
        """
        why = arguments.reason(reason)
        async with self._session.changing("relay.rotate", dry_run=dry_run, reason=why) as statements:
            accepted = await brokers.rotate(statements, drop_old, actor=self._session.actor, reason=why)
        return RelayRotation(accepted, dry_run)

    def _span(self, broker: str, since: datetime | None, until: datetime | None) -> tuple[datetime, datetime]:
        broker_name(broker)
        now = datetime.now(UTC)
        begin = now - timedelta(days=1) if since is None else arguments.moment("since", since)
        end = now - PATIENCE if until is None else arguments.moment("until", until)
        if begin > end:
            raise ConfigurationError("since", "is after until", "name an earlier time")
        return begin, end


def broker_name(value: str) -> str:
    """Return the name of a broker, as the database has it."""
    one_of("broker", value, NAMES)
    return value
