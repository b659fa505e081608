"""One request and its answer, and the transaction between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer, Fate
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
from holdfast.idempotency.hashing import HashedRequest, Secrets
from holdfast.idempotency.keys import http_scope
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.postgres.idempotency import Records, Response, begin_values, complete_values, found
from holdfast.postgres.managed_transaction import Connect, ManagedTransaction, open_managed_transaction, uninterrupted
from holdfast.telemetry import Notice, Observer

EXCHANGE = "holdfast.idempotency"  # in the ASGI scope
# Extensions by which an application answers past its `send`.
_PAST_SEND = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all exchanges of an application share."""

    connect: Connect
    secrets: Secrets
    settings: IdempotencySettings
    records: Records
    observe: Observer


# For code that a framework calls without the scope.
current_exchange: ContextVar[Exchange | None] = ContextVar("holdfast_exchange", default=None)


class Exchange:
    """`begin` is for the endpoint, `run` for the middleware. When the application is run again, all begins anew."""

    def __init__(self, setup: Setup, app: Callable[..., Any], scope: Any, receive: Receive, send: Send) -> None:
        self._setup = setup
        self._settings = setup.settings
        self._app = app
        self._scope = scope
        self._original = dict(scope)
        self._server_send = send
        self._body = Body(receive, self._settings.request_limit)
        self._fields = [value for name, value in scope["headers"] if name == b"idempotency-key"]
        self._passed_on = False  # a response is on its way that has nothing to do with us
        self._prepare()

    def _prepare(self) -> None:
        self._scope[EXCHANGE] = self
        if extensions := self._scope.get("extensions"):
            self._scope["extensions"] = {name: value for name, value in extensions.items() if name not in _PAST_SEND}
        self._owner = ""
        self._key: str | None = None
        self._transaction: ManagedTransaction | None = None
        self._entered = False  # the endpoint has begun with its work
        self._settled = False  # the transaction has ended as it should
        self._finished = False  # and the answer may go
        self._held = HeldResponse(self._settings.buffer_limit)
        # Once one of these is set, what the application says does not matter any more.
        self._answer: Answer | None = None
        self._repeat: BaseException | None = None  # why the application has to be run again
        self._fault: Answer | None = None  # a 5xx of the application, which may yet say what was wrong

    # --- for the endpoint ---------------------------------------------------------------------------------

    async def begin(self, scope: str, *, required: bool = True, route: str | None = None) -> Any:
        """The transaction of this request, for the caller that `scope` names: a user's or a tenant's id.

        Returns only if the request is to be carried out. Without `required`, and without a key, it always is.
        """
        tx = await self.open(scope, required=required, route=route)
        await self.enter()
        return tx

    async def open(self, scope: str, *, required: bool = True, route: str | None = None) -> Any:
        """The first half of `begin`: the key is read and a transaction opened. Nothing is looked for yet."""
        if self._passed_on:
            raise ConfigurationError("begin", "was called after the response had begun", "call it first")
        if self._transaction is None:
            settings = self._settings
            method = self._scope["method"]
            self._owner = http_scope(
                scope, f"{method} {route or self._scope['path']}" if settings.route_in_scope else ""
            )
            key = read_key(self._fields, settings, required=required)
            if isinstance(key, Answer):
                self._decide(key)
            self._key = key
            try:
                self._transaction = await open_managed_transaction(
                    self._setup.connect, self._setup.records.queries, settings.connect_within, settings.commit_within
                )
            except HoldfastError:
                raise  # not the store's fault
            except Exception as error:
                self._unavailable(error)
        return self._transaction.tx

    async def enter(self) -> None:
        """The second half: the key is taken, or its answer found. What follows is the endpoint's own work."""
        if self._transaction is None or self._entered:
            return
        if self._key is not None:
            answer = await self._take(self._transaction, self._key)
            if answer is not None:
                self._decide(answer)
            if self._settings.store_4xx or self._settings.store_5xx:
                await self._mark(self._transaction)
        self._entered = True

    async def _take(self, transaction: ManagedTransaction, key: str) -> Answer | None:
        """None when the key is ours; otherwise how its duplicate is answered."""
        settings = self._settings
        try:
            record = new_record(self._owner, key, await self._request(), self._setup.secrets, settings)
        except BodyTooLarge:
            return answers.body_too_large(settings)
        except ClientGone:
            return answers.unavailable(settings)  # which nobody will read
        answered = settings.wait + settings.commit_within
        try:
            # A session connects only now, and there is nothing to cut before it has.
            async with asyncio.timeout(settings.connect_within + answered):
                with transaction.within(answered):
                    known = found(await transaction.run("begin_command", begin_values(record), waits=True))
        except HoldfastError:
            raise  # not the store's fault
        except Exception as error:
            match fault_of_taking(error):
                case Fault.UNDER_WAY:
                    return answers.in_progress(settings)
                case Fault.PASSING:
                    self._again(error)
                case _:
                    self._unavailable(error)
        if known is None:
            return None
        if known.outcome == "reused":
            self._tell("warning", "idempotency_key_reused")
        return answers.replayed(known, settings)

    async def _mark(self, transaction: ManagedTransaction) -> None:
        """What is refused is undone from here, and its record stays."""
        try:
            with transaction.within(self._settings.commit_within):
                await transaction.mark()
        except Exception as error:
            self._unavailable(error)

    async def _request(self) -> list[bytes]:
        scope = self._scope
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._settings.request_limit:
            raise BodyTooLarge
        body = await self._body.read()
        path = scope.get("raw_path") or scope["path"].encode()
        content_type = headers.get(b"content-type", b"")
        request = HashedRequest(scope["method"], path, scope.get("query_string", b""), content_type, body)
        return request.parts(raw=self._settings.raw_body)

    # --- how the endpoint is ended ------------------------------------------------------------------------

    def _decide(self, answer: Answer) -> NoReturn:
        self._answer = answer
        raise Unwind

    def _again(self, error: BaseException) -> NoReturn:
        self._repeat = error
        raise Unwind from error

    def _unavailable(self, error: BaseException) -> NoReturn:
        # Fail closed: whoever cannot remember what was done must not do it.
        self._tell("error", "idempotency_unavailable", error)
        self._decide(answers.unavailable(self._settings))

    # --- around the application ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the application until its request is answered."""
        attempt = 0
        while True:
            attempt += 1
            error: BaseException | None = None
            token = current_exchange.set(self)
            try:
                await self._app(self._scope, self._body.reader(), self._send)
            except BaseException as raised:
                error = raised
            finally:
                current_exchange.reset(token)
            if not self._finished and (self._transaction is not None or self._answer is not None):
                error = await self._ended(error)
            if self._repeat is None:
                # Or the request, its session and all that was loaded in it would wait for the garbage collector.
                self._scope.pop(EXCHANGE, None)
                if error is not None:
                    raise error
                return
            if attempt > self._settings.retries or not self._body.repeatable:
                self._tell("error", "request_given_up", self._repeat, attempt=attempt)
                await self._reply(answers.unavailable(self._settings))
                return
            pause = random.uniform(0, 0.01 * 2**attempt)
            self._tell("warning", "request_retried", self._repeat, attempt=attempt, retry_in_s=round(pause, 4))
            await asyncio.sleep(pause)
            self._rewind()

    def _rewind(self) -> None:
        # The same object, because those around us look into it afterwards; as it was, because all is run again.
        self._scope.clear()
        self._scope.update(self._original)
        self._prepare()

    async def _ended(self, error: BaseException | None) -> BaseException | None:
        """The application has ended, and its transaction has not. What is left of the error is nobody's of ours."""
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            await self._roll_back()
            return error
        if error is not None and self._answer is None and self._repeat is None:
            self._judge(error)
        undecided = self._answer is None and self._repeat is None
        if error is None and undecided and self._fault is not None and self._transaction is not None:
            try:
                await self._finish(self._transaction, self._fault)
                return None
            except Unwind:
                pass
            except Exception as raised:
                error, self._fault = raised, None
        await self._roll_back()
        if self._repeat is not None:
            return None
        if self._answer is not None:
            await self._reply(self._answer)
            return None
        if self._fault is not None:
            await self._reply(self._fault)
            return error
        return error or RuntimeError("the application ended without a whole response")

    def _judge(self, error: BaseException) -> None:
        """An error of the endpoint: everything is rolled back, so it may be run again."""
        fault = fault_of_work(error)
        if fault is Fault.OWN and self._is_lost(error):
            fault = Fault.UNAVAILABLE
        if fault is Fault.PASSING:
            self._repeat = error
        elif fault is Fault.UNAVAILABLE:
            self._tell("error", "idempotency_unavailable", error)
            self._answer = answers.unavailable(self._settings)

    def _is_lost(self, error: BaseException) -> bool:
        """Whether it is because the connection has gone: what drivers raise then often has no code."""
        if self._transaction is None or self._transaction.ended or isinstance(error, HoldfastError):
            return False
        return self._transaction.is_lost()

    async def _roll_back(self) -> None:
        if self._transaction is not None:
            with self._transaction.within(self._settings.commit_within):
                await uninterrupted(self._transaction.rollback())

    async def _reply(self, answer: Answer) -> None:
        await send_answer(self._server_send, answer.echoing(self._fields[0] if self._key is not None else None))

    # --- the response -------------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        if self._answer is not None or self._repeat is not None:
            return
        if self._transaction is None:
            self._passed_on = True
            await self._server_send(message)
            return
        if self._finished:
            await self._server_send(message)  # which knows best what is wrong with it
            return
        answer = self._held.take(message)
        if answer is None:
            return
        if answer.status >= 500:
            self._fault = answer
        else:
            await self._finish(self._transaction, answer)

    async def _finish(self, transaction: ManagedTransaction, answer: Answer) -> None:
        # A refusal may have to take its key once more, and to wait for it.
        patience = self._settings.commit_within + (self._settings.wait if answer.status >= 400 else 0)
        try:
            with transaction.within(patience):
                await uninterrupted(self._settle(transaction, answer))
        except asyncio.CancelledError:
            # Somebody inside gave up waiting. It has come to its end all the same, and that is what is answered.
            self._answer = answer if self._settled else answers.unavailable(self._settings)
            raise
        except Exception as error:
            # Whatever it was, the transaction is not known to have been committed: the answer must not go.
            match fault_of_ending(error):
                case Fault.PASSING:
                    self._again(error)
                case Fault.UNAVAILABLE:
                    self._unavailable(error)
            raise
        self._finished = True
        await self._reply(answer)

    async def _settle(self, transaction: ManagedTransaction, answer: Answer) -> None:
        """End the transaction as the answer's status says."""
        fate = answers.fate_of(answer.status, self._settings)
        if transaction.ended:
            # The commit has failed, and the application says so: there is nothing left to undo, and nothing to keep.
            if fate is Fate.KEEP:
                raise ConfigurationError(
                    "the endpoint", "answered with success after its commit had failed", "let the error go"
                )
            return
        if not self._entered:
            if fate is Fate.KEEP:
                raise ConfigurationError(
                    "the endpoint",
                    "has a transaction, and the key was never looked for",
                    "declare it on a router with route_class=IdempotentRoute, or use begin() instead of open()",
                )
            fate = Fate.DROP  # refused before it began, by a dependency or by validation
        if fate is Fate.DROP or (self._key is None and fate is Fate.UNDO):
            await transaction.rollback()
            self._settled = True
            return
        if self._key is None:
            await transaction.confirm()
        elif fate is Fate.UNDO:
            await self._keep_refusal(transaction, self._key, answers.stored(answer, self._settings))
        elif not await self._complete(transaction, answers.stored(answer, self._settings)):
            raise ConfigurationError(
                "the endpoint",
                "ended the transaction that Holdfast gave it",
                "leave commit and rollback to Holdfast: answer with 4xx to undo your changes",
            )
        await transaction.commit()
        self._settled = True

    async def _keep_refusal(self, transaction: ManagedTransaction, key: str, response: Response) -> None:
        """The answer is kept and the change is not, also if the endpoint has rolled back already."""
        try:
            await transaction.undo()
            if await self._complete(transaction, response):
                return
        except Exception as error:
            if never_meant(error) or fault_of_work(error) is Fault.UNAVAILABLE:
                raise
        await transaction.restart()
        answer = await self._take(transaction, key)
        if answer is not None:
            self._decide(answer)  # somebody else was the first, in between
        await self._complete(transaction, response)

    async def _complete(self, transaction: ManagedTransaction, response: Response) -> bool:
        return bool(await transaction.run("complete_command", complete_values(self._owner, self._key or "", response)))

    # --- telling ------------------------------------------------------------------------------------------

    def _tell(self, level: str, name: str, error: BaseException | None = None, **details: object) -> None:
        told: dict[str, object] = {"operation": f"{self._scope['method']} {self._scope['path']}", **details}
        if self._key is not None:
            told["key"] = self._setup.secrets.shown(self._owner, self._key)
        if error is not None:
            told |= told_of(error)
        self._setup.observe(Notice(level, name, told))
