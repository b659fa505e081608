"""Structured logs of what is published and handled, and of everything that an operator should know.

    logs = LogObserver(service="shop", environment="production", version="1.4.2", successes="info", sample=0.01)
    publisher = Publisher("shop", observers=(logs,))
    worker = Worker(dsn, registry, observers=(logs,))

The entries never contain payloads, headers or keys.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.checks import line, number, one_of
from holdfast.context import current_context
from holdfast.observability.alike import AlikeFailures
from holdfast.observing import USUAL_FACTS, FactKind
from holdfast.telemetry import (
    LONGEST_CORRELATION,
    DeliveryFact,
    Fact,
    Failed,
    Fired,
    Handled,
    LostLease,
    Notice,
    Published,
    Released,
    Retried,
    Snoozed,
    trace_id_of,
)

if TYPE_CHECKING:
    from structlog.typing import EventDict

LogSuccesses = Literal["never", "debug", "info"]


@cache
def logger() -> Any:
    """Return the logger of this library. The first entry imports structlog, which takes longer than asyncpg."""
    import structlog

    return structlog.get_logger("holdfast")


class LogObserver:
    """An observer that writes entries with structlog, of a worker, a publisher or reactions.

    `service`, `environment` and `version` are those of the application, and part of every entry if they are given.
    `successes` is the level of an entry for each event that was published, and for each one that was handled; `sample`
    is the share of them that is written. Retries, failures and notices are always written; of more than twenty failures
    of a kind in a second the others are one entry, with their number as `repeated`. `worker` is the name of the worker
    of this process, and part of every entry with the process id; `database` the name of its database, where the process
    serves several.
    """

    def __init__(
        self,
        *,
        service: str | None = None,
        environment: str | None = None,
        version: str | None = None,
        worker: str | None = None,
        database: str | None = None,
        successes: LogSuccesses = "never",
        sample: float = 1.0,
    ) -> None:
        one_of("LogObserver.successes", successes, get_args(LogSuccesses))
        self.sample = number("LogObserver.sample", sample, 0, 1)
        named = {"service": service, "environment": environment, "version": version}
        self.application: dict[str, str] = {
            name: line(f"LogObserver.{name}", value) for name, value in named.items() if value is not None
        }
        self.process: dict[str, object] = {}
        if worker is not None:
            self.process = {"worker": worker, "pid": os.getpid()}
        if database is not None:
            self.process["database"] = line("LogObserver.database", database)
        self.successes: LogSuccesses = successes
        self._alike = AlikeFailures(self._failure)
        self.facts: frozenset[FactKind] = USUAL_FACTS | {LostLease}
        if successes != "never":
            self.facts |= {Published, Handled, Snoozed, Released, Fired}

    def __call__(self, fact: Fact) -> None:
        match fact:
            case Handled():
                self._success("delivery_handled", self._delivery(fact))
            case Published():
                self._success("event_published", self._event(fact, fact.source))
            case Notice():
                getattr(logger(), fact.level)(fact.name, **{**self.application, **self.process, **fact.details})
            case Retried() | Failed():
                self._alike.add(fact)
            case LostLease():
                logger().warning("lease_lost", **self._delivery(fact))
            case Snoozed():
                self._success("delivery_snoozed", self._delivery(fact) | {"due_in_s": round(fact.due_in, 3)})
            case Released():
                self._success("delivery_released", self._delivery(fact))
            case Fired():
                slots = [slot.isoformat() for slot in fact.slots]
                self._success(
                    "schedule_fired", {**self.application, **self.process, "schedule": fact.schedule, "slots": slots}
                )

    def finish(self) -> None:
        """Write how often failures were repeated that have no entry of their own yet."""
        self._alike.finish()

    def _failure(self, fact: Retried | Failed, count: int) -> None:
        """Write an entry that stands for so many failures."""
        entry = self._delivery(fact)
        if count > 1:
            entry["repeated"] = count
        if isinstance(fact, Failed):
            entry["failure_reason"] = fact.failure_reason
            logger().error("delivery_failed", **entry, **_error(fact))
            return
        entry["operation"] = fact.handler_name
        if fact.held:
            entry["held"] = True
        else:
            next_attempt = datetime.now(UTC) + timedelta(seconds=fact.retry_in)
            entry["next_attempt_at"] = next_attempt.isoformat()
            entry["retry_in_s"] = round(fact.retry_in, 3)
        logger().warning("delivery_retried", **entry, **_error(fact))

    def _success(self, name: str, entry: dict[str, object]) -> None:
        if self.successes == "info":
            logger().info(name, **entry)
        elif self.successes == "debug":
            logger().debug(name, **entry)

    def _event(self, fact: Published | DeliveryFact, context: str) -> dict[str, object]:
        return {
            **self.application,
            **self.process,
            "generation": fact.generation,
            "context": context,
            "correlation_id": fact.correlation_id,
            "trace_id": fact.trace_id,
            "event_id": str(fact.event_id),
            "event_type": fact.event_type,
            "source": fact.source,
            "target": fact.target,
            "domain_id": None if fact.domain_id is None else str(fact.domain_id),
        }

    def _delivery(self, fact: DeliveryFact) -> dict[str, object]:
        entry = self._event(fact, fact.handler_name.partition(".")[0])
        entry["delivery_id"] = str(fact.delivery_id)
        entry["handler_name"] = fact.handler_name
        entry["attempts"] = fact.attempts
        entry["duration_ms"] = None if fact.took is None else round(fact.took * 1e3, 3)
        entry["status_result"] = fact.result
        return entry


def _error(fact: Retried | Failed) -> dict[str, str | None]:
    # `exception` is the name by which structlog's renderers know a traceback.
    traceback = {"exception": fact.traceback} if fact.traceback else {}
    return {"error_signature": fact.error_signature, "last_error": fact.last_error, **traceback}


def add_delivery(_logger: object, _method: str, entry: EventDict) -> EventDict:
    """A processor of structlog: in what a handler logs, name the delivery. It asks only when an entry is written."""
    context = current_context.get()
    if context is None or "event_id" in entry:  # that one is about another event, which the handler publishes
        return entry
    return {
        **({} if context.database is None else {"database": context.database}),
        "event_id": str(context.event_id),
        "handler_name": context.handler_name,
        "attempts": context.attempt,
        "correlation_id": context.correlation_id[:LONGEST_CORRELATION],
        "trace_id": trace_id_of(context.trace_context),
        **entry,
    }


log_fact = LogObserver()
