"""The command line at a real terminal (OPS-1): interrupted, cut off from the database, its output closed or full."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast.cli import main
from tests.operator.support import ACTOR, HANDLER, ROOT, fail
from tests.operator.test_commands import made

# Of this test's own database: others run beside it.
GONE = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE application_name = 'holdfast operator' AND datname = current_database()"""

DEADLINE = 30.0
PROGRAM = (sys.executable, "-c", "from holdfast.cli import main; main()")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command at a terminal of 80 columns, and what it has shown."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self.shown = process, master, ""

    def until(self, is_so: Callable[[str], bool]) -> None:
        """Read until what was shown is as expected, or the command has ended."""
        end = time.monotonic() + DEADLINE
        while not is_so(self.shown):
            assert time.monotonic() < end, f"it shows {self.shown!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.shown += ANSI.sub("", os.read(self._master, 65536).decode(errors="replace"))
                except OSError:  # Linux says so that nobody has the other end any more
                    break

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C until the command ends: the first may come just before it waits for the keyboard."""
        end = time.monotonic() + DEADLINE
        while self.process.poll() is None and time.monotonic() < end:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)

    def ends(self) -> int:
        """Read to the end, and return the exit code."""
        self.until(lambda _: self.process.poll() is not None and not select.select([self._master], [], [], 0)[0])
        return self.process.wait(timeout=DEADLINE)


@contextmanager
def terminal(dsn: str, *arguments: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"HOLDFAST_DSN": dsn, "HOLDFAST_ACTOR": ACTOR, "TERM": "xterm"}
    process = subprocess.Popen(
        [*PROGRAM, *arguments], cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def rows(dsn: str, query: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query).fetchall()


def test_an_interrupt_ends_a_question(dsn: str) -> None:
    """Ctrl-C is a no, and nothing is changed. One that asyncio takes ends with 130, and only the second does
    (OPS-1).
    """
    made(dsn, fail, 3)
    with terminal(dsn, "failed", "discard", "--handler", HANDLER) as screen:
        screen.until(lambda shown: "Discard 3 events? [y/N]" in shown)
        screen.interrupt()
        assert screen.ends() == 1
        assert "Aborted!" in screen.shown and "Traceback" not in screen.shown
    assert rows(dsn, "SELECT FROM core.outbox WHERE deleted_at IS NOT NULL") == []


def test_a_long_question_ends_at_words(dsn: str) -> None:
    """At 80 columns, with the answer behind its last word (OPS-1)."""
    name = "ledger.book_into_the_general_ledger_of_the_whole_company"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT core.subscribe('ledger', %s, ARRAY['order.placed'])", (name,))
    with terminal(dsn, "handlers", "retire", name) as screen:
        screen.until(lambda shown: "[y/N]: " in shown)
        assert screen.shown.replace("\r", "") == f"End 1 subscription of\n  {name}? [y/N]: "
        screen.type("n\n")
        assert screen.ends() == 1


@pytest.mark.slow
def test_who_is_in_the_way_is_told_in_lines_that_fit(dsn: str) -> None:
    """At 80 columns, while a command waits for the lock and when it gives up (OPS-1, OPS-5)."""
    with psycopg.connect(dsn, application_name="a nightly report with a long name") as other:
        other.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        with terminal(dsn, "doctor") as screen:
            assert screen.ends() == 1
        lines = screen.shown.replace("\r", "").splitlines()
        assert lines[0].startswith(f"waiting for a lock: pid {other.info.backend_pid}, login ")
        assert [line for line in lines if len(line) > 80] == []
        assert f"           SELECT pg_terminate_backend({other.info.backend_pid});" in lines


def test_no_worker_is_told_in_lines_that_fit(dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The problem, and what to do about it (OBS-3, OPS-1)."""
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    with terminal(dsn, "worker", "status") as screen:
        assert screen.ends() == 1
    lines = screen.shown.replace("\r", "").splitlines()
    assert lines[0].startswith("error: no worker of this user runs here")
    assert any(line.startswith("try: start it (holdfast worker MODULE:REGISTRY)") for line in lines)
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)


