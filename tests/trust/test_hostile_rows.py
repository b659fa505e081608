"""Whatever a producer may insert, every screen of the command line prints it and exits with 0 (OPS-1, SEC-1)."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast.stored_json import DEEPEST, decode
from tests.operator.support import HANDLER, command

pytestmark = pytest.mark.trust


def nested(depth: int) -> str:
    return '{"a":' * depth + "[1]" + "}" * depth


HOSTILE = {
    "depth 150": nested(150),
    "depth 900": nested(900),
    "depth 2000": nested(2000),
    "depth 5000": nested(5000),
    "wide and deep": f'{{"b": [{nested(300)}, {nested(10)}], "c": "]]}}}}\\" [", "d": 1}}',
    "huge": '{"n": 1e100000}',
    "negative": '{"n": -1e4400}',
    "tiny": '{"n": 1e-5000}',
    "fraction": '{"n": ' + "1" * 5000 + ".5}",
    "control": json.dumps({"a": "\x1b[2J\x1b]0;title\x07\r\nline \u202e\x9b31m"}),
    "astral": json.dumps({"\U0001f600": "\ufffe\U0010ffff"}),
    "wide": json.dumps({f"k{n}": n for n in range(5_000)}),
}

AS_HEADERS = ("depth 150", "depth 900", "negative", "tiny", "control", "astral")

INSERT = """
INSERT INTO core.outbox (event_type, source, payload, headers, occurred_at, available_at, expires_at)
VALUES ('order.placed', 'shop', $1, $2, $3::text::timestamptz, $4::text::timestamptz, $5::text::timestamptz)
RETURNING id
"""
FAIL = """
UPDATE core.outbox SET status = 'failed', handler_name = $1, attempts = 5, failure_reason = 'rejected',
       last_error = E'no \\u001b[31mred\\nsecond \\u202e line', error_signature = 'X:1', first_failed_at = now(),
       failed_at = now(), settled_at = now()
"""


async def run(dsn: str, *arguments: str) -> str:
    process = await command(dsn, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, (arguments, err.decode()[-2000:])
    assert b"Traceback" not in err and not {"\x1b", "\x9b", "\u202e"} & set(out.decode())
    return out.decode()


@pytest.mark.slow
async def test_every_screen_of_an_event(dsn: str, conn: asyncpg.Connection) -> None:
    """Deep nesting, numbers without end, control characters, as payload and as headers (OPS-1)."""
    ids: dict[str, UUID] = {}
    for name, text in HOSTILE.items():
        ids[name] = await conn.fetchval(INSERT, text, text if name in AS_HEADERS else None, "now", "now", None)
    for times in (("0001-01-03", "infinity", None), ("9999-12-29", "now", "9999-12-29")):
        ids[f"{times}"] = await conn.fetchval(INSERT, "{}", None, *times)
    await conn.execute(FAIL, HANDLER)
    for each in ids.values():
        await run(dsn, "failed", "show", str(each), "--payload")
    for name in ("depth 5000", "huge"):
        shown = json.loads(await run(dsn, "events", "show", str(ids[name]), "--payload", "--json"))
        assert "left out" in json.dumps(shown["payload"])
    lines = (await run(dsn, "failed", "export", "--payload")).splitlines()
    assert len([json.loads(line) for line in lines]) == len(ids)
    for screen in (("failed", "list"), ("failed", "groups"), ("status",), ("failed", "list", "--json")):
        await run(dsn, *screen)


def test_what_is_left_out() -> None:
    """Everything else is there, and nothing that Python can hold is touched (OPS-1)."""
    found: Any = decode(HOSTILE["wide and deep"])
    assert found["d"] == 1 and found["c"] == ']]}}" [' and found["b"][1] == json.loads(nested(10))
    inner = found["b"][0]
    for _ in range(DEEPEST - 2):
        inner = inner["a"]
    assert inner == f"<nested deeper than {DEEPEST} levels: left out>"
    for name in ("depth 150", "control", "astral", "wide"):
        assert decode(HOSTILE[name]) == json.loads(HOSTILE[name])
    assert decode('[-1.5, 1e3, -12, "\\ud83d\\ude00"]') == [-1.5, 1000.0, -12, "\U0001f600"]
