"""Every command of the runbooks, in order, as whoever is on call would type it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import asyncpg
import pytest

from holdfast import Publisher
from holdfast.embedded import find_binaries
from tests.docs.support import ROOT, blocks
from tests.worker.support import until

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
typed_whole = pytest.mark.nightly("page that is typed")

BROKEN = """
from pathlib import Path
from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, TerminalHandlerError

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=1))
async def charge(event: EventEnvelope) -> None:
    if "card" not in event.payload:
        raise TerminalHandlerError("there is no card")
    if not Path("fixed").exists():
        raise RuntimeError(f"terminal {event.payload['order_id']} refuses")
"""
# What the page leaves to other people.
MEANWHILE = {
    "# the fix is deployed": "touch fixed",
    "# the application publishes": f"{sys.executable} publish.py",
    "# everything is delivered": f"{sys.executable} wait.py",
}
PUBLISH = """
import asyncio, os, asyncpg
from holdfast import Publisher
from holdfast.embedded import find_binaries

async def main():
    connection = await asyncpg.connect(os.environ["HOLDFAST_DSN"])
    async with connection.transaction():
        for n in range(20):
            await Publisher("shop").publish(connection, "order.placed", {"order_id": n, "card": "1"})
    await connection.close()

asyncio.run(main())
"""
WAIT = """
import asyncio, os, asyncpg

async def main():
    connection = await asyncpg.connect(os.environ["HOLDFAST_DSN"])
    async with asyncio.timeout(30):
        while await connection.fetchval("SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"):
            await asyncio.sleep(0.05)
    await connection.close()

