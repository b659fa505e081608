"""Names that look the same are not two names: characters that cannot be seen are refused, by Python and by Postgres."""

from __future__ import annotations

import sys
import unicodedata

import asyncpg
import pytest

from holdfast.characters import CONTROL
from holdfast.errors import ConfigurationError
from holdfast.names import event_name, event_pattern

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

UNSEEN = ["\u00a0", "\u034f", "\u115f", "\u2003", "\u200b", "\u2800", "\u3000", "\u3164", "\ufe0f", "\U000e0100"]


@pytest.mark.parametrize("character", UNSEEN, ids=lambda each: f"{ord(each):04x}")
async def test_a_name_with_an_unseen_character_is_refused(conn: asyncpg.Connection, character: str) -> None:
    """As type, source, target and channel, and in Python (SEC-1, PUB-3)."""
    name = f"shop{character}"
    row = {"event_type": "order.placed", "source": "shop", "target": "billing", "channel": "hot"}
    for column in row:
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await conn.execute(
                "INSERT INTO core.outbox (payload, event_type, source, target, channel) VALUES ('{}', $1, $2, $3, $4)",
                *{**row, column: name}.values(),
            )
    with pytest.raises(ConfigurationError):
        event_name("source", name)
    with pytest.raises(ConfigurationError):
        event_pattern("handler", name)


async def test_a_name_has_one_form(conn: asyncpg.Connection) -> None:
    """Two that look the same are the same; what was stored before may be split, and read from brokers (SEC-1,
    PUB-3).
    """
    insert = "INSERT INTO core.outbox (payload, event_type, source, target) VALUES ('{}', $1, $2, $3)"
    row = ["order.placed", "caf\u00e9", "caf\u00e9"]
    await conn.execute(insert, *row)
    decomposed = unicodedata.normalize("NFD", "caf\u00e9")
    for place in range(3):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="form NFC"):
            await conn.execute(insert, *row[:place], decomposed, *row[place + 1 :])
    await conn.execute(
        """INSERT INTO core.outbox (payload, event_type, source, origin_id)
           VALUES ('{}', 'order.placed', $1, gen_random_uuid())""",
        decomposed,
    )
    assert event_name("source", "caf\u00e9") == "caf\u00e9"
    with pytest.raises(ConfigurationError, match="form NFC"):
        event_name("source", decomposed)
    assert event_name("source", decomposed, composed=False) == decomposed


async def test_both_sides_refuse_the_same(conn: asyncpg.Connection) -> None:
    """What controls, separates or formats by the tables of Unicode, and what this library names beside it (SEC-1)."""

    def unseen(character: str) -> bool:
        return unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs") or bool(CONTROL.match(character))

    characters = [n for n in range(1, sys.maxunicode + 1) if n != 0x20 and unseen(chr(n))]
    accepted = await conn.fetch("SELECT n FROM unnest($1::int[]) n WHERE core.is_name('a' || chr(n))", characters)
    assert [f"{n:04x}" for (n,) in accepted] == []
    plain = [n for n in range(0xA1, sys.maxunicode + 1) if not 0xD800 <= n < 0xE000 and chr(n).isprintable()]
    refused = await conn.fetch("SELECT n FROM unnest($1::int[]) n WHERE NOT core.is_name('a' || chr(n))", plain)
    assert [f"{n:04x}" for (n,) in refused if not CONTROL.match(chr(n))] == []
