"""What a worker warns of: once an hour for each subject, and at most a thousand subjects."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import pytest

from holdfast import WorkerSettings
from holdfast.postgres.subscriptions import Subscription, Subscriptions
from holdfast.telemetry import Counters, Notice
from holdfast.worker import hourly
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight
from holdfast.worker.maintenance import Activity, Maintenance, registration


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hourly, "time", made)
    return made


class Database:
    """The answers of deliveries and fleet."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self.open: list[tuple[str, int]] = []
        self.entries: tuple[Subscription, ...] = ()

    async def beat(self, *_: object) -> None: ...

    async def alive(self, _: object) -> None: ...

    async def read(self, _: object) -> Subscriptions:
        return Subscriptions(1, self.entries)

    async def routes(self, _: object, channel: str) -> list[str]:
        return self.found.get(channel, [])

    async def schema_mismatch(self, _: object) -> None: ...

    async def unserved(self, _: object) -> list[tuple[str, int]]:
        return self.open


def made(database: Any, told: list[Notice], *channels: str) -> Maintenance:
    settings = WorkerSettings(channels=channels)
    unused: Any = None
    introduction = registration(UUID(int=1), [], settings)
    activity = Activity(InFlight(), Counters())
    return Maintenance(unused, database, database, database, introduction, told.append, activity, unused)  # type: ignore[arg-type]


async def test_a_type_is_reported_for_each_channel(clock: Clock) -> None:
    """The same type may be wanted on one channel's fleet and not on another's (OBX-4, LSN-7)."""
    database, told = Database(), list[Notice]()
    database.found = {"hot": ["*/order.strange", "billing.charge"], "cold": ["*/order.strange"]}
    worker = made(database, told, "hot", "cold")
    for _ in range(3):
        await worker.run_once(None)
    assert [(each.name, each.details["channel"]) for each in told] == [
        ("events_unrouted", "hot"),
        ("events_unrouted", "cold"),
    ]
    clock.now += 3601
    await worker.run_once(None)
    assert len(told) == 4


async def test_who_subscribes_and_publishes_meanwhile_is_not_reported(clock: Clock) -> None:
    """Between the two reads of a look; nobody subscribes with an event that is there already (LSN-7)."""

    class Slow(Database):
        async def routes(self, connection: object, channel: str) -> list[str]:
            found = await super().routes(connection, channel)
            self.subscribe_and_publish()
            return found

        async def read(self, connection: object) -> Subscriptions:
            found = await super().read(connection)
            self.subscribe_and_publish()
            return found

        def subscribe_and_publish(self) -> None:
            self.entries = (Subscription("billing", "billing.charge", "order.placed"),)
            self.found = {"hot": ["*/order.placed"]}

    told = list[Notice]()
    await made(Slow(), told, "hot").run_once(None)
    assert told == []


async def test_a_misspelt_type_is_pointed_out(clock: Clock) -> None:
    """An event that no handler subscribes to may be one that some do, with a letter too few (LSN-7)."""
    database, told = Database(), list[Notice]()
    database.entries = (Subscription("billing", "billing.charge", "order.placed"),)
    database.found = {"hot": ["*/order.placd", "*/invoice.sent"]}
    await made(database, told, "hot").run_once(None)
    remedies = {each.details["event_type"]: str(each.details["remedy"]) for each in told}
    assert remedies["order.placd"].startswith("did you mean order.placed? If not, start a worker")
    assert remedies["invoice.sent"].startswith("start a worker")


async def test_an_unserved_channel_is_reported_once_an_hour(clock: Clock) -> None:
    """From the second look on, because a fleet that starts has not introduced itself at the first (OBX-4)."""
    database, told = Database(), list[Notice]()
    worker = made(database, told)
    database.open = [("outbox_hot", 0), ("outbox_late", 0)]
    await worker.run_once(None)
    assert told == []
    database.open = [("outbox_hot", 0), ("outbox_gen_3", 3)]
    for _ in range(3):
        await worker.run_once(None)
        clock.now += 10
    assert [(each.level, each.name, each.details["channel"], each.details["generation"]) for each in told] == [
        ("warning", "channel_unserved", "outbox_hot", 0),
        ("warning", "channel_unserved", "outbox_gen_3", 3),
    ]
    assert "--generation 3;" in str(told[1].details["remedy"])
    assert "holdfast generations move 3 --to 0" in str(told[1].details["remedy"])
    clock.now += 3600
    await worker.run_once(None)
    assert len(told) == 4


def test_reports_are_bounded(clock: Clock) -> None:
    """Whoever publishes ever new types fills neither the memory nor the log (OBX-4)."""
    hourly = HourlyLimit()
    assert sum(hourly.due("unrouted", str(n)) for n in range(5_000)) == 1_000
    assert len(hourly._reported) == 1_000
    clock.now += 3600
    assert hourly.due("unrouted", "4999")
    assert len(hourly._reported) == 1


@pytest.mark.parametrize(("busy", "expected"), [(0, 1), (3, 4), (10_000, 20)])
async def test_the_first_turn_lets_waiting_events_go_first(
    busy: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts with a backlog looks after the fleet a moment later, and not for ever later (P4, LSN-17)."""
    looks, counters, unused = 0, Counters(), cast("Any", None)

    async def look(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        counters.claimed += 500 if looks <= busy else 0

    monkeypatch.setattr("holdfast.worker.maintenance.asyncio.sleep", look)
    introduction, activity = registration(UUID(int=1), [], WorkerSettings()), Activity(InFlight(), counters)
    maintenance = Maintenance(unused, unused, unused, unused, introduction, lambda fact: None, activity, unused)
    await maintenance._wait_for_backlog()
    assert looks == expected
