"""Retention policies, what is due under them, and the erasure of a domain's data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from holdfast.postgres import retention
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.retention import STEPS
from holdfast.retention import RetentionPolicies, RetentionPolicy

MOST = 100_000  # where counts end


@dataclass(frozen=True, slots=True)
class Due:
    """What a step of a sweep would take now from a content class; a step without classes has the class ''."""

    step: str
    content_class: str
    count: int
    more: bool = False  # there may be more than were counted


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The policies, what is due under them, and the last sweep."""

    policies: RetentionPolicies
    due: list[Due]
    finished_at: datetime  # when the last whole sweep ended
    last: dict[str, int]  # what it took, by step
    sweeping: bool  # a sweep is running, and gave a sign in the last minute
    limit: int = MOST  # where counts end

    @property
    def total(self) -> int:
        return sum(each.count for each in self.due)

    @property
    def more(self) -> bool:
        """Whether there may be more than were counted."""
        return any(each.more for each in self.due)


@dataclass(frozen=True, slots=True)
class ErasurePage:
    """One page of a domain's rows."""

    examined: int
    settled: int
    open: int
    next_id: UUID | None
    failed: int = 0  # of the settled ones, dead letters; only counted before they are erased


async def policies(statements: Statements) -> RetentionPolicies:
    """The policies in force."""
    return await retention.policies(statements.connection, statements.queries)


async def report(statements: Statements) -> RetentionReport:
    """The policies, and what a sweep would take now."""
    in_force = await policies(statements)
    due = []
    for step in STEPS:
        if step == "heads":
            continue  # what a claim has left behind, and kept by no policy
        async for content_class in _classes(statements, step):
            if step == "keys":
                found = await statements.row("count_free_keys", most=MOST)
            else:
                found = await statements.row("count_due", step=step, content_class=content_class, most=MOST)
            more = found["count"] >= MOST or (step == "inbox" and await statements.value("inbox_is_long"))
            if found["count"]:
                due.append(Due(step, content_class, found["count"], more))
    state = await statements.row("read_sweeps")
    return RetentionReport(in_force, due, state["finished_at"], json.loads(state["counts"]), state["sweeping"])


async def _classes(statements: Statements, step: str) -> AsyncIterator[str]:
    after, rows = "", await statements.fetch("retention_classes", step=step, after="")
    while rows:
        for (after,) in rows:
            yield after
        rows = await statements.fetch("retention_classes", step=step, after=after) if after else []


async def set_policy(
    statements: Statements,
    entity: str,
    content_class: str,
    policy: RetentionPolicy | None,
    *,
    actor: str,
    reason: str | None,
) -> None:
    """Add, change or (None) remove a policy."""
    await statements.fetch(
        "retention_set",
        actor=actor,
        reason=reason,
        entity=entity,
        content_class=content_class,
        active=None if policy is None else policy.active_ttl_days,
        grace=None if policy is None else policy.tombstoned_grace_days,
        disposal=None if policy is None else policy.disposal.value,
    )


async def estimate(statements: Statements) -> int:
    """About how many rows the outbox has; 0 when the server has no estimate."""
    return max(0, int(await statements.value("estimate_outbox")))


@dataclass(frozen=True, slots=True)
class RecordsPage:
    """One page of idempotency records, and how many of them name a domain."""

    erased: int
    next: tuple[str, str] | None


async def erase_records(
    statements: Statements,
    domain: UUID,
    *,
    most: int,
    after: tuple[str, str] | None,
    actor: str,
    reason: str | None,
    count_only: bool = False,
) -> RecordsPage:
    """Erase, or only count, what the idempotency records on one page say about a domain."""
    scope, key = after or (None, None)
    values = {"domain": domain, "actor": actor, "reason": reason, "limit": most, "scope": scope, "key": key}
    row = await statements.row("erase_records", **values, count_only=count_only)
    following = None if row["next_scope"] is None else (row["next_scope"], row["next_key"])
    return RecordsPage(row["erased"], following)


async def mentions(statements: Statements, domain: UUID) -> dict[str, int]:
    """Count what names a domain and stays, by where it stands; only what is not zero."""
    row = await statements.row("count_domain_mentions", domain=domain, most=MOST)
    return {place: count for place, count in row.items() if count}


async def count_page(statements: Statements, domain: UUID, *, most: int, after: UUID | None) -> ErasurePage:
    """Count the rows of a domain on one page of the outbox."""
    row = await statements.row("count_domain_page", domain=domain, most=most, after=after)
    return ErasurePage(row["examined"], row["settled"], row["open"], row["next_id"], row["failed"])


async def count_archived(statements: Statements, domain: UUID) -> int:
    """Count the rows of a domain in the archive, up to a limit."""
    return int((await statements.row("count_domain_archived", domain=domain, most=MOST))["count"])


async def erase_archived(statements: Statements, domain: UUID, *, most: int, actor: str, reason: str | None) -> int:
    """Erase some rows of a domain in the archive; how many."""
    values = {"domain": domain, "actor": actor, "reason": reason}
    return int(await statements.value("erase_archived", **values, limit=most))


async def erase_page(
    statements: Statements, domain: UUID, *, cancel: bool, most: int, after: UUID | None, actor: str, reason: str | None
) -> ErasurePage:
    """Erase the rows of a domain on one page of the outbox; `settled` are those that were erased."""
    values = {"domain": domain, "actor": actor, "reason": reason}
    row = await statements.row("erase_outbox", **values, cancel=cancel, limit=most, after=after)
    return ErasurePage(row["examined"], row["erased"], row["open"], row["next_id"])
