"""Failed deliveries as events in Sentry.

    with SentryObserver(dsn) as sentry:
        worker = Worker(address, registry, observers=(log_fact, sentry))

Each delivery that fails for good becomes one event, grouped by handler and by the error's signature. It never contains
payloads: no stack trace, no local variables, no breadcrumbs. The observer has its own Sentry client, so it sends
nothing else of the process and does not interfere with an application that uses Sentry itself.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.errors import ConfigurationError
from holdfast.installing import missing_extra
from holdfast.telemetry import Fact, Failed

try:
    import sentry_sdk
except ModuleNotFoundError as error:
    raise missing_extra("sentry", error) from None

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


class SentryObserver:
    """An observer for `Worker(observers=...)`. `options` are those of `sentry_sdk.Client`, like `environment`.

    It hands events to the client, whose thread sends them: the worker neither waits for Sentry nor fails with it. The
    client drops events that it cannot send in time.
    """

    def __init__(self, dsn: str, **options: Any) -> None:
        try:
            self._client = sentry_sdk.Client(dsn, **{**options, **_ALWAYS})
        except ValueError:  # BadDsn is one
            raise ConfigurationError(
                "dsn", "is not a Sentry DSN", "copy it from the project: https://key@host/1"
            ) from None

    def __call__(self, fact: Fact) -> None:
        if isinstance(fact, Failed):
            with contextlib.suppress(Exception):
                self._client.capture_event(_event(fact))

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


def _event(fact: Failed) -> Event:
    signature = fact.error_signature or fact.failure_reason
    tags = {
        "event_id": str(fact.event_id),
        "event_type": fact.event_type,
        "source": fact.source,
        "target": fact.target,
        "handler_name": fact.handler_name,
        "attempts": str(fact.attempts),
        "failure_reason": fact.failure_reason,
    }
    return {
        "level": "error",
        "logger": "holdfast",
        "message": f"{fact.handler_name} failed: {(fact.last_error or fact.failure_reason).partition(chr(10))[0]}",
        "fingerprint": ["holdfast", fact.handler_name, signature],
        "tags": {name: value for name, value in tags.items() if value is not None},
        # Sentry cuts tags after 200 characters and does not accept line breaks in them.
        "extra": {
            **tags,
            "attempts": fact.attempts,
            "last_error": fact.last_error,
            "error_signature": fact.error_signature,
            "delivery_id": str(fact.delivery_id),
            "correlation_id": fact.correlation_id,
        },
    }
