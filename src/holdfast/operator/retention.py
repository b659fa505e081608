"""How long what is kept, what is due, sweeping it, and erasing the data of a person or a tenant."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from holdfast.ids import uuid7
from holdfast.operator import arguments
from holdfast.operator.session import Operator
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import STEPS, Batch, Sweep, end_turn, policies, take_turn
from holdfast.retention import RetentionPolicies, RetentionPolicy, with_policy

MOST = 100_000  # where counts end
_PAGE = 20_000
_ERASE_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Due:
    """What a step of a sweep would take now from a content class; a step without classes has the class ''."""

    step: str
    content_class: str
    count: int
    more: bool = False  # there may be more than were counted


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """One moment of retention."""

    policies: RetentionPolicies
    due: list[Due]
    finished_at: datetime  # when the last whole pass ended
    last: dict[str, int]  # what it took, by step
    sweeping: bool  # somebody is at it, and was heard of in the last minute

    @property
    def total(self) -> int:
        return sum(each.count for each in self.due)

    @property
    def more(self) -> bool:
        """Whether there may be more than were counted."""
        return any(each.more for each in self.due)


@dataclass(frozen=True, slots=True)
class Unswept:
    """A step and class that a pass had to leave, because the database refused to change or delete some row of it."""

    step: str
    content_class: str
    sqlstate: str | None
    error: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a pass has done."""

    swept: dict[str, int]  # by step
    batches: int
    longest: float  # seconds of the longest batch
    seconds: float
    refused: list[Unswept] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.swept.values())


@dataclass(frozen=True, slots=True)
class Erasure:
    """Rows of a domain: those that lose everything but their metadata, and those that are open and stay."""

    domain_id: UUID
    outbox: int
    archive: int
    open: int
    dry_run: bool = False

    @property
    def total(self) -> int:
        return self.outbox + self.archive


OnBatch = Callable[[Batch], None]
OnPage = Callable[[int], None]  # how many rows were looked at


async def show(operator: Operator) -> RetentionReport:
    """The policies, and what a sweep would take now."""
    async with operator.reading():
        registry = await policies(operator.connection, Queries(operator.schema))
        due = []
        for step in STEPS:
            for (content_class,) in await operator.fetch("retention_classes", step=step):
                if step == "keys":
                    (found,) = await operator.fetch("count_free_keys", most=MOST)
                else:
                    (found,) = await operator.fetch("count_due", step=step, content_class=content_class, most=MOST)
                more = found["count"] >= MOST or (step == "inbox" and (await operator.fetch("inbox_is_long"))[0][0])
                if found["count"]:
                    due.append(Due(step, content_class, found["count"], more))
        (state,) = await operator.fetch("read_sweeps")
    return RetentionReport(registry, due, state["finished_at"], json.loads(state["counts"]), sweeping=state["sweeping"])


async def sweep(
    operator: Operator, *, reason: str | None = None, on_batch: OnBatch = lambda _batch: None
) -> SweepReport:
    """Take everything that is due, in batches. Workers that sweep leave it to this one; each batch is audited."""
    queries, sweeper, began = Queries(operator.schema), uuid7(), time.monotonic()
    passing = Sweep(queries, actor=operator.actor, reason=arguments.reason(reason))
    batches, longest = 0, 0.0
    refused: list[Unswept] = []
    while True:
        await take_turn(operator.connection, queries, sweeper, timedelta(0), force=True)
        batch = await passing.next(operator.connection)
        if batch is None:
            break
        batches, longest = batches + 1, max(longest, batch.seconds)
        if (error := batch.refusal) is not None:
            text = f"{type(error).__name__}: {error.args[0]}"[:500]
            refused.append(Unswept(batch.step, batch.content_class, error.sqlstate, text))
        on_batch(batch)
    await end_turn(operator.connection, queries, sweeper, passing)
    return SweepReport(dict(passing.counts), batches, longest, time.monotonic() - began, refused)


async def set_policy(
    operator: Operator,
    entity: str,
    content_class: str,
    policy: RetentionPolicy | None,
    *,
    reason: str | None = None,
    dry_run: bool = False,
) -> RetentionPolicies:
    """Add, change or (None) remove a policy; refused when a replayed event could run twice under what comes out."""
    async with operator.changing("retention.set", dry_run=dry_run, reason=arguments.reason(reason)):
        queries = Queries(operator.schema)
        with_policy(await policies(operator.connection, queries), entity, content_class, policy)
        await operator.fetch(
            "retention_set",
            actor=operator.actor,
            reason=reason,
            entity=entity,
            content_class=content_class,
            active=None if policy is None else policy.active_ttl_days,
            grace=None if policy is None else policy.tombstoned_grace_days,
            disposal=None if policy is None else policy.disposal.value,
        )
        return await policies(operator.connection, queries)


# --- erasure ---


async def size(operator: Operator) -> int:
    """About how many rows an erasure has to look at, for a progress bar; 0 when nobody knows."""
    async with operator.reading():
        rows = await operator.fetch("estimate_outbox")
    return max(0, int(rows[0][0]))


async def preview_erasure(
    operator: Operator, domain_id: UUID | str, *, on_page: OnPage = lambda _examined: None
) -> Erasure:
    """How many rows `erase` would take from. It reads the whole outbox, a page at a time."""
    domain, settled, open_, after = arguments.identity(domain_id, "domain_id"), 0, 0, UUID(int=0)
    while True:
        async with operator.reading():
            (page,) = await operator.fetch("count_domain_page", domain=domain, most=_PAGE, after=after)
            if after == UUID(int=0):
                (archived,) = await operator.fetch("count_domain_archived", domain=domain, most=MOST)
        settled, open_ = settled + page["settled"], open_ + page["open"]
        on_page(page["examined"])
        if page["examined"] < _PAGE:
            return Erasure(domain, settled, archived["count"], open_, dry_run=True)
        after = page["next_id"]


async def erase(
    operator: Operator,
    domain_id: UUID | str,
    *,
    cancel_open: bool = False,
    reason: str | None = None,
    on_page: OnPage = lambda _examined: None,
) -> Erasure:
    """Take payload, headers, errors, history, keys and the domain itself from every settled row of a domain.

    What is left is the metadata: id, type, times, outcome; retention goes on with it. Open events stay, and are
    counted, unless `cancel_open`. The archive comes first: what is taken there cannot be replayed into the outbox.
    """
    domain, why = arguments.identity(domain_id, "domain_id"), arguments.reason(reason)
    asked = {"domain": domain, "actor": operator.actor, "reason": why}
    archived, erased, open_, after = 0, 0, 0, UUID(int=0)
    while True:
        async with operator.changing("retention.erase", domain_id=domain):
            (taken,) = await operator.fetch("erase_archived", **asked, limit=_ERASE_AT_ONCE)
        archived += taken[0]
        if taken[0] < _ERASE_AT_ONCE:
            break
    while True:
        async with operator.changing("retention.erase", domain_id=domain):
            (page,) = await operator.fetch("erase_outbox", **asked, cancel=cancel_open, limit=_PAGE, after=after)
        erased, open_ = erased + page["erased"], open_ + page["open"]
        on_page(page["examined"])
        if page["next_id"] is None:
            break
        after = page["next_id"]
    async with operator.reading():
        (left,) = await operator.fetch("count_domain_archived", domain=domain, most=MOST)
    return Erasure(domain, erased, archived, open_ + left["count"])
