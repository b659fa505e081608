"""Workers as operators see them, and what a worker holds."""

from __future__ import annotations

from uuid import UUID

from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.status import MOST


async def count_held(statements: Statements, worker: UUID) -> int:
    """How many events a worker holds under a lease, up to a limit."""
    return int(await statements.value("count_held", worker=worker, most=MOST))


async def release(statements: Statements, worker: UUID, *, most: int, actor: str, reason: str | None) -> int:
    """Release some of the events that a worker holds; how many."""
    return int(await statements.value("worker_release", worker=worker, most=most, actor=actor, reason=reason))
