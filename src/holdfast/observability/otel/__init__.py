"""Traces and metrics through the OpenTelemetry API. The application configures the SDK, and decides what is sampled.

    telemetry = OpenTelemetry()
    publisher = Publisher("shop", tracing=telemetry)
    worker = Worker(dsn, registry, tracing=telemetry)

A publish is a span whose context travels with the event; each attempt of each handler is a span in the same trace, and
the current one while the handler runs. Names and attributes follow the semantic conventions for messaging. Payloads,
keys and headers of events are in none of them, and error texts are redacted as they are for the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Final, Literal, TypeVar, get_args
from uuid import UUID

from holdfast.installing import package_version, require_extra

require_extra("otel", "opentelemetry", "opentelemetry.trace")

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind

from holdfast.checks import instance, one_of
from holdfast.errors import ConfigurationError
from holdfast.event_data import EventData
from holdfast.new_event import NewEvent
from holdfast.observability.logging import logger
from holdfast.observability.otel.metrics import SCHEMA, Meter, meter_of
from holdfast.observability.otel.spans import (
    HANDED_ON,
    NOWHERE,
    Attributes,
    FireSpan,
    HandleSpan,
    OtelSpan,
    PublishSpan,
    RequestSpan,
    operation,
)
from holdfast.observability.otel.trace_context import UNSAMPLED, span_context
from holdfast.tracing import Message

Relation = Literal["child", "link"]

_MOST_LINKS: Final = 32

_Begun = TypeVar("_Begun", bound="OtelSpan")


class OpenTelemetry:
    """Traces what publishers, workers, reactions, idempotent requests and operators do, with the global providers.

    With `consumer="child"` an attempt belongs to the trace in which its event was published; with `"link"` it begins a
    trace of its own, with a link to that one. A producer that has not sampled an event has decided for its handlers
    too, unless they are linked. With `metrics=False` a meter provider is left alone.
    """

    def __init__(
        self,
        *,
        consumer: Relation = "child",
        metrics: bool = True,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        one_of("consumer", consumer, get_args(Relation))
        instance("metrics", metrics, bool, "pass True or False")
        _require_provider("tracer_provider", tracer_provider, "get_tracer")
        _require_provider("meter_provider", meter_provider, "get_meter")
        self._tracer = trace.get_tracer("holdfast", package_version(), tracer_provider, SCHEMA)
        self._measures = metrics
        self._meter_provider = meter_provider
        self._given = tracer_provider is not None
        self._linked = consumer == "link"
        self._failed = False

    @property
    def meter(self) -> Meter | None:
        """What measures; None where no meter provider is configured, or no metrics are wanted."""
        return meter_of(self._meter_provider) if self._measures else None

    def inactive(self) -> str | None:
        """Return why nothing is recorded: without an SDK the API does nothing."""
        return None if self._given or is_configured() else "no OpenTelemetry SDK is configured in this process"

    def publish(self, events: Sequence[NewEvent], event_id: UUID | None = None) -> OtelSpan:
        """Begin the span of events that are being published: one, with its id, or a batch."""
        current = trace.get_current_span()
        if _is_unsampled(current):
            return PublishSpan(current, meter=self.meter, events=len(events))
        types = {event.event_type for event in events}
        attributes: dict[str, str | int] = {**operation("publish", "send")}
        if len(types) == 1:
            attributes["messaging.destination.name"] = destination = types.pop()
        else:
            destination = "events"
        if event_id is None:
            attributes["messaging.batch.message_count"] = len(events)
        else:
            attributes["messaging.message.id"] = str(event_id)
        given = {event.trace_context for event in events if event.trace_context is not None}
        alone = events[0] if event_id is not None else None
        data = None
        if alone is not None and isinstance(alone.payload, dict):
            data = EventData(alone.payload, alone.headers, alone.idempotency_key, event_id)
        span = partial(PublishSpan, event=data, meter=self.meter, events=len(events))
        current_context, links = contexts.get_current(), _links(given)
        return self._begin(span, f"publish {destination}", SpanKind.PRODUCER, attributes, current_context, links)

    def hand_on(self) -> None:
        """For the rest of this task, let what a handler does be a part of the trace of its event, if it has no span."""
        if not self._linked:
            contexts.attach(HANDED_ON)

    def handle(self, message: Message) -> HandleSpan | None:
        """Begin the span of an attempt, in the trace that the event carries or linked to it.

        None where that trace is not sampled. Where few traces are, nearly every event comes to that, so nothing is done
        for it but to look at the flag.
        """
        text = message.trace_context
        if text is not None and not self._linked and UNSAMPLED.fullmatch(text):
            return None
        context: Context = NOWHERE
        links: Sequence[Link] = ()
        if text is not None and (found := span_context(text)) is not None:
            if self._linked:
                links = (Link(found),)
            elif not found.trace_flags.sampled:
                return None
            else:
                context = trace.set_span_in_context(NonRecordingSpan(found), NOWHERE)
        name, attributes = _handling(message.handler_name, message.event_type)
        span = self._begin(HandleSpan, name, SpanKind.CONSUMER, attributes, context, links)
        if span.recording:
            span.describe(self._tracer, message)
        return span

    def fire(self, schedule: str, slots: int) -> FireSpan:
        """Begin the span of a schedule's slots that are being fired."""
        attributes = {
            **operation("fire", "send"),
            "messaging.outbox.schedule": schedule,
            "messaging.batch.message_count": slots,
        }
        return self._begin(FireSpan, f"fire {schedule}", SpanKind.PRODUCER, attributes, NOWHERE)

    def request(self, method: str, trace_context: str | None) -> RequestSpan:
        """Begin the span of a request, in the current trace or in that of its traceparent header.

        Where the server or the framework is instrumented it is part of that span; otherwise it stands for it.
        """
        current, context, kind = trace.get_current_span(), contexts.get_current(), SpanKind.INTERNAL
        if not current.get_span_context().is_valid:
            kind = SpanKind.SERVER
            caller = None if trace_context is None else span_context(trace_context)
            current = trace.INVALID_SPAN if caller is None else NonRecordingSpan(caller)
            context = trace.set_span_in_context(current, context)
        if _is_unsampled(current):
            return RequestSpan(current)
        name = method if kind is SpanKind.SERVER else f"idempotent {method}"
        named = partial(RequestSpan, name=name)
        return self._begin(named, name, kind, {"http.request.method": method}, context)

    def replay(self, events: int, trace_contexts: Iterable[str]) -> OtelSpan:
        """Begin the span of a replay of so many failed events, linked to the traces of some of them."""
        attributes = {**operation("replay", "send"), "messaging.batch.message_count": events}
        return self._begin(
            OtelSpan, "replay", SpanKind.PRODUCER, attributes, contexts.get_current(), _links(trace_contexts)
        )

    def _begin(
        self,
        kind_of_span: Callable[[trace.Span], _Begun],
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        context: Context,
        links: Sequence[Link] = (),
    ) -> _Begun:
        try:
            span = self._tracer.start_span(name, context, kind, attributes, links)
        except Exception as error:
            # A sampler or a processor of the application: what is traced goes on without it.
            if not self._failed:
                self._failed = True
                logger().warning(
                    "tracing_failed", error=type(error).__name__, remedy="mend the sampler or the processor"
                )
            span = trace.get_current_span(context)
        return kind_of_span(span)


