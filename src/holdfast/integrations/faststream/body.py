"""Bodies of messages as payloads of events, and back. A payload is a JSON object; a body may be any JSON, or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faststream_outbox.message import CONTENT_TYPE_HEADER

from holdfast.errors import FieldError

# The header that names the key of the payload under which a body stands that is no JSON object.
_BODY_HEADER = "faststream-body"


def payload_of(body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """Return the payload for a body; note in the headers under which key of it the body stands."""
    found = _value(body, headers.get(CONTENT_TYPE_HEADER))
    if isinstance(found, dict):
        return found
    headers[_BODY_HEADER] = "data"
    return {"data": found}


def bytes_of(payload: Mapping[str, Any], headers: dict[str, str]) -> bytes:
    """Return the body for a payload; replace the note in the headers by the content type of the body."""
    name = headers.pop(_BODY_HEADER, None)
    body: Any = payload if name is None else payload[name]
    text = isinstance(body, str) and not headers.get(CONTENT_TYPE_HEADER, "").startswith("application/json")
    headers.setdefault(CONTENT_TYPE_HEADER, "text/plain" if text else "application/json")
    return body.encode() if text else json.dumps(body, ensure_ascii=False).encode()


def _value(body: bytes, content_type: str | None) -> Any:
    """Return a body as a JSON value if its content type says so, or else as text."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        remedy = "publish text or a JSON object, with bytes in base64"
        raise FieldError("body", "is bytes that are not text", remedy) from None
    return json.loads(text) if (content_type or "").startswith("application/json") else text
