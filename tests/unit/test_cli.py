"""The command line (OPS-1): exit codes, two-line errors, and no password in what it prints (S8)."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from holdfast.brokers.engine import BrokerUnavailable
from holdfast.cli import environment, main, output
from holdfast.errors import ConfigurationError, LifespanError, SchemaMismatch
from holdfast.operator import installation
from holdfast.operator.installation import (
    AppliedMigration,
    Holdings,
    Migration,
    MigrationRefused,
    Removal,
    SchemaState,
    Step,
)

SECRET = "S3cr3tCanary"
PENDING = Migration(2, "next", "b" * 64, "SELECT 1")
STATE = SchemaState(
    (AppliedMigration(1, "baseline", "a" * 64, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "app"),),
    (PENDING,),
    1,
    2,
    True,
)


@pytest.fixture(autouse=True)
def only_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSN", "SCHEMA", "GENERATION", "LISTEN_DSN"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """holdfast("migrate", "status") -> (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the database, and keeps what the command asked it for."""
    made: list[tuple[Any, ...]] = []

    async def state(dsn: str, *, schema: str) -> SchemaState:
        made.append(("state", dsn, schema))
        return STATE

    async def apply(
        dsn: str, *, schema: str, roles: str, trusted_roles: list[str], on_step: Callable[[Step], None]
    ) -> list[Migration]:
        made.append(("apply", dsn, schema, roles))
        on_step(Step("hint", "no roles: [because]"))
        on_step(Step("applied", "applied 0002_next", PENDING))
        return [PENDING]

    async def holdings(dsn: str, schema: str) -> Holdings:
        made.append(("holdings", dsn, schema))
        return Holdings(schema, 1234, ("migrations", "outbox"))

    async def uninstall(dsn: str, schema: str) -> Removal:
        made.append(("uninstall", dsn, schema))
        return Removal(schema, ("holdfast_worker",), ("holdfast_owner",))

    for stand_in in (state, apply, holdings, uninstall):
        monkeypatch.setattr(installation, stand_in.__name__, stand_in)
    return made


# --- settings ---


def test_the_environment_says_where_the_database_is(
    holdfast: Run, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOLDFAST_DSN before DATABASE_URL, options before both (OPS-1)."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://h/fallback")
    assert holdfast("migrate", "status")[0] == 0
    monkeypatch.setenv("HOLDFAST_DSN", "postgresql://h/db")
    monkeypatch.setenv("HOLDFAST_SCHEMA", "acme")
    assert holdfast("migrate", "status")[0] == 0
    assert holdfast("migrate", "status", "--dsn", "postgresql://h/option", "--schema", "core")[0] == 0
    assert calls == [
        ("state", "postgresql://h/fallback", "core"),
        ("state", "postgresql://h/db", "acme"),
        ("state", "postgresql://h/option", "core"),
    ]


def test_generation_and_listen_dsn_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (environment.generation(None), environment.listen_addresses(None)) == (0, {})
    monkeypatch.setenv("HOLDFAST_GENERATION", "7")
    monkeypatch.setenv("HOLDFAST_LISTEN_DSN", "postgresql://direct/db")
    assert (environment.generation(None), environment.listen_addresses(None)) == (7, {"": "postgresql://direct/db"})
    assert (environment.generation(3), environment.listen_addresses(["postgresql://x"])) == (3, {"": "postgresql://x"})
    monkeypatch.setenv("HOLDFAST_GENERATION", "-1")
    with pytest.raises(ConfigurationError) as refused:
        environment.generation(None)
    assert refused.value.field == "HOLDFAST_GENERATION"


# --- errors ---


@pytest.mark.parametrize(
    "arguments",
    [
        ("migrate", "status"),  # no DSN
        ("migrate", "status", "--dsn", "postgresql://h/db", "--schema", "No Good"),
        ("migrate", "status", "--dsn", "mysql://h/db"),
        ("migrate", "print", "--schema", "public"),
        ("migrate", "nonsense"),
        ("nonsense",),
        ("migrate", "apply", "--roles", "sometimes"),
        ("migrate", "print", "--since", "-1"),
    ],
)
def test_bad_usage_exits_2_without_a_traceback(holdfast: Run, arguments: tuple[str, ...]) -> None:
    """Exit codes are 0 ok, 1 a problem, 2 bad usage (OPS-1)."""
    code, out, err = holdfast(*arguments)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_an_error_is_one_line_and_one_line_that_helps(holdfast: Run) -> None:
    code, _, err = holdfast("migrate", "status")
    assert code == 2
    assert err.splitlines() == [
        "error: HOLDFAST_DSN is not set",
        "try: export HOLDFAST_DSN=postgresql://user@host:5432/database",
    ]


def test_a_server_that_is_not_there(holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("HOLDFAST_DSN", f"postgresql://u:{SECRET}@127.0.0.1:{port}/db")
        for command in (("status",), ("apply",)):
            code, _, err = holdfast("migrate", *command)
            error, remedy = err.splitlines()
            assert code == 1
            assert error.startswith("error: ")
            assert remedy == "try: check that Postgres runs, and the host and port in HOLDFAST_DSN"
            assert SECRET not in err
        code, _, err = holdfast("migrate", "status", "--debug")
        assert code == 1
        assert "Traceback" in err
        assert SECRET not in err


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://u:{SECRET}/x@127.0.0.1/db",
        f"postgresql://u:1/{SECRET}@127.0.0.1/db",
        f"postgresql://u:1#{SECRET}@127.0.0.1/db",
        f"postgresql://u:{SECRET}#x@127.0.0.1/db",
        f"postgresql://u:{SECRET}?x@127.0.0.1/db",
        f"postgresql://u:{SECRET}",
        f"host=127.0.0.1 password={SECRET}",
        f"u:{SECRET}@127.0.0.1/db",
        f"postgresql://[{SECRET}@127.0.0.1/db",
    ],
)
def test_a_malformed_address_never_shows_its_password(
    holdfast: Run, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Drivers and servers quote what they could not parse, so it does not get that far (S8)."""
    monkeypatch.setenv("HOLDFAST_DSN", address)
    for debug in ((), ("--debug",)):
        code, out, err = holdfast("migrate", "status", *debug)
        assert code == 2
        assert "postgresql://user@host:5432/database" in err
        assert SECRET not in out + err


def test_a_password_on_the_command_line_is_pointed_out(holdfast: Run, calls: list[Any]) -> None:
    """Not in argv (S8)."""
    _, out, err = holdfast("migrate", "status", "--dsn", f"postgresql://u:{SECRET}@h/db")
    assert "process list" in err
    assert SECRET not in out + err
    assert "process list" not in holdfast("migrate", "status", "--dsn", "postgresql://u@h/db")[2]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            SchemaMismatch("core version 1", "version 2", "holdfast migrate apply"),
            [
                "error: the database has schema core version 1, this version needs version 2",
                "try: holdfast migrate apply",
            ],
        ),
        (
            SchemaMismatch("core (not installed)", "version 2", "holdfast migrate apply"),
            [
                "error: the database has no schema core (not installed)",
                "try: check the database in --dsn and the name in --schema; to install it there: "
                "holdfast migrate apply",
            ],
        ),
        (
            BrokerUnavailable("no NATS server can be reached: TimeoutError"),
            [
                "error: no NATS server can be reached: TimeoutError",
                "try: check that the broker runs, and the host and port in its address",
            ],
        ),
        (
            BrokerUnavailable("no NATS server lets this login in: nats: 'Authorization Violation'"),
            [
                "error: no NATS server lets this login in: nats: 'Authorization Violation'",
                "try: the broker runs and refuses this login: check the user and the password in its address",
            ],
        ),
        (
            ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 5432)"),
            [
                "error: no connection to 127.0.0.1:5432: Connection refused",
                "try: check that Postgres runs, and the host and port in --dsn",
            ],
        ),
        (
            ConnectionError("unexpected connection_lost() call"),
            [
                "error: the connection was closed before a Postgres server had answered",
                "try: check that Postgres runs, and the host and port in --dsn",
            ],
        ),
        (
            LifespanError("resources", "at the start", "OSError: refused"),
            [
                "error: the lifespan resources failed at the start: OSError: refused",
                "try: see to what it opens, or correct it; --debug shows where it happened",
            ],
        ),
        (MigrationRefused("a\n  b", "c"), ["error: a b", "try: c"]),
        (
            asyncpg.InvalidPasswordError('password authentication failed for user "u"'),
            [
                'error: password authentication failed for user "u"',
                "try: check the user and the password in --dsn",
            ],
        ),
        (
            asyncpg.InvalidCatalogNameError('database "d" does not exist'),
            ['error: database "d" does not exist', "try: create the database, or correct its name in --dsn"],
        ),
        (
            TimeoutError(),
            [
                "error: the database was reached, and did not answer in time",
                "try: see whether the server is frozen or overloaded; then run it again; if it changes something, see "
                "first whether it has: holdfast audit",
            ],
        ),
        (asyncpg.InterfaceError(f"bad postgresql://u:{SECRET}@h/db"), ["error: bad postgresql://u:***@h/db"]),
    ],
)
def test_what_the_database_says_is_told_in_a_line(
    holdfast: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: list[str]
) -> None:
    async def fail(*_arguments: Any, **_options: Any) -> SchemaState:
        raise error

    monkeypatch.setattr(installation, "state", fail)
    code, _, err = holdfast("migrate", "status", "--dsn", "postgresql://h/db")
    assert (code, err.splitlines()) == (1, expected)


