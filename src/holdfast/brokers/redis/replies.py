"""Reads the answers of Redis from bytes as they arrive.

The client's own reader awaits each line and each text, which takes longer for a few hundred entries than everything
else that is done with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import InvalidResponse

_TEXT, _LIST, _NUMBER, _STATUS, _ERROR = b"$*:+-"
_END: Final = b"\r\n"


class Replies:
    """A parser of RESP2. A refusal is an answer too: the exception that `error` makes of its text."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error
        self._read = b""
        self._at = 0
        # Lists that have begun, outermost first, each with the number of its elements.
        self._open: list[tuple[list[Any], int]] = []

    def feed(self, received: bytes) -> None:
        """Add bytes that the server has sent."""
        self._read = self._read[self._at :] + received
        self._at = 0

    def next(self) -> tuple[Any] | None:
        """Return the next answer, or None if it is not complete.

        >>> replies = Replies(ValueError)
        >>> replies.feed(b"*2\\r\\n:7\\r\\n$5\\r\\nor")
        >>> replies.next()
        >>> replies.feed(b"der\\r\\n+OK\\r\\n")
        >>> replies.next(), replies.next(), replies.next()
        (([7, b'order'],), (b'OK',), None)
        """
        read, at = self._read, self._at
        value: Any
        while (end := read.find(_END, at)) >= 0:
            kind, after = read[at], end + 2
            if kind == _TEXT:
                size = int(read[at + 1 : end])
                if size < 0:
                    value = None
                else:
                    if len(read) < after + size + 2:
                        return None
                    value = read[after : after + size]
                    after += size + 2
            elif kind == _LIST:
                size = int(read[at + 1 : end])
                if size > 0:
                    self._open.append(([], size))
                    self._at = at = after
                    continue
                value = [] if size == 0 else None
            elif kind == _NUMBER:
                value = int(read[at + 1 : end])
            elif kind == _STATUS:
                value = read[at + 1 : end]
            elif kind == _ERROR:
                value = self._error(read[at + 1 : end].decode(errors="replace"))
            else:
                raise InvalidResponse(f"Redis answered {read[at : at + 40]!a}")
            self._at = at = after
            while self._open:
                elements, size = self._open[-1]
                elements.append(value)
                if len(elements) < size:
                    break
                self._open.pop()
                value = elements
            else:
                return (value,)
        return None
