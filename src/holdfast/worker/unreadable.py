"""What is kept of a message that is no event: as much of its bytes as a dead letter may have."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from holdfast.brokers.engine import Received

# What such a message becomes: a dead letter of this type.
UNREADABLE: Final = "holdfast.unreadable"

_LONGEST_BODY: Final = 100_000
# As JSON, in which a control character has six bytes.
_LARGEST_BODY: Final = 200_000
_MOST_HEADERS: Final = 100
_LARGEST_HEADERS: Final = 16 * 1024
_BEGINNING: Final = 1_000


def kept(received: Received) -> dict[str, Any]:
    """Return body and headers of a message as a payload that the database takes; what is too long is cut."""
    body = _storable(received.body[:_LONGEST_BODY].decode("utf-8", "backslashreplace"))
    while _size(body) > _LARGEST_BODY:
        body = body[: len(body) // 2]
    return {"body": body, "headers": _kept_headers(received.headers)}


def stub(received: Received) -> dict[str, Any]:
    """Return what the database takes of any message: its size, its digest and its first bytes."""
    return {
        "size": len(received.body),
        "sha256": hashlib.sha256(received.body).hexdigest(),
        "beginning_base64": base64.b64encode(received.body[:_BEGINNING]).decode(),
    }


def _kept_headers(headers: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    room = _LARGEST_HEADERS
    for name, value in headers.items():
        # Cut first: one that has megabytes is not worth the copies.
        short, text = _storable(name[:room]), _storable(str(value)[:room])
        room -= _size(short) + _size(text)
        if room < 0 or len(found) == _MOST_HEADERS:
            break
        found[short] = text
    return found


def _size(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())


def _storable(text: str) -> str:
    """Return a text without what Postgres does not store: zero bytes, and halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
