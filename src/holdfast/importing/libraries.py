"""The tables of other libraries, and how their rows become events."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from holdfast.importing.renaming import Renaming
from holdfast.new_event import EventOptions, NewEvent

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PeerLibrary:
    """Another library's table: its usual name, the columns that a user may name, and how a row becomes an event."""

    kind: str
    table: str
    event_type: Callable[[Row, Row], str]
    payload: Callable[[Row, Row], dict[str, Any]]
    due: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    headers: Callable[[Row], Mapping[str, str] | None] = lambda _row: None

    def event(self, row: Row, columns: Row, renaming: Renaming) -> NewEvent:
        """Return the event of a row. Its idempotency key is made of the row's id, so a second import has no effect."""
        name = self.event_type(row, columns)
        options: EventOptions = {"idempotency_key": f"{self.kind}:{self.table}:{row[columns.get('id', 'id')]}"}
        due = row.get(self.due) if self.due else None
        if due is not None:
            options["available_at"] = datetime.fromisoformat(due)
        headers = dict(self.headers(row) or {})
        if "correlation_id" in headers:
            options["correlation_id"] = headers.pop("correlation_id")
        if headers:
            options["headers"] = headers
        return NewEvent(renaming.event_type(name), self.payload(row, columns), **options)


def as_name(value: Any) -> str:
    """Return the event type that a column holds."""
    if not isinstance(value, str):
        raise ValueError(f"its type is {value!r}")
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return a payload as a JSON object: bytes and text are read as JSON, and any other value is wrapped."""
    if isinstance(value, str):
        return _of_bytes(bytes.fromhex(value[2:]) if value.startswith("\\x") else value.encode())
    if isinstance(value, dict):
        return value
    return {} if value is None else {"data": value}


def _of_bytes(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"data_base64": b64encode(data).decode()}
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {"data": text}
    return found if isinstance(found, dict) else {"data": found}


def _text_headers(row: Row) -> Mapping[str, str] | None:
    headers = row.get("headers")
    if not isinstance(headers, dict):
        return None
    # Not the content type: it describes the old bytes, and the payload of an event is always JSON.
    return {name: str(value) for name, value in headers.items() if name != "content-type"} or None


LIBRARIES: Final = {
    "pgqueuer": PeerLibrary(
        "pgqueuer",
        "public.pgqueuer",
        lambda row, _: as_name(row["entrypoint"]),
        lambda row, _: as_object(row["payload"]),
        due="execute_after",
    ),
    "procrastinate": PeerLibrary(
        "procrastinate",
        "public.procrastinate_jobs",
        lambda row, _: as_name(row["task_name"]),
        lambda row, _: as_object(row["args"]),
        due="scheduled_at",
    ),
    "faststream-outbox": PeerLibrary(
        "faststream_outbox",
        "public.outbox",
        lambda row, _: as_name(row["queue"]),
        lambda row, _: as_object(row["payload"]),
        due="next_attempt_at",
        headers=_text_headers,
    ),
    "table": PeerLibrary(
        "table",
        "public.outbox",
        lambda row, columns: as_name(row[columns["type"]]),
        lambda row, columns: as_object(row[columns["payload"]]),
        columns={"id": "id", "type": "event_type", "payload": "payload", "done": "published_at"},
    ),
}
