"""Idempotency records, written in the caller's transaction. Their statements are in sql/functions/idempotency.sql."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from holdfast.postgres.drivers import driver_of
from holdfast.postgres.queries import Queries

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewRecord:
    """The record of a command that begins. `hashes` has the request's hash under every secret, the newest first."""

    scope: str
    key: str
    hashes: list[str]
    hash_version: int
    keep: float
    wait: float
    idle: float | None = None  # seconds that the transaction may be idle; None leaves the server's own limit


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response that is stored for a key, in its record."""

    failed: bool
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    omitted: bool = False


@dataclass(frozen=True, slots=True)
class ExistingRecord:
    """The record of a key used before: answered (with the response), reused for another request, or unfinished."""

    outcome: Literal["answered", "reused", "unfinished"]
    response: StoredResponse | None = None


class Records:
    """The table of idempotency records. With a synchronous connection its methods are called without `await`."""

    def __init__(self, schema: str = "core") -> None:
        self.queries = Queries(schema)

    def begin(self, tx: Any, record: NewRecord) -> Any:
        """Record the command; return None if it is the first one with its key, otherwise the `ExistingRecord`."""
        return self._run(tx, "begin_command", begin_values(record), existing_record)

    def complete(self, tx: Any, scope: str, key: str, response: StoredResponse) -> Any:
        """Store the response; return False if the transaction is not the one that recorded the command."""
        return self._run(tx, "complete_command", complete_values(scope, key, response), bool)

    def _run(self, tx: Any, name: str, values: Mapping[str, object], read: Callable[[Any], T]) -> Any:
        driver = driver_of(tx)
        driver.require_transaction(tx)
        if not driver.asynchronous:
            return read(driver.run(tx, self.queries, name, values))

        async def run() -> T:
            return read(await driver.run(tx, self.queries, name, values))

        return run()


def begin_values(record: NewRecord) -> Mapping[str, object]:
    """Return the values of the statement `begin_command`."""
    return {
        "scope": record.scope,
        "key": record.key,
        "hashes": " ".join(record.hashes),
        "hash_version": str(record.hash_version),
        "keep": f"{record.keep:.3f} seconds",
        "wait": _milliseconds(record.wait),
        "idle": None if record.idle is None else _milliseconds(record.idle),
    }


def complete_values(scope: str, key: str, response: StoredResponse) -> Mapping[str, object]:
    """Return the values of the statement `complete_command`."""
    return {
        "scope": scope,
        "key": key,
        "failed": "true" if response.failed else "false",
        "status_code": str(response.status),
        "headers": json.dumps(response.headers),
        "body": b64encode(response.body).decode(),
        "omitted": "true" if response.omitted else "false",
    }


def existing_record(text: str | None) -> ExistingRecord | None:
    """Read the result of `begin_command`."""
    if text is None:
        return None
    known = json.loads(text)
    if known["outcome"] != "answered":
        return ExistingRecord(known["outcome"])
    headers = [(name, value) for name, value in known["headers"] or ()]
    body = b64decode(known["body"] or "")
    return ExistingRecord("answered", StoredResponse(known["failed"], known["status"], headers, body, known["omitted"]))


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
