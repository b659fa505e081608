"""One idempotent request in Django: its exchange without an event loop, on the connection of the thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.http import HttpResponse

from holdfast.errors import ConfigurationError
from holdfast.idempotency.answers import Answer
from holdfast.idempotency.exchange import Exchange, ExchangeConfig, StopEndpoint, run_now
from holdfast.idempotency.phases import (
    BeginCalled,
    EndpointRaised,
    Interrupted,
    Repeating,
    ReplyBegins,
    Returned,
    TransactionOpened,
)
from holdfast.idempotency.transitions import Action
from holdfast.integrations.django.requests import CapturedRequest
from holdfast.integrations.django.transaction import AtomicTransaction
from holdfast.tracing import Tracing

ATTRIBUTE = "holdfast_idempotency"  # of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class DjangoConfig(ExchangeConfig):
    """What all exchanges of a Django project share."""

    scope: Callable[[Any], str | None]
    using: str


class DjangoExchange:
    """Runs the view for one request. `begin` is for the view, `run` for the middleware."""

    def __init__(self, config: DjangoConfig, get_response: Callable[[Any], Any], request: Any) -> None:
        self._config = config
        self._get_response = get_response
        self._request = request
        setattr(request, ATTRIBUTE, self)
        self._captured = CapturedRequest(request, config.settings)
        operation = f"{request.method} {request.path}"
        trace_context = request.headers.get("traceparent")
        self._exchange = Exchange(config, operation, self._captured.key_fields, trace_context)
        self._transaction: AtomicTransaction | None = None

    # --- for the view ---------------------------------------------------------------------------------------

    def begin(self, *, required: bool = True) -> None:
        """Open the transaction and take the key; return only if the request is to be carried out.

        Call it once the caller is authenticated and the request is validated. Without a key, and without `required`,
        it always returns.
        """
        action = self._exchange.advance(BeginCalled())
        if action is Action.STOP_ENDPOINT:
            raise StopEndpoint
        if action is Action.OPEN:
            self._identify(required)
            self._transaction = self._open_transaction()
            action = self._exchange.advance(TransactionOpened())
        if action is Action.TAKE_KEY and self._transaction is not None:
            request = None if self._exchange.key is None else self._captured.hashed_parts()
            run_now(self._exchange.take_key(self._transaction, request))
            self._transaction.watch()

    def _identify(self, required: bool) -> None:
        request, captured = self._request, self._captured
        caller = self._config.scope(request)
        if caller is None:
            self._exchange.refuse(Answer(401, [(b"content-length", b"0")], b""))
        route = f"{request.method} /{request.resolver_match.route}" if self._config.settings.route_in_scope else ""
        self._exchange.identify(caller, route=route, required=required)
        if captured.refusal is not None:
            self._exchange.refuse(captured.refusal)
        if captured.error is not None:
            raise captured.error
        if connections[self._config.using].in_atomic_block:
            raise ConfigurationError(
                "ATOMIC_REQUESTS",
                "has opened a transaction already, in which nothing can be run again",
                "mark the view with @transaction.non_atomic_requests",
            )

    def _open_transaction(self) -> AtomicTransaction:
        try:
            return AtomicTransaction(self._config.using, self._config.records, self._after_commit_failed)
        except Exception as error:
            self._exchange.unavailable(error)

    def _after_commit_failed(self, error: Exception) -> None:
        self._exchange.report("error", "after_commit_failed", error)

    def failed(self, error: BaseException) -> None:
        """Judge an error that the view raised, before Django logs it and makes a response of it."""
        if self._exchange.decided or self._transaction is None or self._transaction.ended:
            return
        self._exchange.advance(EndpointRaised())
        self._exchange.judge_work(error, self._transaction)

    # --- around the view ------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Run the view until its request is answered, and return the response."""
        try:
            tracing = self._config.tracing
            return self._run_until_answered() if tracing is None else self._run_traced(tracing)
        finally:
            self._exchange.ended()

    def _run_traced(self, tracing: Tracing) -> Any:
        request = self._request
        with tracing.request(request.method, request.headers.get("traceparent")) as span:
            response = self._run_until_answered()
            route = getattr(request.resolver_match, "route", None)
            self._exchange.trace(span, response.status_code, None if route is None else f"/{route}")
            return response

    def _run_until_answered(self) -> Any:
        exchange = self._exchange
        attempt = 0
        while True:
            attempt += 1
            response = self._run_once()
            if not isinstance(exchange.phase, Repeating):
                return response
            pause = exchange.pause_before_repetition(attempt, self._captured.rewind)
            if pause is None:
                return self._own_response()
            time.sleep(pause)
            exchange.restart()
            self._transaction = None

    def _run_once(self) -> Any:
        """Run the view once, and end its exchange; return the response, if there is one."""
        response = None
        try:
            response = self._get_response(self._request)
            if not self._exchange.decided and self._transaction is not None:
                self._settle(self._transaction, response)
        except StopEndpoint:
            pass
        except BaseException:
            self._exchange.advance(Interrupted())
            self._roll_back()
            raise
        action = self._exchange.advance(Returned())
        if action is Action.FINISH:
            return response
        self._roll_back()
        return self._own_response() if action is Action.REPLY else None

    def _settle(self, transaction: AtomicTransaction, response: Any) -> None:
        """End the transaction as the response requires."""
        if getattr(response, "streaming", False):
            raise ConfigurationError(
                "the response to an idempotent request",
                "is a stream, which cannot be repeated",
                "answer with a whole body",
            )
        answer, exchange = _answer_of(response), self._exchange
        if transaction.conflict is not None and (transaction.needs_rollback or answer.status >= 400):
            exchange.repeat(transaction.conflict)
        if transaction.needs_rollback and answer.status < 400:
            raise ConfigurationError(
                "the view",
                "went on after a database error that undoes its changes",
                "let the error go, or put what may fail into transaction.atomic()",
            )
        if exchange.complete_response(answer) is Action.HOLD:
            exchange.advance(Returned())  # the view has returned already
        run_now(exchange.settle(transaction))
        exchange.advance(ReplyBegins())
        if exchange.echoed_key is not None:
            response["Idempotency-Key"] = exchange.echoed_key.decode("latin-1")

    def _roll_back(self) -> None:
        if self._transaction is not None:
            run_now(self._transaction.rollback())

    def _own_response(self) -> Any:
        """Return the exchange's own answer as a Django response."""
        answer = self._exchange.answer()
        response = HttpResponse(answer.body, status=answer.status)
        del response["Content-Type"]
        for name, value in answer.headers:
            response[name.decode("latin-1").title()] = value.decode("latin-1")
        return response


def _answer_of(response: Any) -> Answer:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
    return Answer(response.status_code, headers, bytes(response.content))
