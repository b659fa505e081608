"""Lanes and their marks, checked against a model of the outbox."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.handlers import Handler
from holdfast.postgres.deliveries import NO_MARK
from holdfast.postgres.subscriptions import Subscriptions
from holdfast.worker.lanes import PRIORITIES, Lanes
from holdfast.worker.routing import Routing, outdated, subscribers

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def handlers(*names: str, types: tuple[str, ...] = ("*",)) -> list[Handler]:
    registry = HandlerRegistry()

    async def nothing(event: EventEnvelope) -> None: ...

    return [registry.add(name, types, nothing) for name in names]


class Routed:
    """What a worker would claim and split if these routes had rows."""

    def __init__(self, subscriptions: Subscriptions, ours: list[Handler], present: Iterable[str]) -> None:
        routing = Routing(subscriptions, ours)
        owed = {**routing.routes, **routing.owed(present)}
        self.claimed = {route: each.handler for route, each in owed.items() if not each.split}
        self.split = {route: each.handler for route, each in owed.items() if each.split}
        self.patterns = routing.patterns


# --- who is owed what -----------------------------------------------------------------------------------


def test_one_subscriber_claims_broadcasts_and_its_own_context() -> None:
    """The lane of the handler itself, of every context, and of its own (LSN-7)."""
    subscriptions = Subscriptions(1, (("billing", "billing.charge", "order.placed"),))
    routing = Routed(subscriptions, handlers("billing.charge"), [])
    assert set(routing.claimed) == {"billing.charge", "*/order.placed", "billing/order.placed"}
    assert (routing.split, routing.patterns) == ({}, False)


def test_shared_routes_are_split_and_never_claimed() -> None:
    """What another handler wants as well, running or not, is split; a targeted event is not shared (LSN-7)."""
    subscriptions = Subscriptions(
        1, (("billing", "billing.charge", "order.placed"), ("mail", "mail.thank", "order.placed"))
    )
    routing = Routed(subscriptions, handlers("billing.charge"), [])
    assert set(routing.split) == {"*/order.placed"}
    assert set(routing.claimed) == {"billing.charge", "billing/order.placed"}


def test_others_interest_is_none_of_ours() -> None:
    """Routes that only others want are neither claimed nor split (LSN-7)."""
    subscriptions = Subscriptions(1, (("mail", "mail.thank", "order.*"), ("mail", "mail.warn", "order.*")))
    routing = Routed(subscriptions, handlers("billing.charge"), ["*/order.placed"])
    assert (set(routing.claimed), routing.split, routing.patterns) == ({"billing.charge"}, {}, False)


def test_retired_handler_serves_its_own_lane() -> None:
    """Without subscriptions a handler is owed nothing new, but what waits in its lane is still its own (LSN-7)."""
    routing = Routed(Subscriptions(1, ()), handlers("billing.charge"), ["*/order.placed", "billing.charge"])
    assert (set(routing.claimed), routing.split) == ({"billing.charge"}, {})


def test_an_interest_that_the_code_has_dropped_is_left_alone() -> None:
    """What is recorded for a handler, but not registered by it any more, is neither claimed nor split by it (LSN-7)."""
    recorded = (("billing", "billing.charge", "order.placed"), ("billing", "billing.charge", "order.paid"))
    subscriptions = Subscriptions(1, (*recorded, ("mail", "mail.thank", "order.paid")))
    ours = handlers("billing.charge", types=("order.placed",))
    routing = Routed(subscriptions, ours, ["*/order.paid"])
    assert set(routing.claimed) == {"billing.charge", "*/order.placed", "billing/order.placed"}
    assert routing.split == {}
    assert outdated(subscriptions, ours) == [("billing.charge", "order.paid")]


@pytest.mark.parametrize(
    ("pattern", "event_type", "matches"),
    [
        ("*", "anything.at.all", True),
        ("order.*", "order.placed", True),
        ("order.*", "order.", True),
        ("order.*", "orders.placed", False),
        ("order.*", "order", False),
        ("*.placed", "order.placed", True),
        ("a*b*c", "a-b-b-c", True),
        ("a.b", "axb", False),
        ("a_b", "axb", False),
        ("a%", "ab", False),
        ("order.placed", "order.placed.v2", False),
        ("[a-z]*", "abc", False),
        ("(", "(", True),
    ],
)
def test_patterns(pattern: str, event_type: str, matches: bool) -> None:
    """Only the star is special (LSN-7)."""
    subscriptions = Subscriptions(1, (("x", "x.y", pattern),))
    assert subscribers(subscriptions, f"*/{event_type}") == ({"x.y"} if matches else set())


CONTEXTS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["a.one", "a.two", "b.one", "b.two"])
TYPES = st.sampled_from(["x", "x.y", "y", "*", "x*", "*y"])
ROUTES = st.builds(
    lambda target, event_type: f"{target}/{event_type}", st.sampled_from("*ab"), st.sampled_from(["x", "x.y", "y"])
)


@given(
    st.lists(st.tuples(CONTEXTS, NAMES, TYPES), unique_by=lambda each: each[1:], max_size=8),
    st.sets(NAMES, min_size=1),
    st.sets(ROUTES, max_size=9),
)
def test_plan_agrees_with_the_registry(
    subscriptions: list[tuple[str, str, str]], ours: set[str], present: set[str]
) -> None:
    """Whatever the registry says, a present route is claimed by its only subscriber, split, or left alone (LSN-7)."""
    subscriptions = Subscriptions(1, tuple(subscriptions))
    routing = Routed(subscriptions, handlers(*sorted(ours)), present)
    assert not set(routing.split) & set(routing.claimed)
    for route in present:
        wanted = subscribers(subscriptions, route)
        if not wanted & ours:
            assert route not in routing.split and route not in routing.claimed
        elif len(wanted) == 1:
            assert {routing.claimed[route].name} == wanted
        else:
            assert route in routing.split
    assert ours <= set(routing.claimed)


@given(st.lists(st.tuples(CONTEXTS, NAMES, TYPES), unique_by=lambda each: each[1:], max_size=8), st.sets(ROUTES))
def test_what_is_ours_lies_in_the_ranges(subscriptions: list[tuple[str, str, str]], present: set[str]) -> None:
    """The ranges in which routes are looked for are sorted, do not overlap, and leave out nothing of ours (LSN-7)."""
    routing = Routing(Subscriptions(1, tuple(subscriptions)), handlers("a.one", "b.one"))
    begins, ends = routing.ranges()
    assert sorted(begins) == begins and all(end < begin for end, begin in zip(ends, begins[1:], strict=False))
    for route in (*routing.routes, *routing.owed(present)):
        assert any(begin <= route < end for begin, end in zip(begins, ends, strict=True))


def test_planning_is_linear() -> None:
    """With 3,000 handlers on patterns, a route is compared with the few that begin like it (LSN-7, T15)."""
    names = [f"a.handler_{n}" for n in range(3000)]
    entries = tuple(("a", name, f"shop.type_{n:04}.*") for n, name in enumerate(names))
    registry = HandlerRegistry()

    async def nothing(event: EventEnvelope) -> None: ...

    ours = [registry.add(name, (pattern,), nothing) for _, name, pattern in entries]
    started = time.process_time()
    routing = Routing(Subscriptions(1, entries), ours)
    assert len(routing.ranges()[0]) == 3 * 3000
    owed = routing.owed([f"*/shop.type_{n:04}.placed" for n in range(3000)])
    assert time.process_time() - started < 1.0  # as it was, each of them would take as long
    assert [each.handler.name for each in owed.values()] == names
    assert not routing.few


# --- marks ----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    route: str
    priority: int
    available_at: datetime
    id: UUID


class Outbox:
    """A model: rows of lanes in the order of their index, and which of them are open."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], list[tuple[datetime, UUID]]] = {}
        self._next = 0

    def publish(self, lane: tuple[str, int], at: int) -> None:
        self._next += 1
        bisect.insort(self.open.setdefault(lane, []), (EPOCH + timedelta(seconds=at), UUID(int=self._next)))

    def claim(self, lanes: Lanes, room: int, started: float = 0.0, ended: float = 1.0) -> tuple[list[Row], bool]:
        claimed = []
        for asked in lanes.claims(rooms(lanes, room), room):
            assert asked.limit >= 1
            rows = self.open.get((asked.route, asked.priority), [])
            due = [each for each in rows if each >= asked.mark][: asked.limit]
            for each in due:
                rows.remove(each)
                claimed.append(Row(asked.route, asked.priority, *each))
        claimed.sort(key=lambda row: row[1:])
        exhausted = lanes.observe(claimed, started, ended)
        return claimed, exhausted

    @property
    def left(self) -> int:
        return sum(map(len, self.open.values()))


