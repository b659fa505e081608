"""Verbs for the installation as a whole: status, rates, doctor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Limit, Name
from holdfast.operator.installation import SchemaState
from holdfast.operator.operator import MOST_HOURS, MOST_MINUTES, Operator
from holdfast.operator.roles import Role
from holdfast.postgres.doctor import Part, Report
from holdfast.postgres.operations.rates import Balance, Flow, HandlerRates, Period, Signals
from holdfast.postgres.operations.status import Status
from holdfast.postgres.wakeup.mode import Mode

VERBS = Catalogue()

Minutes = Annotated[int, Field(ge=1, le=MOST_MINUTES)]


class Nothing(Arguments):
    """No arguments."""


class Rates(Arguments):
    minutes: Minutes = 5
    handler: Name | None = None
    limit: Limit = 50


class Series(Arguments):
    handler: Name
    hours: Annotated[int, Field(ge=1, le=MOST_HOURS)] = 1


class InSteps(Arguments):
    minutes: Minutes = 60
    step: Minutes = 1


class Failing(Arguments):
    limit: Limit = 50


class Examine(Arguments):
    only: Part | None = None


class SetMode(Change):
    mode: Literal["when_idle", "always", "never"]


@VERBS.reads("status")
async def status(operator: Operator, given: Nothing) -> Status:
    """What is pending, in flight, delayed and failed, by route, and the workers. Counts end at a limit."""
    return await operator.status()


@VERBS.reads("rates")
async def rates(operator: Operator, given: Rates) -> list[HandlerRates]:
    """What handlers did in the last minutes: those that did most, or one."""
    return await operator.rates(given.minutes, handler=given.handler, limit=given.limit)


@VERBS.reads("series")
async def series(operator: Operator, given: Series) -> list[Period]:
    """What one handler did in each minute, and before a day ago in each hour; the oldest first."""
    return await operator.series(given.handler, given.hours)


@VERBS.reads("flow")
async def flow(operator: Operator, given: InSteps) -> list[Flow]:
    """What all handlers did in each step of some minutes, up to a day; the oldest first."""
    return await operator.flow(given.minutes, step=given.step)


@VERBS.reads("failing")
async def failing(operator: Operator, given: Failing) -> dict[str, dict[str, int]]:
    """How many deliveries have failed in each hour of a day, for the handlers that failed most."""
    found = await operator.failing(limit=given.limit)
    return {name: {start.isoformat(): count for start, count in hours.items()} for name, hours in found.items()}


@VERBS.reads("signals")
async def signals(operator: Operator, given: Nothing) -> Signals:
    """How large the outbox is, how many deliveries failed within a week, and how slow a week was."""
    return await operator.signals()


@VERBS.reads("balance")
async def balance(operator: Operator, given: Nothing) -> Balance:
    """The sums of all counts that are kept: what was begun, how it was closed, and what is open."""
    return await operator.balance()


@VERBS.reads("metrics")
async def metrics(operator: Operator, given: Nothing) -> str:
    """The state of the outbox in the text format of Prometheus."""
    return await operator.metrics()


@VERBS.reads("doctor")
async def doctor(operator: Operator, given: Examine) -> Report:
    """Compare the schema with this release, and look for what is in the way of delivery."""
    return await operator.doctor(given.only)


@VERBS.reads("migrations")
async def migrations(operator: Operator, given: Nothing) -> SchemaState:
    """The migrations that are applied and pending."""
    return await operator.migrations()


@VERBS.reads("notify.show")
async def wakeup_mode(operator: Operator, given: Nothing) -> str:
    """The wake-up mode: when a commit that published events notifies the workers."""
    return await operator.wakeup.mode()


@VERBS.changes("notify.set", Role.ADMIN)
async def set_wakeup_mode(operator: Operator, given: SetMode) -> dict[str, str]:
    """Set the wake-up mode for all producers of the schema; the mode before and after."""
    mode: Mode = given.mode
    if given.dry_run:
        return {"before": await operator.wakeup.mode(), "after": mode}
    return {"before": await operator.wakeup.set_mode(mode, reason=given.reason), "after": mode}
