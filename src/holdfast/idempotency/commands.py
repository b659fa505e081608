"""Commands that a job or a handler dispatches, with keys of its own making (IDM-2): the same store as for requests.

    commands = Commands(secrets={1: "..."})
    key = job_key(run_id, "send-reminder", order_id)
    result = await commands.run(tx, key, {"order": order_id}, lambda: send_reminder(tx, order_id))

The command is carried out once for each key; whoever repeats it gets the result of the first time.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.errors import CommandUnderWay, ConfigurationError, KeyReused
from holdfast.idempotency.hashing import Secrets, canonical_json
from holdfast.idempotency.keys import job_scope, require_key
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.payload import encode_payload
from holdfast.postgres.drivers import driver_of
from holdfast.postgres.idempotency import Found, NewRecord, Records, Response
from holdfast.retry import sqlstate_of


class Commands:
    """Carries out commands once, in the caller's transaction, which keeps the result as well."""

    def __init__(
        self,
        secrets: Mapping[int, str | bytes],
        settings: IdempotencySettings | None = None,
        *,
        scope: str = "jobs",
    ) -> None:
        self._secrets = Secrets(secrets)
        self._settings = settings or IdempotencySettings()
        self._scope = job_scope(scope)
        self._records = Records(self._settings.schema)

    def run(
        self, tx: Any, key: str, command: Mapping[str, Any], work: Callable[[], Any] | Callable[[], Awaitable[Any]]
    ) -> Any:
        """The result of `work`, which must be JSON; or the result it had when the key was used first.

        With a synchronous transaction it is called without `await`, and so is `work`. An error of `work` undoes
        everything, because the transaction is the caller's.
        """
        record = self._record(key, command)
        if driver_of(tx).asynchronous:
            return self._run_async(tx, record, work)
        try:
            found = self._records.begin(tx, record)
        except Exception as error:
            raise self._fault(error) from error
        if found is not None:
            return self._result(found)
        response = _response(work())
        return _kept(self._records.complete(tx, record.scope, record.key, response), response)

    async def _run_async(self, tx: Any, record: NewRecord, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            found = await self._records.begin(tx, record)
        except Exception as error:
            raise self._fault(error) from error
        if found is not None:
            return self._result(found)
        response = _response(await work())
        return _kept(await self._records.complete(tx, record.scope, record.key, response), response)

    def _record(self, key: str, command: Mapping[str, Any]) -> NewRecord:
        # The same checks as for an event's payload: a value that JSON does not know would be another one next time.
        parts = (b"command", canonical_json(encode_payload(dict(command))))
        return NewRecord(
            self._scope,
            require_key(key),
            self._secrets.hashes(parts),
            self._secrets.version,
            self._settings.keep,
            self._settings.wait,
        )

    def _fault(self, error: Exception) -> Exception:
        if sqlstate_of(error) == "55P03":
            return CommandUnderWay("the command is being carried out by somebody else", retry_after=1)
        return error

    def _result(self, found: Found) -> Any:
        if found.outcome == "reused":
            raise KeyReused("the key was used for another command; make it from everything that tells them apart")
        if found.response is None:
            raise KeyReused("the key is used twice in one transaction; make it from everything that tells them apart")
        return _value(found.response)


def _response(result: Any) -> Response:
    return Response(False, 200, [], encode_payload({"result": result}).encode())


def _kept(completed: bool, response: Response) -> Any:
    if not completed:
        raise ConfigurationError(
            "work", "ended the transaction that its command is recorded in", "leave commit and rollback to the caller"
        )
    return _value(response)


def _value(response: Response) -> Any:
    return json.loads(response.body)["result"]