def rooms(lanes: Lanes, room: int) -> dict[str, int]:
    return dict.fromkeys(lanes.handlers, room)


def lanes_of(*routes: str) -> Lanes:
    lanes = Lanes()
    lanes.replace(dict.fromkeys(routes, handlers("billing.charge")[0]))
    return lanes


LANES = st.tuples(st.sampled_from(["r1", "r2"]), st.sampled_from(PRIORITIES))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), LANES, st.integers(0, 20)),
        st.tuples(st.just("claim"), st.integers(1, 40)),
        st.tuples(st.just("rescan")),
    ),
    max_size=60,
)


@given(STEPS)
def test_nothing_is_missed_for_ever(steps: list[tuple]) -> None:
    """Rows appear anywhere, also below the marks; after a rescan every one of them is found (LSN-1)."""
    outbox, lanes = Outbox(), lanes_of("r1", "r2")
    published = claimed = 0
    for kind, *arguments in steps:
        if kind == "publish":
            outbox.publish(*arguments)
            published += 1
        elif kind == "rescan":
            lanes.rescan()
        else:
            found, exhausted = outbox.claim(lanes, *arguments)
            claimed += len(found)
            # Exhausted is what lets a worker sleep: it must be true.
            assert not exhausted or outbox.left == 0
            assert exhausted or lanes.marked or found
    lanes.rescan()
    assert not lanes.marked
    for _ in range(2 * published + 2):
        found, exhausted = outbox.claim(lanes, 16)
        claimed += len(found)
        if exhausted:
            break
        if not found:
            lanes.rescan()
    assert exhausted
    assert claimed == published
    assert outbox.left == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 8))
