"""`holdfast worker` before it meets a database: what it loads, starts, says and hides (OPS-1, S8, S22)."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import itertools
import json
import logging
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from holdfast import HandlerRegistry, WorkerSettings
from holdfast.cli import logs, main
from holdfast.cli.targets import load_registry, load_transactions
from holdfast.cli.worker import _sentry
from holdfast.cli.worker_children import child_command
from holdfast.errors import ConfigurationError
from holdfast.telemetry import Fact, Notice
from holdfast.worker import supervisor
from holdfast.worker.supervisor import Supervisor, end_with_parent

SECRET = "S3cr3tCanary"


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """app("handlers", source) writes a module into the directory the command is run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written: list[str] = []

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


# --- finding the handlers ---


def test_the_registry_is_imported_from_the_current_directory(app: Callable[[str, str], None]) -> None:
    """The command finds the application where it is started (OPS-1)."""
    app("hf_shop", "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n")
    assert isinstance(load_registry("hf_shop:registry"), HandlerRegistry)


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("hf_nowhere:registry", "no module named hf_nowhere", "directory"),
        ("hf_nowhere.deep:registry", "no module named hf_nowhere", "directory"),
        ("hf_app:other", "has no attribute other", "hf_app:registry"),
        ("hf_app:number", "is int, not a HandlerRegistry", "registry"),
        ("hf_app", "does not name a registry", "MODULE:REGISTRY"),
        ("hf_app:", "does not name a registry", "MODULE:REGISTRY"),
        ("hf_broken:registry", "ValueError: out of order", "--debug"),
        ("hf_needy:registry", "No module named 'hf_missing'", "--debug"),
        ("hf_app.py:registry", "is a file, not a module", "write hf_app:registry"),
        ("./shop/handlers.py:registry", "is a file, not a module", "write shop.handlers:registry"),
        ("hf_models:registry", "settings are not configured", "set DJANGO_SETTINGS_MODULE, or run it by manage.py"),
        ("hf_empty:registry", "has no attribute registry", "HandlerRegistry()"),
    ],
)
def test_a_wrong_target_is_explained_and_exits_2(
    app: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    problem: str,
    remedy: str,
) -> None:
    """Two lines, no traceback (OPS-1)."""
    app("hf_app", "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\nnumber = 3\n")
    app("hf_broken", "raise ValueError('out of order')\n")
    app("hf_needy", "import hf_missing\n")
    app("hf_empty", "")
    # Settings of its own: other tests of this process may have configured Django's.
    app("hf_models", "from django.conf import LazySettings\nLazySettings().INSTALLED_APPS\n")
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.setenv("HOLDFAST_DSN", f"postgresql://app:{SECRET}@127.0.0.1:1/none")
    with pytest.raises(SystemExit) as end:
        main(["worker", target])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("error: ") and problem in first
    assert second.startswith("try: ") and remedy in second
    assert SECRET not in err


@pytest.mark.parametrize(
    ("name", "remedy"), [("Sesion", "did you mean hf_db:Session?"), ("zzz", "name what --transactions is to use")]
)
def test_a_mistyped_source_of_transactions_is_corrected(
    app: Callable[[str, str], None], name: str, remedy: str
) -> None:
    app("hf_db", "Session = 1\n")
    with pytest.raises(ConfigurationError) as refused:
        load_transactions(f"hf_db:{name}")
    assert refused.value.remedy == remedy


