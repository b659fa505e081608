"""The idempotent exchange: requests with one key, of which one is carried out.

Each slot is a request that some server process carries out for a client; a client that got no answer, or one that asks
it to come again, sends the same request anew, also while its first one is still under way. Requests of another body
use the key by mistake. The answer of an execution is known by its kind and its slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NOBODY, ORPHAN = -1, -2


class Answer(NamedTuple):
    kind: str  # 2xx, 4xx
    by: int  # the slot that carried the request out


class Record(NamedTuple):
    body: str
    answer: Answer | None  # None: Started, which no other transaction ever sees


class Request(NamedTuple):
    # none; open: a transaction, and the key is not looked for; runs; answers: the answer is in the transaction;
    # refuses: the endpoint has rolled back by itself; committed; unsure: of the commit
    at: str = "none"
    kind: str = ""
    stale: bool = False  # above READ COMMITTED: the record was committed after the snapshot was taken


class State(NamedTuple):
    record: Record | None  # as committed
    holder: int  # whose transaction has inserted the record: a slot, or one whose process is gone
    effects: int
    requests: tuple[Request, ...]
    given: frozenset[tuple[str, Answer]] = frozenset()  # body and answer, as clients got them
    early: bool = False  # an answer went out that was not committed


_FUNCTIONS = "postgres/sql/functions/idempotency.sql"
_EXCHANGE = "idempotency/exchange.py"
_HOLDING = frozenset(("runs", "answers"))


class Exchange(Model[State]):
    """`bodies` are those of the slots; `snapshots` is REPEATABLE READ and above."""

    stands_for: ClassVar[dict[str, str]] = {
        "arrives": "idempotency/asgi/exchange.py AsgiExchange.open",
        "takes the key": f"{_FUNCTIONS} core.idempotency_begin",
        "finds another request": f"{_FUNCTIONS} core.idempotency_begin",
        "finds it unfinished": f"{_FUNCTIONS} core.idempotency_begin",
        "has waited too long": f"{_EXCHANGE} Exchange.judge",
        "is run again": f"{_EXCHANGE} Exchange.repeat",
        "keeps the answer": f"{_FUNCTIONS} core.idempotency_complete",
        "refuses, and has rolled back itself": f"{_EXCHANGE} Exchange._store_refusal",
        "takes the key once more": f"{_EXCHANGE} Exchange._store_refusal",
        "drops everything": f"{_EXCHANGE} Exchange.settle",
        "commits": f"{_EXCHANGE} Exchange.settle",
        "commits, and is not answered": f"{_EXCHANGE} Exchange.unavailable",
        "loses its connection": f"{_EXCHANGE} Exchange.unavailable",
        "answers": "idempotency/asgi/exchange.py AsgiExchange._reply",
        "answers 503": f"{_EXCHANGE} Exchange.unavailable",
        "replays": "idempotency/answers.py replayed",
        "dies": "a fault",
        "ends a transaction without a client": "the server: idle_in_transaction_session_timeout",
    }

    def __init__(self, bodies: tuple[str, ...], *, snapshots: bool = False, broken_by: str = "") -> None:
        self._bodies = bodies
        self._snapshots = snapshots
        self._broken_by = broken_by

    def initial(self) -> State:
        return State(None, NOBODY, 0, (Request(),) * len(self._bodies))

    # --- what is asked of every state -----------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        if state.effects > 1:
            return "the request is carried out twice"
        if state.early:
            return "an answer has gone out that is not committed"
        for body, answer in state.given:
            if state.record is None or answer != state.record.answer:
                return "a client has got another answer than the one that is kept"
            if body != state.record.body:
                return "a request has got the answer to another one"
        if state.effects and (state.record is None or state.record.answer is None):
            return "the change is committed, and its answer is not"
        return None

    def good(self, state: State) -> bool:
        return state.record is not None and state.record.answer is not None

    # --- the steps ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        if state.holder == ORPHAN:
            yield Step("server", "ends a transaction without a client"), state._replace(holder=NOBODY)
        for n, request in enumerate(state.requests):
            actor = f"request {n}"
            if request.at == "none":
                yield Step(actor, "arrives", self._bodies[n]), self._put(state, n, Request("open"))
                continue
            orphaned = state._replace(holder=ORPHAN) if state.holder == n else state
            yield Step(actor, "dies"), self._put(orphaned, n, Request())
            if request.at in ("open", "refuses"):
                yield from self._take(state, n, request)
            elif request.at == "runs":
                yield from self._run(state, n, request)
            elif request.at == "answers":
                yield from self._commit(state, n, request)
            elif request.at == "committed":
                yield Step(actor, "answers", request.kind), self._reply(state, n, Answer(request.kind, n))
            elif request.at == "unsure":
                if self._broken_by == "a commit that was not answered is taken for one":
                    yield Step(actor, "answers", request.kind), self._reply(state, n, Answer(request.kind, n))
                else:
                    yield Step(actor, "answers 503"), self._put(state, n, Request())

    def _take(self, state: State, n: int, request: Request) -> Iterator[tuple[Step, State]]:
        """INSERT ... ON CONFLICT DO NOTHING: it waits for whoever has inserted the record and not committed."""
        actor = f"request {n}"
        record = state.record
        over = self._put(state, n, Request())
        looks_only = self._broken_by == "the key is looked for and not taken"
        if record is not None and request.stale:
            yield Step(actor, "is run again", "40001"), self._put(state, n, Request("open"))
        elif record is not None and record.body != self._bodies[n] and self._broken_by != "the hash is not compared":
            yield Step(actor, "finds another request", "422"), over
        elif record is not None and record.answer is None:
            yield Step(actor, "finds it unfinished", "409"), over
        elif record is not None and record.answer is not None:
            anew = self._broken_by == "a replay is made anew"
            yield (
                Step(actor, "replays"),
                self._reply(state, n, Answer(record.answer.kind, n) if anew else record.answer),
            )
        elif state.holder != NOBODY and not looks_only:
            yield Step(actor, "has waited too long", "409"), over
        elif request.at == "refuses":
            taken = self._put(state._replace(holder=n), n, Request("answers", "4xx"))
            yield Step(actor, "takes the key once more"), taken
        elif self._broken_by == "the record is committed before the work":
            taken = state._replace(record=Record(self._bodies[n], None))
            yield Step(actor, "takes the key"), self._put(taken, n, Request("runs"))
        else:
            yield Step(actor, "takes the key"), self._put(state._replace(holder=n), n, Request("runs"))

    def _run(self, state: State, n: int, request: Request) -> Iterator[tuple[Step, State]]:
        actor = f"request {n}"
        rolled_back = state._replace(holder=NOBODY) if state.holder == n else state
        for kind in ("2xx", "4xx"):
            kept = self._put(state, n, Request("answers", kind))
            if self._broken_by == "the answer goes before the commit":
                kept = self._answered(kept, n, Answer(kind, n))
            yield Step(actor, "keeps the answer", kind), kept
        yield Step(actor, "drops everything", "5xx"), self._put(rolled_back, n, Request())
        yield Step(actor, "is run again", "40001"), self._put(rolled_back, n, Request("open"))
        yield Step(actor, "refuses, and has rolled back itself"), self._put(rolled_back, n, Request("refuses", "4xx"))
        yield from self._cut(state, n, request)

    def _commit(self, state: State, n: int, request: Request) -> Iterator[tuple[Step, State]]:
        actor = f"request {n}"
        record = Record(self._bodies[n], Answer(request.kind, n))
        done = state._replace(
            record=record,
            holder=NOBODY if state.holder == n else state.holder,
            effects=min(state.effects + (request.kind == "2xx"), 2),
            requests=tuple(
                each._replace(stale=True) if self._snapshots and each.at == "open" else each for each in state.requests
            ),
        )
        yield Step(actor, "commits", request.kind), self._put(done, n, request._replace(at="committed"))
        unsure = self._put(done, n, request._replace(at="unsure"))
        yield Step(actor, "commits, and is not answered"), unsure
        yield from self._cut(state, n, request)

    def _cut(self, state: State, n: int, request: Request) -> Iterator[tuple[Step, State]]:
        """The server may know at once, or not before it has waited for the client."""
        after = self._put(state, n, request._replace(at="unsure"))
        for holder in (NOBODY, ORPHAN) if state.holder == n else (state.holder,):
            yield Step(f"request {n}", "loses its connection"), after._replace(holder=holder)

    def _reply(self, state: State, n: int, answer: Answer) -> State:
        return self._answered(self._put(state, n, Request()), n, answer)

    def _answered(self, state: State, n: int, answer: Answer) -> State:
        committed = state.record is not None and state.record.answer is not None
        return state._replace(given=state.given | {(self._bodies[n], answer)}, early=state.early or not committed)

    @staticmethod
    def _put(state: State, n: int, request: Request) -> State:
        return state._replace(requests=replaced(state.requests, n, request))