def test_mark_is_the_minimum_of_the_last_full_batch(times: list[int], room: int) -> None:
    """Never the maximum: what was skipped because somebody had it locked lies between the two (LSN-1)."""
    outbox, lanes = Outbox(), lanes_of("r1")
    for at in times:
        outbox.publish(("r1", 1), at)
    found, _ = outbox.claim(lanes, room)
    mark = {claim.priority: claim.mark for claim in lanes.claims(rooms(lanes, room), room)}
    full = lanes.marked
    assert mark[1] == (min((at, identity) for _, _, at, identity in found) if full else NO_MARK)
    assert mark[0] == mark[2] == NO_MARK


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 60), st.integers(0, 20))
def test_claims_stay_within_a_few_times_the_room(room: int, routes: int, busy: int) -> None:
    """However many lanes there are, each may show that it has filled, and their sum stays bounded (LSN-1)."""
    outbox, lanes = Outbox(), lanes_of(*(f"r{n}" for n in range(routes)))
    for n in range(min(busy, routes)):
        outbox.open[f"r{n}", 1] = [(EPOCH, UUID(int=number)) for number in range(500)]
    outbox.claim(lanes, room)
    limits = [claim.limit for claim in lanes.claims(rooms(lanes, room), room)]
    assert min(limits) >= 1
    assert sum(limits) <= max(6 * room, room + len(limits))


