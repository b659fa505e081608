"""Generations of a deployment: what each still has to do, and who serves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from holdfast.postgres.operations import failed
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.status import MOST

MOST_GENERATIONS = 200


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation. `open` and `failed` are counted up to a limit."""

    generation: int
    label: str | None
    started_at: datetime | None
    retired_at: datetime | None
    current: bool  # the default of writers that name none
    open: int
    failed: int
    channels: list[str]  # that have open events
    unserved: list[str]  # of those, the ones that no living worker serves
    workers: list[str]  # living ones

    @property
    def in_the_way(self) -> list[str]:
        """The reasons why it cannot be retired; none: it can."""
        problems = []
        if self.current:
            problems.append("it is the current one")
        if self.open:
            problems.append("1 event is open" if self.open == 1 else f"{self.open} events are open")
        if self.workers:
            count = len(self.workers)
            problems.append("1 worker serves it" if count == 1 else f"{count} workers serve it")
        return problems


@dataclass(frozen=True, slots=True)
class Retirement:
    """The answer to a request to retire a generation."""

    retired: bool
    open: int
    workers: int
    problem: str | None = None  # why it cannot be retired as long as it is the current one


async def every(statements: Statements) -> Excerpt[Generation]:
    """Every known generation, the newest first; of too many those of deployments."""
    rows = await statements.fetch("list_generations", most=MOST, most_generations=MOST_GENERATIONS)
    failures: Counter[int] = Counter()
    for _, generation, count in await failed.counts_by_handler(statements, most=MOST):
        failures[generation] += count
    found = {
        row["generation"]: Generation(
            **{name: value for name, value in row.items() if name != "total"}, failed=failures[row["generation"]]
        )
        for row in rows
    }
    for number in failures.keys() - found.keys():
        found[number] = Generation(number, None, None, None, False, 0, failures[number], [], [], [])
    total = max(rows[0]["total"] if rows else 0, len(found))
    return Excerpt((found[number] for number in sorted(found, reverse=True)), total)


async def begin(statements: Statements, *, label: str | None, actor: str, reason: str | None) -> int:
    """Begin a generation, which becomes the current one, and return its number."""
    return int(await statements.value("generation_begin", label=label, actor=actor, reason=reason))


async def default(statements: Statements) -> int:
    """The newest generation that a living worker serves."""
    return int(await statements.value("serving_generation"))


async def known(statements: Statements, generation: int) -> bool:
    """Whether it is the current generation, a deployment that is not retired, or served by a living worker."""
    return bool(await statements.value("knows_generation", generation=generation))


async def retire(statements: Statements, generation: int, *, force: bool, actor: str, reason: str | None) -> Retirement:
    """Mark a generation as retired, unless it has open events or living workers, or is the current one.

    With a problem the transaction cannot go on.
    """
    values = {"generation": generation, "force": force, "actor": actor, "reason": reason}
    try:
        row = await statements.row("generation_retire", **values)
    except asyncpg.ObjectNotInPrerequisiteStateError as error:
        return Retirement(False, 0, 0, error.args[0])
    return Retirement(row["retired"], row["open"], row["workers"])


async def count_movable(statements: Statements, generation: int) -> int:
    """How many pending events a move would take, up to a limit."""
    return int((await statements.row("count_movable", generation=generation, most=MOST))["count"])


async def move(statements: Statements, generation: int, to: int, *, most: int, actor: str, reason: str | None) -> int:
    """Move some pending events to another generation; how many."""
    values = {"from": generation, "to": to, "most": most}
    return int(await statements.value("generation_move", **values, actor=actor, reason=reason))
