"""The result of a verb that moves several rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from holdfast.operator.session import Refused
from holdfast.postgres.operations.outcomes import Outcomes


@dataclass(frozen=True, slots=True)
class Moved:
    """The rows that were moved. Those that were left are counted by the reason.

    `busy`: another transaction was changing the row. `too_old`: the inbox may have forgotten that the handler has
    handled the event; only a replay with force moves it.
    """

    action: str
    moved: list[UUID]
    left: dict[str, int] = field(default_factory=dict)
    dry_run: bool = False
    generation: int | None = None  # of a replay: the generation that it went to
    purge_at: datetime | None = None  # of a discard: when the first row is disposed of
    unknown_generation: bool = False  # of a replay: no deployment and no living worker has that generation

    @property
    def count(self) -> int:
        return len(self.moved)

    @property
    def warning(self) -> str | None:
        """A consequence that the operator may not expect."""
        if not self.unknown_generation:
            return None
        return (
            f"generation {self.generation} is not a known deployment and no worker serves it: "
            "the events wait until one does; holdfast generations list has the known ones"
        )


def require_remembered(outcomes: Outcomes) -> None:
    """Refuse a replay of nothing but events that are older than the inbox."""
    if not outcomes.moved and set(outcomes.left) == {"too_old"}:
        raise Refused(
            f"{outcomes.left['too_old']} are older than the inbox, so their handlers may already have handled them",
            "inspect them first, then replay them with --force",
        )


def moved(
    action: str,
    outcomes: Outcomes,
    dry_run: bool,
    *,
    generation: int | None = None,
    unknown_generation: bool = False,
) -> Moved:
    """The result of an action on rows."""
    return Moved(action, outcomes.moved, outcomes.left, dry_run, generation, outcomes.purge_at, unknown_generation)
