"""The command: exit codes, one JSON document, lines for people, and the page about it (OPS-1, OBX-3)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import asyncpg
import psycopg
import pytest

from holdfast.cli import main
from holdfast.postgres import doctor
from holdfast.postgres.doctor import examination
from tests.docs.support import read, sections, table

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """holdfast("doctor", "--json") -> (exit code, standard output, standard error)."""
    for name in ("HOLDFAST_DSN", "HOLDFAST_SCHEMA", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


@pytest.fixture
def here(holdfast: Run, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same, with a database."""
    monkeypatch.setenv("HOLDFAST_DSN", dsn)
    return holdfast


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_a_clean_installation_exits_0(here: Run) -> None:
    """Two lines, and nothing to do (OBX-3)."""
    code, out, err = here("doctor")
    assert (code, err) == (0, "")
    first, last = out.splitlines()
    assert re.fullmatch(r"schema core on Postgres \d+\.\d+.*", first)
    assert last == f"all {len(doctor.CHECKS)} checks passed"


def test_a_problem_exits_1(here: Run, dsn: str) -> None:
    """Grouped by how bad they are, each with its code, its evidence and what to try (OBX-3)."""
    execute(
        dsn,
        "ALTER TABLE core.plans DROP CONSTRAINT plans_state",
        "ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell",
        "GRANT SELECT ON core.outbox TO pg_monitor",
    )
    code, out, err = here("doctor")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert [line for line in lines[1:] if not line.startswith(" ")] == [
        "1 problem",
        "1 warning",
        "1 note",
        f"{len(doctor.CHECKS) - 3} of {len(doctor.CHECKS)} checks passed",
        "Statements are for the schema's owner: SET ROLE holdfast_owner;",
    ]
    at = lines.index("1 problem")
    assert lines[at + 1] == "  constraint-missing  the constraint core.plans.plans_state is missing"
    assert lines[at + 2].startswith("      expected CHECK ((state = ANY")
    assert lines[at + 3] == "      try: SET lock_timeout = '5s';"
    assert lines[at + 4].startswith("           ALTER TABLE core.plans ADD CONSTRAINT plans_state CHECK")
    assert lines[at + 5] == "           ALTER TABLE core.plans VALIDATE CONSTRAINT plans_state;"


def test_warnings_and_notes_exit_0(here: Run, dsn: str) -> None:
    """1 means that something is a problem (OPS-1)."""
    execute(dsn, "GRANT SELECT ON core.outbox TO pg_monitor", "ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell")
    code, out, _ = here("doctor")
    assert code == 0
    assert "grant-foreign" in out and "wakeup-never" in out


def test_json_is_one_document(here: Run, dsn: str) -> None:
    """The same for programs (OPS-1)."""
    execute(dsn, "ALTER TABLE core.outbox ADD COLUMN note text")
    code, out, err = here("doctor", "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["findings"] == [
        {
            "severity": "problem",
            "code": "column-extra",
            "object": "core.outbox.note",
            "what": "the column core.outbox.note is not part of this release",
            "evidence": "found text",
            "remedy": "SET lock_timeout = '5s';\nALTER TABLE core.outbox DROP COLUMN note;",
        }
    ]
    del found["findings"], found["server"]
    names = [check.name for check in doctor.CHECKS]
    assert found == {
        "schema": "core",
        "owner": "holdfast_owner",
        "healthy": False,
        "problems": 1,
        "warnings": 0,
        "notes": 0,
        "checks": names,
        "passed": [name for name in names if name != "columns"],
    }


def test_json_of_a_clean_installation(here: Run) -> None:
    code, out, _ = here("doctor", "--json")
    found = json.loads(out)
    assert (code, found["healthy"], found["findings"]) == (0, True, [])
    assert found["passed"] == found["checks"]


def test_only_one_part(here: Run, dsn: str) -> None:
    """A deployment compares the schema before its workers are up; a monitor looks at the rest (OPS-1)."""
    execute(
        dsn,
        "ALTER TABLE core.outbox ADD COLUMN note text",
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')",
    )
    drift, health = here("doctor", "--only", "drift"), here("doctor", "--only", "health")
    assert (drift[0], health[0]) == (1, 1)
    assert "column-extra" in drift[1] and "generation-unserved" not in drift[1]
    assert "column-extra" not in health[1] and "generation-unserved" in health[1]


