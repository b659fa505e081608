"""Names that producers choose are shown as they are, and are safe to copy into a shell (SEC-1)."""

from __future__ import annotations

import asyncio
import json
import shlex
import unicodedata

import asyncpg
import pytest
from typer.testing import CliRunner

from holdfast import Publisher
from holdfast.cli.app import make_app
from holdfast.errors import ConfigurationError, PublishError
from holdfast.postgres.doctor import examine
from tests.outbox import Outbox, connect

pytestmark = pytest.mark.trust

INSERT = "INSERT INTO core.outbox (event_type, source, payload, channel) VALUES ('a.b', $1, '{}', $2)"
INSERT_NAMES = "INSERT INTO core.outbox (event_type, source, target, payload) VALUES ($1, $2, $3, '{}')"
NASTY = "x; rm -rf ~ #"


@pytest.mark.parametrize("channel", ["a\x1b[2Jb", "a\nb", "a\tb", "a\x7fb", "a\x9bb"])
async def test_a_channel_has_no_control_characters(conn: asyncpg.Connection, channel: str) -> None:
    """By a plain INSERT; rows from before keep theirs and are claimed (OBX-2)."""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="channel must have no control characters"):
        await conn.execute(INSERT, "shop", channel)
    await conn.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_fill")
    await conn.execute(
        INSERT.replace("channel)", "channel, idempotency_key)").replace("$2)", "$2, 'k')"), "shop", channel
    )
    await conn.execute("ALTER TABLE core.outbox ENABLE TRIGGER outbox_fill")
    await conn.execute("UPDATE core.outbox SET available_at = now() - interval '1 second'")


async def test_advice_can_be_copied(dsn: str, conn: asyncpg.Connection) -> None:
    """A channel in a command is one word of it (OPS-6)."""
    await conn.execute(INSERT, "shop", NASTY)
    beat = "SELECT core.worker_beat(gen_random_uuid(), 'w', 'h', 1, '1', 0, '{outbox_default}', '{}')"
    await conn.execute(beat)
    shown = await asyncio.to_thread(CliRunner().invoke, make_app(), ["status", "--dsn", dsn])
    assert shown.exit_code == 0, shown.output
    advice = " ".join(shown.output.split())
    assert f"start one with --channel {shlex.quote(NASTY)} --generation 0" in advice
    (finding,) = [each for each in (await examine(conn)).findings if each.code == "channel-unserved"]
    assert shlex.split(finding.remedy)[-3:] == [NASTY, "--generation", "0"]


HIDDEN = [chr(code) for code in range(1, 0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp")]


@pytest.mark.parametrize("field", ["event_type", "source", "target"])
async def test_no_name_has_a_twin_that_looks_the_same(conn: asyncpg.Connection, field: str) -> None:
    """Characters that control, or cannot be seen, are refused by Publisher, INSERT and functions (SEC-1, OBX-2)."""
    values = {"event_type": "order.placed", "source": "shop", "target": "billing"}
    for hidden in (*HIDDEN[:: len(HIDDEN) // 30], "\u200b", "\u202e", "\u2066", "\u00ad", "\ufeff", "\U000e0041"):
        twin = values | {field: values[field] + hidden}
        with pytest.raises((PublishError, ConfigurationError), match=field):
            async with conn.transaction():
                await Publisher(twin["source"]).publish(conn, twin["event_type"], {}, target=twin["target"])
        with pytest.raises(asyncpg.InvalidParameterValueError, match=r"cannot be seen|without spaces"):
            await conn.execute(INSERT_NAMES, *twin.values())
    assert await conn.fetch("SELECT h FROM unnest($1::text[]) h WHERE core.is_name('a' || h)", HIDDEN) == []
    for seen in ("größe.änderung", "注文.作成", "заказ", "a'b\\c", "🙂"):
        await conn.execute(INSERT_NAMES, *(values | {field: seen}).values())
    await conn.execute("DELETE FROM core.outbox")


@pytest.mark.parametrize("invisible", ["\u200b", "\u2060", "\ufeff", "\u00ad", "\u202e", "\U000e0041"])
async def test_what_has_no_width_is_shown(dsn: str, invisible: str) -> None:
    """A source that looks like another one is seen to be another one (OPS-6)."""
    connection = await connect(dsn)
    await connection.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_fill")  # a row from before
    await Outbox(connection).insert(source=f"shop{invisible}", idempotency_key="k")
    await connection.close()
    for options in ((), ("--json",)):
        shown = await asyncio.to_thread(CliRunner().invoke, make_app(), ["events", "list", "--dsn", dsn, *options])
        assert shown.exit_code == 0, shown.output
        assert invisible not in shown.output
    assert json.loads(shown.stdout)[0]["source"] == f"shop{invisible}"
