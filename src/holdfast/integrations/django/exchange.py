"""One request and its answer in Django: synchronous, in `transaction.atomic`, on the connection of the thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from django.core.exceptions import RequestDataTooBig
from django.db import connections, transaction
from django.http import HttpResponse

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer, Fate
from holdfast.idempotency.exchange import AGAIN, GONE, WAITED, Unwind, told_of
from holdfast.idempotency.hashing import HashedRequest, Secrets
from holdfast.idempotency.keys import KeyInvalid, KeyMissing, parse_key, require_scope
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.postgres.idempotency import NewRecord, Records, Response
from holdfast.retry import sqlstate_of
from holdfast.telemetry import Notice, Observer

ATTRIBUTE = "holdfast_idempotency"  # of the request


@dataclass(frozen=True, slots=True)
class Setup:
    """What all exchanges of a project share."""

    secrets: Secrets
    settings: IdempotencySettings
    records: Records
    observe: Observer
    scope: Callable[[Any], str | None]
    using: str


class _Undo(Exception):
    """Ends the inner block, which undoes the view's changes."""


class DjangoExchange:
    """`begin` is for the view, `run` for the middleware. When the view is run again, all begins anew."""

    def __init__(self, setup: Setup, get_response: Callable[[Any], Any], request: Any) -> None:
        self._setup = setup
        self._settings = setup.settings
        self._get_response = get_response
        self._request = request
        field = request.META.get("HTTP_IDEMPOTENCY_KEY")
        # WSGI joins two fields with a comma, which no key has outside of quotation marks.
        self._fields = [] if field is None else [field.encode("latin-1", "replace")]
        self._body = self._read_body() if self._fields else b""
        self._reset()

    def _reset(self) -> None:
        self._owner = ""
        self._key: str | None = None
        self._outer: Any = None  # the transaction
        self._inner: Any = None  # what the view does in it
        self._answer: Answer | None = None
        self._repeat: BaseException | None = None
        self._error: BaseException | None = None

    def _read_body(self) -> bytes | None:
        """Now, because a view may read the stream, and a body cannot be had from Django after that."""
        length = self._request.META.get("CONTENT_LENGTH") or "0"
        if length.isdigit() and int(length) > self._settings.request_limit:
            return None
        try:
            body: bytes = self._request.body
        except RequestDataTooBig:
            return None
        return body if len(body) <= self._settings.request_limit else None

    # --- for the view ---------------------------------------------------------------------------------------

    def begin(self, *, required: bool) -> None:
        """Open the transaction and take the key. Returns only if the view is to be run."""
        if self._outer is not None:
            return
        scope = self._setup.scope(self._request)
        if scope is None:
            self._decide(Answer(401, [(b"content-length", b"0")], b""))
        self._owner = require_scope(scope)
        if self._settings.route_in_scope:
            route = self._request.resolver_match.route
            self._owner = require_scope(f"{scope} {self._request.method} /{route}")
        self._key = self._read_key(required)
        if self._body is None:
            self._decide(answers.body_too_large(self._settings))
        connection = connections[self._setup.using]
        if connection.in_atomic_block:
            raise ConfigurationError(
                "ATOMIC_REQUESTS",
                "has opened a transaction already, in which nothing can be run again",
                "mark the view with @transaction.non_atomic_requests",
            )
        try:
            outer = transaction.atomic(using=self._setup.using)
            outer.__enter__()
            self._outer = outer
        except Exception as error:
            self._unavailable(error)
        if self._key is not None and (found := self._take(self._key)) is not None:
            self._decide(found)
        inner = transaction.atomic(using=self._setup.using)
        inner.__enter__()
        self._inner = inner

    def _read_key(self, required: bool) -> str | None:
        try:
            return parse_key(self._fields)
        except KeyMissing:
            if required:
                self._decide(answers.key_missing(self._settings))
            if self._fields:
                self._decide(answers.key_invalid(self._settings, "is empty"))
        except KeyInvalid as error:
            self._decide(answers.key_invalid(self._settings, str(error)))
        return None

    def _take(self, key: str) -> Answer | None:
        settings, secrets, request = self._settings, self._setup.secrets, self._request
        hashed = HashedRequest(
            request.method,
            request.get_full_path().partition("?")[0].encode(),
            request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
            request.META.get("CONTENT_TYPE", "").encode("latin-1", "replace"),
            self._body or b"",
        )
        hashes = secrets.hashes(hashed.parts(raw=settings.raw_body))
        record = NewRecord(self._owner, key, hashes, secrets.version, settings.keep, settings.wait, settings.idle)
        try:
            found = self._setup.records.begin(connections[self._setup.using], record)
        except Exception as error:
            state = sqlstate_of(error)
            if state in WAITED:
                return answers.in_progress(settings)
            if state in AGAIN:
                self._again(error)
            self._unavailable(error)
        if found is None:
            return None
        if found.outcome == "reused":
            self._tell("warning", "idempotency_key_reused")
        return answers.replayed(found, settings)

    def failed(self, error: BaseException) -> None:
        """What the view raised: Django turns it into a response before the middleware sees it."""
        self._error = error

    def _decide(self, answer: Answer) -> NoReturn:
        self._answer = answer
        raise Unwind

    def _again(self, error: BaseException) -> NoReturn:
        self._repeat = error
        raise Unwind from error

    def _unavailable(self, error: BaseException) -> NoReturn:
        self._tell("error", "idempotency_unavailable", error)
        self._decide(answers.unavailable(self._settings))

    # --- around the view ------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Run the view until its request is answered."""
        setattr(self._request, ATTRIBUTE, self)
        for attempt in range(1, self._settings.retries + 2):
            self._reset()
            response = self._run_once()
            if self._repeat is None:
                return response
            if attempt <= self._settings.retries:
                pause = random.uniform(0, 0.01 * 2**attempt)
                self._tell("warning", "request_retried", self._repeat, attempt=attempt, retry_in_s=round(pause, 4))
                time.sleep(pause)
        self._tell("error", "request_given_up", self._repeat, attempt=self._settings.retries + 1)
        return self._response(answers.unavailable(self._settings))

    def _run_once(self) -> Any:
        response = None
        try:
            response = self._get_response(self._request)
            if self._outer is None and self._answer is None:
                return response  # not ours
            if self._answer is None and self._repeat is None:
                return self._finish(response)
        except Unwind:
            pass
        except BaseException:
            self._roll_back()
            raise
        self._roll_back()
        return None if self._answer is None else self._response(self._answer)

    def _finish(self, response: Any) -> Any:
        if getattr(response, "streaming", False):
            raise ConfigurationError(
                "the response to an idempotent request",
                "is a stream, which cannot be repeated",
                "answer with a whole body",
            )
        if self._error is not None and self._is_passing(self._error):
            self._unavailable(self._error)
        try:
            self._settle(_answer_of(response))
        except Exception as error:
            if self._is_passing(error) or (sqlstate_of(error) is None and not isinstance(error, HoldfastError)):
                self._unavailable(error)
            raise
        if self._key is not None:
            response["Idempotency-Key"] = self._fields[0].decode("latin-1")
        return response

    def _is_passing(self, error: BaseException) -> bool:
        """Whether the server is gone. If the transaction is to be run again, it does not return."""
        state = sqlstate_of(error) or ""
        if state in AGAIN:
            self._again(error)
        return state.startswith(GONE)

    def _settle(self, answer: Answer) -> None:
        entered = self._inner is not None
        fate = answers.fate_of(answer.status, self._settings) if entered else Fate.DROP
        if fate is Fate.DROP or (self._key is None and fate is Fate.UNDO):
            self._roll_back()
            return
        if fate is Fate.KEEP and transaction.get_rollback(using=self._setup.using):
            # Leaving the block would roll back and say nothing of it.
            raise ConfigurationError(
                "the view",
                "went on after a database error that undoes its changes",
                "let the error go, or put what may fail into transaction.atomic()",
            )
        self._leave("_inner", _Undo() if fate is Fate.UNDO else None)
        if self._key is not None:
            response: Response = answers.stored(answer, self._settings)
            if not self._setup.records.complete(connections[self._setup.using], self._owner, self._key, response):
                raise ConfigurationError("the view", "ended the transaction", "leave commit and rollback to Holdfast")
        self._leave("_outer", None)

    def _roll_back(self) -> None:
        error = _Undo()
        for block in ("_inner", "_outer"):
            try:
                self._leave(block, error)
            except Exception:
                # A connection that cannot roll back is lost, and its transaction with it.
                connections[self._setup.using].close()

    def _leave(self, name: str, error: BaseException | None) -> None:
        block = getattr(self, name)
        setattr(self, name, None)
        if block is not None:
            block.__exit__(None if error is None else type(error), error, None)

    def _response(self, answer: Answer) -> Any:
        response = HttpResponse(answer.body, status=answer.status)
        del response["Content-Type"]
        for name, value in answer.echoing(self._fields[0] if self._key is not None else None).headers:
            response[name.decode("latin-1").title()] = value.decode("latin-1")
        return response

    def _tell(self, level: str, name: str, error: BaseException | None = None, **details: object) -> None:
        told: dict[str, object] = {"operation": f"{self._request.method} {self._request.path}", **details}
        if self._key is not None:
            told["key"] = self._setup.secrets.shown(self._owner, self._key)
        if error is not None:
            told |= told_of(error)
        self._setup.observe(Notice(level, name, told))


def _answer_of(response: Any) -> Answer:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
    return Answer(response.status_code, headers, bytes(response.content))
