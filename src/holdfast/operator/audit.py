"""Who did what, when and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from holdfast.operator import arguments
from holdfast.operator.session import Operator

LONGEST_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One action. `actor` is who they said they are, `login` who the database knows they are."""

    id: int
    at: datetime
    actor: str
    login: str
    action: str
    reason: str | None
    arguments: dict[str, Any]
    counts: dict[str, int]
    rows: int | None  # how many rows it changed, when it changes rows


async def trail(
    operator: Operator,
    *,
    limit: int = 50,
    before: int | None = None,
    actor: str | None = None,
    action: str | None = None,
    since: datetime | None = None,
    steps: bool = False,
) -> list[AuditLine]:
    """What was done, the latest first; `before` is the id of the last line of the page before.

    The single steps of plans are left out unless `steps`: a plan's own lines say what it did.
    """
    arguments.whole("limit", limit, 1, LONGEST_PAGE)
    async with operator.reading():
        rows = await operator.fetch(
            "list_audit",
            most=limit,
            before=None if before is None else arguments.whole("before", before),
            actor=None if actor is None else arguments.line("actor", actor),
            action=None if action is None else arguments.name("action", action),
            since=None if since is None else arguments.moment("since", since),
            steps=steps or action == "plan.step",
        )
    return [line_of(row) for row in rows]


def line_of(row: asyncpg.Record) -> AuditLine:
    return AuditLine(**(dict(row) | {name: json.loads(row[name]) for name in ("arguments", "counts")}))
