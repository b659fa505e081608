"""Failed deliveries as events in Sentry, and handlers as transactions of an application that traces with Sentry.

    with SentryObserver(dsn) as sentry:
        worker = Worker(address, registry, observers=(log_fact, sentry))

Each delivery that fails for good becomes one event, grouped by handler and by the error's signature. Its stack trace is
the stored one, its breadcrumbs are the retries that this process has seen. It never contains payloads or local
variables. The observer has its own Sentry client: it sends nothing else of the process, and does not interfere with an
application that uses Sentry itself.

    registry = HandlerRegistry(middleware=[trace_handlers])

adds the handlers to what the application's own client traces, if it does.
"""

from __future__ import annotations

import contextlib
import copy
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from holdfast.installing import require_extra

require_extra("sentry", "sentry_sdk")

import sentry_sdk
from sentry_sdk.tracing_utils import has_tracing_enabled

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.middleware import CallNext
from holdfast.outcome import Outcome
from holdfast.telemetry import Fact, Failed, Retried

if TYPE_CHECKING:
    from sentry_sdk.types import Event

# These override the options of the caller: each would let payloads out, or send something other than failures.
_ALWAYS: Final[dict[str, Any]] = {
    "default_integrations": False,
    "auto_enabling_integrations": False,
    "integrations": [],
    "attach_stacktrace": False,
    "include_local_variables": False,
    "max_breadcrumbs": 0,
    "traces_sample_rate": None,
    "spotlight": False,
}


_DSN_REMEDY: Final = "copy it from the project: https://key@host/1"
# The most deliveries whose retries are remembered, in a few megabytes; of more, only the latest.
_MOST_DELIVERIES: Final = 2_000
_MOST_RETRIES: Final = 10
_LONGEST_CRUMB: Final = 200

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
_OPERATION: Final = "queue.process"
_FRAME: Final = re.compile(r"  (?P<file>\S.*?):(?P<line>[0-9]+) in (?P<function>.+)")


