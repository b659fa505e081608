"""Decides which lanes a worker claims from, how much from each, and from which mark on. Pure: no I/O.

A lane is a route (see `routing`) and a priority.

The low-water mark of a lane is the smallest `(available_at, id)` of its last full batch. Rows before it were claimed
already, but under a held snapshot their dead index entries cannot be removed, and walking them on every claim is how
queues in Postgres die. Rows may appear below the mark later (late commits, expired leases, released rows), so the lane
is scanned from its start again: at once when something says so, else when that is cheap compared with the time
since the last full scan, and in any case once per polling interval.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Protocol
from uuid import UUID

from holdfast.handlers import Handler
from holdfast.postgres.deliveries import NO_MARK, LaneClaim, LaneFind

PRIORITIES = (0, 1, 2)
# A full scan may take this share of the time.
_SCAN_SHARE = 20
# The share of the room for a lane that was empty the last time: enough to notice that it has filled.
_PROBE_SHARE = 16
# A lane of this priority gets its share before it is known whether it has anything.
_USUAL = 1
# Of so many lanes it is remembered whether they were full, while other pages are claimed from.
_REMEMBERED = 10_000
_LANE_OF = attrgetter("route", "priority")


class Claimed(Protocol):
    """A delivery, as far as lanes are concerned: where it was found."""

    @property
    def route(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def available_at(self) -> datetime: ...
    @property
    def id(self) -> UUID: ...


@dataclass(slots=True)
class _Lane:
    route: str
    priority: int
    handler: Handler
    mark: tuple[datetime, UUID] = NO_MARK
    limit: int = 0
    full: bool = False


@dataclass(slots=True)
class _Group:
    """The lanes of one handler. They are claimed together, or left out together."""

    lanes: list[_Lane] = field(default_factory=list)
    scanned_at: float = float("-inf")  # when all were last claimed from their start, and how long it took
    scan_took: float = 0.0

    @property
    def marked(self) -> bool:
        return any(lane.mark != NO_MARK for lane in self.lanes)

    @property
    def rescan_at(self) -> float:
        """When a scan from the start is cheap compared with the time since the last one."""
        return self.scanned_at + _SCAN_SHARE * self.scan_took

    def rescan(self) -> None:
        for lane in self.lanes:
            lane.mark = NO_MARK

    def claims(self, room: int) -> Iterator[LaneClaim]:
        """Lanes that were full share the room, the others get enough to notice that they filled."""
        busy = sum(lane.full for lane in self.lanes)
        # However many lanes there are, probes together stay within a few times the room.
        probe = max(1, min(room // _PROBE_SHARE, 4 * room // len(self.lanes)))
        share = max(probe, room // busy) if busy else max(probe, 2 * room // len(self.lanes))
        for lane in self.lanes:
            lane.limit = share if lane.full or not busy else probe
            yield LaneClaim(lane.route, lane.priority, lane.handler, lane.limit, lane.mark)


class Lanes:
    """The lanes of one channel, with their marks."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._groups: dict[str, _Group] = {}  # by handler
        self._asked: list[_Group] = []  # those of the last claim
        self._full: dict[tuple[str, int], bool] = {}  # whether a lane was full, also of those that left

    def replace(self, claimed: Mapping[str, Handler]) -> None:
        """Serve these routes from now on; marks of routes that stay are kept."""
        before, groups = self._lanes, self._groups
        if len(self._full) > _REMEMBERED:
            self._full.clear()
        self._lanes, self._groups, self._asked = {}, {}, []
        for priority in PRIORITIES:
            for route, handler in claimed.items():
                key = route, priority
                lane = before.get(key) or _Lane(route, priority, handler, full=self._full.get(key, priority == _USUAL))
                lane.handler = handler
                self._lanes[route, priority] = lane
                group = self._groups.get(handler.name)
                if group is None:
                    was = groups.get(handler.name, _Group())
                    group = _Group(scanned_at=was.scanned_at, scan_took=was.scan_took)
                    self._groups[handler.name] = group
                group.lanes.append(lane)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def handlers(self) -> Iterable[str]:
        """The names of the handlers that are served."""
        return self._groups.keys()

    @property
    def left_out(self) -> set[str]:
        """The routes that the last claim left out."""
        asked = {id(group) for group in self._asked}
        return {lane.route for group in self._groups.values() if id(group) not in asked for lane in group.lanes}

    @property
    def marked(self) -> bool:
        """Whether the next claim leaves out what lies below some mark."""
        return any(group.marked for group in self._groups.values())

    def rescan(self, before: float = float("inf")) -> None:
        """Forget the marks of lanes that were last scanned from their start before the moment: rows may lie there."""
        for group in self._groups.values():
            if group.scanned_at < before:
                group.rescan()

    def rescan_cheap(self, now: float) -> bool:
        """Forget the marks where a scan from the start is cheap by now; whether there are any."""
        cheap = [group for group in self._asked if now >= group.rescan_at]
        for group in cheap:
            group.rescan()
        return bool(cheap)

    def rescan_at(self) -> float:
        """When `rescan_cheap` has something to do, for lanes that have marks."""
        return min((group.rescan_at for group in self._asked if group.marked), default=float("inf"))

    def claims(self, rooms: Mapping[str, int], most: int) -> list[LaneClaim]:
        """The next claim, of about `most` rows: handlers without room are left out, busy ones share alike."""
        asked = {name: group for name, group in self._groups.items() if rooms.get(name, 0) > 0}
        self._asked = list(asked.values())
        busy = sum(any(lane.full for lane in group.lanes) for group in self._asked)
        result: list[LaneClaim] = []
        for name, group in asked.items():
            full = any(lane.full for lane in group.lanes)
            result.extend(group.claims(min(rooms[name], max(1, most // (busy if full else len(asked))))))
        return result

    def observe(self, claimed: Sequence[Claimed], started: float, ended: float) -> bool:
        """Learn from a claim, the most urgent first. True when nothing more is there, below a mark or above."""
        counts = Counter(map(_LANE_OF, claimed))
        # Backwards, so that the first of each lane is what stays.
        first = {(each.route, each.priority): each for each in reversed(claimed)} if len(counts) > 1 else {}
        finds = []
        for key, count in counts.items():
            lowest = first.get(key, claimed[0])
            finds.append(LaneFind(*key, count, (lowest.available_at, lowest.id)))
        return self.learn(finds, started, ended)

    def learn(self, finds: Iterable[LaneFind], started: float, ended: float) -> bool:
        """Learn from what was found in each lane; returns the same."""
        found = {(find.route, find.priority): find for find in finds}
        exhausted = True
        for group in self._asked:
            if group.marked:
                exhausted = False
            else:
                group.scanned_at, group.scan_took = ended, ended - started
            for lane in group.lanes:
                key = lane.route, lane.priority
                find = found.get(key)
                lane.full = find is not None and find.count >= lane.limit
                self._full[key] = lane.full
                if find is not None and lane.full:
                    lane.mark = find.first
                    exhausted = False
        return exhausted
