"""Bodies of messages as payloads of events, and back. A payload is a JSON object; a body may be any JSON, or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faststream_outbox.message import CONTENT_TYPE_HEADER

from holdfast.errors import FieldError

# The header that says under which name of the payload a body is that is no JSON object.
_BODY_HEADER = "faststream-body"


def payload_of(body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """Return the payload of a body, and note in the headers where the body is in it."""
    found = _value(body, headers.get(CONTENT_TYPE_HEADER))
    if isinstance(found, dict):
        return found
    headers[_BODY_HEADER] = "data"
    return {"data": found}


def bytes_of(payload: Mapping[str, Any], headers: dict[str, str]) -> bytes:
    """Return the body of a payload, take the note out of the headers, and say there what kind of body it is."""
    name = headers.pop(_BODY_HEADER, None)
    body: Any = payload if name is None else payload[name]
    text = isinstance(body, str) and not headers.get(CONTENT_TYPE_HEADER, "").startswith("application/json")
    headers.setdefault(CONTENT_TYPE_HEADER, "text/plain" if text else "application/json")
    return body.encode() if text else json.dumps(body, ensure_ascii=False).encode()


def _value(body: bytes, content_type: str | None) -> Any:
    """Return what a body is as JSON, or as text."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        remedy = "publish text or a JSON object, with bytes in base64"
        raise FieldError("body", "is bytes that are not text", remedy) from None
    return json.loads(text) if (content_type or "").startswith("application/json") else text
