"""Verbs for the generations of a deployment: what each still has to do, and whether it can be retired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import arguments
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import generations
from holdfast.postgres.operations.generations import Generation

BATCH = 5_000


@dataclass(frozen=True, slots=True)
class MovedGeneration:
    """How many pending events were moved from one generation to another, and how many are still open there."""

    source: int
    to: int
    moved: int
    left: int
    dry_run: bool = False


class Generations:
    """Generations, as `operator.generations`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def all(self) -> list[Generation]:
        """Every known generation, the newest first."""
        async with self._session.reading() as statements:
            return await generations.every(statements)

    async def begin(self, label: str | None = None, *, reason: str | None = None, dry_run: bool = False) -> int:
        """Begin a generation and return its number; from then on it is that of writers that do not name one."""
        if label is not None:
            arguments.line("label", label)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "label": label}
        async with self._session.changing("generation.begin", dry_run=dry_run, **asked) as statements:
            return await generations.begin(statements, label=label, actor=self._session.actor, reason=reason)

    async def retire(
        self, generation: int, *, force: bool = False, reason: str | None = None, dry_run: bool = False
    ) -> Generation:
        """Mark a generation as retired. Refused while it has open events or living workers, unless forced.

        The current one is retired only by force, and only while living workers serve the one that becomes current.
        """
        found = await self._known(generation)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "generation": generation, "force": force}
        async with self._session.changing("generation.retire", dry_run=dry_run, **asked) as statements:
            answer = await generations.retire(
                statements, generation, force=force, actor=self._session.actor, reason=reason
            )
            if answer.problem is not None:
                raise Refused(
                    answer.problem,
                    "start workers of the one before it and add --force, to go back; or begin another: "
                    "holdfast generations begin",
                )
            if not answer.retired:
                raise _not_retired(generation, answer.open, answer.workers)
        return found

    async def move(
        self, generation: int, to: int, *, force: bool = False, reason: str | None = None, dry_run: bool = False
    ) -> MovedGeneration:
        """Move the pending events of a generation to another one, a few thousand at a time.

        Refused, unless forced, when the other generation is unknown: no deployment and no living worker has it.
        """
        arguments.whole("generation", generation)
        if arguments.whole("to", to) == generation:
            raise ConfigurationError("to", f"is {to}, the generation the events are in", "name another one")
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "generation": generation, "to": to}
        found = await self._known(generation)
        async with self._session.changing("generation.move", dry_run=dry_run, **asked) as statements:
            if not force and not await generations.known(statements, to):
                raise Refused(
                    f"generation {to} is not a known deployment, and no worker serves it: the events would wait",
                    "choose one of holdfast generations list, or use --force",
                )
        if dry_run:
            # Counted and not tried: rows that are moved, if only for a moment, cannot be claimed.
            async with self._session.reading() as statements:
                movable = await generations.count_movable(statements, generation)
            return MovedGeneration(generation, to, movable, found.open - movable, dry_run)
        moved = 0
        while True:
            async with self._session.changing("generation.move", **asked) as statements:
                count = await generations.move(
                    statements, generation, to, most=BATCH, actor=self._session.actor, reason=reason
                )
            moved += count
            if count < BATCH:
                return MovedGeneration(generation, to, moved, max(0, found.open - moved))

    async def _known(self, generation: int) -> Generation:
        arguments.whole("generation", generation)
        for each in await self.all():
            if each.generation == generation:
                return each
        raise NotFound("generation", f"{generation} is unknown", "holdfast generations list")


def _not_retired(generation: int, open_events: int, workers: int) -> Refused:
    has, remedies = [], []
    if open_events:
        has.append(f"{open_events} open event{'' if open_events == 1 else 's'}")
        remedies.append(f"holdfast generations move {generation} --to NUMBER")
    if workers:
        has.append(f"{workers} living worker{'' if workers == 1 else 's'}")
        remedies.append(f"stop the worker{'' if workers == 1 else 's'}")
    return Refused(f"generation {generation} has {' and '.join(has)}", ", ".join([*remedies, "or --force"]))