class SentryObserver:
    """An observer for `Worker(observers=...)`. `options` are those of `sentry_sdk.Client`, like `environment`.

    It hands events to the client, whose thread sends them: the worker neither waits for Sentry nor fails with it. The
    client drops events that it cannot send in time.
    """

    facts = frozenset((Retried, Failed))

    def __init__(self, dsn: str, **options: Any) -> None:
        if not isinstance(dsn, str) or not dsn.strip():
            problem = "is empty" if isinstance(dsn, str) else f"is {type(dsn).__name__}, not str"
            raise ConfigurationError("sentry_dsn", problem, _DSN_REMEDY)
        try:
            self._client = sentry_sdk.Client(dsn, **{**options, **_ALWAYS})
        except ValueError:  # BadDsn is one
            raise ConfigurationError("sentry_dsn", "is not a Sentry DSN", _DSN_REMEDY) from None
        self._retries = _Retries()
        self._database: str | None = None

    def of(self, database: str | None) -> SentryObserver:
        """Return this observer for one of several databases: the same client, and events with the tag `database`."""
        one = copy.copy(self)
        one._database = database
        return one

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, Retried):
            self._retries.add(fact)
        elif isinstance(fact, Failed):
            with contextlib.suppress(Exception):
                self._client.capture_event(_event(fact, self._retries.take(fact.delivery_id), self._database))

    def close(self, timeout: float = 2.0) -> None:
        """Send the remaining events, for at most `timeout` seconds, and stop."""
        with contextlib.suppress(Exception):
            self._client.close(timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Retries:
    """The last retries of recently retried deliveries, as breadcrumbs.

    Those of other processes are not known, nor those before a restart: what an event always has is `attempts` and
    `last_error`.
    """

    def __init__(self) -> None:
        self._crumbs: OrderedDict[UUID, deque[tuple[float, int, str, float]]] = OrderedDict()

    def add(self, fact: Retried) -> None:
        crumbs = self._crumbs.pop(fact.delivery_id, None)
        if crumbs is None:
            crumbs = deque(maxlen=_MOST_RETRIES)
        error = fact.last_error.partition("\n")[0][:_LONGEST_CRUMB]
        crumbs.append((time.time(), fact.attempts, error, fact.retry_in))
        self._crumbs[fact.delivery_id] = crumbs
        if len(self._crumbs) > _MOST_DELIVERIES:
            self._crumbs.popitem(last=False)

    def take(self, delivery: UUID) -> list[dict[str, object]]:
        """Return the breadcrumbs of a delivery, the oldest first, and forget them."""
        return [
            {
                "timestamp": at,
                "category": "holdfast.retry",
                "level": "warning",
                "message": f"attempt {attempts}: {error}",
                "data": {"attempts": attempts, "retry_in_s": round(retry_in, 3)},
            }
            for at, attempts, error, retry_in in self._crumbs.pop(delivery, ())
        ]


def _event(fact: Failed, retries: Iterable[dict[str, object]], database: str | None = None) -> Event:
    signature = fact.error_signature or fact.failure_reason
    tags = {
        "event_id": str(fact.event_id),
        "event_type": fact.event_type,
        "source": fact.source,
        "target": fact.target,
        "handler_name": fact.handler_name,
        "attempts": str(fact.attempts),
        "failure_reason": fact.failure_reason,
        "correlation_id": fact.correlation_id,
        "domain_id": None if fact.domain_id is None else str(fact.domain_id),
        "generation": None if fact.generation is None else str(fact.generation),
        "trace_id": fact.trace_id,
        "database": database,
    }
    event: Event = {
        "level": "error",
        "logger": "holdfast",
        "message": f"{fact.handler_name} failed: {(fact.last_error or fact.failure_reason).partition(chr(10))[0]}",
        "fingerprint": ["holdfast", fact.handler_name, signature],
        "tags": {name: value for name, value in tags.items() if value is not None},
        # Sentry cuts tags after 200 characters and does not accept line breaks in them. Of a mapping its client sends
        # ten entries.
        "extra": {
            "event_id": str(fact.event_id),
            "event_type": fact.event_type,
            "source": fact.source,
            "target": fact.target,
            "handler_name": fact.handler_name,
            "attempts": fact.attempts,
            "last_error": fact.last_error,
            "error_signature": fact.error_signature,
            "delivery_id": str(fact.delivery_id),
            "traceback": fact.traceback,
        },
        "contexts": {"delivery": {name: tags[name] for name in ("correlation_id", "domain_id", "generation")}},
    }
    if values := list(retries):
        event["breadcrumbs"] = {"values": values}
    if fact.trace_id is not None:
        event["contexts"]["trace"] = {
            "trace_id": fact.trace_id,
            "span_id": secrets.token_hex(8),
            "op": _OPERATION,
        }
    if frames := list(_frames(fact.traceback)):
        kind, _, value = (fact.last_error or fact.failure_reason).partition("\n")[0].partition(": ")
        event["exception"] = {"values": [{"type": kind, "value": value, "stacktrace": {"frames": frames}}]}
    return event


def _frames(traceback: str | None) -> Iterator[dict[str, object]]:
    """Yield the frames of the error itself, the innermost last, in Sentry's words."""
    lines = (traceback or "").splitlines()[1:]
    own = takewhile(lambda line: line.startswith("  "), lines)
    for line, following in pairwise([*own, ""]):
        if match := _FRAME.fullmatch(line):
            frame = {"filename": match["file"], "function": match["function"], "lineno": int(match["line"])}
            # Only frames of the user's code have the text of their line.
            source = following.removeprefix("    ") if following.startswith("    ") else ""
            yield frame | ({"context_line": source, "in_app": True} if source else {"in_app": False})


# --- for the application's own client ---


def trace_context() -> str | None:
    """The current trace of the application's own client, a W3C traceparent, for `publish(trace_context=...)`."""
    span = sentry_sdk.get_current_span()
    if span is None or not has_tracing_enabled(sentry_sdk.get_client().options):
        return None
    return f"00-{span.trace_id}-{span.span_id}-{'01' if span.sampled else '00'}"


async def trace_handlers(event: EventEnvelope, call_next: CallNext, context: HandlerContext) -> Outcome:
    """A middleware that makes each attempt a transaction of the application's own client, in the event's trace.

    It does nothing while that client does not trace. Nothing of the payload is in it.
    """
    if not has_tracing_enabled(sentry_sdk.get_client().options):
        return await call_next(event)
    headers = {}
    if parent := _TRACEPARENT.match(event.trace_context or ""):
        headers["sentry-trace"] = f"{parent['trace']}-{parent['span']}-{int(parent['flags'], 16) & 1}"
    with sentry_sdk.isolation_scope():
        continued = sentry_sdk.continue_trace(headers, op=_OPERATION, name=context.handler_name, source="task")
        with sentry_sdk.start_transaction(continued) as transaction:
            transaction.set_data("messaging.system", "holdfast")
            transaction.set_data("messaging.destination.name", event.event_type)
            transaction.set_data("messaging.message.id", str(event.event_id))
            transaction.set_data("messaging.message.retry.count", context.attempt - 1)
            outcome = await call_next(event)
            transaction.set_status("ok")
            return outcome
