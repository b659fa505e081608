"""An application with Django: the default connection, and one by its alias."""

from __future__ import annotations

from typing import assert_type
from uuid import UUID

from django.db import connection, connections, transaction

from holdfast import EventEnvelope, NewEvent, Publisher

publisher = Publisher("shop")


def view() -> None:
    with transaction.atomic():
        assert_type(publisher.publish(connection, "order.placed", {"n": 1}, delay=60), EventEnvelope)
        assert_type(publisher.publish_many(connections["other"], [NewEvent("order.placed", {})]), list[UUID])
        assert_type(publisher.cancel(connection, "k-1"), bool)
        assert_type(publisher.reschedule(connection, "k-1", delay=60), bool)
