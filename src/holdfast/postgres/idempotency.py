"""Idempotency records in the caller's transaction. The statements stand in sql/functions/idempotency.sql."""

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
    """A command as it begins. `hashes` are those of the request under every secret, the newest first."""

    scope: str
    key: str
    hashes: list[str]
    hash_version: int
    keep: float
    wait: float
    idle: float | None = None  # seconds that the transaction may be idle; None: as long as it ever could


@dataclass(frozen=True, slots=True)
class Response:
    """How a command was answered."""

    failed: bool
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    omitted: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a key: answered (with the response), reused for another request, or unfinished."""

    outcome: Literal["answered", "reused", "unfinished"]
    response: Response | None = None


class Records:
    """The store. With a synchronous connection or session its methods are called without `await`."""

    def __init__(self, schema: str = "core") -> None:
        self.queries = Queries(schema)

    def begin(self, tx: Any, record: NewRecord) -> Any:
        """None when this is the first command with the key, otherwise `Found`."""
        return self._run(tx, "begin_command", begin_values(record), found)

    def complete(self, tx: Any, scope: str, key: str, response: Response) -> Any:
        """Keep the answer. False when the transaction is not the one that began."""
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
    """Of the statement `begin_command`."""
    return {
        "scope": record.scope,
        "key": record.key,
        "hashes": " ".join(record.hashes),
        "hash_version": str(record.hash_version),
        "keep": f"{record.keep:.3f} seconds",
        "wait": _milliseconds(record.wait),
        "idle": None if record.idle is None else _milliseconds(record.idle),
    }


def complete_values(scope: str, key: str, response: Response) -> Mapping[str, object]:
    """Of the statement `complete_command`."""
    return {
        "scope": scope,
        "key": key,
        "failed": "true" if response.failed else "false",
        "status_code": str(response.status),
        "headers": json.dumps(response.headers),
        "body": b64encode(response.body).decode(),
        "omitted": "true" if response.omitted else "false",
    }


def found(text: str | None) -> Found | None:
    """What `begin_command` answered."""
    if text is None:
        return None
    known = json.loads(text)
    if known["outcome"] != "answered":
        return Found(known["outcome"])
    headers = [(name, value) for name, value in known["headers"] or ()]
    body = b64decode(known["body"] or "")
    return Found("answered", Response(known["failed"], known["status"], headers, body, known["omitted"]))


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
