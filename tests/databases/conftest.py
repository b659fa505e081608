"""Databases beside `dsn`.

other_dsn   a second database with Holdfast's schema
other       an asyncpg connection to it
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from tests.servers import SessionServer, database_of_one_test


@pytest.fixture
def other_dsn(request: pytest.FixtureRequest, postgres_server: SessionServer) -> Iterator[str]:
    yield from database_of_one_test(request, postgres_server)


@pytest.fixture
async def other(other_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(other_dsn)
    yield connection
    await connection.close()
