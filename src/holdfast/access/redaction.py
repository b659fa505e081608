"""What roles see of payloads and headers: their values, or only their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.access.principal import Principal, Role

# Called with who looks, the event's type and the payload or headers; returns what they may see of it.
Redactor = Callable[[Principal, str, Any], Any]

_DEEPEST: Final = 20
SHOWN: Final = ("payload", "headers")  # what is hidden, in the documents of results


class Hidden(str):
    """What stands in place of a value."""


def shape(value: Any, depth: int = 0) -> Any:
    """Return a payload without its values: keys, types and sizes.

    >>> shape({"card": "4111", "amounts": [1, 2.5]})
    {'card': 'text, 4', 'amounts': ['number', 'number']}
    """
    match value:
        case dict() if depth < _DEEPEST:
            return {key: shape(each, depth + 1) for key, each in value.items()}
        case list() if depth < _DEEPEST:
            return [shape(each, depth + 1) for each in value]
    return Hidden(kind_of(value))


def kind_of(value: Any) -> str:
    """Return what kind of value it is, and how large.

    >>> kind_of("a secret"), kind_of(12.5), kind_of(None), kind_of([1, 2])
    ('text, 8', 'number', 'null', 'list, 2')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "yes or no"
        case int() | float():
            return "number"
        case str():
            return f"text, {len(value)}"
        case list():
            return f"list, {len(value)}"
        case dict():
            return f"object, {len(value)}"
    return type(value).__name__


class Redaction:
    """What each principal sees. A hook of the application comes first; then the values go for roles that see none."""

    def __init__(self, values_from: Role = Role.OPERATOR, redact: Redactor | None = None) -> None:
        self._values_from = values_from
        self._redact = redact

    def seen(self, principal: Principal, event_type: str, value: Any, *, revealed: bool = False) -> Any:
        """Return what a principal sees of a payload, or of headers; `revealed`: the audit says why."""
        if value is None:
            return None
        if self._redact is not None:
            try:
                value = self._redact(principal, event_type, value)
            except Exception as error:
                # It fails closed: what nobody has looked at is not shown.
                return Hidden(f"withheld: the redactor raised {type(error).__name__}")
        return value if revealed or principal.may(self._values_from) else shape(value)

    def document(self, principal: Principal, found: Any, *, revealed: bool = False, event_type: str = "") -> Any:
        """Return what a principal sees of a result: its payloads and headers, wherever they stand in it."""
        if isinstance(found, list):
            return [self.document(principal, each, revealed=revealed, event_type=event_type) for each in found]
        if not isinstance(found, dict):
            return found
        kind = str(found.get("event_type") or event_type)
        return {
            name: self.seen(principal, kind, each, revealed=revealed)
            if name in SHOWN
            else self.document(principal, each, revealed=revealed, event_type=kind)
            for name, each in found.items()
        }
