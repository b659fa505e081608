"""Generations of a deployment: what each still has to do, who serves it, and whether it can go (GEN-2)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.session import Operator, Refused
from holdfast.postgres import reads

MOST_GENERATIONS = 200
BATCH = 5_000


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation. `open` and `failed` are counted up to a limit."""

    generation: int
    label: str | None
    started_at: datetime | None
    retired_at: datetime | None
    current: bool  # what writers get that do not name one
    open: int
    failed: int
    channels: list[str]  # that have open events
    unserved: list[str]  # of those, the ones that no living worker serves
    workers: list[str]  # living ones

    @property
    def stranded(self) -> bool:
        """Events wait where nobody will come."""
        return bool(self.unserved)

    @property
    def in_the_way(self) -> list[str]:
        """Why it cannot be retired; nothing: it can."""
        problems = []
        if self.current:
            problems.append("it is the current one")
        if self.open:
            problems.append(f"{self.open} events are open")
        if self.workers:
            problems.append(f"{len(self.workers)} workers serve it")
        return problems


@dataclass(frozen=True, slots=True)
class MovedGeneration:
    """How many waiting events went from one generation to another, and how many are still open there."""

    source: int
    to: int
    moved: int
    left: int
    dry_run: bool = False


async def listing(operator: Operator) -> list[Generation]:
    """Every generation that something knows of, the newest first."""
    async with operator.reading():
        rows = await operator.fetch(
            "list_generations", silence=reads.SILENCE, most=reads.MOST, most_generations=MOST_GENERATIONS
        )
        failures = await operator.fetch("count_failed_by_handler", most=reads.MOST)
    failed: Counter[int] = Counter()
    for row in failures:
        failed[row["generation"]] += row["count"]
    found = {row["generation"]: Generation(**row, failed=failed[row["generation"]]) for row in rows}
    for number in failed.keys() - found.keys():
        found[number] = Generation(number, None, None, None, False, 0, failed[number], [], [], [])
    return [found[number] for number in sorted(found, reverse=True)]


async def retire(
    operator: Operator, generation: int, *, force: bool = False, reason: str | None = None, dry_run: bool = False
) -> Generation:
    """Mark a generation as gone. Refused while it has open events or living workers, unless forced."""
    found = await _known(operator, generation)
    asked = {"reason": arguments.reason(reason), "generation": generation, "force": force}
    async with operator.changing("generation.retire", dry_run=dry_run, **asked):
        if found.current:
            raise Refused(f"generation {generation} is the current one", "begin another deployment first")
        values = {"generation": generation, "force": force, "actor": operator.actor, "reason": reason}
        (answer,) = await operator.fetch("retire_generation", **values)
        if not answer["retired"]:
            raise Refused(
                f"generation {generation} has {answer['open']} open events and {answer['workers']} living workers",
                f"holdfast generations move {generation} --to NUMBER, stop the workers, or --force",
            )
    return found


async def move(
    operator: Operator,
    generation: int,
    to: int,
    *,
    force: bool = False,
    reason: str | None = None,
    dry_run: bool = False,
) -> MovedGeneration:
    """Move the waiting events of a generation to another one, a few thousand at a time.

    Refused, unless forced, when nothing speaks for the other one: no deployment and no living worker has its number.
    """
    arguments.whole("generation", generation)
    if arguments.whole("to", to) == generation:
        raise ConfigurationError("to", f"is {to} as well", "name the generation whose workers should handle the events")
    asked: dict[str, Any] = {"reason": arguments.reason(reason), "generation": generation, "to": to}
    found = await _known(operator, generation)
    async with operator.changing("generation.move", dry_run=dry_run, **asked):
        if not force and not await operator.knows(to):
            raise Refused(
                f"generation {to} is no deployment and no worker serves it: the events would wait for nobody",
                "holdfast generations list has those that are known; --force moves them all the same",
            )
    if dry_run:
        # Counted and not tried: rows that are moved, if only for a moment, cannot be claimed.
        async with operator.reading():
            (movable,) = await operator.fetch("count_movable", generation=generation, most=reads.MOST)
        return MovedGeneration(generation, to, movable["count"], found.open - movable["count"], dry_run)
    values = {"from_generation": generation, "to_generation": to, "most": BATCH, "actor": operator.actor}
    moved = 0
    while True:
        async with operator.changing("generation.move", **asked):
            count = int((await operator.fetch("move_generation", **values, reason=reason))[0][0])
        moved += count
        if count < BATCH:
            return MovedGeneration(generation, to, moved, max(0, found.open - moved))


async def _known(operator: Operator, generation: int) -> Generation:
    arguments.whole("generation", generation)
    for each in await listing(operator):
        if each.generation == generation:
            return each
    raise ConfigurationError("generation", f"{generation} is unknown", "holdfast generations list has them")
