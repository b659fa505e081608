"""Verbs for the partitions of the outbox. A conversion needs the rights of a migration, and is for admins."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.verb import Catalogue, Change
from holdfast.operator.operator import Operator
from holdfast.operator.roles import Role
from holdfast.postgres.operations.partitions import PartitionReport

VERBS = Catalogue()


class Enable(Change):
    every: Literal["day", "week"] = Field("week", description="The time that one partition holds.")


class Disable(Change):
    pass


@VERBS.reads("partitions.status")
async def status(operator: Operator, given: Nothing) -> PartitionReport:
    """Whether the outbox is partitioned by time, and its partitions."""
    return await operator.partitions.status()


@VERBS.changes("partitions.enable", Role.ADMIN)
async def enable(operator: Operator, given: Enable) -> PartitionReport:
    """Partition the outbox by time, beside producers and workers. Goes on where a run before it ended."""
    return await operator.partitions.enable(given.every, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("partitions.disable", Role.ADMIN)
async def disable(operator: Operator, given: Disable) -> PartitionReport:
    """Make the outbox one table again. Goes on where a run before it ended."""
    return await operator.partitions.disable(reason=given.reason, dry_run=given.dry_run)
