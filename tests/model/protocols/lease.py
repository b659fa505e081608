"""Claim, lease, settle: attempts at deliveries that may be slow, cut off, or dead, and transactional handlers.

An attempt is a slot: a delivery in some worker's hands, under the token of its claim. A slot that is free again may
claim anew, so a token is the number of its slot. All rows carry the same idempotency key, as when an event was
published twice. A lease may end at any moment, however often it was extended: so slow, frozen and cut-off workers need
no steps of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NOBODY = -1
# Transactions whose client is gone and which the server has not ended: with the row alone, or with the inbox row too.
ORPHAN, ORPHAN_WITH_INBOX = -2, -3


class Row(NamedTuple):
    status: str = "pending"  # pending, in_flight, delivered, failed
    token: int = NOBODY
    live: bool = False  # the lease has not ended
    attempts: int = 0
    locked: int = NOBODY  # the slot whose transaction has locked the row
    latest: int = NOBODY  # the slot that claimed it last: what the fence is measured by
    finals: int = 0  # how often it was settled for good


class Attempt(NamedTuple):
    # free; claimed; deliver, retry, fail, release: what is to be settled; in a transaction: row locked, running,
    # duplicate, succeeded, undone to retry, undone to fail; unsure
    at: str = "free"
    row: int = NOBODY


class State(NamedTuple):
    rows: tuple[Row, ...]
    attempts: tuple[Attempt, ...]
    inbox: bool = False
    effects: int = 0  # committed in transactions of the handler
    overwritten: bool = False  # by an attempt that was not the row's last one


_IN_TRANSACTION = frozenset(("row locked", "running", "duplicate", "succeeded", "undone to retry", "undone to fail"))
_HOLDS_INBOX = frozenset(("running", "succeeded"))
_FUNCTIONS = "postgres/sql/functions/settle.sql"


class Lease(Model[State]):
    stands_for: ClassVar[dict[str, str]] = {
        "claims": "postgres/sql/functions/claim.sql core.outbox_claim",
        "claims a duplicate": "postgres/sql/functions/claim.sql core.outbox_claim",
        "claims one that kills workers": "worker/attempts.py max_deliveries",
        "extends": f"{_FUNCTIONS} core.outbox_extend",
        "handles": "worker/dispatcher.py Dispatcher",
        "delivers": f"{_FUNCTIONS} core.outbox_deliver",
        "retries": f"{_FUNCTIONS} core.outbox_retry",
        "fails": f"{_FUNCTIONS} core.outbox_fail",
        "releases": f"{_FUNCTIONS} core.outbox_release",
        "enters": f"{_FUNCTIONS} core.outbox_enter",
        "enters too late": "worker/transactions.py LeaseLost",
        "waits too long": "worker/transactions.py LockNotAvailableError",
        "writes the inbox": f"{_FUNCTIONS} core.outbox_enter",
        "finds the inbox row": f"{_FUNCTIONS} core.outbox_enter",
        "reopens": f"{_FUNCTIONS} core.outbox_reopen",
        "commits": "worker/transactions.py Transactions.run",
        "commits, and is not answered": "worker/transactions.py Transactions._settle",
        "loses its connection": "worker/transactions.py Transactions._settle",
        "leaves it to the lease": "worker/transactions.py LeaseLost",
        "settles what it knows": "worker/settler.py Settler._send",
        "dies": "a fault",
        "ends the lease": "the database's clock",
        "ends a transaction without a client": "the server: idle_in_transaction_session_timeout",
    }

    def __init__(self, rows: int, attempts: int, *, transactional: bool, most: int = 2, broken_by: str = "") -> None:
        self._rows = rows
        self._attempts = attempts
        self._transactional = transactional
        self._most = most  # max_deliveries
        self._broken_by = broken_by

    def initial(self) -> State:
        return State((Row(),) * self._rows, (Attempt(),) * self._attempts)

    def same(self, state: State) -> Hashable:
        """Slots are equal to each other: the numbers are given anew in the order of what they do."""
        order = sorted(
            range(self._attempts),
            key=lambda n: (state.attempts[n], [(r.token == n, r.locked == n, r.latest == n) for r in state.rows]),
        )
        names = {old: new for new, old in enumerate(order)}
        rows = tuple(
            row._replace(
                token=names.get(row.token, row.token),
                locked=names.get(row.locked, row.locked),
                latest=names.get(row.latest, row.latest),
            )
            for row in state.rows
        )
        return rows, tuple(state.attempts[n] for n in order), state.inbox, state.effects, state.overwritten

    # --- what is asked of every state -----------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        if state.effects > 1:
            return "the effect of the handler is committed twice"
        if state.overwritten:
            return "an attempt has settled a row that another one holds"
        for number, row in enumerate(state.rows):
            if row.finals > 1:
                return f"row {number} is settled for good twice"
            if sum(self._may_settle(row, n) and a.row == number for n, a in enumerate(state.attempts)) > 1:
                return f"two attempts hold row {number}, and both can settle it"
            if self._transactional and row.status == "delivered" and not state.effects:
                return f"row {number} is delivered, and its effect is lost"
        return None

    def good(self, state: State) -> bool:
        return all(row.status in ("delivered", "failed") for row in state.rows)

    def _may_settle(self, row: Row, token: int) -> bool:
        """The fence."""
        fenced = row.token == token or self._broken_by == "settles are fenced by the status alone"
        return row.status == "in_flight" and fenced

    # --- the steps ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for number, row in enumerate(state.rows):
            yield from self._server(state, number, row)
        for n, attempt in enumerate(state.attempts):
            actor = f"attempt {n}"
            if attempt.at == "free":
                yield from self._claim(state, n)
                continue
            yield Step(actor, "dies"), self._gone(state, n, Attempt())
            row = state.rows[attempt.row]
            if row.token == n and not row.live and row.locked == NOBODY:
                yield Step(actor, "extends"), self._write(state, attempt.row, row._replace(live=True))
            if attempt.at in _IN_TRANSACTION:
                yield from self._transaction(state, n, attempt, row)
            elif attempt.at in ("deliver", "retry", "fail", "release"):
                yield from self._settle(state, n, attempt, row)
            elif attempt.at == "unsure":
                yield Step(actor, "leaves it to the lease"), self._put(state, n, Attempt())
                for at in ("retry", "fail"):
                    yield Step(actor, "settles what it knows", at), self._put(state, n, attempt._replace(at=at))
            elif self._transactional:
                yield from self._enter(state, n, attempt, row)
            else:
                for at in ("deliver", "retry", "fail", "release"):
                    yield Step(actor, "handles", at), self._put(state, n, attempt._replace(at=at))

    def _server(self, state: State, number: int, row: Row) -> Iterator[tuple[Step, State]]:
        if row.status == "in_flight" and row.live:
            yield Step("clock", "ends the lease", f"row {number}"), self._write(state, number, row._replace(live=False))
        if row.locked in (ORPHAN, ORPHAN_WITH_INBOX):
            after = self._write(state, number, row._replace(locked=NOBODY))
            yield Step("server", "ends a transaction without a client", f"row {number}"), after

    def _claim(self, state: State, n: int) -> Iterator[tuple[Step, State]]:
        for number, row in enumerate(state.rows):
            ended = row.status == "in_flight" and not row.live and self._broken_by != "an ended lease is not due"
            if row.locked != NOBODY or not (row.status == "pending" or ended):
                continue  # FOR UPDATE SKIP LOCKED
            count = min(row.attempts + 1, self._most + 1)
            claimed = row._replace(status="in_flight", token=n, live=True, attempts=count, latest=n)
            verb, at = "claims", "claimed"
            if state.inbox and self._broken_by != "nobody asks the inbox":
                verb, at = "claims a duplicate", "deliver"
            elif count > self._most:
                verb, at = "claims one that kills workers", "fail"
            after = self._put(self._write(state, number, claimed), n, Attempt(at, number))
            yield Step(f"attempt {n}", verb, f"row {number}"), after

    def _settle(self, state: State, n: int, attempt: Attempt, row: Row) -> Iterator[tuple[Step, State]]:
        """A statement of its own, which waits for the row's lock, and is sent again until there is an answer."""
        actor = f"attempt {n}"
        if row.locked != NOBODY:
            return
        verb = {"deliver": "delivers", "retry": "retries", "fail": "fails", "release": "releases"}[attempt.at]
        if not self._may_settle(row, n):
            yield Step(actor, verb, "nothing: the lease is lost"), self._put(state, n, Attempt())
            return
        after = self._settled(state, n, attempt.row, attempt.at)
        if attempt.at == "deliver":
            after = after._replace(inbox=True)
        yield Step(actor, verb), self._put(after, n, Attempt())
        yield Step(actor, verb, "and is not answered"), after

    def _settled(self, state: State, n: int, number: int, how: str) -> State:
        row = state.rows[number]
        settled = row._replace(token=NOBODY, live=False, locked=NOBODY, latest=NOBODY)
        if how in ("retry", "release"):
            attempts = max(row.attempts - (how == "release"), 0)
            settled = settled._replace(status="pending", attempts=attempts)
        else:
            settled = settled._replace(status="delivered" if how == "deliver" else "failed", finals=row.finals + 1)
        return self._write(state, number, settled)._replace(overwritten=state.overwritten or row.latest != n)

    # --- a transactional handler ----------------------------------------------------------------------------

    def _enter(self, state: State, n: int, attempt: Attempt, row: Row) -> Iterator[tuple[Step, State]]:
        actor = f"attempt {n}"
        snooze = self._put(state, n, attempt._replace(at="release"))
        if row.locked != NOBODY:
            yield Step(actor, "waits too long", "for the row"), snooze
        elif not self._may_settle(row, n) and self._broken_by != "who enters too late goes on":
            yield Step(actor, "enters too late"), self._put(state, n, Attempt())
        else:
            locked = self._write(state, attempt.row, row._replace(locked=n))
            yield Step(actor, "enters"), self._put(locked, n, attempt._replace(at="row locked"))

    def _transaction(self, state: State, n: int, attempt: Attempt, row: Row) -> Iterator[tuple[Step, State]]:
        actor = f"attempt {n}"
        for orphaned in (False, True):  # the server may know at once, or not before it has waited for the client
            after = self._gone(state, n, attempt._replace(at="unsure"), orphaned=orphaned)
            yield Step(actor, "loses its connection", "unknown to the server" if orphaned else ""), after
        if attempt.at == "row locked":
            if state.inbox and self._broken_by != "nobody asks the inbox":
                yield Step(actor, "finds the inbox row"), self._put(state, n, attempt._replace(at="duplicate"))
            elif self._inbox_is_locked(state) and self._broken_by != "nobody asks the inbox":
                after = self._gone(state, n, attempt._replace(at="release"), orphaned=False)
                yield Step(actor, "waits too long", "for the inbox row"), after
            else:
                yield Step(actor, "writes the inbox"), self._put(state, n, attempt._replace(at="running"))
        elif attempt.at == "running":
            yield Step(actor, "handles", "well"), self._put(state, n, attempt._replace(at="succeeded"))
            for at in ("retry", "fail"):
                undone = state._replace(inbox=True) if self._broken_by == "reopening leaves the inbox row" else state
                yield Step(actor, "reopens", at), self._put(undone, n, attempt._replace(at=f"undone to {at}"))
        else:
            how = {"undone to retry": "retry", "undone to fail": "fail"}.get(attempt.at, "deliver")
            after = self._settled(state, n, attempt.row, how)
            if how == "deliver":
                after = after._replace(inbox=True, effects=state.effects + (attempt.at == "succeeded"))
            yield Step(actor, "commits", how), self._put(after, n, Attempt())
            unsure = self._put(after, n, attempt._replace(at="unsure"))
            yield Step(actor, "commits, and is not answered", how), unsure

    def _inbox_is_locked(self, state: State) -> bool:
        orphaned = any(row.locked == ORPHAN_WITH_INBOX for row in state.rows)
        return orphaned or any(attempt.at in _HOLDS_INBOX for attempt in state.attempts)

    def _gone(self, state: State, n: int, then: Attempt, *, orphaned: bool = True) -> State:
        """The transaction of an attempt is rolled back, now or when the server notices."""
        attempt = state.attempts[n]
        after = self._put(state, n, then)
        if attempt.at not in _IN_TRANSACTION:
            return after
        locked = NOBODY
        if orphaned:
            locked = ORPHAN_WITH_INBOX if attempt.at in _HOLDS_INBOX else ORPHAN
        return self._write(after, attempt.row, after.rows[attempt.row]._replace(locked=locked))

    @staticmethod
    def _put(state: State, n: int, attempt: Attempt) -> State:
        return state._replace(attempts=replaced(state.attempts, n, attempt))

    @staticmethod
    def _write(state: State, number: int, row: Row) -> State:
        return state._replace(rows=replaced(state.rows, number, row))
