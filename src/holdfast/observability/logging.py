"""Structured logs of what a worker reports. They never contain payloads."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import structlog

from holdfast.telemetry import Fact, Failed, Handled, Notice, Retried

_log = structlog.get_logger("holdfast")


def log_fact(fact: Fact) -> None:
    """The default observer of a worker."""
    match fact:
        case Notice():
            getattr(_log, fact.level)(fact.name, **fact.details)
        case Retried():
            fields = _fields(fact)
            wait = fields.pop("retry_in")
            fields["next_attempt_at"] = (datetime.now(UTC) + timedelta(seconds=fact.retry_in)).isoformat()
            _log.warning(
                "delivery_retried",
                operation=fact.handler_name,
                retry_in_s=round(float(str(wait)), 3),
                **fields,
            )
        case Failed():
            _log.error("delivery_failed", **_fields(fact))
        case Handled():
            fields = _fields(fact)
            del fields["took"], fields["level"]
            getattr(_log, fact.level)("delivery_handled", took_s=round(fact.took, 3), **fields)


def _fields(fact: Retried | Failed | Handled) -> dict[str, object]:
    fields = asdict(fact)
    traceback = fields.pop("traceback", None)
    if traceback:
        fields["exception"] = traceback  # the name by which structlog's renderers know it
    return {
        name: value if value is None or isinstance(value, int | float) else str(value) for name, value in fields.items()
    }