@pytest.mark.parametrize(
    "options", [["--lease", "0"], ["--concurrency", "0"], ["--channel", "Not A Channel"], ["--processes", "0"]]
)
def test_a_setting_out_of_range_exits_2(
    app: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Refused before anything is started (OPS-1)."""
    app("hf_app", "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n")
    monkeypatch.setenv("HOLDFAST_DSN", "postgresql://app@127.0.0.1:1/none")
    with pytest.raises(SystemExit) as end:
        main(["worker", "hf_app:registry", *options])
    assert end.value.code == 2


def test_a_registry_without_handlers_is_refused(
    app: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app("hf_app", "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n")
    monkeypatch.setenv("HOLDFAST_DSN", "postgresql://app@127.0.0.1:1/none")
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    with pytest.raises(SystemExit) as end:
        main(["worker", "hf_app:registry"])
    assert end.value.code == 2
    assert "has no handlers" in capsys.readouterr().err


# --- Sentry ---


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_address_of_sentry_that_is_none_exits_2(
    app: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: str,
) -> None:
    """Before any process is started, and the key in it is not shown (DLQ-6, S8)."""
    app("hf_app", "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n")
    monkeypatch.setenv("HOLDFAST_DSN", "postgresql://app@127.0.0.1:1/none")
    monkeypatch.setenv("SENTRY_DSN", f"ftp://{SECRET}@sentry.example.org/1")
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    with pytest.raises(SystemExit) as end:
        main(["--debug", "worker", "hf_app:registry", "--processes", processes])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert "error: SENTRY_DSN is not a Sentry DSN" in err
    assert SECRET not in err


def test_without_the_extra_sentry_is_not_told_and_the_worker_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable may be meant for others (DLQ-6)."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with _sentry("https://key@sentry.example.org/1", {}) as observers:
        assert observers(None) == ()
    assert "note: SENTRY_DSN is set and not used; pip install '.[sentry]' in a checkout" in capsys.readouterr().err
    with _sentry(None, {}) as observers:
        assert observers(None) == ()
    assert capsys.readouterr().err == ""


# --- several processes ---


def test_a_child_gets_every_setting_and_no_password() -> None:
    """Addresses travel in the environment, not in the process list (S8)."""
    settings = WorkerSettings(
        schema="shop",
        generation=7,
        channels=("hot", "cold"),
        name="web",
        concurrency=11,
        concurrency_at_most=18,
        threads=12,
        connections=13,
        batch=14,
        lease=15.5,
        poll_interval=16.5,
        grace=17.5,
        settle_after=0.25,
        listen=False,
        listen_dsn=f"postgresql://app:{SECRET}@host/db",
        dead_letters="archive",
        sweep=False,
    )
    command = child_command(["app:registry", "--transactions", "app:Session"], settings, 3, 9)
    assert SECRET not in " ".join(command)
    words = command[command.index("worker") + 1 :]
    expected = {
        *(("--schema", "shop"), ("--generation", "7"), ("--name", "web/3"), ("--concurrency", "11")),
        ("--concurrency-at-most", "18"),
        *(("--threads", "12"), ("--connections", "13"), ("--batch", "14"), ("--lease", "15.5")),
        *(("--poll-interval", "16.5"), ("--grace", "17.5"), ("--settle-after", "0.25"), ("--lifeline", "9")),
        *(("--channel", "hot"), ("--channel", "cold"), ("--dead-letters", "archive")),
    }
    assert expected <= set(itertools.pairwise(words))
    assert words[:3] == ["app:registry", "--transactions", "app:Session"]
    assert {"--no-listen", "--no-sweep"} <= set(words)
    assert "--processes" not in words
    # Without a chosen name too, it is that of the place: the next process there replaces this one.
    unnamed = child_command("app:registry", WorkerSettings(generation=0), 3, 9)
    assert unnamed[unnamed.index("--name") + 1] == f"{socket.gethostname()}:{os.getpid()}/3"


def python(source: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(source)]


class Observed(list[Fact]):
    def named(self, name: str) -> list[Notice]:
        return [fact for fact in self if isinstance(fact, Notice) and fact.name == name]


async def until(condition: Callable[[], object], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


async def test_a_child_that_dies_is_started_again_with_backoff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Later each time, up to the limit; from the beginning once it lived long enough (OPS-1)."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(supervisor, "STEADY_AFTER", 60.0)
    seen = Observed()
    runs = tmp_path / "runs"
    # The fifth one stays, so that there is something to stop.
    source = f"""
        import os, time
        with open({str(runs)!r}, "a") as file: file.write("x")
        os._exit(137) if os.path.getsize({str(runs)!r}) < 5 else time.sleep(600)
    """
    supervising = asyncio.create_task(Supervisor(lambda _n, _fd: python(source), 1, seen.append, name="web").run())
    await until(lambda: runs.exists() and runs.stat().st_size == 5)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(supervising, 20)
    died = seen.named("worker_died")
    assert {notice.details["worker"] for notice in died} == {"web/1"} and len({n.details["pid"] for n in died}) == 4
    assert [notice.details["restart_in_s"] for notice in died] == [0.02, 0.04, 0.05, 0.05]
    assert {notice.details["exit_code"] for notice in died} == {137}

    monkeypatch.setattr(supervisor, "STEADY_AFTER", 0.0)
    runs.unlink()
    seen.clear()
    supervising = asyncio.create_task(Supervisor(lambda _n, _fd: python(source), 1, seen.append).run())
    await until(lambda: runs.exists() and runs.stat().st_size == 5)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(supervising, 20)
    assert {notice.details["restart_in_s"] for notice in seen.named("worker_died")} == {0.02}


async def test_a_signal_reaches_every_child_once(tmp_path: Path) -> None:
    """The supervisor passes SIGTERM on and ends when its children have (LSN-4)."""
    source = f"""
        import pathlib, signal, sys, time
        count = 0
        def told(number, frame):
            global count
            count += 1
        signal.signal(signal.SIGTERM, told)
        mine = pathlib.Path({str(tmp_path)!r}, sys.argv[1])
        mine.write_text("up")
        while not count: time.sleep(0.01)
        time.sleep(0.2)
        mine.write_text(str(count))
    """
    command = Supervisor(lambda number, _fd: [*python(source), str(number)], 3, Observed().append)
    supervising = asyncio.create_task(command.run())
    files = [tmp_path / str(number) for number in (1, 2, 3)]
    await until(lambda: all(file.exists() and file.read_text() == "up" for file in files))
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(supervising, 20)
    assert [file.read_text() for file in files] == ["1", "1", "1"]


async def test_a_second_signal_kills_the_children(tmp_path: Path) -> None:
    """And the exit status says which signal it was (LSN-4)."""
    source = f"""
        import asyncio, signal, sys
        from holdfast.worker.supervisor import Supervisor
        child = "import signal, time, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
                "open({str(tmp_path / "child")!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        asyncio.run(Supervisor(lambda n, fd: [sys.executable, "-c", child], 1, print).run())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(source), stdout=-1)
    try:
        await until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 128 + signal.SIGTERM
        child = int((tmp_path / "child").read_text())
        await until(lambda: not _alive(child))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_child_notices_that_its_parent_is_gone() -> None:
    """The pipe ends with the parent, however the parent ended (OPS-1)."""
    reading, writing = os.pipe()
    stopped: list[float] = []
    end_with_parent(reading, lambda: stopped.append(time.monotonic()), patience=3600)
    time.sleep(0.05)
    assert not stopped
    os.close(writing)
    deadline = time.monotonic() + 20
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stopped
    os.close(reading)


# --- its logs ---


@pytest.fixture
def unconfigured() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("unconfigured")
def test_logs_are_json_lines_for_a_machine() -> None:
    """One object a line, whatever an error says (OBS-1, S22)."""
    logging.getLogger().handlers.clear()  # pytest puts its own there
    stream = io.StringIO()
    logs.configure(stream)
    structlog.get_logger("holdfast").warning("delivery_retried", last_error="one\ntwo\x1b[31m", attempts=2)
    logging.getLogger("app").warning("plain\nlogging")
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["event"] for entry in entries] == ["delivery_retried", "plain\nlogging"]
    assert entries[0]["last_error"] == "one\ntwo\x1b[31m"
    assert {"level", "timestamp"} <= entries[0].keys()
    assert entries[1]["logger"] == "app"


