"""Logins of every role, for the messages that a login without a right gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.logins import Logins
from tests.servers import SessionServer


@pytest.fixture
def logins(postgres_server: SessionServer, dsn: str) -> Iterator[Logins]:
    made = Logins(postgres_server, dsn)
    made.create()
    try:
        yield made
    finally:
        made.drop()
