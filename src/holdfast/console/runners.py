"""Runs replay plans that were started in the console, each with a connection of its own.

A plan's state is in the database: when this process ends, the plan stands still, its page says so, and any console or
terminal may go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.operator import DATABASE_ERRORS, Operator, Refused

MOST_AT_ONCE: Final = 8
_PATIENCE: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # seconds between attempts to reach the database again
_ENDING: Final = 5.0  # seconds that a runner has to give its lease back
_MOST_KEPT: Final = 200


@dataclass(slots=True)
class _Run:
    actor: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class PlanRunners:
    """The plans that this process runs."""

    def __init__(self, connect: Callable[[str], Operator]) -> None:
        self._connect = connect
        self._runs: dict[int, _Run] = {}
        self._ended: dict[int, str] = {}
        self._closed = False

    def runs(self, plan: int) -> bool:
        """Whether this process runs a plan."""
        return plan in self._runs

    def ended(self, plan: int) -> str | None:
        """Return why the last run of a plan in this process ended, if that was an error."""
        return self._ended.get(plan)

    def start(self, plan: int, actor: str, reason: str | None) -> None:
        """Run a plan on behalf of somebody, until it is done, stopped or cancelled."""
        if plan in self._runs:
            return
        if self._closed or len(self._runs) >= MOST_AT_ONCE:
            raise Refused(
                f"this console runs {len(self._runs)} plans already",
                f"wait for one of them, or run it in a terminal: holdfast plans run {plan}",
            )
        run = _Run(actor)
        self._ended.pop(plan, None)
        self._runs[plan] = run
        run.task = asyncio.create_task(self._run(plan, run, reason))

    async def close(self) -> None:
        """End the runs, so that each gives its lease back. The plans stay as they are."""
        self._closed = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for run in self._runs.values():
            run.stop.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_ENDING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, plan: int, run: _Run, reason: str | None) -> None:
        waits = iter(_PATIENCE)
        try:
            while not run.stop.is_set():
                try:
                    async with self._connect(run.actor) as operator:
                        await operator.plans.run(plan, reason=reason, stop=run.stop)
                    return
                except DATABASE_ERRORS as error:
                    wait = next(waits, None)
                    if wait is None:
                        self._note(plan, f"the database does not answer: {type(error).__name__}")
                        return
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(run.stop.wait(), wait)
        except HoldfastError as error:
            problem = getattr(error, "problem", None)
            self._note(plan, problem if isinstance(problem, str) else str(error))
        finally:
            del self._runs[plan]

    def _note(self, plan: int, why: str) -> None:
        if len(self._ended) >= _MOST_KEPT:
            self._ended.pop(next(iter(self._ended)))
        self._ended[plan] = why
