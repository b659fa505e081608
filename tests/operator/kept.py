"""Rows of a certain age, for the tests of retention: written at once, in any state, without a worker."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import Batch, Sweep

HANDLER = "billing.charge_card"

# A row of n settled or open so many days ago. What a state does not say about a row is as a worker leaves it.
ROWS = """
INSERT INTO core.outbox (
    id, event_type, source, payload, headers, idempotency_key, content_class, channel, handler_name, attempts, status,
    domain_id, trace_context, created_at, available_at, settled_at, delivered_at, failed_at, failure_reason, last_error,
    error_signature, first_failed_at, failure_history, deleted_at, lease_token, lease_expires_at, claimed_by)
SELECT i, 'order.placed', 'shop', '{"card": "x411"}', '{"tenant": "acme"}', 'key-' || i, $3, 'outbox_default',
    CASE WHEN $1 <> 'pending' THEN 'billing.charge_card' END, 1,
    CASE $1 WHEN 'discarded' THEN 'failed' WHEN 'cancelled' THEN 'failed' WHEN 'tombstone' THEN 'delivered'
            WHEN 'future' THEN 'pending' ELSE $1 END,
    $5, '00-trace', t - interval '1 minute', CASE $1 WHEN 'future' THEN now() + interval '1 day' ELSE t END,
    CASE WHEN $1 NOT IN ('pending', 'in_flight', 'future') THEN t END,
    CASE WHEN $1 IN ('delivered', 'tombstone') THEN t END,
    CASE WHEN $1 IN ('failed', 'discarded', 'cancelled') THEN t END,
    CASE $1 WHEN 'failed' THEN 'rejected' WHEN 'discarded' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END,
    CASE WHEN $1 IN ('failed', 'discarded', 'cancelled') THEN 'card x411 declined' END,
    CASE WHEN $1 IN ('failed', 'discarded', 'cancelled') THEN 'E:1' END,
    CASE WHEN $1 IN ('failed', 'discarded', 'cancelled') THEN t END,
    CASE WHEN $1 IN ('failed', 'discarded', 'cancelled') THEN '[{"attempts": 1, "generation": 0, "last_error": "x411"}]'
         ELSE '[]' END::jsonb,
    CASE WHEN $1 IN ('tombstone', 'discarded', 'cancelled') THEN now() - $6 * interval '24 hours' END,
    CASE $1 WHEN 'in_flight' THEN gen_random_uuid() END,
    CASE $1 WHEN 'in_flight' THEN now() + interval '1 hour' END,
    gen_random_uuid()
FROM (SELECT core.uuid7() AS i, now() - $2 * interval '24 hours' AS t FROM generate_series(1, $4)) rows
RETURNING id
"""

ARCHIVED = """
INSERT INTO core.archive (
    original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason, last_exception,
    event_type, event_version, occurred_at, source, content_class, channel, generation, domain_id, idempotency_key,
    trace_context, priority, error_signature, failure_history, deleted_at)
SELECT core.uuid7(), 'billing.charge_card', '{"card": "x411"}', '{"tenant": "acme"}', 5, t, t, 'retry_terminal',
    'card x411 declined', 'order.placed', 1, t, 'shop', $2, 'outbox_default', 0, $4, 'key-' || n, '00-trace', 1, 'E:1',
    '[{"attempts": 1, "generation": 0, "last_error": "x411"}]', now() - $5 * interval '24 hours'
FROM (SELECT n, now() - $1 * interval '24 hours' AS t FROM generate_series(1, $3) n) rows
RETURNING id
"""


async def rows(
    connection: asyncpg.Connection,
    state: str,
    days: float,
    count: int = 1,
    *,
    content_class: str = "operations",
    domain: UUID | None = None,
    deleted: float | None = None,
) -> list[UUID]:
    """`days` is how long ago they were settled, or made; `deleted` how long ago they were discarded."""
    discarded = deleted if deleted is not None else days
    found = await connection.fetch(ROWS, state, days, content_class, count, domain, discarded)
    return [each["id"] for each in found]


async def archived(
    connection: asyncpg.Connection,
    days: float,
    count: int = 1,
    *,
    content_class: str = "operations",
    domain: UUID | None = None,
    deleted: float | None = None,
) -> list[int]:
    found = await connection.fetch(ARCHIVED, days, content_class, count, domain, deleted)
    return [each["id"] for each in found]


async def policy(
    connection: asyncpg.Connection,
    entity: str,
    active: int,
    grace: int,
    disposal: str = "HARD_DELETE",
    content_class: str = "*",
) -> None:
    await connection.execute(
        "SELECT core.retention_set('ann', NULL, $1, $2, $3, $4, $5)", entity, content_class, active, grace, disposal
    )


async def sweep(connection: asyncpg.Connection, **options: Any) -> list[Batch]:
    """One whole pass."""
    passing, batches = Sweep(Queries("core"), **options), []
    while (batch := await passing.next(connection)) is not None:
        batches.append(batch)
    return batches


def swept(batches: list[Batch]) -> dict[str, int]:
    found: dict[str, int] = {}
    for batch in batches:
        if batch.swept:
            found[batch.step] = found.get(batch.step, 0) + batch.swept
    return found


async def ids(connection: asyncpg.Connection, condition: str = "true") -> set[UUID]:
    return {each["id"] for each in await connection.fetch(f"SELECT id FROM core.outbox WHERE {condition}")}


async def row(connection: asyncpg.Connection, id: UUID) -> asyncpg.Record:
    return await connection.fetchrow("SELECT * FROM core.outbox WHERE id = $1", id)


async def age(connection: asyncpg.Connection, days: float) -> None:
    """As if so many days had passed: everything that retention goes by is moved into the past."""
    await connection.execute(
        f"""UPDATE core.outbox SET settled_at = settled_at - interval '{days * 24} hours',
                failed_at = failed_at - interval '{days * 24} hours',
                deleted_at = deleted_at - interval '{days * 24} hours';
            UPDATE core.archive SET failed_at = failed_at - interval '{days * 24} hours',
                deleted_at = deleted_at - interval '{days * 24} hours';
            UPDATE core.event_handled SET handled_at = handled_at - interval '{days * 24} hours'"""
    )
