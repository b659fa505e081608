"""Connections as pyright sees them without stubs of their libraries: it reads the libraries' source."""

from __future__ import annotations

from typing import Any, assert_type

from holdfast import EventEnvelope, Publisher

publisher = Publisher("shop")


class ConnectionProxy:
    """`django.db.connection`, as Django's source has it."""

    def __getattr__(self, item: str) -> Any: ...
    def __contains__(self, key: str) -> bool: ...


class PoolConnectionProxy:
    """A connection of a pool, as asyncpg's source has it."""

    def __getattr__(self, attr: str) -> Any: ...
    def _detach(self) -> object: ...


async def inferred(of_django: ConnectionProxy, of_asyncpg: PoolConnectionProxy) -> None:
    assert_type(publisher.publish(of_django, "order.placed", {}), EventEnvelope)
    assert_type(await publisher.publish(of_asyncpg, "order.placed", {}), EventEnvelope)
