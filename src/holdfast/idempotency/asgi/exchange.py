"""One idempotent request in an ASGI application: its exchange on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

from holdfast.checks import function
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.idempotency import answers
from holdfast.idempotency.asgi.messages import (
    Body,
    BodyTooLarge,
    ClientGone,
    HeldResponse,
    Message,
    Receive,
    Send,
    send_answer,
)
from holdfast.idempotency.asgi.transaction import AsgiTransaction
from holdfast.idempotency.exchange import Exchange, ExchangeConfig, StopEndpoint
from holdfast.idempotency.hashing import HashedRequest, Secrets
from holdfast.idempotency.phases import (
    Answered,
    BeginCalled,
    Escaped,
    Interrupted,
    MessageSent,
    Outside,
    Repeating,
    ReplyBegins,
    Returned,
    TransactionOpened,
)
from holdfast.idempotency.settings import IdempotencySettings, require_settings
from holdfast.idempotency.transitions import Action
from holdfast.observability.logging import log_fact
from holdfast.observing import DirectObservers, facts_of
from holdfast.postgres.idempotency import Records
from holdfast.postgres.managed_transaction import Connect, open_managed_transaction, uninterrupted
from holdfast.telemetry import Observer
from holdfast.tracing import Tracing, require_tracing

EXCHANGE = "holdfast.idempotency"  # in the ASGI scope
# Extensions by which an application answers past its `send`.
_PAST_SEND = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")
_INTERRUPTIONS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsgiConfig(ExchangeConfig):
    """What all exchanges of an ASGI application share."""

    connect: Connect

    @classmethod
    def of(
        cls,
        connect: Connect,
        secrets: Mapping[int, str | bytes],
        settings: IdempotencySettings | None,
        observe: Observer,
        tracing: Tracing | None = None,
    ) -> Self:
        """Return the configuration for what an application passes; refuse what its first request would stumble on."""
        function(
            "connect", connect, "pass pool.acquire, or another function that returns a connection's context manager"
        )
        function("observe", observe, "pass a function that takes a fact")
        facts_of(observe)
        settings = require_settings(settings)
        return cls(
            connect=connect,
            secrets=Secrets(secrets),
            settings=settings,
            records=Records(settings.schema),
            observe=DirectObservers((observe,), log_fact),
            tracing=require_tracing(tracing),
        )


# For code that a framework calls without the scope.
current_exchange: ContextVar[AsgiExchange | None] = ContextVar("holdfast_exchange", default=None)


class AsgiExchange:
    """Runs the application for one request. `begin` is for the endpoint, `run` for the middleware."""

    def __init__(self, config: AsgiConfig, app: Callable[..., Any], scope: Any, receive: Receive, send: Send) -> None:
        self._config = config
        self._settings = config.settings
        self._app = app
        self._scope = scope
        self._original_scope = dict(scope)
        self._server_send = send
        self._body = Body(receive, self._settings.request_limit)
        key_fields = [value for name, value in scope["headers"] if name == b"idempotency-key"]
        parents = (value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent")
        self._trace_context = next(parents, None)
        operation = f"{scope['method']} {scope['path']}"
        self._exchange = Exchange(config, operation, key_fields, self._trace_context)
        self._prepare()

    def _prepare(self) -> None:
        self._scope[EXCHANGE] = self
        if extensions := self._scope.get("extensions"):
            self._scope["extensions"] = {name: value for name, value in extensions.items() if name not in _PAST_SEND}
        self._transaction: AsgiTransaction | None = None
        self._held = HeldResponse(self._settings.buffer_limit)

    # --- for the endpoint ---------------------------------------------------------------------------------

    async def begin(self, scope: str, *, required: bool = True, route: str | None = None) -> Any:
        """Return the transaction of this request, for the caller that `scope` names: the id of a user or a tenant.

        It returns only if the request is to be carried out. Without a key, and without `required`, it always is.
        """
        tx = await self.open(scope, required=required, route=route)
        await self.enter()
        return tx

    async def open(self, scope: str, *, required: bool = True, route: str | None = None) -> Any:
        """Read the key and open a transaction: the first half of `begin`, which does not look the key up yet."""
        exchange = self._exchange
        action = exchange.advance(BeginCalled())
        if action is Action.STOP_ENDPOINT:
            raise StopEndpoint
        if action is Action.REJECT_BEGIN:
            raise ConfigurationError("begin", "was called after the response had begun", "call it first")
        if self._transaction is None:
            template = ""
            if self._settings.route_in_scope:
                template = f"{self._scope['method']} {route or self._scope['path']}"
            exchange.identify(scope, route=template, required=required)
            # Before there is a connection: it would wait, in a transaction, for a client that sends slowly.
            await self._receive_body()
            self._transaction = await self._open_transaction()
            exchange.advance(TransactionOpened())
        return self._transaction.managed.tx

    async def _open_transaction(self) -> AsgiTransaction:
        config, settings = self._config, self._settings
        try:
            managed = await open_managed_transaction(
                config.connect, config.records.queries, settings.connect_within, settings.commit_within
            )
        except HoldfastError:
            raise  # a misuse, not a fault of the database
        except Exception as error:
            self._exchange.unavailable(error)
        return AsgiTransaction(managed, settings)

    async def enter(self) -> None:
        """Take the key, or end the endpoint with its answer: the second half of `begin`."""
        action = self._exchange.advance(BeginCalled())
        if action is Action.STOP_ENDPOINT:
            raise StopEndpoint
        if action is Action.TAKE_KEY and self._transaction is not None:
            request = None if self._exchange.key is None else await self._hashed_request()
            await self._exchange.take_key(self._transaction, request)

    async def _receive_body(self) -> None:
        """Receive what will be hashed, or as much as is kept of a request without a key."""
        length = dict(self._scope["headers"]).get(b"content-length", b"")
        try:
            if self._exchange.key is not None and length.isdigit() and int(length) > self._settings.request_limit:
                raise BodyTooLarge
            if not self._body.whole:
                async with asyncio.timeout(self._settings.receive_within):
                    await self._body.receive()
            if self._exchange.key is not None and not self._body.is_repeatable():
                raise BodyTooLarge
        except BodyTooLarge:
            self._exchange.refuse(answers.body_too_large(self._settings))
        except TimeoutError:
            self._exchange.refuse(answers.body_too_slow(self._settings))
        except ClientGone:
            self._exchange.refuse(answers.unavailable(self._settings), "unavailable")  # which the client will not read

    async def _hashed_request(self) -> list[bytes]:
        scope = self._scope
        headers = dict(scope["headers"])
        body = await self._body.read()
        path = scope.get("raw_path") or scope["path"].encode()
        content_type = headers.get(b"content-type", b"")
        encoding = b",".join(value for name, value in scope["headers"] if name == b"content-encoding")
        request = HashedRequest(scope["method"], path, scope.get("query_string", b""), content_type, body, encoding)
        return request.parts(raw=self._settings.raw_body)

    # --- around the application ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the application until its request is answered."""
        try:
            if self._config.tracing is None:
                await self._run()
            else:
                await self._run_traced(self._config.tracing)
        finally:
            self._exchange.ended()

    async def _run_traced(self, tracing: Tracing) -> None:
        with tracing.request(self._scope["method"], self._trace_context) as span:
            send, status = self._server_send, 0

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            self._server_send = noting
            try:
                await self._run()
            finally:
                if status:
                    self._exchange.trace(span, status, getattr(self._scope.get("route"), "path_format", None))

    async def _run(self) -> None:
        exchange = self._exchange
        attempt = 0
        while True:
            attempt += 1
            error = await self._run_once()
            if not isinstance(exchange.phase, Repeating):
                break
            pause = exchange.pause_before_repetition(attempt, self._body.is_repeatable)
            if pause is None:
                await self._reply()
                break
            await asyncio.sleep(pause)
            exchange.restart()
            # The same object, because code around the middleware reads it afterwards; as it was before the attempt.
            self._scope.clear()
            self._scope.update(self._original_scope)
            self._prepare()
        # Or the request, its session and all that was loaded in it would wait for the garbage collector.
        self._scope.pop(EXCHANGE, None)
        if error is not None:
            raise error

    async def _run_once(self) -> BaseException | None:
        """Run the application once, and end its exchange; return the error to raise to the server."""
        error: BaseException | None = None
        token = current_exchange.set(self)
        try:
            await self._app(self._scope, self._body.reader(), self._send)
        except BaseException as raised:
            error = raised
        finally:
            current_exchange.reset(token)
        return await self._end(error)

    async def _end(self, error: BaseException | None) -> BaseException | None:
        """Do what is left to do when the application has ended; return the error to re-raise."""
        exchange = self._exchange
        if error is None:
            action = exchange.advance(Returned())
        elif isinstance(error, _INTERRUPTIONS):
            action = exchange.advance(Interrupted())
        else:
            if not exchange.decided and not isinstance(exchange.phase, (Outside, Answered)):
                with contextlib.suppress(StopEndpoint):
                    exchange.judge_work(error, self._transaction)
            action = exchange.advance(Escaped())
        if action is Action.SETTLE and self._transaction is not None:
            try:
                await self._settle(self._transaction)
                return None
            except StopEndpoint:
                action = exchange.advance(Returned())
            except asyncio.CancelledError as cancelled:
                error, action = cancelled, exchange.advance(Interrupted())
            except Exception as raised:
                error, action = raised, exchange.advance(Escaped())
        if action is Action.FINISH:
            return error
        await self._roll_back()
        if action in (Action.REPLY, Action.REPLY_AND_FAIL):
            await self._reply()
        if action in (Action.REPLY, Action.RUN_AGAIN):
            return None
        if error is None:
            return RuntimeError("the application ended without a whole response")
        return error

    async def _roll_back(self) -> None:
        if self._transaction is not None:
            with self._transaction.managed.deadline(self._settings.commit_within):
                await uninterrupted(self._transaction.rollback())

    # --- the response -------------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        action = self._exchange.advance(MessageSent())
        if action is Action.FORWARD:
            await self._server_send(message)
        elif action is Action.HOLD:
            answer = self._held.take(message)
            if answer is None or self._transaction is None:
                return
            if self._exchange.complete_response(answer) is Action.SETTLE:
                await self._settle(self._transaction)

    async def _settle(self, transaction: AsgiTransaction) -> None:
        """End the transaction as the answer requires, and only then send the answer."""
        exchange = self._exchange
        try:
            with transaction.managed.deadline(exchange.settling_deadline()):
                await uninterrupted(exchange.settle(transaction))
        except asyncio.CancelledError:
            # Code inside gave up waiting. The settlement has come to its end all the same, and its result is answered.
            exchange.decide(answers.unavailable(self._settings), "unavailable")
            raise
        if exchange.advance(ReplyBegins()) is Action.REPLY:
            await self._reply()

    async def _reply(self) -> None:
        await send_answer(self._server_send, self._exchange.answer())
