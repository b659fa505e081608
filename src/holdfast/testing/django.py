"""Test cases for Django. In a plain `TestCase` nothing is committed; in a `HoldfastTestCase` commits are real.

class OrderTests(OutboxMixin, TestCase):       # with the application of Holdfast in INSTALLED_APPS
    registry = registry

    def test_an_order_is_published(self):
        self.client.post("/orders", {"sku": "a"})
        self.outbox.assert_published("order.placed", {"sku": "a"})
        self.outbox.drain()                    # calls handlers in the transaction of the test

A `HoldfastTestCase` has the same, with a worker: retries, dead letters, crashes, a clock to move.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from holdfast.installing import require_extra

require_extra("django", "django", "psycopg")

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.test import TransactionTestCase

from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry
from holdfast.postgres.addresses import django_address
from holdfast.settings import WorkerSettings
from holdfast.testing.databases import TestDatabase, keep_as_it_is, prepare, without_schema
from holdfast.testing.django_transaction import TransactionOutbox
from holdfast.testing.loop import kit_loop
from holdfast.testing.outbox import Outbox

__all__ = ["HoldfastSchema", "HoldfastTestCase", "OutboxMixin", "TransactionOutbox"]

_NO_SUPERUSER = (
    "use a superuser of a server for tests; a TestCase with OutboxMixin needs none where holdfast.integrations.django "
    "is installed"
)
_prepared: dict[str, TestDatabase] = {}


class OutboxMixin:
    """Gives a `TestCase` the `outbox` of its transaction: `class OrderTests(OutboxMixin, TestCase)`.

    The database has Holdfast's schema because the application `holdfast.integrations.django` is installed. What a test
    publishes is rolled back with the rest of it.
    """

    registry: ClassVar[HandlerRegistry | None] = None
    holdfast_schema: ClassVar[str] = "core"
    holdfast_using: ClassVar[str] = "default"

    @cached_property
    def outbox(self) -> Any:
        """The outbox of the test's transaction."""
        return TransactionOutbox(self.registry, self.holdfast_using, self.holdfast_schema)


class HoldfastSchema(OutboxMixin):
    """Puts Holdfast's schema and a movable clock into the database of a project without Holdfast's application."""

    @classmethod
    def setUpClass(cls) -> None:
        cls._database()
        super().setUpClass()  # type: ignore[misc]

    @classmethod
    def _database(cls) -> TestDatabase:
        """Return the database, with Holdfast's schema and a clock to move; the first test of a run prepares it."""
        connection = connections[cls.holdfast_using]
        address = django_address(connection.settings_dict)
        if address not in _prepared:
            _require_test_database(connection)
            kit_loop().run(without_schema(address, cls.holdfast_schema))
            kit_loop().run(prepare(address, (), cls.holdfast_schema, field="DATABASES", remedy=_NO_SUPERUSER))
            kit_loop().run(keep_as_it_is(address, cls.holdfast_schema))
            _prepared[address] = TestDatabase.existing(address, cls.holdfast_schema)
        return _prepared[address]


def _require_test_database(connection: Any) -> None:
    """Refuse a database that no runner has made for tests: its schema would be dropped."""
    name, own = str(connection.settings_dict["NAME"]), connection.settings_dict["TEST"]["NAME"]
    if name != own and not name.startswith(f"{own}_" if own else TEST_DATABASE_PREFIX):
        problem = f"has {name} for {connection.alias!r}, which is not the name of a database for tests"
        raise ConfigurationError("DATABASES", problem, "run it with manage.py test, or with pytest-django")


class HoldfastTestCase(HoldfastSchema, TransactionTestCase):  # type: ignore[misc]
    """A `TransactionTestCase` whose database has an outbox. The database is the one that Django's runner has made."""

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
        # The runner drops the database after the last class, which fails while there are sessions.
        kit_loop().run(Outbox.warm.close())
        kit_loop().run(_close_connections_of_the_loop())
        for database in _prepared.values():
            kit_loop().run(database.disconnect())
        super().tearDownClass()


async def _close_connections_of_the_loop() -> None:
    """Close the connections that asynchronous handlers have opened, in the thread of Django's asynchronous ORM."""
    await sync_to_async(connections.close_all)()
