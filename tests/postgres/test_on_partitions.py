"""Every promise of the functions that claim, settle, route and replay holds on a partitioned outbox (OBX-6).

The tests are those of tests/postgres, on a database whose outbox is partitioned by day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.postgres.conftest import outbox
from tests.postgres.partitioned import partition
from tests.postgres.test_delivery_functions import *  # noqa: F403
from tests.postgres.test_replay import *  # noqa: F403
from tests.postgres.test_routing_functions import *  # noqa: F403
from tests.servers import SessionServer

__all__ = ["outbox"]

pytestmark: list[pytest.MarkDecorator] = []  # not those of the modules above: the newest Postgres is enough here


@pytest.fixture(scope="module")
def shared_dsn(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    try:
        asyncio.run(partition(postgres_server.dsn(name)))
        yield postgres_server.dsn(name)
    finally:
        postgres_server.drop(name)
