"""Claims by key, beside those from lanes: which keys a worker goes on with, and when it looks for others.

Events with a key cost a round trip of their own, and only while there are some: a claim from lanes says so.

A worker that has settled the head of an ordering key goes on with that key from the number it has reached: under a held
snapshot the dead index entries before it cannot be removed, and walking them for each event would stop a long key.
Other keys are found by a walk over the heads, in turn from where the last walk has ended. A walk that has reached the
end is repeated when that is cheap compared with the time since the last one.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg

from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.keyed import KeyedClaim, KeyedRoom, KeyPlace, Kind
from holdfast.worker.shared import Shared

# A walk may take this share of the time.
_WALK_SHARE = 4
# Rows that other workers hold are looked at again after so long: nothing tells of their settlement.
_LOOK_INTERVAL = 1.0
# Keys to go on with that are remembered while there is no room for them; the walk finds the others.
_MOST_KEYS = 10_000


@dataclass(slots=True)
class _Walk:
    """Where the walk over the keys of each handler is."""

    after: dict[str, str] = field(default_factory=dict)
    again_at: float = 0.0  # not before that
    put_off: bool = False  # until then
    due_at: float = math.inf

    def begins(self, now: float) -> bool:
        """Whether to walk now."""
        self.put_off = now < self.again_at
        return not self.put_off

    def restart(self) -> None:
        self.after.clear()
        self.again_at = 0.0

    def learn(self, claim: KeyedClaim, started: float, ended: float, began_first: bool) -> bool:
        """Learn from a claim that has walked. True when it has seen every key."""
        self.after = dict(claim.after)
        self.due_at = math.inf if claim.due_in is None else ended + claim.due_in
        whole = began_first and not self.after
        # From the first key again at once, if this walk began further on.
        self.again_at = ended + _WALK_SHARE * (ended - started) if whole else 0.0
        return whole


class _Channel:
    """What is known about the keys of one channel."""

    __slots__ = ("ask_at", "fair", "kind", "ordered", "unasked")

    def __init__(self) -> None:
        self.kind: Kind = ""
        self.ask_at = 0.0
        self.unasked = False
        self.ordered, self.fair = _Walk(), _Walk()


class KeyedClaims:
    """The claims by key of one worker."""

    def __init__(self, shared: Shared, handlers: Mapping[str, Handler], channels: tuple[str, ...]) -> None:
        self._keyed = shared.keyed
        self._in_flight = shared.in_flight
        self._handlers = handlers
        self._channels = {channel: _Channel() for channel in channels}
        self._places: dict[tuple[str, str], int] = {}  # ordering keys to go on with, and from which number

    def restart(self) -> None:
        """Look at every key, from the first one on."""
        for channel in self._channels.values():
            channel.ask_at = 0.0
            channel.ordered.restart()
            channel.fair.restart()

    def asks(self, channel: str) -> bool:
        """Whether the next claim from lanes is to say what else there is."""
        asked = self._channels[channel]
        asked.unasked = time.monotonic() < asked.ask_at
        return not asked.unasked

    def learn(self, channel: str, kind: Kind, took: float) -> None:
        """Learn from a claim that has said so, and how long it took."""
        self._channels[channel].kind = kind
        # Where nothing is left, dead index entries may be all that it has walked.
        self._channels[channel].ask_at = 0.0 if kind else time.monotonic() + _WALK_SHARE * took

    def there(self, channel: str) -> bool:
        """Whether there are open rows with a key."""
        return bool(self._channels[channel].kind)

    @property
    def look_at(self) -> float:
        """When to look again, however quiet it is."""
        moments = [math.inf]
        for channel in self._channels.values():
            if channel.unasked:
                moments.append(channel.ask_at)
            if channel.kind:
                moments.append(time.monotonic() + _LOOK_INTERVAL)
                for walk in (channel.ordered, channel.fair):
                    moments += [walk.due_at, walk.again_at] if walk.put_off else [walk.due_at]
        return min(moments)

    async def claim(
        self, connection: asyncpg.Connection, name: str, rooms: Mapping[str, int]
    ) -> tuple[list[Delivery], bool]:
        """Claim from a channel. Returns what came, and whether nothing more is there."""
        self._take_freed()
        channel = self._channels[name]
        rooms = {handler: room for handler, room in rooms.items() if room > 0}
        if not channel.kind or not rooms:
            return [], not channel.kind
        claimed, exhausted = await self._claim_ordered(connection, name, channel.ordered, rooms)
        if channel.kind == "fair":
            for each in claimed:
                rooms[each.handler.name] -= 1
            fair, seen = await self._claim_fair(connection, name, channel.fair, rooms)
            return claimed + fair, exhausted and seen
        return claimed, exhausted

    async def _claim_ordered(
        self, connection: asyncpg.Connection, name: str, walk: _Walk, rooms: Mapping[str, int]
    ) -> tuple[list[Delivery], bool]:
        started = time.monotonic()
        discover = walk.begins(started)
        keys = self._next_places(rooms, discover)
        if not discover and not keys:
            return [], False
        asked = [KeyedRoom(self._handlers[each], room, walk.after.get(each, "")) for each, room in rooms.items()]
        first = not walk.after
        claim = await self._keyed.claim_ordered(connection, name, asked, keys, discover=discover)
        exhausted = walk.learn(claim, started, time.monotonic(), first) if discover else False
        return claim.deliveries, exhausted and len(claim.deliveries) == 0 and not self._places

    async def _claim_fair(
        self, connection: asyncpg.Connection, name: str, walk: _Walk, rooms: Mapping[str, int]
    ) -> tuple[list[Delivery], bool]:
        started = time.monotonic()
        asked = [
            KeyedRoom(self._handlers[each], room, walk.after.get(each, "")) for each, room in rooms.items() if room > 0
        ]
        if not asked or not walk.begins(started):
            return [], False
        first = not walk.after
        claim = await self._keyed.claim_fair(connection, name, asked)
        exhausted = walk.learn(claim, started, time.monotonic(), first)
        if claim.deliveries:
            walk.again_at = 0.0  # of a long key there is more
        return claim.deliveries, exhausted and not claim.deliveries

    def _take_freed(self) -> None:
        for delivery in self._in_flight.take_freed():
            if delivery.ordering_key is not None:
                self._places[delivery.handler.name, delivery.ordering_key] = delivery.seq
        while len(self._places) > _MOST_KEYS:
            del self._places[next(iter(self._places))]

    def _next_places(self, rooms: Mapping[str, int], discover: bool) -> list[KeyPlace]:
        """Take the keys to go on with for which there is room, and leave some of it to keys that are found."""
        left = {name: max(1, room * 3 // 4) if discover else room for name, room in rooms.items()}
        taken = []
        for (name, key), seq in self._places.items():
            if left.get(name, 0) > 0:
                left[name] -= 1
                taken.append(KeyPlace(name, key, seq))
                if len(taken) >= sum(rooms.values()):
                    break
        for place in taken:
            del self._places[place.handler, place.key]
        return taken
