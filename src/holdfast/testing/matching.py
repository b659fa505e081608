"""Compares payloads with what a test expects of them, and says where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from holdfast.errors import PublishError
from holdfast.payload import encode_payload

_LONGEST = 300


def matches(expected: Any, actual: Any) -> bool:
    """Return whether a value has everything that is expected: mappings may have more, other values must be equal.

    Values that a payload can have are compared as they are published: `UUID(...)` matches its text.
    """
    return expected is None or not any(True for _ in differences(expected, actual))


def differences(expected: Any, actual: Any, path: str = "") -> Iterable[str]:
    """Yield the places in which a value differs from the expected one."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            here = f"{path}.{key}" if path else str(key)
            if key not in actual:
                yield f"{here} is missing"
            else:
                yield from differences(value, actual[key], here)
    elif not _equal(expected, actual):
        yield f"{path or 'the payload'} is {actual!r}, not {expected!r}"


def explain(expected: Any, candidates: list[Any]) -> str:
    """Return a line that says how the nearest of several candidates differs; an empty text without candidates."""
    if expected is None or not candidates:
        return ""
    nearest = min((list(differences(expected, each)) for each in candidates), key=len)
    return f"\nThe nearest of them differs: {'; '.join(nearest[:5])}" if nearest else ""


def shown(value: object) -> str:
    """Return a value for a message, not too long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def error_matches(expected: str | type[BaseException] | re.Pattern[str] | None, text: str | None) -> bool:
    """Return whether the text of an error contains the expected words, or is that of an exception class."""
    if expected is None:
        return True
    if isinstance(expected, type):
        return bool(re.search(rf"\b{re.escape(expected.__name__)}\b", text or ""))
    if isinstance(expected, re.Pattern):
        return expected.search(text or "") is not None
    return expected in (text or "")


def _equal(expected: Any, actual: Any) -> bool:
    try:
        if bool(expected == actual):
            return True
    except Exception:  # an object of the test's that cannot be compared is not equal
        return False
    if isinstance(expected, str | int | float | bool | None):
        return False
    try:
        return bool(from_json(encode_payload({"value": expected}))["value"] == actual)
    except (PublishError, TypeError, ValueError):
        return False