def test_an_error_does_not_move_the_cursor(holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may quote what a producer or an administrator wrote, who must not speak to the operator's terminal (S22)."""

    async def refuse(*_arguments: Any, **_options: Any) -> SchemaState:
        raise MigrationRefused("the table x\x1b[2J\x9b31m\u202e\nall is well", "drop \x07\u2066it")

    monkeypatch.setattr(installation, "state", refuse)
    code, _, err = holdfast("migrate", "status", "--dsn", "postgresql://h/db")
    assert code == 1
    assert err == "error: the table x\\x1b[2J\\x9b31m\\u202e all is well\ntry: drop \\x07\\u2066it\n"


# C0, DEL, C1, line separators, and what turns the direction of writing.
HOSTILE = "".join(
    map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)])
)


def test_json_is_readable_and_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """Only those characters are escaped; a parser gets back what was written (S22)."""
    value = {f"name{HOSTILE}": [f"ünïcode 事件 \\{HOSTILE}"]}
    output.print_json(value, indent=None)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert set(HOSTILE) & set(out) == {"\n"} and out.count("\n") == 1
    assert "ünïcode 事件" in out and "\\u009b" in out and "\\u202e" in out
    output.print_json(value)
    assert json.loads(capsys.readouterr().out) == value


def test_a_cell_holds_nothing_that_a_terminal_obeys() -> None:
    """S22."""
    assert not set(HOSTILE) & set(output.clean(HOSTILE))
    assert output.clean("ünïcode 事件 [/]") == "ünïcode 事件 [/]"


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_arguments: Any, **_options: Any) -> SchemaState:
        raise ZeroDivisionError

    monkeypatch.setattr(installation, "state", fail)
    with pytest.raises(ZeroDivisionError):
        main(["migrate", "status", "--dsn", "postgresql://h/db"])


