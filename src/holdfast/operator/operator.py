"""`Operator`: the entry point for people and tools that look after events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from holdfast.observability import prometheus
from holdfast.operator import installation
from holdfast.operator.archive import Archive
from holdfast.operator.audit import AuditTrail
from holdfast.operator.events import Events
from holdfast.operator.failed import FailedEvents
from holdfast.operator.generations import Generations
from holdfast.operator.handlers import Handlers
from holdfast.operator.installation import SchemaState
from holdfast.operator.plans import ReplayPlans
from holdfast.operator.retention import Retention
from holdfast.operator.schedules import Schedules
from holdfast.operator.session import Session
from holdfast.operator.wakeup import WakeUp
from holdfast.operator.workers import Workers
from holdfast.postgres.doctor import Part, Report
from holdfast.postgres.operations.status import Status


class Operator:
    """A person, or a tool that acts for one. Every change is written to the audit under the name of `actor`.

    Verbs that concern one noun are grouped: `failed`, `events`, `archive`, `plans`, `handlers`, `workers`,
    `generations`, `schedules`, `retention`, `audit` and `wakeup`.

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
        self, dsn: str, *, actor: str, schema: str = "core", on_wait: Callable[[str], None] = lambda _what: None
    ) -> None:
        self._session = Session(dsn, actor, schema, on_wait)
        self.failed = FailedEvents(self._session)
        self.events = Events(self._session)
        self.archive = Archive(self._session)
        self.plans = ReplayPlans(self._session, self.failed)
        self.handlers = Handlers(self._session)
        self.workers = Workers(self._session)
        self.generations = Generations(self._session)
        self.schedules = Schedules(self._session)
        self.retention = Retention(self._session)
        self.audit = AuditTrail(self._session)
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

    async def metrics(self) -> str:
        """The state of the outbox in the text format of Prometheus. Needs the extra `prometheus`."""
        prometheus.require()
        return prometheus.render(await self._session.connection.snapshot())

    async def doctor(self, only: Part | None = None) -> Report:
        """Compare the schema with this release, and look for what is in the way of delivery.

        Unlike other verbs, it needs no schema of the right version.
        """
        return await self._session.connection.examine(only)

    async def migrations(self) -> SchemaState:
        """The migrations that are applied and pending; any version of the schema will do."""
        return await installation.state(self._session.dsn, schema=self.schema)
