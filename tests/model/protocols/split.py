"""Routing and the split: who is owed an event is decided once, whoever subscribes, splits or dies meanwhile.

All events are of one type. The number of core.subscriptions_version only ever grows, so what a worker knows is either
of the present number or stale for good: `current` stands for the comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NOBODY = -1
Handlers = frozenset[str]


class Event(NamedTuple):
    # unpublished; open: in the lane of its type; held: claimed for its only handler; then for good: own (settled for
    # that handler, or in its own lane), split
    at: str = "unpublished"
    token: int = NOBODY  # the worker that has claimed it
    handler: str = ""  # whom it was claimed for
    live: bool = False
    locked: int = NOBODY  # the worker whose split is not committed yet
    taken_up: bool = False  # claimed or split once
    owed: Handlers = frozenset()  # who was subscribed when it was first taken up, and has not been retired since
    siblings: tuple[str, ...] = ()


class Worker(NamedTuple):
    knows: Handlers | None = None  # the subscriptions that its lanes were made from
    current: bool = False  # and they are still the same
    at: str = ""  # checked: the first statement of outbox_split is done; splitting: the second, and not the commit
    splits: Handlers = frozenset()  # the subscribers in the snapshot of its split


class State(NamedTuple):
    subscribed: Handlers
    events: tuple[Event, ...]
    workers: tuple[Worker, ...]


_CLAIM, _SETTLE = "postgres/sql/functions/claim.sql", "postgres/sql/functions/settle.sql"
_SUBSCRIPTIONS = "postgres/sql/functions/subscriptions.sql"


class Split(Model[State]):
    """`serves` are the handlers of each worker; `visitors` come and go."""

    stands_for: ClassVar[dict[str, str]] = {
        "subscribes": f"{_SUBSCRIPTIONS} core.subscribe",
        "is retired": f"{_SUBSCRIPTIONS} core.retire",
        "is committed": "postgres/sql/publish.sql INSERT",
        "reads the subscriptions": f"{_SUBSCRIPTIONS} core.subscriptions_read",
        "finds them changed": "worker/claimer.py SubscriptionsChanged",
        "checks the number": f"{_CLAIM} core.outbox_split",
        "claims": f"{_CLAIM} core.outbox_claim",
        "splits": f"{_CLAIM} core.outbox_split",
        "commits the split": f"{_CLAIM} core.outbox_split",
        "settles the origin": f"{_CLAIM} core.outbox_split",
        "delivers": f"{_SETTLE} core.outbox_deliver",
        "retries": f"{_SETTLE} core.outbox_retry",
        "releases": f"{_SETTLE} core.outbox_release",
        "dies": "a fault",
        "ends the lease": "the database's clock",
    }

    def __init__(self, serves: tuple[Handlers, ...], events: int, *, visitors: Handlers, broken_by: str = "") -> None:
        self._serves = serves
        self._events = events
        self._visitors = visitors
        self._residents = frozenset[str]().union(*serves) - visitors
        self._broken_by = broken_by

    def initial(self) -> State:
        return State(self._residents, (Event(),) * self._events, (Worker(),) * len(self._serves))

    def same(self, state: State) -> Hashable:
        events = sorted(map(self._outline, state.events))
        if self._broken_by:
            return state.subscribed, tuple(events), state.workers
        # What a worker knew does not matter once it is stale, or has the first half of a split behind it.
        workers = tuple(
            Worker(worker.knows if worker.current and not worker.at else None, worker.current, worker.at, worker.splits)
            for worker in state.workers
        )
        return state.subscribed, tuple(events), workers

    @staticmethod
    def _outline(event: Event) -> tuple[Hashable, ...]:
        """Events are alike but for this; one that is settled for good has been looked at and changes no more."""
        if event.at in ("own", "split"):
            return (event.at,)
        return (*event[:6], tuple(sorted(event.owed)), event.siblings)

    # --- what is asked of every state -----------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        for number, event in enumerate(state.events):
            got = [*event.siblings, *([event.handler] if event.at == "own" else [])]
            if len(got) != len(set(got)):
                return f"a handler has event {number} twice"
            if event.at in ("own", "split"):
                if not got:
                    return f"event {number} is settled, and nobody has it"
                if left := event.owed - set(got):
                    return f"event {number} was owed to {', '.join(sorted(left))}, and is settled without"
        return None

    def good(self, state: State) -> bool:
        return all(event.at in ("unpublished", "own", "split") for event in state.events)

    # --- the steps ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for handler in sorted(self._visitors):
            yield self._come_or_go(state, handler)
        for number, event in enumerate(state.events):
            name = f"event {number}"
            if event.at == "unpublished":
                yield Step(name, "is committed"), self._write(state, number, event._replace(at="open"))
            elif event.at == "held":
                if event.live:
                    yield Step("clock", "ends the lease", name), self._write(state, number, event._replace(live=False))
                yield from self._holder(state, number, event)
        for n, worker in enumerate(state.workers):
            yield from self._worker(state, n, worker)

    def _come_or_go(self, state: State, handler: str) -> tuple[Step, State]:
        workers = tuple(worker._replace(current=False) for worker in state.workers)
        if handler not in state.subscribed:
            after = state._replace(subscribed=state.subscribed | {handler}, workers=workers)
            return Step(handler, "subscribes"), after
        events = tuple(event._replace(owed=event.owed - {handler}) for event in state.events)
        after = state._replace(subscribed=state.subscribed - {handler}, workers=workers, events=events)
        return Step(handler, "is retired"), after

    def _holder(self, state: State, number: int, event: Event) -> Iterator[tuple[Step, State]]:
        """The worker that has claimed an event for its only handler."""
        actor = f"worker {event.token}"
        settled = Event("own", handler=event.handler, taken_up=True, owed=event.owed, siblings=event.siblings)
        if event.locked == NOBODY:  # else it waits for the lock, and then finds its lease lost
            yield Step(actor, "delivers"), self._write(state, number, settled)
            yield Step(actor, "retries", "in the handler's own lane"), self._write(state, number, settled)
            yield Step(actor, "releases"), self._write(state, number, settled._replace(at="open", handler=""))

    def _worker(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        actor = f"worker {n}"
        if worker.at == "splitting":
            then = "settling" if "the origin is settled later" in self._broken_by else ""
            after = self._put(state, n, worker._replace(at=then, splits=frozenset()))
            for number, event in enumerate(state.events):
                if event.locked == n:
                    after = self._write(after, number, self._fanned_out(event, worker.splits))
            yield Step(actor, "commits the split"), after
            yield Step(actor, "dies"), self._dies(state, n)
            return
        if worker.at == "settling":  # only in the mutation: a transaction of its own
            after = self._put(state, n, worker._replace(at=""))
            for number, event in enumerate(state.events):
                if event.at == "open" and event.siblings and event.locked == NOBODY:
                    after = self._write(after, number, event._replace(at="split"))
            yield Step(actor, "settles the origin"), after
            yield Step(actor, "dies"), self._dies(state, n)
            return
        if worker.knows is None or not worker.current:
            after = self._put(state, n, Worker(state.subscribed, True))
            yield Step(actor, "reads the subscriptions", ", ".join(sorted(state.subscribed))), after
        if worker.knows is None:
            return
        ours = worker.knows & self._serves[n]
        if len(worker.knows) > 1 and ours:
            yield from self._split(state, n, worker)
        elif ours:
            yield from self._claim(state, n, worker, *ours)

    def _claim(self, state: State, n: int, worker: Worker, handler: str) -> Iterator[tuple[Step, State]]:
        actor = f"worker {n}"
        unchecked = self._broken_by == "a claim does not check the number"
        if self._broken_by == "a claim checks the number in a statement before":
            if worker.at != "checked":
                if worker.current:
                    yield Step(actor, "checks the number"), self._put(state, n, worker._replace(at="checked"))
                return
            worker, unchecked = worker._replace(at=""), True
        if not worker.current and not unchecked:
            yield Step(actor, "finds them changed"), self._put(state, n, Worker())
            return
        for number, event in self._due(state):
            claimed = event._replace(at="held", token=n, handler=handler, live=True)
            after = self._write(self._put(state, n, worker), number, self._taken_up(state, claimed))
            yield Step(actor, "claims", f"event {number} for {handler} alone"), after

    def _split(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        """Two statements of one function, each with a snapshot of its own."""
        actor = f"worker {n}"
        if worker.at != "checked":
            if worker.current:
                yield Step(actor, "checks the number"), self._put(state, n, worker._replace(at="checked"))
            else:
                yield Step(actor, "finds them changed"), self._put(state, n, Worker())
            return
        if self._broken_by == "the splitter says who the subscribers are":
            subscribers = worker.knows or frozenset()
        else:
            subscribers = state.subscribed
        after = state
        if subscribers or self._broken_by == "an event is split among nobody":
            for number, event in self._due(state):
                after = self._write(after, number, self._taken_up(state, event._replace(locked=n)))
        after = self._put(after, n, worker._replace(at="splitting", splits=subscribers))
        yield Step(actor, "splits", "among " + (", ".join(sorted(subscribers)) or "nobody")), after

    def _fanned_out(self, event: Event, subscribers: Handlers) -> Event:
        """core.sibling_id: the same handler's sibling has the same id, whoever makes it."""
        known = set() if "random ids" in self._broken_by else set(event.siblings)
        siblings = tuple(sorted((*event.siblings, *(subscribers - known))))
        if "the origin is settled later" in self._broken_by:
            return event._replace(siblings=siblings, locked=NOBODY, token=NOBODY, at="open")
        return Event("split", taken_up=True, owed=event.owed, siblings=siblings)

    def _due(self, state: State) -> Iterator[tuple[int, Event]]:
        for number, event in enumerate(state.events):
            if event.locked == NOBODY and (event.at == "open" or (event.at == "held" and not event.live)):
                yield number, event

    def _taken_up(self, state: State, event: Event) -> Event:
        return event if event.taken_up else event._replace(taken_up=True, owed=state.subscribed)

    def _dies(self, state: State, n: int) -> State:
        """Its transaction is rolled back; what it holds comes back when the lease ends."""
        events = tuple(event._replace(locked=NOBODY) if event.locked == n else event for event in state.events)
        return self._put(state._replace(events=events), n, Worker())

    @staticmethod
    def _put(state: State, n: int, worker: Worker) -> State:
        return state._replace(workers=replaced(state.workers, n, worker))

    @staticmethod
    def _write(state: State, number: int, event: Event) -> State:
        return state._replace(events=replaced(state.events, number, event))
