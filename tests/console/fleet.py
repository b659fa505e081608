"""What the pages of plans, fleet, keeping and trust have to show, in the database of the shop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import asyncpg

from holdfast.operator import Operator, Selection
from tests.console import shop

REPORT = "reports.daily"

ARCHIVED = """
INSERT INTO core.archive (original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason,
       last_exception, event_type, event_version, occurred_at, source, content_class, channel, generation,
       idempotency_key, priority, error_signature, failure_history, deleted_at)
SELECT gen_random_uuid(), 'webhooks.deliver', '{"refund": 7}', '{}', 5, $1::timestamptz,
       $1::timestamptz + interval '1 minute', 'max_deliveries',
       'HTTPStatusError: 410 Gone for url https://hooks.example.com/' || n, 'refund.issued', 1, $1::timestamptz, 'shop',
       'default', 'outbox_default', 0, 'refund-' || n, 0, 'HTTPStatusError:0a1b2c3d4e5f6071', '[]',
       CASE WHEN n % 4 = 0 THEN $2::timestamptz END
FROM generate_series(1, $3::int) n
"""
REQUESTS = """
INSERT INTO core.idempotency_records (scope, key, request_hash, hash_version, status, response_status_code,
       response_body, created_at, expires_at)
SELECT 'tenant-' || n % 3, 'checkout-' || n, 'hmac', 1,
       CASE n % 5 WHEN 0 THEN 'Started' WHEN 1 THEN 'Failed' ELSE 'Completed' END,
       CASE n % 5 WHEN 0 THEN NULL WHEN 1 THEN 422 ELSE 201 END,
       CASE n % 5 WHEN 0 THEN NULL ELSE 'SECRET BODY'::bytea END, $1::timestamptz - n * interval '1 minute',
       $1::timestamptz + interval '24 hours' - n * interval '1 minute'
FROM generate_series(1, $2::int) n
"""


REPLAYED = "SELECT id FROM core.outbox WHERE status = 'pending' AND handler_name = $1"
DELIVER = "UPDATE core.outbox SET status = 'delivered', delivered_at = now(), settled_at = now() WHERE id = $1"
FAIL_AGAIN = """
UPDATE core.outbox SET status = 'failed', attempts = 5, last_error = 'CardDeclined: do_not_honour', failed_at = now(),
       error_signature = 'CardDeclined:0011223344556677', failure_reason = 'max_deliveries', settled_at = now()
WHERE id = $1
"""


async def fill(dsn: str, *, archived: int = 8, requests: int = 12) -> int:
    """Add to the shop; the number of its plan, which is not started."""
    now = datetime.now(UTC)
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(ARCHIVED, now - timedelta(days=3), now - timedelta(hours=5), archived)
        await conn.execute(REQUESTS, now, requests)
        for name, cron, event_type in (
            (REPORT, "0 15 * * *", "day.ended"),
            ("cleanup.carts", "*/10 * * * *", "carts.due"),
        ):
            await conn.execute(
                "SELECT core.schedule_declare($1, $2, 'Europe/Berlin', NULL, 'latest', $3, 'shop', NULL, 0::smallint, "
                "'{}', 0, false)",
                name, cron, event_type,
            )  # fmt: skip
    finally:
        await conn.close()
    async with Operator(dsn, actor="grace@example.com") as operator:
        await operator.generations.begin("1.4.2", reason="the new terminal driver")
        await operator.handlers.limit("search.index", fleet_concurrency=4, rate="20/s", reason="the index is small")
        await operator.handlers.pause("webhooks.deliver", reason="the partner asked for it")
        made = await operator.plans.create(
            Selection(handler=shop.FAILING), canary=5, rate=100, reason="the terminal is back"
        )
    return made.plan.id


async def settle(dsn: str, done: asyncio.Event, *, fails: int = 0) -> None:
    """Handle what a plan has replayed, in place of a worker, until `done`: the first few fail again."""
    conn = await asyncpg.connect(dsn)
    try:
        while not done.is_set():
            for row in await conn.fetch(REPLAYED, shop.FAILING):
                fails -= 1
                await conn.execute(FAIL_AGAIN if fails >= 0 else DELIVER, row["id"])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.02)
    finally:
        await conn.close()


POISONED = """
INSERT INTO core.archive (original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason,
       last_exception, event_type, event_version, occurred_at, source, content_class, channel, generation,
       idempotency_key, priority, error_signature, failure_history)
VALUES (gen_random_uuid(), $1, '{}', '{}', 5, now(), now(), 'max_deliveries', $1, $1, 1, now(), $1, 'default',
        'outbox_default', 0, $1, 0, $1, '[]')
"""
POISONED_SCHEDULE = """
SELECT core.schedule_declare($1, '0 15 * * *', 'UTC', NULL, 'latest', 'day.ended', 'shop', NULL, 0::smallint, '{}', 0,
                             false)
"""
POISONED_REQUEST = """
INSERT INTO core.idempotency_records (scope, key, request_hash, hash_version, expires_at)
VALUES ($1, $1, 'hmac', 1, now() + interval '1 hour') ON CONFLICT DO NOTHING
"""


async def poison(dsn: str, vectors: Sequence[str]) -> None:
    """Write hostile text wherever somebody else than this package could."""
    conn = await asyncpg.connect(dsn)
    try:
        for number, vector in enumerate(vectors):
            text = vector.replace("\x00", "")
            await conn.execute(POISONED, text)
            await conn.execute(POISONED_REQUEST, text)
            await conn.execute(
                "INSERT INTO core.workers (id, name, host, pid, version, generation, channels, handlers) "
                "VALUES (gen_random_uuid(), $1, $1, 7, $1, 0, ARRAY[$1], ARRAY[$1])",
                text,
            )
            await conn.execute("INSERT INTO core.deployments (generation, label) VALUES ($1, $2)", 100 + number, text)
            await conn.execute(POISONED_SCHEDULE, f"poisoned.n{number}")
        await conn.execute("SELECT core.subscribe('billing', $1, $2)", shop.FAILING, [shop.ORDER])
        await conn.execute("UPDATE core.schedules SET event_type = $1, source = $1", vectors[0])
    finally:
        await conn.close()
    async with Operator(dsn, actor=vectors[1]) as operator:
        await operator.plans.create(Selection(everything=True), reason=vectors[0])