def test_full_lanes_share_the_room() -> None:
    """Two full lanes get a half each, an empty one just enough to notice that it has filled (LSN-10)."""
    outbox, lanes = Outbox(), lanes_of("r1", "r2")
    for lane in (("r1", 1), ("r2", 1)):
        for at in range(1000):
            outbox.publish(lane, at)
    for _ in range(4):
        found, _ = outbox.claim(lanes, 160)
    assert Counter(route for route, *_ in found) == {"r1": 80, "r2": 80}
    limits = {(claim.route, claim.priority): claim.limit for claim in lanes.claims(rooms(lanes, 160), 160)}
    assert limits["r1", 0] == 10


def test_replace_keeps_the_marks_of_what_stays() -> None:
    """A change of the registry does not send every lane back to its start, and a new lane starts there (LSN-7)."""
    outbox, lanes = Outbox(), lanes_of("r1")
    for at in range(100):
        outbox.publish(("r1", 1), at)
    outbox.claim(lanes, 10)
    before = next(claim.mark for claim in lanes.claims(rooms(lanes, 10), 10) if claim.priority == 1)
    assert before != NO_MARK
    lanes.replace(dict.fromkeys(["r1", "r2"], handlers("billing.other")[0]))
    after = {(claim.route, claim.priority): claim for claim in lanes.claims(rooms(lanes, 10), 10)}
    assert after["r1", 1].mark == before
    assert after["r1", 1].handler.name == "billing.other"
    assert after["r2", 1].mark == NO_MARK
    lanes.replace({})
    assert lanes.claims(rooms(lanes, 10), 10) == []
    assert not lanes


def test_rescans_are_paced_by_their_cost() -> None:
    """A scan from the start that took 100 ms is due again after twenty times as long (LSN-1)."""
    lanes = lanes_of("r1")
    outbox = Outbox()
    for at in range(100):
        outbox.publish(("r1", 1), at)
    outbox.claim(lanes, 10, 10.0, 10.1)
    assert lanes.marked
    assert lanes.rescan_at() == pytest.approx(12.1)
    assert not lanes.rescan_cheap(12.0)
    lanes.rescan(before=10.0)
    assert lanes.marked
    assert lanes.rescan_cheap(12.11)
    assert not lanes.marked
    outbox.claim(lanes, 10, 20.0, 20.1)
    lanes.rescan(before=20.2)
    assert not lanes.marked


def test_marked_claims_are_no_scan() -> None:
    """Only a claim without any mark counts as a scan from the start, and as proof that nothing is left (LSN-1)."""
    outbox, lanes = Outbox(), lanes_of("r1", "r2")
    for at in range(100):
        outbox.publish(("r1", 1), at)
    lanes.claims(rooms(lanes, 10), 10)
    outbox.claim(lanes, 10)
    scanned = lanes.rescan_at()
    lanes.claims(rooms(lanes, 10), 10)
    assert lanes.observe([], 500.0, 501.0) is False
    assert lanes.rescan_at() == scanned


def test_handlers_without_room_are_left_out() -> None:
    """Their lanes are not asked for, keep their marks, and do not count as scanned (LSN-17)."""
    fast, slow = handlers("fast.noop", "slow.call")
    outbox, lanes = Outbox(), Lanes()
    lanes.replace({"fast.noop": fast, "slow.call": slow})
    for route in ("fast.noop", "slow.call"):
        for at in range(1000):
            outbox.publish((route, 1), at)
    for _ in range(3):
        claims = lanes.claims({"fast.noop": 200, "slow.call": 200}, 100)
        due = {(c.route, c.priority): c.limit for c in claims}
        found = [
            Row(route, priority, *each)
            for (route, priority), limit in due.items()
            for each in outbox.open.get((route, priority), [])[:limit]
        ]
        assert not lanes.observe(found, 0.0, 1.0)
    assert due["fast.noop", 1] == due["slow.call", 1] == 50
    claims = lanes.claims({"fast.noop": 200, "slow.call": 0}, 100)
    assert {claim.route for claim in claims} == {"fast.noop"}
    assert max(claim.limit for claim in claims) == 100
    lanes.observe([], 5.0, 6.0)
    assert lanes.left_out == {"slow.call"}
    after = {claim.route for claim in lanes.claims({"fast.noop": 1, "slow.call": 1}, 100) if claim.mark != NO_MARK}
    assert "slow.call" in after
