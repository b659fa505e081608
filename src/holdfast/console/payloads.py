"""What somebody may see of a payload: values, or nothing but the shape."""

from __future__ import annotations

from typing import Any, Final

from holdfast.access.principal import Principal
from holdfast.access.redaction import Hidden, Redaction
from holdfast.console.settings import ConsoleSettings

MOST_NODES: Final = 2_000
_LONGEST_TEXT: Final = 2_000


def shown(settings: ConsoleSettings, principal: Principal, event_type: str, value: Any, *, revealed: bool) -> Any:
    """Return the value as this principal may see it."""
    redaction = Redaction(settings.values_from, settings.redact)
    return redaction.seen(principal, event_type, value, revealed=revealed)


def tree(value: Any) -> list[tuple[int, str, str, str]]:
    """Return the lines of a tree: depth, key with its colon, kind and text. A large one ends early, and says so."""
    lines: list[tuple[int, str, str, str]] = []
    _walk(value, 0, "", "", lines)
    return lines


def _walk(value: Any, depth: int, key: str, comma: str, lines: list[tuple[int, str, str, str]]) -> None:
    if len(lines) >= MOST_NODES:
        if lines[-1][2] != "cut":
            lines.append((depth, "", "cut", f"… more than {MOST_NODES:,} lines: holdfast events show ID --payload"))
        return
    deep = min(depth, 12)
    match value:
        case dict() | list() if not value:
            lines.append((deep, key, "plain", ("{}" if isinstance(value, dict) else "[]") + comma))
        case dict():
            lines.append((deep, key, "plain", "{"))
            last = len(value) - 1
            for n, (name, each) in enumerate(value.items()):
                _walk(each, depth + 1, f"{_quoted(str(name))}: ", "," if n < last else "", lines)
            lines.append((deep, "", "plain", "}" + comma))
        case list():
            lines.append((deep, key, "plain", "["))
            last = len(value) - 1
            for n, each in enumerate(value):
                _walk(each, depth + 1, "", "," if n < last else "", lines)
            lines.append((deep, "", "plain", "]" + comma))
        case Hidden():
            lines.append((deep, key, "hidden", f"hidden · {value}"))
        case str():
            lines.append((deep, key, "text", _quoted(value) + comma))
        case bool():
            lines.append((deep, key, "plain", ("true" if value else "false") + comma))
        case None:
            lines.append((deep, key, "plain", "null" + comma))
        case _:
            lines.append((deep, key, "number", f"{value}{comma}"))


def _quoted(text: str) -> str:
    short = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters)"
    return '"' + short.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
