"""Addresses of pages whose paths have parameters. A new one is added here, under the name of its page's `example`."""

from __future__ import annotations

from typing import Any

import asyncpg

FIRST = {
    "handler": "SELECT '/handlers/' || handler_name FROM core.subscriptions ORDER BY 1 LIMIT 1",
    "schedule": "SELECT '/schedules/' || name FROM core.schedules ORDER BY 1 LIMIT 1",
    "worker": "SELECT '/workers/' || id FROM core.workers LIMIT 1",
    "plan": "SELECT '/plans/' || max(id) FROM core.plans",
    "plan.again": "SELECT '/plans/' || max(id) || '/again' FROM core.plans",
    "plan.report": "SELECT '/plans/' || max(id) || '/report' FROM core.plans",
    "event": "SELECT '/events/' || id FROM core.outbox WHERE failure_history <> '[]' LIMIT 1",
}


async def address_of(page: Any, dsn: str) -> str:
    """Return an address of a page in a filled database."""
    if "{" not in page.path:
        return str(page.path)
    conn = await asyncpg.connect(dsn)
    try:
        found = await conn.fetchval(FIRST[page.example])
    finally:
        await conn.close()
    assert found, f"the shop has nothing for {page.path}"
    return str(found)
