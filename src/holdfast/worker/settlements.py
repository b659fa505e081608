"""Settlements: the ways a delivery ends or is put off, other than delivered, and which of them an attempt calls for.

Delivered is the settlement of nearly every delivery and needs nothing but the delivery itself, so `Settler.deliver`
takes it without an object around it.
"""

from dataclasses import dataclass

from holdfast import outcome
from holdfast.failure import ErrorReport, Redactor, describe, state
from holdfast.postgres.delivery import Delivery
from holdfast.redact import unredacted
from holdfast.retry import classify
from holdfast.telemetry import Failed, Retried
from holdfast.worker.decoding import facts, payload_of


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed; the next one follows after the delay."""

    delivery: Delivery
    delay: float
    error: str  # with its place
    fact: Retried


@dataclass(frozen=True, slots=True)
class Fail:
    """The delivery failed for good: it becomes a dead letter."""

    delivery: Delivery
    reason: str
    error: str | None  # with its traceback
    signature: str | None
    fact: Failed


@dataclass(frozen=True, slots=True)
class Release:
    """The delivery is due at once for any worker, as if it had not been claimed."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Snooze:
    """The delivery is due again after the delay. No attempt is counted."""

    delivery: Delivery
    delay: float


Settlement = Retry | Fail | Release | Snooze
# What an attempt that did not succeed ends with.
Setback = outcome.Retry | outcome.Snooze | outcome.Reject | BaseException


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
        report = describe(setback, self._redact, payload_of(delivery), delivery.handler.package)
        if delivery.handler.on_error == "reject":
            return self._fail(delivery, "rejected", report)
        verdict = classify(setback, delivery.handler.retry)
        if verdict.terminal:
            return self._fail(delivery, "retry_terminal", report)
        return self._retry(delivery, report, verdict.retry_after)

    def fail(self, delivery: Delivery, reason: str, text: str | None) -> Fail:
        """Return the settlement of a delivery that has failed for good, for a cause of Holdfast's own."""
        return self._fail(delivery, reason, state(text, reason, unredacted) if text else None)

    def _stated(self, delivery: Delivery, text: str, kind: str) -> ErrorReport:
        return state(text, kind, self._redact, payload_of(delivery))

    def _fail(self, delivery: Delivery, reason: str, report: ErrorReport | None) -> Fail:
        text, stored, traceback = (report.text, report.stored, report.traceback) if report else (None, None, None)
        group = report.signature if report and report.text else reason
        fact = Failed(
            *facts(delivery), failure_reason=reason, last_error=text, error_signature=group, traceback=traceback
        )
        return Fail(delivery, reason, stored, group, fact)

    def _retry(self, delivery: Delivery, report: ErrorReport, wait: float | None) -> Settlement:
        """Retry within the policy's budget; past it the delivery has failed."""
        policy = delivery.handler.retry
        if policy.exhausted(delivery.attempts, delivery.failing_for or 0.0):
            return self._fail(delivery, "retry_terminal", report)
        # The wait that was asked for is the least; jitter comes on top, so that not all return together.
        delay = policy.delay(delivery.attempts) if wait is None else wait + policy.delay(1)
        fact = Retried(*facts(delivery), last_error=report.text, retry_in=delay, traceback=report.traceback)
        return Retry(delivery, delay, report.stored_briefly, fact)
