"""The wake-up protocol: producers that ring only while a worker sleeps, and workers that fall asleep.

One channel. Each producer commits one event for one lane; each worker serves some lanes. There is no polling interval
here: a worker that only it would wake is a lost wake-up.

The time that is allowed comes in ticks, and only when nothing else can happen. Without a fault there is none. After a
fault that the other side is told of (a death, a cut connection, a frozen process) a second may pass, after which the
deputy, which may be any worker that rests and is not the sleeper, tries to become the sleeper; if another has the lock
E and commits do not ring, it has all look. A worker that does not listen, or waits for K, looks by itself. After one
that it is not told of, the ping finds out as well.

Two things are told shorter than they are. A worker clears its flag and claims in one step, and one that was woken is at
its look: what is heard in between only makes it look once more. And without `delays` a notification is heard when it is
sent: one that is heard later only makes it look later, and until then the state is not one in which nothing can happen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

TOLD = frozenset(("dies", "loses power", "is frozen", "loses its sleeper connection", "loses its LISTEN connection"))
UNTOLD = frozenset(("loses its sleeper connection unawares", "loses its LISTEN connection unawares"))


class Worker(NamedTuple):
    at: str = "look"  # look, idle, get up, say so, busy, rests, gone
    wakened: bool = False  # Wakeups.pending, where it matters: between the look and the rest
    hints: bool = False  # notifications on their way
    sleeper: str = ""  # what the Sleeper believes of its channel: "", waiting, asleep
    locks: str = ""  # what its session has: "", E, E+queue, E+K; cut: ended, and told so; gone: ended, and not told
    ears: str = "on"  # the LISTEN connection: on, cut, gone, off (known, to be opened again)
    frozen: bool = False


class Producer(NamedTuple):
    at: str = "open"  # open, shares, notifies, visible, ended
    taken: bool = False
    waited: int = 0  # ticks that its event has waited


class State(NamedTuple):
    workers: tuple[Worker, ...]
    producers: tuple[Producer, ...]
    ghost: str = ""  # the locks of a session whose client is gone: "", E, E+queue, E+K
    faults: int = 0  # how many are still allowed
    ticks: int = 0  # how many an event may wait, after the faults so far


class Wakeup(Model[State]):
    """`serves` are the lanes of each worker, `lanes` the lane of each event. `broken_by` names mutations.

    `names` are how each worker calls the lock E: two deployments that call it differently have a sleeper each, and
    share K.
    """

    ends = True
    stands_for: ClassVar[dict[str, str]] = {
        "clears its flag": "worker/wakeups.py Wakeups.take",
        "claims": "postgres/sql/functions/claim.sql core.outbox_claim",
        "finds nothing": "postgres/sql/functions/claim.sql core.outbox_claim",
        "becomes the sleeper": "postgres/sql/wakeup.sql become_sleeper",
        "becomes the sleeper, to wait": "postgres/sql/wakeup.sql become_sleeper",
        "finds another sleeper": "postgres/sql/wakeup.sql become_sleeper",
        "rests": "worker/claimer.py Claimer._idle",
        "queues for the lock": "postgres/sql/wakeup.sql fall_asleep",
        "is granted the lock": "postgres/wakeup/sleeper.py Sleeper._wait_for_lock",
        "looks once more": "postgres/wakeup/sleeper.py Sleeper._wait_for_lock",
        "gets up": "postgres/sql/wakeup.sql get_up",
        "says so": "postgres/sql/wakeup.sql get_up",
        "has time again": "worker/queues.py HandlerQueue.room",
        "hears": "worker/listener.py Listener._heard",
        "misses its sleeper connection": "postgres/wakeup/sleeper.py Sleeper.reset",
        "misses its LISTEN connection": "worker/listener.py Listener.run",
        "listens again": "worker/listener.py Listener.run",
        "shares the lock": "postgres/sql/functions/publish.sql core.outbox_notify",
        "rings": "postgres/sql/functions/publish.sql core.outbox_notify",
        "commits": "COMMIT: the row is visible, and with it goes the notification",
        "ends": "COMMIT: the locks of the transaction are released",
        "a second passes": "worker/claimer.py _SLEEPER_INTERVAL",
        "five seconds pass": "worker/listener.py Listener._watch",
        "grants a lock to a session without a client": "the server",
        "ends a session without a client": "the server: TCP keepalives",
        "ends the idle sessions": "the server: idle_session_timeout",
        "is thawed": "SIGCONT",
        **{fault: "a fault" for fault in TOLD | UNTOLD},
    }

    def __init__(
        self,
        serves: tuple[frozenset[int], ...],
        lanes: tuple[int, ...],
        *,
        faults: frozenset[str] = frozenset(),
        most_faults: int = 1,
        delays: bool = False,
        names: tuple[str, ...] = (),
        broken_by: str = "",
    ) -> None:
        self._serves = serves
        self._lanes = lanes
        self._faults = faults
        self._most_faults = most_faults if faults else 0
        self._delays = delays
        self._broken_by = broken_by
        self._names = names or ("",) * len(serves)
        kinds = list(zip(serves, self._names, strict=True))
        self._groups = tuple({each: [n for n, kind in enumerate(kinds) if kind == each] for each in kinds}.values())
        self._crowds = tuple({each: [n for n, s in enumerate(lanes) if s == each] for each in lanes}.values())

    def initial(self) -> State:
        workers = tuple(Worker() for _ in self._serves)
        return State(workers, tuple(Producer() for _ in self._lanes), faults=self._most_faults)

    def same(self, state: State) -> Hashable:
        workers = tuple(tuple(sorted(state.workers[n] for n in group)) for group in self._groups)
        producers = tuple(tuple(sorted(state.producers[n] for n in crowd)) for crowd in self._crowds)
        return workers, producers, state.ghost, state.faults, state.ticks

    # --- what is asked of every state -----------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        late = self._open(state)
        if not late or next(self._at_once(state), None) is not None:
            return None
        for n in late:
            if state.producers[n].waited >= state.ticks:
                return f"event {n} is committed, nobody has claimed it, and nobody will look before the next poll"
        return None

    def good(self, state: State) -> bool:
        return not self._open(state)

    def _open(self, state: State) -> list[int]:
        """Events that are visible, not claimed, and wanted by a worker that lives and is not busy."""
        living = frozenset(
            lane
            for worker, lanes in zip(state.workers, self._serves, strict=True)
            if worker.at not in ("gone", "busy") and not worker.frozen
            for lane in lanes
        )
        return [
            n
            for n, (producer, lane) in enumerate(zip(state.producers, self._lanes, strict=True))
            if producer.at in ("visible", "ended") and not producer.taken and lane in living
        ]

    # --- the steps ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        quiet = True
        for found in self._at_once(state):
            quiet = False
            yield found
        yield from self._sooner_or_later(state)
        if quiet and self._open(state):
            deputies = [n for n, worker in enumerate(state.workers) if self._may_be_deputy(worker)]
            for deputy in deputies or [None]:
                yield self._tick(state, deputy)

    def _at_once(self, state: State) -> Iterator[tuple[Step, State]]:
        for n, producer in enumerate(state.producers):
            yield from self._producer(state, n, producer)
        for n, worker in enumerate(state.workers):
            if worker.at != "gone" and not worker.frozen:
                yield from chain(self._loop(state, n, worker), self._background(state, n, worker))
            if worker.locks == "E+queue" and not self._shared(state) and not self._held(state):
                # In one statement, which the server ends whether or not the client is frozen.
                told = state if self._broken_by == "the sleeper does not announce" else self._notify(state, n)
                yield Step(f"worker {n}", "is granted the lock"), self._put(told, n, worker._replace(locks="E+K"))
        if state.ghost == "E+queue" and not self._shared(state):
            told = self._notify(state._replace(ghost="E+K"))
            yield Step("server", "grants a lock to a session without a client"), told

    def _producer(self, state: State, n: int, producer: Producer) -> Iterator[tuple[Step, State]]:
        actor = f"producer {n}"
        if producer.at == "open":
            if self._exclusive(state):
                after = self._put_producer(state, n, producer._replace(at="notifies"))
                if self._broken_by == "the bell rings before the row is visible":
                    after = self._notify(after)
                yield Step(actor, "rings"), after
            else:
                yield Step(actor, "shares the lock"), self._put_producer(state, n, producer._replace(at="shares"))
        elif producer.at == "notifies":
            after = self._put_producer(state, n, producer._replace(at="ended"))
            if self._broken_by != "the bell rings before the row is visible":
                after = self._notify(after)
            yield Step(actor, "commits"), after
        elif producer.at == "shares":
            yield Step(actor, "commits"), self._put_producer(state, n, producer._replace(at="visible"))
        elif producer.at == "visible":
            yield Step(actor, "ends"), self._put_producer(state, n, producer._replace(at="ended"))

    def _loop(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        """The claimer."""
        actor = f"worker {n}"
        if worker.at == "look":
            yield from self._claim(state, n, worker)
        elif worker.at == "clear":  # only in the mutation
            yield Step(actor, "clears its flag"), self._put(state, n, worker._replace(at="idle", wakened=False))
        elif worker.at == "idle":
            yield from self._fall_asleep(state, n, worker)
        elif worker.at == "get up":
            then = "busy" if self._broken_by == "one that gets up does not say so" else "say so"
            yield Step(actor, "gets up"), self._put(state, n, worker._replace(at=then, sleeper="", locks=""))
        elif worker.at == "say so":
            yield Step(actor, "says so"), self._put(self._notify(state, n), n, worker._replace(at="busy"))

    def _claim(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        found = [
            e
            for e, producer in enumerate(state.producers)
            if self._lanes[e] in self._serves[n] and producer.at in ("visible", "ended") and not producer.taken
        ]
        if not found:
            then = "clear" if self._broken_by == "the flag is cleared after the look" else "idle"
            yield Step(f"worker {n}", "finds nothing"), self._put(state, n, worker._replace(at=then))
            return
        after = state
        for e in found:
            after = self._put_producer(after, e, after.producers[e]._replace(taken=True, waited=0))
        step = Step(f"worker {n}", "claims", ", ".join(f"event {e}" for e in found))
        if worker.sleeper != "asleep":
            yield step, self._put(after, n, worker._replace(at="look"))
            return
        # Everything is claimed, and what is committed from now on rings; or it was the third find in a row.
        yield step, self._put(after, n, worker._replace(at="idle"))
        yield step, self._put(after, n, worker._replace(at="get up"))

    def _fall_asleep(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        actor = f"worker {n}"
        resting = worker._replace(at="rests")
        if worker.sleeper or worker.ears == "off":
            yield Step(actor, "rests"), self._put(state, n, resting)
        elif state.ghost or self._has_sleeper(state, self._names[n]):
            yield Step(actor, "finds another sleeper"), self._put(state, n, resting)
        elif self._shared(state) or self._exclusive(state):
            after = resting._replace(sleeper="waiting", locks="E")
            yield Step(actor, "becomes the sleeper, to wait"), self._put(state, n, after)
        else:
            then = "rests" if self._broken_by == "the sleeper does not look once more" else "look"
            told = state if self._broken_by == "the sleeper does not announce" else self._notify(state, n)
            after = worker._replace(at=then, sleeper="asleep", locks="E+K")
            yield Step(actor, "becomes the sleeper"), self._put(told, n, after)

    def _background(self, state: State, n: int, worker: Worker) -> Iterator[tuple[Step, State]]:
        """The listener, and the Sleeper that waits for commits under way."""
        actor = f"worker {n}"
        if worker.hints and worker.ears == "on":
            yield Step(actor, "hears"), self._put(state, n, worker._replace(hints=False, wakened=True))
        if worker.sleeper == "waiting":
            if worker.locks == "E":
                yield Step(actor, "queues for the lock"), self._put(state, n, worker._replace(locks="E+queue"))
            elif worker.locks == "E+K":
                after = worker._replace(sleeper="asleep", wakened=True)
                yield Step(actor, "looks once more"), self._put(state, n, after)
        if worker.locks == "cut":
            yield Step(actor, "misses its sleeper connection"), self._reset(state, n)
        if worker.ears == "cut":
            after = self._reset(state, n)
            after = self._put(after, n, after.workers[n]._replace(ears="off", hints=False))
            yield Step(actor, "misses its LISTEN connection"), after

    def _sooner_or_later(self, state: State) -> Iterator[tuple[Step, State]]:
        """What nobody may wait for: the ends of work and of outages, and faults."""
        for n, worker in enumerate(state.workers):
            actor = f"worker {n}"
            if worker.at == "gone":
                continue
            if worker.frozen:
                yield Step(actor, "is thawed"), self._put(state, n, worker._replace(frozen=False))
                if worker.ears == "on":
                    locks = "cut" if worker.locks else ""
                    after = worker._replace(ears="cut", locks=locks, hints=False)
                    yield Step("server", "ends the idle sessions", actor), self._put(state, n, after)
                continue
            if worker.at == "busy":
                yield Step(actor, "has time again"), self._put(state, n, worker._replace(at="look"))
            if worker.ears == "off":
                after = worker._replace(ears="on", wakened=True)
                yield Step(actor, "listens again"), self._put(state, n, after)
            if state.faults:
                for fault in sorted(self._faults):
                    after_fault = self._fault(state, n, worker, fault)
                    if after_fault is not None:
                        ticks = max(state.ticks, 2 if fault in UNTOLD else 1)
                        yield Step(actor, fault), after_fault._replace(faults=state.faults - 1, ticks=ticks)
        if state.ghost in ("E", "E+K"):
            yield Step("server", "ends a session without a client"), state._replace(ghost="")

    def _fault(self, state: State, n: int, worker: Worker, fault: str) -> State | None:
        gone = Worker(at="gone", ears="off")
        match fault:
            case "dies":
                return self._put(state, n, gone)
            case "loses power":
                ghost = worker.locks if worker.locks.startswith("E") else state.ghost
                return self._put(state._replace(ghost=ghost), n, gone)
            case "is frozen":
                return self._put(state, n, worker._replace(frozen=True))
            case "loses its sleeper connection" if worker.locks.startswith("E"):
                return self._put(state, n, worker._replace(locks="cut"))
            case "loses its sleeper connection unawares" if worker.locks.startswith("E"):
                return self._put(state, n, worker._replace(locks="gone"))
            case "loses its LISTEN connection" if worker.ears == "on":
                return self._put(state, n, worker._replace(ears="cut", hints=False))
            case "loses its LISTEN connection unawares" if worker.ears == "on":
                return self._put(state, n, worker._replace(ears="gone", hints=False))
        return None

    def _may_be_deputy(self, worker: Worker) -> bool:
        resting = worker.at == "rests" and not worker.sleeper and not worker.frozen and worker.ears in ("on", "gone")
        return resting and self._broken_by != "others do not ask again"

    def _tick(self, state: State, deputy: int | None) -> tuple[Step, State]:
        """Nothing else can happen: the timers run."""
        late = self._open(state)
        pings = any(state.producers[e].waited for e in late)
        after = state
        for e in late:
            after = self._put_producer(after, e, after.producers[e]._replace(waited=after.producers[e].waited + 1))
        for n, worker in enumerate(state.workers):
            if worker.at == "gone" or worker.frozen:
                continue
            if pings and (worker.locks == "gone" or worker.ears == "gone"):
                after = self._reset(after, n)
                if worker.ears == "gone":
                    after = self._put(after, n, after.workers[n]._replace(ears="off"))
            elif worker.at == "rests" and self._broken_by != "others do not ask again":
                if worker.sleeper == "waiting" or worker.ears == "off":
                    after = self._put(after, n, worker._replace(at="look"))
                elif n == deputy:
                    after = self._put(after, n, worker._replace(at="idle"))
        if deputy is not None and self._has_place(state, deputy) and not self._exclusive(state):
            after = self._put(self._notify(after, deputy), deputy, after.workers[deputy]._replace(at="look"))
        return Step("clock", "five seconds pass" if pings else "a second passes"), after

    # --- the server -----------------------------------------------------------------------------------------

    def _shared(self, state: State) -> bool:
        if self._broken_by == "the shared lock ends with the trigger":
            return False
        return any(producer.at in ("shares", "visible") for producer in state.producers)

    def _exclusive(self, state: State) -> bool:
        """Whether somebody has K or queues for it: then it cannot be shared."""
        return state.ghost in ("E+queue", "E+K") or any(each.locks in ("E+queue", "E+K") for each in state.workers)

    def _held(self, state: State) -> bool:
        return state.ghost == "E+K" or any(each.locks == "E+K" for each in state.workers)

    def _has_sleeper(self, state: State, name: str) -> bool:
        return any(
            each.locks.startswith("E") and own == name for each, own in zip(state.workers, self._names, strict=True)
        )

    def _has_place(self, state: State, n: int) -> bool:
        """Whether the lock E, as worker n calls it, is taken."""
        return bool(state.ghost) or self._has_sleeper(state, self._names[n])

    def _notify(self, state: State, sender: int | None = None) -> State:
        after = state
        for n, worker in enumerate(state.workers):
            if worker.ears == "on" and n != sender:
                heard = not self._delays and not worker.frozen
                after = self._put(after, n, worker._replace(wakened=True) if heard else worker._replace(hints=True))
        return after

    def _reset(self, state: State, n: int) -> State:
        """Sleeper.reset: a session that is blocked in the server does not notice before it is granted its lock."""
        worker = state.workers[n]
        ghost = "E+queue" if worker.locks == "E+queue" else state.ghost
        after = worker._replace(sleeper="", locks="", wakened=True)
        return self._put(state._replace(ghost=ghost), n, after)

    @staticmethod
    def _put(state: State, n: int, worker: Worker) -> State:
        if worker.wakened and worker.at not in ("idle", "clear") and not worker.frozen:
            worker = worker._replace(wakened=False, at="look" if worker.at == "rests" else worker.at)
        return state._replace(workers=replaced(state.workers, n, worker))

    @staticmethod
    def _put_producer(state: State, n: int, producer: Producer) -> State:
        return state._replace(producers=replaced(state.producers, n, producer))
