"""A test case for Django: commits are real, so what they publish can be delivered, and cleaning up takes milliseconds.

class OrderTests(HoldfastTestCase):
    registry = registry

    def test_an_order_is_published(self):
        self.client.post("/orders", {"sku": "a"})
        self.outbox.assert_published("order.placed", {"sku": "a"})
        self.outbox.drain()
"""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import quote

from holdfast.installing import require_extra

require_extra("django", "django", "psycopg")

from asgiref.sync import sync_to_async
from django.db import connections
from django.test import TransactionTestCase

from holdfast.handlers import HandlerRegistry
from holdfast.settings import WorkerSettings
from holdfast.testing.databases import TestDatabase, keep_as_it_is, prepare
from holdfast.testing.loop import kit_loop
from holdfast.testing.outbox import Outbox

__all__ = ["HoldfastSchema", "HoldfastTestCase"]

_prepared: dict[str, TestDatabase] = {}


class HoldfastSchema:
    """Puts Holdfast's schema and clock into the database of a `TestCase`: `class OrderTests(HoldfastSchema, TestCase)`.

    What a test publishes is rolled back with the rest of it, and delivered to nobody.
    """

    holdfast_schema: ClassVar[str] = "core"
    holdfast_using: ClassVar[str] = "default"

    @classmethod
    def setUpClass(cls) -> None:
        cls._database()
        super().setUpClass()  # type: ignore[misc]

    @classmethod
    def _database(cls) -> TestDatabase:
        """Return the database, with Holdfast's schema and a clock to move; the first test of a run prepares it."""
        address = _address(connections[cls.holdfast_using].settings_dict)
        if address not in _prepared:
            kit_loop().run(prepare(address, (), cls.holdfast_schema))
            kit_loop().run(keep_as_it_is(address, cls.holdfast_schema))
            _prepared[address] = TestDatabase.existing(address, cls.holdfast_schema)
        return _prepared[address]


class HoldfastTestCase(HoldfastSchema, TransactionTestCase):  # type: ignore[misc]
    """A `TransactionTestCase` whose database has an outbox. The database is the one that Django's runner has made."""

    registry: ClassVar[HandlerRegistry | None] = None
    worker_settings: ClassVar[WorkerSettings | None] = None
    outbox: Outbox

    def run(self, result: Any = None) -> Any:
        self.outbox = Outbox(self._database(), self.registry, self.worker_settings)
        return super().run(result)

    def _fixture_teardown(self) -> None:
        """Remove the rows that the test has written, in place of Django's flush."""
        problem = kit_loop().run(self._database().reset())
        if problem:
            self.fail(problem)
        if self.outbox.faults_left:
            self.fail(f"no delivery has met the fault: {', '.join(self.outbox.faults_left)}")

    @classmethod
    def tearDownClass(cls) -> None:
        # The runner drops the database when the last class is done, and it must have no sessions then.
        kit_loop().run(Outbox.warm.close())
        kit_loop().run(_close_connections_of_the_loop())
        for database in _prepared.values():
            kit_loop().run(database.disconnect())
        super().tearDownClass()


async def _close_connections_of_the_loop() -> None:
    """Close those that asynchronous handlers have opened, in the thread of Django's asynchronous ORM."""
    await sync_to_async(connections.close_all)()


def _address(settings: dict[str, Any]) -> str:
    """Return the address of a database that Django knows."""
    login = quote(str(settings["USER"]), safe="")
    if settings["PASSWORD"]:
        login += ":" + quote(str(settings["PASSWORD"]), safe="")
    host, port, name = settings["HOST"] or "localhost", settings["PORT"] or 5432, quote(str(settings["NAME"]))
    if str(host).startswith("/"):
        return f"postgresql://{login}@/{name}?host={quote(str(host), safe='')}&port={port}"
    return f"postgresql://{login}@{host}:{port}/{name}"
