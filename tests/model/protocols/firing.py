"""Firing a schedule: several workers that see the same slots, one row that says how far it is.

The clock counts slots: slot k is due when it shows k. What was due and is neither fired nor dropped by the policy is
lost; a pause drops what is due at that moment and what comes until it is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NOBODY = -1


class Worker(NamedTuple):
    at: str = "rests"  # rests, looked, fired (behind a pooler: not committed yet)
    current: bool = False  # the version that it has seen is still the row's
    owed_after: int = 0  # as the look said
    now: int = 0
    late: bool = False  # more than a minute after the slot, which `missed="skip"` asks for


class State(NamedTuple):
    clock: int
    highest: int  # the latest that the clock has ever shown
    owed_after: int
    next_slot: int | None
    paused: bool
    locked: int  # the worker whose fire is not committed yet
    fired: tuple[int, ...]  # how often, for each slot
    dropped: tuple[bool, ...]  # by a pause, or by the policy
    triggered: bool
    workers: tuple[Worker, ...]


_FUNCTIONS = "postgres/sql/functions/schedules.sql"


class Firing(Model[State]):
    """`turns` lets an operator trigger, pause and resume; `sets_back` lets the database's clock go back."""

    stands_for: ClassVar[dict[str, str]] = {
        "shows the next slot": "the database's clock",
        "is set back": "the database's clock",
        "looks": f"{_FUNCTIONS} core.schedules_watch",
        "has nothing to do": "worker/scheduler.py Scheduler.run_once",
        "fires": f"{_FUNCTIONS} core.schedule_fire",
        "fires, and does not commit yet": "postgres/schedules.py Schedules._fetch",
        "commits": "postgres/schedules.py Schedules._fetch",
        "is refused": f"{_FUNCTIONS} core.schedule_fire",
        "dies": "a fault",
        "is cut off": "the server: idle_in_transaction_session_timeout",
        "pauses": f"{_FUNCTIONS} core.schedule_change_state",
        "resumes": f"{_FUNCTIONS} core.schedule_change_state",
        "triggers": f"{_FUNCTIONS} core.schedule_trigger",
        "records the slot": "a mutation: the row is moved on in a transaction of its own",
    }

    def __init__(
        self,
        workers: int,
        slots: int,
        *,
        missed: str,
        pooled: bool = False,
        turns: bool = False,
        sets_back: bool = False,
        broken_by: str = "",
    ) -> None:
        self._workers = workers
        self._slots = slots
        self._missed = missed
        self._pooled = pooled
        self._turns = turns
        self._sets_back = sets_back
        self._broken_by = broken_by

    def initial(self) -> State:
        none, kept = (0,) * (self._slots + 1), (False,) * (self._slots + 1)
        return State(0, 0, 0, None, False, NOBODY, none, kept, False, (Worker(),) * self._workers)

    def same(self, state: State) -> Hashable:
        order = sorted(range(self._workers), key=lambda n: (state.workers[n], state.locked == n))
        locked = order.index(state.locked) if state.locked in order else NOBODY
        return (*state[:5], locked, *state[6:9], tuple(state.workers[n] for n in order))

    # --- what is asked of every state -----------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        for slot in range(1, self._slots + 1):
            if state.fired[slot] > 1:
                return f"slot {slot} is fired twice"
            if slot <= state.owed_after and not state.fired[slot] and not state.dropped[slot]:
                return f"slot {slot} is dealt with, and was never fired"
            if state.fired[slot] and slot > state.highest:
                return f"slot {slot} is fired before its time"
        return None

    def good(self, state: State) -> bool:
        return state.owed_after >= self._slots

    # --- the steps ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        if state.clock < self._slots:
            later = state._replace(clock=state.clock + 1, highest=max(state.highest, state.clock + 1))
            yield Step("clock", "shows the next slot", str(state.clock + 1)), later
        if self._sets_back and state.clock:
            yield Step("clock", "is set back"), state._replace(clock=state.clock - 1)
        if self._turns and state.locked == NOBODY:
            yield self._turn(state)
        if self._turns and not state.triggered:
            # An event beside the slots, with a key of its own: it touches nothing that the slots depend on.
            yield Step("operator", "triggers"), state._replace(triggered=True)
        for n, worker in enumerate(state.workers):
            actor = f"worker {n}"
            if worker.at == "rests":
                if not state.paused:
                    for late in (False, True) if self._missed == "skip" else (False,):
                        looked = Worker("looked", True, state.owed_after, state.clock, late)
                        yield Step(actor, "looks", "late" if late else ""), self._put(state, n, looked)
                continue
            undone = self._put(state, n, Worker())
            if worker.at == "fired":
                yield Step(actor, "commits"), self._committed(undone._replace(locked=NOBODY), worker)
                yield Step(actor, "is cut off"), undone._replace(locked=NOBODY)
                continue
            if worker.at == "published":  # only in the mutation
                yield Step(actor, "records the slot"), self._moved_on(undone, worker)
            else:
                yield from self._fire(state, n, worker)
            yield Step(actor, "dies"), undone

    def _fire(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        """Slots are worked out from the look; whether the fire is done is decided by the row as it is now."""
        actor = f"worker {n}"
        rests = self._put(state, n, Worker())
        until = max(worker.now, worker.owed_after)
        seen = worker.current or self._broken_by == "a fire does not check the version"
        if until <= worker.owed_after and state.next_slot is not None:
            yield Step(actor, "has nothing to do"), rests
        elif not seen or state.paused or state.locked != NOBODY or until > max(state.clock, state.owed_after):
            yield Step(actor, "is refused"), rests
        elif self._broken_by == "the slot is recorded after the event":
            published = self._published(state, worker)
            yield Step(actor, "fires"), self._put(published, n, worker._replace(at="published"))
        elif self._broken_by == "the slot is recorded before the event":
            yield Step(actor, "fires"), self._committed(rests, worker)
            yield Step(actor, "dies", "between"), self._moved_on(rests, worker)
        elif self._pooled:
            held = self._put(state._replace(locked=n), n, worker._replace(at="fired"))
            yield Step(actor, "fires, and does not commit yet"), held
        else:
            yield Step(actor, "fires", ", ".join(map(str, self._due(worker)[0]))), self._committed(rests, worker)

    def _due(self, worker: Worker) -> tuple[list[int], list[int]]:
        """`due` of holdfast/schedules.py: the slots that are fired, and those that the policy drops."""
        slots = list(range(worker.owed_after + 1, worker.now + 1))
        most = {"all": len(slots), "latest": 1, "skip": int(not worker.late)}[self._missed]
        first = max(len(slots) - most, 0)
        return slots[first:], slots[:first]

    def _committed(self, state: State, worker: Worker) -> State:
        return self._moved_on(self._published(state, worker), worker)

    def _published(self, state: State, worker: Worker) -> State:
        fire, _ = self._due(worker)
        fired = tuple(min(count + (slot in fire), 2) for slot, count in enumerate(state.fired))
        return state._replace(fired=fired)

    def _moved_on(self, state: State, worker: Worker) -> State:
        _, drop = self._due(worker)
        until = max(worker.now, worker.owed_after)
        dropped = tuple(gone or slot in drop for slot, gone in enumerate(state.dropped))
        after = state._replace(owed_after=until, next_slot=until + 1, dropped=dropped)
        return self._changed(after)

    def _turn(self, state: State) -> tuple[Step, State]:
        """A pause drops what is due; a resume begins now, also where the clock was set back meanwhile."""
        since = state.clock if state.paused else max(state.owed_after, state.clock)
        dropped = tuple(gone or state.owed_after < slot <= since for slot, gone in enumerate(state.dropped))
        after = state._replace(paused=not state.paused, next_slot=None, owed_after=since, dropped=dropped)
        return Step("operator", "resumes" if state.paused else "pauses"), self._changed(after)

    @staticmethod
    def _changed(state: State) -> State:
        """version + 1: whoever has seen an earlier one is refused."""
        workers = tuple(worker._replace(current=False) for worker in state.workers)
        return state._replace(workers=workers)

    @staticmethod
    def _put(state: State, n: int, worker: Worker) -> State:
        return state._replace(workers=replaced(state.workers, n, worker))
