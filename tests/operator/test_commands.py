"""The command line of operators (OPS-1): tables, JSON, exit codes, questions with numbers, dry runs, bad arguments."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import tuple_row

from holdfast.cli import main
from tests.logins import OPERATOR, PRODUCER, Logins
from tests.operator.support import ACTOR, CAUSES, EVENT, HANDLER, beat, fail, fail_with, subscribe
from tests.servers import run_coroutine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def db(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True, row_factory=tuple_row) as connection:
        yield connection


@pytest.fixture
def holdfast(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """holdfast("failed", "list") -> (exit code, standard output, standard error)."""
    monkeypatch.setenv("HOLDFAST_DSN", dsn)
    monkeypatch.setenv("HOLDFAST_ACTOR", ACTOR)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


def made(dsn: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What an asynchronous maker of the support module makes."""
    import asyncpg

    async def connected() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await make(connection, *arguments, **options)
        finally:
            await connection.close()

    return run_coroutine(connected)


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def snapshot(db: psycopg.Connection[Any]) -> list[Any]:
    """Everything that a command may change."""
    tables = (
        "outbox",
        "audit",
        "plans",
        "plan_rows",
        "failure_notes",
        "subscriptions",
        "subscriptions_version",
        "deployments",
    )
    return [sorted(map(repr, db.execute(f"SELECT * FROM core.{table}".encode()).fetchall())) for table in tables]


# --- looking ---


def test_reads_have_tables_and_json(dsn: str, holdfast: Run) -> None:
    """--json on every read, one document each; and what people need in the table (OPS-1)."""
    made(dsn, subscribe)
    made(dsn, beat, "worker-one", HANDLER)
    ids: list[UUID] = made(dsn, fail_with, [CAUSES[n % 7](n) for n in range(14)])
    reads: dict[tuple[str, ...], str] = {
        ("failed", "list"): str(ids[0]),
        ("failed", "groups"): f"{HANDLER}/ValueError:",
        ("failed", "show", str(ids[0])): "order 0 is unknown",
        ("events", "show", str(ids[0])): "order 0 is unknown",
        ("events", "list"): "none",
        ("plans", "list"): "none",
        ("handlers", "list"): HANDLER,
        ("workers", "list"): "worker-one",
        ("generations", "list"): "current",
        ("audit",): "none",
    }
    for command, word in reads.items():
        code, out, err = holdfast(*command)
        assert (code, err) == (0, ""), command
        assert word in out, command
        code, out, err = holdfast(*command, "--json")
        assert (code, err) == (0, ""), command
        json.loads(out)
    groups = json.loads(holdfast("failed", "groups", "--json")[1])
    assert (len(groups["groups"]), groups["examined"], groups["is_more"]) == (7, 14, False)
    (shown,) = [group for group in groups["groups"] if group["signature"].startswith("ValueError")]
    assert (shown["count"], shown["group"]) == (2, f"{HANDLER}/{shown['signature']}")
    listed = json.loads(holdfast("failed", "list", "--group", shown["group"], "--json")[1])
    assert [event["id"] for event in listed] == [str(ids[0]), str(ids[7])]


