"""The request that does what a command does, for the HTTP API, as a line for curl.

Options have the names of the arguments of the API, so the line is made of the command. A change is asked for as a dry
run: the terminal asks before it acts, and curl does not.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any, Final
from urllib.parse import urlencode

from holdfast.characters import shell_word
from holdfast.console.filters import moment
from holdfast.errors import ConfigurationError
from holdfast.operator.catalogue import VERBS, Verb

_BEARER: Final = '-H "Authorization: Bearer $HOLDFAST_TOKEN"'
_ALIASES: Final = {"audit": "audit.list"}
_NAMES: Final = {"class": "content_class"}
_OURS: Final = ("reason", "dry_run")


def curl_of(command: str, api: str) -> str | None:
    """Return the line for a command and the address of the API; None: no single request does the same."""
    found = request_of(command)
    if found is None:
        return None
    verb, given = found
    address = f"{api}/{verb.name.replace('.', '/')}"
    if verb.changes:
        body = shell_word(json.dumps(given, ensure_ascii=False))
        return f"curl -X POST {_BEARER} -H 'Content-Type: application/json' -d {body} {shell_word(address)}"
    query = f"?{urlencode(given)}" if given else ""
    return f"curl {_BEARER} {shell_word(address + query)}"


def request_of(command: str) -> tuple[Verb, dict[str, Any]] | None:
    """Return the verb of a command, and its arguments as JSON has them, which the verb takes."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    verb, rest = _verb(words)
    if verb is None or "#" in words:  # a comment says that the command is one of several
        return None
    try:
        given = _arguments(verb, rest)
        verb.parse(given)
    except ConfigurationError:
        return None
    return verb, given


def _verb(words: Sequence[str]) -> tuple[Verb | None, Sequence[str]]:
    for length in (2, 1):
        name = ".".join(words[1 : 1 + length]).replace("-", "_")
        if verb := VERBS.get(_ALIASES.get(name, name)):
            return verb, words[1 + length :]
    return None, ()


def _arguments(verb: Verb, words: Sequence[str]) -> dict[str, Any]:
    kinds, given, loose, left = _kinds(verb.name), {}, [], list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            loose.append(word)
        elif word != "--json":
            name = _NAMES.get(word[2:], word[2:].replace("-", "_"))
            given[name] = True if kinds.get(name) == "boolean" else _value(name, kinds, left.pop(0) if left else "")
    if loose and "ids" in kinds:
        given["ids"] = [_value("ids", kinds, each) for each in loose]
    else:
        needed = [name for name in verb.arguments.model_fields if name not in (*_OURS, *given)]
        given |= {name: _value(name, kinds, each) for name, each in zip(needed, loose, strict=False)}
    return {**given, "dry_run": True} if verb.changes and "dry_run" in kinds else given


def _value(name: str, kinds: dict[str, str], text: str) -> Any:
    if name in ("since", "until"):
        at = moment(name, text)
        return None if at is None else at.isoformat()
    kind = kinds.get(name, "string")
    try:
        return int(text) if kind == "integer" else float(text) if kind == "number" else text
    except ValueError:
        raise ConfigurationError(name, "is not a number", "write digits") from None


@cache
def _kinds(name: str) -> dict[str, str]:
    """The kinds of a verb's arguments, and of what its lists have."""
    found: dict[str, str] = {}
    for field, schema in VERBS[name].arguments.model_json_schema()["properties"].items():
        choices = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
        kind = choices[0].get("type", "string")
        found[field] = choices[0]["items"].get("type", "string") if kind == "array" and "items" in choices[0] else kind
    return found
