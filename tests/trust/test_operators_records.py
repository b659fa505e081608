"""Idempotency records of applications are no operator's to write (SEC-1)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.operator import Operators
from tests.logins import OPERATOR, PRODUCER, WORKER, Logins
from tests.servers import SessionServer

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

BEGIN = "SELECT core.idempotency_begin($1, $2, '{h}', 1, '1 hour', 2000, NULL)"


@pytest.fixture
async def logins(postgres_server: SessionServer, dsn: str) -> AsyncIterator[Logins]:
    logins = Logins(postgres_server, dsn)
    logins.create()
    yield logins
    logins.drop()


async def begin(logins: Logins, role: str, scope: str) -> object:
    connection = await asyncpg.connect(logins.dsn_of(logins.names[role]))
    try:
        return await connection.fetchval(BEGIN, scope, role)
    finally:
        await connection.close()


@pytest.mark.parametrize("scope", ["http:alice", "job:jobs", "http-sha256:00", "http:operator-apis", "x"])
async def test_an_operator_answers_no_request_of_an_application(logins: Logins, scope: str) -> None:
    """An answer that is there already would be given in place of the command, and no audit would say so (SEC-1)."""
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="for applications"):
        await begin(logins, OPERATOR, scope)
    for role in (PRODUCER, WORKER):
        assert await begin(logins, role, scope) is None


@pytest.mark.parametrize("scope", ["http:operator-api/ada@example.com", "operator-console/log-out"])
async def test_an_operator_has_records_of_its_own(logins: Logins, scope: str) -> None:
    """Of requests to the HTTP API, and of log-outs from the console (SEC-1)."""
    for role in (PRODUCER, WORKER):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="for operators"):
            await begin(logins, role, scope)
    assert await begin(logins, OPERATOR, scope) is None


async def test_only_operators_know_the_secret_of_their_requests(logins: Logins) -> None:
    """Who knew it could tell what an operator has asked for, from the hash that is kept (SEC-1)."""
    for role in (PRODUCER, WORKER):
        connection = await asyncpg.connect(logins.dsn_of(logins.names[role]))
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetchval("SELECT core.operator_secret()")
        await connection.close()
    async with Operators(logins.dsn_of(logins.names[OPERATOR])) as operators:
        first = await operators.secrets()
        assert first == await operators.secrets()
        assert len(set(first.values())) == 2 and len(first[2]) == 64


async def test_an_operator_that_is_a_producer_too_may_write_them(
    postgres_server: SessionServer, logins: Logins
) -> None:
    """A small installation has one login for all (SEC-1)."""
    postgres_server.admin().execute(f"GRANT {PRODUCER} TO {logins.names[OPERATOR]}")
    assert await begin(logins, OPERATOR, "http:alice") is None
