"""The page about renaming a handler, typed from top to bottom while a producer goes on publishing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from holdfast import Publisher
from tests.docs.support import ROOT, blocks
from tests.worker.support import until

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(240), pytest.mark.slow]

OLD, NEW = "billing.charge", "billing.charge_card"
PAGE = ROOT / "docs" / "runbooks" / "renaming-a-handler.md"

# Some events fail for good, some once, and one is to be tried again in an hour.
HANDLERS = """
from datetime import timedelta
from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Retry, TerminalHandlerError

registry = HandlerRegistry()

@registry.handler("order.placed", name="{name}")
async def charge(event: EventEnvelope, context: HandlerContext) -> Retry | None:
    if "{name}" == "billing.charge":
        if event.payload["kind"] == "broken":
            raise TerminalHandlerError("there is no card")
        if event.payload["kind"] == "later":
            return Retry(3600.0, reason="the bank is closed")
    return None
"""


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> dict[str, str]:
    for module, name in (("old", OLD), ("new", NEW)):
        (tmp_path / f"{module}.py").write_text(HANDLERS.replace("{name}", name))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOLDFAST_DSN": dsn, "PWD": str(tmp_path)}


@contextmanager
def working(shop: dict[str, str], module: str) -> Iterator[None]:
    command = ["holdfast", "worker", f"{module}:registry", "--poll-interval", "0.5", "--name", module]
    worker = subprocess.Popen(command, cwd=shop["PWD"], env=shop, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(30)


async def typed(lines: str, shop: dict[str, str]) -> str:
    run = await asyncio.to_thread(
        subprocess.run, ["/bin/bash", "-eux", "-c", lines], cwd=shop["PWD"], env=shop, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.stdout


async def publishing(dsn: str, stop: asyncio.Event) -> int:
    """Publish one event after the other until it is stopped; how many."""
    connection, count = await asyncpg.connect(dsn), 0
    try:
        while not stop.is_set():
            async with connection.transaction():
                await Publisher("shop").publish(connection, "order.placed", {"kind": "plain"})
            count += 1
            await asyncio.sleep(0.05)
    finally:
        await connection.close()
    return count


def is_named(finding: dict[str, str]) -> bool:
    """Whether a finding of the doctor is about the old name."""
    return OLD in finding["what"].replace(",", " ").split()


@pytest.mark.nightly("page that is typed")
async def test_the_page(dsn: str, conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """No event is lost, none is handled by both, and at the end the doctor says nothing of the old name (OPS-4)."""
    text = "\n".join(block.text for block in blocks("sh", pages=[PAGE]))
    before, _, rest = text.partition("# what is due is handled\n")
    drained, _, after = rest.partition("# the new workers are started\n")
    assert drained and after and "#" not in before + drained + after
    stop = asyncio.Event()
    open_of_old = f"SELECT FROM core.outbox WHERE settled_at IS NULL AND handler_name = '{OLD}'"
    due = f"SELECT NOT EXISTS ({open_of_old} AND available_at < now())"
    with working(shop, "old"):
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.subscriptions"), within=30, what="subscribed")
        async with conn.transaction():
            for kind in ("broken", "later", "plain"):
                await Publisher("shop").publish(conn, "order.placed", {"kind": kind})
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), within=30, what="one has failed")
        producer = asyncio.create_task(publishing(dsn, stop))
        printed = await typed(before, shop)
        assert "1 event replayed" in printed
        assert f"{OLD}: 1 subscription ended" in printed
        assert f"holdfast events cancel --handler {OLD}" in printed
        await until(lambda: conn.fetchval(due), within=30, what="the old name owes nothing that is due")
        await typed(drained, shop)
    with working(shop, "new"):
        started = f"SELECT count(*) > 20 FROM core.event_handled WHERE handler_name = '{NEW}'"
        await until(lambda: conn.fetchval(started), within=60, what="the new name handles events")
        printed = await typed(after, shop)
        assert OLD in printed
        report = json.loads(await typed("holdfast doctor --only health --json", shop))
        assert [f for f in report["findings"] if is_named(f)] == []
        stop.set()
        published = await producer
        open_ = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"
        await until(lambda: conn.fetchval(open_), within=60, what="everything is settled")
    handled = await conn.fetch("SELECT idempotency_key, handler_name FROM core.event_handled")
    assert max(Counter(row["idempotency_key"] for row in handled).values()) == 1
    assert len(handled) == published + 1
    rows = await conn.fetch("SELECT failure_reason FROM core.outbox WHERE deleted_at IS NOT NULL ORDER BY 1")
    assert [row[0] for row in rows] == ["cancelled", "retry_terminal"]


async def test_the_new_name_was_deployed_first(dsn: str, conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """Retiring the old name and dropping what waits for it clears what the doctor reported (OPS-4)."""
    await conn.execute("SELECT core.subscribe('billing', $1, '{order.placed}')", OLD)
    with working(shop, "new"):
        subscribed = f"SELECT count(*) = 1 FROM core.subscriptions WHERE handler_name = '{NEW}'"
        await until(lambda: conn.fetchval(subscribed), within=30, what="the new name is subscribed")
        async with conn.transaction():
            for _ in range(3):
                await Publisher("shop").publish(conn, "order.placed", {"kind": "plain"})
        split = f"SELECT count(*) = 3 FROM core.outbox WHERE handler_name = '{OLD}' AND status = 'pending'"
        await until(lambda: conn.fetchval(split), within=30, what="three deliveries wait for the old name")

        async def codes() -> set[str]:
            report = json.loads(await typed("holdfast doctor --only health --json || true", shop))
            return {f["code"] for f in report["findings"] if is_named(f)}

        assert await codes() == {"handler-unserved"}
        printed = await typed(f"holdfast handlers retire {OLD} --yes", shop)
        assert "3 events still wait for it" in printed
        await typed(f"holdfast events cancel --handler {OLD} --yes", shop)
        assert await codes() == set()
        listed = json.loads(await typed("holdfast handlers list --json", shop))
        assert {each["handler_name"]: each["open"] for each in listed} == {OLD: 0, NEW: 0}