def test_drift_that_was_not_looked_for_exits_1(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment must not go on because the comparison took too long (OBX-3)."""

    async def too_slow(*_: object) -> NoReturn:
        raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")

    monkeypatch.setattr(examination, "describe", too_slow)
    code, out, _ = here("doctor", "--only", "drift", "--json")
    found = json.loads(out)
    assert (code, found["healthy"]) == (1, False)
    (blind,) = found["findings"]
    assert (blind["severity"], blind["code"]) == ("problem", "could-not-look")
    assert {"tables", "functions", "grants"} <= set(blind["object"].split(", "))


def test_health_that_was_not_looked_at_exits_1(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`holdfast doctor && echo fine` must not say fine when nobody has looked (OPS-5)."""

    async def too_slow(*_: object) -> object:
        raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")

    monkeypatch.setattr("holdfast.postgres.operations.status.read", too_slow)
    code, out, _ = here("doctor", "--only", "health", "--json")
    found = json.loads(out)
    blind = [finding for finding in found["findings"] if finding["code"] == "could-not-look"]
    assert blind and {finding["severity"] for finding in blind} == {"problem"}
    assert (code, found["healthy"]) == (1, False)


@pytest.mark.slow
def test_a_lock_that_a_look_has_waited_for_exits_1(here: Run, dsn: str) -> None:
    """Claims wait for it too, and the session that holds it is named (OPS-5)."""
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE core.workers IN ACCESS EXCLUSIVE MODE")
        code, out, _ = here("doctor", "--only", "health", "--json")
        pid = other.info.backend_pid
    found = json.loads(out)
    assert (code, found["healthy"]) == (1, False)
    assert f"pid {pid}" in {finding["object"] for finding in found["findings"] if finding["code"] == "delivery-blocked"}


def test_names_cannot_move_the_cursor(here: Run, dsn: str) -> None:
    """Whoever may create a table chooses its name (S22)."""
    execute(dsn, 'CREATE TABLE core."x\x1b[31m\nall 99 checks passed" (id int)')
    code, out, _ = here("doctor")
    assert code == 1
    assert "\x1b" not in out and "\\x1b[31m all 99 checks passed" in out


def test_every_check_is_listed(holdfast: Run) -> None:
    """Without a database (OBX-3)."""
    code, out, _ = holdfast("doctor", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [check.name for check in doctor.CHECKS]
    code, out, _ = holdfast("doctor", "--list", "--json", "--only", "health")
    listed = json.loads(out)
    assert [each["name"] for each in listed] == [check.name for check in doctor.CHECKS if check.part == "health"]
    assert all(each["about"] and each["codes"] for each in listed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor",), "HOLDFAST_DSN is not set"),
        (("doctor", "--dsn", "postgresql://h/db", "--schema", "No Good"), "plain lower-case name"),
        (("doctor", "--dsn", "mysql://h/db"), "dsn"),
        (("doctor", "--only", "everything"), "--only"),
    ],
)
def test_bad_arguments_exit_2(holdfast: Run, arguments: tuple[str, ...], words: str) -> None:
    """And nothing is looked at (OPS-1)."""
    code, out, err = holdfast(*arguments)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


def test_a_server_that_is_not_there_exits_1(holdfast: Run) -> None:
    code, out, err = holdfast("doctor", "--dsn", "postgresql://127.0.0.1:1/db")
    assert (code, out) == (1, "")
    assert err.splitlines()[1].startswith("try: ")


# --- the list and the page ---


def test_names_and_codes_are_fit_for_programs() -> None:
    """Kebab-case, one check for each name, one check for each code (OBX-3)."""
    names = [check.name for check in doctor.CHECKS]
    codes = [code for check in doctor.CHECKS for code in check.codes]
    for words in (names, codes):
        assert len(words) == len(set(words))
        assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", word) for word in words)


def test_the_page_names_every_check_and_every_code() -> None:
    """And none that is gone (OBX-3)."""
    page = sections(read("docs/doctor.md"))
    rows: list[list[str]] = [row for title in ("Drift", "Health") for row in table(page[title])]
    documented: dict[str, Any] = {row[0].strip("`"): re.findall(r"`([a-z-]+)`", row[2]) for row in rows}
    assert documented == {check.name: list(check.codes) for check in doctor.CHECKS}
    assert f"`{doctor.COULD_NOT_LOOK}`" in read("docs/doctor.md")
