"""Every screen of the command at 80 and at 120 columns, compared with golden files.

HOLDFAST_UPDATE_GOLDEN=1 writes them anew; then look at what has changed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest

from tests.commands import begin, ended, holdfast
from tests.operator.support import CAUSES, beat, fail, fail_with, subscribe
from tests.operator.test_event_ids import published
from tests.worker.support import publish_many

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(240), pytest.mark.slow]

GOLDEN = Path(__file__).parent / "golden"
LONG = "ledger.book_into_the_general_ledger_of_the_company"
WORKER = ("worker-one", "billing.charge_card", LONG)

SCREENS = [
    "status", "doctor --only health", "migrate status", "failed list", "failed list --discarded",
    "failed groups", "failed show {failed}", "events list", "events show {event}", "handlers list", "schedules list",
    "schedules show shop.nightly", "plans list", "plans show 1", "plans create --handler billing.charge_card --dry-run",
    "audit", "retention show", "archive list", "archive groups", "archive show 1", "workers list", "generations list",
    "notify", "failed replay {event} --dry-run", "failed replay {delivered} --yes", "failed discard --all --dry-run",
    "events cancel {delivered} --yes", "handlers retire billing.charge_card --dry-run", "--help", "failed --help",
    "failed replay --help", "schedules show nope", "plans show 99", "failed show 0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11",
]  # fmt: skip

# What differs from run to run, replaced by something as long.
VARYING = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-01-31 08:00:00"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d\b", "2026-01-31 08:00"),
    (r"\b\d+(\.\d)? s\b", "5 s"),
    (r":[0-9a-f]{16}\b", ":5d41402abc4b2a76"),
    (r"Postgres \d+\.\d+", "Postgres 18.1"),
    (r"version \d+, the code \d+", "version 99, the code 99"),
    (r"\d+ of \d+ checks", "99 of 99 checks"),
    (r"(?m)^00(?!01)\d\d_.*\n", ""),  # migrations after the first one
)


BROKEN_ID = re.compile(r"\b[0-9a-f]{8}-(?![0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")


async def filled(dsn: str) -> dict[str, str]:
    """A database in which every screen has something to show."""
    conn = await asyncpg.connect(dsn)
    try:
        await subscribe(conn)
        await subscribe(conn, LONG, "order.placed", "order.cancelled")
        failed = await fail_with(conn, [cause(7) for cause in CAUSES])
        await fail(conn, 2, handler=LONG)
        (discarded,) = await fail(conn)
        await conn.execute("SELECT core.outbox_discard($1, 'ann', 'a test')", [discarded])
        await publish_many(conn, "order.placed", 3)
        event = await published(conn, billing_charge="failed", mail_thank="archived", stock_book="delivered")
        done = await published(conn, stock_book="delivered")
        await beat(conn, *WORKER)
        await conn.execute("INSERT INTO core.deployments (generation, label) VALUES (3, 'spring')")
        await conn.execute(
            """SELECT core.schedule_declare('shop.nightly', '0 3 * * *', 'Europe/Berlin', NULL, 'latest',
                                            'report.due', 'shop', NULL, 0::smallint, '{"n": 1}', 0, true)"""
        )
        await conn.execute(
            """SELECT core.plan_create(NULL, '{"handler": "billing.charge_card"}', 100, NULL, 2, 50, 0.1,
                                       interval '5 minutes', false, 'ann', 'the price list is back')"""
        )
        return {"failed": str(failed[0]), "event": str(event), "delivered": str(done)}
    finally:
        await conn.close()


async def stay_alive(dsn: str) -> None:
    """Beat once more: on a busy machine the screens take longer than a worker may be silent."""
    conn = await asyncpg.connect(dsn)
    await beat(conn, *WORKER)
    await conn.close()


@pytest.fixture
def names(dsn: str) -> dict[str, str]:
    return asyncio.run(filled(dsn))


def on_terminal(columns: int, dsn: str, arguments: list[str]) -> str:
    """What a command prints on a terminal of that width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {
        **os.environ,
        "HOLDFAST_DSN": dsn,
        "HOLDFAST_ACTOR": "ann",
        "TERM": "xterm-256color",
        "NO_COLOR": "1",
    }
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    pid = begin(arguments, environment, ".", [terminal] * 3)
    os.close(terminal)
    printed = b"".join(_read(controller))
    ended(pid)
    os.close(controller)
    return printed.decode().replace("\r\n", "\n")


def _read(controller: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(controller, 65_536)
        except OSError:  # the other side is closed
            return
        if not part:
            return
        yield part


def normal(text: str) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for pattern, same in VARYING:
        text = re.sub(pattern, same, text)
    return "\n".join(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.nightly("screens")
@pytest.mark.parametrize("columns", [80, 120])
def test_screens(columns: int, dsn: str, names: dict[str, str]) -> None:
    """Prose ends at words, and an id or a name is never broken (OPS-1)."""
    shown: list[str] = []
    for screen in SCREENS:
        asyncio.run(stay_alive(dsn))
        printed = on_terminal(columns, dsn, [word.format(**names) for word in screen.split()])
        shown.append(f"$ holdfast {screen}\n{normal(printed)}")
        assert not BROKEN_ID.search(shown[-1]), screen
    file = GOLDEN / f"screens-{columns}.txt"
    text = "\n".join(shown)
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), "HOLDFAST_UPDATE_GOLDEN=1 writes the screens anew"


def test_what_is_piped_is_plain(dsn: str, names: dict[str, str]) -> None:
    """No colours, no frames, and one line for each row, however wide (OPS-1)."""
    environment = {**os.environ, "HOLDFAST_DSN": dsn, "HOLDFAST_ACTOR": "ann", "COLUMNS": "40"}
    for screen in ("status", "failed list", "failed groups", "workers list", "migrate status", "events show {event}"):
        done = holdfast(*(word.format(**names) for word in screen.split()), variables=environment)
        assert (done.returncode, done.stderr) == (0, ""), screen
        assert not re.search(r"[\x1b\u2500-\u257f]", done.stdout), screen
    with psycopg.connect(dsn) as db:
        count = db.execute("SELECT count(*) FROM core.failed").fetchall()[0][0]
    listed = holdfast("failed", "list", variables=environment)
    assert len(listed.stdout.splitlines()) == count + 2, "the heading, the rows, and what the archive has"
