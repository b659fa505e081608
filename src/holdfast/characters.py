"""Quoting of names for shells and SQL, with escapes for characters that a screen does not show."""

from __future__ import annotations

import re
import shlex
from typing import Final

# Characters that move the cursor, begin a line, change the direction of writing, or are invisible: with them one name
# can look like another.
CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def shell_word(name: str) -> str:
    """Return the name as one word of a shell, with control characters escaped as bash, ksh and zsh read them."""
    return f"$'{_escaped(name)}'" if CONTROL.search(name) else shlex.quote(name)


def sql_string(name: str) -> str:
    """Return the name as a string literal of SQL, with control characters escaped."""
    if CONTROL.search(name) or "\\" in name:
        return f"E'{_escaped(name)}'"
    return "'" + name.replace("'", "''") + "'"


def _escaped(name: str) -> str:
    plain = name.replace("\\", "\\\\").replace("'", "\\'")
    return CONTROL.sub(lambda found: _escape(ord(found[0])), plain)


def _escape(number: int) -> str:
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
