"""Plans: replays of many rows. First a canary, then the rest at a rate, stopped when too many fail again (DLQ-4).

A plan's rows are frozen when it is made. It is run by `holdfast.operator.runner`, in any process, and turned from any
other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments, failures
from holdfast.operator.selection import Selection
from holdfast.operator.session import Operator, Refused

MOST_ROWS = 100_000
MOST_PLANS = 200
MOST_PREVIEWED = 100_000

Verb = Literal["pause", "resume", "cancel"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan and how far it is. `total` is the sum of the five counts at the end."""

    id: int
    created_at: datetime
    created_by: str
    reason: str | None
    selection: dict[str, Any]
    generation: int | None  # None: at each step the newest that a living worker serves
    canary: int
    rate: float  # events a second
    max_failure_ratio: float
    patience: timedelta  # how long outcomes are waited for
    force: bool  # it also replays what the inbox may have forgotten
    state: str  # open, paused, stopped, cancelled, done
    state_reason: str | None
    finished_at: datetime | None
    canary_passed: bool
    runner: str | None  # who runs it, or ran it last
    run_by: str | None
    running: bool
    total: int
    pending: int  # not yet their turn
    replayed: int  # moved, without an outcome yet
    delivered: int
    failed: int  # again
    skipped: int  # not there to be replayed any more

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
    """What a plan would do now with the rows whose turn is to come."""

    lines: list[PreviewLine]
    skipped: dict[str, int]  # rows that it has skipped, by what they were

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
class PlanReport:
    """A plan with what it would still do and what it left out."""

    plan: Plan
    preview: Preview
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Turned:
    """What a plan was and is. A plan that is resumed goes on by itself only while a runner is there."""

    id: int
    before: str
    after: str
    running: bool
    dry_run: bool = False


async def create(
    operator: Operator,
    selection: Selection | None = None,
    *,
    ids: Iterable[UUID | str] | None = None,
    generation: int | None = None,
    canary: int = 10,
    rate: float = 50.0,
    max_failure_ratio: float = 0.1,
    patience: float = 300.0,
    force: bool = False,
    reason: str | None = None,
    dry_run: bool = False,
) -> PlanReport:
    """Freeze the rows of a plan and say what it would do. Nothing is replayed yet."""
    arguments.whole("canary", canary, 0, 1_000)
    arguments.number("rate", rate, 0.01, 10_000)
    arguments.number("max_failure_ratio", max_failure_ratio, 0, 1)
    arguments.number("patience", patience, 1, 7 * 86_400)
    arguments.reason(reason)
    if (selection is None) == (ids is None):
        raise ConfigurationError("selection", "and ids are two ways to say the same", "give one of the two")
    rows = None if ids is None else await failures.resolve(operator, ids)
    wanted = None if selection is None else selection.required()
    async with operator.changing("plan.create", dry_run=dry_run, reason=reason, selection=str(wanted or "ids")):
        (made,) = await operator.fetch(
            "create_plan",
            ids=rows,
            filter=None if wanted is None else wanted.as_json(),
            most=MOST_ROWS + 1,
            generation=None if generation is None else arguments.whole("generation", generation),
            canary=canary,
            rate=float(rate),
            max_failure_ratio=float(max_failure_ratio),
            patience=timedelta(seconds=patience),
            force=force,
            actor=operator.actor,
            reason=reason,
        )
        if not made["total"]:
            raise ConfigurationError(
                "selection", f"matches no failed event: {wanted}", "holdfast failed groups shows what there is"
            )
        if made["total"] > MOST_ROWS:
            raise ConfigurationError(
                "selection",
                f"matches more than {MOST_ROWS:,} events",
                "make several plans: --handler, --since, --until",
            )
        plan = await _read(operator, made["id"])
        preview = await _preview(operator, made["id"])
    return PlanReport(plan, preview, dry_run)


async def listing(operator: Operator, *, finished: bool = True, limit: int = 20) -> list[Plan]:
    """The plans, the newest first."""
    arguments.whole("limit", limit, 1, MOST_PLANS)
    async with operator.reading():
        rows = await operator.fetch("list_plans", id=None, finished=finished, most=limit)
    return [_plan(row) for row in rows]


async def report(operator: Operator, plan: int) -> PlanReport:
    """One plan: how far it is, and what it would do next."""
    async with operator.reading():
        return PlanReport(await _read(operator, plan), await _preview(operator, plan))


async def turn(
    operator: Operator, plan: int, verb: Verb, *, reason: str | None = None, dry_run: bool = False
) -> Turned:
    """Pause, resume or cancel a plan, whoever runs it. What it has replayed stays replayed."""
    arguments.whole("plan", plan, 1)
    asked = {"reason": arguments.reason(reason), "plan": plan}
    async with operator.changing(f"plan.{verb}", dry_run=dry_run, **asked):
        rows = await operator.fetch("change_plan_state", plan=plan, verb=verb, actor=operator.actor, reason=reason)
        if not rows:
            raise _unknown(plan)
        (found,) = rows
        if found["before"] == found["after"]:
            raise Refused(
                f"plan {plan} is {found['before']}", f"there is nothing to {verb}; holdfast plans show {plan}"
            )
    return Turned(plan, found["before"], found["after"], found["running"], dry_run)


async def read(operator: Operator, plan: int) -> Plan:
    """One plan."""
    async with operator.reading():
        return await _read(operator, plan)


async def _read(operator: Operator, plan: int) -> Plan:
    arguments.whole("plan", plan, 1)
    rows = await operator.fetch("list_plans", id=plan, finished=True, most=1)
    if not rows:
        raise _unknown(plan)
    return _plan(rows[0])


async def _preview(operator: Operator, plan: int) -> Preview:
    lines = await operator.fetch("preview_plan", plan=plan, most=MOST_PREVIEWED)
    skipped = await operator.fetch("list_skipped", plan=plan)
    return Preview([PreviewLine(**line) for line in lines], {row["why"]: row["count"] for row in skipped})


def _plan(row: asyncpg.Record) -> Plan:
    return Plan(**(dict(row) | {"selection": json.loads(row["selection"])}))


def _unknown(plan: int) -> ConfigurationError:
    return ConfigurationError("plan", f"{plan} is unknown", "holdfast plans list has them")
