"""Settlements: the ways a delivery ends or is put off, other than delivered, and which of them an attempt calls for.

Delivered is the settlement of nearly every delivery and needs nothing but the delivery itself, so `Settler.deliver`
takes it without an object around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from holdfast import outcome
from holdfast.errors import RelayFault, TerminalHandlerError, TransientHandlerError
from holdfast.failure import ErrorReport, Redactor, describe, state
from holdfast.measurements import FailureKind
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.flow import FalterVerdict
from holdfast.redact import unredacted
from holdfast.retry import classify
from holdfast.worker.decoding import data_of

_LONGEST_TYPE = 100  # of the name of an error's class, where failures are counted by it


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed; the next one follows after the delay."""

    delivery: Delivery
    delay: float
    report: ErrorReport
    held: bool = False  # by a breaker that is open: the attempt is not counted, and the delay is the breaker's


@dataclass(frozen=True, slots=True)
class Fail:
    """The delivery failed for good."""

    delivery: Delivery
    reason: str
    report: ErrorReport | None
    signature: str
    exception_type: str = ""  # empty where no exception was raised

    @property
    def dead(self) -> bool:
        """Whether it becomes a dead letter. Cancelled and expired events need no attention."""
        return self.reason not in ("cancelled", "expired")

    @property
    def kind(self) -> FailureKind:
        """Return what it is counted by."""
        return FailureKind(self.delivery.handler.name, self.reason, self.exception_type)


@dataclass(frozen=True, slots=True)
class Release:
    """The delivery is due at once for any worker, as if it had not been claimed."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Snooze:
    """The delivery is due again after the delay. No attempt is counted."""

    delivery: Delivery
    delay: float


@dataclass(slots=True, eq=False)
class Falter:
    """An attempt of a handler with a breaker failed with a transient error; the database decides what becomes of it.

    `fail` is what follows when it is not the partner's fault and the budget is spent.
    """

    delivery: Delivery
    delay: float
    report: ErrorReport
    fail: Fail | None
    after_success: bool = True  # the worker has succeeded with another one since the failure before
    verdict: FalterVerdict | None = None  # once it is settled
    open: bool = False  # the breaker of its handler, once it is settled

    @property
    def error(self) -> str:
        """The error as it is stored."""
        return self.report.stored_briefly

    @property
    def last(self) -> bool:
        """Whether its budget is spent."""
        return self.fail is not None


Settlement = Retry | Fail | Release | Snooze | Falter
# What an attempt that did not succeed ends with.
Setback = outcome.Retry | outcome.Snooze | outcome.Reject | BaseException


def delivery_of(settlement: Settlement | Delivery) -> Delivery:
    """Return the delivery that is settled; one that is delivered stands for itself."""
    return settlement if isinstance(settlement, Delivery) else settlement.delivery


def deliveries_of(batch: Sequence[Settlement | Delivery]) -> Sequence[Delivery]:
    """Return the deliveries that are settled, all in one way: those that are delivered are the batch itself."""
    if not batch or isinstance(batch[0], Delivery):
        return cast("Sequence[Delivery]", batch)
    return [settlement.delivery for settlement in cast("Sequence[Settlement]", batch)]


def _told(error: BaseException) -> BaseException:
    """Return the error to report: of one that has no text, and only says whether to try again, its cause."""
    bare = type(error) in (TerminalHandlerError, TransientHandlerError) and not error.args
    return error.__cause__ if bare and error.__cause__ is not None else error


class Judge:
    """Decides how to settle an attempt that did not succeed, by the handler's retry policy."""

    def __init__(self, redact: Redactor | None = None) -> None:
        self._redact = redact

    def settlement(self, delivery: Delivery, setback: Setback) -> Settlement:
        """Return the settlement of an attempt that ended with such an outcome or error."""
        match setback:
            case outcome.Snooze():
                return Snooze(delivery, setback.seconds)
            case outcome.Reject():
                stated = None if setback.reason is None else self._stated(delivery, str(setback.reason), "rejected")
                return self._fail(delivery, "rejected", stated)
            case outcome.Retry():
                stated = self._stated(delivery, str(setback.reason or "the handler asked for a retry"), "Retry")
                return self._retry(delivery, stated, setback.seconds)
            case RelayFault():
                # Told apart from the failures of handlers by its signature.
                return self._fail(
                    delivery, "retry_terminal", self._stated(delivery, str(setback), "relay"), "RelayFault"
                )
        report = describe(_told(setback), self._redact, data_of(delivery), delivery.handler.package)
        raised = report.type_name[:_LONGEST_TYPE]
        if delivery.handler.on_error == "reject":
            return self._fail(delivery, "rejected", report, raised)
        verdict = classify(setback, delivery.handler.retry)
        if verdict.terminal:
            return self._fail(delivery, "retry_terminal", report, raised)
        settlement = self._retry(delivery, report, verdict.retry_after, raised)
        if delivery.handler.breaker is None:
            return settlement
        if isinstance(settlement, Retry):
            return Falter(delivery, settlement.delay, report, None)
        return Falter(
            delivery, delivery.handler.retry.delay(1), report, self._fail(delivery, "retry_terminal", report, raised)
        )

    def fail(self, delivery: Delivery, reason: str, text: str | None) -> Fail:
        """Return the settlement of a delivery that has failed for good, for a cause of Holdfast's own."""
        return self._fail(delivery, reason, state(text, reason, unredacted) if text else None)

    def _stated(self, delivery: Delivery, text: str, kind: str) -> ErrorReport:
        return state(text, kind, self._redact, data_of(delivery))

    def _fail(self, delivery: Delivery, reason: str, report: ErrorReport | None, raised: str = "") -> Fail:
        return Fail(delivery, reason, report, report.signature if report and report.text else reason, raised)

    def _retry(self, delivery: Delivery, report: ErrorReport, wait: float | None, raised: str = "") -> Settlement:
        """Retry within the policy's budget; past it the delivery has failed."""
        policy = delivery.handler.retry
        if policy.exhausted(delivery.attempts, delivery.failing_for or 0.0):
            return self._fail(delivery, "retry_terminal", report, raised)
        # The wait that was asked for is the least; jitter comes on top, so that not all return together.
        delay = policy.delay(delivery.attempts) if wait is None else wait + policy.delay(1)
        return Retry(delivery, delay, report)
