"""Idempotent commands of jobs and handlers, with keys that the program makes. They share the store with requests.

    commands = Commands(secrets={1: "..."})
    key = job_key(run_id, "send-reminder", order_id)
    result = await commands.run(tx, key, {"order": order_id}, lambda: send_reminder(tx, order_id))

A command is carried out once for each key; a repetition returns the stored result.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.errors import CommandUnderWay, ConfigurationError, KeyReused
from holdfast.idempotency.hashing import Secrets, canonical_json
from holdfast.idempotency.keys import job_scope, require_key
from holdfast.idempotency.settings import IdempotencySettings, require_settings
from holdfast.payload import encode_payload
from holdfast.postgres.drivers import driver_of
from holdfast.postgres.idempotency import ExistingRecord, NewRecord, Records, StoredResponse
from holdfast.retry import LOCK_NOT_AVAILABLE, sqlstate_of


class Commands:
    """Runs each command once, in the caller's transaction, and stores its result there."""

    def __init__(
        self,
        secrets: Mapping[int, str | bytes],
        settings: IdempotencySettings | None = None,
        *,
        scope: str = "jobs",
    ) -> None:
        self._secrets = Secrets(secrets)
        self._settings = require_settings(settings)
        self._scope = job_scope(scope)
        self._records = Records(self._settings.schema)

    def run(
        self, tx: Any, key: str, command: Mapping[str, Any], work: Callable[[], Any] | Callable[[], Awaitable[Any]]
    ) -> Any:
        """Return the result of `work`, which must be JSON, or the result stored when the key was first used.

        With a synchronous transaction both this method and `work` are called without `await`. After an error of
        `work` the caller rolls its transaction back, and the record with it.
        """
        record = self._record(key, command)
        if driver_of(tx).asynchronous:
            return self._run_async(tx, record, work)
        try:
            existing = self._records.begin(tx, record)
        except Exception as error:
            raise self._error_of_begin(error) from error
        if existing is not None:
            return self._result(existing)
        response = _response(work())
        return _completed(self._records.complete(tx, record.scope, record.key, response), response)

    async def _run_async(self, tx: Any, record: NewRecord, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            existing = await self._records.begin(tx, record)
        except Exception as error:
            raise self._error_of_begin(error) from error
        if existing is not None:
            return self._result(existing)
        response = _response(await work())
        return _completed(await self._records.complete(tx, record.scope, record.key, response), response)

    def _record(self, key: str, command: Mapping[str, Any]) -> NewRecord:
        # The same checks as for an event's payload: a value that is not JSON would hash differently the next time.
        parts = (b"command", canonical_json(encode_payload(dict(command))))
        return NewRecord(
            self._scope,
            require_key(key),
            self._secrets.hashes(self._scope, parts),
            self._secrets.version,
            self._settings.keep,
            self._settings.wait,
        )

    def _error_of_begin(self, error: Exception) -> Exception:
        if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
            return CommandUnderWay("the command is being carried out by another transaction", retry_after=1)
        return error

    def _result(self, existing: ExistingRecord) -> Any:
        if existing.outcome == "reused":
            raise KeyReused("the key was used for another command; make it from everything that tells them apart")
        if existing.response is None:
            raise KeyReused("the key is used twice in one transaction; make it from everything that tells them apart")
        return _value(existing.response)


def _response(result: Any) -> StoredResponse:
    return StoredResponse(False, 200, [], encode_payload({"result": result}).encode())


def _completed(stored: bool, response: StoredResponse) -> Any:
    if not stored:
        raise ConfigurationError(
            "work", "ended the transaction that its command is recorded in", "leave commit and rollback to the caller"
        )
    return _value(response)


def _value(response: StoredResponse) -> Any:
    return json.loads(response.body)["result"]
