"""LSN-2 behind a real pgbouncer in transaction mode: the worker says so once, and everything works by polling."""

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher
from tests.servers import used
from tests.worker.support import Facts, drained, running, until

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIGURATION = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 5
max_client_conn = 1000
{more}
"""
POOLS = {
    "as it comes": "",
    "reset each time": "server_reset_query = DISCARD ALL\nserver_reset_query_always = 1",
}


@pytest.fixture
async def pooled_dsn(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> AsyncIterator[str]:
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not on this machine; on Debian: apt-get install pgbouncer")
    parts = urlsplit(dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = tmp_path / "pgbouncer.ini"
    configuration.write_text(
        CONFIGURATION.format(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            password=parts.password,
            listen=port,
            more=POOLS[getattr(request, "param", "as it comes")],
        )
    )
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # it refuses to run as root
    above = [path for path in tmp_path.parents if path.name.startswith(("pytest-", "popen-"))]
    for path in (configuration, tmp_path, *above) if account else ():
        path.chmod(0o755)
    process = subprocess.Popen(
        [PGBOUNCER, "-q", str(configuration)], user=account.pw_uid if account else None, stderr=subprocess.DEVNULL
    )
    address = f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"
    try:

        async def answers() -> bool:
            try:
                connection = await asyncpg.connect(address, statement_cache_size=0)
            except (OSError, asyncpg.PostgresError):
                return False
            await connection.close()
            return True

        await until(answers, what="pgbouncer answers")
        used("pgbouncer in transaction mode")
        yield address
    finally:
        process.kill()
        process.wait()


async def test_a_worker_behind_a_transaction_pooler_polls(dsn: str, pooled_dsn: str, conn: asyncpg.Connection) -> None:
    """One error that names the cause, no lock or setting left in anybody's session, nothing lost (LSN-2, OBX-7)."""
    await conn.execute("CREATE TABLE ledger (event_id text PRIMARY KEY)")
    registry, facts, publisher = HandlerRegistry(), Facts(), Publisher("shop")
    outside: list[str] = []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        outside.append(event.payload["n"])

    @registry.handler("order.shipped", name="ledger.record")
    async def record(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger VALUES ($1)", event.payload["n"])

    async with running(pooled_dsn, registry, facts, poll_interval=0.2) as worker:
        for n in range(50):
            async with conn.transaction():
                await publisher.publish(conn, "order.placed", {"n": str(n)})
                await publisher.publish(conn, "order.shipped", {"n": str(n)})
            if n % 10 == 0:
                await asyncio.sleep(0.1)  # let it poll in between: statements move between sessions
        await drained(conn)
        assert await conn.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        assert worker.health().ready and worker.health().listener == "pooled"
    assert sorted(outside, key=int) == [str(n) for n in range(50)]
    assert await conn.fetchval("SELECT count(*) FROM ledger") == 50
    (notice,) = facts.notices("listener_pooled")
    assert "pooler" in str(notice.details["cause"]) and "listen_dsn" in str(notice.details["remedy"])
    assert facts.notices("database_unavailable") == []


async def test_a_direct_listening_connection_restores_the_bell(
    dsn: str, pooled_dsn: str, conn: asyncpg.Connection
) -> None:
    """listen_dsn may bypass the pooler, and then nothing has to wait for the polling interval (OBX-7)."""
    registry, arrived = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        arrived.set()

    async with running(pooled_dsn, registry, poll_interval=3600, listen_dsn=dsn) as worker:
        await until(lambda: worker.listening, what="the worker listens")
        async with conn.transaction():
            await Publisher("shop").publish(conn, "order.placed", {})
        async with asyncio.timeout(5):
            await arrived.wait()
        await drained(conn)


@pytest.mark.trust
@pytest.mark.parametrize("pooled_dsn", POOLS, indirect=True)
async def test_hundreds_of_producers_share_five_sessions(pooled_dsn: str, conn: asyncpg.Connection) -> None:
    """Each publishes and commits, some give up; every commit is one event, and nothing else is (PUB-1, T26)."""
    registry, seen = HandlerRegistry(), list[int]()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])

    publisher, opened = Publisher("shop"), asyncio.Semaphore(50)

    async def produce(n: int) -> None:
        async with opened:  # of the handshakes only: all of them are connected together
            producer = await asyncpg.connect(pooled_dsn, statement_cache_size=0)
        connected.append(n)
        await everyone.wait()
        try:
            for _ in range(3):
                transaction = producer.transaction()
                await transaction.start()
                await publisher.publish(producer, "order.placed", {"n": n})
                await (transaction.rollback() if n % 5 == 0 else transaction.commit())
        finally:
            await producer.close()

    connected, everyone = list[int](), asyncio.Event()
    producing = [asyncio.create_task(produce(n)) for n in range(400)]
    await until(lambda: len(connected) == 400 or any(task.done() for task in producing), what="all are connected")
    everyone.set()
    await asyncio.gather(*producing)
    async with running(pooled_dsn, registry, poll_interval=0.2):
        await drained(conn)
    assert sorted(seen) == sorted([n for n in range(400) if n % 5] * 3)