def test_without_the_extra_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as end:
        main(["version"])
    assert end.value.code == 2
    assert "error: typer is not installed; pip install '.[cli]' in a checkout" in capsys.readouterr().err


# --- commands ---


def test_version(holdfast: Run) -> None:
    code, out, _ = holdfast("version")
    assert code == 0
    assert out.startswith("holdfast ")
    assert "schema version" in out
    assert holdfast("--version") == (code, out, "")


def test_plan_as_json(holdfast: Run, calls: list[Any]) -> None:
    """--json on every read (OPS-1)."""
    code, out, _ = holdfast("migrate", "status", "--dsn", "postgresql://h/db", "--json")
    assert code == 0
    assert json.loads(out) == {
        "schema": "core",
        "database_version": 1,
        "code_version": 2,
        "up_to_date": False,
        "functions_changed": True,
        "contract": None,
        "code_contract": installation.code_contract().provides,
        "applied": [
            {
                "version": 1,
                "name": "baseline",
                "checksum": "a" * 64,
                "applied_at": "2026-01-02T03:04:05+00:00",
                "applied_by": "app",
            }
        ],
        "pending": [{"version": 2, "name": "next", "checksum": "b" * 64}],
    }


def test_plan_for_people(holdfast: Run, calls: list[Any]) -> None:
    code, out, _ = holdfast("migrate", "status", "--dsn", "postgresql://h/db")
    assert code == 0
    for word in ("0001_baseline", "0002_next", "pending", "functions", "the database has version 1, the code 2"):
        assert word in out


