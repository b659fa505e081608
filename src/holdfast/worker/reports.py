"""Closes deliveries, each once: counts what became of it in the tally, and reports it to the observers that want it."""

import contextlib
import time
from collections.abc import Sequence
from typing import TypedDict, TypeVar
from uuid import UUID

from pydantic_core import from_json

from holdfast.handler_tally import DeliveryOutcome
from holdfast.observing import ObserverGroup, sampled
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import LONGEST_CORRELATION, Failed, Handled, LostLease, Released, Retried, Snoozed, trace_id_of
from holdfast.tracing import Meter
from holdfast.worker.settlements import Fail, Release, Retry, Settlement, Snooze, deliveries_of
from holdfast.worker.tally import Tally

_NOT_DEAD: dict[str, DeliveryOutcome] = {"expired": "expired", "cancelled": "cancelled"}


Some = TypeVar("Some", bound=Settlement | Delivery)


class _Fields(TypedDict):
    domain_id: UUID | None
    generation: int
    trace_id: str | None
    took: float | None


class Reports:
    """What is wanted is asked for once: of a fact that no observer wants, nothing is made.

    A worker that stops settles deliveries whose handlers still run. When such a handler ends, its delivery is settled
    in vain a second time: what becomes of a delivery first is what counts.
    """

    def __init__(self, tally: Tally, observe: ObserverGroup, generation: int, meter: Meter | None = None) -> None:
        self._tally = tally
        self._meter = meter
        self._observe = observe
        self._generation = generation
        self._handled = observe.share(Handled)
        self._retried = observe.wants(Retried)
        self._snoozed = observe.wants(Snoozed)
        self._failed = observe.wants(Failed)
        self._released = observe.wants(Released)
        self._lost = observe.wants(LostLease)

    def delivered(self, batch: Sequence[Delivery]) -> None:
        """Deliveries whose handlers have succeeded are settled."""
        batch = _closing(batch)
        self._tally.handled(batch)
        if self._meter is not None:
            self._meter.handled(batch)
        if self._handled:
            self._report_handled(batch, "delivered")

    def duplicated(self, batch: Sequence[Delivery]) -> None:
        """Deliveries that were handled before are settled."""
        batch = _closing(batch)
        self._tally.duplicates(batch)
        if self._handled:
            self._report_handled(batch, "duplicate")

    def _report_handled(self, batch: Sequence[Delivery], result: DeliveryOutcome) -> None:
        if self._handled < 1.0:
            batch = sampled(batch, self._handled)
        for each in batch:
            self._observe(Handled(*_names(each), result=result, **self._fields(each)))

    def retried(self, batch: Sequence[Retry]) -> None:
        """Attempts have failed, and will be repeated."""
        batch = _closing(batch)
        self._tally.retried(deliveries_of(batch))
        if self._meter is not None:
            for each in batch:
                self._meter.handled([each.delivery], each.report.type_name)
        if self._retried:
            for each in batch:
                self._observe(
                    Retried(
                        *_names(each.delivery),
                        last_error=each.report.text,
                        retry_in=each.delay,
                        error_signature=each.report.signature,
                        traceback=each.report.traceback,
                        held=each.held,
                        **self._fields(each.delivery),
                    )
                )

    def snoozed(self, batch: Sequence[Snooze]) -> None:
        """Deliveries are due again later, without an attempt."""
        batch = _closing(batch)
        self._tally.snoozed(deliveries_of(batch))
        if self._snoozed:
            for each in batch:
                self._observe(Snoozed(*_names(each.delivery), due_in=each.delay, **self._fields(each.delivery)))

    def released(self, batch: Sequence[Release]) -> None:
        """Deliveries are due at once for any worker."""
        batch = _closing(batch)
        self._tally.released(deliveries_of(batch))
        if self._released:
            for each in batch:
                self._observe(Released(*_names(each.delivery), **self._fields(each.delivery)))

    def judged(self, settlement: Settlement) -> None:
        """It is decided how to settle a delivery."""
        self._tally.dead_letters.judged(settlement)

    def failed(self, batch: Sequence[Fail], *, archived: bool) -> None:
        """Deliveries have ended without success."""
        batch = _closing(batch)
        self._tally.failed(deliveries_of(batch), [each.reason for each in batch], archived=archived)
        self._tally.dead_letters.written(batch)
        if self._meter is not None:
            self._measure_failed(self._meter, batch)
        if self._failed:
            for each in batch:
                report = each.report
                self._observe(
                    Failed(
                        *_names(each.delivery),
                        failure_reason=each.reason,
                        last_error=None if report is None else report.text,
                        error_signature=each.signature,
                        traceback=None if report is None else report.traceback,
                        result=_NOT_DEAD.get(each.reason, "failed"),
                        **self._fields(each.delivery),
                    )
                )

    def _measure_failed(self, meter: Meter, batch: Sequence[Fail]) -> None:
        for each in batch:
            error_type = None if each.report is None else each.report.type_name
            meter.handled([each.delivery], error_type)
            if each.reason not in _NOT_DEAD:
                meter.dead_letter(each.delivery.handler.name, each.reason, error_type)

    def lost(self, deliveries: Sequence[Delivery]) -> None:
        """Deliveries are not settled by this worker: their leases are lost, or are left to expire."""
        deliveries = _closing(deliveries)
        self._tally.lost(deliveries)
        if self._lost:
            for each in deliveries:
                self._observe(LostLease(*_names(each), **self._fields(each)))

    def _fields(self, delivery: Delivery) -> _Fields:
        began = delivery.began_at
        return {
            "domain_id": delivery.domain_id,
            "generation": self._generation,
            "trace_id": trace_id_of(delivery.trace_context),
            "took": None if began is None else max(0.0, (delivery.ended_at or time.monotonic()) - began),
        }


def _closing(batch: Sequence[Some]) -> Sequence[Some]:
    """Return those that are not closed yet, and close them."""
    deliveries = deliveries_of(batch)
    if any([each.closed for each in deliveries]):
        batch = [each for each, delivery in zip(batch, deliveries, strict=True) if not delivery.closed]
    for each in deliveries:
        each.closed = True
    return batch


def _names(delivery: Delivery) -> tuple[UUID, UUID, str, str, str | None, str, int, str]:
    """The first fields of every `DeliveryFact`, also for a row that cannot be decoded."""
    correlation = str(delivery.event_id)
    if delivery.headers:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            correlation = str(from_json(delivery.headers).get("correlation_id") or correlation)
    return (
        delivery.event_id,
        delivery.id,
        delivery.event_type,
        delivery.source,
        delivery.target,
        delivery.handler.name,
        delivery.attempts,
        correlation[:LONGEST_CORRELATION],
    )
