"""`Operator` is the third entry point: the example of its docstring runs, and every verb is reachable from it."""

from __future__ import annotations

import asyncio
import inspect
import re
import textwrap
from typing import Any

import asyncpg
import pytest

import holdfast
from holdfast import Operator
from holdfast.errors import SchemaMismatch
from tests.operator.support import ACTOR, fail, states

VERBS = {
    "archive": {"count", "detail", "discard", "groups", "page", "replay", "resolve", "restore", "select"},
    "audit": {"of_event", "page"},
    "events": {
        "ancestors", "cancel", "cancel_many", "children", "detail", "find", "page", "reveal", "search", "select",
    },
    "failed": {
        "count_discarded", "discard", "edit", "groups", "histogram", "note", "page", "pages", "replay", "resolve",
        "restore", "select",
    },
    "generations": {"all", "begin", "move", "retire"},
    "handlers": {
        "all", "close", "drained", "known", "limit", "open", "pause", "resume", "retire", "show", "via",
    },
    "keys": {"blocked", "release"},
    "partitions": {"disable", "enable", "status"},
    "plans": {"cancel", "create", "detail", "failed_again", "outcomes", "page", "pause", "read", "resume", "run"},
    "relay": {"again", "check", "interests", "repair", "rotate", "show", "wanted"},
    "requests": {"detail", "page"},
    "retention": {"erase", "preview_erasure", "report", "set_policy", "size", "sweep"},
    "schedules": {"all", "detail", "pause", "remove", "resume", "trigger"},
    "wakeup": {"mode", "set_mode"},
    "workers": {"all", "release"},
}  # fmt: skip


def verbs(of: object) -> set[str]:
    """Public coroutine functions, and generators of results."""
    members = inspect.getmembers(of, lambda m: inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m))
    return {name for name, _ in members if not name.startswith("_")}


def test_every_verb_is_reachable() -> None:
    """User interfaces need nothing else (OPS-1)."""
    operator = Operator("postgresql://h/db", actor=ACTOR)
    assert verbs(operator) == {
        "balance", "doctor", "failing", "flow", "metrics", "migrations", "rates", "series", "signals", "status",
    }  # fmt: skip
    nouns = {name: verbs(noun) for name, noun in vars(operator).items() if not name.startswith("_")}
    assert nouns == VERBS
    undocumented = [
        name for noun in nouns for name in nouns[noun] if not getattr(getattr(operator, noun), name).__doc__
    ]
    assert undocumented == []


async def test_the_example_of_the_docstring_runs(
    dsn: str, conn: asyncpg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does what it says (OPS-1)."""
    await fail(conn, 3)
    example = re.search(r"(?m)(^        async with .*\n(?:^            .*\n)+)", str(Operator.__doc__) + "\n")
    assert example
    text = "async def run(dsn, Operator):\n" + textwrap.indent(textwrap.dedent(example[1]), "    ")
    scope: dict[str, Any] = {}
    exec(compile(text, "docstring", "exec"), scope)  # noqa: S102
    await asyncio.wait_for(scope["run"](dsn, Operator), 30)
    said = capsys.readouterr().out
    assert "0 pending, 3 failed" in said and "billing.charge_card/" in said
    assert await states(conn) == {"pending": 1, "failed": 2}


async def test_a_missing_schema_can_be_examined(empty_dsn: str) -> None:
    """The doctor and the migrations answer; other verbs refuse (OPS-5)."""
    async with Operator(empty_dsn, actor=ACTOR) as operator:
        assert not (await operator.doctor()).healthy
        assert (await operator.migrations()).database_version == 0
        for verb in (operator.status, operator.failed.page, operator.metrics, operator.retention.sweep):
            with pytest.raises(SchemaMismatch, match="not installed"):
                await verb()


async def test_a_closed_operator_says_so(dsn: str) -> None:
    """OPS-1."""
    operator = Operator(dsn, actor=ACTOR)
    with pytest.raises(holdfast.HoldfastError, match="async with Operator"):
        await operator.status()


async def test_status_and_wake_up_mode(dsn: str, conn: asyncpg.Connection) -> None:
    """Verbs that only the command line had (OPS-1)."""
    await fail(conn, 2)
    async with Operator(dsn, actor=ACTOR) as operator:
        assert (await operator.status()).failed == 2
        assert await operator.workers.all() == []
        assert await operator.wakeup.mode() == "when_idle"
        assert await operator.wakeup.set_mode("never", reason="a test") == "when_idle"
        assert await operator.wakeup.mode() == "never"
        (line,) = await operator.audit.page()
        assert (line.actor, line.reason) == (ACTOR, "a test")
        assert (await operator.migrations()).up_to_date
