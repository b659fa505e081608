"""A shop with a past: handlers that work, one that fails, workers, a day of roll-up. Every page has something."""

from __future__ import annotations

import json
import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from holdfast.failure import describe

ORDER = "order.placed"
FAILED_TWICE = "SELECT id FROM core.outbox WHERE failure_history <> '[]'"
FAILING = "billing.charge_card"
HANDLERS = {
    FAILING: [ORDER],
    "notifications.send_confirmation": [ORDER, "order.shipped"],
    "ledger.record_sale": [ORDER],
    "webhooks.deliver": ["refund.issued"],
    "search.index": ["product.changed"],
}


class CardTerminalTimeout(Exception):
    pass


class SMTPRecipientsRefused(Exception):
    pass


class UniqueViolation(Exception):
    pass


class HTTPStatusError(Exception):
    pass


for _kind in (CardTerminalTimeout, SMTPRecipientsRefused, UniqueViolation, HTTPStatusError):
    _kind.__module__ = "__main__"  # errors are shown without the name of this module


def causes(number: int) -> list[tuple[str, str, Exception, timedelta]]:
    """The handler, the event type, the error and how long ago, of the n-th dead letter of each kind."""
    rng = random.Random(number)
    return [
        (
            FAILING,
            ORDER,
            CardTerminalTimeout(f"terminal T-{400 + number % 60:04d} did not answer within 8000 ms"),
            timedelta(seconds=4 + number * 9 % 2900),
        ),
        (
            "notifications.send_confirmation",
            ORDER,
            SMTPRecipientsRefused(f"{550 + number % 3} mailbox unavailable: 'guest{number}@example.com'"),
            timedelta(hours=rng.random() * 47, minutes=11),
        ),
        (
            "ledger.record_sale",
            ORDER,
            UniqueViolation(f'duplicate key value violates unique constraint "sales_pkey" for {number}'),
            timedelta(hours=13 + rng.random() * 2),
        ),
        (
            "webhooks.deliver",
            "refund.issued",
            HTTPStatusError(f"410 Gone for url https://hooks.example.com/{number}"),
            timedelta(hours=2 + rng.random() * 42),
        ),
    ]


ADD = """
INSERT INTO core.outbox (id, event_type, event_version, source, payload, headers, idempotency_key, dedupe_key, channel,
       generation, status, handler_name, attempts, last_error, traceback, error_signature, failure_reason,
       first_failed_at, failed_at, settled_at, delivered_at, created_at, occurred_at, domain_id, trace_context,
       failure_history, origin_id, available_at)
SELECT id, event_type, event_version, source, payload, headers, idempotency_key, dedupe_key,
       core.channel_of(generation), generation, status, handler_name, attempts, last_error, traceback,
       error_signature, failure_reason, first_failed_at, failed_at, settled_at, delivered_at, created_at, created_at,
       domain_id, trace_context,
       coalesce(failure_history, '[]'), origin_id, coalesce(available_at, created_at)
FROM jsonb_populate_recordset(NULL::core.outbox, $1::text::jsonb)
"""


def row(event_type: str, created: datetime, **others: Any) -> dict[str, Any]:
    """A row of the outbox."""
    milliseconds = int(created.timestamp() * 1000)
    id = uuid.UUID(
        int=(milliseconds << 80) | (7 << 76) | (random.getrandbits(12) << 64) | (2 << 62) | random.getrandbits(62)
    )
    order = uuid.uuid5(uuid.NAMESPACE_DNS, str(id.int % 97))
    return {
        "id": str(id),
        "event_type": event_type,
        "event_version": 2,
        "source": "shop",
        "payload": {
            "order_id": id.int % 100_000,
            "total": {"amount": f"{id.int % 20_000 / 100:.2f}", "currency": "EUR"},
            "customer": {"name": "Grace Hopper", "email": "grace@example.com"},
            "lines": [{"sku": "A-1", "count": 2}, {"sku": "B-7", "count": 1}],
        },
        "headers": {"request_id": str(order), "channel": "web"},
        "idempotency_key": f"order-{id.int % 100_000}-{str(id)[:8]}",
        "dedupe_key": None,
        "generation": 0,
        "status": "delivered",
        "attempts": 1,
        "created_at": created.isoformat(),
        "domain_id": str(order),
        "trace_context": f"00-{id.hex}-{id.hex[:16]}-01",
        **others,
    }


