"""What commands print at 80 and at 120 columns: lines end at words, and names that are copied stay whole."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from holdfast.cli import doctor, groups, output, plans, retention, status
from holdfast.cli.options import Change
from holdfast.cli.rates import WINDOWS
from holdfast.operator import (
    BlockedKeys,
    Erasure,
    FailureGroup,
    FailureGroups,
    Finding,
    Plan,
    PlanReport,
    Preview,
    Report,
    Status,
)
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.plans import PreviewLine

AT = datetime(2026, 11, 16, 3, 4, 5, tzinfo=UTC)
ID = UUID("01a1e3b9-decc-719c-b5fc-ffd65dc42ab1")
HANDLER = "ledger.book_into_the_general_ledger_of_the_whole_company"
GROUP = f"{HANDLER}/ValueError:5d41402abc4b2a76"

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], list[str]]]:
    """at(80) is a terminal of 80 columns; what it returns has the lines that were printed since."""

    def set_width(columns: int) -> Callable[[], list[str]]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        capsys.readouterr()
        return lambda: [ANSI.sub("", line).rstrip() for line in capsys.readouterr().out.splitlines()]

    return set_width


Terminal = Callable[[int], Callable[[], list[str]]]


def test_a_table_that_does_not_fit_becomes_records(at: Terminal) -> None:
    """The id has a line of its own, whatever the width (OPS-1)."""
    headers = ("id", "failed at", "handler", "reason", "attempts", "note", "error")
    error = "ConnectionError: smtp host mail0.example.org:25 refused the connection for a customer"
    row = (ID, AT, "mail.confirm", "retry_terminal", 5, None, error)
    lines = at(80)
    output.print_table(headers, [row])
    assert lines() == [
        str(ID),
        "  failed at 2026-11-16 03:04:05  handler mail.confirm  reason retry_terminal",
        "  attempts 5",
        "  error ConnectionError: smtp host mail0.example.org:25 refused the connection",
        "    for a customer",
    ]
    lines = at(120)
    output.print_table(headers, [row])
    assert lines() == [
        str(ID),
        "  failed at 2026-11-16 03:04:05  handler mail.confirm  reason retry_terminal  attempts 5",
        f"  error {error}",
    ]
    lines = at(80)
    output.print_table(("id", "attempts"), [(ID, 5)])
    assert lines() == ["id                                    attempts", f"{ID}  5"]
    output.print_table(headers, [])
    assert lines() == ["none"]


def test_the_name_of_a_group_stays_whole(at: Terminal) -> None:
    """Also one that is longer than a line (DLQ-3, OPS-1)."""
    group = FailureGroup(
        HANDLER, "ValueError:5d41402abc4b2a76", 1, AT, AT, ["rejected"], ["order.placed"], [0], ID, "no", *3 * [None]
    )  # fmt: skip
    for columns in (80, 120):
        lines = at(columns)
        groups.show_groups(FailureGroups([group], 1), False)
        first, name, *others = lines()
        assert (first.startswith("1 failed in 1 group"), name) == (True, GROUP)
        assert all(len(line) <= columns for line in others)


def test_plans_and_erasures_end_at_words(at: Terminal) -> None:
    """At 80 columns as at 120 (DLQ-5, S6)."""
    plan = Plan(
        id=12, created_at=AT, created_by="ada@example.org", reason="it is back", selection={}, generation=None,
        canary=10, rate=5.0, max_failure_ratio=0.2, patience=timedelta(seconds=60), force=False, state="open",
        state_reason=None, finished_at=None, canary_passed=False, runner=None, run_by=None, running=False, total=12_000,
        pending=12_000, replayed=0, delivered=0, failed=0, skipped=0,
    )  # fmt: skip
    preview = Preview([PreviewLine(HANDLER, "ValueError:5d41402abc4b2a76", 0, 12_000, 0, 0)], {})
    erasure = Erasure(ID, 3, 0, 1, True, 2, {"audit": 1})
    for columns in (80, 120):
        lines = at(columns)
        plans._show(PlanReport(plan, preview), False)
        retention.print_erasure(erasure, Change(dry_run=True), False)
        found = lines()
        assert HANDLER in found
        assert all(len(line) <= columns for line in found)
        assert "of those to go, 0 were handled already and will be skipped by their handlers, 0 are" in " ".join(
            " ".join(found).split()
        )


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_of_a_plan_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line, with its numbers (DLQ-5)."""
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar() as bar:
        bar.start()
        counts = plans.progress_text(12, "waiting", delivered=12_000, failed=10, replayed=300)
        bar.add_task(counts, total=20_000, completed=12_310)
        bar.refresh()
        rendered = [line for line in ANSI.sub("", written.getvalue()).replace("\r", "\n").splitlines() if line.strip()]
    assert any("12,000 delivered, 10 failed, 300 open" in line and "12310/20000" in line for line in rendered), rendered
    assert all(len(line) <= columns for line in rendered)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_commands_of_a_status_stay_whole(columns: int, at: Terminal) -> None:
    """What is wrong is broken at words, and what to do about it can be copied (OPS-1)."""
    blocked = (BlockedKeys(HANDLER, 3, AT),)
    nothing: Excerpt[Any] = Excerpt([], 0)
    found = Status(3, 0, 0, 0, 1, 0, False, nothing, [], 0, nothing, "when_idle", blocked=blocked)
    lines = at(columns)
    output.console().print(status._shown("core", found, {minutes: [] for minutes in WINDOWS}, None), crop=False)
    printed = lines()
    assert f"  holdfast keys blocked --handler {HANDLER}" in printed
    assert all(len(line) <= columns for line in printed if "holdfast" not in line)


