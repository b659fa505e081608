"""`Operator`: the entry point for people and tools that look after events."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Self

from holdfast.observability import prometheus
from holdfast.operator import arguments, installation
from holdfast.operator.archive import Archive
from holdfast.operator.audit import AuditTrail
from holdfast.operator.events import Events
from holdfast.operator.failed import FailedEvents
from holdfast.operator.generations import Generations
from holdfast.operator.handlers import Handlers
from holdfast.operator.installation import SchemaState
from holdfast.operator.keys import Keys
from holdfast.operator.partitions import Partitions
from holdfast.operator.plans import ReplayPlans
from holdfast.operator.relay import Relay
from holdfast.operator.requests import Requests
from holdfast.operator.retention import Retention
from holdfast.operator.schedules import Schedules
from holdfast.operator.session import Session
from holdfast.operator.wakeup import WakeUp
from holdfast.operator.workers import Workers
from holdfast.postgres.doctor import Part, Report
from holdfast.postgres.operations import rates
from holdfast.postgres.operations.connection import OperatorConnection
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.rates import Balance, Flow, HandlerRates, Period, Signals
from holdfast.postgres.operations.status import Status
from holdfast.tracing import Tracing

# What the roll-up has minutes of, and all that it can have.
MOST_MINUTES = 24 * 60
MOST_HOURS = 10 * 366 * 24


class Operator:
    """A person, or a tool that acts for one. Every change is written to the audit under the name of `actor`.

    Verbs that concern one noun are grouped: `failed`, `events`, `archive`, `plans`, `handlers`, `keys`, `workers`,
    `generations`, `schedules`, `retention`, `partitions`, `relay`, `audit`, `requests` and `wakeup`.

        async with Operator(dsn, actor="ada@example.com") as operator:
            status = await operator.status()
            print(f"{status.pending} pending, {status.failed} failed")
            for group in (await operator.failed.groups()).groups:
                print(group.name, group.count, group.last_seen)
                await operator.failed.replay([group.sample_id], reason="the card terminal is back")

    Reads end at limits and never count settled events. Changes check their arguments first, write their line to the
    audit in the same transaction, and have a dry run that is rolled back. An `Operator` has one connection, so its
    verbs run one at a time. `on_wait` is called with a line of text when a verb has waited for another session's lock
    for more than a second; one that ends without the lock raises `Blocked`, which names that session.
    """

    def __init__(
        self,
        dsn: str,
        *,
        actor: str,
        schema: str = "core",
        on_wait: Callable[[str], None] = lambda _what: None,
        tracing: Tracing | None = None,
    ) -> None:
        self._begin(Session(OperatorConnection(dsn, schema, on_wait), actor, tracing))

    @classmethod
    def on(cls, connection: OperatorConnection, actor: str, tracing: Tracing | None = None) -> Self:
        """An operator on an open connection that somebody else closes, such as `Operators`."""
        operator = cls.__new__(cls)
        operator._begin(Session(connection, actor, tracing))
        return operator

    def _begin(self, session: Session) -> None:
        self._session = session
        self.failed = FailedEvents(self._session)
        self.events = Events(self._session)
        self.archive = Archive(self._session)
        self.plans = ReplayPlans(self._session, self.failed)
        self.handlers = Handlers(self._session)
        self.keys = Keys(self._session)
        self.workers = Workers(self._session)
        self.generations = Generations(self._session)
        self.schedules = Schedules(self._session)
        self.retention = Retention(self._session)
        self.partitions = Partitions(self._session)
        self.relay = Relay(self._session)
        self.audit = AuditTrail(self._session)
        self.requests = Requests(self._session)
        self.wakeup = WakeUp(self._session)

    async def __aenter__(self) -> Self:
        await self._session.connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.connection.close()

    @property
    def actor(self) -> str:
        """The name in the audit."""
        return self._session.actor

    @property
    def schema(self) -> str:
        """The schema of Holdfast."""
        return self._session.schema

    async def status(self) -> Status:
        """What is pending, in flight, delayed and failed, by route, and the workers. One snapshot."""
        return await self._session.connection.status()

    async def rates(self, minutes: int = 5, *, handler: str | None = None, limit: int = 50) -> Excerpt[HandlerRates]:
        """What handlers did in the last minutes, up to a day: those that did most, or one."""
        minutes = arguments.whole("minutes", minutes, 1, MOST_MINUTES)
        limit, handler = arguments.page("limit", limit), None if handler is None else arguments.handler(handler)
        async with self._session.connection.reading() as statements:
            return await rates.rates(statements, minutes, limit, handler)

    async def series(self, handler: str, hours: int = 1) -> list[Period]:
        """What one handler did in each minute, and before a day ago in each hour; the oldest first, for charts."""
        hours = arguments.whole("hours", hours, 1, MOST_HOURS)
        async with self._session.connection.reading() as statements:
            return await rates.series(statements, arguments.handler(handler), timedelta(hours=hours))

    async def flow(self, minutes: int = 60, *, step: int = 1) -> list[Flow]:
        """What all handlers did in each step of some minutes, up to a day; the oldest first, for charts."""
        minutes = arguments.whole("minutes", minutes, 1, MOST_MINUTES)
        step = arguments.whole("step", step, 1, MOST_MINUTES)
        async with self._session.connection.reading() as statements:
            return await rates.flow(statements, timedelta(minutes=minutes), timedelta(minutes=step))

    async def failing(self, *, limit: int = 50) -> dict[str, dict[datetime, int]]:
        """How many deliveries have failed in each hour of a day, for the handlers that failed most."""
        limit = arguments.page("limit", limit)
        async with self._session.connection.reading() as statements:
            return await rates.failing(statements, limit)

    async def signals(self) -> Signals:
        """How large the outbox is, how many deliveries failed within a week, and how slow a week was."""
        async with self._session.connection.reading() as statements:
            return await rates.signals(statements)

    async def balance(self) -> Balance:
        """The sums of all counts that are kept: what was begun, how it was closed, and what is open."""
        async with self._session.connection.reading() as statements:
            return await rates.balance(statements)

    async def metrics(self) -> str:
        """The state of the outbox in the text format of Prometheus. Needs the extra `prometheus`."""
        prometheus.require()
        snapshot = await self._session.connection.snapshot()
        return prometheus.exposition(lambda: prometheus.outbox_metrics(snapshot))[0]

    async def doctor(self, only: Part | None = None) -> Report:
        """Compare the schema with this release, and look for what is in the way of delivery.

        Unlike other verbs, it needs no schema of the right version.
        """
        return await self._session.connection.examine(only)

    async def migrations(self) -> SchemaState:
        """The migrations that are applied and pending; any version of the schema will do."""
        return await installation.state(self._session.dsn, schema=self.schema)
