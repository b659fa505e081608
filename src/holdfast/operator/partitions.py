"""Verbs for the partitions of the outbox: what there is, partitioning it by time, and going back."""

from __future__ import annotations

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import partitions
from holdfast.postgres.operations.partitions import PartitionReport
from holdfast.postgres.schema import partitions as conversion
from holdfast.postgres.schema.partitions import Every, OnStep


class Partitions:
    """Partitions, as `operator.partitions`. A conversion is DDL, on a connection of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def status(self) -> PartitionReport:
        """Whether the outbox is partitioned, and how."""
        async with self._session.reading() as statements:
            return await partitions.report(statements)

    async def enable(
        self,
        every: Every = "week",
        *,
        reason: str | None = None,
        dry_run: bool = False,
        on_step: OnStep | None = None,
    ) -> PartitionReport:
        """Partition the outbox by time, while producers and workers use it. Goes on where a run before it ended."""
        if every not in ("day", "week"):
            raise ConfigurationError("every", f"is {every!r}", "choose day or week")
        why, session = arguments.reason(reason), self._session
        await conversion.enable(
            session.dsn, session.schema, every=every, actor=session.actor, reason=why, dry_run=dry_run, on_step=on_step
        )
        return await self.status()

    async def disable(
        self, *, reason: str | None = None, dry_run: bool = False, on_step: OnStep | None = None
    ) -> PartitionReport:
        """Make the outbox one table again. Goes on where a run before it ended."""
        why, session = arguments.reason(reason), self._session
        if not dry_run:
            await conversion.disable(session.dsn, session.schema, actor=session.actor, reason=why, on_step=on_step)
        return await self.status()