def test_apply_reports_its_steps(holdfast: Run, calls: list[Any]) -> None:
    code, out, err = holdfast("migrate", "apply", "--dsn", "postgresql://h/db", "--roles", "never")
    assert code == 0
    assert calls[-1] == ("apply", "postgresql://h/db", "core", "never")
    assert out == "schema core: 1 migration applied, now up to date\n"
    assert err.splitlines() == ["no roles: [because]", "applied 0002_next"]


def test_print_needs_no_database(holdfast: Run) -> None:
    """Printable for review (OBX-3)."""
    code, out, _ = holdfast("migrate", "print", "--schema", "acme")
    assert (code, out) == (0, installation.printable("acme"))
    assert "CREATE ROLE" in out
    assert "CREATE ROLE" not in holdfast("migrate", "print", "--no-roles")[1]


# --- uninstalling ---


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def test_uninstall_asks_twice(holdfast: Run, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the schema, then the number of events that will be lost (OBX-7)."""
    answer(monkeypatch, "core", "y")
    code, out, err = holdfast("uninstall", "--dsn", "postgresql://h/db")
    assert code == 0
    assert "1,234 events will be lost" in err
    assert "outbox" in out
    assert "roles removed: holdfast_worker" in out
    assert [call[0] for call in calls] == ["holdings", "uninstall"]


@pytest.mark.parametrize("lines", [("yes", "y"), ("core", "n"), ("core",), ()])
def test_uninstall_stops_at_any_other_answer(
    holdfast: Run, calls: list[Any], monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    answer(monkeypatch, *lines)
    assert holdfast("uninstall", "--dsn", "postgresql://h/db")[0] == 1
    assert [call[0] for call in calls] == ["holdings"]


def test_uninstall_in_a_script(holdfast: Run, calls: list[Any]) -> None:
    arguments = ("uninstall", "--dsn", "postgresql://h/db", "--yes", "--i-know-this-deletes", "core")
    assert holdfast(*arguments)[0] == 0
    assert calls[-1] == ("uninstall", "postgresql://h/db", "core")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--yes",),
        ("--i-know-this-deletes", "core"),
        ("--yes", "--i-know-this-deletes", "other"),
        ("--yes", "--i-know-this-deletes", "core", "--schema", "other"),
        (),  # nobody at the terminal
    ],
)
def test_uninstall_in_a_script_needs_both_options(
    holdfast: Run, calls: list[Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, _, err = holdfast("uninstall", "--dsn", "postgresql://h/db", *arguments)
    assert code == 2
    assert "try: holdfast uninstall --yes --i-know-this-deletes" in err
    assert "uninstall" not in [call[0] for call in calls]