def failed_row(
    handler: str, event_type: str, error: Exception, at: datetime, history: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A dead letter."""
    report, function = describe(error), handler.partition(".")[2]
    return row(
        event_type,
        at - timedelta(minutes=20 if history else 3),
        status="failed",
        handler_name=handler,
        attempts=5,
        last_error=report.text,
        traceback=f"raised at shop/handlers.py:40 in {function}\n"
        f'  File "shop/handlers.py", line 40, in {function}\n  File "shop/gateway.py", line 88, in call',
        error_signature=report.signature,
        failure_reason="max_deliveries",
        first_failed_at=(at - timedelta(minutes=2)).isoformat(),
        failed_at=at.isoformat(),
        settled_at=at.isoformat(),
        failure_history=history or [],
    )


async def fill(
    conn: asyncpg.Connection,
    *,
    failing: int = 1183,
    others: tuple[int, int, int] = (58, 21, 14),
    delivered: int = 400,
    minutes: int = 24 * 60,
) -> None:
    """Fill an empty schema."""
    now = datetime.now(UTC)
    for handler, types in HANDLERS.items():
        await conn.execute("SELECT core.subscribe($1, $2, $3)", handler.partition(".")[0], handler, types)
    for n, name in enumerate(("shop-7f9c-1", "shop-7f9c-2", "shop-7f9c-3")):
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, name)
        await conn.execute(
            "SELECT core.worker_beat($1, $2, $3, $4, '1.4.2', 0, $5, $6)",
            identity, name, f"app-{n + 1}", 4211 + n, ["outbox_default"], list(HANDLERS)[: 5 - n],
        )  # fmt: skip
    rows: list[dict[str, Any]] = []
    counts = (failing, *others)
    for number in range(max(counts)):
        for kind, (handler, event_type, error, age) in enumerate(causes(number)):
            if number < counts[kind]:
                rows.append(failed_row(handler, event_type, error, now - age))
    before = describe(CardTerminalTimeout("terminal T-0412 did not answer within 5000 ms"))
    again = (now - timedelta(minutes=9), now - timedelta(minutes=12), now - timedelta(minutes=15))
    cycle = {
        "attempts": 5,
        "last_error": before.text,
        "failed_at": again[1].isoformat(),
        "first_failed_at": again[2].isoformat(),
        "failure_reason": "max_deliveries",
        "generation": 0,
        "replayed_by": "ada@example.com",
        "replayed_at": again[0].isoformat(),
    }
    rows.append(
        failed_row(
            FAILING,
            ORDER,
            CardTerminalTimeout("terminal T-0412 did not answer within 8000 ms"),
            now - timedelta(seconds=2),
            [cycle],
        )
    )
    for n in range(delivered):
        at = now - timedelta(seconds=7 * n)
        rows.append(
            row(ORDER, at, delivered_at=at.isoformat(), settled_at=at.isoformat(), handler_name="ledger.record_sale")
        )
    rows += [row(ORDER, now - timedelta(seconds=n % 4), status="pending", attempts=0) for n in range(40)]
    later = (now + timedelta(minutes=20)).isoformat()
    rows += [
        row(
            "order.shipped", now, status="pending", attempts=1, available_at=later, last_error="TimeoutError: no answer"
        )
        for _ in range(12)
    ]
    await conn.execute(ADD, json.dumps(rows))
    await _roll_up(conn, now, minutes)


async def _roll_up(conn: asyncpg.Connection, now: datetime, minutes: int) -> None:
    minute = now.replace(second=0, microsecond=0)
    rng = random.Random(1)
    lines = []
    for ago in range(minutes):
        for handler, share in (
            ("ledger.record_sale", 70),
            ("notifications.send_confirmation", 66),
            (FAILING, 64),
            ("search.index", 8),
            ("webhooks.deliver", 3),
        ):
            good = max(0, int(rng.gauss(share, share / 9)))
            bad = rng.randrange(3) == 0 and handler.startswith("notifications") and rng.randrange(20) == 0
            retried = failed = 0
            if handler == FAILING and ago < 49:
                retried, failed, good = int(good * 1.4), good // 3, 0
            elif bad:
                retried, failed = 4, 1
            buckets = [0] * 21
            for place, part in (
                ((4, 0.55), (6, 0.3), (8, 0.13), (11, 0.02))
                if handler != FAILING or ago >= 49
                else ((12, 0.3), (14, 0.7))
            ):
                buckets[place] = int((good + retried + failed) * part)
            lines.append((minute - timedelta(minutes=ago), handler, good, retried, failed, buckets))
    await conn.executemany(
        """INSERT INTO core.rollup (period_start, handler_name, generation, begun, delivered, retried, failed,
                                    handler_buckets, outbox_buckets)
           VALUES ($1, $2, 0, $3::bigint + $5::bigint, $3, $4, $5, $6, $6)""",
        [(start, handler, good, retried, failed, buckets) for start, handler, good, retried, failed, buckets in lines],
    )
