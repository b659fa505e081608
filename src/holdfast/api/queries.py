"""Query strings as arguments of a verb: each name once, and each value as the type that its field has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from holdfast.errors import ConfigurationError
from holdfast.operator.catalogue import Verb

_WHOLE: Final = re.compile(r"-?[0-9]{1,19}").fullmatch
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,15})?").fullmatch


def query_arguments(verb: Verb, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return what a query string says, as JSON would say it."""
    kinds = _kinds(verb.name, verb)
    found: dict[str, Any] = {}
    for name, text in items:
        if name in found:
            raise ConfigurationError(name[:80], "is given more than once", "give it once")
        found[name] = _value(text, kinds.get(name, frozenset()))
    return found


def _value(text: str, kinds: frozenset[str]) -> Any:
    if "boolean" in kinds and text in ("true", "false"):
        return text == "true"
    if "integer" in kinds and _WHOLE(text):
        return int(text)
    if "number" in kinds and _NUMBER(text):
        return float(text)
    return text


@cache
def _kinds(_name: str, verb: Verb) -> dict[str, frozenset[str]]:
    schema = verb.arguments.model_json_schema()
    return {
        name: frozenset(each["type"] for each in (field, *field.get("anyOf", ())) if "type" in each)
        for name, field in schema.get("properties", {}).items()
    }
