"""The routes from which a worker with many handlers claims, a part of a page at a time."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.postgres.deliveries import LaneFind, RoutePage
from holdfast.postgres.subscriptions import Subscription, Subscriptions
from holdfast.worker.discovery import ChannelLanes
from holdfast.worker.routing import Routing

AT = datetime(2026, 1, 1, tzinfo=UTC)


def routing(types: int, handlers: int) -> Routing:
    """Event types with so many handlers each."""
    registry = HandlerRegistry()

    async def nothing(event: EventEnvelope) -> None: ...

    ours = [
        registry.add(f"shop.on_{kind:02}_{number}", (f"type.n{kind:02}",), nothing)
        for kind in range(types)
        for number in range(handlers)
    ]
    return Routing(Subscriptions(1, tuple(Subscription("shop", each.name, each.event_types[0]) for each in ours)), ours)


def page(*routes: str, after: str = "") -> RoutePage:
    return RoutePage(list(routes), after, every=True)


def test_a_page_is_claimed_from_in_parts() -> None:
    """Every route of a page has its turn, once, and there is more until the last of them had it (LSN-7)."""
    routes, channel = routing(60, 2), ChannelLanes()
    names = [f"shop.on_{kind:02}_{number}" for kind in range(60) for number in range(2)]
    channel.take_page(routes, page(*names))
    seen: list[str] = []
    while channel.more:
        assert not channel.needs_page
        channel.use_page(routes)
        part = list(channel.claimed.handlers)
        assert 0 < len(part) <= 32
        seen += part
    assert seen == names
    assert channel.needs_page


def test_a_part_is_as_large_as_a_short_claim_allows() -> None:
    """Where claims are quick, more routes are claimed from at once, up to a page; where they are slow, fewer
    (LSN-7).
    """
    routes, channel = routing(60, 2), ChannelLanes()
    names = [f"shop.on_{kind:02}_{number}" for kind in range(60) for number in range(2)]
    for _ in range(10):
        channel.learn(0.001, 0.008)
    channel.take_page(routes, page(*names))
    channel.use_page(routes)
    assert len(list(channel.claimed.handlers)) == 120
    for _ in range(10):
        channel.learn(0.1, 0.008)
    channel.take_page(routes, page(*names))
    channel.use_page(routes)
    assert len(list(channel.claimed.handlers)) == 32


def test_what_is_split_is_claimed_at_once() -> None:
    """With the route of an event that is split go those of its siblings, and they count (LSN-7)."""
    routes, channel = routing(10, 20), ChannelLanes()
    channel.take_page(routes, page(*(f"*/type.n{kind:02}" for kind in range(10))))
    for kind in range(10):
        channel.use_page(routes)
        assert channel.siblings == 20
        assert len(channel.split) == 3  # one route, by its priorities
        assert set(channel.claimed.handlers) == {f"shop.on_{kind:02}_{number}" for number in range(20)}
    assert channel.needs_page


def test_a_restart_forgets_the_rest_of_a_page() -> None:
    """What was listed before a wake-up is listed anew (LSN-7)."""
    routes, channel = routing(60, 2), ChannelLanes()
    channel.take_page(routes, page(*(f"shop.on_{kind:02}_0" for kind in range(60)), after="shop.on_59_0"))
    channel.use_page(routes)
    assert channel.more
    channel.restart()
    assert channel.needs_page and not channel.more


def test_a_lane_is_remembered_while_others_are_claimed_from() -> None:
    """A lane of another priority than the usual that had more gets its share again when its turn comes (LSN-17)."""
    routes, channel = routing(2, 2), ChannelLanes()
    lanes = channel.claimed
    names = "shop.on_00_0", "shop.on_01_0"
    rooms = dict.fromkeys(names, 40)

    def limits(name: str) -> dict[int, int]:
        channel.use(routes.owed([name]))
        return {each.priority: each.limit for each in lanes.claims(rooms, 40)}

    assert limits(names[0]) == {0: 2, 1: 40, 2: 2}  # the usual one first
    lanes.learn([LaneFind(names[0], 0, 2, (AT, UUID(int=1)))], 0.0, 1.0)
    assert limits(names[1])[1] == 40
    assert limits(names[0]) == {0: 40, 1: 2, 2: 2}
