"""What operators do about handlers: limit, pause, resume, open and close, by verbs and on the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.cli import output
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused
from tests.operator.support import ACTOR, EVENT, HANDLER, subscribe
from tests.operator.test_commands import Run, holdfast, made

__all__ = ["holdfast"]


@pytest.fixture
async def operator(conn: asyncpg.Connection, dsn: str) -> AsyncIterator[Operator]:
    await subscribe(conn, HANDLER, EVENT)
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


async def declare_breaker(conn: asyncpg.Connection) -> None:
    await conn.execute("SELECT core.flow_declare($1, $2, $3, $4, $5, $6)", [HANDLER], [7], [None], [5], [1], [30])


async def retried(conn: asyncpg.Connection) -> None:
    """An event that waits for its second attempt."""
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, handler_name, attempts, last_error, available_at)
           VALUES ($1, 'shop', '{}', $2, 1, 'Busy: the bank does not answer', now() + interval '1 minute')""",
        EVENT,
        HANDLER,
    )


async def audited(conn: asyncpg.Connection) -> list[str]:
    return [row[0] for row in await conn.fetch("SELECT action FROM core.audit ORDER BY id")]


async def test_limits_are_set_and_cleared(conn: asyncpg.Connection, operator: Operator) -> None:
    """A dry run changes nothing; what is set is shown with who has set it (LSN-10, S17)."""
    await declare_breaker(conn)
    would = await operator.handlers.limit(HANDLER, fleet_concurrency=3, rate="90/min", dry_run=True)
    assert would.flow is not None
    assert (would.changed, would.flow.fleet_concurrency, would.flow.rate) == (True, 3, 1.5)
    assert await audited(conn) == []
    await operator.handlers.limit(HANDLER, fleet_concurrency=3, rate="90/min", reason="partner is slow")
    flow = (await operator.handlers.show(HANDLER)).flow
    assert flow is not None
    assert (flow.fleet_concurrency, flow.rate, flow.set_by_operator) == (3, 1.5, ["fleet_concurrency", "rate"])
    back = await operator.handlers.limit(HANDLER, clear=["fleet_concurrency", "rate"])
    assert back.flow is not None
    assert (back.flow.fleet_concurrency, back.flow.rate, back.flow.set_by_operator) == (7, None, [])
    assert not (await operator.handlers.limit(HANDLER, clear=["rate"])).changed
    assert await audited(conn) == ["handler.limit"] * 3


async def test_a_handler_is_paused_and_resumed(conn: asyncpg.Connection, operator: Operator) -> None:
    """And forgotten afterwards, when nothing else holds it back (LSN-10)."""
    assert (await operator.handlers.pause(HANDLER, reason="partner moves")).changed
    [found] = await operator.handlers.all()
    assert found.flow is not None
    assert (found.flow.holds, found.flow.paused_by) == (True, ACTOR)
    assert not (await operator.handlers.pause(HANDLER)).changed
    resumed = await operator.handlers.resume(HANDLER)
    assert (resumed.changed, resumed.flow) == (True, None)
    assert await audited(conn) == ["handler.pause", "handler.pause", "handler.resume"]


async def test_a_breaker_is_opened_and_closed(conn: asyncpg.Connection, operator: Operator) -> None:
    """Only where there is one; a refusal is in the audit too (LSN-17)."""
    with pytest.raises(Refused, match="has no breaker"):
        await operator.handlers.open(HANDLER)
    await declare_breaker(conn)
    opened = await operator.handlers.open(HANDLER, reason="partner announced work")
    assert opened.flow is not None
    assert (opened.changed, opened.flow.breaker) == (True, "open")
    assert opened.flow.probe_in is not None
    assert 0 < opened.flow.probe_in <= 1.2
    closed = await operator.handlers.close(HANDLER)
    assert closed.flow is not None
    assert (closed.changed, closed.flow.breaker, closed.flow.opened_at) == (True, "ramp", None)
    assert not (await operator.handlers.close(HANDLER)).changed
    assert await audited(conn) == ["breaker.open", "breaker.open", "breaker.close", "breaker.close"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"fleet_concurrency": 0}, "fleet_concurrency"),
        ({"fleet_concurrency": True}, "fleet_concurrency"),
        ({"fleet_concurrency": 100_001}, "fleet_concurrency"),
        ({"rate": "0/s"}, "rate"),
        ({"rate": "100"}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"rate": "-1/s"}, "rate"),
        ({"rate": "1e9/s"}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "9" * 50 + "/s"}, "rate"),
        ({"clear": ["everything"]}, "clear"),
        ({"rate": "1/s", "clear": ["rate"]}, "clear"),
        ({}, "fleet_concurrency"),
    ],
)
async def test_bad_limits_name_field_and_remedy(operator: Operator, asked: dict[str, object], field: str) -> None:
    """Before anything is sent (LSN-10, R5)."""
    with pytest.raises(ConfigurationError) as refused:
        await operator.handlers.limit(HANDLER, **asked)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert refused.value.remedy


