"""Makes the payload of a dead letter from a message that is no event: as much of its bytes as fit."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # a worker without a broker does not load the code for brokers
    from holdfast.brokers.engine import Received

# The event type of such dead letters.
UNREADABLE: Final = "holdfast.unreadable"

_LONGEST_BODY: Final = 100_000
# Bytes as JSON, in which a control character takes six.
_LARGEST_BODY: Final = 200_000
_MOST_HEADERS: Final = 100
_LARGEST_HEADERS: Final = 16 * 1024
_BEGINNING: Final = 1_000


def kept(received: Received) -> dict[str, Any]:
    """Return the body and headers of a message as a payload that the database takes, cut where they are too long."""
    body = _storable(received.body[:_LONGEST_BODY].decode("utf-8", "backslashreplace"))
    while _size(body) > _LARGEST_BODY:
        body = body[: len(body) // 2]
    return {"body": body, "headers": _kept_headers(received.headers)}


def stub(received: Received) -> dict[str, Any]:
    """Return the size, the digest and the first bytes of a message, for one whose content the database refuses."""
    return {
        "size": len(received.body),
        "sha256": hashlib.sha256(received.body).hexdigest(),
        "beginning_base64": base64.b64encode(received.body[:_BEGINNING]).decode(),
    }


def _kept_headers(headers: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    room = _LARGEST_HEADERS
    for name, value in headers.items():
        # Cut before copying: a header may have megabytes.
        short, text = _storable(name[:room]), _storable(str(value)[:room])
        room -= _size(short) + _size(text)
        if room < 0 or len(found) == _MOST_HEADERS:
            break
        found[short] = text
    return found


def _size(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())


def _storable(text: str) -> str:
    """Return a text in which characters that Postgres does not store (zero bytes, lone surrogates) are escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
