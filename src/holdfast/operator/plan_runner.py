"""Running a replay plan: one step after the other, at its rate, until nothing is left to do.

The runner holds the plan's lease and every step extends it. All its state is in the database: it may be killed at any
moment, and the next runner goes on after the last step.
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
from uuid import UUID, uuid4

from holdfast.errors import NotFound
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import plans
from holdfast.postgres.operations.plans import Plan

LEASE = timedelta(seconds=10)
INTERVAL = 0.25  # between steps
MOST_IN_STEP = 2_500


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a plan after a step."""

    plan: Plan
    phase: str  # canary, ramp, waiting, over
    moved: int  # by this step


class ReplayRate:
    """How many rows are due at a rate. A delay is made up for within a second, or not at all."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._due = 0.0
        self._seen = clock()

    def due(self) -> int:
        """The number of rows that may be moved now."""
        now = self._clock()
        self._due = min(self._due + (now - self._seen) * self._rate, max(1.0, self._rate))
        self._seen = now
        return min(int(self._due), MOST_IN_STEP)

    def took(self, moved: int) -> None:
        """Subtract rows that were moved."""
        self._due -= moved

    def rest(self) -> None:
        """Start again from zero: time that was spent waiting is not made up for."""
        self._due = 0.0
        self._seen = self._clock()


async def run(
    session: Session, plan: int, *, reason: str | None, on_progress: Callable[[Progress], None], stop: asyncio.Event
) -> None:
    """Run a plan until it is done, stopped or cancelled, or until `stop` is set."""
    token = uuid4()
    await _take(session, plan, token, reason, stop)
    try:
        rate = ReplayRate((await _read(session, plan)).rate)
        while not stop.is_set():
            async with session.changing("plan.step") as statements:
                step = await plans.step(statements, plan, token, most=rate.due(), lease=LEASE)
            if step.state == "lost":
                raise Refused(f"plan {plan} is run by another process now", f"holdfast plans show {plan} names it")
            if step.phase in ("canary", "ramp"):
                rate.took(step.moved)
            else:
                rate.rest()
            on_progress(Progress(await _read(session, plan), step.phase, step.moved))
            if step.phase == "over":
                break
            await _rest(stop, INTERVAL)
    finally:
        if not session.connection.lost:
            async with session.changing("plan.release") as statements:
                await plans.release(statements, plan, token)


def unknown(plan: int) -> NotFound:
    """The error for a plan that does not exist."""
    return NotFound("plan", f"{plan} is unknown", "holdfast plans list")


async def _read(session: Session, plan: int) -> Plan:
    async with session.reading() as statements:
        found = await plans.read(statements, plan)
    if found is None:
        raise unknown(plan)
    return found


async def _take(session: Session, plan: int, token: UUID, reason: str | None, stop: asyncio.Event) -> None:
    me = f"{socket.gethostname()}:{os.getpid()}"
    held_until: datetime | None = None
    while not stop.is_set():
        async with session.changing("plan.run", plan=plan, reason=reason) as statements:
            lease = await plans.take(
                statements, plan, token, runner=me, lease=LEASE, actor=session.actor, reason=reason
            )
            if lease is None:
                raise unknown(plan)
            if lease.answer == "taken":
                return
            if lease.answer != "held" or lease.held_until is None:
                raise _not_open(plan, lease.answer, lease.state_reason)
            if held_until is not None and lease.held_until > held_until:
                raise Refused(f"plan {plan} is run by {lease.runner}", f"watch it: holdfast plans show {plan}")
        held_until = lease.held_until
        # A living runner extends the lease several times before it expires.
        await _rest(stop, min((lease.held_for or 0.0) + 0.05, 1.0))


def _not_open(plan: int, state: str, why: str | None) -> Refused:
    remedy = (
        f"holdfast plans resume {plan}" if state in ("paused", "stopped") else "create a new one: holdfast plans create"
    )
    return Refused(f"plan {plan} is {state}" + (f": {why}" if why else ""), remedy)


async def _rest(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
