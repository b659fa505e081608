"""One idempotent request and its answer: what the ASGI and the Django exchange have in common.

`Exchange` keeps the phase of a request (see phases.py and transitions.py) and runs the statements of its transaction.
Its coroutines await nothing but the methods of the transaction they are given. Those of ASGI suspend; those of Django
never do, so that `run_now` can drive the same code without an event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, Protocol, TypeVar

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer, Settlement, settlement_of
from holdfast.idempotency.faults import Fault, fault_of_settling, fault_of_taking, fault_of_work, log_fields
from holdfast.idempotency.hashing import Secrets
from holdfast.idempotency.keys import KeyInvalid, KeyMissing, http_scope, parse_key
from holdfast.idempotency.phases import (
    Answered,
    Closed,
    Decided,
    Event,
    GivenUp,
    KeyTaken,
    Opened,
    Outside,
    Phase,
    Refused,
    Repeating,
    RepeatNeeded,
    ResponseComplete,
    Restarted,
    Settled,
    Settling,
    SettlingDone,
    SettlingFailed,
)
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.idempotency.transitions import Action, ImpossibleTransition, transition
from holdfast.ids import uuid7
from holdfast.observing import DirectObservers
from holdfast.postgres.faults import UNIQUE_VIOLATION, is_conflict
from holdfast.postgres.idempotency import ExistingRecord, NewRecord, Records, StoredResponse
from holdfast.postgres.refusals import refusal_of, refusal_of_connecting
from holdfast.retry import sqlstate_of
from holdfast.telemetry import Notice, Requested, RequestResult, trace_id_of
from holdfast.tracing import RequestSpan, Tracing

T = TypeVar("T")

_FIRST_PAUSE = 0.01  # seconds; doubled with each repetition
_STAYING = "no repetition cures it: catch the unique violation in a savepoint, and answer 409"


class StopEndpoint(BaseException):
    """Ends the endpoint, because its exchange is decided. Not an Exception, so that no endpoint handles it as one."""


class RequestTransaction(Protocol):
    """The transaction of one request."""

    restartable: bool  # whether `restart` is possible after the endpoint has ended the transaction

    @property
    def ended(self) -> bool:
        """Whether a commit or a rollback was attempted."""

    def is_lost(self) -> bool:
        """Return whether the connection is known to be gone."""

    async def begin_record(self, record: NewRecord) -> ExistingRecord | None:
        """Record the request; return the existing record if the key was used before."""

    async def complete_record(self, scope: str, key: str, response: StoredResponse) -> bool:
        """Store the answer; return False if this is not the transaction that recorded the request."""

    async def set_savepoint(self) -> None:
        """Let `undo` return to this point."""

    async def undo(self) -> None:
        """Undo everything since the savepoint."""

    async def restart(self) -> None:
        """Begin a new transaction on the same connection."""

    async def confirm(self) -> None:
        """Raise if the transaction has failed."""

    async def commit(self) -> None: ...

    async def rollback(self) -> None:
        """Roll back; it never raises, and does nothing once the transaction has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """What all exchanges of an application share."""

    secrets: Secrets
    settings: IdempotencySettings
    records: Records
    observe: DirectObservers
    tracing: Tracing | None = None


