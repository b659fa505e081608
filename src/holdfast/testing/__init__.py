"""Tests of what an application does with Holdfast: a pytest plugin, and helpers without a database.

    def test_an_order_is_confirmed(outbox):                 # a real Postgres, clean for each test
        place_order("o-1")
        outbox.assert_published("order.placed", {"order_id": "o-1"})
        outbox.drain()                                      # as a worker would, with retries and delays, at once
        outbox.assert_handled("mail.confirm_order")

`make_event` and `run_handler` need no database, and `MemoryOutbox` is an outbox without a server: see docs/testing.md.
"""

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.testing.assertions import OutboxAssertions
    from holdfast.testing.contract import OutboxContract
    from holdfast.testing.events import assert_recorded, make_event, recorded_events
    from holdfast.testing.memory import MemoryOutbox
    from holdfast.testing.outbox import AsyncOutbox, Outbox
    from holdfast.testing.records import DeliveryRecord, Drained, PublishedEvent, RequestRecord
    from holdfast.testing.running import run_handler
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncOutbox": "holdfast.testing.outbox",
            "DeliveryRecord": "holdfast.testing.records",
            "Drained": "holdfast.testing.records",
            "MemoryOutbox": "holdfast.testing.memory",
            "Outbox": "holdfast.testing.outbox",
            "OutboxAssertions": "holdfast.testing.assertions",
            "OutboxContract": "holdfast.testing.contract",
            "PublishedEvent": "holdfast.testing.records",
            "RequestRecord": "holdfast.testing.records",
            "assert_recorded": "holdfast.testing.events",
            "make_event": "holdfast.testing.events",
            "recorded_events": "holdfast.testing.events",
            "run_handler": "holdfast.testing.running",
        },
    )

__all__ = [
    "AsyncOutbox",
    "DeliveryRecord",
    "Drained",
    "MemoryOutbox",
    "Outbox",
    "OutboxAssertions",
    "OutboxContract",
    "PublishedEvent",
    "RequestRecord",
    "assert_recorded",
    "make_event",
    "recorded_events",
    "run_handler",
]
