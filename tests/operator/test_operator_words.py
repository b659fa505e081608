"""What commands say when something is missing, refused or already done: the cause, and a remedy that helps."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from uuid import uuid4

import asyncpg
import pytest

from holdfast.cli import main, plans, problems, retention
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator
from holdfast.postgres.faults import remedy_of
from holdfast.postgres.fleet import Fleet, Registration
from holdfast.postgres.queries import Queries
from tests.logins import PRODUCER, Logins
from tests.operator.support import ACTOR, HANDLER, subscribe
from tests.servers import run_coroutine

pytestmark = pytest.mark.newcomer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """holdfast("failed", "list") -> (exit code, standard output, standard error)."""
    monkeypatch.setenv("HOLDFAST_ACTOR", ACTOR)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return written


def test_errors_end_at_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids are never cut; what is piped is one line each (OPS-1)."""
    id = str(uuid4())
    error = ConfigurationError("id", f"{'names a delivery of an event that is gone ' * 3}{id}", f"copy {id} " * 3)
    problems.report(error)
    assert len(capsys.readouterr().err.splitlines()) == 2
    written = terminal(monkeypatch)
    problems.report(error)
    lines = written.getvalue().splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 for line in lines)
    assert written.getvalue().count(id) == 4


def test_a_server_without_tls_is_named() -> None:
    """asyncpg says that it has rejected an upgrade (OPS-1)."""
    error = ConnectionError('PostgreSQL server at "db:5432" rejected SSL upgrade')
    assert "has no TLS" in remedy_of(error) and "sslmode" in remedy_of(error)
    assert "check that Postgres runs" in remedy_of(ConnectionRefusedError("no"))


def test_a_login_without_rights_is_told_of_another_login_first(
    logins: Logins, holdfast: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few people may GRANT (S2)."""
    monkeypatch.setenv("HOLDFAST_DSN", logins.dsn_of(logins.names[PRODUCER]))
    _, _, err = holdfast("failed", "list")
    login = "use a login that has the role holdfast_operator"
    assert 0 < err.index(login) < err.index("as an administrator: GRANT holdfast_operator TO ")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("plans", "show", "abc"), "PLAN"),
        (("archive", "list", "--before", "abc"), "--before"),
        (("failed", "replay", "--all", "--generation", "abc"), "--generation"),
    ],
)
def test_what_is_no_number_gets_a_remedy(holdfast: Run, arguments: tuple[str, ...], name: str) -> None:
    """OPS-1."""
    code, _, err = holdfast(*arguments)
    assert code == 2
    assert err == f"error: {name} is not a whole number\ntry: holdfast {' '.join(arguments[:2])} --help\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--log-level", "loud"), "--log-level 'loud' is not one of"),
        (("--log-sample", "2"), "--log-sample "),
        (("--processes", "0"), "--processes "),
    ],
)
def test_a_value_that_an_option_does_not_take(holdfast: Run, options: tuple[str, ...], problem: str) -> None:
    """In two lines, like every other mistake (OPS-1)."""
    code, _, err = holdfast("worker", "app:registry", *options)
    first, second = err.splitlines()
    assert (code, second) == (2, "try: holdfast worker --help")
    assert first.startswith(f"error: {problem}") and "Input" not in first and "Value error" not in first


@pytest.mark.parametrize("options", [("--log-level", "INFO"), ("--log-successes", "Info")])
def test_levels_may_be_written_in_capitals(holdfast: Run, options: tuple[str, ...]) -> None:
    """As the environment may have them; the next mistake is the module that is not there (OPS-1, OBS-1)."""
    code, _, err = holdfast("worker", "no_such_app:registry", *options, "--dsn", "postgresql://localhost/x")
    assert code == 2 and "no_such_app" in err and "--log" not in err


def test_a_sample_of_nothing_is_noted(holdfast: Run) -> None:
    """OPS-1, OBS-1."""
    said = holdfast("worker", "no_such_app:registry", "--log-sample", "0.1", "--dsn", "postgresql://localhost/x")[2]
    assert "note: --log-sample has no effect without --log-successes\n" in said


def test_nothing_to_do_is_no_mistake(dsn: str, holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a known handler, and for all; a handler that is unknown stays a mistake (DLQ-4)."""
    monkeypatch.setenv("HOLDFAST_DSN", dsn)

    async def prepared() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await subscribe(connection)
        finally:
            await connection.close()

    run_coroutine(prepared)
    for verb in ("replay", "discard", "restore"):
        for which in (("--handler", HANDLER), ("--all",)):
            code, out, err = holdfast("failed", verb, *which, "--yes")
            assert (code, err) == (0, "") and out.startswith("none: "), (verb, which, out)
        assert holdfast("failed", verb, "--handler", "no.such", "--yes")[0] == 2
    code, out, _ = holdfast("failed", "replay", "--all", "--yes", "--json")
    assert code == 0 and '"moved": []' in out


def test_an_empty_database_is_named(empty_dsn: str, holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a dump was empty, or the schema's name is wrong (OPS-1)."""
    monkeypatch.setenv("HOLDFAST_DSN", empty_dsn)
    code, out, _ = holdfast("migrate", "status")
    assert code == 0 and "there is no schema core of Holdfast in this database" in out and "--schema" in out
    assert out.splitlines()[-1] == "to apply what is pending: holdfast migrate apply"


async def test_a_generation_that_cannot_be_retired_says_what_helps(conn: asyncpg.Connection, dsn: str) -> None:
    """Nothing is moved where nothing is open (GEN-3)."""
    worker = Registration(uuid4(), "w1", "host", 1, "0.1.0", 0, ["outbox"], [])
    await Fleet(Queries()).beat(conn, worker)
    async with Operator(dsn, actor=ACTOR) as operator:
        await operator.generations.begin()
        with pytest.raises(Exception, match="has 1 living worker") as caught:
            await operator.generations.retire(0)
    assert "move" not in str(caught.value) and "stop the worker" in str(caught.value)


async def test_a_worker_without_any_session_is_not_behind_a_pooler(conn: asyncpg.Connection, dsn: str) -> None:
    """Right after kill -9 its heartbeat is fresh (LSN-2)."""
    worker = Registration(uuid4(), "w1", "host", 1, "0.1.0", 0, ["outbox"], [])
    await Fleet(Queries()).beat(conn, worker)
    async with Operator(dsn, actor=ACTOR) as operator:
        report = await operator.doctor()
    codes = [finding.code for finding in report.findings]
    assert "worker-unconnected" in codes and "listeners-missing" not in codes


def test_a_bar_is_drawn_with_the_first_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the arguments are checked (OPS-1)."""
    written = terminal(monkeypatch)
    with retention.progress("erasing", 10) as advance:
        assert written.getvalue() == ""
        advance(5)
        assert "erasing" in written.getvalue()
    written = terminal(monkeypatch)
    with plans._bar(SimpleNamespace(id=1, total=3, pending=0), False):  # type: ignore[arg-type]
        pass
    assert written.getvalue() == ""


def test_one_is_not_several() -> None:
    """OPS-1."""
    assert (plans._is(1), plans._is(2), plans._was(1), plans._was(0)) == ("is", "are", "was", "were")