@pytest.mark.parametrize("columns", [80, 120])
def test_ids_can_be_copied_from_a_narrow_terminal(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a row contains, its id or the name of its group is in one piece (OPS-1)."""
    handler = "ledger.book_into_the_general_ledger_of_the_whole_company"
    (id,) = made(dsn, fail, handler=handler)
    made(dsn, beat, "worker-one", *(f"billing.handler_number_{n}" for n in range(30)))
    ((worker,),) = db.execute("SELECT id FROM core.workers").fetchall()
    insert = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}') RETURNING id"
    ((event,),) = db.execute(insert).fetchall()
    group = json.loads(holdfast("failed", "groups", "--json")[1])["groups"][0]["group"]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    whole = {
        ("failed", "list"): id,
        ("failed", "groups"): group,
        ("events", "list"): event,
        ("workers", "list"): worker,
    }
    for command, name in whole.items():
        lines = holdfast(*command)[1].splitlines()
        assert any(str(name) in line for line in lines), command
        long = [line for line in lines if len(re.sub(r"\x1b\[[0-9;]*m", "", line)) > columns]
        assert all(group in line or handler in line for line in long), command


def test_payloads_are_shown_only_when_asked_for(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """S7."""
    (id,) = made(dsn, fail)
    db.execute("""UPDATE core.outbox SET payload = '{"card": "canary-4242"}', headers = '{"tenant": "canary"}'""")
    for command in (("failed", "show", id), ("events", "show", id), ("failed", "export")):
        assert "canary" not in holdfast(*command)[1]
        assert "canary-4242" in holdfast(*command, "--payload")[1]
    assert "canary" not in holdfast("failed", "list", "--json")[1]


def test_an_export_is_json_lines(dsn: str, holdfast: Run) -> None:
    """Every dead letter of a filter, however many (OPS-1)."""
    made(dsn, fail, 1_203)
    made(dsn, fail, 3, handler="mail.thank")
    code, out, _ = holdfast("failed", "export", "--handler", HANDLER, "--payload")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, len(events), len({event["id"] for event in events})) == (0, 1_203, 1_203)
    assert events[0]["payload"] == {"n": 1}


def test_what_a_producer_wrote_does_not_move_the_cursor(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """S22."""
    made(dsn, fail)
    db.execute(r"UPDATE core.outbox SET last_error = E'\x1b[2J[bold]red\nsecond', error_signature = E'E:\x1b[1m'")
    for command in (("failed", "list"), ("failed", "groups")):
        out = holdfast(*command)[1]
        assert "\x1b" not in out
        assert "[bold]red" in out


def test_status_shows_what_a_producer_wrote_as_it_is(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Neither markup nor escape codes, in routes, workers and warnings; and in the JSON nothing but escapes (S22)."""
    # Rows written past the checks: the database refuses what cannot be seen.
    db.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_fill")
    for event_type in ("order.[bold]", "order.\u202ereversed"):
        db.execute(
            "INSERT INTO core.outbox (event_type, source, payload, idempotency_key) VALUES (%s, 'shop', '{}', 'k')",
            (event_type,),
        )
    # A row written past the checks may have such a channel.
    nasty = "\x1b[2J\x9b31m[bold]\nall is well"
    db.execute("UPDATE core.outbox SET channel = CASE event_type WHEN 'order.[bold]' THEN '[/]' ELSE %s END", (nasty,))
    made(dsn, beat, "one", HANDLER)
    # worker_beat refuses such a name; a row written past it may have one.
    name = "[/]\x1b]0;owned\x07\u2066"
    db.execute("UPDATE core.workers SET name = %s, heartbeat_at = now() - interval '10 minutes'", (name,))
    code, out, err = holdfast("status")
    assert (code, err) == (0, "")
    assert not set("\x1b\x07\x9b\u202e\u2066") & set(out)
    assert [line for line in out.splitlines() if line.startswith("all is well")] == []
    for written in (
        "order.[bold]",
        "order.\\u202ereversed",
        "\\x1b[2J\\x9b31m[bold] all is well",
        "[/]\\x1b]0;owned\\x07\\u2066",
    ):
        # In a table and in a warning.
        assert out.count(written) >= 2, written
    code, out, err = holdfast("status", "--json")
    assert (code, err) == (0, "")
    assert not set("\x1b\x07\x9b\u202e\u2066") & set(out)
    assert {route["channel"] for route in json.loads(out)["routes"]} == {"[/]", nasty}


def test_times_are_written_as_people_do(dsn: str, holdfast: Run) -> None:
    """OPS-1."""
    made(dsn, fail, 2)
    for since, count in (("1h", 2), ("2020-01-01", 2), ("2020-01-01T08:00+01:00", 2), ("2999-01-01", 0)):
        assert len(json.loads(holdfast("failed", "list", "--since", since, "--json")[1])) == count, since
    assert len(json.loads(holdfast("failed", "list", "--until", "1h", "--json")[1])) == 0


# --- changing ---


def test_an_operator_reads_the_wakeup_mode(logins: Logins, holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it needs the owner, and says so (OPS-1, S2)."""
    monkeypatch.setenv("HOLDFAST_DSN", logins.dsn_of(logins.names[OPERATOR]))
    assert holdfast("notify") == (0, "schema core: wake-up mode when_idle\n", "")
    code, _, err = holdfast("notify", "never")
    assert (code, "may not become holdfast_owner" in err) == (1, True)


def test_a_login_without_rights_is_told_the_role(
    logins: Logins, holdfast: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-1, S2."""
    monkeypatch.setenv("HOLDFAST_DSN", logins.dsn_of(logins.names[PRODUCER]))
    code, _, err = holdfast("failed", "list")
    assert (code, "permission denied" in err, "holdfast_operator" in err) == (1, True, True)


def test_notify_has_a_dry_run(holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """And without it, who changed it is written down (OPS-1, OPS-5)."""
    bell = "SELECT oid, tgenabled, tgargs FROM pg_trigger WHERE tgname = 'outbox_bell'"
    before = db.execute(bell.encode()).fetchall()
    assert holdfast("notify", "never", "--dry-run") == (
        0,
        "schema core: would be wake-up mode never (it is when_idle)\n",
        "",
    )
    told = {"schema": "core", "wakeup_mode": "always", "before": "when_idle", "dry_run": True}
    assert json.loads(holdfast("notify", "always", "--dry-run", "--json")[1]) == told
    assert db.execute(bell.encode()).fetchall() == before
    assert holdfast("notify", "never") == (0, "schema core: wake-up mode never (it was when_idle)\n", "")
    assert db.execute(bell.encode()).fetchall() != before
    audit = "SELECT actor, reason, arguments FROM core.audit WHERE action = 'notify.set'"
    assert holdfast("notify", "always", "--actor", "ada", "--reason", "a test")[0] == 0
    assert holdfast("notify", "always", "--actor", "ada")[0] == 0
    (*_, line) = lines = db.execute(audit.encode()).fetchall()
    assert line == ("ada", "a test", {"mode": "always", "before": "never"})
    assert len(lines) == 2, "setting it to what it is changes nothing"


def test_everything_that_changes_has_a_dry_run(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Which asks nothing, changes nothing and leaves no line in the audit (OPS-1)."""
    made(dsn, subscribe)
    ids = made(dsn, fail, 5)
    db.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    db.execute("INSERT INTO core.outbox (event_type, source, payload, generation) VALUES ('a.b', 'shop', '{}', 1)")
    open_id = db.execute("SELECT id FROM core.outbox WHERE settled_at IS NULL").fetchall()[0][0]
    group = json.loads(holdfast("failed", "groups", "--json")[1])["groups"][0]["group"]
    assert holdfast("failed", "discard", ids[4], "--yes")[0] == 0
    assert holdfast("plans", "create", "--all")[0] == 0
    before = snapshot(db)
    for command in (
        ("failed", "replay", ids[0], ids[1]),
        ("failed", "replay", "--group", group),
        ("failed", "discard", "--all"),
        ("failed", "restore", ids[4]),
        ("failed", "note", group, "seen"),
        ("plans", "create", "--handler", HANDLER),
        ("plans", "run", 1),
        ("plans", "pause", 1),
        ("plans", "cancel", 1),
        ("handlers", "retire", HANDLER),
        ("generations", "move", 1, "--to", 2),
        ("generations", "retire", 1, "--force"),
        ("events", "cancel", open_id),
    ):
        code, out, err = holdfast(*command, "--dry-run")
        assert (code, err) == (0, ""), (command, err)
        assert out
    assert snapshot(db) == before


def test_a_change_asks_with_the_exact_number(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ends it with 1 and changes nothing; where nobody can answer it needs --yes (OPS-1)."""
    made(dsn, fail, 12)
    made(dsn, fail, 3, handler="mail.thank")
    before = snapshot(db)
    code, _, err = holdfast("failed", "discard", "--handler", HANDLER)
    assert code == 2
    assert "Discard 12 events?" in err and "--yes" in err
    for command, question in (
        (("failed", "discard", "--handler", HANDLER), "Discard 12 events?"),
        (("failed", "replay", "--handler", "mail.thank"), "Replay 3 events?"),
    ):
        answer(monkeypatch, "n")
        code, _, err = holdfast(*command)
        assert code == 1
        assert question in err
    assert snapshot(db) == before
    answer(monkeypatch, "y")
    code, out, _ = holdfast("failed", "discard", "--handler", HANDLER, "--reason", "tests")
    assert code == 0
    assert "12 events discarded; restorable until 20" in out
    assert db.execute("SELECT reason FROM core.audit").fetchall() == [("tests",)]


def test_a_discard_says_that_there_may_be_more(dsn: str, holdfast: Run) -> None:
    """Ten thousand at a time, the newest first (OPS-1)."""
    made(dsn, fail, 10_001)
    code, _, err = holdfast("failed", "discard", "--all")
    assert (code, "Discard the newest 10,000 events?" in err) == (2, True)
    code, out, _ = holdfast("failed", "discard", "--all", "--yes")
    assert (code, "10,000 events discarded" in out, "run it again" in out) == (0, True, True)
    code, out, _ = holdfast("failed", "discard", "--all", "--yes")
    assert (code, "1 event discarded" in out, "run it again" in out) == (0, True, False)


def test_what_was_discarded_is_listed_and_restored_like_it_was_selected(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """By group, by filter and by file; and the audit says by what a bulk change was selected (DLQ-4, S17)."""
    ids = [str(id) for id in made(dsn, fail, 4)]
    group = json.loads(holdfast("failed", "groups", "--json")[1])["groups"][0]["group"]
    signature = group.partition("/")[2]
    assert holdfast("failed", "discard", "--group", group, "--yes")[0] == 0
    listed = json.loads(holdfast("failed", "list", "--discarded", "--json")[1])
    assert [each["id"] for each in listed] == ids
    assert all(each["discarded_at"] for each in listed)
    assert json.loads(holdfast("failed", "list", "--json")[1]) == []
    assert json.loads(holdfast("failed", "list", "--discarded", "--handler", "mail.thank", "--json")[1]) == []
    code, _, err = holdfast("failed", "restore", "--group", group)
    assert (code, "Restore 4 events?" in err) == (2, True)
    file = tmp_path / "ids"
    file.write_text(f"{ids[0]}\n{ids[1]}\n")
    assert holdfast("failed", "restore", "--ids-from", file, "--yes")[:2] == (0, "2 events restored\n")
    assert holdfast("failed", "restore", "--group", group, "--yes")[:2] == (0, "2 events restored\n")
    assert holdfast("failed", "discard", "--all", "--yes")[0] == 0
    assert holdfast("failed", "restore", "--handler", HANDLER, "--yes")[:2] == (0, "4 events restored\n")
    code, _, err = holdfast("failed", "restore", "--handler", HANDLER, "--yes")
    assert (code, "matches no discarded dead letter" in err, "failed list --discarded" in err) == (2, True, True)
    assert holdfast("failed", "replay", "--source", "shop", "--yes")[0] == 0
    selections = db.execute("SELECT action, arguments->>'selection' FROM core.audit ORDER BY id").fetchall()
    assert selections == [
        ("discard", f"handler={HANDLER} signature={signature}"),
        ("restore", None),
        ("restore", f"handler={HANDLER} signature={signature}"),
        ("discard", "every dead letter (--all)"),
        ("restore", f"handler={HANDLER}"),
        ("replay", "source=shop"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", [("failed", "discard", "--all", "--yes"), ("status",)])
def test_who_is_in_the_way_is_named(
    dsn: str, holdfast: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a command waits for a lock, on a terminal, and when it has waited long enough (OPS-1)."""
    made(dsn, fail, 2)
    said: list[str] = []
    monkeypatch.setattr("holdfast.cli.options._say_on_terminal", said.append)
    with psycopg.connect(dsn, application_name="psql") as locker:
        locker.execute("LOCK TABLE core.outbox")
        pid = locker.info.backend_pid
        code, _, err = holdfast(*command)
    assert code == 1
    problem, remedy = err.splitlines()
    assert problem.startswith("error: ") and f"pid {pid}, login" in problem and "application psql" in problem
    assert remedy.startswith("try: ") and f"pg_terminate_backend({pid})" in remedy
    assert len(said) == 1 and f"waiting for a lock: pid {pid}" in said[0]


def test_a_dry_run_shows_the_first_ids(dsn: str, holdfast: Run) -> None:
    """DLQ-4."""
    ids = made(dsn, fail, 12)
    _, out, _ = holdfast("failed", "discard", "--all", "--dry-run")
    first, *listed, more = out.splitlines()
    assert (first.startswith("12 events would be discarded"), "and 2 more" in more) == (True, True)
    assert len(listed) == 10 and {line.strip() for line in listed} <= set(map(str, ids))


def test_what_was_cancelled_is_in_no_group(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """It has no handler, and none to replay it for (LSN-11, DLQ-3)."""
    insert = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}') RETURNING id"
    ((id,),) = db.execute(insert).fetchall()
    assert holdfast("events", "cancel", id, "--yes")[0] == 0
    code, out, _ = holdfast("events", "show", id)
    assert (code, "cancelled" in out, "group" in out, "None" in out) == (0, True, False, False)


def test_a_list_of_open_events_says_that_there_may_be_more(holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """OPS-1."""
    assert holdfast("events", "list") == (0, "none\n", "")
    for _ in range(3):
        db.execute("INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')")
    assert "there may be more" in holdfast("events", "list", "--limit", "3")[1]
    assert "there may be more" not in holdfast("events", "list", "--limit", "4")[1]


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        (("workers", "release", "01a1e3b9-decc-719c-b5fc-ffd65dc42ab1", "--yes"), "holdfast workers list"),
        (("schedules", "show", "nope"), "holdfast schedules list"),
        (("schedules", "pause", "reports.nope", "--yes"), "holdfast schedules list"),
    ],
)
def test_what_is_unknown_points_to_its_list(holdfast: Run, command: tuple[str, ...], listed: str) -> None:
    """OPS-1."""
    code, _, err = holdfast(*command)
    assert (code, "is unknown" in err, "try: " in err and listed in err) == (2, True, True), err


def test_replays_by_id_by_file_by_group_and_by_filter(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what became of each (DLQ-4)."""
    ids = made(dsn, fail, 6)
    others = made(dsn, fail_with, [KeyError("sku-1"), KeyError("sku-2")])
    code, out, _ = holdfast("failed", "replay", ids[0], "--json")
    assert code == 0
    assert json.loads(out) == {
        "action": "replay", "moved": [str(ids[0])], "left": {}, "dry_run": False, "generation": 0, "purge_at": None,
        "unknown_generation": False,
    }  # fmt: skip
    code, out, _ = holdfast("failed", "replay", ids[0])
    assert (code, "0 events replayed" in out, "1 event left: pending" in out) == (1, True, True)
    file = tmp_path / "ids"
    file.write_text(f"{ids[1]}\n\n{ids[2]}\n")
    assert holdfast("failed", "replay", "--ids-from", file, "--yes")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ids[3]}\n"))
    assert holdfast("failed", "replay", "--ids-from", "-", "--yes")[0] == 0
    groups = json.loads(holdfast("failed", "groups", "--json")[1])["groups"]
    (keys,) = [group["group"] for group in groups if "KeyError" in group["group"]]
    assert "2 events replayed" in holdfast("failed", "replay", "--group", keys, "--yes")[1]
    assert "2 events replayed" in holdfast("failed", "replay", "--handler", HANDLER, "--since", "1h", "--yes")[1]
    assert db.execute("SELECT count(*) FROM core.outbox WHERE status = 'pending'").fetchall() == [(8,)]
    assert others


@pytest.mark.newcomer
def test_open_events_are_cancelled_by_filter(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number in the question; without an id or a filter nothing is selected (OPS-1)."""
    insert = "INSERT INTO core.outbox (event_type, source, payload, handler_name) SELECT %s, 'shop', '{}', %s"
    db.execute(f"{insert} FROM generate_series(1, 3)", ["order.placed", HANDLER])
    db.execute(f"{insert} FROM generate_series(1, 2)", ["order.placed", "mail.thank"])
    before = snapshot(db)
    assert holdfast("events", "cancel")[0] == 2
    assert holdfast("events", "cancel", UNKNOWN, "--handler", HANDLER, "--yes")[0] == 2
    assert holdfast("events", "cancel", "--handler", "no.one", "--yes")[0] == 1
    assert holdfast("events", "cancel", "--handler", HANDLER)[0] == 2, "a question that nobody can answer"
    assert "3 events would be cancelled" in holdfast("events", "cancel", "--handler", HANDLER, "--dry-run")[1]
    answer(monkeypatch, "n")
    code, _, err = holdfast("events", "cancel", "--handler", HANDLER)
    assert (code, "Cancel 3 events?" in err) == (1, True)
    assert snapshot(db) == before
    code, out, _ = holdfast("events", "cancel", "--handler", HANDLER, "--reason", "gone", "--yes")
    assert (code, out) == (0, "3 events cancelled\n")
    open_ = "SELECT handler_name, count(*) FROM core.outbox WHERE settled_at IS NULL GROUP BY 1"
    assert db.execute(open_).fetchall() == [("mail.thank", 2)]
    code, out, _ = holdfast("events", "cancel", "--route", "mail.thank", "--generation", 0, "--yes", "--json")
    assert (code, len(json.loads(out)["moved"])) == (0, 2)


@pytest.mark.newcomer
def test_one_is_not_several_and_ids_have_names(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Singular and plural, both keys of an event, the id in the audit, and where ids are found (OPS-1)."""
    (failed,) = made(dsn, fail)
    assert "1 failed in 1 group;" in holdfast("failed", "groups")[1]
    db.execute("UPDATE core.outbox SET dedupe_key = 'cart-7' WHERE id = %s", [failed])
    code, out, _ = holdfast("events", "show", failed)
    assert code == 0
    assert re.search(r"idempotency key +\S", out) and re.search(r"event key +cart-7", out)
    assert json.loads(holdfast("events", "show", failed, "--json")[1])["event_key"] == "cart-7"
    assert holdfast("failed", "replay", failed, "--reason", "back")[0] == 0
    assert holdfast("failed", "replay", failed)[0] == 1
    out = holdfast("audit", "--action", "replay", "--json")[1]
    assert json.loads(out)[-1]["first_id"] == str(failed)
    assert (
        "1 event moved from generation 0 to 7" in holdfast("generations", "move", 0, "--to", 7, "--force", "--yes")[1]
    )
    for verb in ("show", "cancel"):
        code, _, err = holdfast("events", verb, "17", "--yes" if verb == "cancel" else "--json")
        assert code == 2 and "copy one from: holdfast events list" in err
    assert "holdfast workers list" in holdfast("workers", "release", "17", "--yes")[2]


@pytest.mark.newcomer
def test_an_event_whose_deliveries_were_replayed_is_no_mistake(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any]
) -> None:
    """By the event's own id, as by that of its delivery: exit code 1, because nothing was moved (DLQ-4)."""
    (delivery,) = made(dsn, fail)
    event = "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"
    db.execute(
        """INSERT INTO core.outbox (id, event_type, source, payload, handler_name, status, settled_at, delivered_at)
           VALUES (%s, 'order.placed', 'shop', '{}', '*', 'delivered', now(), now())""",
        [event],
    )
    db.execute("SELECT core.subscribe('billing', %s, '{order.placed}')", [HANDLER])
    named = "UPDATE core.outbox SET origin_id = %s, id = core.sibling_id(%s, handler_name, core.secret()) WHERE id = %s"
    db.execute(named, [event, event, delivery])
    assert holdfast("failed", "replay", event)[0] == 0
    code, out, _ = holdfast("failed", "replay", event)
    assert (code, "1 event left: pending" in out) == (1, True)
    assert holdfast("failed", "replay", UNKNOWN)[0] == 2
    code, out, _ = holdfast("uninstall", "--yes", "--i-know-this-deletes", "core")
    assert (code, "1 event deleted" in out) == (0, True), "an event and its delivery are one event"


def test_a_large_replay_needs_a_plan(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Which begins with a few (DLQ-4)."""
    made(dsn, fail, 1_001)
    code, _, err = holdfast("failed", "replay", "--all", "--yes")
    assert code == 2
    assert "1,001" in err and "holdfast plans create" in err
    assert db.execute("SELECT count(*) FROM core.outbox WHERE status = 'failed'").fetchall() == [(1_001,)]


def test_a_dead_letter_is_corrected(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, from the input, or in an editor (DLQ-4)."""
    first, second, third = made(dsn, fail, 3)
    file = tmp_path / "payload.json"
    file.write_text('{"n": 100}')
    code, out, _ = holdfast("failed", "edit", first, "--payload", file, "--yes", "--json")
    assert code == 0
    new = json.loads(out)["new_id"]
    assert db.execute("SELECT payload FROM core.outbox WHERE id = %s", [new]).fetchall() == [({"n": 100},)]
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"n": 200}'))
    assert holdfast("failed", "edit", second, "--payload", "-", "--yes")[0] == 0
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/3/300/' \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    answer(monkeypatch, "y")
    assert holdfast("failed", "edit", third)[0] == 0
    waiting = db.execute("SELECT (payload->>'n')::int FROM core.outbox WHERE status = 'pending' ORDER BY 1").fetchall()
    assert waiting == [(100,), (200,), (300,)]
    before = snapshot(db)
    (last,) = made(dsn, fail)
    for wrong in ("false", str(tmp_path / "missing")):
        monkeypatch.setenv("EDITOR", wrong)
        code, _, err = holdfast("failed", "edit", last)
        assert code == 2 and f"EDITOR is {wrong!r}" in err
    monkeypatch.setenv("EDITOR", "true")
    assert holdfast("failed", "edit", last)[:2] == (1, "nothing was changed\n")
    for text in ("[1]", "{", '{"n": NaN}', ""):
        file.write_text(text)
        assert holdfast("failed", "edit", last, "--payload", file, "--yes")[0] == 2, text
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert holdfast("failed", "edit", last, "--yes")[0] == 2, "no editor where there is no terminal"
    db.execute("DELETE FROM core.outbox WHERE id = %s", [last])
    assert snapshot(db) == before


def test_a_plan_from_the_command_line(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Made, shown, listed, turned; its exit code says whether it is done (DLQ-4)."""
    made(dsn, fail, 30)
    code, out, _ = holdfast("plans", "create", "--handler", HANDLER, "--canary", 5, "--rate", 100, "--patience", 1)
    assert code == 0
    for words in ("plan 1 ready", "30 rows: 30 to go", "at 100 a second; canary 5", "holdfast plans run 1"):
        assert words in out
    assert json.loads(holdfast("plans", "show", 1, "--json")[1])["preview"]["lines"][0]["count"] == 30
    assert holdfast("plans", "pause", 1)[0] == 0
    code, _, err = holdfast("plans", "run", 1, "--yes")
    assert (code, "try: holdfast plans resume 1" in err) == (1, True)
    code, out, _ = holdfast("plans", "resume", 1)
    assert (code, "no process runs it: holdfast plans run 1" in out) == (0, True)
    code, out, err = holdfast("plans", "run", 1, "--yes")
    assert code == 1, "nobody is there to handle anything"
    assert "plan 1 stopped: no worker was heard of for 00:00:01" in out
    assert out.endswith("when the cause is gone: holdfast plans resume 1\n")
    assert "plan 1: waiting" in err, "progress where there is no terminal"
    assert [plan["state"] for plan in json.loads(holdfast("plans", "list", "--json")[1])] == ["stopped"]
    assert holdfast("plans", "cancel", 1)[0] == 2, "asks"
    assert holdfast("plans", "cancel", 1, "--yes", "--reason", "a test")[0] == 0
    assert json.loads(holdfast("plans", "list", "--unfinished", "--json")[1]) == []
    assert db.execute("SELECT count(*) FROM core.outbox WHERE status = 'failed'").fetchall() == [(30,)]


def test_the_actor_is_who_runs_the_command(
    dsn: str, holdfast: Run, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option, else HOLDFAST_ACTOR, else user@host (S17)."""
    ids = made(dsn, fail, 3)
    monkeypatch.delenv("HOLDFAST_ACTOR")
    assert holdfast("failed", "replay", ids[0])[0] == 0
    monkeypatch.setenv("HOLDFAST_ACTOR", "bob")
    assert holdfast("failed", "replay", ids[1])[0] == 0
    assert holdfast("failed", "replay", ids[2], "--actor", "carol")[0] == 0
    actors = [actor for (actor,) in db.execute("SELECT actor FROM core.audit ORDER BY id").fetchall()]
    assert actors[1:] == ["bob", "carol"]
    assert "@" in actors[0]
    assert [line["actor"] for line in json.loads(holdfast("audit", "--actor", "bob", "--json")[1])] == ["bob"]


def test_a_list_that_is_empty_because_of_a_typo_says_so(dsn: str, holdfast: Run) -> None:
    """On stderr, beside a table and beside JSON; nothing is said of a handler that has nothing to list (OPS-1)."""
    made(dsn, subscribe)
    made(dsn, fail, 1)
    made(dsn, subscribe, "mail.thank")
    for command in (
        ("failed", "list"), ("failed", "groups"), ("failed", "histogram"), ("events", "list"),
        ("events", "list", "--state", "all"), ("keys", "blocked"),
    ):  # fmt: skip
        for form in ((), ("--json",)):
            code, out, err = holdfast(*command, "--handler", "billing.charge_crad", *form)
            assert code == 0 and out
            assert err == f"no handler billing.charge_crad was ever registered; did you mean {HANDLER}?\n", command
            assert holdfast(*command, "--handler", "mail.thank", *form)[2] == ""
    _, _, err = holdfast("failed", "list", "--handler", "x.y")
    assert err == "no handler x.y was ever registered; all names: holdfast handlers list\n"


# --- bad arguments ---

UNKNOWN = str(uuid4())
SQL = "x'; DELETE FROM core.outbox; --"
BAD: list[tuple[object, ...]] = [
    ("failed", "replay"),
    ("failed", "replay", UNKNOWN),
    ("failed", "replay", "None"),
    ("failed", "replay", SQL),
    ("failed", "replay", "--handler", SQL),
    ("failed", "replay", "--handler", "no.such"),
    ("failed", "replay", "--signature", SQL),
    ("failed", "replay", "--source", SQL),
    ("failed", "replay", "--group", SQL),
    ("failed", "replay", "--group", "no.such/E:1"),
    ("failed", "replay", "--failure-reason", "cancelled"),
    ("failed", "replay", "--since", "infinity"),
    ("failed", "replay", "--since", "-1h"),
    ("failed", "replay", "--since", "9999999w"),
    ("failed", "replay", "--all", "--handler", HANDLER),
    ("failed", "replay", "--all", "--generation", "-1"),
    ("failed", "replay", "--all", "--generation", "inf"),
    ("failed", "replay", "--all", "--reason", ""),
    ("failed", "replay", "--ids-from", "/nowhere/at/all"),
    ("failed", "replay", "--all", "--actor", "two\nlines"),
    ("failed", "discard"),
    ("failed", "discard", UNKNOWN),
    ("failed", "discard", "--of-generation", "-7"),
    ("failed", "restore", UNKNOWN),
    ("failed", "show", UNKNOWN),
    ("failed", "show", "1"),
    ("failed", "list", "--limit", "0"),
    ("failed", "list", "--limit", "-1"),
    ("failed", "list", "--limit", "1000001"),
    ("failed", "list", "--event-type", "a b"),
    ("failed", "note", "nothing", "x"),
    ("failed", "note", f"{HANDLER}/E:404", "x"),
    ("failed", "edit", UNKNOWN, "--payload", "-"),
    ("events", "show", UNKNOWN),
    ("events", "cancel", UNKNOWN, "--yes"),
    ("events", "list", "--limit", "0"),
    ("plans", "create"),
    ("plans", "create", UNKNOWN),
    ("plans", "create", "--handler", "no.such"),
    ("plans", "create", "--all", "--rate", "inf"),
    ("plans", "create", "--all", "--rate", "nan"),
    ("plans", "create", "--all", "--rate", "-3"),
    ("plans", "create", "--all", "--canary", "-1"),
    ("plans", "create", "--all", "--max-failure-ratio", "2"),
    ("plans", "create", "--all", "--patience", "0"),
    ("plans", "show", "7"),
    ("plans", "run", "7"),
    ("plans", "run", "-7"),
    ("plans", "pause", "7"),
    ("plans", "resume", "0"),
    ("plans", "cancel", "9" * 30),
    ("handlers", "retire", "no.such"),
    ("handlers", "retire", SQL),
    ("generations", "move", "5", "--to", "6"),
    ("generations", "move", "0", "--to", "0"),
    ("generations", "retire", "5"),
    ("audit", "--since", SQL),
    ("audit", "--limit", "0"),
]


def test_bad_arguments_change_nothing(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """A clear error in two lines, exit code 2, and not even a line in the audit (S5, S9, OPS-1)."""
    made(dsn, subscribe)
    made(dsn, fail, 3)
    before = snapshot(db)
    for arguments in BAD:
        code, out, err = holdfast(*arguments, *(("--yes",) if "failed" in arguments and "discard" in arguments else ()))
        assert (code, out) == (2, ""), (arguments, code, out, err)
        assert "Traceback" not in err
        # typer has its own way to say what it cannot parse
        assert ("error: " in err and "try: " in err) or "Usage: " in err, (arguments, err)
    assert snapshot(db) == before


def test_a_million_ids_are_refused(dsn: str, holdfast: Run, db: psycopg.Connection[Any], tmp_path: Path) -> None:
    """S9."""
    made(dsn, fail, 1)
    file = tmp_path / "ids"
    file.write_text("".join(f"{UUID(int=n)}\n" for n in range(1_000_000)))
    before = snapshot(db)
    for command in (("failed", "replay"), ("failed", "discard"), ("plans", "create")):
        code, _, err = holdfast(*command, "--ids-from", file)
        assert (code, "more than 10,000" in err) == (2, True), command
    assert snapshot(db) == before


# --- completion ---


def test_the_shell_completes_commands(holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-1."""
    monkeypatch.setenv("_HOLDFAST_COMPLETE", "complete_bash")
    for words, found in {
        "holdfast fai": {"failed"},
        "holdfast plans p": {"pause"},
        "holdfast failed re": {"replay", "restore"},
        "holdfast failed replay --gr": {"--group"},
    }.items():
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        code, out, _ = holdfast()
        assert (code, set(out.split())) == (0, found)
    assert EVENT
