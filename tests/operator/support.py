"""Dead letters by the thousand, and the command line as scripts see it."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import asyncpg

from holdfast.failure import describe
from holdfast.operator import Operator

ROOT = Path(__file__).parents[2]
EVENT = "order.placed"
HANDLER = "billing.charge_card"
ACTOR = "ann@example.org"

# Seven things that go wrong, each with values that differ from event to event.
CAUSES: tuple[Callable[[int], Exception], ...] = (
    lambda n: ValueError(f"order {n} is unknown"),
    lambda n: KeyError(f"sku-{n:x}"),
    lambda n: TimeoutError(f"no answer from 10.0.{n % 250}.{n % 199}:5432 after {n / 7:.3f} s"),
    lambda n: RuntimeError(f"card of customer-{n}@example.com declined at 2026-03-{1 + n % 28:02d}T10:00:{n % 60:02d}"),
    lambda n: FileNotFoundError(2, "No such file", f"/var/lib/shop/{uuid.UUID(int=n)}/invoice-{n}.pdf"),
    lambda n: LookupError(f"no session {uuid.UUID(int=n * 7919)} in <Store object at 0x{n * 4096:012x}>"),
    lambda n: ConnectionError(f"GET https://api.example.com/v1/charges/ch_{n}?expand={n % 3} failed: 'status {n % 9}'"),
)

FAIL = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, status, handler_name,
                         attempts, last_error, error_signature, failure_reason, first_failed_at, failed_at, settled_at,
                         created_at)
SELECT e.id, $4, 'shop', jsonb_build_object('n', e.n), e.id::text, core.channel_of($5), $5, 'failed', $6, 5, e.text,
       e.signature, 'retry_terminal', now() - interval '1 minute', now() - e.n * interval '1 millisecond', now(),
       now() - $7::interval
FROM unnest($1::uuid[], $2::text[], $3::text[]) WITH ORDINALITY AS e (id, text, signature, n)
"""


async def fail_with(
    conn: asyncpg.Connection,
    errors: Sequence[Exception],
    *,
    handler: str = HANDLER,
    event_type: str = EVENT,
    generation: int = 0,
    age: str = "1 hour",
) -> list[UUID]:
    """Dead letters as a worker leaves them, one for each error, the first of them the newest."""
    reports = [describe(error) for error in errors]
    ids = [row[0] for row in await conn.fetch("SELECT core.uuid7() FROM generate_series(1, $1)", len(errors))]
    texts, signatures = [report.text for report in reports], [report.signature for report in reports]
    # An interval as text, so that tests can write it.
    statement = FAIL.replace("$7::interval", "$7::text::interval")
    await conn.execute(statement, ids, texts, signatures, event_type, generation, handler, age)
    return ids


async def block(conn: asyncpg.Connection, id: UUID, key: str, *, handler: str = HANDLER) -> None:
    """Let a dead letter be the head of an ordering key, as the worker that began it has left it."""
    await conn.execute("UPDATE core.outbox SET ordering_key = $2 WHERE id = $1", id, key)
    await conn.execute(
        "INSERT INTO core.ordering_heads (handler_name, ordering_key, head_id, blocks) VALUES ($1, $2, $3, true)",
        handler,
        key,
        id,
    )


def driver_of(operator: Operator) -> asyncpg.Connection:
    """The connection of an operator, for tests that change its role."""
    return operator._session.connection.driver


async def fail(conn: asyncpg.Connection, count: int = 1, **options: str | int) -> list[UUID]:
    """Dead letters of one cause."""
    return await fail_with(conn, [ValueError(f"order {n} is unknown") for n in range(count)], **options)  # type: ignore[arg-type]


async def subscribe(conn: asyncpg.Connection, handler: str = HANDLER, *event_types: str) -> None:
    context = handler.partition(".")[0]
    await conn.execute("SELECT core.subscribe($1, $2, $3)", context, handler, list(event_types or (EVENT,)))


async def beat(
    conn: asyncpg.Connection, name: str, *handlers: str, generation: int = 0, host: str = "host", again: str = ""
) -> uuid.UUID:
    """The heartbeat of a worker, which is another one with another host or `again`; its id."""
    channel = "outbox_default" if generation == 0 else f"outbox_gen_{generation}"
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, name + host * (host != "host") + again)
    values = (identity, name, host, generation, [channel], list(handlers))
    await conn.execute("SELECT core.worker_beat($1, $2, $3, 1, '1.0', $4, $5, $6)", *values)
    return identity


async def states(conn: asyncpg.Connection) -> dict[str, int]:
    """How many rows of the outbox are in each state; with a time of deletion they are discarded."""
    rows = await conn.fetch(
        """SELECT CASE WHEN deleted_at IS NULL THEN status ELSE 'discarded' END AS state, count(*)
           FROM core.outbox GROUP BY 1"""
    )
    return {row["state"]: row["count"] for row in rows}


async def actions(conn: asyncpg.Connection) -> list[str]:
    """What the audit says was done, in order, without the steps of plans."""
    rows = await conn.fetch("SELECT action FROM core.audit WHERE action <> 'plan.step' ORDER BY id")
    return [row["action"] for row in rows]


async def command(dsn: str, *arguments: str, actor: str = ACTOR) -> asyncio.subprocess.Process:
    """`holdfast ...` in a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from holdfast.cli import main; main()", *arguments),
        cwd=ROOT,
        env={**os.environ, "HOLDFAST_DSN": dsn, "HOLDFAST_ACTOR": actor},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
