"""One request and its answer in Django: synchronous, in `transaction.atomic`, on the connection of the thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from django.db import connections, transaction
from django.http import HttpResponse

from holdfast.errors import ConfigurationError
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer, Fate
from holdfast.idempotency.decisions import (
    Fault,
    Unwind,
    fault_of_ending,
    fault_of_taking,
    fault_of_work,
    never_meant,
    new_record,
    read_key,
    told_of,
)
from holdfast.idempotency.hashing import Secrets
from holdfast.idempotency.keys import http_scope
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.integrations.django.requests import CapturedRequest
from holdfast.postgres.idempotency import Records
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
    """Ends a block, which undoes what was done in it."""


class DjangoExchange:
    """`begin` is for the view, `run` for the middleware. When the view is run again, all begins anew."""

    def __init__(self, setup: Setup, get_response: Callable[[Any], Any], request: Any) -> None:
        self._setup = setup
        self._settings = setup.settings
        self._get_response = get_response
        self._request = request
        setattr(request, ATTRIBUTE, self)
        self._sent = CapturedRequest(request, self._settings)
        self._reset()

    def _reset(self) -> None:
        self._owner = ""
        self._key: str | None = None
        self._outer: Any = None  # the transaction
        self._inner: Any = None  # what the view does in it
        self._committed = False
        self._error: BaseException | None = None  # what the view raised
        self._doomed: BaseException | None = None  # what it may have caught, and could not
        # Once one of these is set, what the view says does not matter any more.
        self._answer: Answer | None = None
        self._repeat: BaseException | None = None  # why the view has to be run again

    # --- for the view ---------------------------------------------------------------------------------------

    def begin(self, *, required: bool = True) -> None:
        """Open the transaction and take the key. Returns only if the request is to be carried out.

        Call it when it is known who is calling, and that the request is sound. Without `required`, and without a key,
        it always returns.
        """
        if self._outer is not None:
            return
        settings, request, connection = self._settings, self._request, connections[self._setup.using]
        owner = self._setup.scope(request)
        if owner is None:
            self._decide(Answer(401, [(b"content-length", b"0")], b""))
        route = f"{request.method} /{request.resolver_match.route}" if settings.route_in_scope else ""
        self._owner = http_scope(owner, route)
        key, body = read_key(self._sent.fields, settings, required=required), self._sent.body
        if isinstance(key, Answer):
            self._decide(key)
        self._key = key
        if isinstance(body, Answer):
            self._decide(body)
        if isinstance(body, ConfigurationError):
            raise body
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
        # The first one to be called: the others may fail, and the commit has happened all the same.
        transaction.on_commit(self._on_commit, using=self._setup.using)
        if key is not None and (found := self._take(key, body)) is not None:
            self._decide(found)
        inner = transaction.atomic(using=self._setup.using)
        inner.__enter__()
        self._inner = inner
        connection.execute_wrappers.append(self._watch)

    def _take(self, key: str, body: bytes) -> Answer | None:
        """None when the key is ours; otherwise how its duplicate is answered."""
        settings = self._settings
        record = new_record(self._owner, key, self._sent.parts(body), self._setup.secrets, settings)
        try:
            found = self._setup.records.begin(connections[self._setup.using], record)
        except Exception as error:
            match fault_of_taking(error):
                case Fault.UNDER_WAY:
                    return answers.in_progress(settings)
                case Fault.PASSING:
                    self._again(error)
                case _:
                    self._unavailable(error)
        if found is None:
            return None
        if found.outcome == "reused":
            self._tell("warning", "idempotency_key_reused")
        return answers.replayed(found, settings)

    def _watch(self, execute: Callable[..., Any], *statement: Any) -> Any:
        """Around every statement of the view, which may catch what cannot be caught."""
        try:
            return execute(*statement)
        except Exception as error:
            if never_meant(error):
                self._doomed = error
            raise

    def _on_commit(self) -> None:
        self._committed = True

    # --- how the view is ended ------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """What the view raised. What is not its own fault ends here, before Django logs it and makes a page of it."""
        if self._outer is None or self._answer is not None or self._repeat is not None:
            return
        self._error = error
        self._end(fault_of_work(error), error)

    def _end(self, fault: Fault, error: BaseException) -> None:
        """Returns if the error is the application's own."""
        if fault is Fault.PASSING:
            self._again(error)
        if fault is Fault.UNAVAILABLE:
            self._unavailable(error)

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
        attempt = 0
        while True:
            attempt += 1
            self._reset()
            response = self._run_once()
            if self._repeat is None:
                return response
            if attempt > self._settings.retries or not self._sent.rewind():
                self._tell("error", "request_given_up", self._repeat, attempt=attempt)
                return self._response(answers.unavailable(self._settings))
            pause = random.uniform(0, 0.01 * 2**attempt)
            self._tell("warning", "request_retried", self._repeat, attempt=attempt, retry_in_s=round(pause, 4))
            time.sleep(pause)

    def _run_once(self) -> Any:
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
        try:
            self._settle(_answer_of(response))
        except Exception as error:
            if self._committed:
                # It came from what the view wanted to be called after the commit, which is too late to matter.
                self._tell("error", "after_commit_failed", error)
            else:
                self._end(fault_of_ending(error), error)
                raise
        if self._key is not None:
            response["Idempotency-Key"] = self._sent.fields[0].decode("latin-1")
        return response

    def _fate_of(self, status: int) -> Fate:
        if self._inner is None:
            return Fate.DROP
        failed = transaction.get_rollback(using=self._setup.using)
        if self._doomed is not None and (failed or status >= 400):
            self._again(self._doomed)
        if self._error is not None and status >= 500:
            return Fate.DROP  # a page that Django or another middleware made of it: the view gave no answer
        fate = answers.fate_of(status, self._settings)
        if fate is Fate.KEEP and failed:
            # Leaving the block would roll back and say nothing of it.
            raise ConfigurationError(
                "the view",
                "went on after a database error that undoes its changes",
                "let the error go, or put what may fail into transaction.atomic()",
            )
        return Fate.DROP if self._key is None and fate is Fate.UNDO else fate

    def _settle(self, answer: Answer) -> None:
        """End the transaction as the answer's status says."""
        fate = self._fate_of(answer.status)
        if fate is Fate.DROP:
            self._roll_back()
            return
        self._leave_inner(_Undo() if fate is Fate.UNDO else None)
        if self._key is not None:
            response = answers.stored(answer, self._settings)
            if not self._setup.records.complete(connections[self._setup.using], self._owner, self._key, response):
                raise ConfigurationError("the view", "ended the transaction", "leave commit and rollback to Holdfast")
        self._leave_outer(None)

    def _roll_back(self) -> None:
        for leave in (self._leave_inner, self._leave_outer):
            try:
                leave(_Undo())
            except Exception:
                # A connection that cannot roll back is lost, and its transaction with it.
                connections[self._setup.using].close()

    def _leave_inner(self, error: BaseException | None) -> None:
        block, self._inner = self._inner, None
        if block is not None:
            connections[self._setup.using].execute_wrappers.remove(self._watch)
            block.__exit__(None if error is None else type(error), error, None)

    def _leave_outer(self, error: BaseException | None) -> None:
        block, self._outer = self._outer, None
        if block is not None:
            block.__exit__(None if error is None else type(error), error, None)

    def _response(self, answer: Answer) -> Any:
        response = HttpResponse(answer.body, status=answer.status)
        del response["Content-Type"]
        for name, value in answer.echoing(self._sent.fields[0] if self._key is not None else None).headers:
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
