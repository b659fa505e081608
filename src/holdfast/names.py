"""The rules for names, each of them once.

- Event types, sources, targets and content classes have event names: up to 200 bytes, printable, without white space,
  characters that are not seen, `/` and `*`, in the Unicode form NFC. In the event pattern of a handler, `*` stands for
  any characters.
- Handlers and schedules have names that begin with a domain context: `<domain context>.<name>` in lower case, up
  to 200 characters.
- Channels (63 characters) and schemas (48) have identifiers: `a-z`, `0-9` and `_`, not starting with a digit.
- Databases, where a process serves several, have names of up to 63 characters: `a-z`, `0-9`, `_`, `-` and `.`, not
  starting with one of the last three.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeGuard

from holdfast.characters import CONTROL
from holdfast.checks import Refusal, quoted, text
from holdfast.errors import ConfigurationError, HandlerNameError

LONGEST_NAME = 200
LONGEST_CHANNEL = 63
LONGEST_SCHEMA = 48

# A pattern for nearly all event names: publish accepts them without further checks.
is_plain_event_name = re.compile(r"[!-)+-.0-~]{1,200}").fullmatch

# Remedies for values that are no names; the last one is for event types.
_EXAMPLES = {
    "source": "write the name of the application, like shop",
    "target": "write the name of a domain context, like billing",
    "content_class": "write a name, like operations",
}
_EVENT_TYPE = "write dotted lower case, like order.placed"

_EVENT_PATTERN = re.compile(r"[^/\s]{1,200}")
_HANDLER_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_DATABASE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")


def event_name(field: str, value: object, *, error: Refusal = ConfigurationError, composed: bool = True) -> str:
    """Return the name of an event type, a source, a target or a content class.

    `composed`: in the form NFC, or two names would look the same. What others have stored may have another.
    """
    name = text(field, value, LONGEST_NAME, error=error)
    # Bytes, not characters: two names and a key must fit into one index entry.
    if len(name.encode()) > LONGEST_NAME:
        raise error(field, f"has more than {LONGEST_NAME} bytes", "choose a shorter name")
    if not name.isprintable() or CONTROL.search(name) or any(char.isspace() or char in "/*" for char in name):
        remedy = _EXAMPLES.get(field.rpartition(".")[2], _EVENT_TYPE)
        raise error(field, "contains white space, '/', '*' or something unprintable", remedy)
    if composed and not unicodedata.is_normalized("NFC", name):
        raise error(field, "is not in the Unicode form NFC", 'write unicodedata.normalize("NFC", name)')
    return name


def event_pattern(field: str, value: object, *, error: Refusal = ConfigurationError) -> str:
    """Return an event type in which `*` may stand for any characters."""
    shown = isinstance(value, str) and value.isprintable() and not CONTROL.search(value)
    if not isinstance(value, str) or not shown or not _EVENT_PATTERN.fullmatch(value):
        remedy = 'write it like "order.placed" or "order.*", without spaces and slashes'
        raise error(field, f"has the event type {quoted(value)}", remedy)
    return value


def handler_name(value: object, field: str = "handler_name", *, error: Refusal = HandlerNameError) -> str:
    """Return the name of a handler, which begins with a domain context.

    >>> handler_name("billing.charge_card")
    'billing.charge_card'
    """
    return _in_domain_context(field, value, "handler", "billing.charge_card", error)


def schedule_name(value: object, field: str = "schedule", *, error: Refusal = ConfigurationError) -> str:
    """Return the name of a schedule, which begins with a domain context.

    >>> schedule_name("reports.daily")
    'reports.daily'
    """
    return _in_domain_context(field, value, "schedule", "reports.daily", error)


def channel_name(field: str, value: object, *, error: Refusal = ConfigurationError) -> str:
    """Return the name of a channel."""
    if not is_identifier(value, LONGEST_CHANNEL):
        remedy = f"use 1 to {LONGEST_CHANNEL} of a-z, 0-9 and _, not starting with a digit"
        raise error(field, f"{quoted(value)} is not a channel name", remedy)
    return str.__str__(value)


def schema_name(value: object, field: str = "schema") -> str:
    """Return the name of a schema that Holdfast can have for itself."""
    if not is_identifier(value, LONGEST_SCHEMA):
        remedy = f"use 1 to {LONGEST_SCHEMA} of a-z, 0-9 and _, not starting with a digit, for example core"
        raise ConfigurationError(field, f"{quoted(value)} is not a plain lower-case name", remedy)
    name = str.__str__(value)
    if name in ("public", "information_schema") or name.startswith("pg_"):
        problem = f"{name!r} is shared with other tables, and uninstalling drops the whole schema"
        raise ConfigurationError(field, problem, "choose a schema for Holdfast alone, for example core")
    return name


def database_name(field: str, value: object) -> str:
    """Return the name of one of several databases."""
    if not isinstance(value, str) or not _DATABASE_NAME.fullmatch(value):
        problem = f"has {quoted(value)}, which is not a name of a database"
        raise ConfigurationError(field, problem, "use a-z, 0-9, _, - and ., up to 63 characters, like orders")
    return value


def is_identifier(value: object, longest: int) -> TypeGuard[str]:
    """Return whether a value is a name that Postgres reads without quotation marks."""
    return isinstance(value, str) and len(value) <= longest and _IDENTIFIER.fullmatch(value) is not None


def _in_domain_context(field: str, value: object, kind: str, example: str, error: Refusal) -> str:
    if not isinstance(value, str):
        problem = f"is {type(value).__name__}, not str"
    elif len(value) > LONGEST_NAME:
        problem = f"has {len(value)} characters, {LONGEST_NAME} are allowed"
    elif not _HANDLER_NAME.fullmatch(value):
        problem = f"{quoted(value)} " + ("is not such a name" if "." in value else "has no domain context")
    else:
        return value
    remedy = f"write <domain context>.<{kind}> in lower case, letters, digits and _ only, like {example}"
    raise error(field, problem, remedy)


def meant_type(event_type: str, subscribed: Iterable[str]) -> str | None:
    """Return the subscribed event type of which this one may be a misspelling; None without one.

    >>> meant_type("order.placd", ["order.placed", "order.paid", "invoice.*"])
    'order.placed'
    """
    # Types of one domain begin with the same words: a difference of more than a letter or two is no misspelling.
    near = get_close_matches(event_type, {each for each in subscribed if "*" not in each}, 1, 0.85)
    return near[0] if near else None
