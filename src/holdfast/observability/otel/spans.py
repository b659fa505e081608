"""The spans that OpenTelemetry has begun for the library."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextvars import Token
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode

from holdfast.context import current_context, current_database
from holdfast.event_data import EventData
from holdfast.failure import ErrorReport, describe
from holdfast.handler_tally import DeliveryOutcome
from holdfast.observability.otel.metrics import Meter
from holdfast.observability.otel.trace_context import span_context, text_of
from holdfast.telemetry import RequestResult
from holdfast.tracing import LEASE_LOST, Message

Attributes = Mapping[str, str | int]

NOWHERE: Final = Context()  # neither a span nor baggage


def operation(name: str, kind: str) -> Attributes:
    """Return the attributes that every span of messaging has."""
    return {"messaging.system": "holdfast", "messaging.operation.name": name, "messaging.operation.type": kind}


class OtelSpan:
    """A span, which is the current one inside its block."""

    __slots__ = ("_context", "_event", "_report", "_span", "_token")

    def __init__(self, span: trace.Span, context: Context | None = None, event: EventData | None = None) -> None:
        self._span = span
        self._event = event
        self._report: ErrorReport | None = None
        self._context = contexts.get_current() if context is None else context

    @property
    def recording(self) -> bool:
        """Whether anything of it is kept."""
        return self._span.is_recording()

    @property
    def trace_context(self) -> str | None:
        """A W3C traceparent, and after a space the tracestate, if there is room for it."""
        return text_of(self._span.get_span_context())

    def __enter__(self) -> Self:
        self._token: Token[Context] = contexts.attach(trace.set_span_in_context(self._span, self._context))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if self._span.is_recording():
            if error is not None and self._report is None:
                self._report = self._described(error)
            with contextlib.suppress(Exception):  # of a processor of the application
                self._close()

    def _described(self, error: BaseException) -> ErrorReport:
        """Return an error without what it may quote. Of a text whose data is not known here, only the type is left."""
        if self._event is not None:
            return describe(error, event=self._event)
        report = describe(error)
        return replace(report, text=report.type_name)

    def _close(self) -> None:
        if self._report is not None:
            _fail(self._span, self._report)
        self._span.end()


class PublishSpan(OtelSpan):
    """A publish, which is measured whether its span is kept or not."""

    __slots__ = ("_began", "_events", "_meter")

    def __init__(self, span: trace.Span, *, meter: Meter | None, events: int, event: EventData | None = None) -> None:
        super().__init__(span, event=event)
        self._meter = meter
        self._events = events
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:  # while the span is the current one, for the exemplar
            failed = None if error is None else describe(error).type_name
            self._meter.published(self._events, time.perf_counter() - self._began, failed)
        super().__exit__(kind, error, trace)


class FireSpan(OtelSpan):
    """Slots of a schedule that are being fired. A span that never ends is never exported."""

    __slots__ = ("_dropped",)

    def __init__(self, span: trace.Span) -> None:
        super().__init__(span)
        self._dropped = False

    def drop(self) -> None:
        """Keep nothing of it: the slots were not fired here."""
        self._dropped = True

    def _close(self) -> None:
        if not self._dropped:
            super()._close()


class HandleSpan(OtelSpan):
    """One attempt to handle an event. The handler sees this span and nothing else: no baggage of strangers."""

    __slots__ = ("_message", "_outcome", "_tracer")

    def __init__(self, span: trace.Span) -> None:
        super().__init__(span, NOWHERE)
        self._outcome: DeliveryOutcome = "delivered"

    def describe(self, tracer: trace.Tracer, message: Message) -> None:
        """Add what is said only of a span that is kept."""
        self._tracer, self._message = tracer, message
        self._span.set_attributes(
            {
                "messaging.message.id": str(message.event_id),
                "messaging.outbox.source": message.source,
                "messaging.outbox.attempt": message.attempts,
            }
        )
        if (database := current_database.get()) is not None:
            self._span.set_attribute("messaging.outbox.database", database)

    @property
    def context(self) -> Context:
        """The context of the span, by which a measurement names it."""
        return trace.set_span_in_context(self._span, NOWHERE)

    def conclude(self, outcome: DeliveryOutcome, report: ErrorReport | None = None) -> None:
        """Say how the attempt has ended."""
        self._outcome, self._report = outcome, report

    def _close(self) -> None:
        self._span.set_attribute("messaging.outbox.outcome", self._outcome)
        super()._close()

    def settled(self, since: int, batch: int, *, lost: bool) -> None:
        """Record that the delivery was settled, as a child of the attempt."""
        message = self._message
        attributes: dict[str, str | int] = {
            **operation("settle", "settle"),
            "messaging.destination.name": message.event_type,
            "messaging.destination.subscription.name": message.handler_name,
            "messaging.message.id": str(message.event_id),
            "messaging.batch.message_count": batch,
            "messaging.outbox.outcome": "lost_lease" if lost else self._outcome,
        }
        name = f"settle {message.handler_name}"
        with contextlib.suppress(Exception):
            span = self._tracer.start_span(name, self.context, SpanKind.CLIENT, attributes, start_time=since)
            if lost:
                _fail(span, LEASE_LOST)
            span.end()


class UnsampledSpan(NonRecordingSpan):
    """The span that the event carries whose handler runs, if its trace is not sampled; else none.

    One object serves all events, so that an event of such a trace costs nothing: its trace context is read where
    something asks for it.
    """

    def __init__(self) -> None:
        super().__init__(INVALID_SPAN_CONTEXT)

    def get_span_context(self) -> SpanContext:
        running = current_context.get()
        found = None if running is None or running.trace_context is None else span_context(running.trace_context)
        return INVALID_SPAN_CONTEXT if found is None or found.trace_flags.sampled else found

    def __repr__(self) -> str:
        return f"UnsampledSpan({self.get_span_context()!r})"


HANDED_ON: Final = trace.set_span_in_context(UnsampledSpan(), NOWHERE)


class RequestSpan(OtelSpan):
    """A request that may be idempotent, with all its repetitions."""

    __slots__ = ("_name",)

    def __init__(self, span: trace.Span, name: str = "") -> None:
        super().__init__(span)
        self._name = name

    def answered(self, status: int, route: str | None, result: RequestResult | None, attempts: int) -> None:
        """Say how the request was answered."""
        if not self.recording:
            return
        self._span.set_attribute("http.response.status_code", status)
        if result is not None:
            self._span.set_attributes({"holdfast.request.result": result, "holdfast.request.attempts": attempts})
        if route is not None:
            self._span.set_attribute("http.route", route)
            self._span.update_name(f"{self._name} {route}")
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))


def _fail(span: trace.Span, report: ErrorReport) -> None:
    """Record an error as `Span.record_exception` does, from a text that is redacted and bounded."""
    headline = report.text.partition("\n")[0]
    span.set_attribute("error.type", report.type_name)
    span.set_status(Status(StatusCode.ERROR, headline))
    exception = {"exception.type": report.type_name, "exception.message": report.text}
    if report.traceback:
        exception["exception.stacktrace"] = report.traceback
    span.add_event("exception", exception)
