"""Tracing as the library asks for it: spans around what it does, and the trace context that events carry.

The contracts know no tracer; `observability.otel` implements this with the OpenTelemetry API. Where nothing traces,
there is None in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.failure import ErrorReport
from holdfast.handler_tally import DeliveryOutcome, HandlerTally
from holdfast.new_event import NewEvent
from holdfast.telemetry import RequestResult

TallyReader = Callable[[], Mapping[str, HandlerTally]]
LEASE_LOST: Final = ErrorReport("the lease is lost", "lease_lost", "")


class Message(Protocol):
    """An event that a handler gets, as its span describes it."""

    @property
    def event_id(self) -> UUID: ...
    @property
    def event_type(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def trace_context(self) -> str | None: ...
    @property
    def handler_name(self) -> str: ...
    @property
    def attempts(self) -> int: ...


class Span(Protocol):
    """A span that has begun. Inside its `with` block it is the current one; with the block it ends.

    An error that leaves the block is recorded, redacted like every error text. Nothing here raises.
    """

    @property
    def recording(self) -> bool:
        """Whether anything of it is kept: a span that is not sampled only hands its trace context on."""

    @property
    def trace_context(self) -> str | None:
        """What an event carries to its handlers: a W3C traceparent, and after a space the tracestate."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HandleSpan(Span, Protocol):
    """One attempt to handle an event."""

    def conclude(self, outcome: DeliveryOutcome, report: ErrorReport | None = None) -> None:
        """Say how the attempt has ended; the last word counts, and without one it is `delivered`."""

    def settled(self, since: int, batch: int, *, lost: bool) -> None:
        """Record that the delivery was settled, in a batch of so many. `since` is in nanoseconds of the epoch."""


class Attempt(Message, Protocol):
    """An attempt that has ended, as it is measured."""

    @property
    def began_at(self) -> float | None: ...  # None: the handler did not run
    @property
    def ended_at(self) -> float: ...
    @property
    def span(self) -> HandleSpan | None: ...


class Meter(Protocol):
    """Measures what workers and publishers do. What they count is read from them."""

    def watch(self, read: TallyReader) -> Callable[[], None]:
        """Export what a worker counts, until the function that is returned is called."""

    def handled(self, attempts: Sequence[Attempt], error_type: str | None = None) -> None:
        """Record how long handlers have run."""

    def dead_letter(self, handler: str, reason: str, error_type: str | None) -> None:
        """Count a dead letter that was written."""

    def settled(self, seconds: float) -> None:
        """Record how long the database took to settle a batch."""


class RequestSpan(Span, Protocol):
    """A request that may be idempotent, with all its repetitions."""

    def answered(self, status: int, route: str | None, result: RequestResult | None, attempts: int) -> None:
        """Say how the request was answered; without a result it took no part in idempotency."""


class FireSpan(Span, Protocol):
    """Slots of a schedule that are being fired."""

    def drop(self) -> None:
        """Keep nothing of it: the slots were not fired here."""


class Tracing(Protocol):
    """Begins spans. Every method is cheap for what is not sampled, whatever it is given, and never raises."""

    @property
    def meter(self) -> Meter | None:
        """What measures; None where nothing does."""

    def inactive(self) -> str | None:
        """Return why nothing is recorded, if that is known; else None."""

    def publish(self, events: Sequence[NewEvent], event_id: UUID | None = None) -> Span:
        """Begin the span of events that are being published: one, with its id, or a batch."""

    def hand_on(self) -> None:
        """For the rest of this task, let what a handler does be a part of the trace of its event, if it has no span."""

    def handle(self, message: Message) -> HandleSpan | None:
        """Begin the span of an attempt, in the trace that the event carries or linked to it.

        None where that trace is not sampled: nothing is kept of the attempt, and `hand_on` hands its context on.
        """

    def fire(self, schedule: str, slots: int) -> FireSpan:
        """Begin the span of a schedule's slots that are being fired."""

    def request(self, method: str, trace_context: str | None) -> RequestSpan:
        """Begin the span of a request, in the current trace or in that of its traceparent header."""

    def replay(self, events: int, trace_contexts: Iterable[str]) -> Span:
        """Begin the span of a replay of so many failed events, linked to the traces of some of them."""


def require_tracing(tracing: Tracing | None) -> Tracing | None:
    """Return what traces; refuse anything else in its place, like a class, a tracer or a provider."""
    if tracing is None or (not isinstance(tracing, type) and isinstance(tracing, _Traces)):
        return tracing
    name = f"the class {tracing.__name__}" if isinstance(tracing, type) else type(tracing).__name__
    raise ConfigurationError("tracing", f"is {name}", "pass OpenTelemetry() of holdfast.observability.otel")


@runtime_checkable
class _Traces(Protocol):
    publish: Callable[..., Span]
    handle: Callable[..., HandleSpan]