asyncio.run(main())
"""


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "handlers.py").write_text(BROKEN)
    (tmp_path / "publish.py").write_text(PUBLISH)
    (tmp_path / "wait.py").write_text(WAIT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOLDFAST_DSN": dsn, "PWD": str(tmp_path)}


async def typed(page: str, shop: dict[str, str], replace: Mapping[str, str] | None = None) -> str:
    """Run the commands of a page in one shell that ends at the first one that fails; returns what was printed."""
    lines = "\n".join(block.text for block in blocks("sh", pages=[ROOT / "docs" / "runbooks" / page])).splitlines()
    script = "\n".join(MEANWHILE.get(line, line) for line in lines)
    for text, other in (replace or {}).items():
        script = script.replace(text, other)
    unknown = [line for line in lines if line.startswith("#") and line not in MEANWHILE]
    assert unknown == []
    run = await asyncio.to_thread(
        subprocess.run, ["/bin/bash", "-eux", "-c", script], cwd=shop["PWD"], env=shop, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.stdout


async def publish(conn: asyncpg.Connection, *payloads: dict[str, object]) -> None:
    async with conn.transaction():
        for payload in payloads:
            await Publisher("shop").publish(conn, "order.placed", payload)


@typed_whole
async def test_dead_letters(dsn: str, conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """From the page to nothing left, and each step in the audit (OPS-4, DLQ-4, DLQ-5)."""
    command = ["holdfast", "worker", "app.handlers:registry", "--poll-interval", "0.5"]
    worker = subprocess.Popen(command, cwd=shop["PWD"], env=shop, stderr=subprocess.DEVNULL)
    try:
        await publish(conn, *({"order_id": n, "card": "1"} for n in range(30)), {"order_id": 7}, {"order_id": 8})
        failed = "SELECT count(*) = 32 FROM core.failed"
        await until(lambda: conn.fetchval(failed), within=30, what="everything has failed")
        printed = await typed("dead-letters.md", shop)
    finally:
        worker.terminate()
        worker.wait(20)
    assert "the card terminal refuses" in printed
    counts = await conn.fetch("SELECT status, deleted_at IS NOT NULL AS aside, count(*) FROM core.outbox GROUP BY 1, 2")
    # The thirty, and the corrected one; the original of it and the discarded one are set aside.
    assert {tuple(row) for row in counts} == {("delivered", False, 31), ("failed", True, 2)}
    actions = [
        row[0] for row in await conn.fetch("SELECT action FROM core.audit WHERE action NOT LIKE 'plan.%' ORDER BY id")
    ]
    assert actions == ["note", "replay", "edit", "discard", "restore", "discard"]


@typed_whole
async def test_event_delivery(conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """Also the drill: writes are consistent without a worker, and delivered when one is there (OPS-4)."""
    Path(shop["PWD"], "fixed").touch()
    await publish(conn, {"order_id": 1, "card": "1"}, {"order_id": 2, "card": "1"})
    await conn.execute("UPDATE core.outbox SET generation = 12")
    printed = await typed("event-delivery.md", shop)
    # What the drill publishes, and of the two that nobody served the one that was moved; the other was cancelled.
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 21
    assert await conn.fetchval("SELECT array_agg(failure_reason) FROM core.outbox WHERE status <> 'delivered'") == [
        "cancelled"
    ]
    assert "when_idle" in printed


@typed_whole
async def test_generations(conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """A deployment without workers is given up, what waits is moved; the drill does it all again (OPS-4, GEN-3)."""
    Path(shop["PWD"], "fixed").touch()
    command = ["holdfast", "worker", "app.handlers:registry", "--name", "serving"]
    worker = subprocess.Popen(command, cwd=shop["PWD"], env=shop, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.workers"), what="it serves generation 0")
        await conn.execute("INSERT INTO core.deployments (generation) VALUES (7)")
        await publish(conn, {"order_id": 1, "card": "1"}, {"order_id": 2, "card": "1"})
        assert await conn.fetchval("SELECT array_agg(DISTINCT generation) FROM core.outbox") == [7]
        printed = await typed("generations.md", shop)
    finally:
        worker.terminate()
        worker.wait(20)
    assert "2 events moved from generation 7 to 0" in printed
    assert "20 events moved from generation 8 to 0" in printed
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 22


@typed_whole
async def test_scaling_out(conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """More workers, fewer workers, a channel of its own; the drill loses nothing (OPS-4)."""
    Path(shop["PWD"], "fixed").touch()
    await typed("scaling-out.md", shop)
    assert await conn.fetch("SELECT status, count(*) FROM core.outbox GROUP BY 1") == [("delivered", 40)]
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 40


@typed_whole
async def test_backup_and_restore(conn: asyncpg.Connection, shop: dict[str, str], empty_dsn: str) -> None:
    """What was open in the backup is delivered from the restored database, and what was handled is not (OPS-4)."""
    Path(shop["PWD"], "fixed").touch()
    await publish(conn, {"order_id": 1, "card": "1"}, {"order_id": 2, "card": "1"})
    await conn.execute("""
        UPDATE core.outbox SET status = 'delivered', settled_at = now(), delivered_at = now()
        WHERE payload->>'order_id' = '1'
    """)
    tools = find_binaries().bin_dir
    await typed(
        "backup-and-restore.md", shop | {"PATH": f"{tools}{os.pathsep}{shop['PATH']}", "RESTORED_DSN": empty_dsn}
    )
    restored = await asyncpg.connect(empty_dsn)
    rows = await restored.fetch("SELECT payload->>'order_id', status, attempts FROM core.outbox ORDER BY 1")
    assert [tuple(row) for row in rows] == [("1", "delivered", 0), ("2", "delivered", 1)]
    await restored.close()
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'pending'") == 1, (
        "the original is as it was"
    )


@typed_whole
async def test_alerts(conn: asyncpg.Connection, shop: dict[str, str]) -> None:
    """What each alert says to look at, and a drill whose outage is seen in the metrics (OBS-3, OPS-4)."""
    Path(shop["PWD"], "fixed").touch()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as found:
        port = found.getsockname()[1]
    printed = await typed("alerts.md", shop, replace={"9464": str(port)})
    assert "holdfast_workers_living 0.0" in printed and "holdfast_workers_living 1.0" in printed
    assert 'outcome="delivered"} 20.0' in printed
    assert await conn.fetch("SELECT status, count(*) FROM core.outbox GROUP BY 1") == [("delivered", 20)]


def test_every_runbook_has_a_drill() -> None:
    """Each page ends with one, and a test types it (OPS-4)."""
    pages = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
    assert {page.stem for page in pages} >= {
        "event-delivery", "dead-letters", "generations", "scaling-out", "backup-and-restore",
    }  # fmt: skip
    tests = Path(__file__).read_text()
    for page in pages:
        assert "--database NAME" in page.read_text().partition("\n## ")[0], page.name
        if page.name == "renaming-a-handler.md":
            continue  # is one whole: tests/docs/test_renaming.py types it from its first line to its last
        assert "\n## Drill" in page.read_text(), f"{page.name} has no drill"
        assert f'"{page.name}"' in tests, f"no test types {page.name}"
