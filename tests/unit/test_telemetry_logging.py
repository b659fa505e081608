"""Log entries of a worker: which fields, at which level, and never a payload."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import structlog

from holdfast.observability.logging import log_fact
from holdfast.telemetry import Counters, Failed, Notice, Retried

COMMON = {
    "event_id": uuid4(),
    "delivery_id": uuid4(),
    "event_type": "order.placed",
    "source": "shop",
    "target": None,
    "handler_name": "billing.charge",
    "attempts": 3,
    "correlation_id": "c-1",
}


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What a JSON log of an application would hold."""
    before = structlog.get_config()
    stream = io.StringIO()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    yield stream
    structlog.configure(**before)


def entry(stream: io.StringIO) -> dict[str, object]:
    (line,) = stream.getvalue().splitlines()
    found: dict[str, object] = json.loads(line)
    return found


def test_retry(output: io.StringIO) -> None:
    """Operation, attempt, next attempt time and correlation id (RTY-3)."""
    log_fact(Retried(**COMMON, last_error="ConnectionError: no line", retry_in=12.3456))  # type: ignore[arg-type]
    found = entry(output)
    assert (found["event"], found["level"]) == ("delivery_retried", "warning")
    assert found["operation"] == found["handler_name"] == "billing.charge"
    assert (found["attempts"], found["correlation_id"], found["retry_in_s"]) == (3, "c-1", 12.346)
    wait = datetime.fromisoformat(str(found["next_attempt_at"])) - datetime.now(UTC)
    assert timedelta(seconds=11) < wait <= timedelta(seconds=12.35)


def test_failure(output: io.StringIO) -> None:
    """event_id, event_type, source, target, handler_name, last_error, attempts (DLQ-6)."""
    fact = Failed(**COMMON, failure_reason="rejected", last_error=None, error_signature="rejected")  # type: ignore[arg-type]
    log_fact(fact)
    found = entry(output)
    assert (found["event"], found["level"]) == ("delivery_failed", "error")
    expected = {name: str(value) if name.endswith("_id") else value for name, value in COMMON.items()}
    assert {name: found[name] for name in expected} == expected
    assert found["failure_reason"] == "rejected"
    assert found["last_error"] is None


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_notice(output: io.StringIO, level: str) -> None:
    """A notice is an entry of its name and level with its details (OBS-1)."""
    log_fact(Notice(level, "events_unrouted", {"event_type": "order.strange", "target": None, "n": 1}))
    assert entry(output) == {
        "event": "events_unrouted",
        "level": level,
        "event_type": "order.strange",
        "target": None,
        "n": 1,
    }


def test_lines_cannot_be_forged(output: io.StringIO) -> None:
    """Line breaks and escapes in what others wrote stay inside one line of valid JSON (S22)."""
    hostile = 'x\r\n{"event": "forged"}\x1b[31m\u2028'
    fact = Failed(
        **{**COMMON, "event_type": hostile, "source": hostile, "correlation_id": hostile},  # type: ignore[arg-type]
        failure_reason="retry_terminal",
        last_error=hostile,
        error_signature=None,
    )
    log_fact(fact)
    text = output.getvalue()
    assert text.count("\n") == 1
    assert "\r" not in text and "\x1b" not in text
    assert json.loads(text)["last_error"] == hostile


def test_facts_have_no_room_for_payloads() -> None:
    """No fact about a delivery has a field for a payload, headers or a token (S7)."""
    for kind in (Retried, Failed):
        names = {each.name for each in dataclasses.fields(kind)}
        assert not names & {"payload", "headers", "lease_token", "token", "dsn"}
        assert set(COMMON) < names


def test_counters_start_at_nothing() -> None:
    """Every counter is a whole number that starts at zero (OBS-2)."""
    assert set(dataclasses.asdict(Counters()).values()) == {0}