def is_configured() -> bool:
    """Return whether the application, or opentelemetry-instrument, has configured a tracer provider."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _require_provider(field: str, provider: object, method: str) -> None:
    """Refuse what is no provider, like a class, a name or a tracer."""
    if provider is None or (not isinstance(provider, type) and callable(getattr(provider, method, None))):
        return
    shown = f"the class {provider.__name__}" if isinstance(provider, type) else type(provider).__name__
    raise ConfigurationError(field, f"is {shown}", f"pass a provider, which has the method {method}, or None")


def _is_unsampled(span: trace.Span) -> bool:
    """Whether the span belongs to a trace that is not sampled: what follows in it is not sampled either."""
    context = span.get_span_context()
    return context.is_valid and not span.is_recording() and not context.trace_flags.sampled


def _links(trace_contexts: Iterable[str]) -> list[Link]:
    found = (span_context(each) for each in list(trace_contexts)[:_MOST_LINKS])
    return [Link(each) for each in found if each is not None]


@lru_cache(maxsize=1_024)
def _handling(handler: str, event_type: str) -> tuple[str, Attributes]:
    """Return the name of an attempt's span, and the attributes by which a sampler may decide."""
    return f"process {handler}", {
        **operation("process", "process"),
        "messaging.destination.name": event_type,
        "messaging.destination.subscription.name": handler,
    }
