"""The rows of one ordering key at one handler: committed in any order, claimed by several workers, begun once each.

A claim is two steps, because another one may come between them: it looks for the head under a snapshot, and takes it if
the line of the key still names the row that it has seen there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from tests.model.protocols.search import Model, Step, replaced

NONE, STALE = -1, -2  # STALE: a line that has been written again since
_ORDERING = "postgres/sql/functions/ordering.sql"
_SETTLE = "postgres/sql/functions/settle.sql"


class Row(NamedTuple):
    status: str = "unseen"  # unseen: not committed; pending, in_flight, delivered, failed
    seq: int = 0
    live: bool = False  # the lease has not ended
    begun: bool = False

    @property
    def open(self) -> bool:
        return self.status in ("pending", "in_flight")

    @property
    def free(self) -> bool:
        return self.status == "pending" or (self.status == "in_flight" and not self.live)


class Look(NamedTuple):
    """What a claim has seen: the row that it may take, and which one the line named."""

    row: int = NONE
    line: int = NONE


class State(NamedTuple):
    rows: tuple[Row, ...]
    looks: tuple[Look, ...]
    line: int = NONE  # core.ordering_heads: the row that was begun last
    replays: int = 0
    harm: str = ""


class Order(Model[State]):
    stands_for: ClassVar[dict[str, str]] = {
        "commits": "a producer",
        "looks": f"{_ORDERING} core.outbox_claim_ordered",
        "takes": f"{_ORDERING} core.outbox_claim_ordered",
        "takes nothing": f"{_ORDERING} core.outbox_claim_ordered",
        "delivers": f"{_SETTLE} core.outbox_deliver",
        "retries": f"{_SETTLE} core.outbox_retry",
        "fails": f"{_SETTLE} core.outbox_fail",
        "loses its lease": "a worker that is slow, cut off or dead",
        "replays": f"{_ORDERING} core.replayed_places",
        "releases the key": f"{_ORDERING} core.key_release",
        "sweeps": f"{_ORDERING} core.sweep_heads",
    }

    def __init__(
        self,
        rows: int = 3,
        claims: int = 2,
        *,
        blocks: bool = True,
        compares: bool = True,
        goes_on: bool = True,
        knows_times: bool = True,
    ) -> None:
        self._rows, self._claims = rows, claims
        self._blocks = blocks
        self._compares = compares  # a claim takes a row only if the line is as it has seen it
        self._knows_times = knows_times  # and names the same claim of it
        self._goes_on = goes_on  # a row that was begun comes before one of a smaller number

    def initial(self) -> State:
        return State(tuple(Row(seq=n) for n in range(self._rows)), tuple(Look() for _ in range(self._claims)))

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for n, row in enumerate(state.rows):
            name = f"row {n}"
            if row.status == "unseen":
                yield Step(name, "commits"), self._with(state, n, row._replace(status="pending"))
            elif row.status == "in_flight":
                if row.live:
                    yield Step(name, "loses its lease"), self._with(state, n, row._replace(live=False))
                    for verb, status in (("delivers", "delivered"), ("retries", "pending"), ("fails", "failed")):
                        yield Step(name, verb), self._with(state, n, row._replace(status=status, live=False))
            elif row.status == "failed" and state.replays < 1:
                yield Step("operator", "replays", name), self._replayed(state, n)
        if state.line != NONE:
            head = state.rows[state.line]
            if head.status == "failed":
                yield Step("operator", "releases the key"), state._replace(line=NONE)
            if head.status == "delivered" or (head.status == "failed" and not self._blocks):
                yield Step("sweeper", "sweeps"), state._replace(line=NONE)
        for c, look in enumerate(state.looks):
            actor = f"claim {c}"
            if look.row == NONE:
                seen = self._head(state)
                if seen != NONE:
                    looks = replaced(state.looks, c, Look(seen, state.line))
                    yield Step(actor, "looks", f"row {seen}"), state._replace(looks=looks)
            else:
                verb, after = self._taken(state, look)
                looks = replaced(state.looks, c, Look())
                if verb == "takes":
                    looks = self._without_stale(looks, look.row)
                yield Step(actor, verb), after._replace(looks=looks)

    def _head(self, state: State) -> int:
        """The row that a claim may take."""
        if state.line != NONE and (self._goes_on or state.rows[state.line].status == "failed"):
            head = state.rows[state.line]
            if head.open:
                return state.line if head.free else NONE
            if head.status == "failed" and self._blocks:
                return NONE
        visible = [n for n, row in enumerate(state.rows) if row.open]
        first = min(visible, key=lambda n: state.rows[n].seq, default=NONE)
        return first if first != NONE and state.rows[first].free else NONE

    def _taken(self, state: State, look: Look) -> tuple[str, State]:
        row = state.rows[look.row]
        if not row.free or (self._compares and state.line not in (look.line, look.row)):
            return "takes nothing", state
        others = [each for n, each in enumerate(state.rows) if n != look.row]
        harm = ""
        if any(each.status == "in_flight" for each in others):
            harm = "two rows of a key are in flight"
        elif any(each.begun and each.open for each in others):
            harm = "a row is begun before another one is over"
        elif self._blocks and state.line != NONE and state.rows[state.line].status == "failed":
            harm = "a row is begun behind a dead letter that blocks"
        after = self._with(state, look.row, row._replace(status="in_flight", live=True, begun=True))
        return "takes", after._replace(line=look.row, harm=harm)

    def _without_stale(self, looks: tuple[Look, ...], line: int) -> tuple[Look, ...]:
        """A line that names the same row again, as after a replay, is another one: it has another time."""
        if not self._knows_times:
            return looks
        return tuple(each._replace(line=STALE) if NONE != line == each.line != each.row else each for each in looks)

    def _replayed(self, state: State, n: int) -> State:
        row = state.rows[n]._replace(status="pending", begun=False)
        if state.line == n and self._blocks:
            return self._with(state, n, row)._replace(replays=state.replays + 1)
        row = row._replace(seq=1 + max(each.seq for each in state.rows))
        line = NONE if state.line == n else state.line
        return self._with(state, n, row)._replace(replays=state.replays + 1, line=line)

    @staticmethod
    def _with(state: State, n: int, row: Row) -> State:
        return state._replace(rows=replaced(state.rows, n, row))

    def broken(self, state: State) -> str | None:
        return state.harm or None

    def good(self, state: State) -> bool:
        return all(row.status in ("delivered", "failed") for row in state.rows)
