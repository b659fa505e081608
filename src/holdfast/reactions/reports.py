"""Reports facts about reactions: one for each reaction that has ended."""

from collections.abc import Iterable, Mapping
from typing import TypedDict
from uuid import UUID

from holdfast.envelope import EventEnvelope
from holdfast.observability.observers import Observers
from holdfast.observing import is_sampled
from holdfast.outcome import Done
from holdfast.postgres.reactions import FailedReaction
from holdfast.reactions.attempts import Result
from holdfast.telemetry import LONGEST_CORRELATION, Failed, Handled, trace_id_of


class _Fields(TypedDict):
    domain_id: UUID | None
    trace_id: str | None
    took: float | None


class Reports:
    """Reports the reactions to one event after the other. `took` has the seconds of those that ran."""

    def __init__(self, observe: Observers) -> None:
        self._observe = observe
        self._handled = observe.share(Handled)

    def handled(
        self, event: EventEnvelope, headers: Mapping[str, str], results: Mapping[str, Result], took: Mapping[str, float]
    ) -> None:
        """Report the reactions that have succeeded, now or before."""
        if not self._handled or not is_sampled(event.event_id, self._handled):
            return
        for name, result in results.items():
            if result is None or isinstance(result, Done):
                self._observe(
                    Handled(
                        *_event(event, event.event_id, name, headers),
                        result="duplicate" if result is None else "delivered",
                        **_fields(event, took.get(name)),
                    )
                )

    def failed(
        self,
        event: EventEnvelope,
        headers: Mapping[str, str],
        failed: Iterable[tuple[FailedReaction, UUID]],
        took: Mapping[str, float],
    ) -> None:
        """Report reactions that have failed, each with the id of its dead letter."""
        for each, identity in failed:
            self._observe(
                Failed(
                    *_event(event, identity, each.handler_name, headers),
                    failure_reason=each.reason,
                    last_error=each.error,
                    error_signature=each.signature,
                    traceback=each.traceback,
                    **_fields(event, took.get(each.handler_name)),
                )
            )


def _event(
    event: EventEnvelope, delivery_id: UUID, handler_name: str, headers: Mapping[str, str]
) -> tuple[UUID, UUID, str, str, str | None, str, int, str]:
    correlation = (headers.get("correlation_id") or str(event.event_id))[:LONGEST_CORRELATION]
    return (
        event.event_id, delivery_id, event.event_type, event.source, event.target, handler_name, 1, correlation
    )  # fmt: skip


def _fields(event: EventEnvelope, took: float | None) -> _Fields:
    return {"domain_id": event.domain_id, "trace_id": trace_id_of(event.trace_context), "took": took}
