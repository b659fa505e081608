"""Settlements: the ways a delivery ends or is put off, other than delivered, and which of them an attempt calls for.

Delivered is the settlement of nearly every delivery and needs nothing but the delivery itself, so `Settler.deliver`
takes it without an object around it.
"""

from dataclasses import dataclass

from holdfast import outcome
from holdfast.failure import Redactor, bound, describe, signature
from holdfast.postgres.deliveries import Delivery
from holdfast.retry import classify
from holdfast.telemetry import Failed, Retried
from holdfast.worker.decoding import facts


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed; the next one follows after the delay."""

    delivery: Delivery
    delay: float
    error: str
    fact: Retried


@dataclass(frozen=True, slots=True)
class Fail:
    """The delivery failed for good: it becomes a dead letter."""

    delivery: Delivery
    reason: str
    error: str | None
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
                text = None if setback.reason is None else bound(str(setback.reason), self._redact)
                return self.fail(delivery, "rejected", text)
            case outcome.Retry():
                text = bound(str(setback.reason or "the handler asked for a retry"), self._redact)
                return self._retry(delivery, text, "Retry", setback.seconds)
        report = describe(setback, self._redact)
        if delivery.handler.on_error == "reject":
            return self.fail(delivery, "rejected", report.text, report.signature)
        verdict = classify(setback, delivery.handler.retry)
        if verdict.terminal:
            return self.fail(delivery, "retry_terminal", report.text, report.signature)
        return self._retry(delivery, report.text, report.type_name, verdict.retry_after, report.signature)

    def fail(self, delivery: Delivery, reason: str, text: str | None, group: str | None = None) -> Fail:
        """Return the settlement of a delivery that has failed for good; `group` is its error signature."""
        if group is None:
            group = signature(text, reason) if text else reason
        fact = Failed(*facts(delivery), failure_reason=reason, last_error=text, error_signature=group)
        return Fail(delivery, reason, text, group, fact)

    def _retry(
        self, delivery: Delivery, text: str, type_name: str, wait: float | None, group: str | None = None
    ) -> Settlement:
        """Retry within the policy's budget; past it the delivery has failed."""
        policy = delivery.handler.retry
        if policy.exhausted(delivery.attempts, delivery.failing_for or 0.0):
            return self.fail(delivery, "retry_terminal", text, group or signature(text, type_name))
        # The wait that was asked for is the least; jitter comes on top, so that not all return together.
        delay = policy.delay(delivery.attempts) if wait is None else wait + policy.delay(1)
        fact = Retried(*facts(delivery), last_error=text, retry_in=delay)
        return Retry(delivery, delay, text, fact)
