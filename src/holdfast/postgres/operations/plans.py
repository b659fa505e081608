"""Replay plans: their rows, their progress, and the lease of the process that runs one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import asyncpg

from holdfast.postgres.operations.connection import Statements

MOST_PREVIEWED = 100_000
ERROR_LENGTH = 500

PlanVerb = Literal["pause", "resume", "cancel"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay plan and its progress. `total` is the sum of the five counts at the end."""

    id: int
    created_at: datetime
    created_by: str
    reason: str | None
    selection: dict[str, Any]
    generation: int | None  # None: at each step the newest that a living worker serves
    canary: int
    rate: float  # events a second
    max_failure_ratio: float
    patience: timedelta  # how long to wait for outcomes
    force: bool  # it also replays events that the inbox may have forgotten
    state: str  # open, paused, stopped, cancelled, done
    state_reason: str | None
    finished_at: datetime | None
    canary_passed: bool
    runner: str | None  # the process that runs it, or ran it last
    run_by: str | None
    running: bool
    total: int
    pending: int  # not yet replayed
    replayed: int  # replayed, without an outcome yet
    delivered: int
    failed: int  # again
    skipped: int  # no longer failed when their turn came

    @property
    def moved(self) -> int:
        return self.replayed + self.delivered + self.failed


@dataclass(frozen=True, slots=True)
class PreviewLine:
    """Rows of a plan with one handler, cause and generation."""

    handler_name: str
    signature: str
    generation: int | None
    count: int
    not_failed: int  # replayed, delivered or discarded meanwhile: the plan will skip them
    handled: int  # the handler has handled the event already and will skip it


@dataclass(frozen=True, slots=True)
class Preview:
    """What a plan would do now with its pending rows."""

    lines: list[PreviewLine]
    skipped: dict[str, int]  # rows that it has skipped, by their state

    @property
    def count(self) -> int:
        return sum(line.count for line in self.lines)

    @property
    def handled(self) -> int:
        return sum(line.handled for line in self.lines)

    @property
    def not_failed(self) -> int:
        return sum(line.not_failed for line in self.lines)


@dataclass(frozen=True, slots=True)
class FailedAgainRow:
    """A row that failed after a plan had replayed it, as it is now."""

    position: int  # in the plan
    id: UUID
    replayed_at: datetime
    event_id: UUID | None  # None, like what follows: retention has taken it
    event_type: str | None
    handler_name: str | None
    state: str | None
    error_signature: str | None
    last_error: str | None  # the first 500 characters, like the one before
    previous_error: str | None  # why it had failed before the replay
    failed_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedAgain:
    """A page of what failed again in a plan; `next` is where the next one begins. None: there are no more."""

    plan: int
    rows: list[FailedAgainRow]
    next: int | None = None


@dataclass(frozen=True, slots=True)
class PlanOutcomes:
    """What became of the rows that a plan has replayed in one step of time."""

    start: datetime
    step: timedelta
    delivered: int
    failed: int
    waiting: int  # their outcome is not known yet


@dataclass(frozen=True, slots=True)
class PlanState:
    """The state of a plan before and after a change."""

    before: str
    after: str
    running: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a request for a plan's lease: `taken`, `held`, or the state of a plan that is not open."""

    answer: str
    state_reason: str | None
    runner: str | None
    held_until: datetime | None
    held_for: float | None  # seconds


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan. The state `lost` means that another process has the lease."""

    state: str
    phase: str
    moved: int


async def create(
    statements: Statements,
    *,
    ids: list[UUID] | None,
    selection: str | None,
    most: int,
    generation: int | None,
    canary: int,
    rate: float,
    max_failure_ratio: float,
    patience: timedelta,
    force: bool,
    actor: str,
    reason: str | None,
) -> tuple[int, int]:
    """Freeze the rows of a plan; its id, and how many rows it has."""
    row = await statements.row(
        "plan_create",
        ids=ids,
        filter=selection,
        most=most,
        generation=generation,
        canary=canary,
        rate=rate,
        max_failure_ratio=max_failure_ratio,
        patience=patience,
        force=force,
        actor=actor,
        reason=reason,
    )
    return row["id"], row["total"]


async def page(statements: Statements, *, finished: bool, limit: int) -> list[Plan]:
    """Plans, the newest first."""
    return [_plan(row) for row in await statements.fetch("list_plans", id=None, finished=finished, most=limit)]


async def read(statements: Statements, plan: int) -> Plan | None:
    """One plan."""
    rows = await statements.fetch("list_plans", id=plan, finished=True, most=1)
    return _plan(rows[0]) if rows else None


async def preview(statements: Statements, plan: int) -> Preview:
    """What a plan would do now."""
    lines = await statements.fetch("preview_plan", plan=plan, most=MOST_PREVIEWED)
    skipped = await statements.fetch("list_skipped", plan=plan)
    return Preview([PreviewLine(**line) for line in lines], {row["why"]: row["count"] for row in skipped})


async def failed_again(statements: Statements, plan: int, *, after: int, limit: int) -> FailedAgain:
    """Rows that failed after the plan had replayed them, in its order."""
    values = {"plan": plan, "after": after, "most": limit, "error_length": ERROR_LENGTH}
    rows = [FailedAgainRow(**row) for row in await statements.fetch("list_failed_again", **values)]
    return FailedAgain(plan, rows, rows[-1].position if len(rows) == limit else None)


async def outcomes(statements: Statements, plan: int, *, steps: int) -> list[PlanOutcomes]:
    """What became of what the plan has replayed, by when it was replayed."""
    return [PlanOutcomes(**row) for row in await statements.fetch("count_plan_outcomes", plan=plan, steps=steps)]


async def change_state(
    statements: Statements, plan: int, verb: PlanVerb, *, actor: str, reason: str | None
) -> PlanState | None:
    """Pause, resume or cancel a plan; None when there is no such plan."""
    rows = await statements.fetch("plan_change_state", plan=plan, verb=verb, actor=actor, reason=reason)
    return PlanState(rows[0]["before"], rows[0]["after"], rows[0]["running"]) if rows else None


async def take(
    statements: Statements,
    plan: int,
    token: UUID,
    *,
    runner: str,
    lease: timedelta,
    actor: str,
    reason: str | None,
) -> Lease | None:
    """Take a plan's lease; None when there is no such plan."""
    values = {"plan": plan, "token": token, "runner": runner, "actor": actor, "lease": lease}
    rows = await statements.fetch("plan_take", **values, reason=reason)
    return Lease(**{name: rows[0][name] for name in Lease.__dataclass_fields__}) if rows else None


async def step(statements: Statements, plan: int, token: UUID, *, most: int, lease: timedelta) -> PlanStep:
    """Replay the next rows of a plan, and extend its lease."""
    row = await statements.row("plan_step", plan=plan, token=token, most=most, lease=lease)
    return PlanStep(row["state"], row["phase"], row["moved"])


async def release(statements: Statements, plan: int, token: UUID) -> None:
    """Give the lease back."""
    await statements.fetch("plan_release", plan=plan, token=token)


def _plan(row: asyncpg.Record) -> Plan:
    return Plan(**(dict(row) | {"selection": json.loads(row["selection"])}))
