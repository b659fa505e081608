"""Verbs for retention: the policies, what is due, sweeping it, and erasing the data of a person or a tenant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.operations import retention
from holdfast.postgres.operations.retention import RetentionReport
from holdfast.postgres.operations.sweeping import SweepReport
from holdfast.postgres.retention import Batch
from holdfast.retention import RetentionPolicies, RetentionPolicy, with_policy

_PAGE = 20_000
_ERASE_AT_ONCE = 1_000

# What an erasure cannot know; it is said with every report.
UNKNOWN = (
    "payloads of events that were published without this domain_id",
    "inbox keys of events that retention has removed",
    "what handlers, brokers and backups keep",
)


@dataclass(frozen=True, slots=True)
class Erasure:
    """Rows of a domain: those that lose everything but their metadata, and those that are open and stay.

    `failed` of those in the outbox are dead letters that could still be replayed; only a preview counts them.
    `records` are idempotency records that name the domain; they are forgotten, or lose their answers. `kept` counts
    what names it and is never erased, by where it stands: audit, notes, plans, schedules.
    """

    domain_id: UUID
    outbox: int
    archive: int
    open: int
    dry_run: bool = False
    records: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = UNKNOWN
    failed: int = 0

    @property
    def total(self) -> int:
        return self.outbox + self.archive


OnBatch = Callable[[Batch], None]
OnPage = Callable[[int], None]  # how many rows were examined


class Retention:
    """Retention, as `operator.retention`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def report(self) -> RetentionReport:
        """The policies, and what a sweep would take now."""
        async with self._session.reading() as statements:
            return await retention.report(statements)

    async def sweep(self, *, reason: str | None = None, on_batch: OnBatch = lambda _batch: None) -> SweepReport:
        """Take everything that is due, in batches. Workers leave their sweeps to this one; each batch is audited."""
        return await self._session.connection.sweep(self._session.actor, arguments.reason(reason), on_batch)

    async def set_policy(
        self,
        entity: str,
        content_class: str,
        policy: RetentionPolicy | None,
        *,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> RetentionPolicies:
        """Add, change or (None) remove a policy. Refused when a replayed event could run twice under the result."""
        named: dict[str, Any] = {"reason": arguments.reason(reason)}
        async with self._session.changing("retention.set", dry_run=dry_run, **named) as statements:
            with_policy(await retention.policies(statements), entity, content_class, policy)
            await retention.set_policy(
                statements, entity, content_class, policy, actor=self._session.actor, reason=reason
            )
            return await retention.policies(statements)

    async def size(self) -> int:
        """About how many rows an erasure has to examine, for a progress bar; 0 when the server has no estimate."""
        async with self._session.reading() as statements:
            return await retention.estimate(statements)

    async def preview_erasure(self, domain_id: UUID | str, *, on_page: OnPage = lambda _examined: None) -> Erasure:
        """How many rows `erase` would change. It reads the whole outbox, a page at a time."""
        domain, settled, open_ = arguments.identity(domain_id, "domain_id", "the domain_id of your events"), 0, 0
        failed = 0
        after: UUID | None = None
        while True:
            async with self._session.reading() as statements:
                page = await retention.count_page(statements, domain, most=_PAGE, after=after)
            settled, open_, failed = settled + page.settled, open_ + page.open, failed + page.failed
            on_page(page.examined)
            if page.examined < _PAGE or page.next_id is None:
                break
            after = page.next_id
        records = await self._erase_records(domain, None, count_only=True)
        async with self._session.reading() as statements:
            archived, kept = (
                await retention.count_archived(statements, domain),
                await retention.mentions(statements, domain),
            )
        return Erasure(domain, settled, archived, open_, dry_run=True, records=records, kept=kept, failed=failed)

    async def erase(
        self,
        domain_id: UUID | str,
        *,
        cancel_open: bool = False,
        reason: str | None = None,
        on_page: OnPage = lambda _examined: None,
    ) -> Erasure:
        """Erase payload, headers, errors, history, keys and the domain itself from every settled row of a domain.

        Keys of the inbox and of producers go with them, and what idempotency records say about the domain.

        The metadata stays: id, type, times, outcome; retention goes on with it. Open events stay, and are counted,
        unless `cancel_open`. The archive comes first: what is erased there cannot be replayed into the outbox.
        """
        domain, actor, why = (
            arguments.identity(domain_id, "domain_id", "the domain_id of your events"),
            self._session.actor,
            arguments.reason(reason),
        )
        archived, erased, open_ = 0, 0, 0
        after: UUID | None = None
        while True:
            async with self._session.changing("retention.erase", domain_id=domain) as statements:
                taken = await retention.erase_archived(statements, domain, most=_ERASE_AT_ONCE, actor=actor, reason=why)
            archived += taken
            if taken < _ERASE_AT_ONCE:
                break
        while True:
            async with self._session.changing("retention.erase", domain_id=domain) as statements:
                page = await retention.erase_page(
                    statements, domain, cancel=cancel_open, most=_PAGE, after=after, actor=actor, reason=why
                )
            erased, open_ = erased + page.settled, open_ + page.open
            on_page(page.examined)
            if page.next_id is None:
                break
            after = page.next_id
        records = await self._erase_records(domain, why)
        async with self._session.reading() as statements:
            left, kept = (
                await retention.count_archived(statements, domain),
                await retention.mentions(statements, domain),
            )
        return Erasure(domain, erased, archived, open_ + left, records=records, kept=kept)

    async def _erase_records(self, domain: UUID, reason: str | None, *, count_only: bool = False) -> int:
        """Erase, or count, the idempotency records that name a domain, a page at a time."""
        erased, after = 0, None
        while True:
            async with self._session.changing("retention.erase", dry_run=count_only, domain_id=domain) as statements:
                page = await retention.erase_records(
                    statements,
                    domain,
                    most=_ERASE_AT_ONCE,
                    after=after,
                    actor=self._session.actor,
                    reason=reason,
                    count_only=count_only,
                )
            erased += page.erased
            if page.next is None:
                return erased
            after = page.next
