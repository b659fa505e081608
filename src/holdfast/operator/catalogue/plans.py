"""Verbs for replay plans."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from holdfast.operator.catalogue.selecting import Chosen
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Limit, Whole
from holdfast.operator.operator import Operator
from holdfast.operator.plans import PlanChange, PlanReport
from holdfast.postgres.operations.plans import FailedAgain, Plan, PlanOutcomes

VERBS = Catalogue()

PlanNumber = Annotated[int, Field(ge=1, le=2**63 - 1)]


class Create(Chosen, Change):
    archived: bool = Field(False, description="Select in the archive; ids are found anyway.")
    generation: Whole | None = Field(None, description="Left out: at each step the newest that is served.")
    canary: Annotated[int, Field(ge=0, le=1_000)] = 10
    rate: Annotated[float, Field(ge=0.01, le=10_000, description="Events a second.")] = 50.0
    max_failure_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    patience: Annotated[float, Field(ge=1, le=604_800, description="Seconds to wait for outcomes.")] = 300.0
    force: bool = False


class ListPlans(Arguments):
    unfinished: bool = Field(False, description="Only plans that can still go on.")
    limit: Limit = 20


class Numbered(Arguments):
    plan: PlanNumber


class FailedIn(Numbered):
    after: Whole | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class OutcomesOf(Numbered):
    steps: Annotated[int, Field(ge=1, le=200, description="Into how many steps of time to count them.")] = 60


class Turn(Numbered, Change):
    pass


class Run(Numbered, Change):
    seconds: Annotated[float, Field(ge=0.1, le=25, description="How long to run it; call again to go on.")] = 10.0


@VERBS.reads("plans.list")
async def page(operator: Operator, given: ListPlans) -> list[Plan]:
    """Replay plans, the newest first."""
    return await operator.plans.page(finished=not given.unfinished, limit=given.limit)


@VERBS.reads("plans.show")
async def show(operator: Operator, given: Numbered) -> PlanReport:
    """One plan: its progress, and what it would do next."""
    return await operator.plans.detail(given.plan)


@VERBS.reads("plans.failed")
async def failed(operator: Operator, given: FailedIn) -> FailedAgain:
    """What failed again after a plan had replayed it, in the plan's order."""
    return await operator.plans.failed_again(given.plan, after=given.after, limit=given.limit)


@VERBS.reads("plans.outcomes")
async def outcomes(operator: Operator, given: OutcomesOf) -> list[PlanOutcomes]:
    """What became of what a plan has replayed, in steps of when it was replayed."""
    return await operator.plans.outcomes(given.plan, steps=given.steps)


@VERBS.changes("plans.create")
async def create(operator: Operator, given: Create) -> PlanReport:
    """Freeze the dead letters of a plan and say what it would do. Nothing is replayed until it is run."""
    selection = given.chosen()
    if selection is not None and given.archived:
        selection = selection.in_archive()
    return await operator.plans.create(
        selection,
        ids=given.ids,
        generation=given.generation,
        canary=given.canary,
        rate=given.rate,
        max_failure_ratio=given.max_failure_ratio,
        patience=given.patience,
        force=given.force,
        reason=given.reason,
        dry_run=given.dry_run,
    )


@VERBS.changes("plans.run")
async def run(operator: Operator, given: Run) -> PlanReport:
    """Run a plan for some seconds, or to its end. What is left goes on with the next run."""
    if given.dry_run:
        return await operator.plans.detail(given.plan)
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(given.seconds, stop.set)
    try:
        return await operator.plans.run(given.plan, reason=given.reason, stop=stop)
    finally:
        timer.cancel()


@VERBS.changes("plans.pause")
async def pause(operator: Operator, given: Turn) -> PlanChange:
    """Pause a plan, in whatever process it runs."""
    return await operator.plans.pause(given.plan, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("plans.resume")
async def resume(operator: Operator, given: Turn) -> PlanChange:
    """Resume a plan that was paused or has stopped. One that stopped begins with a canary again."""
    return await operator.plans.resume(given.plan, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("plans.cancel")
async def cancel(operator: Operator, given: Turn) -> PlanChange:
    """End a plan. What it has replayed stays replayed."""
    return await operator.plans.cancel(given.plan, reason=given.reason, dry_run=given.dry_run)
