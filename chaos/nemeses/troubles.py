"""Events that are faults themselves."""

import random
from typing import Any, ClassVar

from chaos.events import crowd
from chaos.nemeses import NOBODY, Blow, Nemesis
from chaos.world import World
from holdfast import NewEvent


class Trouble(Nemesis):
    """Publishes events of one kind."""

    def __init__(self, kind: str, promise: str, most: int = 1, **payload: Any) -> None:
        self.name = kind
        self.promise = promise
        self._most = most
        self._payload = payload

    async def strike(self, world: World, rng: random.Random) -> Blow:
        keys = world.history.keys(rng.randint(1, self._most))
        await world.trouble([NewEvent(f"trouble.{self.name}", self._payload, idempotency_key=key) for key in keys])
        return Blow(details={"keys": keys}, hit=NOBODY)  # a worker that dies of it is counted when it does


class Neighbours(Nemesis):
    name, promise = "slow_neighbours", "LSN-17: handlers that wait, hang or block threads cost the others nothing"

    def __init__(self, events: int = 300) -> None:
        self._events = events

    async def strike(self, world: World, rng: random.Random) -> Blow:
        seconds = {"linger": rng.uniform(0.8, 1.2), "occupy": rng.uniform(0.2, 0.4), "hang": 0.0}
        shares = {"linger": self._events, "occupy": self._events // 3, "hang": self._events // 10}
        for kind, count in shares.items():
            payload = {"seconds": seconds[kind]}
            keys = world.history.keys(count)
            await world.trouble([NewEvent(f"trouble.{kind}", payload, idempotency_key=key) for key in keys])
        return Blow(rng.uniform(3.0, 4.0), {"seconds": seconds, "events": shares}, NOBODY)


class Crowd(Nemesis):
    name, promise = "crowd", "T15: events for a few of very many handlers are heard of at once"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        event_types = rng.sample(sorted(crowd(world.setup.crowd)), 40)
        keys = world.history.keys(len(event_types))
        events = zip(event_types, keys, strict=True)
        await world.trouble([NewEvent(event_type, {}, idempotency_key=key) for event_type, key in events])
        return Blow(details={"events": len(keys)}, hit=NOBODY)


class Hostile(Nemesis):
    name, promise = "hostile", "D1-D6: hostile payloads are refused before SQL, hostile errors cost their own event"

    REFUSED: ClassVar[list[dict[str, Any]]] = [
        {"text": "null \x00"},
        {"text": "half a pair \ud800"},
        {"number": float("nan")},
        {"number": float("inf")},
        {"bytes": b"\xff"},
        {"set": {1, 2}},
        {"text": "x" * 300_000},
    ]

    async def strike(self, world: World, rng: random.Random) -> Blow:
        keys = iter(world.history.keys(12))
        large = rng.choice(("x" * 250_000, "ä" * 120_000, "\U0001f40c" * 3_000))
        events = [
            *(NewEvent(f"trouble.{kind}", {}, idempotency_key=next(keys)) for kind in ("text",) * 6 + ("raise",)),
            *(NewEvent("trouble.unwind", {}, idempotency_key=next(keys)) for _ in range(3)),
            NewEvent("trouble.large", {"text": large, "length": len(large)}, idempotency_key=next(keys)),
            NewEvent("trouble.unrouted", {}, idempotency_key=next(keys)),
        ]
        refused = rng.choice(self.REFUSED)
        await world.trouble(events, refused=refused)
        return Blow(details={"refused": list(refused)}, hit=NOBODY)
