"""The catalogue of verbs that the HTTP API and the MCP server are made from (OPS-3)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from holdfast.cli.output import print_json
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import Operator, Refused
from holdfast.operator.catalogue import VERBS, document, plain
from holdfast.operator.roles import Role
from tests.operator.support import ACTOR, HANDLER, actions, beat, fail, states

# Methods whose verb has another name, and those that are a part of other verbs.
NAMED = {
    "events.page": "events.list",
    "events.detail": "events.show",
    "events.ancestors": "events.causes",
    "failed.page": "failed.list",
    "failed.count_discarded": "failed.discarded",
    "plans.page": "plans.list",
    "plans.detail": "plans.show",
    "plans.failed_again": "plans.failed",
    "archive.page": "archive.list",
    "archive.detail": "archive.show",
    "handlers.all": "handlers.list",
    "workers.all": "workers.list",
    "generations.all": "generations.list",
    "schedules.all": "schedules.list",
    "schedules.detail": "schedules.show",
    "retention.report": "retention.show",
    "retention.set_policy": "retention.set",
    "audit.page": "audit.list",
    "audit.of_event": "audit.event",
    "requests.page": "requests.list",
    "requests.detail": "requests.show",
    "wakeup.mode": "notify.show",
    "wakeup.set_mode": "notify.set",
}
PARTS = {
    "failed.pages": "failed.list",
    "failed.select": "failed.replay",
    "failed.resolve": "failed.replay",
    "events.select": "events.cancel_many",
    "archive.select": "archive.replay",
    "archive.resolve": "archive.replay",
    "archive.count": "archive.groups",
    "handlers.known": "handlers.list",
    "plans.read": "plans.show",
    "relay.interests": "relay.show",
    "relay.wanted": "handlers.via",
    "retention.size": "retention.erase",
    "retention.preview_erasure": "retention.erase",
}


def methods(operator: Operator) -> Iterator[str]:
    """Every public method of an operator and of its groups."""
    for name, value in inspect.getmembers(operator):
        if name.startswith("_") or name in ("on", "actor", "schema"):
            continue
        if inspect.ismethod(value):
            yield name
        else:
            yield from (
                f"{name}.{each}" for each, _ in inspect.getmembers(value, inspect.isroutine) if not each.startswith("_")
            )


def test_every_verb_of_an_operator_is_in_it() -> None:
    """One that was forgotten would be missing in the HTTP API and in the MCP server (OPS-3)."""
    operator = Operator("postgresql://nobody@localhost/nothing", actor="ann")
    found = {NAMED.get(name, PARTS.get(name, name)) for name in methods(operator)}
    assert found == set(VERBS)


def test_every_verb_says_what_it_does_and_who_may_do_it() -> None:
    """Reads are for viewers, changes are not, and what changes something has a dry run (OPS-3)."""
    for name, verb in VERBS.items():
        assert verb.name == name and verb.summary.endswith("."), name
        assert (verb.role is Role.VIEWER) == (not verb.changes), name
        assert ("dry_run" in verb.arguments.model_fields) == verb.changes, name
        assert json.dumps(verb.arguments.model_json_schema())
        if "limit" in verb.arguments.model_fields:
            assert verb.arguments.model_json_schema()["properties"]["limit"]["maximum"] == 200


@pytest.mark.parametrize(
    "text", ["2026-01-31T08:00:00Z", "2026-01-31T09:00:00+01:00", "2026-01-31T08:00:00.000000+00:00"]
)
@pytest.mark.parametrize(
    "name", ["events.search", "failed.list", "failed.groups", "failed.replay", "audit.list", "requests.list"]
)
def test_times_are_taken_as_they_are_written(name: str, text: str) -> None:
    """With their zone, as a list prints them and as a filter asks for them (OPS-3)."""
    given = VERBS[name].parse({"since": text})
    assert given.since == datetime(2026, 1, 31, 8, tzinfo=UTC)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("failed.replay", {"group": "a.b/c", "rows": 1}, "arguments"),
        ("failed.replay", {"ids": []}, "ids"),
        ("failed.replay", {"ids": ["x"]}, "ids"),
        ("failed.list", {"limit": 201}, "limit"),
        ("failed.list", {"limit": "5"}, "limit"),
        ("failed.list", {"since": "2026-01-01T00:00:00"}, "since"),
        ("failed.discard", {"ids": ["0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"]}, "reason"),
        ("failed.replay", {"ids": ["0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"], "force": True}, "reason"),
        ("retention.erase", {"domain_id": "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"}, "reason"),
        ("events.search", {"state": "lost"}, "state"),
        ("events.find", {"key": "a\u0000b"}, "key"),
        ("plans.create", {"rate": float("nan")}, "rate"),
        ("failed.edit", {"id": "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11", "payload": ["secret"]}, "payload"),
        ("status", [], "arguments"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_read(name: str, given: Any, field: str) -> None:
    """With the field and a remedy, and without the value (OPS-3)."""
    with pytest.raises(ConfigurationError) as refusal:
        VERBS[name].parse(given)
    assert refusal.value.field == field and refusal.value.remedy
    assert "secret" not in str(refusal.value)


async def run(operator: Operator, verb_name: str, /, **given: Any) -> Any:
    verb = VERBS[verb_name]
    return await verb.run(operator, verb.parse(given))


async def test_every_read_runs_and_can_be_written_as_json(dsn: str, conn: asyncpg.Connection) -> None:
    """On an installation with a little of everything (OPS-3)."""
    (id,) = await fail(conn)
    async with Operator(dsn, actor=ACTOR) as operator:
        await run(operator, "plans.create", ids=[str(id)])
        given: dict[str, dict[str, Any]] = {
            "events.show": {"id": str(id), "payload": True},
            "events.find": {"key": str(id)},
            "events.children": {"id": str(id)},
            "events.causes": {"id": str(id)},
            "audit.event": {"id": str(id)},
            "series": {"handler": HANDLER},
            "plans.show": {"plan": 1},
            "plans.failed": {"plan": 1},
            "plans.outcomes": {"plan": 1},
        }
        missing = {"schedules.show": {"name": "none"}, "archive.show": {"id": 1}}
        missing |= {"requests.show": {"scope": "a", "key": "b"}, "handlers.show": {"handler": HANDLER}}
        missing |= {"relay.check": {"broker": "nats"}}
        for name, verb in VERBS.items():
            if verb.changes:
                continue
            if name in missing:
                with pytest.raises(NotFound):
                    await run(operator, name, **missing[name])
                continue
            found = document(await run(operator, name, **given.get(name, {})))
            assert json.loads(json.dumps(found)) == found, name
        assert (await actions(conn)) == ["plan.create"]


async def test_a_page_leads_to_the_next(dsn: str, conn: asyncpg.Connection) -> None:
    """Cursors are texts that a client gives back (OPS-3)."""
    ids = {str(id) for id in await fail(conn, 5)}
    seen: list[str] = []
    async with Operator(dsn, actor=ACTOR) as operator:
        page: dict[str, Any] = {"next": None}
        while True:
            cursor = {} if page["next"] is None else {"before": page["next"]}
            page = document(await run(operator, "failed.list", limit=2, **cursor))
            seen += [each["id"] for each in page["events"]]
            if page["next"] is None:
                break
        assert len(seen) == 5 and set(seen) == ids
        for wrong in ("x", "2026-01-01 y", f"2026-01-01T00:00:00 {seen[0]}"):
            with pytest.raises(ConfigurationError):
                await run(operator, "failed.list", before=wrong)


async def test_changes_act_on_ids_or_on_a_filter_and_a_dry_run_on_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """An empty filter does not mean all (OPS-3, DLQ-2)."""
    ids = [str(id) for id in await fail(conn, 3)]
    async with Operator(dsn, actor=ACTOR) as operator:
        tried = await run(operator, "failed.replay", handler=HANDLER, dry_run=True)
        assert tried.count == 3 and tried.dry_run and await states(conn) == {"failed": 3}
        with pytest.raises(ConfigurationError, match="is empty"):
            await run(operator, "failed.replay", reason="all of them")
        with pytest.raises(ConfigurationError, match="together with a filter"):
            await run(operator, "failed.replay", ids=ids, all=True)
        assert (await run(operator, "failed.discard", ids=ids[:1], reason="no use")).count == 1
        assert (await run(operator, "failed.restore", all=True)).count == 1
        assert (await run(operator, "failed.replay", all=True, reason="fixed")).count == 3
        with pytest.raises(NotFound):
            await run(operator, "failed.replay", all=True)
        assert await actions(conn) == ["discard", "restore", "replay"]
        with pytest.raises(Refused):
            await run(operator, "events.cancel_many", event_type="no.such")
        assert (await run(operator, "events.cancel_many", event_type="order.placed", dry_run=True)).count == 3
        assert (await run(operator, "events.cancel_many", event_type="order.placed")).count == 3


async def test_a_plan_runs_for_as_long_as_it_is_asked_to(dsn: str, conn: asyncpg.Connection) -> None:
    """A request is not open for as long as a plan takes (OPS-3, DLQ-4)."""
    await fail(conn, 3)
    await beat(conn, "a-worker", HANDLER)
    async with Operator(dsn, actor=ACTOR) as operator:
        made = await run(operator, "plans.create", all=True, canary=1, rate=100, reason="fixed")
        report = await run(operator, "plans.run", plan=made.plan.id, seconds=2)
        assert report.plan.state == "open" and report.plan.replayed == 1 and not report.plan.running
        assert (await run(operator, "plans.cancel", plan=made.plan.id)).after == "cancelled"


def test_the_command_line_and_the_skins_have_one_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    """What --json prints is what the others return (OPS-1, OPS-3)."""
    value = {"at": datetime(2026, 1, 1, tzinfo=UTC), "took": timedelta(seconds=1.5), "role": Role.ADMIN, "n": (1, 2)}
    print_json(value)
    printed = json.loads(capsys.readouterr().out)
    assert printed == plain(value) == {"at": "2026-01-01T00:00:00+00:00", "took": 1.5, "role": 3, "n": [1, 2]}
    assert document([1]) == {"items": [1], "left_out": None} and document(7) == {"value": 7}
