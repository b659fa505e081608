"""A worker that was made before its process was forked, as preloading servers do."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import subprocess
import sys

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker
from holdfast.errors import ConfigurationError
from tests.worker.support import drained, publish_many, until

pytestmark = pytest.mark.trust

EVENTS = 20
registry = HandlerRegistry()


@registry.handler("order.placed", name="billing.charge")
async def charge(event: EventEnvelope) -> None: ...


# As gunicorn does with --preload: the application, and in it the worker, is made once, and served by its children.
PREFORK = """
import asyncio, os, sys
from holdfast import Worker
from tests.worker.test_forked_workers import registry

worker = Worker(sys.argv[1], registry, observers=())

async def serve():
    async with worker:
        os.write(1, f"{worker.id} {os.getpid()}\\n".encode())  # in one piece
        await asyncio.to_thread(os.read, 0, 1)

children = []
for _ in range(3):
    child = os.fork()
    if not child:
        asyncio.run(serve())
        os._exit(0)
    children.append(child)
print(worker.id, os.getpid(), flush=True)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""
REFUSED = """
import asyncio, os, sys
from holdfast import Worker
from holdfast.errors import ConfigurationError
from tests.worker.test_forked_workers import registry

worker = Worker(sys.argv[1], registry, observers=())
asyncio.run(worker.drain())
child = os.fork()
if not child:
    try:
        asyncio.run(worker.run())
    except ConfigurationError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


async def test_each_forked_process_is_a_worker_of_its_own(dsn: str, conn: asyncpg.Connection) -> None:
    """Three children of one preloaded program have three ids and three registrations (LSN-4, T18)."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PREFORK, dsn, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdin and program.stdout
    async with asyncio.timeout(20):
        lines = [(await program.stdout.readline()).decode().split() for _ in range(4)]
        await publish_many(conn, "order.placed", EVENTS)
        await drained(conn)
        await until(lambda: conn.fetchval("SELECT count(*) = 3 FROM core.workers"), what="three registrations")
        program.stdin.close()
        assert await program.wait() == 0
    assert len({identity for identity, _ in lines}) == 4
    registered = await conn.fetch("SELECT id::text, pid FROM core.workers")
    children = {(identity, int(pid)) for identity, pid in lines if int(pid) != program.pid}
    assert {tuple(each) for each in registered} == children
    claimed = await conn.fetch("SELECT DISTINCT claimed_by::text FROM core.outbox")
    assert {each[0] for each in claimed} <= {identity for identity, _ in children}


async def test_worker_that_ran_before_the_fork_is_refused(dsn: str) -> None:
    """Its connections belong to the parent (LSN-4, T18)."""
    program = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", REFUSED, dsn], capture_output=True, text=True, timeout=20, check=False
    )
    assert program.returncode == 0, program.stderr
    assert "was started before this process was forked" in program.stdout


def test_worker_is_not_sent_to_a_spawned_process() -> None:
    """Multiprocessing with spawn pickles its arguments; the error says what to do instead (LSN-4, T18)."""
    worker = Worker("postgresql://nobody@127.0.0.1:1/nothing", registry)
    with pytest.raises(ConfigurationError, match="make it there"):
        pickle.dumps(worker)
    process = multiprocessing.get_context("spawn").Process(target=print, args=(worker,))
    with pytest.raises(ConfigurationError, match="cannot be sent to another process"):
        process.start()
