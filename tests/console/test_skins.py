"""The command line, the HTTP API, the tools of assistants and the console are skins of the same verbs.

Each verb is asked for in every skin, on the same rows: the result, the rows after it, and the line in the audit are the
same, but for who is named; and what is refused is refused with the same words (OPS-3).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tests.console import shop
from tests.console.skins import Said, Skin, skins

START = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
FAILED = [shop.failed_row(*cause[:3], START + timedelta(minutes=n)) for n in range(4) for cause in shop.causes(n)[:2]]
OPEN = shop.row(shop.ORDER, START, status="pending", attempts=0)
IDS = [each["id"] for each in FAILED if each["handler_name"] == shop.FAILING]
GROUP = f"{shop.FAILING}/{FAILED[0]['error_signature']}"
NOBODY = "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"
WHY = "the terminals are back"
ROWS = {"failed.list": "events", "audit.list": "lines"}  # of a page; the command line prints them alone
# What differs from one moment to the next.
MOMENTS = {"at", "created_at", "paused_at", "purge_at", "updated_at"}

EMPTY = """
SET session_replication_role = replica;
TRUNCATE core.outbox, core.audit, core.plans, core.plan_rows, core.handler_flow RESTART IDENTITY CASCADE;
RESET session_replication_role;
"""
STATES = "SELECT id, status, deleted_at IS NOT NULL AS discarded FROM core.outbox ORDER BY id"
AUDIT = "SELECT actor, action, reason, arguments, counts FROM core.audit ORDER BY id"

CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "list": ("failed.list", {"handler": shop.FAILING, "limit": 3}),
    "groups": ("failed.groups", {"event_type": shop.ORDER}),
    "replay-dry-run": ("failed.replay", {"ids": IDS[:2], "dry_run": True}),
    "replay-ids": ("failed.replay", {"ids": IDS[:2], "reason": WHY}),
    "replay-group": ("failed.replay", {"group": GROUP, "reason": WHY}),
    "replay-handler": ("failed.replay", {"handler": shop.FAILING, "reason": WHY}),
    "discard": ("failed.discard", {"ids": IDS[:3], "reason": "test orders"}),
    "plan": ("plans.create", {"group": GROUP, "canary": 2, "rate": 5.0, "reason": WHY}),
    "pause": ("handlers.pause", {"handler": shop.FAILING, "reason": "the terminals are down"}),
    "cancel": ("events.cancel", {"id": OPEN["id"], "reason": "ordered twice"}),
    "cancel-many": ("events.cancel_many", {"event_type": shop.ORDER, "reason": "ordered twice"}),
    "audit": ("audit.list", {"action": "discard"}),
}
# The console has no form for these.
NO_FORM = {"failed.list", "failed.groups", "audit.list", "events.cancel", "events.cancel_many"}

REFUSALS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "unknown-id": ("failed.replay", {"ids": [NOBODY], "reason": WHY}),
    "no-group": ("failed.replay", {"group": "nobody/ValueError-1", "reason": WHY}),
    "group-without-cause": ("failed.groups", {"group": "nobody"}),
    "unknown-handler": ("handlers.pause", {"handler": "nobody.at_all", "reason": WHY}),
    "unknown-event": ("events.cancel", {"id": NOBODY, "reason": WHY}),
    "plan-of-nothing": ("plans.create", {"handler": "nobody.at_all", "reason": WHY}),
}
# Each skin says in its own words what it takes: the schema of arguments, the boxes of a page.
OWN_WORDS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "nothing-chosen": ("failed.discard", {"reason": WHY}, "selection is empty|chosen is empty"),
    "no-page": ("failed.list", {"limit": 0}, "limit "),
    "canary": ("plans.create", {"group": GROUP, "canary": 5_000, "reason": WHY}, "canary "),
}


@pytest.fixture
async def all_skins(dsn: str) -> AsyncIterator[dict[str, Skin]]:
    async with skins(dsn) as found:
        yield found


async def begin(conn: asyncpg.Connection) -> None:
    """Make the database what it was."""
    await conn.execute(EMPTY)
    await conn.execute(shop.ADD, json.dumps([*FAILED, OPEN]))
    await conn.execute("SELECT core.subscribe('billing', $1, $2)", shop.FAILING, [shop.ORDER])


def lasting(value: Any, actor: str) -> Any:
    """A result without what differs from one moment to the next, and from one actor to the other."""
    if isinstance(value, dict):
        return {name: lasting(each, actor) for name, each in value.items() if name not in MOMENTS}
    if isinstance(value, list):
        return [lasting(each, actor) for each in value]
    return "the actor" if value == actor else value


async def after(conn: asyncpg.Connection, actor: str) -> tuple[list[Any], list[Any]]:
    """The rows, and the lines of the audit, all of which name `actor`."""
    lines = [dict(line) for line in await conn.fetch(AUDIT)]
    assert {line.pop("actor") for line in lines} <= {actor}
    written = [{**line, **{name: json.loads(line[name]) for name in ("arguments", "counts")}} for line in lines]
    return [tuple(row) for row in await conn.fetch(STATES)], lasting(written, actor)


@pytest.mark.parametrize("case", CASES)
async def test_every_skin_does_the_same(conn: asyncpg.Connection, all_skins: dict[str, Skin], case: str) -> None:
    """The same result, the same rows after it, and the same line in the audit (OPS-3, DLQ-6)."""
    verb, given = CASES[case]
    seen: dict[str, tuple[Any, ...]] = {}
    for name, skin in all_skins.items():
        if name == "console" and verb in NO_FORM:
            continue
        await begin(conn)
        if verb == "audit.list":
            await all_skins["cli"].ask("failed.discard", {"ids": IDS[:1], "reason": "something to list"})
        said = await skin.ask(verb, given)
        assert said.refusal is None, (name, said)
        actor = all_skins["cli"].actor if verb == "audit.list" else skin.actor
        rows, audit = await after(conn, actor)
        found = said.result if name in ("cli", "console") else said.result.get(ROWS.get(verb), said.result)
        seen[name] = lasting(found, actor), rows, audit
    result, rows, audit = seen["cli"]
    assert result
    for name, other in seen.items():
        assert other[1:] == (rows, audit), name
        assert name == "console" or other[0] == result, name
    assert len(audit) == (0 if given.get("dry_run") or verb in ("failed.list", "failed.groups") else 1)


async def refusals(conn: asyncpg.Connection, found: dict[str, Skin], verb: str, given: dict[str, Any]) -> set[str]:
    """What the skins say; nothing is changed, and nothing audited."""
    await begin(conn)
    before = await after(conn, "")
    asked = [skin for name, skin in found.items() if name != "console" or verb not in NO_FORM]
    said: list[Said] = [await skin.ask(verb, given) for skin in asked]
    assert await after(conn, "") == before
    assert all(each.refusal for each in said), said
    return {str(each.refusal) for each in said}


@pytest.mark.parametrize("case", REFUSALS)
async def test_every_skin_refuses_with_the_same_words(
    conn: asyncpg.Connection, all_skins: dict[str, Skin], case: str
) -> None:
    """The field, the problem and the remedy (OPS-3)."""
    said = await refusals(conn, all_skins, *REFUSALS[case])
    assert len(said) == 1, said


@pytest.mark.parametrize("case", OWN_WORDS)
async def test_what_a_skin_does_not_take_is_named_in_all_of_them(
    conn: asyncpg.Connection, all_skins: dict[str, Skin], case: str
) -> None:
    """The field is named (OPS-3)."""
    verb, given, field = OWN_WORDS[case]
    assert all(re.match(field, each) for each in await refusals(conn, all_skins, verb, given))
