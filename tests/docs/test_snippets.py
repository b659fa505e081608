"""Every command, statement and program in the documents is run. What is not meant to be run is fenced as text."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher
from holdfast.embedded import EmbeddedPostgres
from tests.commands import holdfast
from tests.docs.support import ADOPTION, PAGES, Block, blocks, is_story, parameters
from tests.docs.test_readme import PROGRAM
from tests.servers import apply_schema

SQL = blocks("sql")
COMMANDS = [block for block in blocks("sh") if not is_story(block.page)]
PROGRAMS = [block for block in blocks("python") if block != PROGRAM and block.file is None]
FILES = [block for block in blocks("python") if block.file is not None]

HANDLERS = """
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge_card")
async def charge_card(event): ...
"""

# Tables of the reader's own, and one event that failed.
WORLD = """
CREATE TABLE orders (id bigint PRIMARY KEY);
CREATE TABLE ledger (order_id bigint);
CREATE TABLE events (id bigint PRIMARY KEY, status text);
SELECT core.subscribe('billing', 'billing.charge_card', '{order.placed}');
INSERT INTO core.outbox (event_type, source, payload, handler_name, status, attempts, failure_reason, last_error,
                         error_signature, first_failed_at, failed_at, settled_at)
VALUES ('order.placed', 'shop', '{"order_id": 1}', 'billing.charge_card', 'failed', 5, 'retry_terminal',
        'RuntimeError: declined', 'RuntimeError:1', now(), now(), now());
"""


def test_only_known_languages_are_fenced() -> None:
    """A block in a language that no test runs would be a claim that nobody ran."""
    known = {*SQL, *blocks("sh", "python"), *blocks("text", "json", "ini", "yaml", "dockerfile")}
    assert [block.name for page in PAGES for block in blocks_of(page) if block not in known] == []
    assert SQL and COMMANDS and PROGRAMS


def blocks_of(page: Path) -> list[Block]:
    from tests.docs.support import _blocks

    return list(_blocks(page))


@pytest.fixture
async def world(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    await connection.execute(WORLD)
    yield connection
    await connection.close()


@parameters(SQL)
async def test_sql(world: asyncpg.Connection, block: Block) -> None:
    """Run in a transaction that is not kept, because roles belong to the whole server; triggers have their say."""
    transaction = world.transaction()
    await transaction.start()
    try:
        await world.execute(block.text)
        await world.execute("SET CONSTRAINTS ALL IMMEDIATE")
    finally:
        await transaction.rollback()


async def test_the_readme_replays(world: asyncpg.Connection) -> None:
    """The last statement there moves the dead letter back to pending (DLQ-3)."""
    replay = [block for block in SQL if block.page.name == "README.md"][-1]
    await world.execute(replay.text)
    row = await world.fetchrow("SELECT status, attempts, failure_history->0->>'replayed_by' FROM core.outbox")
    assert tuple(row) == ("pending", 0, "ada@example.com")


def saved(page: Path, folder: Path) -> None:
    """Save what a page says to save."""
    for block in FILES:
        if block.page == page and block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


@pytest.mark.slow
@pytest.mark.newcomer
@parameters([block for block in FILES if block.page.parent.name not in ADOPTION])
async def test_files(world: asyncpg.Connection, dsn: str, block: Block, tmp_path: Path) -> None:
    """What a page says to save is a whole program, which finds the database as the command does (RUN-1)."""
    saved(block.page, tmp_path)
    command = [sys.executable, str(block.file)]
    environment = {**os.environ, "HOLDFAST_DSN": dsn}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@parameters(PROGRAMS)
async def test_python(world: asyncpg.Connection, dsn: str, block: Block) -> None:
    """With a connection, a publisher and a registry at hand, as in the text around it."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.ship")
    async def ship(event: EventEnvelope) -> None: ...

    known: dict[str, Any] = {"dsn": dsn, "connection": world, "registry": registry, "publisher": Publisher("shop")}
    code = compile(block.text, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, known)  # noqa: S307
    if inspect.iscoroutine(result):
        await asyncio.wait_for(result, 30)
    for schedule in known["registry"].schedules:
        assert any(handler.wants(schedule.event_type) for handler in known["registry"]), f"{schedule.name}: no handler"


# --- commands ---


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """Commands are the same on every Postgres: one server is enough for them."""
    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        apply_schema(server.create_database("shop_template"))
        yield server


@pytest.fixture
def shop(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A directory with an application in it, and an environment that finds the command and the database."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "handlers.py").write_text(HANDLERS)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    dsn = server.create_database("shop", template="shop_template")
    yield {**os.environ, "PATH": path, "HOLDFAST_DSN": dsn, "PWD": str(tmp_path)}
    server.drop_database("shop")


@pytest.mark.slow
@parameters(COMMANDS)
@pytest.mark.timeout(180)
def test_commands(shop: dict[str, str], block: Block) -> None:
    """Line by line; what runs until it is told to stop is told to stop (OPS-1)."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if not words or line.startswith("export HOLDFAST_DSN="):
            continue
        if words[0] == "./dev":
            assert words[1] in ("demo", "test")  # the one has a test of its own, the other is running this
        elif words[:2] == ["holdfast", "worker"] and words[2] != "status":
            runs_until_told(words, shop, signal.SIGTERM, "worker_started", int(_option(words, "--processes", "1")))
        elif "--watch" in words:
            runs_until_told(words, shop, signal.SIGINT, "pending", 1)
        elif "--listen" in words:
            runs_until_told(words, shop, signal.SIGTERM, "serving", 1)
        else:
            if words[0] == "holdfast" and not re.search(r"[|&;<>$`*?]", line):
                run = holdfast(*words[1:], variables=shop, folder=shop["PWD"])
            else:
                shell = ["/bin/sh", "-ec", line]
                run = subprocess.run(shell, cwd=shop["PWD"], env=shop, capture_output=True, text=True, timeout=60)
            assert run.returncode == 0, f"{line}\n{run.stdout}{run.stderr}"


def _option(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def runs_until_told(words: list[str], shop: dict[str, str], number: signal.Signals, sign: str, count: int) -> None:
    output = Path(shop["PWD"], "output")
    with output.open("wb") as file:
        process = subprocess.Popen(words, cwd=shop["PWD"], env=shop, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while output.read_text().count(sign) < count:
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 0, output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
