"""Settling over a connection that ends: what was handled is settled, and not left to its lease."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Fact, Notice
from holdfast.worker import outage
from holdfast.worker.outage import Outages
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups


class Line:
    """A connection, and the one that is used in its place once it has been dropped."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.ended = ends, False

    def is_closed(self) -> bool:
        return self.ended

    async def use(self) -> Line:
        return self

    def drop(self) -> None:
        self.ends = self.ended = False


class Deliveries:
    """Stands in for the statements: the first one meets an error of the driver."""

    def __init__(self) -> None:
        self.settled: list[UUID] = []
        self.tripped = False

    async def deliver(self, line: Line, batch: Sequence[Any], *, record: bool) -> list[UUID]:
        if not self.tripped:
            self.tripped, line.ended = True, line.ends
            raise AttributeError("'NoneType' object has no attribute 'bind_execute'")
        self.settled += [each.id for each in batch]
        return []


@pytest.mark.parametrize("ends", [True, False])
async def test_an_error_of_the_driver_on_a_connection_that_ended(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LSN-3: it is an outage, and the batch is sent again; on a living connection it is a refusal, row by row."""
    monkeypatch.setattr(outage, "FIRST_WAIT", 0.001)
    facts: list[Fact] = []
    deliveries, line = Deliveries(), Line(ends)
    in_flight = SimpleNamespace(drop=lambda *_: None)
    connections = SimpleNamespace(settle=line)
    parts = (WorkerSettings(), connections, deliveries, in_flight, Counters(), facts.append, Outages(facts.append))
    settler = Settler(Shared(*cast(Any, parts)), Wakeups())
    delivery = SimpleNamespace(id=uuid4(), payload="{}", handler=SimpleNamespace(name="shop.pack"))
    settler.deliver(cast(Any, delivery))
    monkeypatch.setattr("holdfast.worker.settler._delivery", lambda settlement: settlement)
    await settler.flush()
    names = [fact.name for fact in facts if isinstance(fact, Notice)]
    if ends:
        assert deliveries.settled == [delivery.id]
        assert names[0] == "database_unavailable"
    else:
        assert (deliveries.settled, names) == ([], ["settle_refused"])
