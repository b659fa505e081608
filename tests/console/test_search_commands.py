"""The commands that search: what they print, for people and for programs (OPS-1)."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from holdfast import Publisher
from holdfast.cli.app import run
from tests.operator.support import fail
from tests.servers import run_coroutine


class Shell:
    """Commands in this process, with what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        assert run(list(words)) == code, self._capsys.readouterr().err
        return self._capsys.readouterr().out

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))

    def error(self, *words: str) -> str:
        self._capsys.readouterr()
        assert run(list(words)) == 2
        return self._capsys.readouterr().err


@pytest.fixture
def shell(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("HOLDFAST_DSN", dsn)
    monkeypatch.setenv("HOLDFAST_ACTOR", "ann@example.org")
    return Shell(capsys)


def test_searching_from_the_command_line(dsn: str, shell: Shell) -> None:
    """Every search has a table and JSON, and says how to go on (OPS-1)."""

    async def fill() -> tuple[str, str, str]:
        conn = await asyncpg.connect(dsn)
        async with conn.transaction():
            publisher = Publisher(source="shop")
            cause = (await publisher.publish(conn, "order.placed", {}, key="order-17")).event_id
            effect = (await publisher.publish(conn, "mail.sent", {}, causation_id=str(cause))).event_id
            await conn.fetch("SELECT core.idempotency_begin('http:ann', 'a-key-of-hers', '{h}', 1, '1 day', 100, NULL)")
            await conn.fetch(
                "SELECT core.idempotency_complete('http:ann', 'a-key-of-hers', false, 201, '{}', 'x', false)"
            )
        (dead,) = await fail(conn)
        await conn.close()
        return str(cause), str(effect), str(dead)

    cause, effect, dead = run_coroutine(fill)
    assert {each["id"] for each in shell.json("events", "list", "--state", "all")["events"]} == {cause, effect, dead}
    first = shell.json("events", "list", "--state", "all", "--limit", "1")
    assert first["events"][0]["id"] == dead == first["next"]
    assert f"--before {dead}" in shell("events", "list", "--state", "all", "--limit", "1")
    assert effect in shell("events", "list", "--before", dead, "--limit", "1")
    assert "--route selects open events only" in shell.error("events", "list", "--state", "all", "--route", "a.b")
    assert "state 'lost' is unknown" in shell.error("events", "list", "--state", "lost")
    assert cause in shell("events", "find", "order-17")
    assert shell("events", "find", "order-18", code=1).strip() == "none"
    assert effect in shell("events", "children", cause)
    assert [each["event_id"] for each in shell.json("events", "causes", effect)] == [effect, cause]
    shell("failed", "discard", dead, "--reason", "a test", "--yes")
    assert "discard" in shell("audit", "--event", dead)
    assert "together with a filter" in shell.error("audit", "--event", dead, "--actor", "ann")
    shell("failed", "restore", dead, "--yes")
    assert "|" in shell("failed", "histogram", "--steps", "4")
    assert sum(shell.json("failed", "histogram")["groups"][0]["counts"]) == 1
    shell("plans", "create", dead)
    assert shell.json("plans", "failed", "1") == {"plan": 1, "rows": [], "next": None}
    assert shell("plans", "failed", "1").strip() == "none"
    assert "plan 2 is unknown" in shell.error("plans", "failed", "2")
    listed = shell("requests", "list")
    assert "http:ann" in listed and "a-key-…" in listed and "a-key-of-hers" not in listed
    assert shell.json("requests", "show", "http:ann", "a-key-of-hers")["status_code"] == 201
    assert "201" in shell("requests", "show", "http:ann", "a-key-of-hers")
    assert "key was not used in this scope" in shell.error("requests", "show", "http:ann", "another")
