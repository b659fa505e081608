"""Verbs for replay plans: replays of many events, a canary first, then the rest at a rate, with a failure limit.

The rows of a plan are frozen when it is made. `holdfast.operator.plan_runner` runs it, in any process; any other
process may pause, resume or cancel it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments, plan_runner
from holdfast.operator.failed import FailedEvents, no_match
from holdfast.operator.plan_runner import Progress
from holdfast.operator.selection import Selection
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import plans
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.plans import FailedAgain, Plan, PlanOutcomes, PlanVerb, Preview

MOST_ROWS = 100_000
MOST_PLANS = 200
MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with what it would still do and what it left out."""

    plan: Plan
    preview: Preview
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class PlanChange:
    """The state of a plan before and after a change. A resumed plan goes on by itself only while it is run."""

    id: int
    before: str
    after: str
    running: bool
    dry_run: bool = False


class ReplayPlans:
    """Replay plans, as `operator.plans`."""

    def __init__(self, session: Session, failed: FailedEvents) -> None:
        self._session = session
        self._failed = failed

    async def create(
        self,
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
            raise ConfigurationError("selection", "and ids exclude each other", "give exactly one of them")
        rows = None if ids is None else await self._failed.resolve(ids)
        wanted = None if selection is None else selection.required()
        named: dict[str, Any] = {"reason": reason, "selection": wanted}
        async with self._session.changing("plan.create", dry_run=dry_run, **named) as statements:
            plan, total = await plans.create(
                statements,
                ids=rows,
                selection=None if wanted is None else wanted.as_json(),
                most=MOST_ROWS + 1,
                generation=None if generation is None else arguments.whole("generation", generation),
                canary=canary,
                rate=float(rate),
                max_failure_ratio=float(max_failure_ratio),
                patience=timedelta(seconds=patience),
                force=force,
                actor=self._session.actor,
                reason=reason,
            )
            if not total:
                raise await no_match(statements, wanted or Selection())
            if total > MOST_ROWS:
                raise ConfigurationError(
                    "selection",
                    f"matches more than {MOST_ROWS:,} events",
                    "make several plans: --handler, --since, --until",
                )
            made = await plans.read(statements, plan)
            if made is None:
                raise plan_runner.unknown(plan)
            return PlanReport(made, await plans.preview(statements, plan), dry_run)

    async def page(self, *, finished: bool = True, limit: int = 20) -> list[Plan]:
        """Plans, the newest first."""
        arguments.whole("limit", limit, 1, MOST_PLANS)
        async with self._session.reading() as statements:
            return await plans.page(statements, finished=finished, limit=limit)

    async def read(self, plan: int) -> Plan:
        """One plan, without a preview."""
        async with self._session.reading() as statements:
            return await _read(statements, plan)

    async def detail(self, plan: int) -> PlanReport:
        """One plan: its progress, and what it would do next."""
        async with self._session.reading() as statements:
            return PlanReport(await _read(statements, plan), await plans.preview(statements, plan))

    async def failed_again(self, plan: int, *, after: int | None = None, limit: int = 50) -> FailedAgain:
        """What failed after a plan had replayed it, in the plan's order; `after` is the `next` of the page before."""
        arguments.page("limit", limit)
        position = -1 if after is None else arguments.whole("after", after)
        async with self._session.reading() as statements:
            await _read(statements, plan)
            return await plans.failed_again(statements, plan, after=position, limit=limit)

    async def outcomes(self, plan: int, *, steps: int = 60) -> list[PlanOutcomes]:
        """What became of what a plan has replayed, in steps of when it was replayed, the first of them first."""
        arguments.whole("steps", steps, 1, MOST_STEPS)
        async with self._session.reading() as statements:
            await _read(statements, plan)
            return await plans.outcomes(statements, plan, steps=steps)

    async def run(
        self,
        plan: int,
        *,
        reason: str | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        stop: asyncio.Event | None = None,
    ) -> PlanReport:
        """Run a plan until it is done, stopped or cancelled, or until `stop` is set; another run may then go on.

        The lease of a runner that died is waited for; a plan whose runner lives is refused.
        """
        arguments.whole("plan", plan, 1)
        arguments.reason(reason)
        await plan_runner.run(self._session, plan, reason=reason, on_progress=on_progress, stop=stop or asyncio.Event())
        return await self.detail(plan)

    async def pause(self, plan: int, *, reason: str | None = None, dry_run: bool = False) -> PlanChange:
        """Pause a plan, in whatever process it runs."""
        return await self._change(plan, "pause", reason, dry_run)

    async def resume(self, plan: int, *, reason: str | None = None, dry_run: bool = False) -> PlanChange:
        """Resume a plan that was paused or has stopped. One that stopped begins with a canary again."""
        return await self._change(plan, "resume", reason, dry_run)

    async def cancel(self, plan: int, *, reason: str | None = None, dry_run: bool = False) -> PlanChange:
        """End a plan. What it has replayed stays replayed."""
        return await self._change(plan, "cancel", reason, dry_run)

    async def _change(self, plan: int, verb: PlanVerb, reason: str | None, dry_run: bool) -> PlanChange:
        arguments.whole("plan", plan, 1)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "plan": plan}
        async with self._session.changing(f"plan.{verb}", dry_run=dry_run, **asked) as statements:
            found = await plans.change_state(statements, plan, verb, actor=self._session.actor, reason=reason)
            if found is None:
                raise plan_runner.unknown(plan)
            if found.before == found.after:
                raise Refused(
                    f"plan {plan} is {found.before}", f"there is nothing to {verb}; holdfast plans show {plan}"
                )
        return PlanChange(plan, found.before, found.after, found.running, dry_run)


async def _read(statements: Statements, plan: int) -> Plan:
    arguments.whole("plan", plan, 1)
    found = await plans.read(statements, plan)
    if found is None:
        raise plan_runner.unknown(plan)
    return found
