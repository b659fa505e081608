"""Removal of passwords from text that may quote a connection string.

Connection strings reach people in errors, often malformed, because a character in the password was not
encoded. So this does not parse: where it is unclear what belongs to the password, more is hidden, not less.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

HIDDEN = "***"
LIMIT = 16_384

_SECRET_NAMES = frozenset({"password", "passwd", "pwd", "sslpassword", "pgpassword"})

# ?password=… and &sslpassword=…; an & that starts no new name=value still belongs to the value.
_QUERY = re.compile(r"(?P<start>[?&])(?P<name>[^=&?\s]+)=(?P<value>[^&\s]*(?:&(?![^=&\s]+=)[^&\s]*)*)")

# password=…, password = '…', "password": "…": the keyword form, the environment, keyword arguments, JSON.
# A quote that is never closed hides everything after it.
_KEYWORD = re.compile(
    r"""
    (?<![?&\w]) (?P<name> (?:pg|ssl)?password | passwd | pwd )
    (?P<equals> \s*=\s* | ["']\s*[:=]\s* )
    (?: '(?:[^'\\]|\\.)*(?:'\S*|\\?\Z) | "(?:[^"\\]|\\.)*(?:"\S*|\\?\Z) | (?:\\.|\S)+ )
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)

# scheme://user:…@ up to the last @ of the line, because a password may hold an @ (or / # ? and spaces).
_USERINFO = re.compile(r"(?P<start>[A-Za-z][A-Za-z0-9+.-]*:/{1,3}[^:\s]*):[^\n]*@")

# No @ at all: host:port is fine, anything else after the colon may be a password.
_NO_HOST = re.compile(
    r"(?P<start>[A-Za-z][A-Za-z0-9+.-]*://[^:/?#@\s\[\]]*):(?!\*\*\*@|\d{1,5}(?:[/?,\s'\");.]|$)|\s|$)[^\n]*",
    re.MULTILINE,
)

# user:…@host, the scheme forgotten or mistyped. Only behind a scheme that is known may :// be followed by a user.
_BARE = re.compile(
    r"""
    (?<![\w:])
    (?: (?P<scheme> (?:postgres(?:ql)?|https?|amqps?|nats|rediss?|valkeys?|kafka|tls|wss?)(?:\+\w+)?:// )
      | (?P<start> [\w.%+/-]+ ) : \S+@ )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def redact_dsn(text: str) -> str:
    """Return `text` with the passwords of connection strings replaced by `***`, cut after 16 KiB."""
    if len(text) > LIMIT:
        # The patterns look far ahead, which costs the square of the length. The last word may be half a DSN.
        text = f"{text[:LIMIT].rpartition(' ')[0]} …[truncated]"
    text = _QUERY.sub(_hide_value, text)
    text = _KEYWORD.sub(rf"\g<name>\g<equals>{HIDDEN}", text)
    text = _USERINFO.sub(rf"\g<start>:{HIDDEN}@", text)
    text = _NO_HOST.sub(_hide_rest, text)
    return _BARE.sub(_hide_bare, text)


def _hide_value(match: re.Match[str]) -> str:
    # Names may be percent-encoded too.
    if unquote_plus(match["name"]).casefold() not in _SECRET_NAMES:
        return match[0]
    return f"{match['start']}{match['name']}={HIDDEN}"


def _hide_bare(match: re.Match[str]) -> str:
    return match["scheme"] or f"{match['start']}:{HIDDEN}@"


def _hide_rest(match: re.Match[str]) -> str:
    return f"{match['start']}:{HIDDEN}"