async def test_an_unknown_handler_is_refused(operator: Operator) -> None:
    """For every verb (LSN-10)."""
    for verb in (operator.handlers.pause, operator.handlers.resume, operator.handlers.open, operator.handlers.show):
        with pytest.raises(ConfigurationError, match=r"no\.body is unknown"):
            await verb("no.body")


def test_the_commands_fit_80_columns(holdfast: Run, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 for a change, 1 for none, 2 for bad input; JSON for programs (OPS-1, LSN-10, LSN-17)."""
    monkeypatch.setattr(output, "_UNLIMITED", 80)  # as on a terminal of that width
    made(dsn, subscribe)
    made(dsn, declare_breaker)
    steps = [
        (("limit", HANDLER, "--fleet-concurrency", "3", "--rate", "100/s"), 0),
        (("limit", HANDLER, "--rate", "0/s"), 2),
        (("limit", HANDLER, "--clear", "everything"), 2),
        (("pause", HANDLER, "--dry-run"), 0),
        (("pause", HANDLER), 0),
        (("pause", HANDLER), 1),
        (("open", HANDLER), 0),
    ]
    for words, code in steps:
        ended, out, err = holdfast("handlers", *words, "--yes")
        assert ended == code, (words, out, err)
    _, listed, _ = holdfast("handlers", "list")
    made(dsn, retried)
    _, shown, _ = holdfast("handlers", "show", HANDLER)
    for screen in (listed, shown):
        assert max(map(len, screen.splitlines())) <= 80
    assert "PAUSED, breaker OPEN, 3 at once (set), 100/s (set)" in " ".join(listed.split())
    assert f"by {ACTOR}" in shown
    assert "last error      Busy: the bank does not answer" in shown
    for word in ("close", "resume"):
        ended, out, err = holdfast("handlers", word, HANDLER, "--yes", "--json")
        assert ended == 0, err
        assert json.loads(out)["changed"] is True
    assert json.loads(holdfast("handlers", "show", HANDLER, "--json")[1])["flow"]["paused_at"] is None


def test_a_change_says_what_it_did_and_a_dry_run_what_it_would(dsn: str, holdfast: Run) -> None:
    """Nobody takes a dry run for a pause; why a handler is paused stands beside who did it (OPS-1, LSN-10)."""
    made(dsn, subscribe, HANDLER, EVENT)
    for words, said in (
        (("pause", HANDLER, "--dry-run"), ("would be paused", "afterwards PAUSED")),
        (("resume", HANDLER, "--yes"), ("not changed: it was not paused", "now nothing holds it back")),
        (("pause", HANDLER, "--yes", "--reason", "the bank is closed"), ("paused", "now PAUSED")),
        (("pause", HANDLER, "--yes"), ("not changed: it was paused before", "now PAUSED")),
        (("limit", HANDLER, "--rate", "5/s", "--yes"), ("limits changed", "now PAUSED, 5/s (set)")),
        (("limit", HANDLER, "--clear", "rate", "--dry-run"), ("limits would be changed", "afterwards PAUSED")),
    ):
        _, out, err = holdfast("handlers", *words)
        assert (out.splitlines(), err) == ([f"{HANDLER}: {each}" for each in said], "")
    _, shown, _ = holdfast("handlers", "show", HANDLER)
    assert f"by {ACTOR}: the bank is closed" in shown
    assert holdfast("handlers", "resume", HANDLER, "--yes")[1].startswith(f"{HANDLER}: resumed\n")


def test_limits_that_are_missing_or_contradict_each_other(dsn: str, holdfast: Run) -> None:
    """In the words of the command line (OPS-1)."""
    made(dsn, subscribe, HANDLER, EVENT)
    code, _, err = holdfast("handlers", "limit", HANDLER, "--yes")
    assert code == 2 and "error: --fleet-concurrency or --rate is missing" in err
    code, _, err = holdfast("handlers", "limit", HANDLER, "--rate", "5/s", "--clear", "rate", "--yes")
    assert code == 2 and "clear names rate, which is given too" in err
