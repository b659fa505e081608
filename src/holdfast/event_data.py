"""Removes the data of an event from error texts that quote it.

A text is compared with the data in windows of a few characters, so that parts of a value are found too. That takes
about as long as reading both once, which matters because payloads are large and the event loop waits.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from holdfast.short_texts import remembering_short

if TYPE_CHECKING:
    from holdfast.envelope import EventEnvelope

# Shorter values occur by chance: replacing them would hide what happened, and no secret is that short.
_SHORTEST_VALUE = 6
_CONTAINERS = (dict, list, tuple)
_NUMBERS = (int, float)
_SHORT_NUMBERS = 10 ** (_SHORTEST_VALUE - 1)
# The shortest part of a value that is recognised, in characters.
_WINDOW = 8
# Every window contains a piece of this length that begins at a multiple of the step: only pieces are looked up first.
_PIECE = 4
_STEP = _WINDOW - _PIECE + 1
# Of a longer value the pieces are not listed: it may have millions.
_LONG_VALUE = 1_000
_STEPPED_PIECES = re.compile(rf"(.{{{_PIECE}}}).{{,{_STEP - _PIECE}}}", re.DOTALL).findall
_DEEPEST_PLACE = 20
_LONGEST_PLACE = 100
_LONGEST_PLAIN_KEY = 40
_PLAIN_KEY = re.compile(rf"[A-Za-z_][\w-]{{0,{_LONGEST_PLAIN_KEY - 1}}}").fullmatch
# Not removed: all reports about an event contain it on purpose.
_PUBLIC_HEADER = "correlation_id"

_ESCAPE = re.compile(
    r"""
      \\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    | \\(?P<letter>[nrtbf'"\\/])
    | \\u(?P<four>[0-9a-fA-F]{4}) | \\U(?P<eight>[0-9a-fA-F]{8}) | \\x(?P<two>[0-9a-fA-F]{2})
    """,
    re.VERBOSE,
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


class _Place(NamedTuple):
    """The place of a value in an event: the place of its container, and its key there."""

    parent: _Place | None
    key: object
    depth: int = 0

    def child(self, key: object) -> _Place:
        return _Place(self, key, self.depth + 1) if self.depth < _DEEPEST_PLACE else self

    def __str__(self) -> str:
        keys: list[str] = []
        place: _Place | None = self
        while place is not None:
            key = str(place.key)
            # A key may be data too.
            keys.append(key if isinstance(place.key, int) or _is_plain(key) else "*")
            place = place.parent
        text = keys.pop()
        while keys and len(text) < _LONGEST_PLACE:
            text = f"{text}.{keys.pop()}"
        return text


@dataclass(frozen=True, slots=True)
class EventData:
    """The data of an event that an error may quote. An idempotency key that is the event's id is not part of it."""

    payload: object = None
    headers: Mapping[str, object] | None = None
    idempotency_key: str | None = None
    event_id: UUID | None = None

    @classmethod
    def of(cls, event: EventEnvelope, headers: Mapping[str, object]) -> EventData:
        """Return the data of an event and its headers."""
        return cls(event.payload, headers, event.idempotency_key, event.event_id)

    def redact(self, text: str) -> str:
        """Return `text` with the values of the event, and the longer parts of them, replaced by their places.

        >>> EventData({"customer": {"email": "ann@example.com"}}).redact("no account of Ann@Example.com")
        'no account of <payload.customer.email>'
        """
        values = {_lower(value): place for value, place in self._values(_pieces_of(text))}
        if not values:
            return text
        readings = _readings(text)
        parts = _parts(values, [reading.text for reading in readings])
        result: list[str] = []
        end = 0
        for start, stop, place in _runs(readings, parts):
            quoted = text[start:stop]
            whole = values.get(_lower(quoted)) or values.get(_unescaped(quoted).text)
            result += text[end:start], f"<{whole or place}>"
            end = stop
        return "".join([*result, text[end:]])

    def _values(self, pieces: frozenset[str]) -> Iterator[tuple[str, _Place]]:
        """Yield the values, and keys that are no names, of which a piece is in a text, with their places.

        Most errors quote nothing of the event: then there is none.
        """
        headers = {name: value for name, value in (self.headers or {}).items() if name != _PUBLIC_HEADER}
        key = self.idempotency_key
        if key is not None and _occurs(key, pieces) and key != str(self.event_id):
            yield key, _Place(None, "idempotency_key")
        pending: list[tuple[object, _Place]] = [
            (self.payload, _Place(None, "payload")),
            (headers, _Place(None, "headers")),
        ]
        while pending:
            container, place = pending.pop()
            items: Iterable[tuple[object, object]] = ()
            if isinstance(container, dict):
                items = container.items()
                for name in container:
                    if isinstance(name, str) and not _is_plain(name) and _occurs(name, pieces):
                        yield name, place.child(name)
            elif isinstance(container, _CONTAINERS):
                items = enumerate(container)
            for name, value in items:
                if isinstance(value, str):
                    if _occurs(value, pieces):
                        yield value, place.child(name)
                elif isinstance(value, _CONTAINERS):
                    pending.append((value, place.child(name)))
                elif isinstance(value, _NUMBERS) and _occurs(digits := _digits(value), pieces):
                    yield digits, place.child(name)


NO_EVENT: Final = EventData()


def _is_plain(key: str) -> bool:
    """Return whether a key is a name, and no data."""
    if len(key) <= _LONGEST_PLAIN_KEY and key.isascii() and key.isidentifier():
        return True  # as the expression says of most keys, in half of the time
    return _PLAIN_KEY(key) is not None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A text in small letters, with the position of each character, and of the end, in the original text."""

    text: str
    starts: Sequence[int]


class _Run(NamedTuple):
    """A stretch of a text that quotes the event, and the place that it may come from."""

    start: int
    stop: int
    place: _Place


def _digits(number: float) -> str:
    """Return a number as text; an empty text for a number that is too short to be recognised."""
    if isinstance(number, int):
        try:
            return "" if -_SHORT_NUMBERS < number < _SHORT_NUMBERS else str(abs(number))
        except ValueError:  # Python writes no integer of more than some thousand digits
            return ""
    text = str(abs(number))
    return text if len(text) > _SHORTEST_VALUE and sum(map(str.isdigit, text)) >= _SHORTEST_VALUE else ""


def _lower(text: str) -> str:
    """Return the text in small letters with its length unchanged: `lower` alone makes two characters of an İ."""
    return text.replace("\u0130", "i").lower()


def _unescaped(text: str) -> _Reading:
    """Return the text without the escapes of Python and JSON."""
    parts: list[str] = []
    starts: list[int] = []
    end = 0
    for found in _ESCAPE.finditer(text):
        parts += text[end : found.start()], _character(found)
        starts += range(end, found.start() + 1)
        end = found.end()
    return _Reading(_lower("".join([*parts, text[end:]])), [*starts, *range(end, len(text) + 1)])


def _character(escape: re.Match[str]) -> str:
    if letter := escape["letter"]:
        return _LETTERS.get(letter, letter)
    if high := escape["high"]:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(escape["low"], 16) & 0x3FF))
    code = escape["four"] or escape["eight"] or escape["two"]
    return chr(min(int(code, 16), sys.maxunicode))


def _readings(text: str) -> list[_Reading]:
    """Return the text as it stands, and without escapes if it has any."""
    plain = _Reading(_lower(text), range(len(text) + 1))
    return [plain, _unescaped(text)] if "\\" in text else [plain]


@remembering_short
def _pieces_of(text: str) -> frozenset[str]:
    """Return every piece of a text: a value occurs in it only if one of its own pieces is among them."""
    return frozenset(_cut([reading.text for reading in _readings(text)], _PIECE))


def _occurs(value: str, pieces: frozenset[str]) -> bool:
    """Return whether a value is long enough to look for, and a piece of it is in a text."""
    if len(value) < _SHORTEST_VALUE:
        return False
    value = value.lower() if value.isascii() else _lower(value)
    if len(value) > _LONG_VALUE:
        return any(value[at : at + _PIECE] in pieces for at in range(0, len(value), _STEP))
    return not pieces.isdisjoint(_STEPPED_PIECES(value))


def _parts(values: Mapping[str, _Place], texts: Sequence[str]) -> dict[str, _Place]:
    """Return short values, and those windows of longer ones that are in a text."""
    parts = {value: place for value, place in values.items() if len(value) < _WINDOW}
    long = [value for value in values if len(value) >= _WINDOW]
    data = "\0" * _STEP + "\0".join(long)
    pieces = set(_cut(texts, _PIECE))
    # Look up every window around a piece that is in a text; windows that the data repeats, once.
    around = {
        data[at - _STEP + 1 : at + _WINDOW]: at - _STEP + 1
        for at in range(_STEP, len(data), _STEP)
        if data[at : at + _PIECE] in pieces
    }
    if not around:
        return parts
    windows = set(_cut(texts, _WINDOW))
    begins = list(accumulate((len(value) + 1 for value in long), initial=_STEP))
    found = {
        window: start + offset
        for near, start in around.items()
        for offset in range(_STEP)
        if (window := near[offset : offset + _WINDOW]) in windows
    }
    parts |= {window: values[long[bisect_right(begins, start) - 1]] for window, start in found.items()}
    return parts


def _cut(texts: Iterable[str], size: int) -> Iterator[str]:
    for text in texts:
        for start in range(len(text) - size + 1):
            yield text[start : start + size]


def _runs(readings: Iterable[_Reading], parts: Mapping[str, _Place]) -> Iterator[_Run]:
    """Yield the stretches of the text that parts cover, in order."""
    runs = [
        _Run(reading.starts[run.start], reading.starts[run.stop], run.place)
        for size in {len(part) for part in parts}
        for reading in readings
        for run in _joined(
            _Run(start, start + size, parts[window])
            for start, window in enumerate(_cut([reading.text], size))
            if window in parts
        )
    ]
    return _joined(sorted(runs, key=lambda run: (run.start, -run.stop)))


def _joined(runs: Iterable[_Run]) -> Iterator[_Run]:
    """Yield runs, which come in the order of their starts, with those that overlap as one."""
    last: _Run | None = None
    for run in runs:
        if last is None or run.start >= last.stop:
            if last is not None:
                yield last
            last = run
        elif run.stop > last.stop:
            last = _Run(last.start, run.stop, last.place)
    if last is not None:
        yield last