def test_an_import_asks_with_the_number_of_events(dsn: str) -> None:
    """Whoever is asked knows how much is about to move (PUB-1)."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE mine (id int PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);"
            "INSERT INTO mine SELECT n, 'order.placed', '{}' FROM generate_series(1, 3) n"
        )
    with terminal(dsn, "import", "table", "--table", "public.mine") as screen:
        screen.until(lambda shown: "Publish 3 events of public.mine" in " ".join(shown.split()))
        assert rows(dsn, "SELECT FROM core.outbox") == []
        screen.type("y\n")
        assert screen.ends() == 0
    assert len(rows(dsn, "SELECT FROM core.outbox")) == 3


def test_a_watch_outlives_the_connection(dsn: str) -> None:
    """A failover is when it is looked at. It says so, looks again, and ends with Ctrl-C (OPS-1)."""
    with terminal(dsn, "status", "--watch", "--interval", "0.2") as screen:
        screen.until(lambda shown: "no workers" in shown)
        # The next session is refused once, before it is served again.
        assert rows(dsn, GONE) == [(True,)]
        screen.until(lambda shown: "the database does not answer" in shown)
        seen = screen.shown.rindex("the database does not answer")
        screen.until(lambda shown: "no workers" in shown[seen:].partition("schema core")[2].partition("schema core")[2])
        screen.interrupt()
        assert screen.ends() == 0
        assert "Traceback" not in screen.shown


def test_a_watch_fits_the_screen(dsn: str) -> None:
    """Something of everything, and how much of it is hidden; what is wrong with workers comes first (OPS-1)."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT core.worker_beat(core.uuid7(), 'worker-' || n, 'host', n, '1.0', 0, ARRAY['c' || n], ARRAY['h.x'])"
            " FROM generate_series(1, 30) n;"
            "UPDATE core.workers SET heartbeat_at = now() - interval '40 s' WHERE name = 'worker-17';"
            "INSERT INTO core.outbox (event_type, source, payload) SELECT 'type.' || n, 'shop', '{}'"
            " FROM generate_series(1, 30) n"
        )
    with terminal(dsn, "status", "--watch", "--interval", "0.3") as screen:
        screen.until(lambda shown: "routes hidden" in shown)
        screen.until(lambda shown: shown.count("schema core") > 1)
        page = [line.rstrip() for line in screen.shown.replace("\r", "").split("schema core")[1].splitlines()]
        screen.interrupt()
        assert screen.ends() == 0
    assert len(page) <= 24
    hidden = [line for line in page if line.endswith(" hidden")]
    assert [line.split()[-2] for line in hidden] == ["warnings", "workers", "routes"]
    assert next(line for line in page if line.startswith("worker-")).split()[0] == "worker-17"


def test_a_connection_that_is_lost_at_the_question_has_a_remedy(dsn: str) -> None:
    """Nothing was changed, and how to find that out is said (OPS-1)."""
    made(dsn, fail, 2)
    with terminal(dsn, "failed", "discard", "--handler", HANDLER) as screen:
        screen.until(lambda shown: "[y/N]" in shown)
        assert rows(dsn, GONE) == [(True,)]
        screen.type("y\n")
        assert screen.ends() == 1
        assert "try: run it again; if it changes something, see first whether it has: holdfast audit" in " ".join(
            screen.shown.split()
        )


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_is_no_fault(dsn: str, closed: str) -> None:
    """As `holdfast ... >&-` in a script (OPS-1)."""
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[closed]
    script = f'exec {number}>&-; exec "$@"'
    environment = {**os.environ, "HOLDFAST_DSN": dsn}
    arguments = ["sh", "-c", script, "sh", *PROGRAM, "handlers", "list"]
    ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == ("" if closed == "stdout" else "none\n")


def test_a_full_disk_is_not_taken_for_the_database(dsn: str) -> None:
    """The remedy is about what is wrong (OPS-1)."""
    environment = {**os.environ, "HOLDFAST_DSN": dsn}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PROGRAM, "handlers", "list"], cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert "No space left" in ended.stderr and "try: make room where the output goes" in ended.stderr


def test_an_interrupt_before_the_command_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports take longer than most commands, and Ctrl-C meets them (OPS-1)."""

    def interrupted(*_used: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.app.command_tree", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["status"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "")
