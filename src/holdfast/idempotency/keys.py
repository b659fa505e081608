"""Idempotency keys and their scopes: read from a header, or made by jobs and handlers."""

import re
from collections.abc import Sequence
from hashlib import sha256

from holdfast.errors import ConfigurationError, FieldError

LONGEST_KEY = 255
LONGEST_SCOPE = 1_020

# RFC 8941: an sf-string has printable ASCII, with \" and \\ for the two that are special in it.
_QUOTED = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"').fullmatch
_ESCAPED = re.compile(rb"\\([\"\\])")
# Clients mostly send bare tokens: UUIDs, base64, job:17:send. Not allowed are a comma, with which proxies join two
# fields, and a semicolon, after which parameters would follow.
_BARE = re.compile(rb"[!#-+\--:<-\[\]-~]+").fullmatch
# How the scope of a route begins, of an owner with a space.
_HASHED_OWNER = "http-sha256:"
_PRINTABLE = re.compile(r"[ -~]+").fullmatch


class KeyMissing(Exception):
    """The request has no key, or an empty one."""


class KeyInvalid(Exception):
    """The header does not contain one valid key; the message says why, and never quotes it."""


def parse_key(fields: Sequence[bytes]) -> str:
    r"""Return the key in the `Idempotency-Key` header fields of a request. Quoted and bare, it is the same key.

    >>> parse_key([b'"8e03978e-40d5"']) == parse_key([b"8e03978e-40d5"])
    True
    """
    if not fields:
        raise KeyMissing
    if len(fields) > 1:
        raise KeyInvalid("is sent more than once")
    field = fields[0].strip(b" \t")
    if field in (b"", b'""'):
        raise KeyMissing
    if len(field) > 2 * LONGEST_KEY + 2:
        raise KeyInvalid(f"has more than {LONGEST_KEY} characters")
    if quoted := _QUOTED(field):
        key = _ESCAPED.sub(rb"\1", quoted[1])
    elif _BARE(field):
        key = field
    else:
        raise KeyInvalid(f"{_problem_of(field)}, which only a quoted key of printable ASCII characters can have")
    if len(key) > LONGEST_KEY:
        raise KeyInvalid(f"has more than {LONGEST_KEY} characters")
    return key.decode("ascii")


def _problem_of(field: bytes) -> str:
    """Say what is wrong with a field that is neither quoted nor bare, without quoting it."""
    for character, name in ((b'"', "a quotation mark"), (b" ", "a space"), (b",", "a comma"), (b";", "a semicolon")):
        if character in field:
            return f"has {name}"
    return "has a backslash" if b"\\" in field else "has a character"


def job_key(run: object, operation: str, *subject: object) -> str:
    """Return a key that is the same whenever a run of a job or a handler dispatches the same command.

    `run` identifies the work across its repetitions: the slot of a schedule, the id of a task or of an event.

    >>> job_key("2026-03-01", "send-reminder", 17)
    'job:2026-03-01:send-reminder:17'
    """
    parts = [str(part) for part in (run, operation, *subject)]
    for part in parts:
        if not part or ":" in part:
            # Otherwise two different commands could have one key.
            raise FieldError("key", f"has the part {part!r}", "give each part as text without a colon")
    return require_key(":".join(("job", *parts)))


def require_key(key: str) -> str:
    """Return a key that a program made; refuse one that could not be stored."""
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY or not _PRINTABLE(key):
        raise FieldError("key", "is not a key", f"use 1 to {LONGEST_KEY} printable ASCII characters")
    return key


def require_scope(scope: str) -> str:
    """Return the owner of a key; refuse one that could not be stored, or is empty and would be shared by all."""
    if not isinstance(scope, str) or not scope.strip() or "\0" in scope:
        problem = f"is {scope!r}, which identifies no owner"
        raise ConfigurationError("scope", problem, "return the id of the user or the tenant as text")
    if not scope.isprintable() or not _fits(scope):
        remedy = f"use printable text of at most {LONGEST_SCOPE} bytes"
        raise ConfigurationError("scope", "is too long or not printable", remedy)
    return scope


def http_scope(owner: str, route: str = "") -> str:
    """Return the stored scope of a request: the owner of its key, and the route if keys belong to one.

    >>> http_scope("alice"), http_scope("alice", "POST /orders")
    ('http:alice', 'http:alice POST /orders')
    """
    require_scope(owner)
    if route and " " in owner:
        # A tenant must not be able to choose where its id ends and the route begins, nor to be called like the hash.
        hashed = f"{sha256(owner.encode(errors='surrogatepass')).hexdigest()} {route}"
        text = f"{_HASHED_OWNER}{hashed}"
        return text if text.isprintable() and _fits(text) else _stored("http", f"sha256 {hashed}", hashed=True)
    return _stored("http", f"{owner} {route}" if route else owner)


def job_scope(scope: str) -> str:
    """Return the stored scope of a job's commands, which no tenant's scope can equal."""
    return _stored("job", require_scope(scope))


def _stored(kind: str, scope: str, *, hashed: bool = False) -> str:
    text = f"{kind}:{scope}"
    if not hashed and text.isprintable() and _fits(text):
        return text
    # A route may have any length, and a path any characters. No readable scope begins like this.
    return f"{kind}-sha256:{sha256(scope.encode(errors='surrogatepass')).hexdigest()}"


def _fits(scope: str) -> bool:
    # A character has at most four bytes: most scopes are known to fit without being encoded.
    return 4 * len(scope) <= LONGEST_SCOPE or len(scope.encode()) <= LONGEST_SCOPE
