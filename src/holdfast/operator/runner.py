"""Running a plan: one step after the other, at its rate, until there is nothing left to do.

The runner holds the plan's lease and every step extends it. All that it knows is in the database: it may be killed at
any moment, and the next one goes on where the last step ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments, plans
from holdfast.operator.plans import Plan, PlanReport
from holdfast.operator.session import Operator, Refused

LEASE = timedelta(seconds=10)
INTERVAL = 0.25  # between steps
MOST_IN_STEP = 2_500


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a plan is, after a step of it."""

    plan: Plan
    phase: str  # canary, ramp, waiting, over
    moved: int  # by this step


class Pace:
    """How many rows are due at a rate. What was not moved in time is made up for within a second, or never."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._due = 0.0
        self._seen = clock()

    def due(self) -> int:
        now = self._clock()
        self._due = min(self._due + (now - self._seen) * self._rate, max(1.0, self._rate))
        self._seen = now
        return min(int(self._due), MOST_IN_STEP)

    def took(self, moved: int) -> None:
        self._due -= moved

    def rest(self) -> None:
        """Nothing could be moved: time that was spent waiting is not made up for."""
        self._due = 0.0
        self._seen = self._clock()


async def run(
    operator: Operator,
    plan: int,
    *,
    reason: str | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> PlanReport:
    """Run a plan until it is done, stopped or cancelled, or until `stop` is set, when the next runner may go on.

    A runner that died is waited for until its lease ends; one that lives is not disturbed.
    """
    arguments.whole("plan", plan, 1)
    stop = stop or asyncio.Event()
    token = uuid4()
    await _take(operator, plan, token, arguments.reason(reason), stop)
    try:
        pace = Pace((await plans.report(operator, plan)).plan.rate)
        while not stop.is_set():
            async with operator.changing("plan.step"):
                values = {"plan": plan, "token": token, "most": pace.due(), "lease": LEASE}
                (step,) = await operator.fetch("step_plan", **values)
            if step["state"] == "lost":
                raise Refused(f"plan {plan} is run by somebody else now", f"holdfast plans show {plan} says by whom")
            if step["phase"] in ("canary", "ramp"):
                pace.took(step["moved"])
            else:
                pace.rest()
            on_progress(Progress(await plans.read(operator, plan), step["phase"], step["moved"]))
            if step["phase"] == "over":
                break
            await _rest(stop, INTERVAL)
    finally:
        if not operator.connection.is_closed():
            async with operator.changing("plan.release"):
                await operator.fetch("release_plan", plan=plan, token=token)
    return await plans.report(operator, plan)


async def _take(operator: Operator, plan: int, token: object, reason: str | None, stop: asyncio.Event) -> None:
    me = f"{socket.gethostname()}:{os.getpid()}"
    held_until: datetime | None = None
    while not stop.is_set():
        async with operator.changing("plan.run", plan=plan, reason=reason):
            values = {"plan": plan, "token": token, "runner": me, "actor": operator.actor, "lease": LEASE}
            rows = await operator.fetch("take_plan", **values, reason=reason)
            if not rows:
                raise ConfigurationError("plan", f"{plan} is unknown", "holdfast plans list has them")
            (found,) = rows
            if found["answer"] == "taken":
                return
            if found["answer"] != "held":
                raise _not_open(plan, found["answer"], found["state_reason"])
            if held_until is not None and found["held_until"] > held_until:
                raise Refused(f"plan {plan} is run by {found['runner']}", f"watch it: holdfast plans show {plan}")
        held_until = found["held_until"]
        # Whoever holds it extends the lease several times before it ends, if it lives.
        await _rest(stop, min(found["held_for"] + 0.05, 1.0))


def _not_open(plan: int, state: str, why: str | None) -> Refused:
    remedy = (
        f"holdfast plans resume {plan}" if state in ("paused", "stopped") else "make another: holdfast plans create"
    )
    return Refused(f"plan {plan} is {state}" + (f": {why}" if why else ""), remedy)


async def _rest(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