def test_findings_end_at_words_and_their_statements_stay_whole(at: Terminal) -> None:
    """OPS-5."""
    alter = "ALTER TABLE core.outbox ADD CONSTRAINT outbox_status CHECK (status IN ('pending', 'failed'));"
    statement = f"SET lock_timeout = '5s';\n{alter}"
    command = f"holdfast handlers retire {HANDLER}"
    prose = f"start the worker that has it, or move the events to a generation that is served: {command}"
    what = "events are owed to a handler with a long name, and no living worker has a handler of that name"
    findings = tuple(Finding("problem", "handler-unserved", "x", what, what, remedy) for remedy in (prose, statement))
    report = Report("core", "18.1", "holdfast_owner", ("handlers",), (), findings)
    lines = at(80)
    doctor._show(report, None)
    assert lines()[2:] == [
        "  handler-unserved  events are owed to a handler with a long name, and no living",
        "      worker has a handler of that name",
        "      events are owed to a handler with a long name, and no living worker has a",
        "        handler of that name",
        "      try: start the worker that has it, or move the events to a generation that",
        "           is served:",
        f"           {command}",
        "  handler-unserved  events are owed to a handler with a long name, and no living",
        "      worker has a handler of that name",
        "      events are owed to a handler with a long name, and no living worker has a",
        "        handler of that name",
        "      try: SET lock_timeout = '5s';",
        f"           {alter}",
        "0 of 1 checks passed",
        "Statements are for the schema's owner: SET ROLE holdfast_owner;",
    ]


def test_no_line_of_a_finding_is_too_wide(at: Terminal) -> None:
    """Of what is found, a sentence before a statement, and a comment above one, which stays a comment (OPS-5)."""
    what = "could not check listeners, workers, generations, channels, handlers and 12 more of " + "these " * 20
    select = "SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY 2;"
    end = "SELECT pg_terminate_backend(5823);"
    remedies = (
        f"end the session that listens and stays in a transaction, most likely the first of: {select}",
        f"-- as an administrator; what that session has not committed is rolled back:\n{end}",
    )
    findings = tuple(Finding("problem", "delivery-blocked", "x", what, what, remedy) for remedy in remedies)
    lines = at(80)
    doctor._show(Report("core", "18.1", None, ("handlers",), (), findings), None)
    printed = lines()
    assert all(len(line) <= 80 for line in printed)
    assert f"           {select}" in printed and f"           {end}" in printed
    assert [line.removeprefix("      try: ").strip() for line in printed if "-- " in line] == [
        "-- as an administrator; what that session has not committed is rolled",
        "-- back:",
    ]