@pytest.mark.usefixtures("unconfigured")
def test_logs_are_readable_lines_for_a_terminal() -> None:
    """What an event carries can neither start a line of its own nor move the cursor (S22)."""
    stream = Terminal()
    logs.configure(stream)
    structlog.get_logger("holdfast").warning("delivery_retried", last_error="one\ntwo\x1b]0;title\x07", attempts=2)
    (line,) = stream.getvalue().splitlines()
    assert r"one\ntwo\x1b]0;title\x07" in line
    assert "attempts" in line


@pytest.mark.usefixtures("unconfigured")
def test_an_application_that_set_up_its_logs_keeps_them() -> None:
    """The command changes nothing that somebody else configured (OBS-1)."""
    mine = io.StringIO()
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.PrintLoggerFactory(mine)
    )
    logging.getLogger().addHandler(logging.NullHandler())
    stream = io.StringIO()
    logs.configure(stream)
    structlog.get_logger().info("hello")
    assert stream.getvalue() == ""
    assert json.loads(mine.getvalue())["event"] == "hello"


def test_the_environment_gives_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that is no number is refused, not guessed (OPS-1)."""
    from holdfast.cli import environment

    monkeypatch.setenv("HOLDFAST_GENERATION", "seven")
    with pytest.raises(ConfigurationError, match="HOLDFAST_GENERATION"):
        environment.generation(None)
