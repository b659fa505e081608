"""The places of a limited handler: claims that count what is in flight, one after the other, and workers that die.

A claimer is a slot for one delivery, and its number is the token of its claims. What ends a delivery writes nothing but
the row: a place is taken while the row is in flight under the token that the claim has written down.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NOBODY = -1


class Row(NamedTuple):
    status: str = "pending"  # pending, in_flight, done
    token: int = NOBODY
    live: bool = False  # the lease has not ended


class Claimer(NamedTuple):
    at: str = "free"  # free, locked: the line of the handler; counted; holds
    allowed: int = 0
    row: int = NOBODY


class State(NamedTuple):
    rows: tuple[Row, ...]
    claimers: tuple[Claimer, ...]
    slots: frozenset[tuple[int, int]] = frozenset()  # row and token, as committed
    line: int = NOBODY  # who has locked it


_FLOW = "postgres/sql/functions/flow.sql"


class Slots(Model[State]):
    stands_for: ClassVar[dict[str, str]] = {
        "locks the line": f"{_FLOW} core.flow_allow",
        "counts": f"{_FLOW} core.flow_in_flight",
        "claims": "postgres/sql/functions/claim.sql core.outbox_claim",
        "finds nothing": "postgres/sql/functions/claim.sql core.outbox_claim",
        "delivers": "postgres/sql/functions/settle.sql core.outbox_deliver",
        "retries": "postgres/sql/functions/settle.sql core.outbox_retry",
        "dies": "a fault",
        "ends the lease": "the database's clock",
    }

    def __init__(self, rows: int, claimers: int, limit: int, *, broken_by: str = "") -> None:
        self._rows = rows
        self._claimers = claimers
        self._limit = limit
        self._broken_by = broken_by

    def initial(self) -> State:
        return State((Row(),) * self._rows, (Claimer(),) * self._claimers)

    def same(self, state: State) -> Hashable:
        """Claimers are equal to each other, and so are rows."""
        order = sorted(range(self._claimers), key=lambda n: (state.claimers[n], [r.token == n for r in state.rows]))
        names = {old: new for new, old in enumerate(order)} | {NOBODY: NOBODY}
        return (
            tuple(row._replace(token=names[row.token]) for row in state.rows),
            tuple(state.claimers[n] for n in order),
            frozenset((row, names[token]) for row, token in state.slots),
            names[state.line],
        )

    def broken(self, state: State) -> str | None:
        if sum(row.status == "in_flight" and row.live for row in state.rows) > self._limit:
            return "more deliveries are in flight than the limit allows"
        return None

    def good(self, state: State) -> bool:
        return all(row.status == "done" for row in state.rows)

    def _taken(self, state: State) -> int:
        """How many places are taken, by what claims have written down and what the rows say."""
        expired = self._broken_by == "an expired lease keeps its place"
        return sum(
            state.rows[row].status == "in_flight"
            and state.rows[row].token == token
            and (state.rows[row].live or expired)
            for row, token in state.slots
        )

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for number, row in enumerate(state.rows):
            if row.live:
                ended = replaced(state.rows, number, row._replace(live=False))
                yield Step("the clock", "ends the lease", f"of row {number}"), state._replace(rows=ended)
        for n, claimer in enumerate(state.claimers):
            yield from self._claimer(state, n, claimer, f"claimer {n}")

    def _claimer(self, state: State, n: int, claimer: Claimer, actor: str) -> Iterator[tuple[Step, State]]:
        def becomes(other: Claimer, **changed: object) -> State:
            return state._replace(claimers=replaced(state.claimers, n, other), **changed)

        early = self._broken_by == "the count is made before the lock"
        if claimer.at != "free":
            released = NOBODY if state.line == n else state.line
            yield Step(actor, "dies"), becomes(Claimer(), line=released)
        if claimer.at == "free" and early:
            yield Step(actor, "counts"), becomes(Claimer("counted", self._limit - self._taken(state)))
        elif claimer.at == "free" and state.line == NOBODY:
            yield Step(actor, "locks the line"), becomes(Claimer("locked"), line=n)
        elif claimer.at == "locked":
            yield Step(actor, "counts"), becomes(Claimer("counted", self._limit - self._taken(state)))
        elif claimer.at == "counted" and (state.line == n or (early and state.line == NOBODY)):
            due = [i for i, row in enumerate(state.rows) if row.status != "done" and not row.live]
            if claimer.allowed < 1 or not due:
                yield Step(actor, "finds nothing"), becomes(Claimer(), line=NOBODY)
            for i in due if claimer.allowed > 0 else ():
                slots = state.slots if self._broken_by == "claims are not written down" else state.slots | {(i, n)}
                rows = replaced(state.rows, i, Row("in_flight", n, True))
                held = frozenset((row, token) for row, token in slots if rows[row].token == token)
                yield (
                    Step(actor, "claims", f"row {i}"),
                    becomes(Claimer("holds", 0, i), rows=rows, slots=held, line=NOBODY),
                )
        elif claimer.at == "holds":
            row = state.rows[claimer.row]
            for verb, status in (("delivers", "done"), ("retries", "pending")):
                mine = row.status == "in_flight" and row.token == n
                rows = replaced(state.rows, claimer.row, Row(status)) if mine else state.rows
                yield Step(actor, verb), becomes(Claimer(), rows=rows)