class Exchange:
    """The phase, the key and the statements of one request. `key_fields` are its `Idempotency-Key` headers."""

    def __init__(
        self, config: ExchangeConfig, operation: str, key_fields: Sequence[bytes], trace_context: str | None = None
    ) -> None:
        self._config = config
        self._settings = config.settings
        self._operation = operation
        self._key_fields = key_fields
        self._trace_context = trace_context
        self._correlation: str | None = None
        self._reported = config.observe.wants(Requested)
        self._began = time.monotonic()
        self._attempts = 1
        self.phase: Phase = Outside()
        self._forget()

    def _forget(self) -> None:
        self._result: RequestResult = "completed"  # unless Holdfast answers
        self.key: str | None = None
        self._scope = ""
        self._record: NewRecord | None = None

    def advance(self, event: Event) -> Action:
        """Enter the phase that follows the event, and return what to do next."""
        self.phase, action = transition(self.phase, event)
        return action

    @property
    def decided(self) -> bool:
        """Whether the outcome is known, whatever the application does from now on."""
        return isinstance(self.phase, (Decided, Repeating, Settled))

    @property
    def echoed_key(self) -> bytes | None:
        """The key as the client wrote it, for the answer's headers; None if the request takes part without one."""
        return None if self.key is None else self._key_fields[0]

    def answer(self) -> Answer:
        """Return the answer to send, with the key in its headers."""
        if not isinstance(self.phase, Answered) or self.phase.answer is None:
            raise ImpossibleTransition(f"no answer in the phase {type(self.phase).__name__}")
        return self.phase.answer.echoing(self.echoed_key)

    # --- the key ------------------------------------------------------------------------------------------

    def identify(self, scope: str, *, route: str, required: bool) -> None:
        """Read the key, for the caller that `scope` names; refuse the request if it is invalid, or missing."""
        try:
            self._scope = http_scope(scope, route)
        except ConfigurationError as error:
            if not isinstance(scope, str):
                raise
            # Applications make it of what the client sent, and an empty name would be shared by all who send none.
            self.report("warning", "idempotency_scope_refused", error)
            self.refuse(answers.scope_invalid(self._settings))
        try:
            self.key = parse_key(self._key_fields)
        except KeyMissing:
            if required:
                self.refuse(answers.key_missing(self._settings))
            if self._key_fields:
                self.refuse(answers.key_invalid(self._settings, "is empty"))
        except KeyInvalid as error:
            self.refuse(answers.key_invalid(self._settings, str(error)))

    async def take_key(self, transaction: RequestTransaction, request: Sequence[bytes] | None) -> None:
        """Record the request, whose hashed parts are `request`; return only if it is to be carried out."""
        if self.key is not None and request is not None:
            secrets, settings = self._config.secrets, self._settings
            self._record = NewRecord(
                self._scope, self.key, secrets.hashes(self._scope, request), secrets.version,
                settings.keep, settings.wait, settings.idle,
            )  # fmt: skip
            await self._begin_record(transaction, self._record)
            if settings.store_4xx or settings.store_5xx:
                try:
                    await transaction.set_savepoint()
                except Exception as error:
                    self.unavailable(error)
        self.advance(KeyTaken())

    async def _begin_record(self, transaction: RequestTransaction, record: NewRecord) -> None:
        try:
            existing = await transaction.begin_record(record)
        except HoldfastError:
            raise  # a misuse, not a fault of the database
        except Exception as error:
            self.judge(fault_of_taking(error), error)
            raise
        if existing is None:
            return
        if existing.outcome == "reused":
            self.report("warning", "idempotency_key_reused")
        self.refuse(
            answers.replayed(existing, self._settings), "refused" if existing.outcome == "reused" else "replayed"
        )

    # --- decisions that end the endpoint --------------------------------------------------------------------

    def refuse(self, answer: Answer, result: RequestResult = "refused") -> NoReturn:
        """Answer for the application."""
        self.decide(answer, result)
        raise StopEndpoint

    def decide(self, answer: Answer, result: RequestResult) -> None:
        """Have this answered for the application, unless the exchange is decided."""
        if not self.decided:
            self._result = result
        self.advance(Refused(answer))

    def repeat(self, error: BaseException) -> NoReturn:
        """Have everything run again."""
        self.advance(RepeatNeeded(error))
        raise StopEndpoint from error

    def unavailable(self, error: BaseException) -> NoReturn:
        """Answer with 503, or 500 if waiting is no help: a request that cannot be recorded is not carried out."""
        refusal = refusal_of(error, self._settings.schema, "record requests in") or refusal_of_connecting(error)
        if refusal is None:
            self.report("error", "idempotency_unavailable", error)
            self.refuse(answers.unavailable(self._settings), "unavailable")
        # Its text is Holdfast's own: unlike the driver's it quotes nothing.
        self.report("error", "idempotency_misconfigured", error, problem=str(refusal))
        self.refuse(answers.misconfigured(self._settings), "unavailable")

    def judge(self, fault: Fault, error: BaseException) -> None:
        """End the endpoint as the fault requires; return if the error is the application's own."""
        match fault:
            case Fault.IN_PROGRESS:
                self.refuse(answers.in_progress(self._settings))
            case Fault.PASSING:
                self.repeat(error)
            case Fault.UNAVAILABLE:
                self.unavailable(error)

    def judge_work(self, error: BaseException, transaction: RequestTransaction | None) -> None:
        """Judge an error that the endpoint raised; return if it is the application's own."""
        fault = fault_of_work(error)
        if fault is Fault.OWN and transaction is not None and not isinstance(error, HoldfastError):
            # Drivers often raise errors without a SQLSTATE when the connection is gone.
            fault = Fault.UNAVAILABLE if not transaction.ended and transaction.is_lost() else fault
        self.judge(fault, error)

    # --- the end of the transaction -------------------------------------------------------------------------

    def complete_response(self, answer: Answer) -> Action:
        """The application's response is whole: return whether to settle it now, or to hold it until it returns."""
        settlement = settlement_of(answer.status, self._settings, keyed=self.key is not None)
        action = self.advance(ResponseComplete(answer, settlement))
        if action is not Action.REJECT_ANSWER:
            return action
        if isinstance(self.phase, Opened):
            raise ConfigurationError(
                "the endpoint",
                "has a transaction, and the key was never looked for",
                "declare it on a router with route_class=IdempotentRoute, or use begin() and let its errors go",
            )
        raise ConfigurationError(
            "the endpoint", "answered with success after its commit had failed", "let the error go"
        )

    def settling_deadline(self) -> float:
        """Return the seconds that `settle` may take. A refusal may have to take its key once more, and wait for it."""
        refuses = isinstance(self.phase, Settling) and self.phase.answer.status >= 400
        return self._settings.commit_within + (self._settings.wait if refuses else 0)

    async def settle(self, transaction: RequestTransaction) -> None:
        """End the transaction as the phase says; raise if it is not known to have ended so."""
        phase = self.phase
        if not isinstance(phase, Settling):
            raise ImpossibleTransition(f"settle in the phase {type(phase).__name__}")
        try:
            match phase.settlement:
                case Settlement.STORE:
                    await self._store(transaction, phase.answer)
                    await transaction.commit()
                case Settlement.STORE_REFUSAL:
                    await self._store_refusal(transaction, phase.answer)
                    await transaction.commit()
                case Settlement.COMMIT:
                    await transaction.confirm()
                    await transaction.commit()
                case Settlement.ROLL_BACK:
                    await transaction.rollback()
        except Exception as error:
            self.judge(fault_of_settling(error), error)
            self.advance(SettlingFailed(transaction.ended))
            raise
        self.advance(SettlingDone())

    async def _store(self, transaction: RequestTransaction, answer: Answer) -> None:
        if not await self._complete_record(transaction, answer):
            raise ConfigurationError(
                "the endpoint",
                "ended the transaction that Holdfast gave it",
                "leave commit and rollback to Holdfast: answer with 4xx to undo your changes",
            )

    async def _store_refusal(self, transaction: RequestTransaction, answer: Answer) -> None:
        """Undo the change and store the answer, even if the endpoint has rolled back by itself."""
        if not transaction.restartable:
            await transaction.undo()
            await self._store(transaction, answer)
            return
        try:
            await transaction.undo()
            if await self._complete_record(transaction, answer):
                return
        except Exception as error:
            if is_conflict(error) or fault_of_work(error) is Fault.UNAVAILABLE:
                raise
        await transaction.restart()
        if self._record is not None:
            # Another request with the key may have come first in between; then both get its answer.
            await self._begin_record(transaction, self._record)
        await self._complete_record(transaction, answer)

    async def _complete_record(self, transaction: RequestTransaction, answer: Answer) -> bool:
        response = answers.stored(answer, self._settings)
        return await transaction.complete_record(self._scope, self.key or "", response)

    # --- repetition -----------------------------------------------------------------------------------------

    def pause_before_repetition(self, attempt: int, can_repeat: Callable[[], bool]) -> float | None:
        """Return the seconds to wait before the next attempt; None if the request is given up and answered."""
        error = self.phase.error if isinstance(self.phase, Repeating) else None
        if attempt > self._settings.retries or not can_repeat():
            remedy = {"remedy": _STAYING} if error is not None and sqlstate_of(error) == UNIQUE_VIOLATION else {}
            self.report(
                "error", "request_given_up", error, attempt=attempt, correlation_id=self._correlated(), **remedy
            )
            if remedy and attempt > 1:
                # It was no other request that came first: a client that sends it again gets nowhere.
                self._result = "refused"
                self.advance(GivenUp(answers.conflict(self._settings)))
            else:
                self._result = "unavailable"
                self.advance(GivenUp(answers.unavailable(self._settings)))
            return None
        pause = random.uniform(0, _FIRST_PAUSE * 2**attempt)
        next_attempt = datetime.now(UTC) + timedelta(seconds=pause)
        self.report(
            "warning",
            "request_retried",
            error,
            attempt=attempt,
            retry_in_s=round(pause, 4),
            next_attempt_at=next_attempt.isoformat(),
            correlation_id=self._correlated(),
        )
        return pause

    def _correlated(self) -> str:
        """Return what the entries about all attempts of the request have in common: its trace, or an id of its own."""
        if self._correlation is None:
            self._correlation = trace_id_of(self._trace_context) or str(uuid7())
        return self._correlation

    def restart(self) -> None:
        """Forget this attempt: the application is run again from the beginning."""
        self.advance(Restarted())
        self._attempts += 1
        self._forget()

    # --- observability --------------------------------------------------------------------------------------

    def ended(self) -> None:
        """Report what became of the request, if it took part and an observer wants to know."""
        result = self._became()
        if self._reported and result is not None:
            answer = self.phase.answer if isinstance(self.phase, Answered) else None
            status, keyed = None if answer is None else answer.status, self.key is not None
            took = time.monotonic() - self._began
            self._config.observe(Requested(self._operation, result, status, keyed, self._attempts, took))

    def _became(self) -> RequestResult | None:
        """Return what became of the request; None if it took no part."""
        if isinstance(self.phase, Answered) and self.phase.answer is not None:
            return self._result
        return "failed" if isinstance(self.phase, Closed) else None

    def trace(self, span: RequestSpan, status: int, route: str | None) -> None:
        """Tell the span of the request how it was answered."""
        span.answered(status, route, self._became(), self._attempts)

    def report(self, level: str, name: str, error: BaseException | None = None, **details: object) -> None:
        """Hand a notice about the request to the observer; it never contains the key itself."""
        fields: dict[str, object] = {"operation": self._operation, **details}
        if self.key is not None:
            fields["key"] = self._config.secrets.shown(self._scope, self.key)
        if error is not None:
            fields |= log_fields(error)
        self._config.observe(Notice(level, name, fields))


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        work.send(None)
    except StopIteration as finished:
        return finished.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a synchronous transaction suspended")
